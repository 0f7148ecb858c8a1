"""Laws held to the formulas of their moments, transforms and residuals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from llmprofile.errors import UsageError
from llmprofile.laws import MOST_ATOMS, Continuous, Discrete, law_of

seeded = settings(derandomize=True, deadline=None)

times = st.lists(st.floats(0, 1e3), min_size=1, max_size=30)
LAWS = {
    "constant": 0.3,
    "measured": [0.0, 0.1, 0.1, 0.7],
    "many": np.random.default_rng(0).lognormal(0, 1, 20_000),
    "poisson": stats.poisson(3),
    "expon": stats.expon(scale=0.2),
    "gamma": stats.gamma(0.5, scale=2),
    "uniform": stats.uniform(1, 2),
    "lognorm": stats.lognorm(1.0, scale=0.1),
    "weibull": stats.weibull_min(0.7),
    "histogram": stats.rv_histogram(np.histogram([0.1, 0.2, 0.2, 0.5], bins=4))(),
}

# moments


@given(times)
@seeded
def test_moments_of_measured_times_are_their_means(values: list[float]) -> None:
    law = law_of(values)
    x = np.array(values)
    assert law.mean_s == pytest.approx(x.mean(), rel=1e-12)
    assert law.second_s2 == pytest.approx((x**2).mean(), rel=1e-12)
    assert law.third_s3 == pytest.approx((x**3).mean(), rel=1e-12)
    assert law.scv * law.mean_s**2 == pytest.approx(x.var(), abs=1e-12 * law.second_s2)


@pytest.mark.parametrize(
    ("value", "moments", "scv"),
    [
        (0.5, (0.5, 0.25, 0.125), 0.0),
        (0, (0.0, 0.0, 0.0), 0.0),
        ([1, 3], (2.0, 5.0, 14.0), 0.25),
        (stats.expon(scale=2), (2.0, 8.0, 48.0), 1.0),
        (stats.gamma(2, scale=0.5), (1.0, 1.5, 3.0), 0.5),
        (stats.uniform(0, 2), (1.0, 4 / 3, 2.0), 1 / 3),
        (stats.lognorm(1.0), (math.exp(0.5), math.exp(2), math.exp(4.5)), math.e - 1),
        (stats.geom(0.5), (2.0, 6.0, 26.0), 0.5),
        (stats.pareto(2.5), (5 / 3, 5.0, math.inf), 0.8),
        (stats.pareto(1.5), (3.0, math.inf, math.inf), math.inf),
    ],
)
def test_moments(value: Any, moments: tuple[float, float, float], scv: float) -> None:
    law = law_of(value)
    assert (law.mean_s, law.second_s2, law.third_s3) == pytest.approx(moments, rel=1e-10)
    assert law.scv == pytest.approx(scv, rel=1e-10)


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_law(name: str) -> None:
    law = law_of(LAWS[name])
    draws = law.sample(40_000, np.random.default_rng(1))
    assert draws.shape == (40_000,)
    assert abs(draws.mean() - law.mean_s) <= 4 * draws.std() / 200
    at = np.quantile(draws, [0.1, 0.5, 0.9, 0.99])
    share = (draws <= at[:, None]).mean(axis=1)
    assert np.abs(law.cdf(at) - share).max() <= 4 * 0.5 / 200


# transforms


@pytest.mark.parametrize("name", LAWS)
def test_a_transform_begins_with_the_moments(name: str) -> None:
    law = law_of(LAWS[name])
    s = 1e-3 / law.mean_s * np.array([1, 1j])
    series = 1 - s * law.mean_s + s**2 * law.second_s2 / 2 - s**3 * law.third_s3 / 6
    rest = abs(s[0]) ** 4 * law.sample(100_000, np.random.default_rng(2)).max() ** 4  # above E[S⁴] / 24
    assert np.abs(law.transform(s) - series).max() <= rest + 1e-12
    assert law.transform(np.zeros((2, 1))).shape == (2, 1)
    assert law.transform(0.0) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("law", "formula"),
    [
        (stats.expon(scale=2), lambda s: 1 / (1 + 2 * s)),
        (stats.expon(1, 2), lambda s: np.exp(-s) / (1 + 2 * s)),
        (stats.gamma(0.5, scale=2), lambda s: (1 + 2 * s) ** -0.5),
        (stats.erlang(3, scale=0.5), lambda s: (1 + s / 2) ** -3),
        (stats.uniform(1, 2), lambda s: np.exp(-s) * (1 - np.exp(-2 * s)) / (2 * s)),
        (stats.weibull_min(1, scale=2), lambda s: 1 / (1 + 2 * s)),
        (stats.chi2(1), lambda s: (1 + 2 * s) ** -0.5),
        (stats.triang(0.5, scale=2), lambda s: ((1 - np.exp(-s)) / s) ** 2),
        (3.0, lambda s: np.exp(-3 * s)),
        (stats.poisson(2), lambda s: np.exp(2 * (np.exp(-s) - 1))),
    ],
)
def test_transforms_are_those_of_the_textbook(law: Any, formula: Any) -> None:
    law = law_of(law)
    s = np.outer(np.geomspace(0.01, 100 / law.mean_s, 40), np.exp(1j * np.array([0, 1.5, np.pi / 2]))).ravel()
    assert np.abs(law.transform(s) - formula(s)).max() <= 1e-10


def test_the_bins_of_many_values_change_a_transform_by_as_much_as_they_say() -> None:
    values = np.random.default_rng(3).lognormal(0, 1.5, 200_000)
    law = law_of(values)
    means, weights = law._binned  # type: ignore[union-attr]
    lost = law.second_s2 - weights @ means**2
    assert len(means) <= MOST_ATOMS
    assert weights @ means == pytest.approx(law.mean_s, rel=1e-12)
    assert 0 < lost <= 1e-5 * law.second_s2
    s = np.array([0.01, 0.1j, 1 + 1j, 10j]) / law.mean_s
    exact = np.array([np.exp(-z * values).mean() for z in s])
    assert (np.abs(law.transform(s) - exact) <= np.abs(s) ** 2 / 2 * lost + 1e-12).all()


def test_a_million_measured_times_stay_a_law() -> None:
    law = law_of(np.random.default_rng(4).exponential(0.001, 1_000_000))
    exact = 1 / (1 + 0.001 * 500j)
    assert abs(law.transform(500j) - exact) <= 4e-3  # 4 / √n
    assert law.residual_cdf(0.001) == pytest.approx(1 - math.exp(-1), abs=4e-3)
    assert "1000000 values" in repr(law)


# cdf and residual life


def test_the_cdf_of_measured_times_jumps_at_them() -> None:
    law = law_of([1.0, 2.0, 2.0, 4.0])
    assert law.cdf([-1, 0, 1, 1.5, 2, 3.9, 4, math.inf]).tolist() == [0, 0, 0.25, 0.25, 0.75, 0.75, 1, 1]


@pytest.mark.parametrize(
    ("law", "formula"),
    [
        (2.0, lambda t: np.minimum(t / 2, 1)),
        ([1.0, 3.0], lambda t: (np.minimum(t, 1) + np.minimum(t, 3)) / 4),
        (stats.expon(scale=2), lambda t: 1 - np.exp(-t / 2)),
        (stats.uniform(0, 2), lambda t: np.where(t < 2, t - t**2 / 4, 1)),
        (stats.lognorm(1.0), lambda t: ndtr(np.log(t) - 1) + t / np.exp(0.5) * ndtr(-np.log(t))),
        (stats.pareto(1.5), lambda t: np.where(t < 1, t, 3 - 2 / np.sqrt(np.maximum(t, 1))) / 3),
    ],
)
def test_residual_lives(law: Any, formula: Any) -> None:
    t = np.geomspace(1e-3, 1e3, 200)
    assert np.abs(law_of(law).residual_cdf(t) - formula(t)).max() <= 1e-8
    assert np.abs(law_of(law).residual_cdf(t[::-7]) - formula(t[::-7])).max() <= 1e-8
    assert law_of(law).residual_cdf([-1.0, 0.0]).tolist() == [0.0, 0.0]


# what stands for a law


def test_a_law_says_how_it_was_given() -> None:
    assert repr(law_of(np.float64(0.25))) == "0.25"
    assert repr(law_of(np.array([0.5, 0.25]))) == "[0.5, 0.25]"
    assert repr(law_of(np.ones(9))) == "<9 values, mean 1>"
    assert repr(law_of(stats.gamma(2, scale=np.float64(0.5)))) == "gamma(2, scale=0.5)"


def test_laws_are_equal_when_they_say_the_same() -> None:
    for value, other in (([1, 2], [1, 3]), (1.0, 2.0), (stats.expon(scale=2), stats.expon(scale=3))):
        assert law_of(value) == law_of(value)
        assert hash(law_of(value)) == hash(law_of(value))
        assert law_of(value) != law_of(other)
        assert law_of(law_of(value)) == law_of(value)
    assert law_of([2, 1]) == law_of([1, 2, 1, 2])
    assert law_of(1.0) != law_of(stats.expon())


def test_atoms_are_the_different_values() -> None:
    atoms = law_of([0.3, 0.1, 0.3, 0.3]).atoms
    assert atoms is not None
    assert [a.tolist() for a in atoms] == [[0.1, 0.3], [0.25, 0.75]]
    assert law_of(stats.expon()).atoms is None
    assert isinstance(law_of(stats.poisson(1)), Discrete)
    assert isinstance(law_of(stats.expon()), Continuous)


@pytest.mark.parametrize(
    "value",
    [-1, math.nan, math.inf, [], [[1.0]], [1, -2], [1, math.nan], "1", None, True, [1, "b"], stats.expon, object()],
)
def test_what_is_no_law_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^poll must "):
        law_of(value, "poll")


@pytest.mark.parametrize(
    "law",
    [stats.norm(5, 1), stats.expon(scale=-1), stats.uniform(-1, 3), stats.expon(scale=[1, 2]), stats.skellam(1, 1)],
)
def test_a_frozen_law_must_be_one_law_above_zero(law: Any) -> None:
    with pytest.raises(UsageError, match=r"service must be one law on \[0, ∞\)"):
        law_of(law)


def test_too_many_whole_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 1,000,000 numbers"):
        law_of(stats.randint(0, 10_000_000))
