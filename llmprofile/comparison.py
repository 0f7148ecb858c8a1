"""What differs between two runs: what was measured, with intervals, and what was asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.latency import LABELS, column_of
from llmprofile.metrics import QUANTILES, block_draws, block_length_s, known_values, run_clock
from llmprofile.records import Run

Floats = npt.NDArray[np.float64]
Sample = tuple[Floats, Floats, float]
"""Values, when each was taken, and how long blocks of it must be (seconds)."""

LEAST_VALUES = {"mean": 1, "p99": 100}
_CALL = ("call", "rate_per_s")
"""Of what was asked, what only says again what other entries say."""


def sample(run: Run, metric: str, clock: str | None = None) -> Sample:
    """A metric's values over the `ok` requests that have it (ITL: over their tokens), when, and the length of blocks.

    Parameters
    ----------
    run : Run
    metric : str
        A metric of `llmprofile.summary`.
    clock : {"wire", "seen", "handled"}, optional
        The run's own by default.

    Returns
    -------
    (n,) float seconds, (n,) float seconds, float seconds

    Examples
    --------
    >>> values_s, at_s, block_s = sample(run, "ttft_s")
    >>> len(values_s) == len(at_s), block_s >= 1.0
    (True, True)
    """
    clock = clock or run_clock(run)
    ok = run.requests[run.requests["outcome"] == "ok"]
    values_s, at_s = known_values(run, ok, metric, clock)
    e2e_s = ok[column_of("e2e_s", clock)].dropna()
    block_s = block_length_s(ok["begun_ns"].dropna(), float(e2e_s.mean()) if len(e2e_s) else 0.0)
    return values_s, at_s, block_s


def differences(a: Run, b: Run) -> pd.DataFrame:
    """Every metric that two runs have, each run on its own clock, and by how much the second's is more.

    Parameters
    ----------
    a, b : Run

    Returns
    -------
    DataFrame
        One row a metric: `n_a`, `n_b`; seconds `mean_a_s`, `mean_b_s`, `mean_difference_s` (b less a) with its 95 %
        interval `mean_lo_s`, `mean_hi_s`; the same of the p99; `note`, why something of it is missing.

    Notes
    -----
    The runs are independent samples: each has its own moving-block bootstrap over time (Künsch 1989), and intervals
    are percentiles of all differences between resamples of one and of the other. They tell of these two runs: what
    differs between one run and the next of the same kind is not in them.

    Examples
    --------
    >>> row = differences(run, run).loc["ttft_s"]
    >>> float(row["mean_difference_s"]), row["note"].startswith("first run: too short for an interval")
    (0.0, True)
    """
    rows = {}
    for metric in LABELS:
        of_a, of_b = sample(a, metric), sample(b, metric)
        if len(of_a[0]) and len(of_b[0]):
            rows[metric] = difference(of_a, of_b)
    return pd.DataFrame(list(rows.values()), index=pd.Index(list(rows), name="metric"))


def difference(a: Sample, b: Sample) -> dict[str, Any]:
    """A row of `differences`, of two samples that aren't empty.

    Examples
    --------
    >>> at_s = np.arange(0.0, 60.0, 0.1)
    >>> row = difference((at_s * 0 + 1, at_s, 1.0), (at_s * 0 + 3, at_s, 1.0))
    >>> row["mean_difference_s"], row["mean_lo_s"], row["p99_hi_s"], row["note"]
    (2.0, 2.0, 2.0, '')
    """
    draws, notes = [], []
    for name, of_run in (("first", a), ("second", b)):
        drawn, why = block_draws(*of_run)
        draws.append(drawn)
        notes += [f"{name} run: {why}"] if why else []
    row: dict[str, Any] = {"n_a": len(a[0]), "n_b": len(b[0])}
    for statistic, least in LEAST_VALUES.items():
        figures = [_figure(values, statistic, least) for values, _, _ in (a, b)]
        gap_s = figures[1] - figures[0]
        low, high = (math.nan, math.nan) if notes or math.isnan(gap_s) else _ends(*(d[statistic] for d in draws))
        row |= {f"{statistic}_a_s": figures[0], f"{statistic}_b_s": figures[1], f"{statistic}_difference_s": gap_s}
        row |= {f"{statistic}_lo_s": low, f"{statistic}_hi_s": high}
    few = [f"p99 needs {LEAST_VALUES['p99']} values"] if math.isnan(row["p99_difference_s"]) else []
    return row | {"note": "; ".join([*few, *notes])}


def _figure(values: Floats, statistic: str, least: int) -> float:
    if len(values) < least:
        return math.nan
    return float(values.mean() if statistic == "mean" else np.quantile(values, QUANTILES[statistic]))


def _ends(of_a: Floats, of_b: Floats) -> tuple[float, float]:
    """The middle 95 % of every resample of b less every one of a, whose draws have nothing to do with one another."""
    low, high = np.quantile(np.subtract.outer(of_b, of_a), [0.025, 0.975])
    return float(low), float(high)


def asked_differences(a: Run, b: Run) -> pd.DataFrame:
    """What was asked of one run and not of the other: a row a parameter, columns `a` and `b`.

    Examples
    --------
    >>> asked_differences(run, run).empty
    True
    """
    asked = [run.meta["asked"] for run in (a, b)]
    names = [n for n in {**asked[0], **asked[1]} if n not in _CALL and asked[0].get(n) != asked[1].get(n)]
    columns = {who: [of.get(n) for n in names] for who, of in zip("ab", asked, strict=True)}
    return pd.DataFrame(columns, names)
