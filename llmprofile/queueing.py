"""Closed-form queues: what waits are at a rate, a service and a number of servers, and what splitting them does.

First come, first served. `wait_*` is what an arbitrary job waits before its service begins. A queue that is asked for
more than it can do (ρ ≥ 1) has infinite means, a cdf of 0 and infinite quantiles, so that a curve over rates can pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError, not_negative, whole
from llmprofile.inversion import compound_cdf, invert, quantile
from llmprofile.laws import Complex, Continuous, Discrete, Floats, Law, law_of

MOST_COSMETATOS = 0.24  # Whitt's bound of the correction, which light traffic would let grow


@dataclass(frozen=True)
class Moments:
    """A service of which no more is known than its mean and squared coefficient of variation."""

    mean_s: float
    scv: float

    @property
    def second_s2(self) -> float:
        """E[S²]."""
        return self.mean_s * self.mean_s * (1 + self.scv)


@dataclass(frozen=True)
class Queue:
    """What follows from a rate, a service and a mean wait in each of the queues below."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _settle(self, rate_per_s=not_negative("rate_per_s", self.rate_per_s))

    @property
    def _served(self) -> Law | Moments:
        raise NotImplementedError

    @property
    def utilisation(self) -> float:
        """ρ, the share of its time that a server is busy; from 1 on it can't keep up."""
        return self.rate_per_s * self._served.mean_s if self.rate_per_s else 0.0

    @property
    def mean_wait_s(self) -> float:
        """E[W] = λ E[S²] / 2(1 − ρ) (Pollaczek–Khinchine)."""
        if self.rate_per_s == 0:
            return 0.0
        rho = self.utilisation
        return self.rate_per_s * self._served.second_s2 / (2 * (1 - rho)) if rho < 1 else math.inf

    @property
    def mean_time_s(self) -> float:
        """Mean of wait and service together."""
        return self.mean_wait_s + self._served.mean_s

    @property
    def mean_queue(self) -> float:
        """Jobs waiting, on average: rate × mean wait (Little)."""
        return self.rate_per_s * self.mean_wait_s if self.rate_per_s else 0.0

    def split(self, k: int) -> Self:
        """One of `k` separate queues of this kind, among which the jobs are dealt at random.

        Raises
        ------
        UsageError
            A `k` that is not a whole number of at least 1.
        """
        return replace(self, rate_per_s=self.rate_per_s / whole("k", k))


@dataclass(frozen=True)
class MM1(Queue):
    """Poisson arrivals, exponential services, one server.

    Parameters
    ----------
    rate_per_s : float
        λ, ≥ 0.
    mean_service_s : float
        E[S], ≥ 0.

    Raises
    ------
    UsageError
        A number that is negative, NaN or infinite.

    Examples
    --------
    >>> queue = MM1(rate_per_s=800, mean_service_s=0.001)
    >>> queue.mean_wait_s, float(queue.wait_quantile(0.99)), queue.split(2).mean_wait_s
    (0.004, 0.0219, 0.000667)
    """

    mean_service_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _settle(self, mean_service_s=not_negative("mean_service_s", self.mean_service_s))

    @property
    def _served(self) -> Moments:
        return Moments(self.mean_service_s, 1.0)

    @property
    def var_wait_s(self) -> float:
        """Var[W] = ρ (2 − ρ) (E[S] / (1 − ρ))², in s²."""
        rho = self.utilisation
        return rho * (2 - rho) * (self.mean_service_s / (1 - rho)) ** 2 if rho < 1 else math.inf

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(W ≤ t) = 1 − ρ e^{−(1 − ρ) t / E[S]}, of `t`'s shape."""
        t, rho = np.asarray(t, float), self.utilisation
        if not 0 < rho < 1:
            return _without_queue(t, rho)
        tail = rho * np.exp(-(1 - rho) / self.mean_service_s * np.maximum(t, 0.0))
        return np.where(t < 0, 0.0, 1 - tail)

    def wait_quantile(self, q: npt.ArrayLike) -> Floats:
        """The wait that a share `q` of the jobs don't exceed, of `q`'s shape; 0 up to q = 1 − ρ."""
        q, rho = _shares(q), self.utilisation
        if not 0 < rho < 1:
            return np.full(q.shape, math.inf if rho >= 1 else 0.0)
        with np.errstate(divide="ignore"):  # q = 1: infinite
            return np.maximum(np.log(rho / (1 - q)), 0.0) * (self.mean_service_s / (1 - rho))


