"""Queues with batches, held to M/G/1, to closed forms, to recursions, to simulation and to another's simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import trapezoid
from scipy.optimize import brentq

from llmprofile.batches import DXG1, MXG1, thinned
from llmprofile.errors import UsageError
from llmprofile.laws import law_of
from llmprofile.lindley import simulate
from llmprofile.queueing import MG1, MM1
from test_inversion import waits_md1

few = settings(derandomize=True, deadline=None, max_examples=20)
Floats = Any
Model = MXG1 | DXG1

FIGURES = ("rate_per_s", "utilisation", "mean_wait_s", "var_wait_s", "mean_time_s", "mean_queue")
QS = np.array([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999])
SERVICES: dict[str, Any] = {
    "constant": 1.0,
    "exponential": stats.expon(),
    "lognormal": stats.lognorm(0.8, scale=math.exp(-0.32)),
    "measured": stats.gamma(2, scale=0.5).rvs(300, random_state=1),
}
BATCHES: dict[str, Any] = {"constant": 5, "binomial": stats.binom(20, 0.4), "geometric": stats.geom(0.2)}
sizes = st.one_of(
    st.integers(1, 30),
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    st.floats(0.1, 0.9).map(stats.geom),
    st.floats(0.3, 10).map(stats.poisson),
)
times = st.sampled_from([1.0, [0.5, 1.5], [0.3, 0.8, 1.9], stats.expon(), stats.gamma(3, scale=1 / 3)])
loads = st.floats(0.05, 0.95)


def at_load(model: type[Model], rho: float, batch: Any, service: Any) -> Any:
    work_s = law_of(batch).mean_s * law_of(service).mean_s
    return MXG1(rho / work_s, batch, service) if model is MXG1 else DXG1(work_s / rho, batch, service)


def jobs(model: Model, batches: int, rng: np.random.Generator, k: int = 1) -> tuple[Floats, Floats]:
    """Arrivals and services of the jobs of so many batches; of those, what one of `k` queues is dealt."""
    if isinstance(model, MXG1):
        at_s = np.cumsum(rng.exponential(1 / model.batch_rate_per_s, batches))
    else:
        at_s = np.arange(batches) * model.period_s
    arrivals_s = np.repeat(at_s, model.batch.sample(batches, rng).astype(int))
    dealt = rng.integers(0, k, len(arrivals_s)) == 0
    return arrivals_s[dealt], model.service.sample(int(dealt.sum()), rng)


def batch_means(values: Floats, parts: int = 40) -> tuple[float, float]:
    """The mean of a correlated series and its standard error."""
    means = values[: len(values) // parts * parts].reshape(parts, -1).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1)) / math.sqrt(parts)


def held_to(model: Model, waits_s: Floats, slack: float = 0.0) -> None:
    """Mean, variance and cdf of simulated waits within 4 standard errors, a probability's own step allowed."""
    mean_s, error_s = batch_means(waits_s)
    assert abs(mean_s - model.mean_wait_s) <= 4 * error_s + 1e-9
    if model.utilisation < 0.9:  # what 40 parts say of their spread is too little for squares beyond
        var_s2, error_s2 = batch_means((waits_s - mean_s) ** 2)
        assert abs(var_s2 - model.var_wait_s) <= 4 * error_s2 + 1e-9
    # rounding of a recursion may put a wait on either side of a step of the cdf
    for at_s in [0.0, *model.wait_quantile([0.5, 0.8, 0.9])]:
        below, error = batch_means((waits_s <= at_s + 1e-6).astype(float))
        assert abs(below - model.wait_cdf(at_s + 1e-6)) <= 4 * error + slack + 1e-6, at_s


