"""Goodput: how many requests meet a service-level objective (SLO), and how many another clock would misjudge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.errors import UsageError, one_of, positive
from llmprofile.latency import CLOCKS, LABELS, column_of
from llmprofile.markup import card
from llmprofile.metrics import block_draws, block_length_s, first_turns, rates, run_clock
from llmprofile.records import Run, plain_ns
from llmprofile.units import elapsed_s, show_rate, show_time

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Goodput:
    """How many requests meet every limit, and at what rate; it shows itself.

    Attributes
    ----------
    clock : str
        The clock that the figures are read on.
    limits : dict of metric to float
        The most that each may be, in seconds.
    n, met : int
        All scheduled requests, whatever became of them, and those that meet every limit.
    share, share_lo, share_hi : float
        met / n and its 95 % interval, NaN where the run is too short for one.
    rate_per_s, rate_lo_per_s, rate_hi_per_s : float
        The rate at which requests were sent that meet every limit.
    frame : DataFrame
        One row a clock that has the metrics: `met` and `share`; for each limit how many meet it alone (the metric's
        name); `failed_wrongly` and `passed_wrongly`, which the clock fails or passes and the wire doesn't (null of
        the wire, and where there is no wire).
    notes : tuple of str
    """

    clock: str
    limits: dict[str, float]
    n: int
    met: int
    share: float
    share_lo: float
    share_hi: float
    rate_per_s: float
    rate_lo_per_s: float
    rate_hi_per_s: float
    frame: pd.DataFrame
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join([self._head(), self._cells().reset_index().to_string(index=False), *self.notes])

    def _repr_html_(self) -> str:
        return card(self._head(), tables=[self._cells()], notes=self.notes)

    def _head(self) -> str:
        known = not math.isnan(self.share_lo)
        share = _percent(self.share) + f" [{self.share_lo:.1%}, {self.share_hi:.1%}]" * known
        rate = show_rate(self.rate_per_s)
        rate += f" [{show_rate(self.rate_lo_per_s)}, {show_rate(self.rate_hi_per_s)}]" * known
        limits = " and ".join(_limit_text(metric, limit_s) for metric, limit_s in self.limits.items())
        return f"goodput {rate}: {share} of {self.n:,} requests meet {limits} on the {self.clock} clock"

    def _cells(self) -> pd.DataFrame:
        rows = {}
        for clock, row in self.frame.iterrows():
            wrongly = ["–" if pd.isna(row[c]) else f"{int(row[c]):,}" for c in ("failed_wrongly", "passed_wrongly")]
            rows[clock] = [
                f"{int(row['met']):,}",
                _percent(row["share"]),
                *(f"{int(row[m]):,}" for m in self.limits),
                *wrongly,
            ]
        limits = [_limit_text(metric, limit_s) for metric, limit_s in self.limits.items()]
        head = ["meet all", "share", *limits, "failed wrongly", "passed wrongly"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=head).rename_axis("clock")


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.1%}"


def _limit_text(metric: str, limit_s: float) -> str:
    return f"{LABELS[metric]} ≤ {show_time(limit_s)}"


def goodput(
    run: Run,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    ntpot_s: float | None = None,
    e2e_s: float | None = None,
    clock: str | None = None,
) -> Goodput:
    """Share and rate of the requests that meet every limit that is given (DistServe's goodput, Zhong et al. 2024).

    Every scheduled request counts: one that did not end `ok` meets no limit, nor does an `ok` one whose latency is
    not known on this clock. An answer of one token has no TPOT and meets any limit on it, as in vLLM's benchmark.

    The share's interval is Wilson's, of as many independent requests as the run is worth: a block bootstrap over
    time says by how much correlation widens it. Where all requests meet the limits, or none, the run is worth its
    number of blocks. The rate is the share's, at the rate at which requests were sent: a run's drain is left out.

    Parameters
    ----------
    run : Run
    ttft_s, tpot_s, ntpot_s, e2e_s : float, optional
        The most that each may be, in seconds; at least one of them.
    clock : {"wire", "seen", "handled"}, optional
        The run's own by default.

    Raises
    ------
    UsageError
        No limit, one that is not above 0, an unknown clock, or a metric that no `ok` request has on it.

    Examples
    --------
    >>> found = goodput(run, ttft_s=10.0)
    >>> bool(found.met == (run.requests["outcome"] == "ok").sum())
    True
    >>> found.frame.index.tolist()
    ['wire', 'seen']
    """
    asked = {"ttft_s": ttft_s, "tpot_s": tpot_s, "ntpot_s": ntpot_s, "e2e_s": e2e_s}
    limits = {name: positive(name, limit_s, " (seconds)") for name, limit_s in asked.items() if limit_s is not None}
    if not limits:
        raise UsageError(f"goodput needs a limit: at least one of {', '.join(asked)} (seconds)")
    clock = one_of("clock", clock or run_clock(run), CLOCKS)
    ok = _is_ok(run)
    every = {c: _latencies(run, limits, c) for c in CLOCKS}
    absent = [m for m, row in zip(limits, every[clock], strict=True) if ok.any() and np.isnan(row[ok]).all()]
    if absent:
        raise UsageError(f"no ok request of this run has {LABELS[absent[0]]} on the {clock} clock; leave it out")
    there = {c: rows for c, rows in every.items() if c == clock or not np.isnan(rows[:, ok]).all(axis=1).any()}
    frame, met = _by_clock(there, limits), _within(every[clock], limits)
    (low, high), why = _interval(run, met, clock)
    share = float(met.mean()) if len(met) else math.nan
    per_s = _sending_rate(run)
    scaled = (share * per_s, low * per_s, high * per_s)
    notes = [*_notes(run, limits, clock, every[clock]), *_misjudged(frame, clock), *([why] if why else [])]
    return Goodput(clock, limits, len(met), int(met.sum()), share, low, high, *scaled, frame, tuple(notes))


def meets(run: Run, limits: Mapping[str, float], clock: str) -> Bools:
    """Which requests meet every limit on a clock; what is not known is not met.

    Parameters
    ----------
    run : Run
    limits : mapping of metric to float
        `ttft_s`, `tpot_s`, `ntpot_s`, `e2e_s`; seconds.
    clock : {"wire", "seen", "handled"}

    Returns
    -------
    (n,) bool
        In the order of `run.requests`.

    Examples
    --------
    >>> bool(meets(run, {"ttft_s": 1e-9}, "wire").any())
    False
    """
    return _within(_latencies(run, limits, clock), limits)


def _within(latencies_s: Floats, limits: Mapping[str, float]) -> Bools:
    return np.asarray((latencies_s <= np.array(list(limits.values()))[:, None]).all(axis=0))


def _is_ok(run: Run) -> Bools:
    return (run.requests["outcome"] == "ok").to_numpy(bool)


def _latencies(run: Run, metrics: Iterable[str], clock: str) -> Floats:
    """A row a metric, a column a request: infinite if it failed, 0 for the TPOT of one token, NaN where not known."""
    columns = {m: run.requests[column_of(m, clock)].to_numpy(float, na_value=np.nan) for m in metrics}
    if "tpot_s" in columns:
        columns["tpot_s"] = np.where(_of_one_token(run, clock), 0.0, columns["tpot_s"])
    return np.where(_is_ok(run), np.array(list(columns.values())).reshape(len(columns), -1), np.inf)


def _of_one_token(run: Run, clock: str) -> Bools:
    """Streams whose first token was their last: both have a time, and there is no TPOT."""
    rows = run.requests
    known = rows[f"first_{clock}_ns"].notna() & rows[f"last_{clock}_ns"].notna()
    return (known & rows[column_of("tpot_s", clock)].isna()).to_numpy(bool)


def _by_clock(latencies_s: Mapping[str, Floats], limits: Mapping[str, float]) -> pd.DataFrame:
    met = {clock: _within(rows, limits) for clock, rows in latencies_s.items()}
    table = {}
    for clock, rows in latencies_s.items():
        alone = {m: int((row <= limit_s).sum()) for (m, limit_s), row in zip(limits.items(), rows, strict=True)}
        wrongly: dict[str, int | None] = {"failed_wrongly": None, "passed_wrongly": None}
        if clock != "wire" and "wire" in met:
            both = ~np.isnan([rows, latencies_s["wire"]]).any(axis=(0, 1))
            wrongly["failed_wrongly"] = int((both & met["wire"] & ~met[clock]).sum())
            wrongly["passed_wrongly"] = int((both & met[clock] & ~met["wire"]).sum())
        share = float(met[clock].mean()) if len(met[clock]) else math.nan
        table[clock] = {"met": int(met[clock].sum()), "share": share, **alone, **wrongly}
    frame = pd.DataFrame.from_dict(table, orient="index").rename_axis("clock")
    return frame.astype({"failed_wrongly": "Int64", "passed_wrongly": "Int64"} | dict.fromkeys(limits, int))


def _sending_rate(run: Run) -> float:
    """All requests per second of sending, so that a share of them makes a rate; one that was never sent adds none."""
    achieved_per_s = rates(run, None, math.nan)["achieved_per_s"]
    sent = int(first_turns(run.requests)["sent_ns"].notna().sum())
    return math.nan if achieved_per_s is None else achieved_per_s * len(run.requests) / sent


def _interval(run: Run, met: Bools, clock: str) -> tuple[tuple[float, float], str]:
    rows = run.requests
    at_s = rows["due_ns"].fillna(rows["begun_ns"]).to_numpy(float, na_value=np.nan) / 1e9
    e2e_s = rows.loc[rows["outcome"] == "ok", column_of("e2e_s", clock)].to_numpy(float, na_value=np.nan)
    e2e_s, known = e2e_s[~np.isnan(e2e_s)], ~np.isnan(at_s)
    block_s = block_length_s(rows["begun_ns"], float(e2e_s.mean()) if len(e2e_s) else 0.0)
    return share_interval(met[known], at_s[known], block_s)


def share_interval(met: Bools, at_s: Floats, block_s: float, level: float = 0.95) -> tuple[tuple[float, float], str]:
    """Wilson's interval of a share, of as many independent values as a correlated sequence is worth.

    n p (1 − p) / (n² Var p̂), Var p̂ by a moving-block bootstrap over time: n over the design effect (Kish 1965).

    Parameters
    ----------
    met : (n,) bool
    at_s : (n,) float
        When each was.
    block_s : float
        Length of the bootstrap's blocks.
    level : float

    Returns
    -------
    (low, high), NaN where fewer than 20 blocks hold values; and a sentence that says so, or "".

    Examples
    --------
    >>> (low, high), _ = share_interval(np.ones(200, bool), np.arange(200.0), block_s=4.0)
    >>> round(low, 3), high
    (0.928, 1.0)
    """
    draws, why = block_draws(met.astype(float), at_s, block_s)
    if why:
        return (math.nan, math.nan), why
    p, variance = float(met.mean()), float(draws["mean"].var(ddof=1))
    worth = p * (1 - p) / variance if variance > 0 else float(np.ptp(at_s)) / block_s
    return _wilson(p, min(worth, len(met)), level), ""


def _wilson(p: float, n: float, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((middle + side * half) / (1 + z**2 / n) for side in (-1, 1))
    return (low if p > 0 else 0.0), (high if p < 1 else 1.0)  # rounding would put them a hair beside


def _notes(run: Run, limits: Mapping[str, float], clock: str, latencies_s: Floats) -> list[str]:
    """What counts how: failed requests, answers of one token, missing and bracketed times."""
    notes, ok = [], _is_ok(run)
    failed = run.requests["outcome"][~ok].value_counts()
    if len(failed):
        counts = ", ".join(f"{n} {outcome}" for outcome, n in failed.items())
        notes.append(f"{failed.sum()} did not end ok ({counts}): they meet no limit.")
    if "tpot_s" in limits and (ones := int((_of_one_token(run, clock) & ok).sum())):
        notes.append(f"{ones} answers of one token have no TPOT: they meet the limit on it.")
    if unknown := int(np.isnan(latencies_s).any(axis=0).sum()):
        notes.append(f"{unknown} ok requests have no token with a time on this clock: they meet no limit.")
    if undecided := _undecided(run, limits, latencies_s) if clock == "wire" else 0:
        most = (int(_within(latencies_s, limits).sum()) + undecided) / len(ok)
        notes.append(
            f"Of {undecided} the TTFT is known only within a bracket that holds its limit: they don't meet it here, "
            f"and the share may be up to {most:.1%}."
        )
    return notes


def _undecided(run: Run, limits: Mapping[str, float], latencies_s: Floats) -> int:
    """Requests that would meet all limits if their bounded first token had come as early as it can have."""
    if "ttft_s" not in limits:
        return 0
    lo_ns, sent_ns = (plain_ns(run.requests[c]) for c in ("first_wire_lo_ns", "sent_ns"))
    bounded = run.requests["bounded"].fillna(False).to_numpy(bool)
    at_best_s = np.where(bounded & _is_ok(run), elapsed_s(lo_ns, sent_ns), np.nan)
    earliest_s = latencies_s.copy()
    earliest_s[list(limits).index("ttft_s")] = at_best_s
    return int((_within(earliest_s, limits) & ~_within(latencies_s, limits)).sum())


def _misjudged(frame: pd.DataFrame, clock: str) -> list[str]:
    """What the clocks that are not the wire get wrong, in words."""
    said = []
    for other, row in frame.iterrows():
        if not pd.isna(row["failed_wrongly"]):
            fails, passes = ("fails", "passes") if other == clock else ("would have failed", "would have passed")
            said.append(
                f"The {other} clock {fails} {row['failed_wrongly']} requests that meet the limits on the wire, and "
                f"{passes} {row['passed_wrongly']} that don't."
            )
    if not said:
        said.append("There is no other clock with kernel stamps beside it: how many it misjudges is not known.")
    return said
