"""Whether a run was stationary, and which part of it: warm-up by MSER-5, drift by a test that correlation doesn't fool.

Requests that share a queue are correlated, so that a plain regression on time finds drift in every queue. The test here
compares what a series holds at its slowest cosines with what it holds at the next slow ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from llmprofile.latency import LABELS, column_of
from llmprofile.markup import card
from llmprofile.metrics import run_clock
from llmprofile.records import Run
from llmprofile.units import show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLOWEST, COSINES = 2, 16
LEVEL, LEVEL_OF_A_PART = 0.01, 0.05
"""Of the test for drift. A part of a run that drifted counts as stationary less easily, as it is shorter."""
NEGLIGIBLE_SHARE = 0.05
"""A drift of less than this share of the mean is none."""
LEAST = 100
DURATIONS = 10
"""A run of fewer mean request durations is too short to be called stationary."""
BATCH = 5

Series = dict[str, tuple[Floats, Floats]]
"""Name to (seconds since the first send, values)."""


@dataclass(frozen=True)
class Trend:
    """What a series does over a window.

    Attributes
    ----------
    series : str
        A latency, or "in_flight": how many requests each one found in flight when it was sent.
    means : tuple of float
        Of the window's four quarters; seconds, or requests.
    p : float
        Of no drift.
    drifts : bool
        Of fewer than 25 values nothing is known: then the means and p are NaN.
    """

    series: str
    means: tuple[float, ...]
    p: float
    drifts: bool

    @property
    def change(self) -> float:
        """How far the quarters' means are apart."""
        return max(self.means) - min(self.means)

    def __str__(self) -> str:
        name, first, last = _name(self.series), self.means[0], self.means[-1]
        if {first, last} == {min(self.means), max(self.means)}:
            return f"{name} went from {_show(self, first)} to {_show(self, last)}"
        return f"{name} moved between {_show(self, min(self.means))} and {_show(self, max(self.means))}"


@dataclass(frozen=True, eq=False)
class Steadiness:
    """Whether a run was stationary from its warm-up to its last send; it shows itself.

    Attributes
    ----------
    steady : bool or None
        None: too few requests, or too short a run, to tell.
    window_s : (float, float) or None
        The part that was, in seconds since the first send; None where no part was, or nothing is known.
    window_ns : (int, int) or None
        The same as stamps, to select rows by their `sent_ns`.
    warm_up_s : float
        What MSER-5 cuts off at the start; 0 where it cuts nothing.
    trends : tuple of Trend
        Over the whole run where it drifted, else over the window.
    sentence : str
    """

    steady: bool | None
    window_s: tuple[float, float] | None
    window_ns: tuple[int, int] | None
    warm_up_s: float
    trends: tuple[Trend, ...]
    sentence: str

    def __repr__(self) -> str:
        table = [self._cells().reset_index().to_string(index=False)] if self.trends else []
        return "\n".join([self.sentence, *table])

    def _repr_html_(self) -> str:
        return card(self.sentence, tables=[self._cells()] if self.trends else [])

    def _cells(self) -> pd.DataFrame:
        rows = {
            _name(t.series): [*(_show(t, mean) for mean in t.means), f"{t.p:.2g}", "yes" if t.drifts else "no"]
            for t in self.trends
        }
        head = ["mean of first quarter", "second", "third", "last", "p of no drift", "drifts"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=head).rename_axis("")


def _name(series: str) -> str:
    return LABELS.get(series, "requests in flight")


def _show(trend: Trend, value: float) -> str:
    return show_time(value) if trend.series in LABELS else f"{value:.4g}"


