"""Laws of times and sizes: of a service, a poll, a batch; given as a number, measured values or a scipy.stats law.

A law is discrete (a constant, measured values) or continuous; both answer the same questions: moments, transform, cdf,
residual life, draws.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.integrate import IntegrationWarning
from scipy.stats import distributions

from llmprofile.errors import UsageError

Floats = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]

MOST_ATOMS = 4096  # of a transform: more values than this are binned for it
MOST_SIZES = 1_000_000  # of a scipy.stats law of whole numbers
CELLS_AT_ONCE = 1 << 20  # of a sum over values for many arguments: 16 MiB
SHOWN_VALUES = 8  # in a repr; of more, only their number and mean


@dataclass(frozen=True, eq=False, repr=False)
class Discrete:
    """A law on finitely many values, or on those that were measured.

    Attributes
    ----------
    values_s : (n,) float
        The different values, ascending, all ≥ 0.
    probabilities : (n,) float
        Their probabilities; they sum to 1.
    given : str
        How the law was given, for the repr.
    """

    values_s: Floats
    probabilities: Floats
    given: str

    def __repr__(self) -> str:
        return self.given

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Discrete):
            return NotImplemented
        same_values = np.array_equal(self.values_s, other.values_s)
        return same_values and np.array_equal(self.probabilities, other.probabilities)

    def __hash__(self) -> int:
        return hash((len(self.values_s), self.mean_s, self.second_s2))

    @cached_property
    def mean_s(self) -> float:
        """E[S]."""
        return float(self.probabilities @ self.values_s)

    @cached_property
    def second_s2(self) -> float:
        """E[S²]."""
        return float(self.probabilities @ self.values_s**2)

    @cached_property
    def third_s3(self) -> float:
        """E[S³]."""
        return float(self.probabilities @ self.values_s**3)

    @cached_property
    def scv(self) -> float:
        """Squared coefficient of variation c², from deviations: exactly 0 for a constant, and for zero."""
        deviation = self.values_s - self.mean_s
        return float(self.probabilities @ deviation**2) / self.mean_s**2 if len(self.values_s) > 1 else 0.0

    @property
    def atoms(self) -> tuple[Floats, Floats] | None:
        """(values, probabilities), each (n,)."""
        return self.values_s, self.probabilities

    def cdf(self, t: npt.ArrayLike) -> Floats:
        """P(S ≤ t), of `t`'s shape."""
        return self._cumulated[np.searchsorted(self.values_s, t, side="right")]

    def residual_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(S* ≤ t) = E[min(S, t)] / E[S] of the residual life S*, of `t`'s shape."""
        t = np.asarray(t, float)
        below = np.searchsorted(self.values_s, t, side="right")
        limited = self._partial_means[below] + t * (1 - self._cumulated[below])
        return np.clip(limited / self.mean_s, 0.0, 1.0)

    def transform(self, s: npt.ArrayLike) -> Complex:
        """E e^{−sS}, of `s`'s shape.

        Exact for up to 4096 different values. More are put into 4096 bins of equal ratio, each standing for its mean:
        the mean stays, and E[S²] loses at most a quarter of the squared width, 1e-5 of itself where the largest value
        is 10¹⁰ times the smallest. Values below 1e-6 of the mean share one bin. The transform changes by at most
        |s|² / 2 times what E[S²] loses.
        """
        values_s, weights = self._binned
        s = np.asarray(s, complex)
        return _mixed_exponentials(values_s, weights, s.ravel()).reshape(s.shape)

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """(n,) independent draws."""
        if len(self.values_s) == 1:
            return np.full(n, self.values_s[0])
        return self.values_s[np.searchsorted(self._cumulated[1:-1], rng.random(n), side="right")]

    @cached_property
    def _cumulated(self) -> Floats:
        cumulated = np.concatenate([[0.0], np.cumsum(self.probabilities)])
        cumulated[-1] = 1.0
        return cumulated

    @cached_property
    def _partial_means(self) -> Floats:
        return np.concatenate([[0.0], np.cumsum(self.probabilities * self.values_s)])

    @cached_property
    def _binned(self) -> tuple[Floats, Floats]:
        if len(self.values_s) <= MOST_ATOMS:
            return self.values_s, self.probabilities
        lowest = max(self.values_s[self.values_s > 0][0], 1e-6 * self.mean_s)
        edges = np.geomspace(lowest, self.values_s[-1], MOST_ATOMS)
        starts = np.unique(np.concatenate([[0], np.searchsorted(self.values_s, edges[:-1])]))
        weights = np.add.reduceat(self.probabilities, starts)
        return np.add.reduceat(self.probabilities * self.values_s, starts) / weights, weights


