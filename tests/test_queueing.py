"""Queues held to one another, to exact series, to Lindley's recursion and to another's simulator."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import trapezoid

from llmprofile.errors import UsageError
from llmprofile.laws import law_of
from llmprofile.lindley import simulate
from llmprofile.queueing import GG1, MD1, MG1, MM1, MGk
from test_inversion import waits_md1

seeded = settings(derandomize=True, deadline=None)
few = settings(derandomize=True, deadline=None, max_examples=25)
Floats = Any

RHOS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95)
EXACT = (MM1, MD1, MG1)
rates = st.floats(0.01, 100)
loads = st.floats(0.01, 0.99)


def batch_means(waits: Floats, batches: int = 40) -> tuple[float, float]:
    """The mean of a correlated series and its standard error."""
    means = waits[: len(waits) // batches * batches].reshape(batches, -1).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1)) / math.sqrt(batches)


def hyperexponential(mean: float, scv: float, n: int, rng: np.random.Generator) -> Floats:
    """Draws from two exponential laws that bring in half of the mean each."""
    p = 0.5 * (1 + math.sqrt((scv - 1) / (scv + 1)))
    return rng.exponential(np.where(rng.random(n) < p, mean / 2 / p, mean / 2 / (1 - p)))


# the models among themselves


@given(rates, loads)
@seeded
def test_exponential_services_make_mm1_and_constant_ones_md1(rate: float, rho: float) -> None:
    mean_s = rho / rate
    mm1, md1 = MM1(rate, mean_s), MD1(rate, mean_s)
    for general, special in ((MG1(rate, stats.expon(scale=mean_s)), mm1), (MG1(rate, mean_s), md1)):
        for figure in ("utilisation", "mean_wait_s", "var_wait_s", "mean_time_s", "mean_queue"):
            assert getattr(general, figure) == pytest.approx(getattr(special, figure), rel=1e-9), figure
    assert md1.mean_wait_s == pytest.approx(mm1.mean_wait_s / 2, rel=1e-12)
    assert MG1.from_moments(rate, mean_s, 1).mean_wait_s == pytest.approx(mm1.mean_wait_s, rel=1e-12)
    assert GG1(rate, stats.expon(scale=mean_s), 1).mean_wait_s == pytest.approx(mm1.mean_wait_s, rel=1e-9)
    assert MGk(rate, mean_s, 1).mean_wait_s == pytest.approx(md1.mean_wait_s, rel=1e-9)


def test_figures_of_mm1_from_a_textbook() -> None:
    queue = MM1(rate_per_s=0.5, mean_service_s=1.0)
    assert (queue.utilisation, queue.mean_wait_s, queue.mean_time_s, queue.mean_queue) == (0.5, 1.0, 2.0, 0.5)
    assert queue.var_wait_s == pytest.approx(3.0)  # ρ (2 − ρ) / (1 − ρ)²
    assert queue.wait_cdf([0.0, 2.0]) == pytest.approx([0.5, 1 - 0.5 * math.exp(-1)])


@pytest.mark.parametrize("rho", [*RHOS, 0.99])
def test_the_distribution_of_mm1_by_inversion(rho: float) -> None:
    t = np.concatenate([[-1, 0, math.inf], np.geomspace(1e-6, 1e4, 400)])
    assert np.abs(MG1(rho, stats.expon()).wait_cdf(t) - MM1(rho, 1).wait_cdf(t)).max() <= 1e-6
    q = np.array([0.0, 0.5, 0.9, 0.99, 0.9999])
    assert MG1(rho, stats.expon()).wait_quantile(q) == pytest.approx(MM1(rho, 1).wait_quantile(q), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rho", RHOS)
def test_the_distribution_of_md1_by_convolution(rho: float) -> None:
    t = np.concatenate([np.linspace(0, 4, 41), [7.7, 20, 100]])
    assert np.abs(MD1(rho * 50, 0.02).wait_cdf(t / 50) - waits_md1(rho, t)).max() <= 1e-5


@pytest.mark.parametrize(
    "service",
    [stats.gamma(2, scale=0.5), stats.uniform(0.5, 1), stats.lognorm(1.0), [0.2, 0.2, 0.9, 3.1], 1.0],
    ids=lambda service: repr(law_of(service)),
)
def test_the_distribution_has_the_mean_and_the_variance(service: Any) -> None:
    queue = MG1(0.6 / law_of(service).mean_s, service)
    t = np.concatenate([[0.0], np.geomspace(1e-4, 2000, 4000)]) * queue.mean_wait_s
    tail = 1 - queue.wait_cdf(t)
    assert trapezoid(tail, t) == pytest.approx(queue.mean_wait_s, rel=1e-4)
    second_s2 = trapezoid(2 * t * tail, t)
    assert second_s2 - queue.mean_wait_s**2 == pytest.approx(queue.var_wait_s, rel=2e-3)


@pytest.mark.parametrize("queue", [MM1(0.7, 1), MD1(0.7, 1), MG1(0.7, stats.lognorm(1, scale=math.exp(-0.5)))])
def test_quantiles_are_the_inverse_of_the_cdf(queue: MM1 | MD1 | MG1) -> None:
    q = np.array([[0.31, 0.5], [0.9, 0.999]])
    assert queue.wait_cdf(queue.wait_quantile(q)) == pytest.approx(q, abs=1e-6)
    assert queue.wait_quantile([0.0, 0.1, 0.299]).tolist() == [0, 0, 0]
    assert queue.wait_quantile(1.0) == math.inf
    assert queue.wait_quantile(0.999) > 0


# properties


@given(rates, loads, st.floats(1e-3, 1e3), st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
@few
def test_a_unit_of_time_is_only_a_unit(rate: float, rho: float, unit: float, shape: list[float]) -> None:
    service = np.array(shape) / np.mean(shape) * rho / rate
    queue, scaled = MG1(rate, service), MG1(rate / unit, service * unit)
    assert scaled.utilisation == pytest.approx(queue.utilisation)
    assert scaled.mean_queue == pytest.approx(queue.mean_queue)
    assert scaled.mean_wait_s == pytest.approx(queue.mean_wait_s * unit)
    assert scaled.var_wait_s == pytest.approx(queue.var_wait_s * unit**2)
    t = queue.mean_wait_s * np.array([0.1, 1, 5])
    assert scaled.wait_cdf(t * unit) == pytest.approx(queue.wait_cdf(t), abs=1e-4)


@given(rates, loads, st.floats(0, 1), st.sampled_from(["gamma", "measured", "uniform"]))
@few
def test_waits_are_not_negative_and_grow_with_the_rate(rate: float, rho: float, less: float, kind: str) -> None:
    mean_s = rho / rate
    service = {
        "gamma": stats.gamma(0.7, scale=mean_s / 0.7),
        "measured": [0.0, mean_s, 2 * mean_s],
        "uniform": stats.uniform(0, 2 * mean_s),
    }[kind]
    for make in (lambda r: MG1(r, service), lambda r: GG1(r, service, 0.5), lambda r: MGk(r, service, 3)):
        busy, quiet = make(rate), make(rate * less)
        assert 0 <= quiet.mean_wait_s <= busy.mean_wait_s * (1 + 1e-12)
    t = np.linspace(0, 20 * mean_s, 50)
    busy_cdf, quiet_cdf = MG1(rate, service).wait_cdf(t), MG1(rate * less, service).wait_cdf(t)
    assert (busy_cdf <= quiet_cdf + 1e-5).all()
    assert (np.diff(busy_cdf) >= -1e-7).all()
    assert busy_cdf[0] == pytest.approx(1 - rho)


@given(loads, st.floats(0, 10), st.floats(0, 10))
@seeded
def test_the_approximation_keeps_below_the_bound(rho: float, arrival_scv: float, service_scv: float) -> None:
    service = stats.gamma(1 / service_scv, scale=service_scv) if service_scv > 0.01 else 1.0
    queue = GG1(rho, service, arrival_scv)
    assert 0 <= queue.mean_wait_s <= queue.mean_wait_bound_s * (1 + 1e-9)


# splitting


def test_a_split_queue_has_its_share_of_the_rate() -> None:
    assert MM1(8, 0.1).split(4) == MM1(2, 0.1)
    assert MD1(8, 0.1).split(4) == MD1(2, 0.1)
    assert MG1(8, [0.1, 0.3]).split(4) == MG1(2, [0.1, 0.3])
    assert MG1.from_moments(8, 0.1, 2).split(4) == MG1.from_moments(2, 0.1, 2)
    assert MGk(8, 0.1, 3).split(4) == MGk(2, 0.1, 3)
    assert GG1(8, 0.1, 5).split(4) == GG1(2, 0.1, 2)
    assert GG1(8, 0.1, 0).split(1) == GG1(8, 0.1, 0)
    assert MM1(8, 0.1).split(1).split(2) == MM1(8, 0.1).split(2)


def test_thinned_gaps_have_the_variation_that_split_says() -> None:
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.gamma(0.2, 5, 400_000))  # c² = 5
    gaps = np.diff(arrivals[rng.integers(0, 3, len(arrivals)) == 0])
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(GG1(1, 0.1, 5).split(3).arrival_scv, rel=0.03)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None])
def test_a_queue_is_split_into_whole_queues(k: Any) -> None:
    for queue in (MM1(1, 0.1), MG1(1, 0.1), GG1(1, 0.1, 1), MGk(1, 0.1, 2)):
        with pytest.raises(UsageError, match="k must be a whole number"):
            queue.split(k)


# Lindley's recursion


def draws(law: Any, n: int, rng: np.random.Generator) -> Floats:
    return law_of(law).sample(n, rng)


MEASURED = np.random.default_rng(7).lognormal(-0.5, 1.0, 500)
SIMULATED: dict[str, tuple[Callable[[float], Any], Any]] = {
    "MM1": (lambda rho: MM1(rho, 1), stats.expon()),
    "MD1": (lambda rho: MD1(rho, 1), 1.0),
    "gamma": (lambda rho: MG1(rho, stats.gamma(0.5, scale=2)), stats.gamma(0.5, scale=2)),
    "uniform": (lambda rho: MG1(rho, stats.uniform(0.5, 1)), stats.uniform(0.5, 1)),
    "measured": (lambda rho: MG1(rho / MEASURED.mean(), MEASURED), MEASURED),
}


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("name", SIMULATED)
def test_simulation_agrees_with_every_exact_model(name: str, rho: float) -> None:
    make, service = SIMULATED[name]
    # a batch must hold many busy periods, or its mean is too skewed for a standard error
    queue, n, rng = make(rho), 1_500_000 if rho >= 0.9 else 300_000, np.random.default_rng([int(100 * rho), len(name)])
    assert queue.utilisation == pytest.approx(rho)
    arrivals = np.cumsum(rng.exponential(1 / queue.rate_per_s, n))
    waits = simulate(arrivals, draws(service, n, rng))[20_000:]
    t = queue.wait_quantile(1 - rho * np.array([0.8, 0.4, 0.1]))
    expected = [queue.mean_wait_s, queue.var_wait_s + queue.mean_wait_s**2, 1 - rho, *queue.wait_cdf(t)]
    for seen, truth in zip([waits, waits**2, waits == 0, *(waits <= x for x in t)], expected, strict=True):
        mean, error = batch_means(np.asarray(seen, float))
        assert abs(mean - truth) <= 4 * error


def test_fifty_thousand_measured_times() -> None:
    rng = np.random.default_rng(8)
    measured = rng.lognormal(math.log(30e-6), 0.8, 50_000)
    queue, n = MG1(0.8 / measured.mean(), measured), 1_000_000
    arrivals = np.cumsum(rng.exponential(1 / queue.rate_per_s, n))
    waits = simulate(arrivals, rng.choice(measured, n))[20_000:]
    t = np.quantile(waits, np.linspace(0.25, 0.999, 20))
    seen = np.array([batch_means((waits <= x).astype(float)) for x in t])
    assert np.abs((queue.wait_cdf(t) - seen[:, 0]) / seen[:, 1]).max() <= 4
    assert repr(queue).endswith(f"service=<50000 values, mean {measured.mean():.6g}>)")


# approximations


def test_figures_of_gg1_by_hand() -> None:
    # ρ = 1/2, E[S] = 1: (c_a² + c_s²) / 2, times the factor of gaps less and more even than Poisson's
    uneven, even = GG1(0.5, stats.expon(), 4), GG1(0.5, stats.gamma(2, scale=0.5), 0.25)
    assert uneven.mean_wait_s == pytest.approx(2.5 * math.exp(-0.5 * 3 / 8), rel=1e-12)
    assert even.mean_wait_s == pytest.approx(0.375 * math.exp(-(1 / 1.5) * 0.75**2 / 0.75), rel=1e-12)
    assert uneven.mean_wait_bound_s == pytest.approx(0.5 * (4 / 0.25 + 1))
    assert even.mean_wait_bound_s == pytest.approx(0.5 * (0.25 / 0.25 + 0.5))


def test_figures_of_mgk_by_hand() -> None:
    # Cosmetatos: M/D/2 at ρ = 1/2 waits 1/2 (1 + (1 − ρ) (k − 1) (√14 − 2) / 16 k ρ) of M/M/2, which waits 1/3
    assert MGk(1, 1.0, 2).mean_wait_s == pytest.approx((1 + (math.sqrt(14) - 2) / 32) / 6, rel=1e-12)
    assert MGk(0.01, 1.0, 2).mean_wait_s / MGk(0.01, stats.expon(), 2).mean_wait_s == pytest.approx(0.62)


@pytest.mark.parametrize("rho", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    ("arrival_scv", "gaps"),
    [
        (0.0, lambda n, rng: np.ones(n)),
        (0.25, lambda n, rng: rng.gamma(4, 0.25, n)),
        (0.5, lambda n, rng: rng.gamma(2, 0.5, n)),
        (2.0, lambda n, rng: hyperexponential(1.0, 2.0, n, rng)),
        (4.0, lambda n, rng: hyperexponential(1.0, 4.0, n, rng)),
    ],
)
@pytest.mark.parametrize("service_scv", [0.5, 1.0, 2.0])
def test_gg1_is_as_near_as_it_says(rho: float, arrival_scv: float, gaps: Any, service_scv: float) -> None:
    n, rng = 200_000, np.random.default_rng(int(100 * rho + 10 * arrival_scv + service_scv))
    service = stats.gamma(1 / service_scv, scale=service_scv)
    queue = GG1(rho, service, arrival_scv)
    mean, error = batch_means(simulate(np.cumsum(gaps(n, rng)) / rho, draws(service, n, rng)))
    assert mean <= queue.mean_wait_bound_s + 4 * error
    if mean >= 0.1:
        assert abs(queue.mean_wait_s / mean - 1) <= (0.10 if rho >= 0.7 else 0.17) + 3 * error / mean


def waits_many_servers(arrivals: Floats, services: Floats, k: int) -> Floats:
    """Kiefer and Wolfowitz: the next job goes to the server that is free first."""
    free, waits = [0.0] * k, np.empty(len(arrivals))
    for i, (arrival, service) in enumerate(zip(arrivals.tolist(), services.tolist(), strict=True)):
        begun = max(free[0], arrival)
        waits[i] = begun - arrival
        heapq.heapreplace(free, begun + service)
    return waits


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("rho", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("scv", "service"),
    [
        (0.0, lambda n, rng: np.ones(n)),
        (0.5, lambda n, rng: rng.gamma(2, 0.5, n)),
        (1.0, lambda n, rng: rng.exponential(1.0, n)),
        (2.0, lambda n, rng: rng.gamma(0.5, 2, n)),
        (2.0, lambda n, rng: hyperexponential(1.0, 2.0, n, rng)),
    ],
)
def test_mgk_is_as_near_as_it_says(scv: float, service: Any, rho: float, k: int) -> None:
    n, rng = 100_000, np.random.default_rng(int(100 * rho + 10 * scv + k))
    queue = MGk(rho * k, stats.gamma(1 / scv, scale=scv) if scv else 1.0, k)
    waits = waits_many_servers(np.cumsum(rng.exponential(1 / rho / k, n)), service(n, rng), k)
    mean, error = batch_means(waits[2_000:])
    if scv == 1:
        assert abs(queue.mean_wait_s - mean) <= 4 * error
    elif mean >= 0.01:
        assert abs(queue.mean_wait_s / mean - 1) <= (0.05 if scv < 1 else 0.15) + 3 * error / mean


def test_mmk_is_erlang_c_for_any_number_of_servers() -> None:
    assert MGk(1.5, stats.expon(), 2).mean_wait_s == pytest.approx(9 / 7)  # ρ²/(1 − ρ²)
    # Gross and Harris: λ 6, μ 3, c 3: P(delayed) 4/9, wait 4/27
    assert MGk(6, stats.expon(scale=1 / 3), 3).mean_wait_s == pytest.approx(4 / 27)
    # Halfin and Whitt: P(delayed) → 1 / (1 + β Φ(β) / φ(β)) with β = √k (1 − ρ), here 1
    delayed = 1 / (1 + stats.norm.cdf(1) / stats.norm.pdf(1))
    assert MGk(9_900, stats.expon(), 10_000).mean_wait_s == pytest.approx(delayed / 100, rel=0.01)


def test_one_queue_is_better_than_as_many_apart() -> None:
    for k in (2, 4, 16):
        assert MGk(0.8 * k, 1.0, k).mean_wait_s < MG1(0.8 * k, 1.0).split(k).mean_wait_s / (k / 2)


# an independent simulator


@pytest.mark.parametrize("k", [1, 3])
def test_ciw_agrees(k: int) -> None:
    ciw = pytest.importorskip("ciw", reason="ciw, an independent simulator, is not installed (it comes with `test`)")
    ciw.seed(k)
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(rate=0.7 * k)],
        service_distributions=[ciw.dists.Gamma(shape=2, scale=0.5)],
        number_of_servers=[k],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_time(40_000 / k)
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)[1_000:]
    waits = np.array([record.waiting_time for record in records])
    mean, error = batch_means(waits)
    service = stats.gamma(2, scale=0.5)
    if k > 1:
        assert abs(MGk(0.7 * k, service, k).mean_wait_s / mean - 1) <= 0.05 + 3 * error / mean
        return
    queue = MG1(0.7, service)
    assert abs(queue.mean_wait_s - mean) <= 4 * error
    for t in (0.0, 1.0, 4.0):
        share, error = batch_means((waits <= t).astype(float))
        assert abs(float(queue.wait_cdf(t)) - share) <= 4 * error


# the ends, and what is refused


@pytest.mark.parametrize("rho", [1.0, 1.5])
def test_a_queue_that_cannot_keep_up_has_no_end(rho: float) -> None:
    exact = [MM1(rho, 1), MD1(rho, 1), MG1(rho, stats.lognorm(1, scale=math.exp(-0.5)) if rho > 1 else stats.expon())]
    for queue in exact:
        assert queue.utilisation >= 1
        assert queue.mean_wait_s == queue.var_wait_s == queue.mean_queue == queue.mean_time_s == math.inf
        assert queue.wait_cdf([0.0, 1.0, 1e9]).tolist() == [0, 0, 0]
        assert queue.wait_quantile([0.1, 0.9]).tolist() == [math.inf, math.inf]
    for approximate in (GG1(rho, 1, 0.5), GG1(rho, 1, 0), MGk(2 * rho, 1, 2), MG1.from_moments(rho, 1, 1)):
        assert approximate.mean_wait_s == approximate.mean_queue == math.inf
    assert GG1(rho, 1, 0.5).mean_wait_bound_s == math.inf


@pytest.mark.parametrize(("rate", "mean_s"), [(0, 1), (1, 0), (0, 0)])
def test_without_work_nobody_waits(rate: float, mean_s: float) -> None:
    for queue in (MM1(rate, mean_s), MD1(rate, mean_s), MG1(rate, mean_s), MG1(rate, [mean_s, mean_s])):
        assert queue.utilisation == queue.mean_wait_s == queue.var_wait_s == queue.mean_queue == 0
        assert queue.mean_time_s == mean_s
        assert queue.wait_cdf([-1, 0, 1]).tolist() == [0, 1, 1]
        assert queue.wait_quantile([0, 0.5, 0.99]).tolist() == [0, 0, 0]
    assert GG1(rate, mean_s, 4).mean_wait_s == MGk(rate, mean_s, 4).mean_wait_s == 0
    assert GG1(0, mean_s, 4).mean_wait_bound_s == 0
    assert MG1.from_moments(rate, mean_s, 3).mean_wait_s == 0


def test_a_service_without_variance_makes_infinite_waits_of_known_distribution() -> None:
    queue = MG1(0.1, stats.pareto(1.5))
    assert (queue.utilisation, queue.mean_wait_s, queue.var_wait_s) == (pytest.approx(0.3), math.inf, math.inf)
    assert 0 < float(queue.wait_quantile(0.9)) < math.inf
    assert GG1(0.1, stats.pareto(1.5), 1).mean_wait_s == MGk(0.1, stats.pareto(1.5), 2).mean_wait_s == math.inf


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "1", None, True])
def test_what_is_no_rate_and_no_time_is_refused_by_name(bad: Any) -> None:
    for make in (MM1, MD1, MG1, lambda rate, s: GG1(rate, s, 1), lambda rate, s: MGk(rate, s, 2)):
        with pytest.raises(UsageError, match="^rate_per_s must be a finite number of at least 0; not"):
            make(bad, 0.1)
        with pytest.raises(UsageError, match="^(mean_service_s|service) must be"):
            make(1, bad)
    with pytest.raises(UsageError, match="^arrival_scv must be"):
        GG1(1, 0.1, bad)
    with pytest.raises(UsageError, match="^mean_s must be"):
        MG1.from_moments(1, bad, 1)
    with pytest.raises(UsageError, match="^scv must be"):
        MG1.from_moments(1, 0.1, bad)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_quantiles_are_of_shares(q: float) -> None:
    for queue in (MM1(0.5, 1), MD1(0.5, 1), MG1(0.5, stats.expon()), MM1(2, 1), MG1(2, 1)):
        with pytest.raises(UsageError, match="q must be between 0 and 1"):
            queue.wait_quantile([0.5, q])


def test_what_moments_do_not_tell_is_refused_with_a_remedy() -> None:
    moments = MG1.from_moments(1, 0.1, 2)
    with pytest.raises(UsageError, match=r"variance of the wait needs the service's third moment.*give MG1 measured"):
        _ = moments.var_wait_s
    for ask in (moments.wait_cdf, moments.wait_quantile):
        with pytest.raises(UsageError, match=r"distribution of the wait needs the service's law.*give MG1 measured"):
            ask(0.5)
    for queue in (GG1(1, 0.1, 2), MGk(1, 0.1, 2)):
        name = type(queue).__name__
        with pytest.raises(UsageError, match=f"{name} approximates the mean wait .* no variance of it: simulate"):
            _ = queue.var_wait_s
        with pytest.raises(UsageError, match="no distribution"):
            queue.wait_cdf(1)
        with pytest.raises(UsageError, match="no quantiles"):
            queue.wait_quantile(0.5)


def test_a_queue_says_how_it_is_made() -> None:
    expon = stats.expon
    namespace = {"MM1": MM1, "MD1": MD1, "MG1": MG1, "GG1": GG1, "MGk": MGk, "expon": expon}
    for queue in (
        MM1(np.float64(2), 0.1),
        MD1(2, 0.1),
        MG1(2, 0.1),
        MG1(2, [0.1, 0.2]),
        MG1(2, expon(scale=0.1)),
        MG1.from_moments(2, 0.1, 4),
        GG1(2, 0.1, 4),
        MGk(2, expon(scale=0.1), 3),
    ):
        assert eval(repr(queue), namespace) == queue
    assert repr(MG1.from_moments(2, 0.1, 4)) == "MG1.from_moments(rate_per_s=2.0, mean_s=0.1, scv=4.0)"
    assert repr(MGk(2, 0.1, 3)) == "MGk(rate_per_s=2.0, service=0.1, k=3)"
    with pytest.raises(FrozenInstanceError):
        MM1(2, 0.1).rate_per_s = 3  # type: ignore[misc]