def steady_state(run: Run) -> Steadiness:
    """Say whether a run was stationary, and which part of it: no drift of TTFT nor of the requests in flight.

    A queue near saturation is told from one that grows only by a run of many of its relaxation times,
    1 / (μ (1 − √ρ)²) of an M/M/1 queue: until then either may drift. Of 2000 requests of such a queue, running since
    long, drift was found at ρ = 0.5, 0.8 and 0.9 in 1, 1.5 and 8.5 % of the runs; of one that was empty at the start,
    at ρ = 1, 1.05 and 1.1 in 50, 88 and 94 %.

    Parameters
    ----------
    run : Run
        TTFT on its own clock (E2E where answers are no streams), of the `ok` requests; in flight of all that were
        sent. One that timed out is in flight for the timeout, one that was cancelled or lost to the end.

    Returns
    -------
    Steadiness

    Notes
    -----
    The warm-up ends where MSER-5 says (White 1997), the later of the two series'. Drift is found on the whole run or
    after its warm-up: see `drift_p`. Of a run that drifted, what comes after the warm-up, its last half and its first
    half are tried, in this order; a part is stationary if it doesn't drift at 5 %, and its quarters' means differ by
    less than a third of what the whole's did.

    Examples
    --------
    >>> import dataclasses
    >>> rows = run.requests.assign(ttft_s=np.linspace(0.01, 0.05, len(run.requests)))
    >>> steady_state(dataclasses.replace(run, requests=rows)).sentence
    "Never stationary: TTFT went from 1... ms to 4... ms..."
    """
    series, origin_ns, metric = _series(run)
    fewest = min((len(values) for _, values in series.values()), default=0)
    if fewest < LEAST:
        return Steadiness(None, None, None, 0.0, (), f"Too few requests to tell: {fewest} of {LEAST} that are needed.")
    end_s = float(series["in_flight"][0][-1])
    cut_s = max(float(at_s[mser5(values)]) for at_s, values in series.values())
    whole, rest = _trends(series, (0.0, end_s), LEVEL), _trends(series, (cut_s, end_s), LEVEL)
    drifted = next((trends for trends in (whole, rest) if any(t.drifts for t in trends)), None)
    parts = [(cut_s, end_s), (end_s / 2, end_s), (0.0, end_s / 2)]
    part = parts[0] if drifted is None else next((w for w in parts if _quiet(series, w, drifted)), None)
    # requests fill up for as long as one lasts: of a short run that alone is no reason to call it unstationary
    filling = part is None and drifted is not None and not any(t.drifts for t in drifted if t.series != "in_flight")
    judged = (0.0, end_s) if filling else part
    if judged and (short := _too_short(run, judged)):
        return Steadiness(None, None, None, cut_s, drifted or rest, short)
    settled, window_ns = part is not None and part[1] == end_s, None if part is None else _stamps(part, origin_ns)
    return Steadiness(settled, part, window_ns, cut_s, drifted or rest, _text(run, drifted, part, settled, metric))


