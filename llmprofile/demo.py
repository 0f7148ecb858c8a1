"""What an ordinary client reports, beside the truth: the reference server, two clients, rising rates."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from llmprofile import plots
from llmprofile.latency import SUFFIX
from llmprofile.launch import run_load
from llmprofile.machine import machine_facts
from llmprofile.metrics import run_clock
from llmprofile.preflight import check_folder
from llmprofile.records import Run
from llmprofile.server import ReferenceServer
from llmprofile.units import show_rate, show_time
from llmprofile.workload import Poisson

RATES_PER_S = (50.0, 100.0, 200.0, 400.0, 600.0)
CLIENTS = ("conventional", "stamped")
DURATION_S = 4.0
TOKENS = 50
TTFT_S, ITL_S, CV = 0.05, 0.01, 0.5
SEED = 1
FIGURE = "error_against_rate"
WIDTH = 110

MEANING = (
    "True TTFT: from just before the client's send of the request to just before the server's send of the first "
    "token, by the server's own record (one machine, one clock). Reported: on the handled clock by the conventional "
    "client, on the wire clock by the stamped one. Error: reported less true, request by request."
)


@dataclass(frozen=True, eq=False)
class Demo:
    """What `run_demo` found.

    Attributes
    ----------
    folder : Path
        It holds the run folders, the figure (PNG and SVG) and the table (CSV).
    table : DataFrame
        A row a run: `rate_per_s`, `achieved_per_s`, `client`, `requests`, `ok`, `true_mean_s`, `reported_mean_s`,
        `error_mean_s`, `error_p99_s`, `lateness_p99_s`, `verdict`.
    setting : str
        On what machine, and on which of its cores.
    complete : bool
        False when it was interrupted.
    """

    folder: Path
    table: pd.DataFrame
    setting: str
    complete: bool

    def __str__(self) -> str:
        early = [] if self.complete else ["Interrupted: this is what was measured until then."]
        shown = table_cells(self.table).to_string(index=False) if len(self.table) else "no run was finished"
        text = [textwrap.fill(line, WIDTH) for line in (*early, self.setting, MEANING)]
        return "\n".join([*text, "", shown, "", f"figure and run folders: {self.folder}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = table_cells(self.table).to_html(index=False, border=0)
        return f"<div>{escape(self.setting)}<br>{escape(MEANING)}{shown}{escape(str(self.folder))}</div>"


def run_demo(
    out: Path | str | None = None, *, rates_per_s: tuple[float, ...] = RATES_PER_S, duration_s: float = DURATION_S
) -> Demo:
    """Measure the reference server with both clients, one process each, at rising rates; about a minute.

    The server takes 50 ms to the first token and 10 ms from token to token (lognormal, CV 0.5). Where there are two
    cores or more it keeps to one of them, and the clients to the others.

    Parameters
    ----------
    out : path, optional
        A folder that doesn't exist yet; `runs/demo-<UTC time>` by default.
    rates_per_s : tuple of float
    duration_s : float
        Of each run.

    Raises
    ------
    UsageError
        The folder exists.

    Examples
    --------
    >>> run_demo(rates_per_s=(50.0,), duration_s=0.5).table["client"].tolist()
    ['conventional', 'stamped']
    """
    folder = check_folder(out, f"demo-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    load_1min, rows, complete = machine_facts()["load_1min"], [], True
    cores = _cores()
    server = ReferenceServer(ttft_s=TTFT_S, itl_s=ITL_S, cv=CV, seed=SEED, cpus=cores[:1] or None)
    with server, _keep_to(cores[1:]) as workers:
        for rate_per_s, client in [(r, c) for r in rates_per_s for c in CLIENTS]:
            began_s = time.monotonic()
            run = _measure(server, folder, rate_per_s, client, duration_s)
            workers += run.meta.get("workers", [])
            if run.meta["ended"] == "interrupted":
                complete = False
                break
            rows.append(_row(run, server.truth(forget=True)))
            print(_sentence(rows[-1], time.monotonic() - began_s), file=sys.stderr, flush=True)
    demo = Demo(folder, pd.DataFrame(rows), _setting(cores, workers, load_1min), complete)
    _write(demo)
    return demo


def _measure(server: ReferenceServer, folder: Path, rate_per_s: float, client: str, duration_s: float) -> Run:
    return run_load(
        server.url,
        Poisson(rate_per_s),
        duration_s=duration_s,
        output_tokens=TOKENS,
        client=client,
        seed=SEED,  # both clients get the same requests
        out=folder / f"{client}-{rate_per_s:g}",
        progress=False,
    )


def errors(run: Run, truth: pd.DataFrame) -> pd.DataFrame:
    """What a run reported of each `ok` request's TTFT, and what was true.

    Parameters
    ----------
    run : Run
    truth : DataFrame
        `ReferenceServer.truth()`.

    Returns
    -------
    DataFrame
        `request_id`, `true_s`, `reported_s`, `error_s`. True: sent to the server's record of its first token.
        Reported: on the run's own clock, handled of a conventional run and wire of a stamped one.
    """
    of_run = truth[truth["id"].str.startswith(f"{run.meta['run_id']}-")]
    ok = run.requests[run.requests["outcome"] == "ok"]
    joined = ok.merge(of_run[["request_id", "first_ns"]], on="request_id", how="left")
    true_s = ((joined["first_ns"] - joined["sent_ns"]) / 1e9).to_numpy(float, na_value=np.nan)
    reported_s = joined[f"ttft{SUFFIX[run_clock(run)]}"].to_numpy(float)
    columns = {"true_s": true_s, "reported_s": reported_s, "error_s": reported_s - true_s}
    return pd.DataFrame({"request_id": joined["request_id"], **columns})


def _row(run: Run, truth: pd.DataFrame) -> dict[str, Any]:
    found = errors(run, truth)
    return {
        "rate_per_s": run.meta["asked"]["rate_per_s"],
        "achieved_per_s": run.meta["rates"]["achieved_per_s"],
        "client": run.client,
        "requests": len(run.requests),
        "ok": len(found),
        "true_mean_s": found["true_s"].mean(),
        "reported_mean_s": found["reported_s"].mean(),
        "error_mean_s": found["error_s"].mean(),
        "error_p99_s": found["error_s"].quantile(0.99),
        "lateness_p99_s": float(run.requests["lateness_s"].quantile(0.99)),
        "verdict": run.meta["verdict"]["word"],
    }


def _sentence(row: dict[str, Any], took_s: float) -> str:
    return (
        f"{row['client']} client at {show_rate(row['rate_per_s'])}: {row['ok']} of {row['requests']} requests ok, "
        f"mean TTFT off by {show_time(row['error_mean_s'])} ({took_s:.0f} s)"
    )


def table_cells(table: pd.DataFrame) -> pd.DataFrame:
    """The table as it is printed: times in the unit that reads best, rates and counts in one column each."""
    return pd.DataFrame(
        {
            "asked": table["rate_per_s"].map(show_rate),
            "achieved": table["achieved_per_s"].astype(float).map(show_rate),
            "client": table["client"],
            "ok": [f"{ok} of {n}" for ok, n in zip(table["ok"], table["requests"], strict=True)],
            "true TTFT": table["true_mean_s"].map(show_time),
            "reported": table["reported_mean_s"].map(show_time),
            "error": table["error_mean_s"].map(show_time),
            "p99 of error": table["error_p99_s"].map(show_time),
            "p99 lateness": table["lateness_p99_s"].map(show_time),
            "verdict": table["verdict"],
        }
    )


def _cores() -> list[int]:
    """The cores that can be had, if they can be chosen and there are two or more; else none."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores if len(cores) > 1 else []


