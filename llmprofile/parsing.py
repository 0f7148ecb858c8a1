"""A worker's capture to tables: what the raw bytes of each request meant, and when each token came.

Batch by batch, so that memory stays bounded. Bytes are cut into reads, reads into an HTTP response, its body into
events, events into tokens; a token's time is that of the read which brought its last byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from llmprofile.answers import Answer, server_times_s
from llmprofile.capture import read_pairs, read_requests
from llmprofile.clock import clock_steps, stamps_ns, to_monotonic
from llmprofile.http1 import Response, parse
from llmprofile.latency import CLOCKS, derive_latencies, is_bounded
from llmprofile.machine import peak_memory_bytes
from llmprofile.reading import CLIENT_OUTCOMES, read_response
from llmprofile.records import CYCLES, EVENTS, REQUESTS
from llmprofile.units import MISSING_NS, ns_to_s

Ints = npt.NDArray[np.int64]
LONGEST_READ = 256 * 1024
"""asyncio reads at most this much at once: a read of this length may have left bytes behind it."""
_FIRSTS = ("content", "reasoning")
"""Kinds of token whose first one has times of its own."""
_BESIDES = ("exact", "streamed", *(f"{kind}_{clock}_ns" for kind in _FIRSTS for clock in CLOCKS))


@dataclass(frozen=True)
class _Stamps:
    """All reads of a batch of requests, one after another."""

    starts: Ints  # of each request's reads; one more than requests
    wire_ns: Ints
    wire_lo_ns: Ints
    seen_ns: Ints
    cycle: Ints

    def of(self, k: int) -> slice:
        return slice(int(self.starts[k]), int(self.starts[k + 1]))


def _batch_stamps(batch: dict[str, list[Any]], cycles: Ints, offsets: Ints) -> _Stamps:
    seen_ns = np.frombuffer(b"".join(batch["seen_ns"]), np.int64)
    wall_ns = stamps_ns(b"".join(batch["stamps"]))
    sizes = np.frombuffer(b"".join(batch["sizes"]), np.int32)
    counts = np.array([len(b) // 8 for b in batch["seen_ns"]], np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    wire_ns = to_monotonic(wall_ns, seen_ns, offsets) if len(seen_ns) else wall_ns
    wire_ns = _running_maximum(wire_ns, np.repeat(np.arange(len(counts)), counts))
    cycle = np.searchsorted(cycles[:, 1], seen_ns, side="right") - 1
    sent_ns = np.repeat(np.array(batch["sent_ns"], np.int64), counts)
    first = np.zeros(len(seen_ns), bool)
    first[starts[:-1][counts > 0]] = True
    asked_ns = np.frombuffer(b"".join(batch["asked_ns"]), np.int64)
    lo_ns = _earliest_ns(asked_ns, sizes, cycle, cycles[:, 0], sent_ns, first)
    # converting between clocks errs by a fraction of a microsecond, which must not turn a bracket inside out
    return _Stamps(starts, wire_ns, np.minimum(lo_ns, wire_ns), seen_ns, cycle)


def _running_maximum(wire_ns: Ints, owner: Ints) -> Ints:
    # per request: a shift that grows with the owner keeps one request's maximum from reaching the next
    if not len(wire_ns):
        return wire_ns
    base_ns = wire_ns[wire_ns != MISSING_NS].min(initial=0)
    span_ns = int(np.max(np.where(wire_ns == MISSING_NS, 0, wire_ns - base_ns))) + 1
    lifted = np.where(wire_ns == MISSING_NS, -1, wire_ns - base_ns) + owner * span_ns
    highest = np.maximum.accumulate(lifted) - owner * span_ns + base_ns
    return np.where(wire_ns == MISSING_NS, MISSING_NS, highest)


def _earliest_ns(asked_ns: Ints, sizes: Any, cycle: Ints, entered_ns: Ints, sent_ns: Ints, first: Any) -> Ints:
    """When the bytes of each read can have arrived at the earliest (`wire_lo`)."""
    before = np.concatenate([[0], asked_ns[:-1]])[: len(asked_ns)]
    left_some = np.concatenate([[False], sizes[:-1] >= LONGEST_READ])[: len(asked_ns)]
    follows = np.concatenate([[False], cycle[1:] - cycle[:-1] <= 1])[: len(asked_ns)] & ~first
    # the poll before this read's found nothing here, unless it is the one that brought the read before
    polled_ns = entered_ns[np.maximum(cycle - 1, 0)] if len(entered_ns) else np.zeros_like(asked_ns)
    lo_ns = np.where(follows, before, np.where(cycle >= 1, polled_ns, 0))
    lo_ns = np.where(left_some & ~first, 0, lo_ns)
    return np.maximum(lo_ns, sent_ns)


class Columns:
    """The request table as lists that grow a row at a time, with what is needed to derive its figures."""

    def __init__(self) -> None:
        self.lists: dict[str, list[Any]] = {name: [] for name in (*REQUESTS.names, *_BESIDES)}

    def add(self, row: dict[str, Any]) -> None:
        for name, column in self.lists.items():
            column.append(row.get(name))

    def ints(self, name: str) -> Ints:
        return np.array([MISSING_NS if v is None else v for v in self.lists[name]], np.int64)


def parse_worker(folder: Path, worker: int, keep_text: bool = False) -> dict[str, Any]:
    """Parse what a worker captured into Parquet parts beside its capture; counts that the run reports.

    Parameters
    ----------
    folder : Path
        The run folder.
    worker : int
    keep_text : bool
        Whether to keep prompts and answers.
    """
    cycles, offsets = read_pairs(folder, "cycles", worker), read_pairs(folder, "clock", worker)
    cycles = cycles[np.argsort(cycles[:, 1], kind="stable")]
    counts = {name: np.zeros(len(cycles), np.int64) for name in ("reads", "handled", "sends")}
    facts = {"worker": worker, "reads": 0, "unstamped_reads": 0, "clock_steps": clock_steps(offsets), "bounded": 0}
    part = folder / "capture"
    with (
        pq.ParquetWriter(part / f"events-{worker}.parquet", EVENTS) as events,
        pq.ParquetWriter(part / f"answers-{worker}.parquet", REQUESTS) as requests,
        pq.ParquetWriter(part / f"texts-{worker}.parquet", _TEXTS) as texts,
    ):
        for batch in read_requests(folder, worker):
            stamps = _batch_stamps(batch, cycles, offsets)
            table, event_table, answers = _parse_batch(batch, stamps, worker)
            requests.write_table(table)
            events.write_table(event_table)
            if keep_text:
                said = {"request_id": batch["request_id"], "answer": [a.text if a else None for a in answers]}
                texts.write_table(pa.table(said | {"prompt": batch["prompt"]}, _TEXTS))
            _count_cycles(counts, cycles, stamps, batch, event_table)
            facts["reads"] += len(stamps.seen_ns)
            facts["unstamped_reads"] += int(np.sum(stamps.wire_ns == MISSING_NS))
    rows = {"worker": np.full(len(cycles), worker), "poll_entered_ns": cycles[:, 0], "poll_returned_ns": cycles[:, 1]}
    pq.write_table(pa.table(rows | counts, CYCLES), part / f"cycles-{worker}.parquet")
    return facts | {"peak_memory_bytes": peak_memory_bytes()}


_TEXTS = pa.schema([("request_id", pa.int64()), ("answer", pa.string()), ("prompt", pa.string())])


def _count_cycles(counts: dict[str, Ints], cycles: Ints, stamps: _Stamps, batch: dict[str, Any], events: Any) -> None:
    """Add a batch's reads, handled events and sends to the cycles in which they happened."""
    handled_ns = events["handled_ns"].drop_null().to_numpy()
    sent_ns = np.array(batch["sent_ns"], np.int64)
    times = {"reads": stamps.seen_ns, "handled": handled_ns, "sends": sent_ns[sent_ns != MISSING_NS]}
    for name, at_ns in times.items():
        turn = np.searchsorted(cycles[:, 1], at_ns, side="right") - 1
        np.add.at(counts[name], turn[turn >= 0], 1)


