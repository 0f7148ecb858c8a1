"""Ramps and stages held against the laws they are drawn from, within four standard errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from llmprofile.errors import UsageError
from llmprofile.stages import Ramp, Stages, due_within
from llmprofile.traces import Trace
from llmprofile.workload import ClosedLoop, Constant, Gamma, Poisson, draw_schedule

seeded = settings(derandomize=True, deadline=None)
RAMPS = [Ramp(0, 300, 20.0), Ramp(300, 0, 20.0), Ramp(50, 250, 20.0), Ramp(250, 50, 20.0), Ramp(150, 150, 20.0)]
WHOLE = 100_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def expected(ramp: Ramp, t: Any) -> Any:
    """Λ(t), integrated by hand."""
    slope = (ramp.to_per_s - ramp.from_per_s) / ramp.duration_s
    return ramp.from_per_s * t + slope * t**2 / 2


@pytest.mark.parametrize("ramp", RAMPS, ids=repr)
def test_counts_of_a_ramp_are_poisson_with_the_expected_mean_in_every_part(ramp: Ramp) -> None:
    seeds = 400
    edges = np.array([0.0, 3.0, 11.0, 20.0])
    counts = np.array([np.histogram(ramp.due_s(WHOLE, rng(seed)), edges)[0] for seed in range(seeds)])
    means = np.diff(expected(ramp, edges))
    assert (np.abs(counts.mean(axis=0) - means) < 4 * np.sqrt(means / seeds)).all()
    # a Poisson variable's variance is its mean; that of a variance is 2 mean² + mean over the sample's size
    error = np.sqrt((2 * means**2 + means) / seeds)
    assert (np.abs(counts.var(axis=0, ddof=1) - means) < 4 * error).all()
    between = np.corrcoef(counts.T)[np.triu_indices(3, 1)]
    assert np.abs(between).max() < 4 / math.sqrt(seeds)


@pytest.mark.parametrize("ramp", RAMPS, ids=repr)
def test_due_times_of_a_ramp_follow_its_rate(ramp: Ramp) -> None:
    due_s = np.concatenate([ramp.due_s(WHOLE, rng(seed)) for seed in range(10)])
    total = expected(ramp, ramp.duration_s)
    assert stats.kstest(expected(ramp, due_s) / total, "uniform").pvalue > 1e-4
    one = ramp.due_s(WHOLE, rng(3))
    assert stats.kstest(np.diff(expected(ramp, one)), "expon").pvalue > 1e-4
    assert (np.diff(one) >= 0).all() and one[0] >= 0 and one[-1] < ramp.duration_s


def test_the_test_of_a_ramp_can_tell_another_rate() -> None:
    due_s = np.concatenate([Ramp(60, 240, 20.0).due_s(WHOLE, rng(seed)) for seed in range(10)])
    ramp = Ramp(50, 250, 20.0)
    assert stats.kstest(expected(ramp, due_s) / expected(ramp, 20.0), "uniform").pvalue < 1e-4


def test_a_level_ramp_is_a_poisson_stream() -> None:
    due_s = Ramp(40, 40, 1000.0).due_s(500, rng())
    np.testing.assert_allclose(due_s, Poisson(40).due_s(500, rng()), rtol=1e-12)


@seeded
@given(
    rates=st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)).filter(lambda r: max(r) > 1e-3),
    duration_s=st.floats(1e-2, 50),
    n=st.integers(1, 300),
)
def test_a_ramp_stays_within_its_time_and_a_shorter_draw_is_a_prefix(rates: Any, duration_s: float, n: int) -> None:
    ramp = Ramp(*rates, duration_s)
    short, long = ramp.due_s(n, rng()), ramp.due_s(5 * n, rng())
    assert (short == long[: len(short)]).all()
    assert len(short) == min(n, len(long))
    assert ((long >= 0) & (long < duration_s)).all() and (np.diff(long) >= 0).all()


def test_a_ramp_is_cut_by_a_duration_or_a_number_and_needs_neither() -> None:
    ramp = Ramp(10, 100, 10.0)
    whole = draw_schedule(ramp, seed=4).due_s
    assert (whole == ramp.due_s(WHOLE, np.random.default_rng(np.random.SeedSequence(4).spawn(4)[0]))).all()
    assert (draw_schedule(ramp, duration_s=4.0, seed=4).due_s == whole[whole < 4.0]).all()
    assert (draw_schedule(ramp, n=50, seed=4).due_s == whole[:50]).all()
    # more than there is: the law's end is the run's
    assert (draw_schedule(ramp, n=WHOLE, seed=4).due_s == whole).all()
    assert (draw_schedule(ramp, duration_s=99.0, seed=4).due_s == whole).all()
    assert ramp.rate_per_s == 55


# stages


def test_each_stage_keeps_its_law_in_its_time() -> None:
    laws = [Poisson(200), Gamma(300, 0.25), Constant(50), Ramp(0, 400, 40.0), Poisson(100)]
    stages = Stages([(law, 40.0) for law in laws])
    schedule = draw_schedule(stages, seed=2)
    assert set(schedule.stage.tolist()) == set(range(5))
    assert (np.diff(schedule.due_s) >= 0).all()
    for k, law in enumerate(laws):
        own_s = schedule.due_s[schedule.stage == k] - 40.0 * k
        assert own_s.min() >= 0 and own_s.max() < 40.0
        gaps_s = np.diff(own_s)
        scale = {0: stats.expon(scale=1 / 200), 1: stats.gamma(0.25, scale=1 / 300 / 0.25), 4: stats.expon(scale=0.01)}
        if k in scale:
            assert stats.kstest(gaps_s, scale[k].cdf).pvalue > 1e-4
        if law == Constant(50):
            np.testing.assert_allclose(own_s, np.arange(2000) / 50, atol=1e-9)
        if isinstance(law, Ramp):
            assert stats.kstest(expected(law, own_s) / expected(law, 40.0), "uniform").pvalue > 1e-4
    assert stages.duration_s == 200
    assert stages.rate_per_s == pytest.approx((200 + 300 + 50 + 200 + 100) / 5)


def test_counts_of_a_stage_are_those_of_its_law_alone() -> None:
    seeds, rate, span_s = 300, 50, 2.0
    stages = Stages([(Poisson(500), 1.0), (Poisson(rate), span_s)])
    counts = np.array([np.sum(draw_schedule(stages, seed=seed).stage == 1) for seed in range(seeds)])
    mean = rate * span_s
    assert abs(counts.mean() - mean) < 4 * math.sqrt(mean / seeds)
    assert abs(counts.var(ddof=1) - mean) < 4 * math.sqrt((2 * mean**2 + mean) / seeds)


def test_a_stage_has_random_numbers_of_its_own() -> None:
    kinds = [Poisson(20), Gamma(90, 0.1)]
    later = [draw_schedule(Stages([(law, 30.0), (Poisson(50), 60.0)]), seed=5) for law in kinds]
    first, second = (schedule.due_s[schedule.stage == 1] for schedule in later)
    assert (first == second).all()
    same = draw_schedule(Stages([(Poisson(50), 60.0), (Poisson(50), 60.0)]), seed=5)
    own = [same.due_s[same.stage == k] - 60.0 * k for k in (0, 1)]
    assert not np.isclose(own[0][:20], own[1][:20]).any()


def test_stages_are_cut_and_dealt_like_any_law() -> None:
    stages = Stages([(Poisson(40), 5.0), (Poisson(160), 5.0)])
    whole = draw_schedule(stages, seed=8)
    for asked, kept in (
        ({"n": 300}, slice(300)),
        ({"duration_s": 6.5}, whole.due_s < 6.5),
        ({"n": WHOLE}, slice(None)),
    ):
        cut = draw_schedule(stages, seed=8, processes=3, **asked)  # type: ignore[arg-type]
        for name in ("due_s", "stage"):
            np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name)[kept])
        assert set(cut.worker.tolist()) == {0, 1, 2}


@seeded
@given(durations=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=8), rate=st.sampled_from([10.0, 3.0, 1 / 0.3]))
def test_what_a_stage_drew_is_counted_in_it(durations: list[float], rate: float) -> None:
    stages = Stages([(Constant(rate), duration_s) for duration_s in durations])
    own = [len(due_within(Constant(rate), duration_s, rng())) for duration_s in durations]
    due_s = stages.due_s(WHOLE, rng())
    assert np.bincount(stages.stage_of(due_s), minlength=len(own)).tolist() == own
    assert (np.diff(due_s) >= 0).all() and due_s[-1] < stages.duration_s


def test_a_stage_may_be_empty_and_a_load_may_not() -> None:
    schedule = draw_schedule(Stages([(Poisson(1e-9), 1.0), (Constant(10), 1.0)]), seed=1)
    assert set(schedule.stage.tolist()) == {1}
    with pytest.raises(UsageError, match="no request falls due within 2.0 s"):
        draw_schedule(Stages([(Poisson(1e-9), 1.0), (Poisson(1e-9), 1.0)]), seed=1)
    with pytest.raises(UsageError, match="no request falls due"):
        draw_schedule(Ramp(0, 1e-9, 1.0), n=5)


def test_a_draw_beyond_expectation_is_the_same_draw() -> None:
    bursty = Gamma(10, 0.001)  # CV 32: a hundred seconds hold anything but the thousand that are expected
    for seed in range(8):
        schedule = draw_schedule(Stages([(bursty, 100.0), (bursty, 100.0)]), seed=seed)
        cut = draw_schedule(Stages([(bursty, 100.0), (bursty, 100.0)]), seed=seed, n=len(schedule) // 2)
        assert (cut.due_s == schedule.due_s[: len(cut)]).all()


BAD: dict[str, tuple[Any, str]] = {
    "no stages": (lambda: Stages([]), "at least one"),
    "a number": (lambda: Stages(3), "sequence of"),  # type: ignore[arg-type]
    "no pair": (lambda: Stages([Poisson(3)]), "stage 0 must be a pair"),  # type: ignore[list-item]
    "closed": (lambda: Stages([(ClosedLoop(3), 1.0)]), "stage 0 must be one of Constant"),  # type: ignore[list-item]
    "nested": (lambda: Stages([(Stages([(Poisson(3), 1.0)]), 1.0)]), "must be one of Constant"),
    "a trace": (lambda: Stages([(Trace({"due_s": [0], "prompt_tokens": [1], "output_tokens": [1]}), 1.0)]), "one of"),  # type: ignore[list-item]
    "no time": (lambda: Stages([(Poisson(3), 1.0), (Poisson(3), 0)]), "duration of stage 1 must be"),
    "short ramp": (lambda: Stages([(Ramp(1, 2, 9.0), 3.0)]), "a ramp of 9.0 s, and must last as long; not 3.0 s"),
    "below 0": (lambda: Ramp(-1, 2, 3.0), "from_per_s must be a finite number of at least 0"),
    "not a number": (lambda: Ramp(1, math.nan, 3.0), "to_per_s must be"),
    "infinite": (lambda: Ramp(1, math.inf, 3.0), "to_per_s must be"),
    "huge": (lambda: Ramp(1, 10**400, 3.0), "to_per_s must be"),
    "a word": (lambda: Ramp("fast", 2, 3.0), "from_per_s must be"),  # type: ignore[arg-type]
    "nothing": (lambda: Ramp(0, 0, 3.0), "asks for nothing"),
    "no duration": (lambda: Ramp(1, 2, 0.0), "duration_s must be a number above 0"),
    "both": (lambda: draw_schedule(Ramp(1, 2, 3.0), n=1, duration_s=1), "not both"),
    "many": (lambda: draw_schedule(Stages([(Poisson(1e9), 1e9)])), "20,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str) -> None:
    make, part = BAD[name]
    with pytest.raises(UsageError, match=part) as caught:
        make()
    assert "\n" not in str(caught.value)
