"""Launch a load from a cell, a script or a thread: what is asked is checked, then dealt to worker processes.

Nothing is sent and nothing is written before everything has been checked.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from llmprofile.api import Target, body_template, parse_target, takes_messages
from llmprofile.errors import UsageError, one_of, positive, whole
from llmprofile.machine import interface_facts, machine_facts, versions
from llmprofile.preflight import check_descriptors, check_folder, first_model, reach
from llmprofile.prompts import PromptFile, PromptSource
from llmprofile.proxies import parse_proxy, proxies_ignored
from llmprofile.records import FORMAT, Run
from llmprofile.scrape import check_page, metrics_target
from llmprofile.supervise import Load
from llmprofile.units import MISSING_NS, s_to_ns
from llmprofile.worker import CLIENTS, Job
from llmprofile.workload import Arrivals, ClosedLoop, Conversation, Lengths, Schedule, draw_schedule, lengths_asked

MOST_WARM_CONNECTIONS = 256


def start_load(
    url: str | Sequence[str],
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
    prompts: PromptSource | None = None,
    system_prompt: str | None = None,
    conversation: Conversation | None = None,
    ignore_eos: bool = False,
    temperature: float | None = None,
    sampling_seed: int | None = None,
    extra_body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | Iterable[str] = (),
    proxy: str | None = None,
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
    url : str or sequence of str
        With its path: …/v1/completions or …/v1/chat/completions. To several, all of one API, requests (conversations)
        are dealt in turn: column `server`.
    arrivals : Constant, Poisson, Gamma, Ramp, Stages, Trace or ClosedLoop
    n, duration_s : int or float
        How many requests (conversations), or for how long they fall due; exactly one of the two. A ramp, stages and a
        trace have an end of their own, which these may only cut: both may be left out.
    prompt_tokens, output_tokens : int or a law of lengths, optional
        128 and 64 by default; a trace brings its own, and a prompt file may.
    processes : int
        Worker processes; each has an event loop of its own.
    client : {"stamped", "conventional"}
        The measuring client, or the one everyone writes (aiohttp, JSON on the loop), measured.
    max_in_flight : int, optional
        Caps an open loop, over all processes; waiting for a slot counts as lateness.
    model : str, optional
        By default the first that each server lists, which takes the only request besides the asked ones.
    seed, salt : int, optional
        Of the schedule, and of the prompts' words; drawn and recorded by default.
    stream, usage : bool
        Ask for an event stream, and for its usage.
    prompts : PromptFile or SharedPrefix, optional
        What requests say; by default words that no two requests share.
    system_prompt : str, optional
        A system message before all others; `instructions` of responses; where an API takes one text (completions,
        Ollama's generate, TGI) it stands before the prompt, with a blank line between.
    conversation : Conversation, optional
        Requests of several turns, with time to think between them.
    ignore_eos : bool
        Have each answer as long as asked (`ignore_eos` and `min_tokens`, of completions and chat).
    temperature, sampling_seed : float, int, optional
        `temperature` and `seed` of the request.
    extra_body : mapping, optional
        More fields of the request's JSON.
    headers : mapping or "Name: value" lines
    proxy : str, optional
        http://host:port of an HTTP proxy, or "environment" for the one that the environment names; none by default,
        whatever the environment says.
    api_key_env : str, optional
        The environment variable that holds the key.
    ca_file, verify
        Trust this file's certificates; trust anything (False).
    fresh : bool
        A new connection for every request.
    warm_connections : int, optional
        Opened to each server before the start, over all processes (stamped client).
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
    asked = dict(locals()) | lengths_asked(arrivals, prompt_tokens, output_tokens, prompts)
    asked["headers"] = headers if isinstance(headers, Mapping) else list(headers)
    targets = _targets(url, asked)
    _check_options(asked)
    asked["seed"] = secrets.randbits(31) if seed is None else seed
    asked["salt"] = secrets.randbits(31) if salt is None else whole("salt", salt, 0)
    schedule = draw_schedule(servers=len(targets), **{name: asked[name] for name in _DRAWN})
    wording = {name: asked[name] for name in _WORDING} | {"extra": extra_body, "dialogue": _is_dialogue(asked)}
    body_template(targets[0], "", **wording)  # what can't be worded is refused before a server is asked for its model
    check_descriptors(schedule.slots)
    run_id = secrets.token_hex(4)
    folder = check_folder(out, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{run_id}")
    of_links = {name: asked[name] for name in _LINKED}
    ways = [(target, connect_timeout_s, parse_proxy(proxy, target)) for target in targets]
    links = tuple(dataclasses.replace(reach(*way), **of_links) for way in ways)
    models = [model or first_model(*way) for way in ways]
    asked["proxy"] = " ".join(sorted({repr(way[2]) for way in ways if way[2]})) or None
    asked["model"] = models[0] if len(set(models)) == 1 else models
    bodies = tuple(body_template(target, name, **wording) for target, name in zip(targets, models, strict=True))
    meta = _meta(run_id, asked, arrivals, schedule)
    meta["machine"] |= interface_facts(*links[0].addresses[0])
    common = {
        "folder": folder.absolute(),
        "run_id": run_id,
        "parent_pid": os.getpid(),
        "targets": targets,
        "links": links,
        "bodies": bodies,
        "listed": takes_messages(targets[0], wording["dialogue"]),
        **{name: asked[name] for name in ("processes", "client", "prompts", "salt", "keep_text")},
    }
    return Load(folder, meta, schedule, _jobs(common, asked, schedule), progress)


_DRAWN = (
    *("arrivals", "n", "duration_s", "prompt_tokens", "output_tokens", "processes", "max_in_flight", "seed"),
    *("prompts", "conversation"),
)
_WORDING = ("stream", "usage", "system_prompt", "ignore_eos", "temperature", "sampling_seed")
_LINKED = ("stamps", "fresh", "stream", "first_token_timeout_s", "timeout_s", "event_work_s")


def _targets(url: str | Sequence[str], asked: dict[str, Any]) -> tuple[Target, ...]:
    urls = [url] if isinstance(url, str) else url
    if not isinstance(urls, list | tuple) or not urls or not all(isinstance(each, str) for each in urls):
        raise UsageError(f"url must be a text, or a list of at least one; not {url!r}")
    options = [asked[name] for name in ("headers", "api_key_env", "ca_file", "verify")]
    targets = tuple(parse_target(each, *options) for each in urls)
    kinds = {target.kind: None for target in targets}
    if len(kinds) > 1:
        raise UsageError(f"the URLs of one load must be of one API; not of {' and '.join(kinds)}")
    return targets


def _is_dialogue(asked: dict[str, Any]) -> bool:
    """Whether a request may say more than one message."""
    of_file = asked["prompts"].messages if isinstance(asked["prompts"], PromptFile) else ()
    return asked["conversation"] is not None or any(said[0][0] != b"user" or len(said) > 1 for said in of_file)


def _check_options(asked: dict[str, Any]) -> None:
    one_of("client", asked["client"], tuple(CLIENTS))
    for name in ("connect_timeout_s", "timeout_s"):
        positive(name, asked[name], " (seconds)")
    if not asked["first_token_timeout_s"] > 0:
        got = asked["first_token_timeout_s"]
        raise UsageError(f"first_token_timeout_s must be a number above 0 (seconds); not {got}")
    _check_event_work(asked["client"], asked["event_work_s"])
    if asked["scrape_metrics"] is not None:
        check_page(metrics_target(asked["scrape_metrics"], asked["ca_file"], asked["verify"]))


def _check_event_work(client: str, event_work_s: float) -> None:
    if not 0 <= event_work_s < float("inf"):
        raise UsageError(f"event_work_s must be a number not below 0 (seconds); not {event_work_s}")
    if event_work_s and client != "conventional":
        raise UsageError(f'event_work_s goes with client="conventional": the {client} client does no work on events')


def _meta(run_id: str, asked: dict[str, Any], arrivals: Arrivals, schedule: Schedule) -> dict[str, Any]:
    """`run.json` as it stands before the start."""
    closed = isinstance(arrivals, ClosedLoop)
    hidden = {"headers", "out", "progress"}
    urls = [asked["url"]] if isinstance(asked["url"], str) else asked["url"]
    shown = [url.partition("?")[0] for url in urls]  # a query may hold a key
    asked = {**asked, "url": shown if len(shown) > 1 else shown[0]}
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
        "machine": machine_facts() | {"proxies_ignored": [] if asked["proxy"] else proxies_ignored()},
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
    return value if isinstance(value, list) else repr(value)


def _jobs(common: dict[str, Any], asked: dict[str, Any], schedule: Schedule) -> list[Job]:
    closed = isinstance(asked["arrivals"], ClosedLoop)
    due_ns = np.full(len(schedule), MISSING_NS)
    known = ~np.isnan(schedule.due_s)
    due_ns[known] = np.rint(schedule.due_s[known] * 1e9)
    think_ns = np.rint(schedule.think_s * 1e9).astype(np.int64)
    jobs = []
    for worker in range(asked["processes"]):
        own = np.flatnonzero(schedule.worker == worker)
        columns = ("prompt_tokens", "output_tokens", "server", "turn", "pick")
        jobs.append(
            Job(
                **common,
                worker=worker,
                request_id=own,
                due_ns=None if closed else due_ns[own],
                think_ns=think_ns[own],
                **{name: getattr(schedule, name)[own] for name in columns},
                slots=schedule.slots[worker] if schedule.slots else None,
                duration_ns=s_to_ns(asked["duration_s"]) if closed and asked["duration_s"] else None,
                warm=tuple(_warm(asked, schedule, own, server) for server in range(len(common["links"]))),
            )
        )
    return jobs


def _warm(asked: dict[str, Any], schedule: Schedule, own: npt.NDArray[np.int64], server: int) -> int:
    """Connections a worker opens to a server before the start: its slots, or one for each of its busiest second."""
    processes = asked["processes"]
    if asked["fresh"]:
        return 0
    if asked["warm_connections"] is not None:
        return -(-int(asked["warm_connections"]) // processes)
    firsts = own[(schedule.server[own] == server) & (schedule.turn[own] == 0)]
    wanted = max(schedule.slots) if schedule.slots else _most_within_s(1.0, schedule.due_s[firsts])
    return min(len(firsts), wanted, MOST_WARM_CONNECTIONS)


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
