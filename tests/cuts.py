"""Recorded streams without sockets: cut at any byte into two reads with stamps, parsed as a run's are."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.parquet as pq

from llmprofile.answers import read_stream
from llmprofile.capture import CaptureWriter, Exchange, pack
from llmprofile.parsing import LONGEST_READ, parse_worker
from llmprofile.records import to_frame
from llmprofile.sse import event_parser
from llmprofile.units import NS_PER_S

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((Path(__file__).parent / "data/streams.json").read_text())
}
EVENT_STREAM = {"Content-Type": "text/event-stream"}
JSON_LINES = {"Content-Type": "application/x-ndjson"}
FRAMINGS = ("chunked", "length", "close")


def segments(case: dict[str, Any]) -> tuple[list[float], list[bytes]]:
    """When each piece of a recorded stream came, and the pieces."""
    return [at_s for at_s, _ in case["segments"]], [base64.b64decode(data) for _, data in case["segments"]]


def events_of(*payloads: Any, done: bool = True) -> list[bytes]:
    """Payloads as server-sent events."""
    return [b"data: " + json.dumps(p).encode() + b"\n\n" for p in payloads] + [b"data: [DONE]\n\n"] * done


def lines_of(*payloads: Any) -> list[bytes]:
    """Payloads as JSON lines."""
    return [json.dumps(p).encode() + b"\n" for p in payloads]


@dataclass(frozen=True)
class Raw:
    """The bytes of a response, and where its body is in them."""

    data: bytes
    head: int
    body: bytes
    media: str
    body_starts: npt.NDArray[np.int64]
    raw_starts: npt.NDArray[np.int64]
    closed: bool

    def after(self, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The offset just after each of these bytes of the body, given likewise."""
        piece = np.searchsorted(self.body_starts, ends - 1, side="right") - 1
        return self.raw_starts[piece] + ends - self.body_starts[piece]


