"""Stamps are held against times taken around the peer's own sends; waits and polls against the selector's record.

What a stamp may be off by is how far two samples of (wall − monotonic) taken around it differ, and the width of
such a sample, for which `SAMPLE_NS` stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certificates import TlsFiles
from llmprofile.clock import (
    NO_STAMP,
    STEP_NS,
    CycleSelector,
    StampedSocket,
    clock_steps,
    keep_stamping,
    monotonic_ns,
    run_precisely,
    stamped_socket,
    stamps_ns,
    stamps_work,
    to_monotonic,
    turn_stamps_on,
    wall_minus_monotonic_ns,
)
from llmprofile.units import MISSING_NS, NS_PER_S

seeded = settings(derandomize=True, deadline=None)

SAMPLE_NS = 100_000
MS = 1_000_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what a socket receives")


@pytest.fixture(scope="module", autouse=True)
def stamping() -> Iterator[None]:
    with keep_stamping():
        if sys.platform == "linux":
            assert stamps_work(10.0)
        yield


@contextlib.contextmanager
def loopback(stamps: bool = True) -> Iterator[tuple[StampedSocket, socket.socket]]:
    """A connected stamped socket and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, StampedSocket() as sock:
        sock.settimeout(10)
        if stamps:
            turn_stamps_on(sock)
        sock.connect(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(10)
            yield sock, peer


def wait_readable(sock: socket.socket) -> None:
    assert select.select([sock], [], [], 10)[0]


def on_monotonic(*stamps: bytes) -> list[int]:
    """Kernel stamps on the monotonic clock, by a sample of the offset taken now."""
    at_ns, offset_ns = wall_minus_monotonic_ns()
    seen_ns = np.full(len(stamps), at_ns)
    return to_monotonic(stamps_ns(b"".join(stamps)), seen_ns, np.array([[at_ns, offset_ns]])).tolist()


# what the socket keeps


def read_by_recv(sock: StampedSocket) -> bytes:
    return sock.recv(100)


def read_by_recv_into(sock: StampedSocket) -> bytes:
    buffer = bytearray(100)
    return bytes(buffer[: sock.recv_into(buffer)])


@linux
@pytest.mark.parametrize("read", [read_by_recv, read_by_recv_into])
def test_a_stamp_is_when_the_kernel_had_the_bytes_not_when_they_were_read(read: Any) -> None:
    with loopback() as (sock, peer):
        for k in range(20):
            before_ns = monotonic_ns()
            peer.sendall(b"%d" % k)
            wait_readable(sock)
            there_ns = monotonic_ns()
            time.sleep(0.002)  # the client is busy: that must not move the stamp
            assert read(sock) == b"%d" % k
            (stamp_ns,) = on_monotonic(sock.stamp)
            assert before_ns - SAMPLE_NS <= stamp_ns <= there_ns + SAMPLE_NS
            assert stamp_ns < sock.asked_ns <= monotonic_ns()


@linux
def test_bytes_that_came_together_share_a_stamp_and_a_merged_read_has_the_last() -> None:
    with loopback() as (sock, peer):
        peer.sendall(b"ab")
        assert sock.recv(1) == b"a"
        first = sock.stamp
        assert sock.recv(1) == b"b"
        assert sock.stamp == first
        peer.sendall(b"c")
        wait_readable(sock)
        time.sleep(0.002)
        last_ns = monotonic_ns()
        peer.sendall(b"d")
        data = b""
        while len(data) < 2:
            wait_readable(sock)
            time.sleep(0.002)
            data += sock.recv(100)
        assert on_monotonic(sock.stamp)[0] >= last_ns - SAMPLE_NS


def test_recv_into_fills_no_more_than_it_may() -> None:
    with loopback() as (sock, peer):
        peer.sendall(b"abcdef")
        wait_readable(sock)
        buffer = bytearray(b"------")
        assert sock.recv_into(buffer, 2) == 2
        assert buffer == b"ab----"
        assert sock.recv_into(memoryview(buffer)[4:]) == 2
        assert buffer == b"ab--cd"


def test_without_stamps_there_is_none_but_the_bytes_come() -> None:
    with loopback(stamps=False) as (sock, peer):
        peer.sendall(b"abc")
        assert sock.recv(100) == b"abc"
        assert sock.stamp == NO_STAMP


def test_an_empty_read_has_no_stamp_and_one_that_failed_keeps_the_last() -> None:
    with loopback() as (sock, peer):
        peer.sendall(b"a")
        wait_readable(sock)
        sock.recv(1)
        kept, asked_ns = sock.stamp, sock.asked_ns
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        assert sock.stamp == kept
        assert sock.asked_ns > asked_ns  # and nothing had come until then
        peer.close()
        wait_readable(sock)
        assert sock.recv(1) == b""
        assert sock.stamp == NO_STAMP


@pytest.mark.parametrize("how", ["send", "sendmsg"])
def test_sends_are_taken_from_before_the_first_to_after_the_last(how: str) -> None:
    with loopback() as (sock, peer):
        assert sock.first_send_ns == sock.last_send_ns == MISSING_NS
        before_ns = monotonic_ns()
        assert (sock.send(b"abc") if how == "send" else sock.sendmsg([b"a", b"bc"])) == 3
        after_ns = monotonic_ns()
        assert before_ns <= sock.first_send_ns < sock.last_send_ns <= after_ns
        first_ns = sock.first_send_ns
        sock.send(b"def")
        assert sock.first_send_ns == first_ns
        assert sock.last_send_ns > after_ns
        sock.mark_request()
        assert sock.first_send_ns == sock.last_send_ns == MISSING_NS
        received = b""
        while len(received) < 6:
            received += peer.recv(100)
        assert received == b"abcdef"


def test_a_large_payload_is_sent_when_its_last_byte_is() -> None:
    payload = memoryview(bytes(8 << 20))
    with loopback() as (sock, peer):
        sock.setblocking(False)
        sock.mark_request()
        sends = 0
        drained = threading.Thread(target=drain, args=(peer, len(payload), 0.02))
        drained.start()
        started_ns = monotonic_ns()
        while payload:
            select.select([], [sock], [], 10)
            with contextlib.suppress(BlockingIOError):
                last_began_ns = monotonic_ns()
                payload = payload[sock.send(payload) :]
                sends += 1
        drained.join(10)
        assert sends > 1
        assert started_ns <= sock.first_send_ns < started_ns + 20 * MS  # nothing was read before 20 ms had passed
        assert sock.last_send_ns >= max(last_began_ns, started_ns + 20 * MS)


def drain(peer: socket.socket, size: int, after_s: float) -> None:
    time.sleep(after_s)
    while size > 0:
        size -= len(peer.recv(1 << 20))


def test_a_send_that_the_kernel_refused_does_not_count() -> None:
    with loopback() as (sock, _):
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                sock.send(bytes(1 << 20))
        sock.mark_request()
        with pytest.raises(BlockingIOError):
            sock.send(b"x")
        assert sock.first_send_ns == sock.last_send_ns == MISSING_NS


def test_a_stamped_socket_is_ready_for_asyncio() -> None:
    with stamped_socket(socket.AF_INET) as sock, stamped_socket(socket.AF_INET, stamps=False) as plain:
        assert sock.gettimeout() == plain.gettimeout() == 0.0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        if sys.platform == "linux":
            assert sock.getsockopt(socket.SOL_SOCKET, 35) == 1
            assert plain.getsockopt(socket.SOL_SOCKET, 35) == 0


def test_what_came_out_of_order_is_counted_by_request_and_known_to_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock, plain = stamped_socket(socket.AF_INET), stamped_socket(socket.AF_INET, stamps=False)
        for each in (sock, plain):
            each.setblocking(True)
            each.connect(listener.getsockname())
            assert each.out_of_order() is None  # no request yet
            each.mark_request()
            with listener.accept()[0] as peer:
                peer.sendall(b"x")
                assert each.recv(1) == b"x"
        kept = None if sys.platform != "linux" else 0
        assert (sock.out_of_order(), plain.out_of_order()) == (kept, None)
        sock.close()
        plain.close()
        assert (sock.out_of_order(), plain.out_of_order()) == (kept, None)
        sock.mark_request()  # of a connection that is gone
        assert sock.out_of_order() is None


# stamps on the monotonic clock


@seeded
@given(times=st.lists(st.tuples(st.integers(1, 2**33), st.integers(0, NS_PER_S - 1)), max_size=20))
def test_stamps_are_struct_timespecs(times: list[tuple[int, int]]) -> None:
    stamps = b"".join(struct.pack("qq", *t) for t in times)
    assert stamps_ns(stamps).tolist() == [s * NS_PER_S + ns for s, ns in times]
    assert stamps_ns(NO_STAMP + stamps)[0] == MISSING_NS


def test_the_offset_is_sampled_when_it_says() -> None:
    before_ns, wall_ns = monotonic_ns(), time.time_ns()
    at_ns, offset_ns = wall_minus_monotonic_ns()
    assert before_ns <= at_ns <= monotonic_ns()
    assert wall_ns <= at_ns + offset_ns + SAMPLE_NS
    assert at_ns + offset_ns <= time.time_ns() + SAMPLE_NS


def test_without_a_step_the_offset_is_interpolated() -> None:
    # the wall clock gains 200 µs in the second between the samples
    offsets = np.array([[0, 10**18], [NS_PER_S, 10**18 + 200_000]])
    seen_ns = np.array([0, NS_PER_S // 2, NS_PER_S, 3 * NS_PER_S])
    wire_ns = to_monotonic(seen_ns + 10**18 + np.array([0, 100_000, 200_000, 200_000]), seen_ns, offsets)
    assert wire_ns.tolist() == seen_ns.tolist()


steps_ns = st.integers(2 * MS, 10 * NS_PER_S)


@st.composite
def stepped_clocks(draw: st.DrawFn) -> tuple[Any, Any, Any, Any]:
    """Truth, wall-clock stamps, readings and samples a second apart, of a wall clock that was set once."""
    step_ns = draw(steps_ns)
    sign = draw(st.sampled_from([-1, 1]))
    start_ns = draw(st.integers(0, 10**15))
    base_ns = draw(st.integers(-(10**18), 2 * 10**18))
    length_ns = draw(st.integers(2, 6)) * NS_PER_S
    before_a_sample = st.integers(0, 50 * MS).map(lambda d: NS_PER_S - d)
    set_at_ns = start_ns + draw(st.integers(1, length_ns) | before_a_sample)
    samples_ns = np.arange(start_ns, start_ns + length_ns + 1, NS_PER_S)
    longest_ns = min(step_ns - MS, 900 * MS)
    when = st.integers(0, length_ns) | st.integers(-50 * MS, 50 * MS).map(lambda d: set_at_ns - start_ns + d)
    near = st.tuples(when, st.integers(0, longest_ns))
    pairs = np.array(draw(st.lists(near, min_size=1, max_size=30)), np.int64)
    truth_ns, seen_ns = start_ns + pairs[:, 0], start_ns + pairs.sum(axis=1)
    offset_ns = base_ns + np.where(truth_ns >= set_at_ns, sign * step_ns, 0)
    sampled_ns = base_ns + np.where(samples_ns >= set_at_ns, sign * step_ns, 0)
    return truth_ns, truth_ns + offset_ns, seen_ns, np.stack([samples_ns, sampled_ns], axis=1)


@seeded
@given(clock=stepped_clocks(), missing=st.integers(0, 5))
def test_stamps_come_through_a_step_of_the_wall_clock(clock: Any, missing: int) -> None:
    truth_ns, wall_ns, seen_ns, offsets = clock
    gone = np.arange(len(wall_ns)) % 6 == missing
    found_ns = to_monotonic(np.where(gone, MISSING_NS, wall_ns), seen_ns, offsets)
    assert found_ns.tolist() == np.where(gone, MISSING_NS, truth_ns).tolist()
    assert clock_steps(offsets) == 1


@pytest.mark.parametrize("step_ns", [-20 * MS, 20 * MS])
def test_a_stamp_from_before_a_step_may_be_read_after_the_sample_that_shows_it(step_ns: int) -> None:
    offsets = np.array([[0, 10**18], [1000 * MS, 10**18 + step_ns], [2000 * MS, 10**18 + step_ns]])
    truth_ns = np.array([995 * MS, 999 * MS, 1001 * MS])  # the clock was set at 998 ms
    wall_ns = truth_ns + 10**18 + np.array([0, step_ns, step_ns])
    for delay_ns in (6 * MS, 18 * MS):
        assert to_monotonic(wall_ns, truth_ns + delay_ns, offsets).tolist() == truth_ns.tolist()


def test_a_stamp_that_waited_longer_than_the_step_is_safe_after_the_next_sample() -> None:
    # read half a second after the sample: it can't be from before the step, though a later time would fit
    offsets = np.array([[0, 0], [1000 * MS, 5 * MS], [2000 * MS, 5 * MS]])
    assert to_monotonic(np.array([1490 * MS + 5 * MS]), np.array([1500 * MS]), offsets).tolist() == [1490 * MS]


@seeded
@given(clock=stepped_clocks(), noise=st.randoms(use_true_random=False))
def test_a_noisy_sample_does_not_turn_a_step_round(clock: Any, noise: Any) -> None:
    truth_ns, wall_ns, seen_ns, offsets = clock
    noisy = offsets + np.array([[0, noise.randint(-20_000, 20_000)] for _ in offsets])
    assert np.abs(to_monotonic(wall_ns, seen_ns, noisy) - truth_ns).max() <= 20_001


@seeded
@given(drift=st.floats(-4e-4, 4e-4), delays=st.lists(st.integers(0, 500 * MS), min_size=1, max_size=20))
def test_a_drift_costs_no_more_than_it_moves_between_stamp_and_reading(drift: float, delays: list[int]) -> None:
    samples_ns = 10**12 + np.arange(5) * NS_PER_S
    offsets = np.stack([samples_ns, np.rint(10**15 + drift * (samples_ns - 10**12)).astype(np.int64)], axis=1)
    seen_ns = 10**12 + np.linspace(5 * 10**8, 4 * 10**9, len(delays)).astype(np.int64)
    truth_ns = seen_ns - np.array(delays)
    wall_ns = truth_ns + 10**15 + np.rint(drift * (truth_ns - 10**12)).astype(np.int64)
    off_ns = np.abs(to_monotonic(wall_ns, seen_ns, offsets) - truth_ns)
    assert (off_ns <= abs(drift) * np.array(delays) + 3).all()


def test_no_reads_are_no_stamps() -> None:
    none = np.zeros(0, np.int64)
    assert len(to_monotonic(none, none, np.array([[0, 0]]))) == 0


@seeded
@given(jumps=st.lists(st.integers(-3 * STEP_NS, 3 * STEP_NS), max_size=20))
def test_clock_steps_are_jumps_of_more_than_a_millisecond(jumps: list[int]) -> None:
    offsets = np.stack([np.arange(len(jumps) + 1) * NS_PER_S, np.cumsum([10**15, *jumps])], axis=1)
    assert clock_steps(offsets) == sum(abs(jump) > STEP_NS for jump in jumps)


# the selector


def waits(selector: CycleSelector, timeouts_s: list[float]) -> list[int]:
    """How much longer than asked each wait took, by the selector's record."""
    for timeout_s in timeouts_s:
        assert selector.select(timeout_s) == []
    entered_ns, returned_ns = (np.array(a) for a in selector.take_cycles())
    return (returned_ns - entered_ns - np.rint(np.array(timeouts_s) * NS_PER_S)).tolist()


@pytest.mark.parametrize("timeout_s", [0.0003, 0.0013, 0.0023])
def test_a_wait_is_never_shorter_than_asked_and_not_rounded_to_milliseconds(timeout_s: float) -> None:
    with CycleSelector() as selector:
        over_ns = waits(selector, [timeout_s] * 40)
    assert min(over_ns) >= -1
    # epoll alone would be 0.7 ms over, every time; how often we are on time is the machine's affair
    assert min(over_ns) < 500_000


@seeded
@given(timeouts_s=st.lists(st.floats(-1, 0) | st.floats(1e-9, 0.003), max_size=5))
def test_polls_are_recorded_in_order(timeouts_s: list[float]) -> None:
    with CycleSelector() as selector:
        for timeout_s in timeouts_s:
            selector.select(timeout_s)
        entered_ns, returned_ns = (a.tolist() for a in selector.take_cycles())
        assert len(entered_ns) == len(returned_ns) == len(timeouts_s)
        assert all(e <= r for e, r in zip(entered_ns, returned_ns, strict=True))
        assert all(r <= e for r, e in zip(returned_ns, entered_ns[1:], strict=False))
        assert [len(a) for a in selector.take_cycles()] == [0, 0]


@pytest.mark.parametrize("timeout_s", [None, 0.0015, 5.0])
def test_what_becomes_ready_ends_a_wait(timeout_s: float | None) -> None:
    with loopback() as (sock, peer), CycleSelector() as selector:
        selector.register(sock, 1, "mine")
        timer = threading.Timer(0.0 if timeout_s == 0.0015 else 0.02, peer.sendall, (b"x",))
        timer.start()
        ready = selector.select(timeout_s)
        while not ready:  # the short wait may end first
            ready = selector.select(timeout_s)
        timer.join()
        assert [(key.data, events) for key, events in ready] == [("mine", 1)]
        entered_ns, returned_ns = selector.take_cycles()
        assert returned_ns[-1] - entered_ns[-1] < 5 * NS_PER_S


def test_a_poll_that_has_not_returned_stays_for_the_next_taking() -> None:
    with CycleSelector() as selector:
        selector.select(0)
        selector.select(0)
        waiting = threading.Thread(target=selector.select, args=(0.3,))
        waiting.start()
        while len(selector.entered_ns) < 3:
            time.sleep(0.001)
        entered_ns, returned_ns = selector.take_cycles()
        assert (len(entered_ns), len(returned_ns)) == (2, 2)
        waiting.join()
        entered_ns, returned_ns = selector.take_cycles()
        assert (len(entered_ns), len(returned_ns)) == (1, 1)
        assert returned_ns[0] - entered_ns[0] >= 299 * MS


@contextlib.contextmanager
def many_files(wanted: int) -> Iterator[None]:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted + 100:
        pytest.skip(f"this process may not open {wanted} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 100), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(wanted):
            stack.enter_context(socket.socket())
        yield


def test_a_selector_beyond_the_descriptors_that_select_takes_still_waits() -> None:
    with many_files(1100), CycleSelector() as selector:
        assert min(waits(selector, [0.0005, 0.003])) >= -1


# asyncio on top


def test_run_precisely_returns_what_the_coroutine_does() -> None:
    async def main(selector: CycleSelector) -> int:
        await asyncio.sleep(0.001)
        return len(selector.returned_ns)

    assert run_precisely(main) >= 1


def test_run_precisely_lets_an_exception_through_and_cleans_up() -> None:
    left: list[Any] = []

    async def main(selector: CycleSelector) -> None:
        left.extend([selector, asyncio.get_running_loop(), asyncio.create_task(asyncio.sleep(60))])
        await asyncio.sleep(0)
        raise LookupError("from inside")

    with pytest.raises(LookupError, match="from inside"):
        run_precisely(main)
    selector, loop, task = left
    assert loop.is_closed()
    assert task.cancelled()
    assert selector.get_map() is None


def test_timers_of_asyncio_never_fire_early_and_fire_in_order() -> None:
    rng = np.random.default_rng(1)

    async def main(_: CycleSelector) -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []
        start_s = loop.time()
        for due_s in (start_s + rng.uniform(0, 0.1, 200)).tolist():
            loop.call_at(due_s, lambda due_s=due_s: fired.append((due_s, loop.time())))
        await asyncio.sleep(0.12)
        return fired

    fired = run_precisely(main)
    assert len(fired) == 200
    assert fired == sorted(fired)
    resolution_s = time.get_clock_info("monotonic").resolution  # asyncio fires what is due within it
    assert all(at_s >= due_s - resolution_s for due_s, at_s in fired)


class Reader(asyncio.Protocol):
    """Keeps (stamp, asked, seen, bytes) of each read, as the stamped client does."""

    def __init__(self, sock: StampedSocket) -> None:
        self.sock = sock
        self.reads: list[tuple[bytes, int, int, bytes]] = []
        self.sent_last_ns = MISSING_NS  # as of the last read: what ends a TLS connection is sent as well
        self.lost = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append((self.sock.stamp, self.sock.asked_ns, monotonic_ns(), data))
        self.sent_last_ns = self.sock.last_send_ns

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


def tls_contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certfile, files.keyfile)
    return server, ssl.create_default_context(cafile=str(files.ca_file))


@contextlib.asynccontextmanager
async def connection(serve: Any, contexts: Any) -> Any:
    """A `Reader` on a stamped socket, connected as the clients connect, and its transport."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=contexts and contexts[0])
    async with server:
        loop = asyncio.get_running_loop()
        sock = stamped_socket(socket.AF_INET)
        await loop.sock_connect(sock, server.sockets[0].getsockname())
        transport, reader = await loop.create_connection(
            lambda: Reader(sock),
            sock=sock,
            ssl=contexts and contexts[1],
            server_hostname="localhost" if contexts else None,
        )
        yield transport, reader
        transport.close()
        await asyncio.wait_for(reader.lost, 10)


@linux
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_asyncio_reads_and_writes_through_the_stamped_socket(tls: bool, tls_files: TlsFiles) -> None:
    sent: list[tuple[int, bytes]] = []
    done: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)
        for k in range(10):
            sent.append((monotonic_ns(), b"data: %d\n\n" % k))
            writer.write(sent[-1][1])
            await writer.drain()
            await asyncio.sleep(0.003)
        done.append(monotonic_ns())
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def main(_: CycleSelector) -> None:
        async with connection(serve, tls_contexts(tls_files) if tls else None) as (transport, reader):
            reader.sock.mark_request()
            before_ns = monotonic_ns()
            transport.write(b"hello")
            assert before_ns <= reader.sock.first_send_ns < reader.sock.last_send_ns <= monotonic_ns()
            await asyncio.wait_for(asyncio.shield(reader.lost), 10)
        check(reader.reads)

    def check(reads: list[tuple[bytes, int, int, bytes]]) -> None:
        assert b"".join(r[3] for r in reads) == b"".join(s[1] for s in sent)
        ends = np.cumsum([len(r[3]) for r in reads])
        stamps = on_monotonic(*(r[0] for r in reads))
        for (sent_ns, _), end in zip(sent, np.cumsum([len(s[1]) for s in sent]), strict=True):
            k = int(np.searchsorted(ends, end))
            assert sent_ns - SAMPLE_NS <= stamps[k] <= reads[k][1] + SAMPLE_NS
            assert reads[k][1] <= reads[k][2]

    run_precisely(main)
    assert len(done) == 1


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_asyncio_marks_the_last_byte_of_a_large_request(tls: bool, tls_files: TlsFiles) -> None:
    size = 16 << 20
    began_reading: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        began_reading.append(monotonic_ns())
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        left = size - 1
        while left:
            left -= len(await reader.read(1 << 20))
        writer.write(b"x")
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def main(_: CycleSelector) -> None:
        async with connection(serve, tls_contexts(tls_files) if tls else None) as (transport, reader):
            reader.sock.mark_request()
            transport.write(bytes(size))
            first_ns = reader.sock.first_send_ns
            assert first_ns <= monotonic_ns()
            await asyncio.wait_for(asyncio.shield(reader.lost), 20)
            assert reader.sock.first_send_ns == first_ns
            assert began_reading[0] < reader.sent_last_ns < reader.reads[-1][2]

    run_precisely(main)
