"""What the queueing models say of the time in the client, fitted at one rate and judged at others.

    python tests/benchmarks/models.py [--step] [--client conventional] [--rates 100 175 250 325 400] [--seconds 8]
        [--rounds 5]
    python tests/benchmarks/models.py --step --seconds 5 --rates 80 100 125 160 200 250 320 400 450

One client streams 50 tokens a request from the reference server (50 ms to the first token, 10 ms between tokens; CV 0.5
and unsynchronised, or with --step a token for each running request at each decode step). The server keeps to the first
core, the client to the second. In each round the rates come in a random order. Each model is fitted to each run, and
predicts the mean time in the client (from the wire to handled, or seen) of the round's runs at the rates next to its
own; a rate's prediction is the mean of those from its neighbours' fits: what an event costs differs between low rates
and high ones, so that rates close to each other predict each other best. Others who use the machine disturb single
runs: read medians and the spread over rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from clients import heading, spread

import llmprofile as lp
from llmprofile.units import show_rate, show_time

TOKENS = 50


def measure(url: str, asked: argparse.Namespace, rate: float, seed: int, folder: Path) -> lp.Run:
    """One run at a rate."""
    return lp.run_load(
        url,
        lp.Poisson(rate),
        round(rate * asked.seconds),
        prompt_tokens=128,
        output_tokens=TOKENS,
        client=asked.client,
        seed=seed,
        out=folder,
        progress=False,
    )


def judge(runs: dict[float, lp.Run]) -> pd.DataFrame:
    """Of one round: a row a rate, with the measured mean and what each model says of it."""
    fits = {rate: (lp.fit_mg1(run), lp.fit_batch(run), lp.fit_loop(run)) for rate, run in runs.items()}
    rows, rates = [], sorted(runs)
    for place, rate in enumerate(rates):
        run, others = runs[rate], [fits[rates[k]] for k in (place - 1, place + 1) if 0 <= k < len(rates)]
        own = fits[rate][0].parameters.loc["pooled"]["estimate"]
        said = {
            "M/G/1": [queue.predict(run).at["mean", "predicted_s"] for queue, _, _ in others],
            "batches": [batch.predict(run).at["mean", "predicted_s"] for _, batch, _ in others],
            "gated loop": [loop.predict(run).predicted["mean_s"] for _, _, loop in others],
        }
        row = {"rate": rate, "rho": own["utilisation"], "cost_s": own["mean_service_s"]}
        row |= {"measured": fits[rate][0].times.at["mean", "measured_s"]}
        rows.append(row | {name: float(np.mean(values)) for name, values in said.items()})
    return pd.DataFrame(rows)


def table(found: pd.DataFrame) -> str:
    """Medians over the rounds, with lowest and highest; and each model's ratio to what was measured."""
    lines = []
    for rate, rows in found.groupby("rate"):
        ratios = {name: (rows[name] / rows["measured"]).to_numpy() for name in ("M/G/1", "batches", "gated loop")}
        cost, measured = (spread(rows[name].to_numpy(), show_time) for name in ("cost_s", "measured"))
        events = f"{show_rate(rate * TOKENS)} events, ρ {rows['rho'].median():.2f}"
        lines.append(f"{events}, cost {cost}: measured {measured}")
        for name, ratio in ratios.items():
            said = spread(rows[name].to_numpy(), show_time)
            lines.append(f"    {name:11}{said:36}over measured {spread(ratio, '{:.2f}'.format)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 175.0, 250.0, 325.0, 400.0])
    parser.add_argument("--client", choices=("stamped", "conventional"), default="conventional")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", action="store_true")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    load = f"{asked.client} client, {asked.seconds:g} s of {TOKENS} tokens a request, {asked.rounds} rounds"
    print(heading("models.py", f"{load}; median (lowest to highest)"), flush=True)
    rng, rounds = np.random.default_rng(1), []
    with (
        lp.ReferenceServer(step=asked.step, cv=0.0 if asked.step else 0.5, cpus=cores[:1]) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        os.sched_setaffinity(0, cores[1:2] or cores)  # the clients' processes inherit it
        for k in range(asked.rounds):
            order = rng.permutation(asked.rates).tolist()
            runs = {rate: measure(server.url, asked, rate, k, Path(folder) / f"{k}-{rate:g}") for rate in order}
            rounds.append(judge(runs))
            print(rounds[-1].to_string(index=False), flush=True)
    print(table(pd.concat(rounds)))


if __name__ == "__main__":
    main()
