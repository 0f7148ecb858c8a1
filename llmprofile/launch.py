"""Launch a load from a cell, a script or a thread: what is asked is checked, then dealt to worker processes.

Nothing is sent and nothing is written before everything has been checked.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from llmprofile.api import Target, body_template, parse_target
from llmprofile.errors import UsageError, one_of, positive, whole
from llmprofile.link import Link
from llmprofile.machine import interface_facts, machine_facts, versions
from llmprofile.preflight import check_descriptors, check_folder, first_model, reach
from llmprofile.records import FORMAT, Run
from llmprofile.scrape import check_page, metrics_target
from llmprofile.supervise import Load
from llmprofile.units import s_to_ns
from llmprofile.worker import CLIENTS, Job
from llmprofile.workload import Arrivals, ClosedLoop, Lengths, Schedule, draw_schedule, lengths_asked

MOST_WARM_CONNECTIONS = 256


def start_load(
    url: str,
    arrivals: Arrivals,
    n: int | None = None,
    *,
    duration_s: float | None = None,
    prompt_tokens: Lengths | int | None = None,
    output_tokens: Lengths | int | None = None,
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
    event_work_s: float = 0.0,
    scrape_metrics: str | None = None,
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
    arrivals : Constant, Poisson, Gamma, Ramp, Stages, Trace or ClosedLoop
    n, duration_s : int or float
        How many requests, or for how long they fall due; exactly one of the two. A ramp, stages and a trace have an
        end of their own, which these may only cut: both may be left out.
    prompt_tokens, output_tokens : int or a law of lengths, optional
        128 and 64 by default; a trace brings its own.
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
    event_work_s : float
        How long the conventional client computes on each event besides parsing its JSON: an experiment's E[S].
    scrape_metrics : str, optional
        URL of the server's Prometheus page, read once a second during the run: see `server_metrics`.
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
    >>> load = lp.start_load(server.url, lp.Poisson(rate_per_s=50), n=10, output_tokens=4)
    >>> load.wait().meta["outcomes"]
    {'ok': 10}
    """
    asked = dict(locals()) | lengths_asked(arrivals, prompt_tokens, output_tokens)
    target = parse_target(url, headers, api_key_env, ca_file, verify)
    one_of("client", client, tuple(CLIENTS))
    for name in ("connect_timeout_s", "timeout_s"):
        positive(name, asked[name], " (seconds)")
    if not first_token_timeout_s > 0:
        raise UsageError(f"first_token_timeout_s must be a number above 0 (seconds); not {first_token_timeout_s}")
    _check_event_work(client, event_work_s)
    if scrape_metrics is not None:
        check_page(metrics_target(scrape_metrics, ca_file, verify))
    asked["seed"] = secrets.randbits(31) if seed is None else seed
    asked["salt"] = secrets.randbits(31) if salt is None else whole("salt", salt, 0)
    schedule = draw_schedule(
        arrivals,
        n=n,
        duration_s=duration_s,
        prompt_tokens=asked["prompt_tokens"],
        output_tokens=asked["output_tokens"],
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
        event_work_s=event_work_s,
    )
    asked["model"] = model or first_model(target, connect_timeout_s)
    body = body_template(target, asked["model"], stream, usage, extra_body)
    meta = _meta(run_id, asked, arrivals, schedule)
    meta["machine"] |= interface_facts(*link.addresses[0])
    jobs = _jobs(folder, meta, target, link, schedule, body)
    return Load(folder, meta, schedule, jobs, progress)


def _check_event_work(client: str, event_work_s: float) -> None:
    if not 0 <= event_work_s < float("inf"):
        raise UsageError(f"event_work_s must be a number not below 0 (seconds); not {event_work_s}")
    if event_work_s and client != "conventional":
        raise UsageError(f'event_work_s goes with client="conventional": the {client} client does no work on events')


def _meta(run_id: str, asked: dict[str, Any], arrivals: Arrivals, schedule: Schedule) -> dict[str, Any]:
    """`run.json` as it stands before the start."""
    closed = isinstance(arrivals, ClosedLoop)
    hidden = {"headers", "out", "progress"}
    asked = {**asked, "url": asked["url"].partition("?")[0]}  # a query may hold a key
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
                warm=_warm(asked, schedule, own),
            )
        )
    return jobs


def _warm(asked: dict[str, Any], schedule: Schedule, own: npt.NDArray[np.int64]) -> int:
    """Connections a worker opens before the start: its slots, or one for each request of its busiest second."""
    processes = asked["processes"]
    if asked["fresh"]:
        return 0
    if asked["warm_connections"] is not None:
        return -(-int(asked["warm_connections"]) // processes)
    wanted = max(schedule.slots) if schedule.slots else _most_within_s(1.0, schedule.due_s[own])
    return min(len(own), wanted, MOST_WARM_CONNECTIONS)


def _most_within_s(span_s: float, due_s: npt.NDArray[np.float64]) -> int:
    return int((np.searchsorted(due_s, due_s + span_s) - np.arange(len(due_s))).max(initial=0))


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
