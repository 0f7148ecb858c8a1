"""A load that is going on: its workers' common start, its progress, its end, and the merge that follows."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from joblib.externals.loky import get_reusable_executor
from tqdm.auto import tqdm

from llmprofile.capture import STATES, Board
from llmprofile.clock import monotonic_ns
from llmprofile.collect import merge, write_schedule
from llmprofile.errors import LlmprofileError
from llmprofile.live import in_notebook
from llmprofile.machine import machine_counters
from llmprofile.parsing import parse_worker
from llmprofile.records import Run, write_json
from llmprofile.scrape import scraping
from llmprofile.trust import verdict
from llmprofile.units import s_to_ns
from llmprofile.worker import START_TIMEOUT_S, Job, ignore_interrupts, work
from llmprofile.workload import Schedule

_READY, _DONE = STATES.index("ready"), STATES.index("done")


@dataclass(frozen=True)
class Progress:
    """How far a load has come; `state` is one of starting, running, collecting, done."""

    state: str
    scheduled: int
    begun: int
    done: int
    failed: int
    in_flight: int
    elapsed_s: float


class Load:
    """A load that is going on: `.progress`, `.stop()`, `.wait()`.

    It runs in threads of its own, so that a cell that starts it returns and a Stop button can be heard.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], schedule: Schedule, jobs: list[Job], progress: bool) -> None:
        self.folder = folder
        self._meta, self._schedule, self._jobs, self._show = meta, schedule, jobs, progress
        (folder / "capture").mkdir(parents=True)
        write_schedule(folder, schedule)
        write_json(folder, meta)
        self._board = Board(folder, len(jobs), create=True)
        self._board.parent_pid = os.getpid()
        self._last = self._progress()
        self._ended = "complete"
        self._over = threading.Event()
        self._loaded = threading.Event()
        self._run: Run | None = None
        self._failure: Exception | None = None
        self._dashboard: Any = None
        # joblib's active backend is thread-local: read here, handed on
        backend, _ = joblib.parallel.get_active_backend()
        own = type(backend).__module__ == "joblib._parallel_backends"
        # of joblib's own kinds only loky's processes will do: threads would share one interpreter
        self._backend: dict[str, Any] = (
            {"backend": "loky", "initializer": ignore_interrupts} if own else {"backend": backend}
        )
        threading.Thread(target=self._supervise, name="llmprofile-load", daemon=True).start()
        threading.Thread(target=self._conduct, name="llmprofile-watch", daemon=True).start()

    def __repr__(self) -> str:
        p = self.progress
        return f"Load {self.folder}: {p.state}, {p.done} of {p.scheduled} done, {p.in_flight} in flight"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """In a notebook the dashboard, the same each time; elsewhere a line of the moment's figures."""
        from llmprofile.widgets import watch  # here, since it brings ipywidgets

        if self._dashboard is None:
            self._dashboard = watch(self)
        return dict(self._dashboard._repr_mimebundle_(**kwargs))

    @property
    def meta(self) -> dict[str, Any]:
        """`run.json` as it stands."""
        return self._meta

    @property
    def result(self) -> Run | Exception | None:
        """The run once it has ended, or why there is none; None while it goes on."""
        return (self._failure or self._run) if self._over.is_set() else None

    @property
    def progress(self) -> Progress:
        """The workers' counters now."""
        if self._over.is_set():
            return dataclasses.replace(self._last, state="done")
        if not self._loaded.is_set():
            self._last = self._progress()
        return self._last

    def _progress(self) -> Progress:
        board, start_ns = self._board, self._board.start_ns
        loaded = bool((board.column("state") == _DONE).all())
        begun, done, failed, in_flight = (int(board.column(c).sum()) for c in ("begun", "done", "failed", "in_flight"))
        elapsed_s = max(0.0, (monotonic_ns() - start_ns) / 1e9) if start_ns else 0.0
        state = "collecting" if loaded else "running" if start_ns else "starting"
        return Progress(state, len(self._schedule), begun, done, failed, in_flight, elapsed_s)

    def stop(self) -> None:
        """Stop sending and cancel what is in flight; what has been measured is kept."""
        self._stop("stopped")

    def _stop(self, ended: str) -> None:
        if not self._loaded.is_set():
            self._ended = ended
            self._board.stop = True

    def wait(self) -> Run:
        """Wait for the run. Ctrl-C stops it and keeps what was measured; a second one leaves it to `load`.

        Raises
        ------
        LlmprofileError
            The workers never started.
        """
        try:
            self._watch_bar()
        except KeyboardInterrupt:
            self._stop("interrupted")
            self._watch_bar()
        if self._failure is not None:
            raise self._failure
        assert self._run is not None
        return self._run

    def _watch_bar(self) -> None:
        disable = not self._show or not (in_notebook() or sys.stderr.isatty())
        total = (
            None if self._meta["asked"]["n"] is None and not self._meta["asked"]["rate_per_s"] else len(self._schedule)
        )
        with tqdm(total=total, unit="request", desc="load", disable=disable, leave=False) as bar:
            while not self._over.wait(0.1):
                now = self.progress
                bar.update(now.done - bar.n)
                bar.set_description(now.state, refresh=False)
                bar.set_postfix(in_flight=now.in_flight, failed=now.failed)

    def _conduct(self) -> None:
        """The common start, once all workers are ready; and a bound on the whole."""
        board, patience_s = self._board, time.monotonic() + START_TIMEOUT_S
        while not (board.column("state") == _READY).all():
            if self._loaded.wait(0.005):
                return
            if time.monotonic() > patience_s:
                board.stop = True
                return
        board.start_ns = monotonic_ns() + s_to_ns(0.05)
        if not self._loaded.wait(self._bound_s()):
            self._stop("stopped")

    def _bound_s(self) -> float:
        asked = self._meta["asked"]
        due_s = self._schedule.due_s
        span_s = float(np.nanmax(due_s)) if not np.isnan(due_s).all() else (asked["duration_s"] or 0.0)
        conversations = int(self._schedule.conversation[-1]) + 1
        waves = 1 if asked["concurrency"] is None else -(-conversations // asked["concurrency"])
        each_s = self._schedule.longest_s(asked["timeout_s"])
        return span_s + each_s * (waves if asked["duration_s"] is None else 1) + 60.0

    def _supervise(self) -> None:
        try:
            with scraping(self.folder, self._meta):
                facts = self._load()
            self._last = dataclasses.replace(self._progress(), state="collecting")
            self._loaded.set()
            self._run = self._collect(facts)
        except Exception as error:  # noqa: BLE001  raised again in wait(), in the caller's thread
            self._failure = error
        finally:
            self._loaded.set()
            self._over.set()

    def _load(self) -> list[dict[str, Any]]:
        before = machine_counters()
        try:
            facts = self._parallel(work, [(job,) for job in self._jobs])
        except BrokenExecutor as error:
            if not self._board.start_ns:
                self._drop()
                raise LlmprofileError(f"a worker process died before the start: {error}") from error
            self._ended, facts = "worker_lost", []
        if not self._board.start_ns:
            self._drop()
            late = f"not all of {len(self._jobs)} workers were ready within {START_TIMEOUT_S:.0f} s"
            why = late if self._ended == "complete" else f"the run was {self._ended} before its start"
            raise LlmprofileError(f"{why}; nothing was sent")
        failures = {f["failure"] for f in facts} - {None}
        if failures:
            self._ended = "interrupted"
        after = machine_counters()
        spent = {name: after[name] - before[name] for name in after if name in before}
        self._meta |= {"workers": facts, "failures": sorted(failures), "machine": {**self._meta["machine"], **spent}}
        return facts

    def _drop(self) -> None:
        shutil.rmtree(self.folder)

    def _parallel(self, function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
        with joblib.parallel_config(**self._backend):
            tasks = (joblib.delayed(function)(*call) for call in calls)
            # a single job would be run right here, in the caller's process: joblib makes processes from two on
            jobs = max(2, len(calls))
            return list(joblib.Parallel(n_jobs=jobs, batch_size=1, pre_dispatch="all")(tasks))

    def _collect(self, facts: list[dict[str, Any]]) -> Run:
        write_json(self.folder, self._meta)
        asked = self._meta["asked"]
        calls = [(self.folder.absolute(), job.worker, asked["keep_text"]) for job in self._jobs]
        if self._ended == "complete":
            parsed = self._parallel(parse_worker, calls)
        else:  # the workers must be gone soon, or are
            if self._ended != "worker_lost":
                get_reusable_executor().shutdown(wait=False, kill_workers=True)
            parsed = [parse_worker(*call) for call in calls]
        run = merge(self.folder, parsed, self._ended)
        run.meta["verdict"] = verdict(run).as_dict()
        write_json(self.folder, run.meta)
        return run