def raw_response(pieces: list[bytes], headers: dict[str, str], framing: str = "chunked", status: int = 200) -> Raw:
    """A response whose body comes in these pieces, each a chunk when it is chunked."""
    how = {"chunked": "Transfer-Encoding: chunked\r\n", "length": f"Content-Length: {sum(map(len, pieces))}\r\n"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    data = head = f"HTTP/1.1 {status} Status\r\n{lines}{how.get(framing, '')}\r\n".encode()
    starts = []
    for piece in filter(None, pieces):
        data += b"%x\r\n" % len(piece) if framing == "chunked" else b""
        starts.append(len(data))
        data += piece + (b"\r\n" if framing == "chunked" else b"")
    data += b"0\r\n\r\n" if framing == "chunked" else b""
    body_starts = np.cumsum([0, *map(len, filter(None, pieces))])[:-1]
    media = headers.get("Content-Type", "")
    starts_at = np.array(starts, np.int64)
    return Raw(data, len(head), b"".join(pieces), media, body_starts, starts_at, framing == "close")


# One loop for all: a request sent at 100 ns, two reads in successive cycles, each stamped, asked for and seen at:
SENT_NS, WIRE_NS, ASKED_NS, SEEN_NS = 100, (200, 320), (215, 335), (220, 340)
_CYCLES = (array("q", [90, 110, 230]), array("q", [105, 210, 330]))
_WALL_NS = 1_700_000_000 * NS_PER_S


def _stamp(at_ns: int) -> bytes:
    return struct.pack("qq", *divmod(at_ns + _WALL_NS, NS_PER_S))


def parse_cut(raw: Raw, cuts: Iterable[int], folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The request and event tables of a response that came in two reads; a request for each place of the cut."""
    (folder / "capture").mkdir(parents=True)
    writer, clock = CaptureWriter(folder, 0), struct.pack("qq", 0, _WALL_NS)
    rows = []
    for number, cut in enumerate(cuts):
        parts = (raw.data[:cut], raw.data[cut:])
        reads = [(_stamp(WIRE_NS[i]), ASKED_NS[i], SEEN_NS[i], part) for i, part in enumerate(parts) if part]
        ended = "eof" if raw.closed else "complete"
        rows.append(pack(Exchange(number, 0, SENT_NS, SENT_NS, SENT_NS, ended=ended, reads=reads)))
    writer.write(rows, _CYCLES, clock)
    writer.close()
    parse_worker(folder, 0, keep_text=True)
    part = folder / "capture"
    requests, texts = (to_frame(pq.read_table(part / f"{name}-0.parquet")) for name in ("answers", "texts"))
    return requests.merge(texts, on="request_id"), to_frame(pq.read_table(part / "events-0.parquet"))


SAME = ("outcome", "error", "status", "output_tokens", "token_source", "prompt_tokens", "reasoning_tokens", "answer")


def check_cuts(raw: Raw, folder: Path, cuts: Iterable[int] | None = None) -> tuple[pd.Series, pd.DataFrame]:
    """Cut a response at every byte: what it means never changes, and times are those of the read with the last byte.

    Returns the row and the events of the response in one read.
    """
    cuts = np.array([len(raw.data), *(range(1, len(raw.data)) if cuts is None else cuts)])
    requests, events = parse_cut(raw, cuts.tolist(), folder)
    whole = requests.iloc[0]
    for name in (n for n in SAME if n in requests):
        assert requests[name].nunique(dropna=False) == 1, name
    held = events.groupby("request_id").size().reindex(range(len(cuts)), fill_value=0)
    assert held.nunique() == 1
    n = int(held.iloc[0])
    own = events.head(n)
    if n:
        for name in ("tokens", "bytes"):
            assert (_matrix(events, name, n) == own[name].to_numpy(np.int64)).all(), name
        check_times(raw, cuts, requests, events, n)
    else:
        assert requests["ttft_s"].isna().all()
    return whole, own


def check_times(raw: Raw, cuts: npt.NDArray[np.int64], requests: pd.DataFrame, events: pd.DataFrame, n: int) -> None:
    """Every stamp, for every cut, against where the last byte of its event lies."""
    read = (raw.after(token_ends(raw)) > cuts[:, None]).astype(int)
    assert (_matrix(events, "read", n) == read).all()
    for name, of_read in (("wire_ns", WIRE_NS), ("seen_ns", SEEN_NS)):
        assert (_matrix(events, name, n) == np.array(of_read)[read]).all(), name
    # at the earliest when the read before was made, which left nothing unless it took as much as a read can
    left_some = cuts[:, None] >= LONGEST_READ
    lo_ns = np.where((read == 0) | left_some, SENT_NS, ASKED_NS[0])
    assert (_matrix(events, "wire_lo_ns", n) == lo_ns).all()
    assert (_matrix(events, "cycle", n) == 1 + read).all()
    for name, of_read in (("ttft_s", WIRE_NS), ("ttft_seen_s", SEEN_NS)):
        assert np.allclose(requests[name], (np.array(of_read)[read[:, 0]] - SENT_NS) / 1e9, rtol=1e-12), name
    assert np.allclose(requests["e2e_s"], (np.array(WIRE_NS)[read[:, -1]] - SENT_NS) / 1e9, rtol=1e-12)
    head_read = (cuts < raw.head).astype(int)
    assert (requests["headers_ns"].to_numpy(np.int64) == np.array(WIRE_NS)[head_read]).all()


def token_ends(raw: Raw) -> npt.NDArray[np.int64]:
    """Where in the body each token's event ends, found with the body in one piece."""
    parser = event_parser(raw.media)
    assert parser is not None
    return np.array(read_stream(200, parser.feed(raw.body) + parser.close(), True).ends, np.int64)


def _matrix(events: pd.DataFrame, name: str, n: int) -> npt.NDArray[np.int64]:
    """A column of the event table, (cuts, n)."""
    return events[name].to_numpy(np.int64).reshape(-1, n)
