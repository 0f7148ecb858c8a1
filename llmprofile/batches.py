"""Queues whose jobs come in batches: M^X/G/1, batches at random times, and D^X/G/1, batches at equal distances.

An engine that batches continuously emits a token for every running sequence at each decode step, so the events that
its client sees come in periodic bursts. A job waits for what its batch finds (V), and for the jobs before it in its
batch (I); the two are independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom

from llmprofile.errors import UsageError, not_negative, positive, whole
from llmprofile.inversion import invert, quantile
from llmprofile.laws import Complex, Continuous, Discrete, Floats, Law, law_of

VARIANCE_SHARE = 1e-4  # of a batch's work: what a grid may add to it
STEPS_PER_SD = 50  # of a service, on a grid
CELLS, MOST_CELLS = 1 << 13, 1 << 21  # of a grid: four times more for times farther out; 200 MB at most
ALMOST_FULL = 1 - 3e-4  # of M^X/G/1: from here on the limit of heavy traffic is as good as a grid
LEAST_CHANCE = 1e-12  # sizes whose tail is less likely are left out
LEAST_TAIL = 1e-12  # of a service that is moved to a grid
SLIP = 1e-6  # of a step: rounding that is forgiven
ALIAS = 32.0  # nepers: the tail that wraps around on a grid is below 1e-13
DAMPING = 1e-11  # once around a grid, of which half is used: aliasing; rounding is 1e-16 over its root


def thinned(batch: Any, k: int) -> Discrete:
    """What one of `k` queues gets of a batch whose jobs are dealt at random: Binomial(X, 1/k).

    Parameters
    ----------
    batch : int, (n,) array of sizes, or scipy.stats frozen law on 0, 1, 2, …
    k : int

    Returns
    -------
    Discrete
        The sizes as `values_s`, from 0 up, and their `probabilities`; the tail below 1e-12 is left out.

    Raises
    ------
    UsageError
        A batch that is not of whole numbers, or always empty; a `k` below 1.

    Examples
    --------
    >>> part = thinned(2, 2)
    >>> part, part.values_s.tolist(), part.probabilities.round(9).tolist()
    (thinned(2, 2), [0.0, 1.0, 2.0], [0.25, 0.5, 0.25])
    """
    law = _sizes_of(batch)
    if whole("k", k) == 1:
        return law
    sizes = np.arange(law.values_s[-1] + 1)
    chances = np.zeros(len(sizes))
    for size, chance in zip(law.values_s.astype(int), law.probabilities, strict=True):
        chances[: size + 1] += chance * binom.pmf(sizes[: size + 1], size, 1 / k)
    return _without_tail(Discrete(sizes, chances, f"thinned({law}, {k})"))


def _sizes_of(batch: Any) -> Discrete:
    """Return the law of a batch's size; refuse what is no size."""
    law = law_of(batch, "batch")
    if not isinstance(law, Discrete) or np.any(law.values_s % 1):
        raise UsageError(f"batch must hold whole numbers only; not {law}")
    if not law.mean_s > 0:
        raise UsageError(f"batch must hold a size of at least 1; not {law}")
    if len(law.values_s) == 1:  # a size is shown as one
        law = replace(law, given=str(int(law.values_s[0])))
    return law if law is batch else _without_tail(law)


def _without_tail(law: Discrete) -> Discrete:
    kept = np.cumsum(law.probabilities[::-1])[::-1] > LEAST_CHANCE
    if kept.all():
        return law
    return Discrete(law.values_s[kept], law.probabilities[kept] / law.probabilities[kept].sum(), law.given)


# what a batch and its services say, however batches come


def _factorial_moments(batch: Discrete) -> tuple[float, float, float]:
    """Return E[X], E[X(X−1)], E[X(X−1)(X−2)]."""
    x, p = batch.values_s, batch.probabilities
    return float(p @ x), float(p @ (x * (x - 1))), float(p @ (x * (x - 1) * (x - 2)))


def _work_moments(batch: Discrete, service: Law) -> tuple[float, float, float]:
    """Return E[B], E[B²], E[B³] of a batch's total service."""
    (n1, n2, n3), s1 = _factorial_moments(batch), service.mean_s
    pairs_s3 = 3 * n2 * s1 * service.second_s2 if n2 else 0.0
    return n1 * s1, n1 * service.second_s2 + n2 * s1**2, n1 * service.third_s3 + pairs_s3 + n3 * s1**3