@dataclass(frozen=True, repr=False)
class Continuous:
    """A scipy.stats law with a density, on [0, ∞).

    Attributes
    ----------
    frozen : scipy.stats frozen law
    given : str
        Name and parameters, for the repr.
    mean_s, second_s2, third_s3 : float
        E[S], E[S²], E[S³], from scipy; infinite where the law has none.
    """

    frozen: Any = field(compare=False)
    given: str
    mean_s: float
    second_s2: float
    third_s3: float

    def __repr__(self) -> str:
        return self.given

    @property
    def scv(self) -> float:
        """Squared coefficient of variation c²; infinite where the law has no variance."""
        return float(self.frozen.var()) / self.mean_s**2 if math.isfinite(self.second_s2) else math.inf

    @property
    def atoms(self) -> tuple[Floats, Floats] | None:
        """None: no value has a probability of its own."""
        return None

    @property
    def is_smooth(self) -> bool:
        """Whether `transform` is a formula and the density smooth above 0: what is made of it inverts well."""
        return self.frozen.dist.name in SMOOTH_ABOVE_ZERO and self.frozen.support()[0] == 0

    def cdf(self, t: npt.ArrayLike) -> Floats:
        """P(S ≤ t), of `t`'s shape."""
        return np.asarray(self.frozen.cdf(t), float)

    def residual_cdf(self, t: npt.ArrayLike) -> Floats:
        """P(S* ≤ t) = ∫₀ᵗ P(S > x) dx / E[S] of the residual life S*, of `t`'s shape; by quadrature."""
        t = np.asarray(t, float)
        knots = np.unique(np.concatenate([[0.0], np.maximum(t.ravel(), 0.0), self._nodes[0]]))
        knots = knots[np.isfinite(knots)]
        points, weights = np.polynomial.legendre.leggauss(4)
        half = np.diff(knots) / 2
        at = knots[:-1] + half * (1 + points[:, None])
        limited = np.concatenate([[0.0], np.cumsum(half * (weights @ self.frozen.sf(at)))])
        return np.clip(np.interp(t, knots, limited) / self.mean_s, 0.0, 1.0)

    def transform(self, s: npt.ArrayLike) -> Complex:
        """E e^{−sS}, of `s`'s shape.

        A formula for expon, gamma, erlang and uniform. Otherwise ∫₀¹ e^{−s Q(u)} du over the quantile function Q by
        Gauss–Legendre on panels that halve towards both ends: good to 1e-10 for |s| up to 100 / E[S].
        """
        s = np.asarray(s, complex)
        if self.frozen.dist.name in CLOSED_TRANSFORMS:
            return CLOSED_TRANSFORMS[self.frozen.dist.name](self.frozen, s)
        return _mixed_exponentials(*self._nodes, s.ravel()).reshape(s.shape)

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """(n,) independent draws."""
        return np.asarray(self.frozen.rvs(n, random_state=rng), float)

    @cached_property
    def _nodes(self) -> tuple[Floats, Floats]:
        points, weights = np.polynomial.legendre.leggauss(16)
        ends = np.concatenate([[0.0], 0.5 ** np.arange(48, 0, -1)])
        edges = np.concatenate([np.linspace(a, b, 8, endpoint=False) for a, b in pairwise(ends)])
        edges = np.append(edges, 0.5)
        half = np.diff(edges) / 2
        tails = (edges[:-1] + half * (1 + points[:, None])).ravel()
        # from both ends: 1 − u is exact where u is close to 1
        values_s = np.concatenate([self.frozen.ppf(tails), self.frozen.isf(tails)])
        known = np.isfinite(values_s)  # some of scipy's laws end at a tail of 1e-16
        return values_s[known], np.tile((half * weights[:, None]).ravel(), 2)[known]


Law = Discrete | Continuous


