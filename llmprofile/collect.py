"""Captures to a `Run`: parse, derive, merge.

Workers' captures are parsed after the last request, one process each (`parsing.parse_worker`); `merge` joins the
parts. `load` does both for a run that was cut short.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmprofile.capture import STATES, Board
from llmprofile.errors import UsageError
from llmprofile.metrics import rates, summarise
from llmprofile.parsing import Columns, parse_worker, request_table
from llmprofile.records import (
    CYCLES,
    EVENTS,
    OUTCOMES,
    REQUESTS,
    Run,
    read_json,
    read_run,
    write_json,
    write_table,
)
from llmprofile.units import NS_PER_S
from llmprofile.workload import Schedule

_KNOWN_BEFORE = ("stage", "server", "conversation", "turn")
"""What of a request is in the schedule and not in its capture."""


def write_schedule(folder: Path, schedule: Schedule) -> None:
    """Keep the schedule beside the captures until they are merged."""
    columns = {name: getattr(schedule, name) for name in ("due_s", "worker", *_KNOWN_BEFORE)}
    pq.write_table(pa.table(columns), folder / "capture" / "schedule.parquet")


def _unanswered(folder: Path, meta: dict[str, Any], outcomes: dict[int, str]) -> pa.Table:
    """Rows for the scheduled requests of which nothing was captured: never sent, or lost with their worker."""
    schedule = pq.read_table(folder / "capture" / "schedule.parquet", columns=["worker", "due_s", "turn"]).to_pydict()
    board = Board(folder, meta["asked"]["processes"])
    opened, done = board.column("opened"), board.column("state") == STATES.index("done")
    closed = meta["asked"]["concurrency"] is not None and meta["asked"]["rate_per_s"] is None
    open_ended = closed and meta["asked"]["duration_s"] is not None
    columns = Columns()
    position = np.zeros(len(opened), np.int64)
    begun = failed = False
    for request_id, (worker, due_s, turn) in enumerate(zip(*schedule.values(), strict=True)):
        before = outcomes.get(request_id - 1) if turn else None
        if not turn:
            begun, failed = bool(position[worker] < opened[worker]), False
            position[worker] += 1
        failed = failed or before not in (None, "ok", "cancelled")
        if request_id in outcomes or (open_ended and not begun):
            continue
        # of a turn whose user may still have been thinking nobody knows whether it was sent
        lost = not done[worker] and not failed and (before == "ok" if turn else begun)
        why = "failed" if failed else "lost" if lost else "unsent"
        due_ns = None if np.isnan(due_s) or not board.start_ns else board.start_ns + round(due_s * NS_PER_S)
        row = {"request_id": request_id, "worker": worker, "due_ns": due_ns, "outcome": "lost" if lost else "unsent"}
        columns.add(row | {"error": _WHY_NOT[why]})
    return request_table(columns)


_WHY_NOT = {
    "lost": "its worker died before it was written down",
    "unsent": "the run ended before it was sent",
    "failed": "an earlier turn of its conversation failed",
}


def merge(folder: Path, facts: list[dict[str, Any]], ended: str) -> Run:
    """Join the parsed parts into the run's tables, complete `run.json`, and drop the captures.

    Parameters
    ----------
    folder : Path
    facts : list of dict
        What `parse_worker` returned, one a worker.
    ended : {"complete", "stopped", "interrupted", "worker_lost"}
    """
    meta = read_json(folder)
    workers = [f["worker"] for f in facts]
    answers = pa.concat_tables([REQUESTS.empty_table(), *(_part(folder, "answers", w) for w in workers)])
    outcomes = dict(zip(answers["request_id"].to_pylist(), answers["outcome"].to_pylist(), strict=True))
    missing = _unanswered(folder, meta, outcomes)
    table = _with_schedule(folder, pa.concat_tables([answers, missing]).sort_by("request_id"))
    for name, schema in (("events", EVENTS), ("cycles", CYCLES)):
        write_table(folder / f"{name}.parquet", (t for w in workers for t in _groups(folder, name, w)), schema)
    if meta["asked"]["keep_text"]:
        texts = pa.concat_tables([_part(folder, "texts", w) for w in workers])
        pq.write_table(texts.sort_by("request_id"), folder / "texts.parquet")
    write_table(folder / "requests.parquet", [table], REQUESTS)
    board = Board(folder, meta["asked"]["processes"])
    lost_workers = int(np.sum(board.column("state") != STATES.index("done"))) if ended == "worker_lost" else 0
    counts = {o: table["outcome"].to_pylist().count(o) for o in OUTCOMES}
    meta |= {
        "ended": ended,
        "outcomes": {o: n for o, n in counts.items() if n},
        "lost_workers": lost_workers,
        "lost_requests": counts["lost"],
        "resent": int(np.sum(table["resent"].drop_null().to_numpy(zero_copy_only=False))),
        "collecting_peak_memory_bytes": max(f["peak_memory_bytes"] for f in facts),
        "reads": sum(f["reads"] for f in facts),
        "unstamped_reads": sum(f["unstamped_reads"] for f in facts),
        "clock_steps": sum(f["clock_steps"] for f in facts),
    }
    write_json(folder, meta)
    run = read_run(folder)
    meta["rates"] = rates(run, meta["asked"]["rate_per_s"], meta["rates"]["drawn_per_s"] or np.nan)
    meta["summary"] = summarise(run)
    write_json(folder, meta)
    shutil.rmtree(folder / "capture")
    return replace(run, meta=meta)


def _with_schedule(folder: Path, table: pa.Table) -> pa.Table:
    """The request table with what its captures don't know and the schedule does."""
    schedule = pq.read_table(folder / "capture" / "schedule.parquet", columns=list(_KNOWN_BEFORE))
    for name in _KNOWN_BEFORE:
        column = REQUESTS.get_field_index(name)
        table = table.set_column(column, REQUESTS.field(column), schedule[name].take(table["request_id"]))
    return table


def _part(folder: Path, what: str, worker: int) -> pa.Table:
    return pq.read_table(folder / "capture" / f"{what}-{worker}.parquet")


def _groups(folder: Path, what: str, worker: int) -> Iterator[pa.Table]:
    with pq.ParquetFile(folder / "capture" / f"{what}-{worker}.parquet") as file:
        for batch in file.iter_batches(1 << 18):
            yield pa.Table.from_batches([batch])


def _going_on(board: Board) -> bool:
    """Whether the caller of a run, or one of its workers that has not finished, is still there."""
    unfinished = board.column("state") != STATES.index("done")
    pids = {int(pid) for pid in board.column("pid")[unfinished]} | {board.parent_pid}
    return any(map(_alive, pids - {0, os.getpid()}))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and there
    return True


def load(folder: Path | str, progress: Callable[[int, int], None] | None = None) -> Run:
    """The run of a folder; one that was cut short is first collected from what its workers had written.

    Parameters
    ----------
    folder : path
    progress : callable, optional
        Called with (workers parsed, workers in all) while captures are being parsed.

    Raises
    ------
    UsageError
        It is no run folder, or the run in it is still going on.
    """
    folder = Path(folder)
    meta = read_json(folder)
    if not (folder / "capture" / "board.bin").exists():
        return read_run(folder)
    processes, facts = meta["asked"]["processes"], []
    if _going_on(Board(folder, processes)):
        raise UsageError(f"the run in {folder} is still going on; wait for it, or stop it")
    for worker in range(processes):
        if progress is not None:
            progress(worker, processes)
        facts.append(parse_worker(folder, worker, meta["asked"]["keep_text"]))
    return merge(folder, facts, meta["ended"] or "interrupted")