@dataclass(frozen=True)
class MG1(Queue):
    """Poisson arrivals, independent services of any law, one server: the paper's model of a client.

    Parameters
    ----------
    rate_per_s : float
        λ, ≥ 0.
    service : float, (n,) array of measured seconds, or scipy.stats frozen law on [0, ∞)
        A number is a constant service.

    Raises
    ------
    UsageError
        A rate or service that is negative, NaN or infinite.

    Notes
    -----
    Mean and variance are Pollaczek–Khinchine's. The distribution is that of a geometric number of residual services
    (Beneš): by inversion of its transform, to 1e-7, for exponential and gamma services; convolved on a lattice, to
    1e-5, for any other.

    Examples
    --------
    >>> queue = MG1(rate_per_s=500, service=[0.0005, 0.0005, 0.002])
    >>> queue.utilisation, round(queue.mean_wait_s, 6), queue.wait_cdf([0.0, 0.001]).round(3).tolist()
    (0.5, 0.00075, [0.5, 0.717])
    """

    service: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.service, Moments):
            _settle(self, service=law_of(self.service))

    def __repr__(self) -> str:
        if isinstance(self.service, Moments):
            known = f"mean_s={self.service.mean_s!r}, scv={self.service.scv!r}"
            return f"MG1.from_moments(rate_per_s={self.rate_per_s!r}, {known})"
        return f"MG1(rate_per_s={self.rate_per_s!r}, service={self.service!r})"

    @classmethod
    def from_moments(cls, rate_per_s: float, mean_s: float, scv: float) -> MG1:
        """The queue of which mean and squared coefficient of variation of the service are known: its mean wait.

        Raises
        ------
        UsageError
            A number that is negative, NaN or infinite. Later: when more than a mean is asked of it.

        Examples
        --------
        >>> MG1.from_moments(rate_per_s=500, mean_s=0.001, scv=1).mean_wait_s
        0.001
        """
        return cls(rate_per_s, Moments(not_negative("mean_s", mean_s), not_negative("scv", scv)))

    @property
    def _served(self) -> Law | Moments:
        return self.service

    @property
    def var_wait_s(self) -> float:
        """Var[W] = E[W]² + λ E[S³] / 3(1 − ρ), in s² (Takács)."""
        law, rho = self._law("variance", "third moment"), self.utilisation
        if self.rate_per_s == 0:
            return 0.0
        mean_s = self.mean_wait_s
        return mean_s * mean_s + self.rate_per_s * law.third_s3 / (3 * (1 - rho)) if rho < 1 else math.inf

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(W ≤ t), of `t`'s shape: an atom of 1 − ρ at 0, and what is smooth above it."""
        law, rho, t = self._law("distribution", "law"), self.utilisation, np.asarray(t, float)
        if not 0 < rho < 1:
            return _without_queue(t, rho)
        if isinstance(law, Continuous) and law.is_smooth:

            def transform(s: Complex) -> Complex:
                residual = (1 - law.transform(s)) / (s * law.mean_s)
                return (1 - rho) / (1 - rho * residual)

            return invert(transform, t, atom=1 - rho)
        unit_s = float(law.values_s[law.values_s > 0][0]) if isinstance(law, Discrete) else 0.0
        return compound_cdf(law.residual_cdf, rho, t, unit_s)

    def wait_quantile(self, q: npt.ArrayLike) -> Floats:
        """The wait that a share `q` of the jobs don't exceed, of `q`'s shape; 0 up to q = 1 − ρ.

        Raises
        ------
        UsageError
            A `q` outside [0, 1], or between 1 − 1e-8 and 1, where a computed tail says nothing.
        """
        law, rho, q = self._law("distribution", "law"), self.utilisation, _shares(q)
        if not 0 < rho < 1:
            return np.full(q.shape, math.inf if rho >= 1 else 0.0)
        return quantile(self.wait_cdf, q, law.mean_s)

    def _law(self, asked: str, needed: str) -> Law:
        if isinstance(self.service, Moments):
            raise UsageError(
                f"the {asked} of the wait needs the service's {needed}, which two moments don't tell: "
                "give MG1 measured times or a scipy.stats law"
            )
        return self.service


