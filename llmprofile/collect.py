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
from llmprofile.workload import Prompts, Schedule


def write_schedule(folder: Path, schedule: Schedule) -> None:
    """Keep the schedule beside the captures until they are merged."""
    columns = {name: getattr(schedule, name) for name in ("due_s", "prompt_tokens", "output_tokens", "worker", "stage")}
    pq.write_table(pa.table(columns), folder / "capture" / "schedule.parquet")


def _unanswered(folder: Path, meta: dict[str, Any], known: set[int]) -> pa.Table:
    """Rows for the scheduled requests of which nothing was captured: never sent, or lost with their worker."""
    schedule = pq.read_table(folder / "capture" / "schedule.parquet").to_pydict()
    board = Board(folder, meta["asked"]["processes"])
    begun, done = board.column("begun"), board.column("state") == STATES.index("done")
    closed = meta["asked"]["concurrency"] is not None and meta["asked"]["rate_per_s"] is None
    open_ended = closed and meta["asked"]["duration_s"] is not None
    columns = Columns()
    position = np.zeros(len(begun), np.int64)
    for request_id, (worker, due_s) in enumerate(zip(schedule["worker"], schedule["due_s"], strict=True)):
        started = position[worker] < begun[worker]
        position[worker] += 1
        if request_id in known or (open_ended and not started):
            continue
        outcome = "lost" if started and not done[worker] else "unsent"
        due_ns = None if closed or not board.start_ns else board.start_ns + round(due_s * NS_PER_S)
        row = {"request_id": request_id, "worker": worker, "stage": schedule["stage"][request_id]}
        columns.add(row | {"due_ns": due_ns, "outcome": outcome, "error": _WHY_NOT[outcome]})
    return request_table(columns)


_WHY_NOT = {"lost": "its worker died before it was written down", "unsent": "the run ended before it was sent"}


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
    missing = _unanswered(folder, meta, set(answers["request_id"].to_pylist()))
    table = _with_stages(folder, pa.concat_tables([answers, missing]).sort_by("request_id"))
    for name, schema in (("events", EVENTS), ("cycles", CYCLES)):
        write_table(folder / f"{name}.parquet", (t for w in workers for t in _groups(folder, name, w)), schema)
    if meta["asked"]["keep_text"]:
        _write_texts(folder, meta, workers)
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


def _with_stages(folder: Path, table: pa.Table) -> pa.Table:
    """The request table with each request's stage, which its capture doesn't know and the schedule does."""
    stages = pq.read_table(folder / "capture" / "schedule.parquet", columns=["stage"])["stage"]
    column = REQUESTS.get_field_index("stage")
    return table.set_column(column, REQUESTS.field(column), stages.take(table["request_id"]))


def _part(folder: Path, what: str, worker: int) -> pa.Table:
    return pq.read_table(folder / "capture" / f"{what}-{worker}.parquet")


def _groups(folder: Path, what: str, worker: int) -> Iterator[pa.Table]:
    with pq.ParquetFile(folder / "capture" / f"{what}-{worker}.parquet") as file:
        for batch in file.iter_batches(1 << 18):
            yield pa.Table.from_batches([batch])


def _write_texts(folder: Path, meta: dict[str, Any], workers: list[int]) -> None:
    schedule = pq.read_table(folder / "capture" / "schedule.parquet", columns=["prompt_tokens"])
    wanted = schedule["prompt_tokens"].to_pylist()
    prompts = Prompts(meta["asked"]["salt"])
    answers = pa.concat_tables([_part(folder, "texts", w) for w in workers]).sort_by("request_id")
    texts = [prompts.text(i, wanted[i]) for i in answers["request_id"].to_pylist()]
    pq.write_table(answers.append_column("prompt", pa.array(texts, pa.string())), folder / "texts.parquet")


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
        facts.append(parse_worker(folder, worker, meta["asked"]["keep_text"], meta["asked"]["salt"]))
    return merge(folder, facts, meta["ended"] or "interrupted")