# closed forms


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
@pytest.mark.parametrize("rho", [0.1, 0.5, 0.8, 0.95])
def test_batches_of_one_are_mg1(rho: float, service: Any) -> None:
    single, plain = at_load(MXG1, rho, 1, service), MG1(rho / law_of(service).mean_s, service)
    for figure in FIGURES:
        assert getattr(single, figure) == pytest.approx(getattr(plain, figure), rel=1e-9), figure
    at_s = np.concatenate([[-1.0, 0.0, 1e-3], np.linspace(0.01, 1, 60) * 10 / (1 - rho), [np.inf]])
    # to 1e-6 where both invert a transform; on grids to what their docstrings say
    within = 1e-6 if service is SERVICES["exponential"] else 2e-5
    assert single.wait_cdf(at_s) == pytest.approx(plain.wait_cdf(at_s), abs=within)
    at_s = single.wait_quantile(QS)
    assert plain.wait_cdf(at_s[at_s > 0]) == pytest.approx(QS[at_s > 0], abs=5e-5)


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
def test_single_constant_services_have_the_waits_of_md1s_series(rho: float) -> None:
    at_s = np.linspace(0, 20, 81)
    assert MXG1(rho, 1, 1.0).wait_cdf(at_s) == pytest.approx(waits_md1(rho, at_s), abs=1e-8)


@given(st.floats(0.05, 0.95), loads, st.floats(1e-6, 1e3))
@few
def test_geometric_batches_of_exponential_services_have_a_closed_law(p: float, rho: float, mean_s: float) -> None:
    """A batch's work is exponential then, and so is what is before a job in it, when anything is."""
    model = at_load(MXG1, rho, stats.geom(p), stats.expon(scale=mean_s))
    whole, found = p / mean_s, p / mean_s * (1 - rho)
    mean_found_s, mean_before_s = rho / found, (1 - p) / whole
    assert model.mean_wait_s == pytest.approx(mean_found_s + mean_before_s, rel=1e-6)
    assert model.mean_queue + model.utilisation == pytest.approx(rho / p / (1 - rho), rel=1e-6)  # jobs in the system
    var_s2 = rho * (2 - rho) / found**2 + (1 - p) * (1 + p) / whole**2
    assert model.var_wait_s == pytest.approx(var_s2, rel=1e-6)
    at_s = np.linspace(0, 8, 30) / found
    slow, fast = np.exp(-found * at_s), np.exp(-whole * at_s)
    both = (whole * slow - found * fast) / (whole - found)
    above = rho * p * slow + (1 - rho) * (1 - p) * fast + rho * (1 - p) * both
    assert model.wait_cdf(at_s) == pytest.approx(1 - above, abs=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 12, stats.geom(0.2)])
@pytest.mark.parametrize("rho", [0.05, 0.5, 0.9])
def test_a_grid_and_an_inverted_transform_agree(rho: float, batch: Any) -> None:
    inverted, on_grid = (at_load(MXG1, rho, batch, s) for s in (stats.expon(), stats.weibull_min(1.0)))  # one law
    at_s = np.concatenate([[0.0, 1e-3], np.linspace(0.01, 1, 80) * 30 / (1 - rho)])
    assert on_grid.wait_cdf(at_s) == pytest.approx(inverted.wait_cdf(at_s), abs=6e-5)


def dm1(rho: float) -> float:
    """σ of D/M/1 with E[S] = 1: P(W > t) = σ e^{−(1 − σ) t}."""
    return float(brentq(lambda y: math.log(y) + (1 - y) / rho, 1e-300, 1 - (1 - rho) / 2))


@pytest.mark.parametrize("p", [1.0, 0.2])
@pytest.mark.parametrize("rho", [0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 0.9985, 0.9995])
def test_periodic_geometric_batches_of_exponential_services_find_what_dm1_has(rho: float, p: float) -> None:
    batch = stats.geom(p) if p < 1 else 1
    model = at_load(DXG1, rho, batch, stats.expon(scale=p))  # a batch's work is exponential, with mean 1
    sigma = dm1(rho)
    mean_s, var_s2 = sigma / (1 - sigma), sigma * (2 - sigma) / (1 - sigma) ** 2
    assert model.mean_wait_s == pytest.approx(mean_s + 1 - p, rel=1e-3)
    assert model.var_wait_s == pytest.approx(var_s2 + (1 - p) * (1 + p), rel=4e-3)
    at_s = np.linspace(0, 8, 30) / (1 - sigma)
    if p == 1:
        assert model.wait_cdf(at_s) == pytest.approx(1 - sigma * np.exp(-(1 - sigma) * at_s), abs=1e-3)
    assert model.wait_cdf(0.0) == pytest.approx(p * (1 - sigma), abs=1e-4 if rho < 0.998 else 1e-3)