@dataclass(frozen=True)
class MD1(Queue):
    """Poisson arrivals, constant services, one server.

    Parameters
    ----------
    rate_per_s : float
        λ, ≥ 0.
    mean_service_s : float
        What each service takes, ≥ 0.

    Raises
    ------
    UsageError
        A number that is negative, NaN or infinite.

    Examples
    --------
    >>> MD1(rate_per_s=800, mean_service_s=0.001).mean_wait_s  # half of MM1's
    0.002
    """

    mean_service_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _settle(self, mean_service_s=not_negative("mean_service_s", self.mean_service_s))

    @property
    def _served(self) -> Moments:
        return Moments(self.mean_service_s, 0.0)

    @property
    def var_wait_s(self) -> float:
        """Var[W] = E[W]² + λ E[S]³ / 3(1 − ρ), in s²."""
        return self._general.var_wait_s

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(W ≤ t), of `t`'s shape; on a lattice, to 1e-5."""
        return self._general.wait_cdf(t)

    def wait_quantile(self, q: npt.ArrayLike) -> Floats:
        """The wait that a share `q` of the jobs don't exceed, of `q`'s shape; 0 up to q = 1 − ρ."""
        return self._general.wait_quantile(q)

    @property
    def _general(self) -> MG1:
        return MG1(self.rate_per_s, self.mean_service_s)


@dataclass(frozen=True)
class MeanOnly(Queue):
    """An approximation of a mean wait, which says so when it is asked for more."""

    service: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        _settle(self, service=law_of(self.service))

    @property
    def _served(self) -> Law:
        return self.service

    @property
    def var_wait_s(self) -> float:
        """Not offered: raises UsageError."""
        raise self._refusal("variance")

    def wait_cdf(self, t: npt.ArrayLike) -> Floats:
        """Not offered: raises UsageError."""
        raise self._refusal("distribution")

    def wait_quantile(self, q: npt.ArrayLike) -> Floats:
        """Not offered: raises UsageError."""
        raise self._refusal("quantiles")

    def _refusal(self, asked: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__} approximates the mean wait from two moments and knows no {asked} of it: "
            "simulate the queue, or take MG1 where arrivals are Poisson and the server is one"
        )


@dataclass(frozen=True)
class GG1(MeanOnly):
    """Independent gaps and services of any law, one server: an approximation of the mean wait, and a bound.

    Parameters
    ----------
    rate_per_s : float
        λ, ≥ 0.
    service : float, (n,) array of measured seconds, or scipy.stats frozen law on [0, ∞)
    arrival_scv : float
        Squared coefficient of variation of the gaps: 0 evenly spaced, 1 Poisson, more is burstier.

    Raises
    ------
    UsageError
        A number that is negative, NaN or infinite; when more than a mean is asked of it.

    Notes
    -----
    Kraemer and Langenbach-Belz, "Approximate formulae for the delay in the queueing system GI/G/1", Proc. 8th
    International Teletraffic Congress (1976). Exact for Poisson arrivals. Simulated for ρ from 0.3 to 0.9 and gamma
    services of c² 0.5 to 2, where the mean wait is above a tenth of the service: within 17 %, from ρ = 0.7 within
    10 %, for gaps that are gamma with c_a² ≤ 1 or hyperexponential with c_a² ≤ 4. Two moments don't tell more: gamma
    gaps with c_a² = 4 wait up to 2.5 times as long as it says at ρ = 0.3, 1.4 times at 0.7.

    Examples
    --------
    >>> queue = GG1(rate_per_s=800, service=0.001, arrival_scv=4)
    >>> round(queue.mean_wait_s, 5), round(queue.mean_wait_bound_s, 5), queue.split(3).arrival_scv
    (0.00689, 0.0125, 2.0)
    """

    arrival_scv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _settle(self, arrival_scv=not_negative("arrival_scv", self.arrival_scv))

    @property
    def mean_wait_s(self) -> float:
        """Kraemer and Langenbach-Belz: ρ E[S] (c_a² + c_s²) g / 2(1 − ρ)."""
        rho, ca2, cs2 = self.utilisation, self.arrival_scv, self._served.scv
        if rho == 0 or (rho < 1 and ca2 + cs2 == 0):
            return 0.0
        if rho >= 1 or math.isinf(cs2):
            return math.inf
        if ca2 < 1:
            exponent = 2 * (1 - rho) * (1 - ca2) ** 2 / (3 * rho * (ca2 + cs2))
        else:
            exponent = (1 - rho) * (ca2 - 1) / (ca2 + 4 * cs2)
        return rho * self._served.mean_s * (ca2 + cs2) * math.exp(-exponent) / (2 * (1 - rho))

    @property
    def mean_wait_bound_s(self) -> float:
        """Kingman's upper bound: λ (Var gaps + Var S) / 2(1 − ρ)."""
        rho = self.utilisation
        if self.rate_per_s == 0 or rho >= 1:
            return math.inf if rho >= 1 else 0.0
        gaps_s2 = self.arrival_scv / self.rate_per_s / self.rate_per_s
        services_s2 = self._served.second_s2 - self._served.mean_s * self._served.mean_s
        return self.rate_per_s * (gaps_s2 + services_s2) / (2 * (1 - rho))

    def split(self, k: int) -> Self:
        """One of `k` separate queues among which the jobs are dealt at random; gaps come nearer to Poisson's.

        A geometric number of gaps makes one of the thinned stream: c² becomes 1 + (c² − 1) / k.

        Raises
        ------
        UsageError
            A `k` that is not a whole number of at least 1.
        """
        thinned_scv = 1 + (self.arrival_scv - 1) / whole("k", k)
        return replace(self, rate_per_s=self.rate_per_s / k, arrival_scv=thinned_scv)