@contextlib.contextmanager
def _keep_to(cores: list[int]) -> Iterator[list[dict[str, Any]]]:
    """Keep to these cores, and so the workers that start in the block: a process inherits them.

    What it yields is to be filled with the runs' workers: these live on for the next run, and at the end they get
    back the cores that this process had.
    """
    before = os.sched_getaffinity(0) if cores else set()
    workers: list[dict[str, Any]] = []
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield workers
    finally:
        processes = {os.getpid(), *(worker["pid"] for worker in workers)} if cores else ()
        for task in (task for pid in processes for task in Path(f"/proc/{pid}/task").glob("*")):
            with contextlib.suppress(ProcessLookupError):
                if os.sched_getaffinity(int(task.name)) == set(cores):
                    os.sched_setaffinity(int(task.name), before)


def _setting(cores: list[int], workers: list[dict[str, Any]], load_1min: float) -> str:
    facts = machine_facts()
    busy = " (other work was running, which every client suffers from)" * (load_1min > 0.5 * facts["cores"])
    kept = "The server and the clients shared what cores there are"
    if cores:  # a worker that was there before the demo had cores of its own
        found = sorted({core for worker in workers for core in worker["affinity"] or ()})
        kept = f"The server kept to core {cores[0]}, the clients to core{'s' * (len(found) > 1)} "
        kept += ", ".join(map(str, found))
    return (
        f"{facts['cores']} cores of {facts['processor'] or 'an unknown processor'}; load average at the start "
        f"{load_1min:.1f}{busy}. {kept}. Poisson arrivals, {TOKENS} tokens a request, one process a client."
    )


def _write(demo: Demo) -> None:
    if demo.table.empty:
        return
    demo.table.to_csv(demo.folder / "table.csv", index=False)
    ax = plots.error_against_rate(demo.table, plots.blank_axes())
    ax.set_xlabel(f"rate (requests/s of {TOKENS} tokens)")
    for suffix in ("png", "svg"):
        plots.save(ax, demo.folder / f"{FIGURE}.{suffix}")