def mser5(values: Floats) -> int:
    """How many values to leave out at the start, by MSER-5 (White 1997; Spratt 1998).

    Of the means of batches of five, the cut is where the squared standard error of what is left is least; it is
    looked for in the first half.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> values = rng.normal(0, 1, 1000) + np.where(np.arange(1000) < 100, 20, 0)
    >>> 95 <= mser5(values) <= 110
    True
    """
    batches = len(values) // BATCH
    if batches < 2:
        return 0
    means = values[: batches * BATCH].reshape(batches, BATCH).mean(axis=1)
    means = (means - means.mean())[::-1]
    left = np.arange(1, batches + 1)
    squares = np.cumsum(means**2) - np.cumsum(means) ** 2 / left
    squares[squares < 1e-12 * (means**2).sum()] = 0.0  # rounding must not choose among values that are all alike
    errors = (squares / left**2)[::-1]
    return int(np.argmin(errors[: batches // 2 + 1])) * BATCH


def drift_p(values: Floats) -> float:
    """p of no drift in a correlated sequence.

    The sequence's ranks are projected on cosines of j half periods, j = 1 … 16. Those of a stationary sequence whose
    memory is well below a thirtieth of the window are as good as white, whatever its correlation; a trend, a step or
    a hump is found in the first two. The ratio of their mean square to that of the others is then Fisher's F
    (cosine transforms as in Müller and Watson 2008).

    Parameters
    ----------
    values : (n,) float

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> walk, steps = np.arange(1000) / 200, rng.normal(size=1000)
    >>> drift_p(steps) > 0.01, drift_p(walk + steps) < 1e-4
    (True, True)
    """
    n = len(values)
    if n <= COSINES or values.min() == values.max():
        return 1.0
    at = np.pi * (np.arange(n) + 0.5) / n
    ranks = stats.rankdata(values) / n
    squares = np.array([np.mean(np.cos(j * at) * ranks) ** 2 for j in range(1, COSINES + 1)])
    slow, others = squares[:SLOWEST].mean(), squares[SLOWEST:].mean()
    return float(stats.f.sf(slow / others, SLOWEST, COSINES - SLOWEST)) if others > 0 else 0.0


def _series(run: Run) -> tuple[Series, int, str]:
    """What is judged over time, when the first request was sent, and which latency it is."""
    rows = run.requests[run.requests["sent_ns"].notna()].sort_values("sent_ns")
    clock, ok = run_clock(run), rows["outcome"] == "ok"
    metric = "ttft_s" if rows.loc[ok, column_of("ttft_s", clock)].notna().any() else "e2e_s"
    sent_ns = rows["sent_ns"].to_numpy(np.int64)
    origin_ns = int(sent_ns[0]) if len(rows) else 0
    at_s = (sent_ns - origin_ns) / 1e9
    latency_s = np.where(ok, rows[column_of(metric, clock)].to_numpy(float, na_value=np.nan), np.nan)
    known = ~np.isnan(latency_s)
    return {metric: (at_s[known], latency_s[known]), "in_flight": (at_s, _in_flight(run, rows))}, origin_ns, metric


def _in_flight(run: Run, rows: pd.DataFrame) -> Floats:
    """How many requests each of them, sorted by their sending, found in flight."""
    sent_ns = rows["sent_ns"].to_numpy(float)
    ends_ns = rows[["sent_ns", "headers_ns", "last_seen_ns", "eof_ns"]].max(axis=1).to_numpy(float)
    timeout_s, outcome = run.meta["asked"].get("timeout_s") or math.inf, rows["outcome"].to_numpy(object)
    ends_ns = np.where(outcome == "timeout", sent_ns + timeout_s * 1e9, ends_ns)
    ends_ns = np.where(np.isin(outcome, ["cancelled", "lost"]), np.inf, ends_ns)
    return np.arange(len(rows)) - np.searchsorted(np.sort(ends_ns), sent_ns).astype(float)


def _trends(series: Series, window_s: tuple[float, float], level: float) -> tuple[Trend, ...]:
    """What each series does over a window; the level is shared among them (Bonferroni)."""
    within = {name: values[(at_s >= window_s[0]) & (at_s <= window_s[1])] for name, (at_s, values) in series.items()}
    return tuple(_trend(name, values, level / len(series)) for name, values in within.items())


def _trend(name: str, values: Floats, level: float) -> Trend:
    if len(values) < LEAST / 4:
        return Trend(name, (math.nan,) * 4, math.nan, False)
    means = tuple(float(quarter.mean()) for quarter in np.array_split(values, 4))
    p, least = drift_p(values), max(NEGLIGIBLE_SHARE * float(values.mean()), float(name == "in_flight"))
    return Trend(name, means, p, p < level and max(means) - min(means) >= least)


def _quiet(series: Series, window_s: tuple[float, float], whole: tuple[Trend, ...]) -> bool:
    """Whether a part of a run that drifted didn't."""
    part = _trends(series, window_s, LEVEL_OF_A_PART)
    little = [p.change < w.change / 3 for p, w in zip(part, whole, strict=True) if w.drifts]
    return all(little) and not any(t.drifts or math.isnan(t.p) for t in part)


def _stamps(window_s: tuple[float, float], origin_ns: int) -> tuple[int, int]:
    start_s, end_s = window_s
    return origin_ns + math.floor(start_s * 1e9), origin_ns + math.ceil(end_s * 1e9)


def _too_short(run: Run, window_s: tuple[float, float]) -> str:
    """Why a window is too short to be called stationary, or ""."""
    e2e_s = run.requests.loc[run.requests["outcome"] == "ok", column_of("e2e_s", run_clock(run))].mean()
    span_s = window_s[1] - window_s[0]
    if not span_s < DURATIONS * e2e_s:
        return ""
    return (
        f"Too short to tell: there are {show_time(span_s)} to judge, and requests last {show_time(e2e_s)}; "
        f"once it is warm, send for more than {DURATIONS} times as long as they last."
    )


def _window_text(window_s: tuple[float, float]) -> str:
    return f"from {show_time(window_s[0])} to {show_time(window_s[1])} after the first send"


def _text(
    run: Run, drifted: tuple[Trend, ...] | None, part: tuple[float, float] | None, settled: bool, metric: str
) -> str:
    if drifted is None and part is not None:
        return f"Stationary {_window_text(part)}: neither {_name(metric)} nor the requests in flight drift."
    assert drifted is not None
    what = " and ".join(str(t) for t in drifted if t.drifts)
    if part is None:
        asked = run.meta["asked"]
        closed = asked.get("rate_per_s") is None and asked.get("concurrency") is not None
        rising = not closed and all(t.means[-1] > t.means[0] for t in drifted if t.drifts)
        remedy = "lower the rate, if the server can't keep up, or run for longer" if rising else "run for longer"
        return f"Never stationary: {what}; {remedy}."
    if settled:
        return f"Stationary {_window_text(part)}, once it had settled: over the whole run {what}."
    return f"Stationary only {_window_text(part)}: {what} over the run."