def law_of(value: Any, name: str = "service") -> Law:
    """The law that a number, an array of measured values or a scipy.stats frozen law stands for.

    Parameters
    ----------
    value : float, (n,) array or scipy.stats frozen law
        A number is a constant; an array stands for its values, all equally likely; a law is returned as it is.
    name : str
        What it is, for the message.

    Raises
    ------
    UsageError
        A value that is negative, NaN or infinite; no values; a law that is not frozen or reaches below 0.

    Examples
    --------
    >>> law = law_of([0.001, 0.001, 0.004])
    >>> law.mean_s, float(law.cdf(0.002)), law.atoms[0].tolist()
    (0.002, 0.667, [0.001, 0.004])
    >>> from scipy.stats import expon
    >>> law_of(expon(scale=0.5)), law_of(expon(scale=0.5)).transform(2.0).real.tolist()
    (expon(scale=0.5), 0.5)
    """
    if isinstance(value, Law):
        return value
    if isinstance(value, distributions.rv_frozen):
        return _frozen_law(value, name)
    if isinstance(value, bool | str | bytes) or not (isinstance(value, Real) or hasattr(value, "__len__")):
        raise UsageError(f"{name} must be a number, an array of numbers or a scipy.stats frozen law; not {value!r}")
    try:
        values = np.asarray(value, float)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number, an array of numbers or a scipy.stats frozen law") from None
    if values.ndim > 1 or values.size == 0:
        raise UsageError(f"{name} must hold at least one number, in one dimension; not shape {values.shape}")
    bad = values[~((values >= 0) & (values < np.inf))]
    if len(bad):
        raise UsageError(f"{name} must be finite and not below 0; not {float(bad[0])}")
    return _measured_law(values)


def _measured_law(values: Floats) -> Discrete:
    different, counts = np.unique(values, return_counts=True)
    if values.ndim == 0:
        given = repr(float(values))
    elif len(values) <= SHOWN_VALUES:
        given = repr(values.tolist())
    else:
        given = f"<{len(values)} values, mean {float(values.mean()):.6g}>"
    return Discrete(different, counts / values.size, given)


def _frozen_law(frozen: Any, name: str) -> Law:
    parameters = [_plain(a) for a in frozen.args] + [f"{key}={_plain(a)}" for key, a in frozen.kwds.items()]
    given = f"{frozen.dist.name}({', '.join(parameters)})"
    moments = [_moment(frozen, order) for order in (1, 2, 3)]
    lowest = frozen.support()[0]
    if np.ndim(moments[0]) or np.isnan(moments[0]) or not lowest >= 0:
        raise UsageError(f"{name} must be one law on [0, ∞) with parameters that it allows; not {given}")
    if isinstance(frozen.dist, distributions.rv_discrete):
        return _whole_numbers(frozen, given, name)
    return Continuous(frozen, given, *(float(m) for m in moments))


def _plain(parameter: Any) -> str:
    return repr(parameter.item() if isinstance(parameter, np.generic) else parameter)


def _moment(frozen: Any, order: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", IntegrationWarning)
        try:
            return frozen.moment(order)
        except IntegrationWarning:  # what scipy says of an integral that diverges, beside a wrong number
            return math.inf


def _whole_numbers(frozen: Any, given: str, name: str) -> Discrete:
    lowest, highest = frozen.support()
    highest = min(highest, frozen.isf(1e-16))
    if not highest - lowest < MOST_SIZES:
        raise UsageError(f"{name} must spread over at most {MOST_SIZES:,} numbers; not {given}")
    values = np.arange(lowest, highest + 1, dtype=float)
    probabilities = np.asarray(frozen.pmf(values), float)
    known = probabilities > 0
    return Discrete(values[known], probabilities[known] / probabilities.sum(), given)


def _mixed_exponentials(values_s: Floats, weights: Floats, s: Complex) -> Complex:
    """Return Σ wᵢ e^{−s vᵢ} for each s, a block of arguments at a time."""
    rows = max(1, CELLS_AT_ONCE // len(values_s))
    sums = [np.exp(-block[:, None] * values_s) @ weights for block in np.split(s, range(rows, len(s), rows))]
    return np.concatenate(sums) if sums else s


def _gamma_transform(frozen: Any, s: Complex) -> Complex:
    loc, var = frozen.support()[0], frozen.var()
    above = frozen.mean() - loc
    return np.exp(-s * loc) * (1 + s * (var / above)) ** (-(above**2) / var)


def _expon_transform(frozen: Any, s: Complex) -> Complex:
    return np.exp(-s * frozen.support()[0]) / (1 + s * frozen.std())


def _uniform_transform(frozen: Any, s: Complex) -> Complex:
    low, high = frozen.support()
    x = s * (high - low)
    safe = np.where(x == 0, 1.0, x)
    return np.exp(-s * low) * np.where(x == 0, 1.0, -np.expm1(-safe) / safe)


CLOSED_TRANSFORMS = {
    "expon": _expon_transform,
    "gamma": _gamma_transform,
    "erlang": _gamma_transform,
    "uniform": _uniform_transform,
}
SMOOTH_ABOVE_ZERO = ("expon", "gamma", "erlang")
