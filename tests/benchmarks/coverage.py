"""How often 95 % intervals of the fits cover the truth of simulated queues, over 200 seeds each.

python tests/benchmarks/coverage.py [SEEDS]: prints a table, a row a parameter; takes about two minutes.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pandas as pd

from llmprofile.fitting import fit_batch, fit_mg1
from llmprofile.sweep import fit_sweep
from test_fitting import batch_load, mg1_load, simulated_run, truth_of
from test_sweep import JOBS, RATES, SERVICE_S, growing, noisy, simulated_mean_s


def counted(name, truth, fits):
    """Print for each parameter how many of the fits' intervals cover it, how wide they are, and how many there are."""
    frames = list(fits)
    for parameter, value in truth.items():
        rows = np.array([frame.loc[parameter, ["estimate", "lo", "hi"]].to_numpy(float) for frame in frames])
        known = ~np.isnan(rows).any(axis=1)
        estimate, low, high = rows[known].T
        covered = np.mean((low <= value) & (value <= high)) if known.any() else np.nan
        bias, width = np.mean(estimate) / value - 1, np.median((high - low) / 2) / value
        print(f"{name:34} {parameter:18} {covered:8.1%} {known.sum():5d} {bias:+9.2%} {width:9.2%}")


def mg1(rho, n, seeds):
    truth = {name: value for name, value in truth_of(rho, 30e-6).items() if name != "wakeup_s"} | {"wakeup_s": 30e-6}
    fits = [fit_mg1(simulated_run([mg1_load(rho, n, np.random.default_rng(s), 30e-6)])) for s in range(seeds)]
    counted(f"M/G/1, rho {rho}, {n:,} jobs", truth, (fit.parameters.loc["pooled"] for fit in fits))
    # as the parameters' own: on the logarithm, with Student's law of some 20 blocks
    rows = [fit.times.loc["mean", ["measured_s", "measured_se_s"]].to_numpy(float) for fit in fits]
    spread = [(mean, mean * math.exp(-2.08 * se / mean), mean * math.exp(2.08 * se / mean)) for mean, se in rows]
    frames = (pd.DataFrame([row], ["measured mean"], ["estimate", "lo", "hi"]) for row in spread)
    counted(f"M/G/1, rho {rho}, {n:,} jobs", {"measured mean": truth["mean_time_s"]}, frames)


def periodic(seeds):
    size = 10
    truth = {"mean_service_s": 50e-6, "scv": 1.0, "batch_mean": size, "batch_scv": (size - 1) / size**2}
    fits = (fit_batch(simulated_run([batch_load(0.005, size, 6000, np.random.default_rng(s))])) for s in range(seeds))
    counted("D^X/G/1, rho 0.1", truth, (fit.parameters.loc["pooled"] for fit in fits))


def sweep(noise, seeds):
    truth = {"mean_service_s": SERVICE_S, "scv": 1.0}
    counted(f"sweep, errors of {noise:.2%}", truth, (noisy(s, noise).parameters for s in range(seeds)))


def queueing_sweep(server_noise, seeds, jobs=100_000):
    def one(rng):
        rates, processes = np.tile(RATES, 2), np.repeat([1.0, 2.0], len(RATES))
        client_s = [simulated_mean_s(r * JOBS / k, jobs, rng) for r, k in zip(rates, processes, strict=True)]
        server_s = growing(rates) * (1 + server_noise * rng.standard_normal(len(rates)))
        return fit_sweep(rates, server_s + np.array(client_s), processes, JOBS).parameters

    truth = {"mean_service_s": SERVICE_S}
    name = f"sweep, queues, server {server_noise:.2%}"
    counted(name, truth, (one(np.random.default_rng(s)) for s in range(seeds)))


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(f"{'':34} {'parameter':18} {'covered':>8} {'known':>5} {'bias':>9} {'half width':>9}")
    for rho, n in ((0.3, 10_000), (0.5, 15_000), (0.8, 20_000)):
        mg1(rho, n, seeds)
    periodic(max(1, seeds // 4))
    for noise in (1e-5, 1e-4, 5e-4):
        sweep(noise, seeds)
    for noise in (0.0, 1e-4, 5e-4):
        queueing_sweep(noise, seeds)