@given(st.integers(1, 300), st.floats(0.01, 0.999), st.floats(1e-6, 1e3))
@few
def test_constant_batches_of_constant_services_find_nothing(n: int, rho: float, service_s: float) -> None:
    model = DXG1(n * service_s / rho, n, service_s)
    assert model.mean_wait_s == pytest.approx((n - 1) * service_s / 2, rel=1e-12)
    assert model.var_wait_s == pytest.approx((n**2 - 1) * service_s**2 / 12, rel=1e-9)
    k = np.arange(n)
    assert model.wait_cdf(k * service_s) == pytest.approx((k + 1) / n, abs=1e-9)
    assert model.wait_cdf((k - 1e-3) * service_s) == pytest.approx(k / n, abs=1e-9)
    assert model.wait_quantile((k + 0.5) / n) == pytest.approx(k * service_s, rel=1e-9)


def lindley_law(work: Floats, period: int, cells: int) -> Floats:
    """The stationary masses of V' = max(0, V + B − T) on whole numbers, by repeating the recursion."""
    found = np.zeros(cells)
    found[0] = 1.0
    for _ in range(5000):
        after = np.convolve(found, work)
        following = np.concatenate([[after[: period + 1].sum()], after[period + 1 :], np.zeros(cells)])[:cells]
        if np.abs(following - found).max() < 1e-16:
            break
        found = following
    return found


@pytest.mark.parametrize(
    ("batch", "service", "period"),
    [
        (stats.binom(10, 0.5), 1.0, 6),
        (stats.geom(0.4), 1.0, 3),
        ([0, 10, 20], 1.0, 15),  # a walk with a span of 5
        (2, [1.0, 3.0], 5),  # of 2 and of 1
        ([1, 4], [0.0, 1.0, 2.0], 3),
    ],
)
def test_a_law_on_whole_numbers_is_that_of_the_recursion(batch: Any, service: Any, period: int) -> None:
    model = DXG1(float(period), batch, service)
    one = np.zeros(int(model.service.values_s[-1]) + 1)
    one[model.service.values_s.astype(int)] = model.service.probabilities
    some, work, before = np.ones(1), np.zeros(1), np.zeros(1)
    for size in range(int(model.batch.values_s[-1]) + 1):
        here = float(model.batch.probabilities[model.batch.values_s == size].sum())
        later = float(model.batch.probabilities[model.batch.values_s > size].sum()) / model.batch.mean_s
        work, before = (np.pad(law, (0, len(some) - len(law))) for law in (work, before))
        work, before, some = work + here * some, before + later * some, np.convolve(some, one)
    waits = np.convolve(lindley_law(work, period, 400), before)[:400]
    k = np.arange(400)
    assert model.wait_cdf(k) == pytest.approx(np.cumsum(waits), abs=1e-10)
    assert model.wait_cdf(k + 0.9) == pytest.approx(np.cumsum(waits), abs=1e-10)
    assert model.mean_wait_s == pytest.approx(waits @ k, rel=1e-9)
    assert model.var_wait_s == pytest.approx(waits @ k**2 - (waits @ k) ** 2, rel=1e-9)
    scaled = DXG1(period * 35e-6, batch, np.asarray(service) * 35e-6)
    assert scaled.wait_cdf(k * 35e-6) == pytest.approx(np.cumsum(waits), abs=1e-10)


# simulation


