"""When bytes arrived, by the kernel's word; and an event loop that wakes on time and logs its cycles.

The kernel stamps each packet on its way through the receive path (`SO_TIMESTAMPNS`), whatever Python is doing.
`StampedSocket` keeps that stamp for the last read, and the times around its sends; asyncio's selector loop calls
these methods, plain and under TLS. Stamps are wall clock; `to_monotonic` carries them to the monotonic clock.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import selectors
import socket
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmprofile.units import MISSING_NS, NS_PER_S

SO_TIMESTAMPNS = 35
"""`SO_TIMESTAMPNS_OLD` of asm-generic/socket.h: a struct timespec with each message (Python does not name it)."""
NO_STAMP = b"\0" * 16
_CONTROL_BYTES = socket.CMSG_SPACE(16) if hasattr(socket, "CMSG_SPACE") else 0
_PARKED = MISSING_NS
_TFD_TIMER_ABSTIME = 1
ALARM_NS = 5_000
"""A wait that ends this close to when the alarm is set for needs no other: asyncio asks for one time in many ways."""

SLEEP_NS = 20_000
"""A poll that lasts longer than this has slept: one that finds something ready returns within microseconds."""

_OOO = 224
"""Where `tcpi_rcv_ooopack` begins in struct tcp_info (linux/tcp.h; Linux 5.4 and later have it)."""

_READ, _IN = selectors.EVENT_READ, getattr(select, "EPOLLIN", 1)

monotonic_ns = time.monotonic_ns


class StampedSocket(socket.socket):
    """A TCP socket that knows when its last bytes arrived and when its bytes went out.

    Attributes
    ----------
    stamp : bytes
        The kernel's struct timespec of the last read; sixteen zero bytes where there was none.
    asked_ns : int
        CLOCK_MONOTONIC before the last read: what it did not return had not arrived then.
    first_send_ns, last_send_ns : int
        CLOCK_MONOTONIC before the first and after the last `send` since `mark_request`; `MISSING_NS` before.
    counting : bool
        Whether to ask for packets that came out of order.

    Examples
    --------
    >>> with StampedSocket(socket.AF_INET, socket.SOCK_STREAM) as sock:
    ...     sock.stamp == NO_STAMP
    True
    """

    __slots__ = ("_ooo", "_ooo_before", "asked_ns", "counting", "first_send_ns", "last_send_ns", "stamp")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stamp = NO_STAMP
        self.asked_ns = _PARKED
        self.first_send_ns = self.last_send_ns = _PARKED
        self.counting = False
        self._ooo: int | None = None
        self._ooo_before: int | None = None

    def mark_request(self) -> None:
        """Forget the sends of the request before, and what came out of order."""
        self.first_send_ns = self.last_send_ns = _PARKED
        self._ooo = self._ooo_before = out_of_order_packets(self) if self.counting else None

    def out_of_order(self) -> int | None:
        """Packets that came out of order since `mark_request`; None where nobody counted."""
        if self._ooo is None or self._ooo_before is None:
            return None
        now = out_of_order_packets(self)
        self._ooo = self._ooo if now is None else now
        return self._ooo - self._ooo_before

    def close(self) -> None:
        self.out_of_order()  # the kernel forgets it now
        super().close()

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.asked_ns = monotonic_ns()
        data, control, _, _ = self.recvmsg(size, _CONTROL_BYTES, flags)
        self.stamp = control[0][2] if control else NO_STAMP
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self.asked_ns = monotonic_ns()
        count, control, _, _ = self.recvmsg_into([memoryview(buffer)[: nbytes or None]], _CONTROL_BYTES, flags)
        self.stamp = control[0][2] if control else NO_STAMP
        return count

    def send(self, data: Any, flags: int = 0) -> int:
        before_ns = monotonic_ns()
        count = super().send(data, flags)
        self._sent(before_ns)
        return count

    def sendmsg(self, buffers: Any, *args: Any) -> int:
        before_ns = monotonic_ns()
        count = super().sendmsg(buffers, *args)
        self._sent(before_ns)
        return count

    def _sent(self, before_ns: int) -> None:
        if self.first_send_ns == _PARKED:
            self.first_send_ns = before_ns
        self.last_send_ns = monotonic_ns()


def stamped_socket(family: int, stamps: bool = True) -> StampedSocket:
    """A non-blocking `StampedSocket` without Nagle's delay, its kernel stamps turned on if `stamps` is true.

    Examples
    --------
    >>> with stamped_socket(socket.AF_INET) as sock:
    ...     sock.gettimeout()
    0.0
    """
    sock = StampedSocket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.counting = stamps
    if stamps:
        turn_stamps_on(sock)
    return sock


def out_of_order_packets(sock: socket.socket) -> int | None:
    """Packets that came out of order on a TCP connection so far; None where the kernel doesn't count, or it is closed.

    Such a packet is stamped when it comes, but its bytes can be read only when the hole before them is filled.

    Examples
    --------
    >>> with socket.socket() as sock:
    ...     out_of_order_packets(sock) in (0, None)
    True
    """
    if sys.platform != "linux" or sock.fileno() < 0:
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OOO + 4)
    return int.from_bytes(info[_OOO:], sys.byteorder) if len(info) == _OOO + 4 else None


def turn_stamps_on(sock: socket.socket) -> None:
    """Ask the kernel to stamp what `sock` receives; nothing where it can't (not Linux)."""
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def stamps_ns(stamps: bytes) -> npt.NDArray[np.int64]:
    """Joined struct timespecs as wall-clock nanoseconds, `MISSING_NS` for those that are zero.

    Parameters
    ----------
    stamps : bytes
        16 bytes a stamp, as `StampedSocket.stamp` has them.

    Returns
    -------
    ndarray of int64, one a stamp

    Examples
    --------
    >>> stamps_ns(np.array([1, 5]).tobytes()).tolist()
    [1000000005]
    """
    parts = np.frombuffer(stamps, np.int64).reshape(-1, 2)
    total_ns = parts[:, 0] * NS_PER_S + parts[:, 1]
    return np.where(total_ns == 0, MISSING_NS, total_ns)


