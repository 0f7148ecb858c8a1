"""Inversion, convolution and quantiles held to distributions that are known in closed form."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from llmprofile.errors import UsageError
from llmprofile.inversion import compound_cdf, invert, quantile

seeded = settings(derandomize=True, deadline=None)
Floats = Any

RHOS = (0.1, 0.5, 0.8, 0.95, 0.99)
TIMES = np.concatenate([[0.0], np.geomspace(1e-6, 1e4, 500)])


def waits_md1(rho: float, t: Floats) -> Floats:
    """P(W ≤ t) in M/D/1 with services of 1: Erlang's series, whose terms cancel, in 120 digits."""
    with localcontext() as context:
        context.prec = 120
        r, result = Decimal(rho), []
        for x in map(Decimal, np.asarray(t, float).tolist()):
            terms = ((r * (k - x), k) for k in range(int(x) + 1))
            total = sum((y**k if k else Decimal(1)) / math.factorial(k) * (-y).exp() for y, k in terms)
            result.append(float((1 - r) * total))
    return np.array(result)


def waits_mm1(rho: float, t: Floats) -> Floats:
    return 1 - rho * np.exp(-(1 - rho) * np.asarray(t))


def uniform_cdf(x: Floats) -> Floats:
    return np.minimum(x, 1.0)


# inversion


@pytest.mark.parametrize("rho", RHOS)
def test_inversion_finds_the_waits_of_mm1(rho: float) -> None:
    found = invert(lambda s: (1 - rho) * (1 + s) / (1 - rho + s), TIMES, atom=1 - rho)
    assert np.abs(found - waits_mm1(rho, TIMES)).max() <= 2e-7


@pytest.mark.parametrize(
    ("law", "transform"),
    [
        (stats.gamma(0.5), lambda s: (1 + s) ** -0.5),
        (stats.gamma(20, scale=0.1), lambda s: (1 + s / 10) ** -20),
        (stats.invgauss(1), lambda s: np.exp(1 - np.sqrt(1 + 2 * s))),
    ],
)
def test_inversion_needs_no_atom(law: Any, transform: Any) -> None:
    assert np.abs(invert(transform, TIMES) - law.cdf(TIMES)).max() <= 1e-8


def test_inversion_keeps_the_shape_and_knows_the_ends() -> None:
    t = np.array([[-1.0, 0.0], [1.0, math.inf]])
    found = invert(lambda s: 0.25 + 0.75 / (1 + s), t, atom=0.25)
    assert found == pytest.approx(np.array([[0, 0.25], [1 - 0.75 * math.exp(-1), 1]]), abs=1e-9)
    assert math.isnan(invert(lambda s: 1 / (1 + s), math.nan))
    assert invert(lambda s: 1 / (1 + s), []).shape == (0,)


# convolution


def test_the_series_of_md1_is_its_textbook_start() -> None:
    t = np.array([0.0, 0.5, 1.0, 1.5])
    first = 0.4 * np.exp(0.6 * t)
    second = np.where(t < 1, 0, 0.4 * 0.6 * (t - 1) * np.exp(0.6 * (t - 1)))
    assert waits_md1(0.6, t) == pytest.approx(first - second, rel=1e-14)
    assert waits_md1(0.6, np.array([60.0]))[0] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("unit_s", [0.0, 1.0])
def test_convolution_finds_the_waits_of_md1(rho: float, unit_s: float) -> None:
    t = np.concatenate([np.linspace(0, 5, 101), np.geomspace(1e-4, 150, 60)])
    assert np.abs(compound_cdf(uniform_cdf, rho, t, unit_s) - waits_md1(rho, t)).max() <= 5e-6


@pytest.mark.parametrize("rho", RHOS)
def test_convolution_finds_the_waits_of_mm1(rho: float) -> None:
    found = compound_cdf(lambda x: -np.expm1(-x), rho, TIMES)
    assert np.abs(found - waits_mm1(rho, TIMES)).max() <= 1e-5


def test_convolution_needs_no_end_of_the_tail() -> None:
    # waits above a Pareto service are worth a single large residual: P(W > t) ~ ρ / (1 − ρ) P(residual > t)
    t = np.array([1e6, 1e8])
    found = compound_cdf(lambda x: 1 - (1 + x) ** -0.5, 0.5, t)
    assert (1 - found) / t**-0.5 == pytest.approx([1.0, 1.0], rel=0.01)


def test_a_time_is_answered_the_same_alone_and_among_others() -> None:
    together = compound_cdf(uniform_cdf, 0.7, TIMES)
    alone = [float(compound_cdf(uniform_cdf, 0.7, x)) for x in TIMES[::50]]
    assert np.abs(together[::50] - alone).max() <= 1e-5
    assert (np.diff(together) >= 0).all()


def test_convolution_keeps_the_shape_and_knows_the_ends() -> None:
    t = np.array([[math.inf, 0.5], [0.0, -1.0]])
    found = compound_cdf(uniform_cdf, 0.5, t)
    assert found == pytest.approx(np.array([[1, 0.5 * math.exp(0.25)], [0.5, 0]]), abs=1e-6)
    assert np.isnan(compound_cdf(uniform_cdf, 0.5, [math.nan, 1.0])).tolist() == [True, False]
    assert compound_cdf(uniform_cdf, 0.0, [0.0, 1.0]).tolist() == [1.0, 1.0]


# quantiles


@given(st.floats(1e-6, 1e6), st.floats(0, 0.99), st.floats(0, 1 - 1e-6))
@seeded
def test_quantiles_of_an_exponential_tail(mean: float, atom: float, q: float) -> None:
    found = quantile(lambda t: 1 - (1 - atom) * np.exp(-t / mean), q, 1.0)
    if q <= 1 - (1 - atom):
        assert found == 0
    else:
        assert found == pytest.approx(-mean * math.log((1 - q) / (1 - atom)), rel=1e-7, abs=1e-13 * mean)


def test_quantiles_of_a_step_are_the_step() -> None:
    found = quantile(lambda t: np.where(t < 3, 0.2, 0.9) + 0.1 * (t >= 40), [[0.1, 0.2], [0.21, 0.9], [0.91, 1.0]], 1.0)
    assert found == pytest.approx(np.array([[0, 0], [3, 3], [40, math.inf]]), rel=1e-8)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan, 1 - 1e-9])
def test_a_quantile_is_of_a_share(q: float) -> None:
    with pytest.raises(UsageError, match="q must be between 0 and 1"):
        quantile(lambda t: 1 - np.exp(-t), [0.5, q], 1.0)
