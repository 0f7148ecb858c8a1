"""One internal unit, one place that converts: nanoseconds in stamps, seconds in figures, milliseconds in labels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

NS_PER_S = 1_000_000_000
MISSING_NS = np.iinfo(np.int64).min
"""Stands for "no stamp" in plain int64 arrays, where there is no null."""


def ns_to_s(duration_ns: Any) -> Any:
    """Nanoseconds as float seconds; a scalar or an array.

    Examples
    --------
    >>> ns_to_s(1_500_000)
    0.0015
    """
    return duration_ns / NS_PER_S


def s_to_ns(duration_s: float) -> int:
    """Seconds as whole nanoseconds.

    Examples
    --------
    >>> s_to_ns(0.05)
    50000000
    """
    return round(duration_s * NS_PER_S)


def elapsed_s(later_ns: npt.NDArray[np.int64], earlier_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`later_ns` − `earlier_ns` in seconds, NaN where either is `MISSING_NS`.

    Examples
    --------
    >>> elapsed_s(np.array([5_000_000_000, MISSING_NS]), np.array([3_000_000_000, 0]))
    array([ 2., nan])
    """
    missing = (later_ns == MISSING_NS) | (earlier_ns == MISSING_NS)
    return np.where(missing, np.nan, (later_ns - np.where(missing, 0, earlier_ns)) / NS_PER_S)


def show_time(seconds: float) -> str:
    """A time for a label or a table cell, in the unit that reads best.

    Examples
    --------
    >>> show_time(0.0123), show_time(0.00000812), show_time(float("nan"))
    ('12.3 ms', '8.1 µs', '–')
    """
    if math.isnan(seconds):
        return "–"
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size >= 10:
        return f"{seconds:.1f} s"
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 1e-4:
        return f"{seconds * 1e3:.{1 if size >= 0.01 else 2}f} ms"
    return f"{seconds * 1e6:.1f} µs"


def show_rate(per_s: float) -> str:
    """A rate for a label or a table cell.

    Examples
    --------
    >>> show_rate(400.0), show_rate(float("nan"))
    ('400/s', '–')
    """
    # from 9999.5 on four digits would be shown as 1e+04
    return "–" if math.isnan(per_s) else f"{per_s:,.4g}/s" if per_s < 9999.5 else f"{per_s:,.0f}/s"
