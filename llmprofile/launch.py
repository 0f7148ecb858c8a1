"""Launch a load from a cell, a script or a thread, and bring home the run.

The schedule is dealt to worker processes through joblib; they report ready, get one common start, and are watched
until the last request is answered. Only then are the captures parsed, so that parsing never disturbs a measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec

import joblib
import numpy as np
from joblib.externals.loky import get_reusable_executor
from tqdm.auto import tqdm

from llmprofile.api import Target, body_template, parse_target
from llmprofile.capture import STATES, Board
from llmprofile.clock import monotonic_ns
from llmprofile.collect import merge, write_schedule
from llmprofile.errors import LlmprofileError, UsageError, one_of, positive
from llmprofile.link import Link
from llmprofile.machine import machine_counters, machine_facts, versions
from llmprofile.parsing import parse_worker
from llmprofile.preflight import check_descriptors, check_folder, first_model, reach
from llmprofile.records import FORMAT, Run, write_json
from llmprofile.trust import verdict
from llmprofile.units import s_to_ns
from llmprofile.worker import CLIENTS, START_TIMEOUT_S, Job, work
from llmprofile.workload import Arrivals, ClosedLoop, Lengths, Schedule, draw_schedule

MOST_WARM_CONNECTIONS = 256
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


def start_load(
    url: str,
    arrivals: Arrivals,
    n: int | None = None,
    *,
    duration_s: float | None = None,
    prompt_tokens: Lengths | int = 128,
    output_tokens: Lengths | int = 64,
    processes: int = 1,
    client: str = "stamped",
    max_in_flight: int | None = None,
    model: str | None = None,
    seed: int | None = None,
    salt: int | None = None,
    stream: bool = True,
    usage: bool = True,
    extra_body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | Iterable[str] = (),
    api_key_env: str | None = None,
    ca_file: str | None = None,
    verify: bool = True,
    fresh: bool = False,
    warm_connections: int | None = None,
    connect_timeout_s: float = 30.0,
    first_token_timeout_s: float = float("inf"),
    timeout_s: float = 600.0,
    stamps: bool = True,
    keep_text: bool = False,
    out: Path | str | None = None,
    progress: bool = True,
) -> Load:
    """Start a load on a server and return at once; `.progress`, `.stop()` and `.wait()` follow it.

    Parameters
    ----------
    url : str
        With its path: …/v1/completions or …/v1/chat/completions.
    arrivals : Constant, Poisson, Gamma or ClosedLoop
    n, duration_s : int or float
        How many requests, or for how long they fall due; exactly one of the two.
    prompt_tokens, output_tokens : int or a law of lengths
    processes : int
        Worker processes; each has an event loop of its own.
    client : {"stamped", "conventional"}
        The measuring client, or the one everyone writes (aiohttp, JSON on the loop), measured.
    max_in_flight : int, optional
        Caps an open loop, over all processes; waiting for a slot counts as lateness.
    model : str, optional
        By default the first that the server lists, which takes the only request besides the asked ones.
    seed, salt : int, optional
        Of the schedule, and of the prompts' words; drawn and recorded by default.
    stream, usage : bool
        Ask for an event stream, and for its usage.
    extra_body : mapping, optional
        More fields of the request's JSON.
    headers : mapping or "Name: value" lines
    api_key_env : str, optional
        The environment variable that holds the key.
    ca_file, verify
        Trust this file's certificates; trust anything (False).
    fresh : bool
        A new connection for every request.
    warm_connections : int, optional
        Opened before the start, over all processes (stamped client).
    connect_timeout_s, first_token_timeout_s, timeout_s : float
    stamps : bool
        False leaves the kernel's stamps out, as on a machine that has none.
    keep_text : bool
        Keep prompts and answers in the run folder.
    out : path, optional
        The run folder; `runs/<UTC time>-<run id>` by default.
    progress : bool
        Show a bar while `wait` waits.

    Raises
    ------
    UsageError
        What was asked can't be done; nothing was sent and nothing written.

    Examples
    --------
    >>> load = start_load(server.url, Poisson(rate_per_s=50), n=10, output_tokens=4)  # doctest: +SKIP
    >>> run = load.wait()  # doctest: +SKIP
    """
    asked = dict(locals())
    target = parse_target(url, headers, api_key_env, ca_file, verify)
    one_of("client", client, tuple(CLIENTS))
    for name in ("connect_timeout_s", "timeout_s"):
        positive(name, asked[name], " (seconds)")
    if not first_token_timeout_s > 0:
        raise UsageError(f"first_token_timeout_s must be a number above 0 (seconds); not {first_token_timeout_s}")
    asked["seed"] = secrets.randbits(31) if seed is None else seed
    asked["salt"] = secrets.randbits(31) if salt is None else salt
    schedule = draw_schedule(
        arrivals,
        n=n,
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        processes=processes,
        max_in_flight=max_in_flight,
        seed=asked["seed"],
    )
    check_descriptors(schedule.slots)
    run_id = secrets.token_hex(4)
    folder = check_folder(out, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{run_id}")
    link = dataclasses.replace(
        reach(target, connect_timeout_s),
        stamps=stamps,
        fresh=fresh,
        stream=stream,
        first_token_timeout_s=first_token_timeout_s,
        timeout_s=timeout_s,
    )
    asked["model"] = model or first_model(target, connect_timeout_s)
    body = body_template(target, asked["model"], stream, usage, extra_body)
    meta = _meta(run_id, asked, arrivals, schedule)
    jobs = _jobs(folder, meta, target, link, schedule, body)
    return Load(folder, meta, schedule, jobs, progress)


def _meta(run_id: str, asked: dict[str, Any], arrivals: Arrivals, schedule: Schedule) -> dict[str, Any]:
    """`run.json` as it stands before the start."""
    closed = isinstance(arrivals, ClosedLoop)
    hidden = {"headers", "out", "progress"}
    plain = {k: _plain(v) for k, v in asked.items() if k not in hidden}
    names = [h.split(":")[0] if isinstance(h, str) else h for h in asked["headers"]]
    plain |= {
        "headers": names,
        "rate_per_s": None if isinstance(arrivals, ClosedLoop) else arrivals.rate_per_s,
        "concurrency": arrivals.concurrency if isinstance(arrivals, ClosedLoop) else asked["max_in_flight"],
        "call": "run_load(" + ", ".join(f"{k}={v!r}" for k, v in asked.items() if k not in hidden) + ")",
    }
    drawn_per_s = None if closed or np.isnan(schedule.rate_per_s) else schedule.rate_per_s
    return {
        "format": FORMAT,
        "run_id": run_id,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "asked": plain,
        "machine": machine_facts(),
        "versions": versions(),
        "ended": None,
        "outcomes": {},
        "lost_workers": 0,
        "lost_requests": 0,
        "resent": 0,
        "rates": {"asked_per_s": plain["rate_per_s"], "drawn_per_s": drawn_per_s},
        "summary": [],
        "verdict": None,
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return repr(value)


def _jobs(
    folder: Path, meta: dict[str, Any], target: Target, link: Link, schedule: Schedule, body: tuple[bytes, bytes, bytes]
) -> list[Job]:
    asked = meta["asked"]
    processes, duration_s = asked["processes"], asked["duration_s"]
    closed = asked["rate_per_s"] is None
    jobs = []
    for worker in range(processes):
        own = np.flatnonzero(schedule.worker == worker)
        jobs.append(
            Job(
                folder=folder.absolute(),
                run_id=meta["run_id"],
                worker=worker,
                processes=processes,
                parent_pid=os.getpid(),
                client=asked["client"],
                target=target,
                link=link,
                request_id=own,
                due_ns=None if closed else np.rint(schedule.due_s[own] * 1e9).astype(np.int64),
                prompt_tokens=schedule.prompt_tokens[own],
                output_tokens=schedule.output_tokens[own],
                slots=schedule.slots[worker] if schedule.slots else None,
                duration_ns=s_to_ns(duration_s) if closed and duration_s else None,
                body=body,
                salt=asked["salt"],
                warm=_warm(asked, schedule, len(own)),
            )
        )
    return jobs


def _warm(asked: dict[str, Any], schedule: Schedule, own: int) -> int:
    """Connections a worker opens before the start: its slots, or a second's worth of requests."""
    processes = asked["processes"]
    if asked["fresh"]:
        return 0
    if asked["warm_connections"] is not None:
        return -(-int(asked["warm_connections"]) // processes)
    wanted = max(schedule.slots) if schedule.slots else int(asked["rate_per_s"] / processes) + 1
    return min(own, wanted, MOST_WARM_CONNECTIONS)


class Load:
    """A load that is going on: `.progress`, `.stop()`, `.wait()`.

    It runs in threads of its own, so that a cell that starts it returns and a Stop button can be heard.
    """

    def __init__(
        self, folder: Path, meta: dict[str, Any], schedule: Schedule, jobs: list[Job], progress: bool
    ) -> None:
        self.folder = folder
        self._meta, self._schedule, self._jobs, self._show = meta, schedule, jobs, progress
        os.makedirs(folder / "capture")
        write_schedule(folder, schedule)
        write_json(folder, meta)
        self._board = Board(folder, len(jobs), create=True)
        self._last = self._progress()
        self._ended = "complete"
        self._over = threading.Event()
        self._loaded = threading.Event()
        self._run: Run | None = None
        self._failure: Exception | None = None
        # joblib's active backend is thread-local: read here, handed on
        backend, _ = joblib.parallel.get_active_backend()
        self._backend = "loky" if isinstance(backend, joblib.parallel.ThreadingBackend) else backend
        threading.Thread(target=self._supervise, name="llmprofile-load", daemon=True).start()
        threading.Thread(target=self._conduct, name="llmprofile-watch", daemon=True).start()

    def __repr__(self) -> str:
        p = self.progress
        return f"Load {self.folder}: {p.state}, {p.done} of {p.scheduled} done, {p.in_flight} in flight"

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
        if not self._loaded.is_set():
            self._ended = "stopped"
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
            self.stop()
            self._ended = "interrupted"
            self._watch_bar()
        if self._failure is not None:
            raise self._failure
        assert self._run is not None
        return self._run

    def _watch_bar(self) -> None:
        disable = not self._show or not (_in_notebook() or sys.stderr.isatty())
        total = None if self._meta["asked"]["n"] is None and not self._meta["asked"]["rate_per_s"] else len(self._schedule)
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
            self._ended = "stopped"
            board.stop = True

    def _bound_s(self) -> float:
        asked = self._meta["asked"]
        due_s = self._schedule.due_s
        span_s = float(np.nanmax(due_s)) if not np.isnan(due_s).all() else (asked["duration_s"] or 0.0)
        waves = 1 if asked["concurrency"] is None else -(-len(due_s) // asked["concurrency"])
        return span_s + asked["timeout_s"] * (waves if asked["duration_s"] is None else 1) + 60.0

    def _supervise(self) -> None:
        try:
            facts = self._load()
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
            raise LlmprofileError(
                f"not all of {len(self._jobs)} workers were ready within {START_TIMEOUT_S:.0f} s; nothing was sent"
            )
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
        with joblib.parallel_config(backend=self._backend):
            tasks = (joblib.delayed(function)(*call) for call in calls)
            return list(joblib.Parallel(n_jobs=len(calls), batch_size=1, pre_dispatch="all")(tasks))

    def _collect(self, facts: list[dict[str, Any]]) -> Run:
        write_json(self.folder, self._meta)
        asked = self._meta["asked"]
        calls = [(self.folder.absolute(), job.worker, asked["keep_text"], asked["salt"]) for job in self._jobs]
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


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


P = ParamSpec("P")


def _waited_for(start: Callable[P, Load]) -> Callable[P, Run]:
    @functools.wraps(start)
    def run(*args: P.args, **kwargs: P.kwargs) -> Run:
        return start(*args, **kwargs).wait()

    return run


run_load = _waited_for(start_load)
run_load.__name__ = run_load.__qualname__ = "run_load"
run_load.__doc__ = f"""Run a load on a server and wait for the run: `start_load(...).wait()`.

    {(start_load.__doc__ or "").split(chr(10), 2)[2].strip()}
    """
run_load.__annotations__ = {**start_load.__annotations__, "return": "Run"}
