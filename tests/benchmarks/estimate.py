"""The bias that a model tells from user-space clocks alone, beside the bias that the kernel's stamps measure.

    python tests/benchmarks/estimate.py [--step] [--rates 60 150 250 350 450] [--seconds 5]

Both clients stream 50 tokens a request from the reference server (50 ms to the first token, 10 ms between tokens, CV
0.5; a token for each running request at each decode step with --step), which keeps to the first core, the client to the
second. Of each run the bias of the mean TTFT and E2E is measured (`separate_bias`) and estimated (`estimate_bias`,
which does not look at stamps).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from clients import heading

import llmprofile as lp
from llmprofile.units import show_rate, show_time


def line(url: str, client: str, rate: float, seconds: float) -> str:
    """One run: its bias as measured and as estimated."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"output_tokens": 50, "client": client, "seed": 1, "out": Path(folder) / "run", "progress": False}
        run = lp.run_load(url, lp.Poisson(rate), round(rate * seconds), **asked)
        measured, estimated = lp.separate_bias(run), lp.estimate_bias(run)
    cells = [f"{client:14}{show_rate(50 * rate):>10}{measured.bounded_share:10.1%}"]
    for metric in ("ttft_s", "e2e_s"):
        true_s, said_s = (table.frame.at[metric, "difference_s"] for table in (measured, estimated))
        told = f"{show_time(said_s)} ({said_s / true_s - 1:+.0%})" if said_s == said_s else "can't tell"
        cells.append(f"{show_time(true_s):>12}{told:>20}")
    return "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[60.0, 150.0, 250.0, 350.0, 450.0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--step", action="store_true")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print(heading("estimate.py", f"{asked.seconds:g} s of 50 tokens a request"), flush=True)
    print("client          events/s   bounded   bias of TTFT, estimated         bias of E2E, estimated")
    with lp.ReferenceServer(step=asked.step, cv=0.0 if asked.step else 0.5, cpus=cores[:1]) as server:
        os.sched_setaffinity(0, cores[1:2] or cores)  # the clients' processes inherit it
        for client in ("conventional", "stamped"):
            for rate in asked.rates:
                print(line(server.url, client, rate, asked.seconds), flush=True)


if __name__ == "__main__":
    main()