def parse_rows(rows: dict[str, list[Any]], offsets: Ints, worker: int) -> pa.Table:
    """The request table of some captured rows without their worker's cycles: every bracket begins at the send.

    Parameters
    ----------
    rows : dict of str to list
        Columns, as `capture.read_requests` gives them.
    offsets : (m, 2) int64
        Samples of the wall clock's offset, at least one.
    worker : int
    """
    cycles = np.zeros((0, 2), np.int64)
    return _parse_batch(rows, _batch_stamps(rows, cycles, offsets), worker)[0]


def _parse_batch(
    batch: dict[str, list[Any]], stamps: _Stamps, worker: int
) -> tuple[pa.Table, pa.Table, list[Answer | None]]:
    columns, parts, answers = Columns(), [], []
    for k, request_id in enumerate(batch["request_id"]):
        exchange = {name: batch[name][k] for name in batch}
        row, events, answer = _parse_exchange(exchange, stamps, stamps.of(k))
        columns.add({"worker": worker, "stage": 0, "request_id": request_id} | row)
        answers.append(answer)
        if events is not None:
            parts.append(events)
    return request_table(columns), _event_table(parts), answers


def _parse_exchange(
    exchange: dict[str, Any], stamps: _Stamps, own: slice
) -> tuple[dict[str, Any], dict[str, Any] | None, Answer | None]:
    reads = _cut(exchange["bytes"], np.frombuffer(exchange["sizes"], np.int32))
    response = parse(reads, eof=exchange["ended"] in ("complete", "eof"))
    connect_ns = exchange["connect_ns"]
    row = {name: exchange[name] for name in ("due_ns", "begun_ns", "sent_ns", "sent_last_ns", "reused", "resent")}
    # captures of older versions lack it
    row["reordered"] = None if (ooo := exchange.get("ooo")) is None else ooo > 0
    row |= {"status": response.status, "connect_s": None if connect_ns == MISSING_NS else ns_to_s(connect_ns)}
    outcome, error = exchange["ended"], exchange["error"]
    if response.head_read is None:
        if outcome == "bad_framing" or response.error:
            return row | {"outcome": "stream_error", "error": response.error or error}, None, None
        return (
            row | {"outcome": outcome if outcome in CLIENT_OUTCOMES else "connect_error", "error": error},
            None,
            None,
        )
    answer, all_ends = read_response(response)
    if outcome not in CLIENT_OUTCOMES:
        outcome, error = _outcome(answer, response.error, error)
    row |= {"outcome": outcome, "error": error, "headers_ns": stamps.wire_ns[own][response.head_read]}
    row |= _said(answer)
    if response.complete:
        row["eof_ns"] = stamps.wire_ns[own][-1]
    marks = np.frombuffer(exchange["marks"], np.int64).reshape(-1, 2)
    if answer.ends:
        events = _events(answer, all_ends, response, stamps, own, marks, exchange["request_id"])
        return row | _token_stamps(events, answer), events, answer
    if response.complete and all_ends is None:
        row |= _body_stamps(stamps, own, marks)
    return row, None, answer