@pytest.mark.parametrize("rho", [0.1, 0.6, 0.95])
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", [MXG1, DXG1])
def test_a_simulation_agrees(kind: type[Model], batch: str, service: str, rho: float) -> None:
    model = at_load(kind, rho, BATCHES[batch], SERVICES[service])
    rng = np.random.default_rng([int(rho * 100), len(batch), len(service)])
    arrivals_s, services_s = jobs(model, 160_000 if rho > 0.9 else 30_000, rng)
    waits_s = simulate(arrivals_s, services_s)[len(arrivals_s) // 40 :]
    # 300 measured values are steps of the law of one service, which a grid smooths
    held_to(model, waits_s, slack=2 / 300 if service == "measured" else 0.0)


@pytest.mark.parametrize("kind", [MXG1, DXG1])
@pytest.mark.parametrize("k", [2, 5])
def test_dealing_jobs_to_queues_thins_their_batches(kind: type[Model], k: int) -> None:
    model = at_load(kind, 0.7 * k, 12, stats.gamma(2, scale=0.5))
    arrivals_s, services_s = jobs(model, 100_000, np.random.default_rng(k), k)
    assert model.mean_wait_s == math.inf
    held_to(model.split(k), simulate(arrivals_s, services_s)[1_000:])


@pytest.mark.parametrize("kind", [MXG1, DXG1])
def test_as_many_wait_as_little_says(kind: type[Model]) -> None:
    model = at_load(kind, 0.7, stats.geom(0.2), [0.5, 1.5])
    rng = np.random.default_rng(8)
    arrivals_s, services_s = jobs(model, 100_000, rng)
    starts_s = arrivals_s + simulate(arrivals_s, services_s)
    at_s = np.sort(rng.uniform(arrivals_s[1_000], arrivals_s[-1], 100_000))
    waiting = np.searchsorted(arrivals_s, at_s, "right") - np.searchsorted(np.sort(starts_s), at_s, "right")
    mean, error = batch_means(waiting.astype(float))
    assert abs(mean - model.mean_queue) <= 4 * error


@pytest.mark.parametrize("batch", [1, 6])
def test_ciw_agrees(batch: int) -> None:
    ciw = pytest.importorskip("ciw", reason="ciw, an independent simulator, is not installed (it comes with `test`)")
    ciw.seed(batch)
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(rate=0.6 / batch)],
        batching_distributions=[ciw.dists.Deterministic(value=batch)],
        service_distributions=[ciw.dists.Gamma(shape=2, scale=0.5)],
        number_of_servers=[1],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_time(30_000)
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)[1_000:]
    held_to(MXG1(0.6 / batch, batch, stats.gamma(2, scale=0.5)), np.array([r.waiting_time for r in records]))


# what models are among themselves


