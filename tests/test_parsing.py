"""From raw reads to stamps: brackets, running maximum, cycles; against an event loop simulated step by step."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.capture import CaptureWriter, Exchange, Read, pack, read_requests
from llmprofile.parsing import LONGEST_READ, parse_rows, parse_worker
from llmprofile.units import MISSING_NS, NS_PER_S

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
END = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
OFFSET_NS = 1_700_000_000 * NS_PER_S


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stamp(mono_ns: int) -> bytes:
    return struct.pack("qq", *divmod(mono_ns + OFFSET_NS, NS_PER_S))


def simulate(arrivals: list[list[int]], work_ns: int) -> tuple[list[Exchange], tuple[array, array]]:
    """A gated loop: polls, reads every socket with bytes, `work_ns` a read; its exchanges and its cycles.

    `arrivals` holds, for each stream, when its tokens reach the socket. All requests were sent at 0.
    """
    exchanges = [Exchange(k, 0, 0, 0, 1, ended="complete") for k in range(len(arrivals))]
    waiting = [list(times) for times in arrivals]
    entered, returned, now_ns = array("q"), array("q"), 10
    while any(waiting):
        entered.append(now_ns)
        now_ns = max(now_ns + 1, min(times[0] for times in waiting if times) + 1)
        returned.append(now_ns)
        for exchange, times, own in zip(exchanges, waiting, arrivals, strict=True):
            # ready at the poll's return; but a read takes what has come by the time it is made
            if times and times[0] < returned[-1]:
                asked_ns = now_ns
                got = [t for t in times if t < asked_ns]
                del times[: len(got)]
                now_ns += work_ns
                first = HEAD if not exchange.reads else b""
                tokens = b"".join(chunk(TOKEN) for _ in got[: len(got) - (not times)])
                last = b"" if times else chunk(END) + b"0\r\n\r\n"
                exchange.reads.append((stamp(got[-1]), asked_ns, now_ns, first + tokens + last))
                assert own
    return exchanges, (entered, returned)


def parsed(folder: Path, exchanges: list[Exchange], cycles: tuple[array, array]) -> tuple:
    (folder / "capture").mkdir(parents=True)
    writer = CaptureWriter(folder, 0)
    writer.write([pack(e) for e in exchanges], cycles, struct.pack("qq", 0, OFFSET_NS))
    writer.close()
    facts = parse_worker(folder, 0)
    tables = (pq.read_table(folder / "capture" / f"{n}-0.parquet").to_pandas() for n in ("answers", "events", "cycles"))
    return (facts, *tables)


gaps = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@given(streams=st.lists(gaps, min_size=1, max_size=6), work_ns=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_brackets_hold_every_arrival_whatever_the_loop_does(
    tmp_path_factory: object, streams: list[list[int]], work_ns: int
) -> None:
    arrivals = [(np.cumsum(gaps) + 20).tolist() for gaps in streams]
    exchanges, cycles = simulate(arrivals, work_ns)
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    facts, requests, events, turns = parsed(folder, exchanges, cycles)
    assert (requests["outcome"] == "ok").all()
    assert len(events) == sum(map(len, arrivals))
    for k, times in enumerate(arrivals):
        own = events[events["request_id"] == k]
        assert (own["wire_lo_ns"].to_numpy() <= times).all()
        assert (own["wire_ns"].to_numpy() >= times).all()
        # the last event of each read is exact
        last = ~own["read"].duplicated(keep="last").to_numpy()
        assert (own["wire_ns"].to_numpy()[last] == np.array(times)[last]).all()
        assert (own["seen_ns"] > own["wire_ns"]).all()
    assert turns["reads"].sum() == facts["reads"] == sum(len(e.reads) for e in exchanges)
    assert turns["sends"].sum() == 0  # sent before the first poll of the record
    # a token's cycle is the one that read it
    entered = turns["poll_entered_ns"].to_numpy()
    at = entered[events["cycle"].to_numpy()]
    assert (at < events["seen_ns"]).all()


def one(tmp_path: Path, reads: list[Read], cycles: tuple[array, array], **more: object) -> tuple:
    exchange = Exchange(0, 0, 0, 100, 101, ended="complete", reads=reads, **more)
    return parsed(tmp_path, [exchange], cycles)


CYCLES = (array("q", [90, 200, 300, 400]), array("q", [95, 250, 350, 450]))


def test_stamps_never_run_backwards_and_missing_ones_are_counted(tmp_path: Path) -> None:
    reads = [
        (stamp(240), 251, 252, HEAD + chunk(TOKEN)),
        (stamp(230), 351, 352, chunk(TOKEN)),  # reordered on the way: the read before came first
        (b"\0" * 16, 451, 452, chunk(END) + b"0\r\n\r\n"),
    ]
    facts, requests, events, _ = one(tmp_path, reads, CYCLES)
    assert events["wire_ns"].tolist()[:2] == [240, 240]
    assert np.isnan(events["wire_ns"].tolist()[2]) and np.isnan(events["wire_lo_ns"].tolist()[2])
    assert events["seen_ns"].tolist() == [252, 352, 452]
    assert (facts["reads"], facts["unstamped_reads"]) == (3, 1)
    assert requests["last_wire_ns"].isna().all() and requests["e2e_s"].isna().all()
    assert requests["ttft_s"].tolist() == [140e-9]


def test_a_full_read_may_have_left_bytes_behind(tmp_path: Path) -> None:
    big = b": " + b"x" * (LONGEST_READ - len(HEAD) - 14) + b"\n\n"
    first = HEAD + chunk(big)
    first += chunk(TOKEN)[: LONGEST_READ - len(first)]
    assert len(first) == LONGEST_READ
    rest = (HEAD + chunk(big) + chunk(TOKEN))[LONGEST_READ:]
    reads = [(stamp(240), 251, 252, first), (stamp(241), 351, 352, rest + chunk(END) + b"0\r\n\r\n")]
    _, _, events, _ = one(tmp_path, reads, CYCLES)
    # what the second read brought may have waited since the request was sent
    assert events["wire_lo_ns"].tolist() == [100, 100]
    assert events["read"].tolist() == [1, 1]


def test_marks_of_the_conventional_client_are_those_of_the_same_events(tmp_path: Path) -> None:
    comment = b": ping\n\n"
    reads = [(stamp(240), 251, 252, HEAD + chunk(comment + TOKEN + comment + END) + b"0\r\n\r\n")]
    marks = array("q", [260, 261, 262, 263])  # cancelled before it came to [DONE]
    _, requests, events, turns = one(tmp_path, reads, CYCLES, marks=marks)
    assert events[["seen_ns", "handled_ns"]].to_numpy().tolist() == [[260, 261], [262, 263]]
    assert requests["last_handled_ns"].tolist() == [263]
    assert turns["handled"].tolist() == [0, 2, 0, 0]
    assert requests["bounded"].tolist() == [False]  # a bracket of 140 ns is none


def test_packets_that_came_out_of_order_mark_their_request(tmp_path: Path) -> None:
    reads = [(stamp(240), 251, 252, HEAD + chunk(END) + b"0\r\n\r\n")]
    exchanges = [
        Exchange(k, 0, 0, 100, 101, ooo=ooo, ended="complete", reads=reads) for k, ooo in enumerate((0, 3, None))
    ]
    _, requests, _, _ = parsed(tmp_path, exchanges, CYCLES)
    assert requests["reordered"].tolist() == [False, True, None]
    # a capture that is older than the count
    [older] = read_requests(tmp_path, 0)
    del older["ooo"]
    assert parse_rows(older, np.array([[0, OFFSET_NS]]), 0)["reordered"].to_pylist() == [None] * 3


def test_what_is_missing_is_missing(tmp_path: Path) -> None:
    never = Exchange(3, 5, 6, ended="connect_error", error="no route")
    cut = Exchange(4, 5, 6, 100, 101, ended="reset", error="reset by peer", reads=[(stamp(240), 251, 252, HEAD[:30])])
    odd = Exchange(5, 5, 6, 100, 101, ended="bad_framing", error="?", reads=[(stamp(240), 251, 252, b"SSH-2.0\r\n")])
    _, requests, events, _ = parsed(tmp_path, [never, cut, odd], CYCLES)
    assert requests["outcome"].tolist() == ["connect_error", "connect_error", "stream_error"]
    assert requests["error"].notna().all()
    assert requests.loc[0, ["sent_ns", "output_tokens", "status", "connect_s", "ttft_s", "lateness_s"]].isna().all()
    assert events.empty
    assert MISSING_NS not in requests.select_dtypes("number").to_numpy()