def _outcome(answer: Answer, framing: str | None, error: str | None) -> tuple[str, str | None]:
    """How an answer ended and why: `framing` is what is wrong with its HTTP body, `error` what the client saw."""
    if answer.outcome != "truncated":
        return answer.outcome, answer.error
    # a body that can't be read on is none that was cut short
    return ("stream_error", framing) if framing else ("truncated", answer.error or error)


def _said(answer: Answer) -> dict[str, Any]:
    """What a server says of its own answer: tokens and times."""
    ttft_s, generation_s = server_times_s(answer.timings)
    return {
        "output_tokens": answer.output_tokens,
        "token_source": answer.token_source,
        "prompt_tokens": answer.usage.prompt_tokens if answer.usage else None,
        "reasoning_tokens": answer.usage.reasoning_tokens if answer.usage else None,
        "streamed": answer.streamed_tokens,
        "server_ttft_s": ttft_s,
        "server_generation_s": generation_s,
    }


def _cut(data: bytes, sizes: Any) -> list[bytes]:
    ends = np.cumsum(sizes).tolist()
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def _events(
    answer: Answer,
    all_ends: list[int] | None,
    response: Response,
    stamps: _Stamps,
    own: slice,
    marks: Ints,
    request_id: int,
) -> dict[str, Any]:
    """The token events of one request as columns, `exact` among them."""
    ends = np.array(answer.ends)
    body_ends = np.array(response.body_ends)
    read = np.searchsorted(body_ends, ends)
    seen_ns = stamps.seen_ns[own][read]
    handled_ns = np.full(len(ends), MISSING_NS)
    if len(marks):
        event = np.searchsorted(np.array(all_ends), ends)
        known = event < len(marks)
        event = np.minimum(event, len(marks) - 1)
        seen_ns = np.where(known, marks[event, 0], MISSING_NS)
        handled_ns = np.where(known, marks[event, 1], MISSING_NS)
    return {
        "request_id": np.full(len(ends), request_id),
        "read": read,
        "cycle": stamps.cycle[own][read],
        "wire_lo_ns": stamps.wire_lo_ns[own][read],
        "wire_ns": stamps.wire_ns[own][read],
        "seen_ns": seen_ns,
        "handled_ns": handled_ns,
        "tokens": np.array(answer.counts),
        "bytes": np.array(answer.sizes),
        "exact": body_ends[read] == ends,
    }