@dataclass(frozen=True)
class MGk(MeanOnly):
    """Poisson arrivals, one queue, `k` servers: an approximation of the mean wait.

    Parameters
    ----------
    rate_per_s : float
        λ, ≥ 0, of the whole queue.
    service : float, (n,) array of measured seconds, or scipy.stats frozen law on [0, ∞)
    k : int
        Servers.

    Raises
    ------
    UsageError
        A number that is negative, NaN or infinite; a `k` below 1; when more than a mean is asked of it.

    Notes
    -----
    Between M/D/k and M/M/k on a line in c², the first by Cosmetatos, "Some approximate equilibrium results for the
    multi-server queue (M/G/r)", Operational Research Quarterly 27 (1976), its correction bounded as in Whitt,
    "Approximations for the GI/G/m queue", Production and Operations Management 2 (1993). Exact for one server and for
    exponential services (Erlang's C). For ρ from 0.3 to 0.9 and 2 or 8 servers, where the wait is above a hundredth
    of the service, simulation was within 5 % for c² ≤ 1 and within 15 % for c² ≤ 2; two moments don't tell more, and
    at c² = 4 it was up to a third too high (hyperexponential services, 8 servers).

    `split(k)` gives one of so many queues that have `k` servers each. What separate servers would do is `MG1.split`.

    Examples
    --------
    >>> one_queue, apart = MGk(rate_per_s=1600, service=0.001, k=2), MG1(rate_per_s=1600, service=0.001).split(2)
    >>> round(one_queue.mean_wait_s, 6), round(apart.mean_wait_s, 6)
    (0.0009, 0.002)
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _settle(self, k=whole("k", self.k))

    @property
    def utilisation(self) -> float:
        """ρ = λ E[S] / k, the share of its time that a server is busy; from 1 on they can't keep up."""
        return super().utilisation / self.k

    @property
    def mean_wait_s(self) -> float:
        """E[W] = ((1 + γ) / 2 + c² (1 − γ) / 2) E[W of M/M/k], with Cosmetatos' correction γ."""
        rho, k = self.utilisation, self.k
        if not 0 < rho < 1 or not math.isfinite(self._served.scv):
            return math.inf if rho > 0 else 0.0
        correction = (1 - rho) * (k - 1) * (math.sqrt(4 + 5 * k) - 2) / (16 * k * rho)
        correction = min(MOST_COSMETATOS, correction)
        factor = (1 + correction + self._served.scv * (1 - correction)) / 2
        return factor * _wait_mmk(rho, self._served.mean_s, k)


def _settle(queue: Queue, **fields: Any) -> None:
    """Set fields of a frozen queue while it is being made."""
    for name, value in fields.items():
        object.__setattr__(queue, name, value)


def _without_queue(t: Floats, rho: float) -> Floats:
    """Return the cdf of a wait that is always 0 (ρ = 0) or without end (ρ ≥ 1)."""
    return np.where(np.isnan(t), np.nan, np.where((t >= 0) & (rho < 1), 1.0, 0.0))


def _shares(q: npt.ArrayLike) -> Floats:
    q = np.asarray(q, float)
    if not ((q >= 0) & (q <= 1)).all():
        raise UsageError(f"q must be between 0 and 1; not {q[~((q >= 0) & (q <= 1))][0]}")
    return q


def _wait_mmk(rho: float, mean_s: float, k: int) -> float:
    """Return the mean wait in M/M/k: Erlang's C by the recursion for B, which neither overflows nor cancels."""
    load, blocked = rho * k, 1.0
    for servers in range(1, k + 1):
        blocked = load * blocked / (servers + load * blocked)
    delayed = blocked / (1 - rho * (1 - blocked))
    return delayed * mean_s / (k * (1 - rho))
