"""What each client costs and how far it is off, beside a plain aiohttp script and the leanest stamped client.

    python tests/benchmarks/clients.py [--rate 400] [--tokens 50] [--seconds 8] [--rounds 3] [--step]

Four clients take turns against one reference server (50 ms to the first token, 10 ms between tokens, CV 0.5, or
decode steps with --step): `plain.py`, our conventional client, `prototype.py`, our stamped client. The server keeps to
the first core, each client to the second. In a round all four send the same Poisson arrivals.

CPU: process time over the load, per token; what a client keeps of it included. Error: the TTFT that a client reports
(plain and conventional: begun to first token handled; prototype and stamped: sent to the kernel's stamp of the first
token) less the server's (the kernel's stamp of the request's first byte to just before the first token's send).
Others who use the machine disturb all four: compare within one run, and by the ratios, which are taken within rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

import llmprofile as lp
from llmprofile.machine import machine_facts
from llmprofile.units import show_time

PROMPT_TOKENS = 128


class Figures(NamedTuple):
    """One client's load: CPU seconds a token, mean and p99 of the TTFT's error, seconds."""

    cpu_s: float
    mean_error_s: float
    p99_error_s: float


def run_script(name: str, url: str, asked: argparse.Namespace, seed: int) -> tuple[float, pd.Series]:
    """CPU seconds, and TTFT by number, ns, of a script beside this one."""
    script = Path(__file__).with_name(f"{name}.py")
    given = (url, asked.rate, asked.requests, PROMPT_TOKENS, asked.tokens, seed, name)
    done = subprocess.run([sys.executable, script, *map(str, given)], check=True, stdout=subprocess.PIPE)
    said = json.loads(done.stdout)
    rows = pd.DataFrame(said["rows"], columns=["request_id", "start_ns", "first_ns"]).set_index("request_id")
    return said["cpu_s"], rows["first_ns"] - rows["start_ns"]


def run_ours(name: str, url: str, asked: argparse.Namespace, seed: int) -> tuple[float, pd.Series]:
    """The same of one of our clients."""
    with tempfile.TemporaryDirectory() as folder:
        run = lp.run_load(
            url,
            lp.Poisson(asked.rate),
            asked.requests,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=asked.tokens,
            client=name,
            seed=seed,
            out=Path(folder) / "run",
            progress=False,
        )
    ok = run.requests[run.requests["outcome"] == "ok"].set_index("request_id")
    column = "ttft_s" if name == "stamped" else "ttft_handled_s"
    return run.meta["workers"][0]["cpu_s"], ok[column] * 1e9


RUNS: dict[str, Callable[[str, str, argparse.Namespace, int], tuple[float, pd.Series]]] = {
    "plain": run_script,
    "conventional": run_ours,
    "prototype": run_script,
    "stamped": run_ours,
}


def measure(server: lp.ReferenceServer, name: str, asked: argparse.Namespace, seed: int) -> Figures:
    """Let one client make its load, and hold what it reports against what the server knows."""
    cpu_s, ttft_ns = RUNS[name](name, server.url, asked, seed)
    truth = server.truth(forget=True).set_index("request_id")
    true_ns = truth["first_ns"] - truth["arrive_first_ns"]
    error_s = ((ttft_ns - true_ns) / 1e9).dropna().to_numpy(float)
    if len(error_s) < asked.requests:
        print(f"{name}: only {len(error_s)} of {asked.requests} requests have a TTFT", file=sys.stderr)
    return Figures(cpu_s / (asked.requests * asked.tokens), error_s.mean(), np.quantile(error_s, 0.99))


def spread(values: np.ndarray, show: Callable[[float], str]) -> str:
    """Median (lowest to highest)."""
    return f"{show(float(np.median(values)))} ({show(values.min())} to {show(values.max())})"


def table(rounds: dict[str, np.ndarray]) -> str:
    """The medians over rounds of each client's figures, with lowest and highest."""
    lines = [("client", "CPU per token", "mean error of TTFT", "p99 of the error")]
    lines += [(name, *(spread(column, show_time) for column in figures.T)) for name, figures in rounds.items()]
    return "\n".join(f"{a:14}{b:34}{c:34}{d}" for a, b, c, d in lines)


def verdicts(rounds: dict[str, np.ndarray]) -> str:
    """One client's figures over another's, by rounds, and what they should be."""
    asked = [
        ("conventional", "plain", "CPU", 0, "0.8–1.2"),
        ("conventional", "plain", "mean error", 1, "0.8–1.2"),
        ("stamped", "prototype", "CPU", 0, "at most 1.4"),
        ("stamped", "plain", "CPU", 0, "below 1"),
    ]
    lines = []
    for ours, other, what, column, wanted in asked:
        ratio = rounds[ours][:, column] / rounds[other][:, column]
        lines.append(f"{ours}/{other} {what} ratio {spread(ratio, '{:.2f}'.format)} (should be {wanted})")
    return "\n".join(lines)


def heading(script: str, load: str) -> str:
    """The command, the machine, and what was loaded."""
    facts = machine_facts()
    command = shlex.join(["python", f"tests/benchmarks/{script}", *sys.argv[1:]])
    machine = f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, load {facts['load_1min']:.1f}"
    versions = f"Python {platform.python_version()}, aiohttp {metadata.version('aiohttp')}"
    return f"{command}\n{machine}, {versions}\n{load}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=400)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", action="store_true")
    asked = parser.parse_args()
    asked.requests = round(asked.rate * asked.seconds)
    cores = sorted(os.sched_getaffinity(0))
    load = f"{asked.requests} requests of {asked.tokens} tokens at {asked.rate:g}/s, {asked.rounds} rounds"
    print(heading("clients.py", f"{load}; median (lowest to highest)"), flush=True)
    figures: dict[str, list[Figures]] = {name: [] for name in RUNS}
    with lp.ReferenceServer(step=asked.step, cv=0.5, cpus=cores[:1]) as server:
        os.sched_setaffinity(0, cores[1:2] or cores)  # the clients' processes inherit it
        for seed in range(asked.rounds):
            for name in RUNS:
                figures[name].append(measure(server, name, asked, seed))
    rounds = {name: np.array(of) for name, of in figures.items()}
    print(table(rounds), verdicts(rounds), sep="\n\n")


if __name__ == "__main__":
    main()
