"""Runs that were cut short, collected from what their workers had written."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile.capture import STATES, Board, CaptureWriter, Exchange, capture_path, pack
from llmprofile.collect import write_schedule
from llmprofile.records import write_json
from llmprofile.workload import ClosedLoop, Conversation, Poisson, draw_schedule

ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'30\r\ndata: {"choices": [{"text": "a", "index": 0}]}\n\n\r\n'
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
START_NS, WALL_NS = 10**12, 17 * 10**17


def unfinished(
    folder: Path,
    begun: tuple[int, int],
    written: tuple[int, int],
    done: tuple[bool, bool],
    turns: int = 1,
    **asked: object,
) -> Path:
    """The folder of a run of 40 conversations and two workers that got as far as this."""
    (folder / "capture").mkdir(parents=True)
    law = ClosedLoop(4) if asked else Poisson(100)
    drawn: dict[str, Any] = {"n": 40, "conversation": Conversation(turns)} | asked
    schedule = draw_schedule(law, processes=2, seed=1, **drawn)
    write_schedule(folder, schedule)
    board = Board(folder, 2, create=True)
    board.start_ns = START_NS
    for worker in (0, 1):
        state = "done" if done[worker] else "running"
        board.row(worker)[:] = (STATES.index(state), 0, begun[worker], 0, 0, 0, 0, begun[worker])
        writer = CaptureWriter(folder, worker)
        own = np.flatnonzero(schedule.worker == worker)[: written[worker]]
        rows = [pack(exchange(int(i))) for i in own]
        cycles = array("q", range(START_NS, START_NS + 1000, 10)), array("q", range(START_NS + 5, START_NS + 1005, 10))
        writer.write(rows, cycles, struct.pack("qq", START_NS, WALL_NS))
        writer.close()
        if not done[worker]:  # as a process leaves it that was killed: without the stream's end
            path = capture_path(folder, "requests", worker)
            path.write_bytes(path.read_bytes()[:-8])
    common = {"processes": 2, "client": "stamped", "keep_text": False, "salt": 1, "n": 40, "duration_s": None}
    common |= {"rate_per_s": None if asked else 100.0, "concurrency": 4 if asked else None, **asked}
    meta = {"format": 1, "run_id": "r", "asked": common, "ended": None, "verdict": None, "summary": []}
    rates = {"asked_per_s": 100.0, "drawn_per_s": None if asked else schedule.rate_per_s}
    write_json(folder, {**meta, "outcomes": {}, "rates": rates})
    return folder


def exchange(request_id: int, failing: Container[int] = ()) -> Exchange:
    """A request that was answered, all of it in one read; or not at all."""
    if request_id in failing:
        return Exchange(request_id, ended="reset", error="gone")
    at_ns = START_NS + 10 * request_id
    stamp = struct.pack("qq", *divmod(at_ns + 300 + WALL_NS, 10**9))
    reads = [(stamp, at_ns + 310, at_ns + 320, ANSWER)]
    return Exchange(request_id, at_ns, at_ns + 1, at_ns + 2, at_ns + 3, ended="complete", reads=reads)


def test_every_scheduled_request_has_its_row(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run", begun=(9, 8), written=(7, 8), done=(False, True))
    run = lp.load(folder)
    assert run.requests["request_id"].tolist() == list(range(40))
    assert run.meta["outcomes"] == {"ok": 15, "unsent": 23, "lost": 2}
    assert run.meta["ended"] == "interrupted"
    lost = run.requests[run.requests["outcome"] == "lost"]
    assert (lost["worker"] == 0).all() and lost["error"].str.contains("died").all()
    schedule = draw_schedule(Poisson(100), n=40, processes=2, seed=1)
    assert (run.requests["worker"] == schedule.worker).all()
    unsent = run.requests[run.requests["outcome"] == "unsent"]
    due_ns = START_NS + np.rint(schedule.due_s * 1e9)
    assert (unsent["due_ns"].to_numpy(np.int64) == due_ns[unsent["request_id"].to_numpy(int)]).all()
    assert unsent[["sent_ns", "ttft_s", "lateness_s", "output_tokens"]].isna().all().all()
    assert not (folder / "capture").exists()
    assert lp.load(folder).meta == run.meta


def test_a_closed_loop_for_a_time_has_rows_for_what_was_begun(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run", (9, 8), (9, 8), (True, True), n=None, duration_s=1.0)
    run = lp.load(folder)
    assert run.meta["outcomes"] == {"ok": 17}
    assert len(run.requests) == 17


@pytest.mark.parametrize("done", [False, True])
def test_turns_of_which_nothing_was_captured(tmp_path: Path, done: bool) -> None:
    """Of worker 0: a whole conversation, one that was cut after a turn, one that failed, one that had just begun."""
    schedule = draw_schedule(Poisson(100), n=40, processes=2, seed=1, conversation=Conversation(3))
    own = np.flatnonzero(schedule.worker == 0)
    folder = unfinished(tmp_path / "run", (4, 0), (0, 0), (done, True), turns=3)
    writer = CaptureWriter(rewritten(folder), 0)
    kept = [*own[:4], own[6], own[7]]
    rows = [pack(exchange(int(i), {int(own[7])})) for i in kept]
    writer.write(rows, (array("q"), array("q")), struct.pack("qq", START_NS, WALL_NS))
    writer.close()
    run = lp.load(folder)
    lost = "unsent" if done else "lost"
    found = run.requests.set_index("request_id").loc[own]
    assert found["outcome"].tolist()[:12] == [
        *("ok", "ok", "ok"),
        *("ok", lost, "unsent"),
        *("ok", "connect_error", "unsent"),
        *(lost, "unsent", "unsent"),
    ]
    assert set(found["outcome"][12:]) == {"unsent"}
    died, ended = "its worker died before it was written down", "the run ended before it was sent"
    lost_why = ended if done else died
    failed = "an earlier turn of its conversation failed"
    why = [None, None, None, None, lost_why, ended, None, "gone", failed, lost_why, ended, ended]
    assert [None if pd.isna(text) else text for text in found["error"][:12]] == why
    assert run.requests["request_id"].tolist() == list(range(120))
    for name in ("conversation", "turn", "server"):
        assert run.requests[name].tolist() == getattr(schedule, name).tolist()
    assert run.requests.loc[(run.requests["turn"] > 0) & (run.requests["outcome"] != "ok"), "due_ns"].isna().sum() > 70
    assert run.meta["lost_requests"] == (0 if done else 2)


def rewritten(folder: Path) -> Path:
    """The same folder, without what worker 0 had captured."""
    for what in ("requests", "cycles", "clock"):
        capture_path(folder, what, 0).unlink()
    return folder


def test_a_merge_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    folder = unfinished(tmp_path / "run", (9, 8), (9, 8), (True, True))
    (folder / "events.parquet").write_bytes(b"half of it")
    (folder / "requests.parquet").write_bytes(b"")
    run = lp.load(folder)
    assert len(run.events) == run.meta["outcomes"]["ok"] == 17
    assert [p.name for p in sorted(folder.iterdir())] == [
        *("cycles.parquet", "events.parquet", "requests.parquet", "run.json")
    ]


def test_a_run_without_a_request_that_came_back(tmp_path: Path) -> None:
    run = lp.load(unfinished(tmp_path / "run", (0, 0), (0, 0), (True, True)))
    assert run.meta["outcomes"] == {"unsent": 40}
    assert run.events.empty and lp.summary(run)["n"].sum() == 0
    assert "40 unsent" in repr(run) and "40 unsent" in run._repr_html_()
    assert lp.verdict(run).word == "invalid"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rates"]["achieved_per_s"] is None


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    lp.load(unfinished(tmp_path / "run", (9, 8), (9, 8), (True, True)), lambda done, of: told.append((done, of)))
    assert told == [(0, 2), (1, 2)]


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(lp.UsageError, match="no run folder|not a run folder"):
        lp.load(tmp_path)
