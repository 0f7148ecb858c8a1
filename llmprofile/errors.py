"""What can go wrong on the user's side, and the helpers that say so in one sentence."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from numbers import Integral, Real


class LlmprofileError(Exception):
    """Base of everything this package raises on purpose."""


class UsageError(LlmprofileError, ValueError):
    """What was asked can't be done; nothing was sent and nothing was written."""


class LlmprofileWarning(UserWarning):
    """Something that weakens a result without spoiling it."""


def one_of(name: str, value: str, allowed: Collection[str]) -> str:
    """Return `value`, or raise the sentence "name must be one of a, b; not x".

    Examples
    --------
    >>> one_of("client", "stamped", ("stamped", "conventional"))
    'stamped'
    """
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}; not {value}")
    return value


def positive(name: str, value: float, unit: str = "") -> float:
    """Return `value` if it is a finite number above zero, else raise a sentence.

    Examples
    --------
    >>> positive("rate_per_s", 200.0)
    200.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number above 0{unit}; not {value!r}")
    if not 0 < value < math.inf or (isinstance(value, int) and value > sys.float_info.max):
        raise UsageError(f"{name} must be a number above 0{unit}; not {value}")
    return value


def not_negative(name: str, value: float, unit: str = "") -> float:
    """Return `value` as a float if it is a finite number of at least 0, else raise a sentence.

    Examples
    --------
    >>> not_negative("cv", 0)
    0.0
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= sys.float_info.max:
        raise UsageError(f"{name} must be a finite number of at least 0{unit}; not {value!r}")
    return float(value)


def whole(name: str, value: int, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`, else raise a sentence.

    Examples
    --------
    >>> whole("processes", 4)
    4
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}; not {value!r}")
    return int(value)