def _token_stamps(events: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """Stamps of the first, the first of each kind, and the last token of one request."""
    clocks = ("wire", "wire_lo", "seen", "handled")
    row = {f"first_{c}_ns": events[f"{c}_ns"][0] for c in clocks}
    row |= {f"last_{c}_ns": events[f"{c}_ns"][-1] for c in clocks}
    for kind in set(_FIRSTS).intersection(answer.kinds):
        first = answer.kinds.index(kind)
        row |= {f"{kind}_{c}_ns": events[f"{c}_ns"][first] for c in CLOCKS}
    return row | {"exact": bool(events["exact"][0])}


def _body_stamps(stamps: _Stamps, own: slice, marks: Ints) -> dict[str, Any]:
    """The end of an answer that is not a stream: its last byte."""
    row = {"last_wire_ns": stamps.wire_ns[own][-1], "last_wire_lo_ns": stamps.wire_lo_ns[own][-1]}
    if len(marks):
        return row | {"last_seen_ns": marks[-1, 0], "last_handled_ns": marks[-1, 1]}
    return row | {"last_seen_ns": stamps.seen_ns[own][-1]}


def request_table(columns: Columns) -> pa.Table:
    """The rows as a table, their latencies derived."""
    names = [n for n in columns.lists if n.endswith("_ns")]
    stamps = {name: columns.ints(name) for name in names}
    tokens = {
        n: np.array([-1 if v is None else v for v in columns.lists[n]], np.int64) for n in ("streamed", "output_tokens")
    }
    derived = derive_latencies(stamps, tokens["streamed"], tokens["output_tokens"])
    exact = np.array([bool(v) for v in columns.lists["exact"]], bool)
    first_ns, lo_ns = stamps["first_wire_ns"], stamps["first_wire_lo_ns"]
    bounded = is_bounded(first_ns, lo_ns, exact, derived["ttft_s"])
    arrays = {}
    for field in REQUESTS:
        if field.name == "bounded":
            arrays["bounded"] = pa.array(bounded, mask=first_ns == MISSING_NS)
        elif field.name in derived:
            arrays[field.name] = pa.array(derived[field.name])
        elif field.name in stamps:
            arrays[field.name] = pa.array(stamps[field.name], mask=stamps[field.name] == MISSING_NS)
        elif field.type == pa.float64():
            arrays[field.name] = pa.array([np.nan if v is None else v for v in columns.lists[field.name]])
        else:
            arrays[field.name] = pa.array(columns.lists[field.name], field.type)
    return pa.table(arrays, REQUESTS)


def _event_table(parts: list[dict[str, Any]]) -> pa.Table:
    if not parts:
        return EVENTS.empty_table()
    joined = {name: np.concatenate([p[name] for p in parts]) for name in EVENTS.names}
    return pa.table({n: pa.array(v, mask=v == MISSING_NS) for n, v in joined.items()}, EVENTS)
