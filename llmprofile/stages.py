"""Arrivals whose rate changes over time: ramps, and laws that follow one another. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError, not_negative, positive

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST_REQUESTS = 20_000_000
"""A schedule is held in memory: what is beyond is a slip of the pen."""


class OpenLaw(Protocol):
    """An arrival law: due times that do not depend on the answers."""

    @property
    def rate_per_s(self) -> float: ...

    def due_s(self, n: int, rng: np.random.Generator) -> Floats: ...


def due_within(law: OpenLaw, duration_s: float, rng: np.random.Generator) -> Floats:
    """All due times of a law before `duration_s`, (n,) seconds; a prefix of any longer draw from this state.

    Raises
    ------
    UsageError
        They are more than a schedule holds.
    """
    # the same draw, twice as long, until it passes the end: a prefix of it does not depend on its length
    n, state = int(min(law.rate_per_s * duration_s * 1.1, MOST_REQUESTS)) + 64, rng.bit_generator.state
    while n <= MOST_REQUESTS:
        rng.bit_generator.state = state
        due_s = law.due_s(n, rng)
        if len(due_s) < n or due_s[-1] >= duration_s:  # a law that has an end may have come to it
            return due_s[due_s < duration_s]
        n *= 2
    raise UsageError(f"more than {MOST_REQUESTS:,} requests may fall due within {duration_s} s; ask for fewer")


@dataclass(frozen=True)
class Ramp:
    """Poisson arrivals whose rate goes from `from_per_s` to `to_per_s` in a straight line, over `duration_s`.

    One of the two rates may be 0. With t the time, T the duration, and Λ(t) = a t + (b − a) t² / 2T the requests to be
    expected until then, due times are Λ⁻¹ of a Poisson stream of rate 1: exact, nothing is thrown away. Source: Çinlar,
    Introduction to Stochastic Processes (1975), 4.7.

    Raises
    ------
    UsageError
        A rate below 0, both 0, or a duration that is not above 0.

    Examples
    --------
    >>> ramp = Ramp(from_per_s=0, to_per_s=200, duration_s=100.0)
    >>> due_s = ramp.due_s(20_000, np.random.default_rng(0))
    >>> round(len(due_s) / 1000), round(20 * float(np.mean(due_s < 50)))  # half the time, a quarter of the requests
    (10, 5)
    """

    from_per_s: float
    to_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        for name in ("from_per_s", "to_per_s"):
            not_negative(name, getattr(self, name), " (requests/s)")
        positive("duration_s", self.duration_s, " (seconds)")
        if self.from_per_s == self.to_per_s == 0:
            raise UsageError("a ramp from 0 to 0 requests/s asks for nothing; one of its rates must be above 0")

    @property
    def rate_per_s(self) -> float:
        """The mean rate."""
        return self.from_per_s / 2 + self.to_per_s / 2

    def due_s(self, n: int, rng: np.random.Generator) -> Floats:
        """The first `n` due times, or all that fall due within the ramp where these are fewer; seconds."""
        expected = np.cumsum(rng.exponential(1.0, n))
        expected = expected[expected < self.rate_per_s * self.duration_s]
        slope = (self.to_per_s - self.from_per_s) / self.duration_s
        root = np.sqrt(np.maximum(self.from_per_s**2 + 2 * slope * expected, 0.0))
        # of the two ways to write a quadratic's solution, the one that subtracts nothing
        return np.minimum(2 * expected / (self.from_per_s + root), math.nextafter(self.duration_s, 0.0))


@dataclass(frozen=True)
class Stages:
    """Laws that follow one another, each for its duration; the column `stage` of the requests counts them from 0.

    Each law begins anew when its stage does, with random numbers of its own.

    Parameters
    ----------
    stages : sequence of (law, duration_s)
        Laws are Constant, Poisson, Gamma or Ramp; a ramp's stage lasts as long as the ramp.

    Raises
    ------
    UsageError
        No stages, something else than a law, a duration that is not above 0 or not the ramp's.

    Examples
    --------
    >>> stages = Stages([(lp.Poisson(10), 30.0), (lp.Poisson(50), 60.0)])
    >>> stages.duration_s, stages.stage_of(np.array([0.0, 29.9, 30.0])).tolist()
    (90.0, [0, 0, 1])
    """

    stages: tuple[tuple[OpenLaw, float], ...]

    def __init__(self, stages: Iterable[tuple[OpenLaw, float]]) -> None:
        if not isinstance(stages, Iterable):
            raise UsageError(f"Stages needs a sequence of (law, duration_s); not {stages!r}")
        object.__setattr__(self, "stages", tuple(_stage(k, stage) for k, stage in enumerate(stages)))
        if not self.stages:
            raise UsageError("Stages needs at least one (law, duration_s)")

    @property
    def duration_s(self) -> float:
        """All durations together."""
        return float(self._ends_s[-1])

    @property
    def rate_per_s(self) -> float:
        """The mean rate over the whole time."""
        return sum(law.rate_per_s * (duration_s / self.duration_s) for law, duration_s in self.stages)

    @property
    def _ends_s(self) -> Floats:
        return np.cumsum([duration_s for _, duration_s in self.stages])

    def due_s(self, n: int, rng: np.random.Generator) -> Floats:
        """The first `n` due times, or all that fall due within the stages where these are fewer; seconds."""
        seeds, ends_s = rng.integers(0, 1 << 63, len(self.stages)), self._ends_s
        due_s: list[Floats] = []
        for (law, duration_s), seed, end_s in zip(self.stages, seeds, ends_s, strict=True):
            own_s = due_within(law, duration_s, np.random.default_rng(seed)) + (end_s - duration_s if due_s else 0.0)
            due_s.append(np.clip(own_s, *self._bounds_s(len(due_s))))
        return np.concatenate(due_s)[:n]

    def _bounds_s(self, k: int) -> tuple[float, float]:
        """The first and the last moment of a stage; a sum of floats may miss them by a rounding error."""
        ends_s = self._ends_s
        return (float(ends_s[k - 1]) if k else 0.0), math.nextafter(float(ends_s[k]), 0.0)

    def stage_of(self, due_s: Floats) -> Ints:
        """The stage in which each of (n,) due times falls, from 0."""
        return np.searchsorted(self._ends_s[:-1], due_s, side="right").astype(np.int64)


def _stage(k: int, stage: Any) -> tuple[OpenLaw, float]:
    try:
        law, duration_s = stage
    except (TypeError, ValueError):
        raise UsageError(f"stage {k} must be a pair (law, duration_s); not {stage!r}") from None
    if isinstance(law, Stages) or not callable(getattr(law, "due_s", None)):
        raise UsageError(f"the law of stage {k} must be one of Constant, Poisson, Gamma, Ramp; not {law!r}")
    positive(f"the duration of stage {k}", duration_s, " (seconds)")
    if isinstance(law, Ramp) and duration_s != law.duration_s:
        raise UsageError(f"stage {k} is a ramp of {law.duration_s} s, and must last as long; not {duration_s} s")
    return law, float(duration_s)