def _before_moments(batch: Discrete, service: Law) -> tuple[float, float]:
    """Return mean and variance of I.

    J jobs are before an arbitrary one: P(J = j) = P(X > j) / E[X], as more jobs are of large batches than of small.
    """
    n1, n2, n3 = _factorial_moments(batch)
    mean = n2 / (2 * n1)
    var = n3 / (3 * n1) + mean - mean**2
    var_s2 = mean * service.scv * service.mean_s**2 if mean else 0.0
    return mean * service.mean_s, var_s2 + var * service.mean_s**2


def _generating(batch: Discrete, z: Complex) -> tuple[Complex, Complex]:
    """Return E z^X, and E z^J = (1 − E z^X) / (E[X] (1 − z)), of `z`'s shape."""
    total, above = np.zeros_like(z), int(batch.values_s[-1])
    for size, chance in zip(batch.values_s[::-1].astype(int), batch.probabilities[::-1], strict=True):
        total = total * _power(z, above - size) + chance
        above = size
    total = total * _power(z, above)
    at_one = z == 1
    before = (1 - total) / (batch.mean_s * np.where(at_one, 1.0, 1 - z))
    return total, np.where(at_one, 1.0, before)


def _power(z: Complex, n: int) -> Complex | float:
    return 1.0 if n == 0 else z if n == 1 else z**n


class _BatchQueue:
    """What follows, for either kind of batches, from a rate of jobs, a batch, a service and a mean wait."""

    batch: Any
    service: Any

    @property
    def rate_per_s(self) -> float:
        raise NotImplementedError

    @property
    def mean_wait_s(self) -> float:
        raise NotImplementedError

    @property
    def _stair_s(self) -> float:
        """Of what the times at which the cdf jumps are multiples; 0 where it has no steps."""
        raise NotImplementedError

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        raise NotImplementedError

    @property
    def utilisation(self) -> float:
        """ρ, the share of the time that the server is busy; 1 and more means that it can't keep up."""
        return self.rate_per_s * float(self.service.mean_s)

    @property
    def mean_time_s(self) -> float:
        """Mean of wait and service."""
        return self.mean_wait_s + float(self.service.mean_s)

    @property
    def mean_queue(self) -> float:
        """Jobs that wait, on average: rate of jobs × mean wait (Little)."""
        return self.rate_per_s * self.mean_wait_s if self.rate_per_s else 0.0

    def wait_quantile(self, q: npt.ArrayLike) -> Floats:
        """The least t ≥ 0 with P(W ≤ t) ≥ q, of `q`'s shape: 0 up to the atom at 0; infinite from ρ = 1 on.

        Raises
        ------
        UsageError
            A `q` that is not between 0 and 1 − 1e-8, or 1.
        """
        if self.utilisation >= 1:
            return np.full(np.shape(q), np.inf)
        scale_s = self.mean_wait_s if 0 < self.mean_wait_s < math.inf else self.service.mean_s
        times_s, stair_s = quantile(self.wait_cdf, q, scale_s or 1.0), self._stair_s
        if not stair_s:
            return times_s
        # a search ends just below a step of the cdf, where rounding is forgiven
        onto = stair_s * np.rint(np.where(np.isfinite(times_s), times_s, 0.0) / stair_s)
        return np.where(np.abs(times_s - onto) < 2 * SLIP * stair_s, onto, times_s)


def _span_s(values_s: Floats) -> float:
    """Return the length that all values are multiples of, to 1e-9 of the largest; 0 when there is none."""
    longest_s = float(np.max(values_s))
    slip = 1e-9 * longest_s

    def divisor(a: float, b: float) -> float:
        while b > slip:
            a, b = b, abs(a - b * round(a / b))
        return a

    span_s = 0.0
    for value_s in values_s[values_s > slip].tolist():
        span_s = divisor(span_s, value_s)
        if span_s < 1000 * slip:  # no grid could use it
            return 0.0
    if not span_s:
        return 0.0
    span_s = longest_s / round(longest_s / span_s)  # without what rounding left on the way
    return span_s if np.all(np.abs(values_s - span_s * np.rint(values_s / span_s)) <= slip) else 0.0


