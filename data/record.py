"""What the notebooks measure: the same functions record it into this folder and run live in a cell.

    python data/record.py

takes about sixteen minutes of a quiet machine with two cores or more. The server keeps to the first core, the clients
to the others, so that neither takes the other's time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

import llmprofile as lp

HERE = Path(__file__).parent
RUNS = HERE / "runs"
RATES = (100, 200, 300, 400)
TOKENS = 50
TTFT_S, ITL_S, CV = 0.05, 0.01, 0.5
RUN_S = 4.0


@contextmanager
def serving(**engine: Any) -> Iterator[lp.ReferenceServer]:
    """A reference server on the first core, this process and the clients that it starts on the others."""
    cores = sorted(os.sched_getaffinity(0))
    with lp.ReferenceServer(**{"ttft_s": TTFT_S, "itl_s": ITL_S, "cv": CV, "cpus": cores[:1]} | engine) as server:
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            yield server
        finally:
            os.sched_setaffinity(0, cores)


def measure(server: lp.ReferenceServer, client: str, rate_per_s: float, seconds: float, **options: Any) -> lp.Run:
    """One run of Poisson arrivals; among its requests TTFT and TPOT by the server's own record, `truth_…`."""
    defaults = {"output_tokens": TOKENS, "seed": 1, "out": Path(tempfile.mkdtemp()) / "run", "progress": False}
    n = max(20, round(rate_per_s * seconds))
    run = lp.run_load(server.url, lp.Poisson(rate_per_s), n, client=client, **defaults | options)
    truth = server.truth(forget=True).set_index("request_id")
    known = {"truth_s": truth["first_ns"] - truth["arrive_first_ns"]}
    known["truth_tpot_s"] = (truth["last_ns"] - truth["first_ns"]) / (truth["tokens"] - 1)
    for name, found_ns in known.items():
        run.requests[name] = run.requests["request_id"].map(found_ns / 1e9)
    return run


def record_runs(folder: Path, seconds: float, rates: tuple[int, ...] = RATES) -> None:
    """Both clients at each rate, before unsynchronised streams ("poisson") and decode steps ("steps"); one of lengths.

    That one has requests of 1 to 200 tokens, and none of its events.
    """
    cases = [(client, rate) for rate in rates for client in ("conventional", "stamped")]
    for engine in ("poisson", "steps"):
        # each running sequence has its token at each step: there is no jitter in those
        with serving(**({"step": True, "cv": 0.0} if engine == "steps" else {})) as server:
            for client, rate in tqdm(cases, desc=f"runs, {engine}"):
                measure(server, client, rate, seconds, out=folder / f"{client}-{engine}-{rate}")
    lengths = folder / "lengths"
    with serving() as server:
        measure(server, "stamped", rates[0], 2.5 * seconds, output_tokens=lp.Uniform(1, 200), out=lengths)
    for name in ("events", "cycles"):
        (lengths / f"{name}.parquet").unlink()