def stamps_work(wait_s: float = 0.5) -> bool:
    """Whether a kernel stamp comes back on a loopback connection, tried for `wait_s` seconds.

    The kernel turns stamping on lazily: the first packets after the first request on a machine carry none,
    so this sends until one comes back.

    Examples
    --------
    >>> isinstance(stamps_work(), bool)
    True
    """
    if sys.platform != "linux":
        return False
    until_ns = monotonic_ns() + int(wait_s * NS_PER_S)
    with socket.create_server(("127.0.0.1", 0)) as listener, StampedSocket() as sock:
        turn_stamps_on(sock)
        sock.connect(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            while monotonic_ns() < until_ns:
                peer.sendall(b"?")
                sock.recv(1)
                if sock.stamp != NO_STAMP:
                    return True
                time.sleep(0.001)
    return False


def keep_stamping() -> socket.socket:
    """An idle stamped socket; while it lives the kernel keeps stamping on, so that no first packet is missed."""
    sock = StampedSocket()
    turn_stamps_on(sock)
    return sock


def wall_minus_monotonic_ns() -> tuple[int, int]:
    """(CLOCK_MONOTONIC now, wall clock − CLOCK_MONOTONIC), from the narrowest of five bracketed samples.

    Examples
    --------
    >>> at_ns, offset_ns = wall_minus_monotonic_ns()
    >>> abs(at_ns + offset_ns - time.time_ns()) < 1_000_000_000
    True
    """
    best = (1 << 62, 0, 0)
    for _ in range(5):
        before_ns = monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = monotonic_ns()
        middle_ns = (before_ns + after_ns) // 2
        best = min(best, (after_ns - before_ns, middle_ns, wall_ns - middle_ns))
    return best[1], best[2]


STEP_NS = 1_000_000
"""Two samples of the offset that differ by more than this hold a step; slewing moves it by 0.5 ms/s at most."""
SAMPLE_NS = 50_000
"""What a sample of the offset may be off by: a stamp that seems to lie so far after its reading is no surprise."""


def to_monotonic(
    wall_ns: npt.NDArray[np.int64],
    seen_ns: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Kernel stamps on the monotonic clock, through steps of the wall clock.

    Parameters
    ----------
    wall_ns : (n,) int64
        Wall-clock stamps, `MISSING_NS` where there was none.
    seen_ns : (n,) int64
        CLOCK_MONOTONIC when each was read; says which samples of the offset lie around it.
    offsets : (m, 2) int64
        Samples (CLOCK_MONOTONIC, wall − monotonic), ascending, at least one.

    Returns
    -------
    (n,) int64
        Between two samples the offset is interpolated. Near a step the offset is taken that puts the stamp before
        its reading and closest to it, and not after the sample that knows better: right where a stamp waited for
        less than the step and than a sample's distance.

    Examples
    --------
    >>> to_monotonic(np.array([1_000_500]), np.array([600]), np.array([[0, 1_000_000]])).tolist()
    [500]
    """
    offsets = np.vstack([offsets, [np.iinfo(np.int64).max, offsets[-1, 1]]])  # the last one holds on
    since_ns, change_ns = offsets[:, 0] - offsets[0, 0], offsets[:, 1] - offsets[0, 1]
    offset_ns = np.interp(seen_ns - offsets[0, 0], since_ns, change_ns).astype(np.int64) + offsets[0, 1]
    # the samples after and before each reading, and one more: the stamp may be older than the one before
    near = np.maximum(np.searchsorted(offsets[:, 0], seen_ns) - np.arange(3)[:, None], 0)
    until_ns = offsets[np.minimum(near + 1, len(offsets) - 1), 0]
    guesses_ns = wall_ns - offsets[near, 1]
    delays_ns = seen_ns - guesses_ns
    # where none is possible, the lesser evil is the one that errs least
    possible = (delays_ns >= -SAMPLE_NS) & (guesses_ns - SAMPLE_NS <= until_ns)
    best = np.argmin(np.where(possible, delays_ns, STEP_NS * 10**6 + np.abs(delays_ns)), axis=0)
    stepped = np.ptp(offsets[near, 1], axis=0) > STEP_NS
    guess_ns = np.take_along_axis(guesses_ns, best[None], axis=0)[0]
    return np.where(wall_ns == MISSING_NS, MISSING_NS, np.where(stepped, guess_ns, wall_ns - offset_ns))


def clock_steps(offsets: npt.NDArray[np.int64]) -> int:
    """How many steps of the wall clock lie between the samples of its offset.

    Examples
    --------
    >>> clock_steps(np.array([[0, 0], [1_000_000_000, 40], [2_000_000_000, 5_000_000]]))
    1
    """
    return int(np.sum(np.abs(np.diff(offsets[:, 1])) > STEP_NS))


class _Alarm:
    """A kernel timer on CLOCK_MONOTONIC that ends an epoll's wait; nothing needs to read it."""

    def __init__(self, epoll: Any) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no kernel timer")
        # edge-triggered, so that an alarm that rang is not reported again
        epoll.register(self._descriptor, select.EPOLLIN | select.EPOLLET)
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._spec = array("q", bytes(32))  # struct itimerspec: interval, then when
        self._at_ns = 0

    def set(self, now_ns: int, at_ns: int) -> None:
        """Ring at `at_ns`. One that is set to nearly that time is left: setting it costs up to 20 µs in a guest."""
        if now_ns < self._at_ns and abs(at_ns - self._at_ns) <= ALARM_NS:
            return
        self._at_ns = at_ns
        self._spec[2], self._spec[3] = divmod(at_ns, NS_PER_S)
        self._settime(self._descriptor, _TFD_TIMER_ABSTIME, self._spec.buffer_info()[0], None)

    def close(self) -> None:
        os.close(self._descriptor)


def _alarm(selector: selectors.BaseSelector) -> _Alarm | None:
    """The alarm of a selector; None where there is no such timer, or no epoll: other polls don't round."""
    epoll = getattr(selector, "_selector", None)  # selectors has no public way to it; a test of waits fails without
    try:
        return _Alarm(epoll) if isinstance(epoll, getattr(select, "epoll", ())) else None
    except (AttributeError, OSError):
        return None


def _events(mask: int) -> int:
    """An epoll mask as asyncio's: an error or a hang-up wakes both readers and writers, which then see it."""
    return (_READ if mask & ~select.EPOLLOUT else 0) | (selectors.EVENT_WRITE if mask & ~_IN else 0)


class CycleSelector(selectors.DefaultSelector):
    """A selector that waits with microseconds and notes each turn of its loop.

    `epoll_wait` rounds waits up to a millisecond, which would make every send half a millisecond late; a kernel
    timer ends them on time. It is set once for each time that something is due, not once for each wait.

    Attributes
    ----------
    entered_ns, returned_ns : array of int64
        CLOCK_MONOTONIC before and after each poll; `take_cycles` empties them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entered_ns = array("q")
        self.returned_ns = array("q")
        self._alarm = _alarm(self)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now_ns = monotonic_ns()
        self.entered_ns.append(now_ns)
        ready = super().select(timeout) if self._alarm is None else self._poll(now_ns, timeout)
        self.returned_ns.append(monotonic_ns())
        return ready

    def _poll(self, now_ns: int, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """What `EpollSelector.select` does, at half its price: it is paid at every turn, by each client alike."""
        keys = self._fd_to_key  # type: ignore[attr-defined]
        if timeout is not None:
            timeout = max(timeout, 0)  # to an epoll, below zero is for ever
            if timeout > 0:
                self._alarm.set(now_ns, now_ns + int(timeout * NS_PER_S))  # type: ignore[union-attr]
        polled = self._selector.poll(timeout, len(keys) or 1)  # type: ignore[attr-defined]
        # the alarm is not among the keys; a mask is nearly always EPOLLIN alone
        return [(keys[fd], _READ if mask == _IN else _events(mask)) for fd, mask in polled if fd in keys]

    def close(self) -> None:
        super().close()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def take_cycles(self) -> tuple[array[int], array[int]]:
        """(entered, returned) of the cycles that ended since the last call, which forgets them."""
        entered, returned = self.entered_ns, self.returned_ns
        self.entered_ns, self.returned_ns = entered[len(returned) :], array("q")
        del entered[len(returned) :]
        return entered, returned


def run_precisely(main: Callable[[CycleSelector], Any]) -> Any:
    """Run the coroutine that `main` makes of the selector, on a selector loop of its own, and return its result.

    Examples
    --------
    >>> run_precisely(lambda selector: asyncio.sleep(0, "done"))
    'done'
    """
    selector = CycleSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(main(selector))