def _fine_step_s(service: Law) -> float:
    """Return a step that shows the shape of the law."""
    sd_s = service.mean_s * math.sqrt(service.scv)
    return min(max(sd_s / STEPS_PER_SD, service.mean_s / 2000) if sd_s else math.inf, service.mean_s / 20)


def _moved_to_grid(service: Law, step_s: float, most: int) -> Floats:
    """Return the law on multiples of a step, each value shared by its two neighbours: the mean stays.

    What is beyond `most` steps of a continuous law is put there.
    """
    if isinstance(service, Discrete):
        cells = service.values_s / step_s
        cells = np.where(np.abs(cells - np.rint(cells)) < SLIP, np.rint(cells), cells)
        low, share = np.floor(cells).astype(int), cells % 1
        masses = np.concatenate([service.probabilities * (1 - share), service.probabilities * share])
        return np.bincount(np.append(low, low + 1), masses)[: math.ceil(cells.max()) + 1].astype(float)
    last = math.ceil(min(service.frozen.isf(LEAST_TAIL) / step_s, most))
    points, weights = np.polynomial.legendre.leggauss(4)
    at = np.arange(last + 1)[:, None] + (1 + points) / 2
    above = service.frozen.sf(at * step_s) @ weights / 2  # the mean of P(S > x) in each cell
    masses = -np.diff(np.concatenate([[1.0], above, [0.0]]))
    # near ρ = 1 little of the mean is much of what is spare: what the quadrature missed at a kink is made up for
    missed = service.mean_s * float(service.residual_cdf((last + 1) * step_s)) / step_s - above.sum()
    most_likely = int(np.argmax(masses[:-1]))
    masses[most_likely : most_likely + 2] += [-missed, missed]
    return masses