def recorded(folder: Path, client: str, engine: str) -> dict[int, lp.Run]:
    """The recorded runs of a client before an engine, by rate."""
    paths = sorted(folder.glob(f"{client}-{engine}-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    return {int(path.name.rsplit("-", 1)[1]): lp.load(path) for path in paths}


def cost_per_event_s(server: lp.ReferenceServer, work_s: float, rho: float, seconds: float) -> float:
    """What an event costs a conventional client near a utilisation, its share of a request's sending included."""
    cost_s = 50e-6 + work_s
    for _ in range(2):  # an event costs less at a high rate than at a low one
        run = measure(server, "conventional", min(rho, 0.8) / cost_s / TOKENS, seconds, event_work_s=work_s)
        pooled = lp.fit_mg1(run).parameters.loc["pooled"]["estimate"]
        cost_s = pooled["utilisation"] / pooled["rate_per_s"] * (TOKENS + 1) / TOKENS
    return cost_s


def reported_and_true(run: lp.Run, from_s: float, until_s: float) -> dict[str, float]:
    """Mean TTFT as reported from begun and from due, and by the server's record; TPOT too; of a part of the run."""
    ok = run.requests[run.requests["outcome"] == "ok"].dropna(subset=["truth_s"])
    due_s = (ok["due_ns"] - run.requests["due_ns"].min()) / 1e9
    part = ok[(due_s >= from_s) & (due_s < until_s)]
    return {
        "requests": len(part),
        "begun_s": part["ttft_handled_s"].mean(),
        "due_s": ((part["first_handled_ns"] - part["due_ns"]) / 1e9).mean(),
        "true_s": part["truth_s"].mean(),
        "tpot_s": part["tpot_handled_s"].mean(),
        "true_tpot_s": part["truth_tpot_s"].mean(),
    }


def inflation(
    seconds: float,
    rhos: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95),
    ttfts_s: tuple[float, ...] = (0.005, 0.05),
    works_s: tuple[float, ...] = (0.0, 0.0004),
) -> pd.DataFrame:
    """Reported over true TTFT of a conventional client against ρ, in the first half of each run and in the whole."""
    rows = []
    for ttft_s in ttfts_s:
        with serving(ttft_s=ttft_s) as server:
            for work_s in works_s:
                for rho in tqdm(rhos, desc=f"inflation, TTFT {ttft_s * 1e3:g} ms, {work_s * 1e3:g} ms of work"):
                    cost_s = cost_per_event_s(server, work_s, rho, seconds / 6)
                    run = measure(server, "conventional", rho / cost_s / TOKENS, seconds, event_work_s=work_s)
                    fitted = lp.fit_mg1(run).parameters.loc["pooled"]["estimate"]
                    about = {"base_ttft_s": ttft_s, "event_work_s": work_s, "rho_asked": rho, "run_s": seconds}
                    about |= {"rho": fitted["utilisation"], "mean_service_s": fitted["mean_service_s"]}
                    for part, until_s in (("half", seconds / 2), ("whole", seconds)):
                        rows.append(about | {"part": part} | reported_and_true(run, min(1.0, seconds / 4), until_s))
    return pd.DataFrame(rows)


def overload(seconds: float, rho: float = 1.3, ttft_s: float = 0.05, work_s: float = 0.0004) -> pd.DataFrame:
    """The same beyond ρ = 1, over runs of T, 2T and 4T: each is the start of one run of 4T."""
    with serving(ttft_s=ttft_s) as server:
        cost_s = cost_per_event_s(server, work_s, rho, seconds / 6)
        run = measure(server, "conventional", rho / cost_s / TOKENS, seconds, event_work_s=work_s)
    return pd.DataFrame(
        {"run_s": seconds / cut, "rho_asked": rho, "mean_service_s": cost_s} | reported_and_true(run, 0, seconds / cut)
        for cut in (4, 2, 1)
    )


def queueing_server(seconds: float, rates: tuple[int, ...] = (10, 20, 25, 30), max_batch: int = 24) -> pd.DataFrame:
    """A server that queues by itself: TTFT by its record, on the wire, and as each client reports it.

    The conventional one works half a millisecond on each event, so that it queues as well.
    """
    rows = []
    with serving(max_batch=max_batch, cv=0.0) as server:
        for rate in tqdm(rates, desc="a server that queues"):
            for client in ("conventional", "stamped"):
                work_s = 0.0005 if client == "conventional" else 0.0
                run = measure(server, client, rate, seconds, seed=rate, event_work_s=work_s)
                ok = run.requests[run.requests["outcome"] == "ok"]
                clock = "ttft_handled_s" if client == "conventional" else "ttft_seen_s"
                row = {"rate_per_s": rate, "client": client, "requests": len(ok), "bounded": ok["bounded"].mean()}
                row |= {"rho": lp.fit_mg1(run).parameters.loc["pooled"]["estimate"]["utilisation"]}
                rows.append(
                    row
                    | {"truth_s": ok["truth_s"].mean(), "wire_s": ok["ttft_s"].mean(), "reported_s": ok[clock].mean()}
                )
    return pd.DataFrame(rows)


def processes(seconds: float, rate_per_s: float = 28, work_s: float = 0.0005) -> pd.DataFrame:
    """How many processes a fit at six tenths of a rate says are needed, and the time in the client with one and two.

    Half a millisecond of work an event, so that the server's core has room for the second process. The budget lies
    between what is predicted for one process and for two.
    """
    cores = sorted(os.sched_getaffinity(0))
    with lp.ReferenceServer(ttft_s=TTFT_S, itl_s=ITL_S, cv=CV, cpus=cores[:1]) as server:
        fit = lp.fit_mg1(measure(server, "conventional", 0.6 * rate_per_s, seconds, event_work_s=work_s))
        runs = {
            k: measure(server, "conventional", rate_per_s, seconds, processes=k, event_work_s=work_s) for k in (1, 2)
        }
    predicted_s = {k: fit.mean_time_s(rate_per_s * (TOKENS + 1) / k) for k in runs}
    budget_s = (predicted_s[1] * predicted_s[2]) ** 0.5
    about = {"rate_per_s": rate_per_s, "budget_s": budget_s}
    about["needed"] = lp.processes_needed(fit, rate_per_s, TOKENS, budget_s).needed
    return pd.DataFrame(
        {
            **about,
            "processes": k,
            "predicted_s": predicted_s[k],
            "time_s": lp.fit_mg1(run).times.loc["mean", "measured_s"],
            "bias_s": lp.separate_bias(run).frame.loc["ttft_s", "difference_s"],
        }
        for k, run in runs.items()
    )


TABLES = {inflation: 18.0, overload: 32.0, queueing_server: 10.0, processes: 20.0}
"""How long a run of each table is, s."""


def main() -> None:
    """Record everything."""
    for old in (*RUNS.glob("*-*-*"), RUNS / "lengths"):  # the engines' runs beside are not made here
        shutil.rmtree(old, ignore_errors=True)
    record_runs(RUNS, RUN_S)
    for table, seconds in TABLES.items():
        table(seconds).to_csv(HERE / f"{table.__name__}.csv", index=False)
    facts = lp.load(RUNS / "lengths").meta
    machine = facts["machine"]
    print(f"recorded {facts['started_utc']} on {machine['processor']}, {machine['cores']} cores, {machine['system']}")
    print(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))


if __name__ == "__main__":
    main()
