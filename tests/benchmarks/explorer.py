"""How long the queue explorer takes to answer a move of a slider.

    python tests/benchmarks/explorer.py [--moves 300]

From the move to the finished HTML, without the browser; wall-clock time, and CPU time, which others who use the
machine disturb less. Sliders stand anywhere between their ends, ρ above 1 included;
those that are known to be hard come by name.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from clients import heading

from llmprofile.explore import queue_html
from llmprofile.scenario import Scenario, look_at_queue

HARD = {
    "as it opens": Scenario(),
    "constant services": Scenario(scv=0.0),
    "constant services, ρ 0.999": Scenario(rate_per_s=399.6, scv=0.0),
    "c² 8, ρ 0.99": Scenario(rate_per_s=396, scv=8.0),
    "bursts of 32": Scenario(burst=32),
    "bursts of 200 in 2 processes": Scenario(rate_per_s=600, burst=200, processes=2),
    "the same, constant": Scenario(rate_per_s=600, burst=200, processes=2, scv=0.0),
    "the same, ρ 0.99": Scenario(rate_per_s=792, burst=200, processes=2),
    "the same, ρ 0.999": Scenario(rate_per_s=799.2, burst=200, processes=2),
    "the same, ρ 0.9999": Scenario(rate_per_s=799.92, burst=200, processes=2),
    "bursts of 200, c² 0.25, ρ 0.99": Scenario(rate_per_s=792, burst=200, processes=2, scv=0.25),
    "bursts of 2 in 16 processes, ρ 0.99": Scenario(rate_per_s=6336, burst=2, processes=16),
    "ρ 2": Scenario(rate_per_s=800),
}


def anywhere(rng: np.random.Generator) -> Scenario:
    """Sliders anywhere; half of the time the service is such that ρ lies between 0 and 1."""
    rate, tokens, processes = 10 ** rng.uniform(0, 4), int(rng.integers(1, 2001)), int(rng.integers(1, 17))
    service_s = 10 ** rng.uniform(-6, -3)
    if rng.random() < 0.5:
        service_s = rng.uniform(0.01, 0.995) * processes / rate / tokens
    scv, burst = rng.integers(0, 33) / 4, int(rng.integers(1, 201))
    return Scenario(rate, tokens, service_s, float(scv), burst, processes)


def seconds(scenario: Scenario) -> tuple[float, float]:
    """Wall-clock and CPU time of one move."""
    start = time.perf_counter(), time.process_time()
    queue_html(look_at_queue(scenario))
    return time.perf_counter() - start[0], time.process_time() - start[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=300)
    asked = parser.parse_args()
    print(heading("explorer.py", f"{asked.moves} moves anywhere"), flush=True)
    seconds(Scenario())  # imports and tables
    for name, scenario in HARD.items():
        took = np.array([seconds(scenario) for _ in range(5)]) * 1e3
        (wall, cpu), longest = np.median(took, axis=0), took[:, 0].max()
        print(f"{name:40}median {wall:6.0f} ms, longest {longest:6.0f} ms; CPU {cpu:6.0f} ms")
    rng = np.random.default_rng(1)
    scenarios = [anywhere(rng) for _ in range(asked.moves)]
    took = np.array([seconds(scenario) for scenario in scenarios])
    for what, times_s in zip(("wall clock", "CPU"), took.T, strict=True):
        p50, p90, p99, longest = np.quantile(times_s, [0.5, 0.9, 0.99, 1]) * 1e3
        print(f"anywhere, {what:11}median {p50:.0f} ms, p90 {p90:.0f} ms, p99 {p99:.0f} ms, longest {longest:.0f} ms")
    print(f"the longest was {scenarios[int(took[:, 1].argmax())]}")


if __name__ == "__main__":
    main()