@dataclass(frozen=True)
class MXG1(_BatchQueue):
    """Poisson batches at one server, first come, first served: M^X/G/1.

    Parameters
    ----------
    batch_rate_per_s : float
        λ, of batches.
    batch : int, (n,) array of sizes, or scipy.stats frozen law on 0, 1, 2, …
        X, the jobs of a batch; measured sizes are equally likely. An empty batch is no arrival.
    service : law, array of measured seconds, or number of seconds
        S, of one job.

    Raises
    ------
    UsageError
        A rate that is negative or missing; a batch that is not of whole numbers, or always empty; a negative or
        missing time.

    Notes
    -----
    An arbitrary job waits V + I: V is the wait in an M/G/1 queue whose services are the batches' work
    (Pollaczek–Khinchine), I the work before it in its batch (Burke, "Delays in single-server queues with batch
    input", Operations Research 23, 1975). For exponential and gamma services the transform of their sum is inverted.
    Services that are multiples of one length have an exact distribution too. Others are moved to a grid of a
    fiftieth of their standard deviation, for the distribution alone: it is good to 1e-4, mostly 1e-5, but a step of the
    cdf, as of few measured values, is drawn out over a cell. Within 3e-4 of ρ = 1 it is exponential (heavy traffic).

    Examples
    --------
    >>> single, bursty = MXG1(8_000, 1, 100e-6), MXG1(400, 20, 100e-6)  # one rate of jobs
    >>> bursty, round(bursty.utilisation, 9)
    (MXG1(batch_rate_per_s=400, batch=20, service=0.0001), 0.8)
    >>> round(single.mean_wait_s * 1e6), round(bursty.mean_wait_s * 1e6)
    (200, 4950)
    """

    batch_rate_per_s: float
    batch: Any
    service: Any

    def __post_init__(self) -> None:
        not_negative("batch_rate_per_s", self.batch_rate_per_s)
        object.__setattr__(self, "batch", _sizes_of(self.batch))
        object.__setattr__(self, "service", law_of(self.service))

    @property
    def rate_per_s(self) -> float:
        """Jobs per second, λE[X]."""
        return self.batch_rate_per_s * float(self.batch.mean_s)

    @property
    def mean_wait_s(self) -> float:
        """E[W] = λE[B²] / 2(1 − ρ) + E[X(X−1)] E[S] / 2E[X], in seconds; B is a batch's work."""
        if self.utilisation >= 1:
            return math.inf
        return self._mean_found_s + _before_moments(self.batch, self.service)[0]

    @property
    def _mean_found_s(self) -> float:
        work_s2 = _work_moments(self.batch, self.service)[1]
        return self.batch_rate_per_s * work_s2 / (2 * (1 - self.utilisation)) if self.batch_rate_per_s else 0.0

    @property
    def var_wait_s(self) -> float:
        """Variance of the wait, in s²."""
        work_s3 = _work_moments(self.batch, self.service)[2]
        if self.utilisation >= 1:
            return math.inf
        tail = self.batch_rate_per_s * work_s3 / (3 * (1 - self.utilisation)) if self.batch_rate_per_s else 0.0
        return self._mean_found_s**2 + tail + _before_moments(self.batch, self.service)[1]

    def split(self, k: int) -> Self:
        """One of `k` queues among which jobs are dealt at random: batches keep their times and are thinned."""
        return replace(self, batch=thinned(self.batch, k))

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(W ≤ t), of `t`'s shape; 0 everywhere from ρ = 1 on."""
        t = np.asarray(t, float)
        if self.utilisation >= 1:
            return np.zeros(t.shape)
        service = self.service
        if self.utilisation > ALMOST_FULL:
            return np.where(t < 0, 0.0, -np.expm1(-np.maximum(t, 0.0) / self.mean_wait_s))
        if isinstance(service, Continuous) and service.is_smooth:
            return invert(self._transform, t, self._no_wait)
        result = np.where(np.isnan(t), np.nan, np.where(t < 0, 0.0, 1.0))
        inside = (t >= 0) & np.isfinite(t)
        step_s, exact = self._step
        scales = np.ceil(np.log(np.maximum(np.where(inside, t, 0.0) / (step_s * CELLS), 1.0)) / math.log(4))
        for scale in np.unique(scales[inside]):
            group = inside & (scales == scale)
            if exact and scale == 0:
                result[group] = self._cdf_of_multiples(t[group], step_s)
            else:
                result[group] = np.interp(t[group], *_cdf_table(self, *self._farther(4.0**scale)))
        return np.clip(result, 0.0, 1.0)

    @property
    def _no_wait(self) -> float:
        """P(W = 0), when nothing is found and what is before takes no time."""
        return (1 - self.utilisation) * float(_generating(self.batch, self.service.cdf(np.zeros(1)))[1][0])

    def _transform(self, s: Complex) -> Complex:
        total, before = _generating(self.batch, self.service.transform(s))
        return (1 - self.utilisation) * s * before / (s - self.batch_rate_per_s * (1 - total))

    @property
    def _stair_s(self) -> float:
        step_s, exact = self._step
        return step_s if exact else 0.0

    @cached_property
    def _step(self) -> tuple[float, bool]:
        """Step of the grid in seconds, and whether services are multiples of it."""
        wanted_s = _fine_step_s(self.service) or 1.0
        span_s = _span_s(self.service.values_s) if isinstance(self.service, Discrete) else 0.0
        return (span_s, True) if span_s >= wanted_s else (wanted_s, False)

    def _farther(self, times: float) -> tuple[float, int]:
        """Return step and cells of a grid that reaches so many times farther; first wider steps, then more of them."""
        step_s = self._step[0]
        bearable_s = math.sqrt(
            6 * VARIANCE_SHARE * _work_moments(self.batch, self.service)[1] / float(self.batch.mean_s)
        )
        wider = 2.0 ** math.floor(math.log2(min(max(bearable_s / step_s, 1.0), times)))
        wider = max(wider, CELLS * times / (MOST_CELLS / 4))
        return step_s * wider, int(CELLS * times / wider)

    def _cdf_of_multiples(self, t: Floats, step_s: float) -> Floats:
        """Return P(W ≤ t) where services are multiples of a step.

        A service of m steps is m customers of an M^K/D/1 queue. At a time u < step before the batch comes, Q wait,
        and A come in u: V ≤ (k+1) step − u just when Q + A ≤ k (Franx, "A simple solution for the M/D/c waiting time
        distribution", Operations Research Letters 29, 2001; his argument, with A compound). I adds whole steps.
        """
        k = np.floor(t / step_s + SLIP)
        ahead_s = np.clip((k + 1) * step_s - t, 0.0, step_s)
        n = 1 << math.ceil(math.log2(2 * k.max() + 8))
        coming, waiting = _on_circle(self, step_s, n)
        weights = waiting * np.where(np.arange(n // 2 + 1) % (n // 2) == 0, 1 / n, 2 / n)
        turns = 2j * math.pi / n * np.arange(n // 2 + 1)
        result = np.empty(len(t))
        for rows in np.array_split(np.arange(len(t)), len(t) * n // MOST_CELLS + 1):
            terms = np.exp(k[rows, None] * turns - ahead_s[rows, None] * coming) @ weights
            result[rows] = terms.real * DAMPING ** (-k[rows] / n)
        return result


@lru_cache(maxsize=2)
def _on_circle(queue: MXG1, step_s: float, n: int) -> tuple[Complex, Complex]:
    """Return λ(1 − K), and the generating function of P(Q + I ≤ k), on half a circle below 1 of `n` points.

    K is of a batch's work in steps; Q of what waits of it: (1 − ρ)(1 − z) / (A(z) − z), A of what comes in a step.
    """
    cells = np.arange(n)
    masses = _moved_to_grid(queue.service, step_s, n)
    served = np.fft.rfft(masses[:n] * DAMPING ** (cells[: len(masses)] / n), n)
    total, before = _generating(queue.batch, served)
    coming = queue.batch_rate_per_s * (1 - total)
    z = DAMPING ** (1 / n) * np.exp(-2j * math.pi / n * cells[: n // 2 + 1])
    return coming, (1 - queue.utilisation) * before / (np.exp(-step_s * coming) - z)


@lru_cache(maxsize=8)
def _cdf_table(queue: MXG1, step_s: float, cells: int) -> tuple[Floats, Floats]:
    """Return times and P(W ≤ t) at them, between which it is straight.

    On a grid half of a point's mass belongs to either side of it, but for what is truly at 0.
    """
    coming, waiting = _on_circle(queue, step_s, 2 * cells)
    before, at = (
        DAMPING ** (-np.arange(cells + 1) / (2 * cells)) * np.fft.irfft(w, 2 * cells)[: cells + 1]
        for w in (waiting, waiting * np.exp(-step_s * coming))
    )
    cdf = np.concatenate([[queue._no_wait], at[1:] / 2 + before[:-1] / 2])
    times_s = np.arange(cells + 1, dtype=float) * step_s
    return times_s, np.asarray(np.maximum.accumulate(np.clip(cdf, 0.0, 1.0)), float)


@dataclass(frozen=True)
class DXG1(_BatchQueue):
    """Batches at equal distances at one server, first come, first served: D^X/G/1.

    Parameters
    ----------
    period_s : float
        T, from batch to batch.
    batch : int, (n,) array of sizes, or scipy.stats frozen law on 0, 1, 2, …
        X, the jobs of a batch; measured sizes are equally likely. A period may pass without a job.
    service : law, array of measured seconds, or number of seconds
        S, of one job.

    Raises
    ------
    UsageError
        A period that is not above 0; a batch that is not of whole numbers, or always empty; a negative or missing
        time.

    Notes
    -----
    An arbitrary job waits V + I: I is the work before it in its batch; V is what its batch finds, V' = max(0, V + B −
    T) with B a batch's work (Lindley), in its steady state the highest point of a random walk. Services are moved to
    a grid so fine that B gains at most 1e-4 of its variance, or of what moves the mean wait as much, and the walk is
    factorised there (Spitzer) on a circle on which all transforms are analytic. The mean is good to 1e-3, mostly to
    1e-4, when the service's squared coefficient of variation is below some 50. Within about 1e-3 of ρ = 1 the limit of
    heavy traffic is taken (Kingman). Where T and all services are multiples of one length the law is exact; where
    services alone are, T is shared by two points of the grid, and the cdf has steps.

    Examples
    --------
    >>> burst = DXG1(period_s=0.01, batch=50, service=100e-6)
    >>> burst.utilisation, round(burst.mean_wait_s, 9)  # nothing is found: (n − 1) s / 2
    (0.5, 0.00245)
    >>> from scipy.stats import expon
    >>> round(DXG1(0.01, 90, expon(scale=100e-6)).mean_wait_s, 5), round(DXG1(0.01, 99, 100e-6).mean_wait_s, 5)
    (0.00458, 0.0049)
    """

    period_s: float
    batch: Any
    service: Any

    def __post_init__(self) -> None:
        positive("period_s", self.period_s)
        object.__setattr__(self, "batch", _sizes_of(self.batch))
        object.__setattr__(self, "service", law_of(self.service))

    @property
    def rate_per_s(self) -> float:
        """Jobs per second, E[X]/T."""
        return float(self.batch.mean_s) / self.period_s

    @property
    def mean_wait_s(self) -> float:
        """E[W] of an arbitrary job, in seconds; good to 1e-3."""
        if self.utilisation >= 1 or not math.isfinite(self.service.second_s2):
            return math.inf
        return self._steady.found_mean_s + _before_moments(self.batch, self.service)[0]

    @property
    def var_wait_s(self) -> float:
        """Variance of the wait, in s²."""
        if self.utilisation >= 1 or not math.isfinite(self.service.third_s3):
            return math.inf
        return self._steady.found_var_s2 + _before_moments(self.batch, self.service)[1]

    def split(self, k: int) -> Self:
        """One of `k` queues among which jobs are dealt at random: batches keep their times and are thinned."""
        return replace(self, batch=thinned(self.batch, k))

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(W ≤ t), of `t`'s shape; 0 everywhere from ρ = 1 on."""
        t = np.asarray(t, float)
        if self.utilisation >= 1:
            return np.zeros(t.shape)
        steady = self._steady
        cells = np.where(t >= 0, np.minimum(t / steady.step_s, len(steady.cdf) - 1.0), 0.0)
        if steady.in_steps:
            inside = steady.cdf[np.floor(cells + SLIP).astype(int)]
        else:
            inside = np.interp(cells, np.arange(len(steady.cdf)), steady.cdf)
        return np.where(t >= 0, inside, np.where(np.isnan(t), np.nan, 0.0))

    @cached_property
    def _steady(self) -> _Steady:
        step_s, in_steps = self._step
        spare_s = self.period_s * (1 - self.utilisation)
        var_s2 = self._var_work_s2
        on_grid_s2 = var_s2 + step_s**2 / 6 * max(float(self.batch.mean_s), 1.5)
        if var_s2 and ALIAS * on_grid_s2 > MOST_CELLS * step_s * spare_s:
            return _heavy_traffic(var_s2 / (2 * spare_s), _before_moments(self.batch, self.service)[0])
        period = self._least_period_s / step_s
        period = round(period) if abs(period - round(period)) < SLIP else period
        masses = _moved_to_grid(self.service, step_s, MOST_CELLS // 4)
        found, after, waits = _walk(masses, self.batch, period)
        cdf = np.cumsum(waits)
        if not in_steps:
            cdf -= waits / 2  # half of a point's mass belongs to what is beyond it, but for what is truly at 0
            none_before = float(_generating(self.batch, self.service.cdf(np.zeros(1)))[1][0])
            cdf[0] = none_before * (found[0] - after[int(period)] / 2)
        cdf = np.maximum.accumulate(np.clip(cdf, 0.0, 1.0))
        mean, square = (float(found @ np.arange(len(found)) ** power) for power in (1.0, 2.0))
        return _Steady(step_s, cdf, in_steps, mean * step_s, (square - mean**2) * step_s**2)

    @property
    def _stair_s(self) -> float:
        return self._steady.step_s if self._steady.in_steps else 0.0

    @property
    def _least_period_s(self) -> float:
        """T, or twice what the largest batch takes when that is less: a batch finds nothing in either case."""
        service = self.service
        longest_s = service.values_s[-1] if isinstance(service, Discrete) else service.frozen.isf(LEAST_TAIL)
        return min(self.period_s, 2 * float(longest_s * self.batch.values_s[-1])) or self.period_s

    @property
    def _var_work_s2(self) -> float:
        size_s2 = self.batch.scv * self.batch.mean_s**2 * self.service.mean_s**2
        return float(self.batch.mean_s * self.service.scv * self.service.mean_s**2 + size_s2)

    @property
    def _step(self) -> tuple[float, bool]:
        """Step of the grid in seconds, and whether services are multiples of it.

        Moving a service adds at most step²/6 to its variance, moving T at most step²/4.
        """
        service, period_s, worth_s2 = self.service, self._least_period_s, self._var_work_s2
        step_s = min(_fine_step_s(service) or period_s, period_s)
        if 0 < worth_s2 < math.inf:
            before_s = _before_moments(self.batch, service)[0]
            worth_s2 = max(worth_s2, 2 * self.period_s * (1 - self.utilisation) * before_s)
            step_s = min(step_s, math.sqrt(6 * VARIANCE_SHARE * worth_s2 / max(float(self.batch.mean_s), 1.5)))
        step_s = max(step_s, 4 * period_s / MOST_CELLS)
        if isinstance(service, Discrete):
            step_s = max(step_s, 4 * float(service.values_s[-1]) / MOST_CELLS)
            span_s, both_s = _span_s(service.values_s), _span_s(np.append(service.values_s, period_s))
            if not self._var_work_s2:  # nothing is ever found
                return span_s or period_s, True
            if both_s >= step_s / 8:
                return both_s, True
            if span_s >= step_s / 8:
                return span_s / math.ceil(span_s / step_s), True
        return period_s / math.ceil(period_s / step_s), False


@dataclass(frozen=True, eq=False)
class _Steady:
    """The wait's cdf on multiples of a step, straight between them or in steps; mean and variance of V."""

    step_s: float
    cdf: Floats
    in_steps: bool
    found_mean_s: float
    found_var_s2: float


def _heavy_traffic(found_s: float, before_s: float) -> _Steady:
    """Return the limit near ρ = 1, where V is exponential (Kingman) and I short beside it: shifted by its mean."""
    step_s = (found_s + before_s) / CELLS * ALIAS
    late = np.maximum(np.arange(CELLS + 1) * step_s - before_s, 0.0)
    return _Steady(step_s, -np.expm1(-late / found_s), False, found_s, found_s**2)


def _walk(masses: Floats, batch: Discrete, period: float) -> tuple[Floats, Floats, Floats]:
    """Return the masses of V, V + B and V + I on a grid, from those of a service; the period is in steps.

    log E z^V = Σ cₖ (zᵏ − 1), k > 0, with c the coefficients of −log(1 − E z^{B − T}) (Spitzer). On a circle on which
    E |z|^{B − T} < 1 the logarithm is analytic, whatever the span of the walk, and its coefficients fall fast.
    """
    outlasted = batch.values_s[-1] * (len(masses) - 1) > period
    tilt = _tilt(masses, batch, period) if outlasted else 10 / period
    n = 1 << math.ceil(math.log2(max(len(masses), period + ALIAS / tilt, 16)))
    cells, whole_steps = np.arange(n), math.floor(period)
    served = np.fft.rfft(masses * np.exp(tilt * cells[: len(masses)]), n)
    total, before = _generating(batch, served)
    back = np.exp(2j * math.pi / n * cells[: n // 2 + 1] - tilt)  # 1 / z
    passed = back**whole_steps * (1 - period % 1 + period % 1 * back)
    coefficients = np.fft.irfft(-np.log1p(-total * passed), n)
    coefficients[0] = coefficients[n // 2 :] = 0.0
    if not outlasted:  # no period: nothing is ever found, without rounding
        coefficients[:] = 0.0
    fading = np.exp(-tilt * cells)
    found = np.exp(np.fft.rfft(coefficients) - coefficients @ fading)
    laws = (np.fft.irfft(law, n) * fading for law in (found, found * total, found * before))
    v, after, waits = (np.maximum(law, 0.0) for law in laws)
    return v, after, waits


def _tilt(masses: Floats, batch: Discrete, period: float) -> float:
    """Return x > 0 with E e^{x(B − T)} < 1: half of where it is 1 again, but at most 10 / T.

    E e^{xB} stays below e^10 then, and rounding 1e-16 of it small beside what is near 0.
    """
    cells = np.flatnonzero(masses > 0)
    logs, chances = np.log(masses[cells]), np.log(batch.probabilities)

    def exponent(x: float) -> float:
        # in T, which may lie between two steps, the chord is above e^{−xT}
        split = math.log1p(period % 1 * math.expm1(-x)) - x * math.floor(period)
        return float(logsumexp(chances + batch.values_s * logsumexp(logs + x * cells))) + split

    high = 20 / period
    if exponent(high) < 0:
        return high / 2
    low = high / 2
    while exponent(low) >= 0:
        low, high = low / 2, low
    return float(brentq(exponent, low, high)) / 2
