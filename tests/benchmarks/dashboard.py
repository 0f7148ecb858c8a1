"""What the live dashboard does to the run that it shows: bias and lateness with and without it, in turns.

    python tests/benchmarks/dashboard.py [--rate 400] [--tokens 50] [--seconds 6] [--rounds 4]
        [--client stamped] [--processes 1]

The client streams from the reference server (50 ms to the first token, 10 ms between tokens, CV 0.5). The server keeps
to the first core and the workers to the second; the caller stays on the first, and the dashboard in it, as a kernel
would that shares the machine with its workers. No browser looks on. In a round the same load runs without the
dashboard and with it, which goes first alternates. Bias: of TTFT on the client's own clock against the wire.
Others who use the machine disturb single runs: read medians and the spread over rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from clients import heading, spread

import llmprofile as lp
from llmprofile.bias import metric_bias, own_clock, paired_latencies
from llmprofile.units import show_time
from llmprofile.widgets import dashboard


class Figures(NamedTuple):
    """Of one run, seconds."""

    bias: float
    bias_p99: float
    lateness_p50: float
    lateness_p99: float
    caller_cpu: float


def measure(url: str, asked: argparse.Namespace, seed: int, shown: bool, folder: Path) -> Figures:
    """One run; the caller's CPU is that of the load, without the merge."""
    load = lp.start_load(
        url,
        lp.Poisson(asked.rate),
        round(asked.rate * asked.seconds),
        output_tokens=asked.tokens,
        client=asked.client,
        processes=asked.processes,
        seed=seed,
        salt=seed,
        out=folder,
        progress=False,
    )
    view = dashboard(load) if shown else None
    cpu_s = time.process_time()
    while load.progress.state in ("starting", "running"):
        time.sleep(0.05)
    cpu_s = time.process_time() - cpu_s
    run = load.wait()
    if view is not None:
        view.close()
    bias = metric_bias(paired_latencies(run, "ttft_s"), own_clock(run))
    late_s = run.requests["lateness_s"].quantile([0.5, 0.99])
    return Figures(bias["difference_s"], bias["difference_p99_s"], *late_s, cpu_s)


def table(off: np.ndarray, on: np.ndarray) -> str:
    """A row a figure: without, with, and the difference within rounds."""
    lines = [f"{'':20}{'without':34}{'with':34}with − without"]
    for k, name in enumerate(("bias, mean", "bias, p99", "lateness, p50", "lateness, p99", "CPU of the caller")):
        cells = (spread(values[:, k], show_time) for values in (off, on, on - off))
        lines.append(f"{name:20}" + "".join(f"{cell:34}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=400)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--client", choices=("stamped", "conventional"), default="stamped")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    events = (
        f"{asked.rate * asked.tokens:,.0f} events/s, {asked.seconds:g} s, {asked.client}, {asked.processes} workers"
    )
    print(heading("dashboard.py", f"{events}, {asked.rounds} rounds"), flush=True)
    found: dict[bool, list[Figures]] = {False: [], True: []}
    with (
        lp.ReferenceServer(ttft_s=0.05, itl_s=0.01, cv=0.5, cpus=cores[:1]) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        short = argparse.Namespace(**{**vars(asked), "seconds": 1.0})
        os.sched_setaffinity(0, cores[1:2] or cores)  # the workers are made now, inherit it, and serve all runs
        measure(server.url, short, 0, True, Path(folder) / "first")
        os.sched_setaffinity(0, cores[:1])
        for k in range(asked.rounds):
            for shown in (False, True) if k % 2 == 0 else (True, False):
                found[shown].append(measure(server.url, asked, k, shown, Path(folder) / f"{k}-{shown}"))
                server.truth(forget=True)
    print(table(np.array(found[False]), np.array(found[True])))


if __name__ == "__main__":
    main()
