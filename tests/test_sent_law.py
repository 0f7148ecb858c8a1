"""Bursty arrivals stay as bursty at the send: counts of what was really sent, against the law's own by simulation.

Gaps of Gamma and trace arrivals, and Poisson's counts, are tested where whole runs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import llmprofile as lp
from test_launch import law_distance

RATE_PER_S, SHAPE, N = 400, 0.25, 1200
WINDOWS = (5, 20)
"""In mean gaps."""
SIMULATED = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.005) as server:
        yield server


def index(times_s: np.ndarray, window: int) -> float:
    """Variance over mean of the counts in windows of so many mean gaps; 1 for a Poisson stream."""
    slots = ((times_s - times_s[0]) * ((len(times_s) - 1) / np.ptp(times_s) / window)).astype(int)
    counts = np.bincount(slots)[:-1]
    return float(counts.var(ddof=1) / counts.mean())


@cache
def simulated_band(window: int, share: float) -> tuple[float, float]:
    """Between which the index of a gamma stream lies 99.9 % of the time, when a share of it is dealt."""
    rng, indices = np.random.default_rng(12), []
    for _ in range(SIMULATED):
        times_s = np.cumsum(rng.gamma(SHAPE, 1 / RATE_PER_S / SHAPE, N))
        indices.append(index(times_s[rng.random(N) < share], window))
    low, high = np.quantile(indices, [0.0005, 0.9995])
    return float(low), float(high)


@pytest.mark.parametrize("processes", [1, 4])
def test_gamma_arrivals_are_as_bursty_at_the_send(server: lp.ReferenceServer, tmp_path: Path, processes: int) -> None:
    options = {"output_tokens": 1, "prompt_tokens": 5, "processes": processes, "seed": 9, "progress": False}
    run = lp.run_load(server.url, lp.Gamma(RATE_PER_S, SHAPE), N, out=tmp_path / "run", **options)
    sent_s = run.requests.set_index("worker")["sent_ns"].astype(float) / 1e9
    pooled = np.sort(sent_s.to_numpy())
    parts = [np.sort(sent_s[[worker]].to_numpy()) for worker in range(processes)]
    for window in WINDOWS:
        low, high = simulated_band(window, 1.0)
        # a Poisson stream, whose index is 1, would be seen
        assert low > 1.5
        assert low <= index(pooled, window) <= high, window
        low, high = simulated_band(window, 1 / processes)
        for part in parts:
            assert low <= index(part, window) <= high, window


def test_another_law_of_the_same_rate_would_be_seen() -> None:
    """What the tests of gaps allow beyond the band of Kolmogorov and Smirnov hides no Poisson stream."""
    rng = np.random.default_rng(3)
    gaps_s, poisson_s = rng.gamma(SHAPE, 1 / RATE_PER_S / SHAPE, N), rng.exponential(1 / RATE_PER_S, N)
    band = stats.kstwo.ppf(0.999, N)
    assert law_distance(gaps_s, rng.gamma(SHAPE, 1 / RATE_PER_S / SHAPE, 100 * N), 0.0) < band
    assert law_distance(poisson_s, gaps_s, 0.0005) > 2 * band
