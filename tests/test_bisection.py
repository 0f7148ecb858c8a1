"""Searches on servers that a function plays: how often intervals and answers hold, against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from llmprofile.bisection import (
    FAILS,
    INTERRUPTED,
    MEETS,
    OPEN,
    UNMEASURED,
    Rule,
    Sample,
    block_growths,
    clustered_interval,
    growth_interval,
    judge,
    look_level,
    most_steps,
    search,
)
from llmprofile.lindley import simulate
from llmprofile.queueing import MD1

SERVICE_S, LIMIT_S, SHARE = 0.01, 0.025, 0.9
BLOCKS = 10


def queue_run(rate_per_s: float, duration_s: float, rng: np.random.Generator, warm: int = 0) -> tuple[Any, Any]:
    """Arrivals and times in a queue with constant services; the first `warm` left out."""
    n = warm + max(1, rng.poisson(rate_per_s * duration_s))
    due_s = np.cumsum(rng.exponential(1 / rate_per_s, n))
    times_s = simulate(due_s, np.full(n, SERVICE_S)) + SERVICE_S
    return due_s[warm:] - due_s[warm], times_s[warm:]


def played(
    rate_per_s: float, duration_s: float, rng: np.random.Generator, warm: int = 0, blocks: int = BLOCKS
) -> Sample:
    due_s, times_s = queue_run(rate_per_s, duration_s, rng, warm)
    block = np.minimum((due_s / duration_s * blocks).astype(int), blocks - 1)
    total, met = (np.bincount(block, weights, blocks).astype(int) for weights in (None, times_s <= LIMIT_S))
    return Sample(met[total > 0], total[total > 0], block_growths(due_s, times_s, blocks))


def share_at(rate_per_s: float) -> float:
    return float(MD1(rate_per_s, SERVICE_S).wait_cdf(LIMIT_S - SERVICE_S))


TRUE_LIMIT = float(optimize.brentq(lambda rate: share_at(rate) - SHARE, 20, 99))


# intervals


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("level", [0.9, 0.99])
def test_bounds_of_independent_requests_hold_as_often_as_they_say(p: float, level: float) -> None:
    seeds, rng = 2000, np.random.default_rng(1)
    missed = {"low": 0, "high": 0}
    for _ in range(seeds):
        low, high = clustered_interval(rng.binomial(40, p, 20), np.full(20, 40), level)
        missed["low"] += low > p
        missed["high"] += high < p
    for side, count in missed.items():
        assert count / seeds <= (1 - level) + 4 * math.sqrt(level * (1 - level) / seeds), side


def test_bounds_are_clopper_and_pearsons_where_blocks_are_alike() -> None:
    low, high = clustered_interval(np.full(400, 9), np.full(400, 10), 0.95)
    # blocks of equal shares have no variance between them; Student's factor is what is left
    worth = 4000 * (stats.t.ppf(0.95, 3999) / stats.t.ppf(0.95, 399)) ** 2
    assert low == pytest.approx(stats.beta.ppf(0.05, 0.9 * worth, 0.1 * worth + 1))
    assert high == pytest.approx(stats.beta.ppf(0.95, 0.9 * worth + 1, 0.1 * worth))


def test_bounds_of_requests_that_share_a_queue_hold_where_independent_ones_do_not() -> None:
    rate, level, seeds = 80.0, 0.95, 400
    truth, missed = share_at(rate), {"blocks": 0, "single": 0}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        samples = [played(rate, 30.0, rng, warm=1000) for _ in range(3)]
        met, total = (np.concatenate([getattr(s, name) for s in samples]) for name in ("met", "total"))
        low, high = clustered_interval(met, total, level)
        missed["blocks"] += low > truth or high < truth
        # the same requests, each a block of its own: independent, if that were true
        ones = np.zeros(total.sum(), int)
        ones[: met.sum()] = 1
        low, high = clustered_interval(ones, np.ones(len(ones), int), level)
        missed["single"] += low > truth or high < truth
    most = 2 * (1 - level) + 4 * math.sqrt(0.1 * 0.9 / seeds)
    assert missed["blocks"] / seeds <= most
    assert missed["single"] / seeds > most


def test_one_block_says_nothing() -> None:
    assert clustered_interval(np.array([50]), np.array([50]), 0.95) == (0.0, 1.0)
    assert clustered_interval(np.array([0, 0]), np.array([0, 0]), 0.95) == (0.0, 1.0)


def test_ends_of_the_range() -> None:
    low, high = clustered_interval(np.zeros(20, int), np.full(20, 5), 0.95)
    assert low == 0 and 0 < high < 0.05
    low, high = clustered_interval(np.full(20, 5), np.full(20, 5), 0.95)
    assert 0.95 < low < 1 and high == 1


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_bounds_of_growth_hold_for_a_random_walk_and_not_without_their_correction(drift: float) -> None:
    seeds, level, n = 4000, 0.95, 2000
    rng = np.random.default_rng(7)
    missed = {"low": 0, "high": 0, "uncorrected": 0}
    for _ in range(seeds):
        walk_s = np.cumsum(rng.normal(drift, 1.0, n))
        growths = block_growths(np.arange(n) * 1.0, walk_s, 30)
        low, high = growth_interval(growths, level)
        missed["low"] += low > drift
        missed["high"] += high < drift
        half = (high - low) / 2 / math.sqrt(1.5)
        missed["uncorrected"] += abs(growths.mean() - drift) > half
    error = 4 * math.sqrt(level * (1 - level) / seeds)
    assert missed["low"] / seeds == pytest.approx(1 - level, abs=error + 0.005)
    assert missed["high"] / seeds == pytest.approx(1 - level, abs=error + 0.005)
    assert missed["uncorrected"] / seeds > 2 * (1 - level) + 2 * error


def test_growths_pass_over_blocks_without_values() -> None:
    at_s = np.array([0.0, 1.0, 6.0, 7.0, 8.0, 10.0])
    # of ten blocks six hold values; what lies between two means is the time between their requests
    np.testing.assert_allclose(block_growths(at_s, 3 * at_s, 10), np.full(5, 3.0))
    assert len(block_growths(np.zeros(5), np.ones(5), 10)) == len(block_growths(np.zeros(0), np.zeros(0), 10)) == 0
    assert growth_interval(np.array([0.1]), 0.95) == (-math.inf, math.inf)


# decisions


def sample(share: float, *growths: float, **kinds: bool) -> Sample:
    return Sample(np.full(10, round(100 * share)), np.full(10, 100), np.array(growths), **kinds)


def test_a_rate_is_decided_by_bounds_and_not_by_the_share() -> None:
    rule = Rule(0.9)
    shares = {0.95: MEETS, 0.91: OPEN, 0.9: OPEN, 0.89: OPEN, 0.8: FAILS}
    for share, decision in shares.items():
        assert judge(1.0, [sample(share)], rule, 0.99).decision == decision, share
    # more runs decide what one doesn't
    assert judge(1.0, [sample(0.91)] * 20, rule, 0.99).decision == MEETS


def test_growth_is_one_of_two_checks() -> None:
    rule = Rule(0.9, growth=0.02)
    grows = [[0.0, 0.001, -0.001], [0.5, 0.51, 0.52], [0.0, 0.02, 0.04]]
    decisions = [judge(1.0, [sample(1.0, *three)], rule, 0.95).decision for three in grows]
    assert decisions == [MEETS, FAILS, OPEN]
    # either check fails a rate, and both are needed to meet it
    assert judge(1.0, [sample(0.5, *grows[0])], rule, 0.95).decision == FAILS
    assert judge(1.0, [sample(0.9, *grows[0])], rule, 0.95).decision == OPEN
    assert judge(1.0, [sample(1.0, grows[0][0])], rule, 0.95).decision == OPEN
    # runs are taken together
    assert judge(1.0, [sample(1.0, g) for g in grows[1]], rule, 0.95).decision == FAILS
    step = judge(1.0, [sample(1.0, *grows[1])], Rule(0.9), 0.95)
    assert step.decision == MEETS and step.growth == pytest.approx(0.51)


def test_a_run_that_says_nothing_decides_nothing() -> None:
    for share in (0.0, 1.0):
        assert judge(1.0, [sample(share, delivered=False)], Rule(0.9), 0.95).decision == UNMEASURED
        assert judge(1.0, [sample(share, complete=False)], Rule(0.9), 0.95).decision == INTERRUPTED


# searches


def test_a_search_ends_within_its_resolution_and_its_number_of_steps() -> None:
    for limit in np.geomspace(11, 990, 40):
        steps = search(lambda rate: sample(float(rate <= limit)), 10, 1000, Rule(0.9), 0.95, 0.1, 3)  # noqa: B023
        assert len(steps) <= most_steps(10, 1000, 0.1)
        met = max(step.rate_per_s for step in steps if step.decision == MEETS)
        failed = min(step.rate_per_s for step in steps if step.decision == FAILS)
        assert met <= limit < failed <= met * 1.1
        assert {step.runs for step in steps} == {1}


@pytest.mark.parametrize(("high", "within", "most"), [(20.0, 1.0, 2), (20.1, 1.0, 3), (40.1, 1.0, 5), (10.5, 0.1, 2)])
def test_most_steps(high: float, within: float, most: int) -> None:
    assert most_steps(10.0, high, within) == most


def tried(play: Callable[[float], Sample], most_runs: int = 3) -> list[tuple[float, str, int]]:
    steps = search(play, 10, 160, Rule(0.9), 0.95, 1.0, most_runs)
    return [(round(step.rate_per_s), step.decision, step.runs) for step in steps]


def test_a_search_whose_ends_decide_goes_no_further() -> None:
    assert tried(lambda rate: sample(0.0)) == [(10, FAILS, 1)]
    assert tried(lambda rate: sample(0.9)) == [(10, OPEN, 3)]
    assert tried(lambda rate: sample(1.0)) == [(10, MEETS, 1), (160, MEETS, 1)]
    assert tried(lambda rate: sample(1.0, complete=rate < 20)) == [(10, MEETS, 1), (160, INTERRUPTED, 1)]


def test_what_is_not_decided_is_too_high_for_the_search_and_proves_nothing() -> None:
    # 40 is undecided: the search goes on below it for a rate that is met, then above it for one that fails
    share = {10: 1.0, 160: 0.0, 40: 0.9, 20: 1.0}
    expected = [(10, MEETS, 1), (160, FAILS, 1), (40, OPEN, 3), (20, MEETS, 1)]
    for at_80, decided in ((0.5, (80, FAILS, 1)), (0.9, (80, OPEN, 3)), (1.0, (80, MEETS, 1))):
        assert tried(lambda rate: sample((share | {80: at_80})[round(rate)])) == [*expected, decided]  # noqa: B023
    slow_client = [(10, MEETS, 1), (160, UNMEASURED, 1), (40, MEETS, 1), (80, MEETS, 1)]
    assert tried(lambda rate: sample(1.0, delivered=rate < 100)) == slow_client
    interrupted = [(10, MEETS, 1), (160, FAILS, 1), (40, INTERRUPTED, 1)]
    assert tried(lambda rate: sample(float(rate < 100), complete=round(rate) != 40)) == interrupted


def answers(seeds: int, **kinds: Any) -> list[tuple[float, float, int]]:
    """The highest rate met, the lowest failed, and the runs that it took, of a search for each seed."""
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        steps = search(lambda rate: played(rate, kinds["duration_s"], rng, kinds["warm"]), *kinds["asked"])  # noqa: B023
        met = max((step.rate_per_s for step in steps if step.decision == MEETS), default=-math.inf)
        failed = min((step.rate_per_s for step in steps if step.decision == FAILS), default=math.inf)
        found.append((met, failed, sum(step.runs for step in steps)))
    return found


def test_the_answer_is_right_as_often_as_it_says() -> None:
    """M/D/1: the rate up to which 90 % take at most 25 ms, by formula."""
    seeds, confidence = 150, 0.9
    found = answers(seeds, duration_s=20.0, warm=500, asked=(20.0, 95.0, Rule(SHARE), confidence, 0.1, 4))
    right = np.mean([met <= TRUE_LIMIT <= failed for met, failed, _ in found])
    assert right >= confidence - 4 * math.sqrt(confidence * (1 - confidence) / seeds)
    # and it says something: the limit is between 20 and 95, the answer nearer than that
    widths = [failed / met for met, failed, _ in found]
    assert np.median(widths) < 1.5
    assert np.isfinite(widths).mean() > 0.95
    # another limit would be seen to be wrong
    assert np.mean([met <= 1.4 * TRUE_LIMIT <= failed for met, failed, _ in found]) < 0.2


def test_the_rate_that_a_server_sustains() -> None:
    """Services of 10 ms: 100/s, and 2 % more until TTFT grows by 20 ms a second."""
    seeds, confidence = 60, 0.9
    found = answers(seeds, duration_s=30.0, warm=0, asked=(50.0, 200.0, Rule(1e-6, 0.02), confidence, 0.1, 6))
    # a queue that starts empty fills for as long as the run lasts when it is nearly saturated: 97 grows, too
    right = np.mean([met <= 102 and failed >= 97 for met, failed, _ in found])
    assert right >= confidence - 4 * math.sqrt(confidence * (1 - confidence) / seeds)
    assert np.median([failed / met for met, failed, _ in found]) < 1.6


def test_levels_share_out_the_error() -> None:
    one = look_level(10, 160, Rule(0.9), 0.95, 1.0, 1)
    assert 1 - one == pytest.approx(0.05 / 5)
    assert 1 - look_level(10, 160, Rule(0.9, 0.02), 0.95, 1.0, 5) == pytest.approx(0.05 / 5 / 5 / 2)
