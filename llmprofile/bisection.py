"""A bisection for the highest rate that is met, whose steps are decided with confidence. Pure: it asks a function.

At each rate runs are repeated until a one-sided interval decides, or a number of runs is reached. The error allowed is
shared out over all looks at all steps (Bonferroni), so that the answer's confidence is that of the whole search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MEETS, FAILS, OPEN, UNMEASURED, INTERRUPTED = "meets", "fails", "undecided", "not measured", "interrupted"


@dataclass(frozen=True, eq=False)
class Sample:
    """What one run at a rate says of the server.

    Attributes
    ----------
    met, total : (b,) int
        Requests that met the limits, and all, in each of its blocks of time.
    growths : (b − 1,) float
        By how much TTFT (from due) grew from each block to the next, seconds per second; empty where nobody knows.
    delivered : bool
        Whether the client kept the rate; otherwise the run says nothing of the server.
    complete : bool
        False of a run that was interrupted: it ends the search.
    """

    met: Ints
    total: Ints
    growths: Floats = field(default_factory=lambda: np.zeros(0))
    delivered: bool = True
    complete: bool = True


@dataclass(frozen=True)
class Rule:
    """When a rate is met: a share of requests is reached, and TTFT grows by no more than so much (None: any).

    Examples
    --------
    >>> Rule(share=0.95).checks
    1
    """

    share: float
    growth: float | None = None

    @property
    def checks(self) -> int:
        """How many intervals a decision looks at."""
        return 1 if self.growth is None else 2


@dataclass(frozen=True)
class Step:
    """A rate that was tried: how many runs, what they said, with intervals, and what was decided."""

    rate_per_s: float
    runs: int
    share: float
    share_lo: float
    share_hi: float
    growth: float
    growth_lo: float
    growth_hi: float
    decision: str


def clustered_interval(met: Ints, total: Ints, level: float) -> tuple[float, float]:
    """Lower and upper bound of a share, each at `level`, from counts in blocks within which requests are correlated.

    Clopper and Pearson's bounds for the number of independent requests that the blocks are worth: n over the design
    effect, which is the variance of the share between blocks (as a ratio estimate) over p (1 − p) / n, times the
    squared ratio of Student's quantiles, since that variance is known from few blocks only. Source: Korn and Graubard,
    Survey Methodology 24 (1998) 193. Here no request is worth more than one.

    Near saturation blocks of a run are not quite independent: of the times in an M/D/1 queue at ρ = 0.8, from ten
    blocks of 240 requests, lower bounds at 95 % miss in 9 %, at 99.8 % in 1 %; upper ones in 3 to 5 % and 0.

    Parameters
    ----------
    met, total : (b,) int
    level : float

    Returns
    -------
    low, high
        0 and 1 where there are fewer than two blocks.

    Examples
    --------
    >>> low, high = clustered_interval(np.full(50, 10), np.full(50, 10), 0.95)
    >>> round(low, 3), high
    (0.994, 1.0)
    """
    blocks, n = len(total), int(total.sum())
    if blocks < 2 or not n:
        return 0.0, 1.0
    p = float(met.sum()) / n
    variance = blocks / (blocks - 1) * float(((met - p * total) ** 2).sum()) / n**2
    effect = max(1.0, variance * n / (p * (1 - p))) if 0 < p < 1 else 1.0
    few = (stats.t.ppf(level, n - 1) / stats.t.ppf(level, blocks - 1)) ** 2
    worth = n / effect * min(1.0, float(few))
    hits = p * worth
    low = float(stats.beta.ppf(1 - level, hits, worth - hits + 1)) if hits > 0 else 0.0
    high = float(stats.beta.ppf(level, hits + 1, worth - hits)) if hits < worth else 1.0
    return low, high


def block_growths(at_s: Floats, values_s: Floats, blocks: int) -> Floats:
    """By how much values grew from the mean of each block of time to that of the next, per second.

    Parameters
    ----------
    at_s, values_s : (n,) float
    blocks : int
        Of equal length; one without values is passed over.

    Returns
    -------
    (m,) float

    Examples
    --------
    >>> block_growths(np.arange(40.0), 0.5 * np.arange(40.0), 4).tolist()
    [0.5, 0.5, 0.5]
    """
    if not len(at_s) or not np.ptp(at_s) > 0:
        return np.zeros(0)
    block = np.minimum(((at_s - at_s.min()) / np.ptp(at_s) * blocks).astype(int), blocks - 1)
    counts = np.bincount(block, minlength=blocks)
    means_s, times_s = (np.bincount(block, of, blocks)[counts > 0] / counts[counts > 0] for of in (values_s, at_s))
    growths: Floats = np.diff(means_s) / np.diff(times_s)
    return growths


def growth_interval(growths: Floats, level: float) -> tuple[float, float]:
    """Lower and upper bound of the mean growth, each at `level`, by Student's law.

    When a server can't keep up TTFT is a random walk with a drift. Differences of its successive averages correlate by
    1/4, which makes the variance of their mean up to 1 + 2/4 times what independent ones would have. Source: Working,
    Econometrica 28 (1960) 916. When it does keep up they cancel one another, and the bounds are wider than they need
    be.

    Examples
    --------
    >>> low, high = growth_interval(np.array([0.1, 0.2, 0.3]), 0.95)
    >>> round(low, 3), round(high, 3)
    (-0.006, 0.406)
    """
    if len(growths) < 2:
        return -math.inf, math.inf
    error = math.sqrt(1.5 / len(growths)) * float(growths.std(ddof=1))
    half = float(stats.t.ppf(level, len(growths) - 1)) * error
    return float(growths.mean()) - half, float(growths.mean()) + half


def judge(rate_per_s: float, samples: list[Sample], rule: Rule, level: float) -> Step:
    """What runs at one rate say together: it meets when every check does, and fails when one fails.

    Examples
    --------
    >>> sample = Sample(np.full(50, 10), np.full(50, 10))
    >>> judge(80.0, [sample], Rule(share=0.95), 0.95).decision
    'meets'
    """
    met, total = (np.concatenate([getattr(s, name) for s in samples]) for name in ("met", "total"))
    growths = np.concatenate([s.growths for s in samples])
    share, growth = clustered_interval(met, total, level), growth_interval(growths, level)
    passes, fails = [share[0] >= rule.share], [share[1] < rule.share]
    if rule.growth is not None:
        passes.append(growth[1] <= rule.growth)
        fails.append(growth[0] > rule.growth)
    decision = FAILS if any(fails) else MEETS if all(passes) else OPEN
    if not all(s.delivered for s in samples):
        decision = UNMEASURED
    if not all(s.complete for s in samples):
        decision = INTERRUPTED
    mean_share = float(met.sum() / total.sum()) if total.sum() else math.nan
    mean_growth = float(growths.mean()) if len(growths) else math.nan
    return Step(rate_per_s, len(samples), mean_share, *share, mean_growth, *growth, decision)


def search(
    measure: Callable[[float], Sample],
    low_per_s: float,
    high_per_s: float,
    rule: Rule,
    confidence: float,
    within: float,
    most_runs: int,
) -> list[Step]:
    """The steps of a bisection on a logarithmic scale: the ends first, then the middle of what is left.

    First for the highest rate that is met, where one that is not decided counts as too high; then, if such rates are
    left below the lowest that failed, for the lowest that fails, where they count as too low.

    Parameters
    ----------
    measure : callable
        One run at a rate.
    low_per_s, high_per_s : float
    rule : Rule
    confidence, within : float
        Of the whole search; how far the ends may stay apart, as a share of the lower.
    most_runs : int
        At each rate.

    Examples
    --------
    >>> def play(rate_per_s):
    ...     return Sample(np.full(50, 10 * (rate_per_s < 75)), np.full(50, 10))
    >>> [round(step.rate_per_s) for step in search(play, 20, 320, Rule(0.95), 0.95, 0.5, 3)]
    [20, 320, 80, 40, 57]
    """
    steps: list[Step] = []
    level = look_level(low_per_s, high_per_s, rule, confidence, within, most_runs)

    def decide(rate_per_s: float) -> str:
        samples: list[Sample] = []
        while True:
            samples.append(measure(rate_per_s))
            step = judge(rate_per_s, samples, rule, level)
            if step.decision != OPEN or len(samples) == most_runs:
                break
        steps.append(step)
        return step.decision

    def halve(below_per_s: float, above_per_s: float, below: tuple[str, ...]) -> None:
        while above_per_s > below_per_s * (1 + within) and steps[-1].decision != INTERRUPTED:
            middle = math.sqrt(below_per_s * above_per_s)
            if decide(middle) in below:
                below_per_s = middle
            else:
                above_per_s = middle

    if decide(low_per_s) == MEETS and decide(high_per_s) not in (MEETS, INTERRUPTED):
        halve(low_per_s, high_per_s, (MEETS,))
        failed_per_s = min((step.rate_per_s for step in steps if step.decision == FAILS), default=0.0)
        below = [step for step in steps if step.rate_per_s < failed_per_s and step.decision in (OPEN, UNMEASURED)]
        if below:
            halve(max(step.rate_per_s for step in below), failed_per_s, (MEETS, OPEN, UNMEASURED))
    return steps


def most_steps(low_per_s: float, high_per_s: float, within: float) -> int:
    """How many rates a search tries at most: both ends, and twice the halvings in between, of which the first is one.

    Examples
    --------
    >>> most_steps(20, 320, 0.5)
    7
    """
    halvings = max(0, math.ceil(math.log2(math.log(high_per_s / low_per_s) / math.log1p(within)) - 1e-9))
    return 2 + halvings + max(0, halvings - 1)


def look_level(
    low_per_s: float, high_per_s: float, rule: Rule, confidence: float, within: float, most_runs: int
) -> float:
    """The level of each one-sided bound, such that with `confidence` none of all that are looked at misses.

    At one rate a single side can be missed: one bound each look and check, Bonferroni.

    Examples
    --------
    >>> look_level(20, 320, Rule(0.95), 0.93, 0.5, most_runs=2)
    0.995
    """
    looks = most_steps(low_per_s, high_per_s, within) * most_runs * rule.checks
    return 1 - (1 - confidence) / looks