@pytest.mark.parametrize("kind", [MXG1, DXG1])
@given(batch=sizes, service=times, rho=loads)
@few
def test_moments_are_those_of_the_distribution(kind: type[Model], batch: Any, service: Any, rho: float) -> None:
    model = at_load(kind, rho, batch, service)
    far_s = 30 * (model.mean_wait_s + math.sqrt(model.var_wait_s)) + 1
    at_s = np.concatenate([[0.0], np.geomspace(1e-4, far_s, 2_000)])
    above = 1 - model.wait_cdf(at_s)
    assert (np.diff(above) <= 1e-7).all()
    assert trapezoid(above, at_s) == pytest.approx(model.mean_wait_s, rel=5e-3, abs=1e-3)
    square_s2 = model.var_wait_s + model.mean_wait_s**2
    assert 2 * trapezoid(at_s * above, at_s) == pytest.approx(square_s2, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("kind", [MXG1, DXG1])
@given(batch=sizes, service=times, rho=loads)
@few
def test_a_quantile_is_where_the_cdf_gets_there(kind: type[Model], batch: Any, service: Any, rho: float) -> None:
    model = at_load(kind, rho, batch, service)
    at_s, none = model.wait_quantile(QS), float(model.wait_cdf(0.0))
    assert (np.diff(at_s) >= 0).all()
    assert (at_s[none >= QS] == 0).all()
    above = at_s[none < QS]
    assert (above > 0).all()
    assert (model.wait_cdf(above) >= QS[none < QS] - 1e-9).all()
    assert (model.wait_cdf(above * (1 - 1e-5)) <= QS[none < QS] + 1e-9).all()
    if hasattr(model.service, "frozen"):  # no steps
        assert model.wait_cdf(above) == pytest.approx(QS[none < QS], abs=1e-6)
    assert model.wait_quantile(1.0) == np.inf


@pytest.mark.parametrize("kind", [MXG1, DXG1])
@given(batch=sizes, service=times, rho=loads, factor=st.floats(1.01, 1.5), scale=st.floats(1e-6, 1e3))
@few
def test_waits_grow_with_load_and_scale_with_time(
    kind: type[Model], batch: Any, service: Any, rho: float, factor: float, scale: float
) -> None:
    model, more = at_load(kind, rho, batch, service), at_load(kind, rho * factor, batch, service)
    assert more.mean_wait_s >= model.mean_wait_s * (1 - 1e-3)
    assert (more.wait_cdf(QS * 20) <= model.wait_cdf(QS * 20) + 1e-3).all()
    if not hasattr(model.service, "frozen"):
        slower = at_load(kind, rho, batch, np.asarray(service) * scale)
        for figure, power in {"mean_wait_s": 1, "var_wait_s": 2, "mean_queue": 0}.items():
            assert getattr(slower, figure) == pytest.approx(getattr(model, figure) * scale**power, rel=1e-3), figure


@pytest.mark.parametrize("kind", [MXG1, DXG1])
@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_larger_batches_at_one_rate_of_jobs_wait_longer(kind: type[Model], service: Any) -> None:
    means_s = [at_load(kind, 0.8, n, service).mean_wait_s for n in (1, 2, 5, 20, 100)]
    assert (np.diff(means_s) > 0).all()
    spread_s = [at_load(kind, 0.8, batch, service).mean_wait_s for batch in (20, stats.binom(40, 0.5), [0, 40])]
    assert (np.diff(spread_s) > 0).all()


@pytest.mark.parametrize("rho", [0.2, 0.5, 0.8])
def test_the_burst_penalty(rho: float) -> None:
    """Decode steps of 50 events of 35 µs: the mean rate of a Poisson stream, and many times its wait."""
    n, service_s = 50, 35e-6
    single = MG1(rho / service_s, service_s)
    poisson, periodic = (at_load(kind, rho, n, service_s) for kind in (MXG1, DXG1))
    for bursts in (poisson, periodic):
        assert bursts.rate_per_s == pytest.approx(single.rate_per_s)
        assert bursts.mean_wait_s > 10 * single.mean_wait_s
    assert poisson.mean_wait_s / single.mean_wait_s == pytest.approx(n + (n - 1) * (1 - rho) / rho, rel=1e-9)
    assert periodic.mean_wait_s / single.mean_wait_s == pytest.approx((n - 1) * (1 - rho) / rho, rel=1e-9)
    arrivals_s = np.repeat(np.arange(2_000) * periodic.period_s, n)
    waits_s = simulate(arrivals_s, np.full(len(arrivals_s), service_s))
    assert waits_s.mean() == pytest.approx(periodic.mean_wait_s, rel=1e-6)


# thinning


@given(st.integers(1, 60), st.integers(1, 60))
@few
def test_a_batch_of_one_size_is_thinned_to_a_binomial_law(n: int, k: int) -> None:
    part, binomial = thinned(n, k), stats.binom(n, 1 / k)
    assert part.probabilities == pytest.approx(binomial.pmf(part.values_s), abs=1e-11)
    assert part.probabilities.sum() == pytest.approx(1, abs=1e-14)
    assert part.mean_s == pytest.approx(n / k, rel=1e-9)


def test_a_poisson_batch_stays_poisson_and_a_tail_is_cut_where_nothing_is_lost() -> None:
    part = thinned(stats.poisson(12), 3)
    assert part.values_s.tolist() == list(range(len(part.values_s)))
    assert part.probabilities == pytest.approx(stats.poisson(4).pmf(part.values_s), abs=1e-11)
    assert stats.poisson(4).sf(part.values_s[-1]) < 2e-12
    assert len(thinned(stats.geom(0.5), 1).values_s) <= 42


@pytest.mark.parametrize("kind", [MXG1, DXG1])
@given(batch=sizes, service=times, rho=loads)
@few
def test_splits_compose(kind: type[Model], batch: Any, service: Any, rho: float) -> None:
    model = at_load(kind, rho, batch, service)
    once, twice = model.split(6), model.split(2).split(3)
    for figure in FIGURES:
        assert getattr(twice, figure) == pytest.approx(getattr(once, figure), rel=1e-6, abs=1e-9), figure
    assert twice.wait_cdf(QS * 10) == pytest.approx(once.wait_cdf(QS * 10), abs=1e-6)
    assert once.utilisation == pytest.approx(rho / 6, rel=1e-9)
    assert once.mean_wait_s <= model.mean_wait_s
    assert model.split(1) == model


@given(service=times, rho=loads, empty=st.floats(0.05, 0.9))
@few
def test_an_empty_poisson_batch_is_no_arrival(service: Any, rho: float, empty: float) -> None:
    without = at_load(MXG1, rho, [2, 5], service)
    sometimes = replace(without.split(1), batch=[0, 0, 0, 2, 5], batch_rate_per_s=without.batch_rate_per_s * 2.5)
    for figure in FIGURES:
        assert getattr(sometimes, figure) == pytest.approx(getattr(without, figure), rel=1e-9), figure
    assert sometimes.wait_cdf(QS * 10) == pytest.approx(without.wait_cdf(QS * 10), abs=1e-9)


def test_thinned_singles_are_a_slower_poisson_stream() -> None:
    part, plain = MXG1(0.9, 1, stats.expon()).split(3), MM1(0.3, 1.0)
    for figure in FIGURES:
        assert getattr(part, figure) == pytest.approx(getattr(plain, figure), rel=1e-9), figure
    assert part.wait_cdf(QS * 9) == pytest.approx(plain.wait_cdf(QS * 9), abs=1e-6)


# the ends, and what is refused


@pytest.mark.parametrize("rho", [1.0, 1.7])
@pytest.mark.parametrize("kind", [MXG1, DXG1])
def test_a_queue_that_cannot_keep_up_has_no_end(kind: type[Model], rho: float) -> None:
    for service in SERVICES.values():
        model = at_load(kind, rho, 4, service)
        model = model if model.utilisation >= 1 else at_load(kind, rho * (1 + 1e-12), 4, service)
        assert model.mean_wait_s == model.var_wait_s == model.mean_queue == model.mean_time_s == math.inf
        assert model.wait_cdf([0.0, 1.0, 1e9]).tolist() == [0, 0, 0]
        assert model.wait_quantile([0.1, 0.9]).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("kind", [MXG1, DXG1])
def test_a_curve_goes_up_to_the_end_of_its_rates(kind: type[Model]) -> None:
    rhos = [0.9, 0.99, 0.998, 0.999, 0.9995, 0.99985, 0.99995, 1 - 1e-7, 1 - 3e-9, 1 - 1e-12]
    models = [at_load(kind, rho, 3, stats.expon()) for rho in rhos]
    means_s = np.array([model.mean_wait_s for model in models])
    assert (np.diff(means_s) > 0).all()
    medians_s = np.array([float(model.wait_quantile(0.5)) for model in models])
    assert (np.diff(medians_s) > 0).all()
    # exponential in the limit of heavy traffic
    assert medians_s[-3:] == pytest.approx(math.log(2) * means_s[-3:], rel=1e-2)


@pytest.mark.parametrize(
    "service", [1.0, stats.uniform(0, 2), stats.lognorm(0.8, scale=math.exp(-0.32)), [0.3, 0.9, 1.8]]
)
@pytest.mark.parametrize("batch", [1, 50, stats.geom(0.1)])
def test_far_tails_near_the_end_are_those_of_heavy_traffic(batch: Any, service: Any) -> None:
    model = at_load(MXG1, 0.9995, batch, service)
    at_s = model.mean_wait_s * np.array([0.5, 1.0, 2.0, 4.0])
    assert model.wait_cdf(at_s) == pytest.approx(-np.expm1(-at_s / model.mean_wait_s), abs=1e-3)


@pytest.mark.parametrize(
    "model",
    [MXG1(0, 4, 0.5), MXG1(3, 4, 0), DXG1(1, 4, 0), DXG1(100.0, 1, 0.5)],
)
def test_without_anything_to_wait_for(model: Model) -> None:
    before_s = (model.batch.mean_s - 1) / 2 * model.service.mean_s
    assert model.mean_wait_s == pytest.approx(before_s, rel=1e-12)
    assert float(model.wait_cdf(before_s * 2 + 1)) == pytest.approx(1, abs=1e-9)
    assert float(model.wait_cdf(-1e-9)) == 0.0


@pytest.mark.parametrize("rho", [1e-4, 0.1, 0.6])
def test_a_batch_that_never_outlasts_its_period_finds_nothing(rho: float) -> None:
    service = [0.3, 1 / 3, math.pi / 7]  # multiples of no one length
    single, pair = at_load(DXG1, rho, 1, service), at_load(DXG1, rho, 2, service)
    assert single.mean_wait_s == single.var_wait_s == 0
    assert float(single.wait_cdf(0.0)) == 1
    assert pair.mean_wait_s == pytest.approx(np.mean(service) / 2, rel=1e-12)
    assert pair.wait_cdf([0.0, 0.29, 0.32, 0.4, 0.46]) == pytest.approx([1 / 2, 1 / 2, 4 / 6, 5 / 6, 1], abs=1e-9)


def test_heavy_tails_have_infinite_moments() -> None:
    heavy = stats.pareto(1.5, scale=0.1)  # no variance
    for model in (MXG1(1, 2, heavy), DXG1(1, 2, heavy)):
        assert model.utilisation == pytest.approx(0.6)
        assert model.mean_wait_s == model.var_wait_s == math.inf
    skewed = stats.pareto(2.5, scale=0.1)  # no third moment
    for model in (MXG1(1, 2, skewed), DXG1(1, 2, skewed)):
        assert math.isfinite(model.mean_wait_s)
        assert model.var_wait_s == math.inf


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MXG1(-1, 1, 1), "batch_rate_per_s"),
        (lambda: MXG1(math.nan, 1, 1), "batch_rate_per_s"),
        (lambda: MXG1(1, 1, -1), "service must be finite and not below 0"),
        (lambda: MXG1(1, 1, math.nan), "service must be finite and not below 0"),
        (lambda: MXG1(1, 0, 1), "batch must hold a size of at least 1; not 0"),
        (lambda: MXG1(1, 1.5, 1), "batch must hold whole numbers only; not 1.5"),
        (lambda: MXG1(1, [1, -2], 1), "batch must be finite and not below 0; not -2"),
        (lambda: MXG1(1, stats.expon(), 1), "batch must hold whole numbers only; not expon()"),
        (lambda: MXG1(1, [], 1), "batch must hold at least one number"),
        (lambda: DXG1(0, 1, 1), "period_s must be a number above 0"),
        (lambda: DXG1(math.nan, 1, 1), "period_s must be a number above 0"),
        (lambda: DXG1(1, [0, 0], 1), "batch must hold a size of at least 1"),
        (lambda: DXG1(1, 2, [1, math.inf]), "service must be finite"),
        (lambda: DXG1(1, 2, 0.1).split(0), "k must be a whole number of at least 1; not 0"),
        (lambda: MXG1(1, 2, 0.1).split(1.5), "k must be a whole number of at least 1; not 1.5"),
        (lambda: MXG1(1, 2, 0.1).wait_quantile(1.5), "q must be between 0 and"),
        (lambda: DXG1(1, 2, 0.1).wait_quantile(-0.5), "q must be between 0 and"),
    ],
)
def test_what_makes_no_queue_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(").replace(")", r"\)")):
        make()


@pytest.mark.parametrize(
    "model",
    [
        MXG1(100.0, 20, 0.0001),
        MXG1(batch_rate_per_s=100.0, batch=[1, 2, 2], service=[0.001, 0.002]).split(3),
        DXG1(0.01, stats.binom(10, 0.5), stats.expon(scale=0.0001)).split(2).split(2),
    ],
)
def test_a_model_reads_as_it_was_made(model: Model) -> None:
    names = {name: getattr(stats, name) for name in ("binom", "expon")} | {"thinned": thinned}
    again = eval(repr(model), {"MXG1": MXG1, "DXG1": DXG1, **names})
    assert again == model
    assert repr(again) == repr(model)
    assert hash(again) == hash(model)
