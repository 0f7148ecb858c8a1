"""Lindley's recursion: the exact waits of a first-come, first-served queue with one server, for any arrivals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError

Floats = npt.NDArray[np.float64]

BLOCK = 1 << 12  # jobs; a sum over millions of them would lose what is small beside the whole time


def simulate(arrivals_s: npt.ArrayLike, services_s: npt.ArrayLike) -> Floats:
    """How long each job waits for its service to begin: W₀ = 0, Wₙ₊₁ = max(0, Wₙ + Sₙ − (aₙ₊₁ − aₙ)).

    Parameters
    ----------
    arrivals_s : (n,) float
        When jobs arrive, ascending; jobs of one time are served in the order given.
    services_s : (n,) float
        How long each takes, ≥ 0.

    Returns
    -------
    (n,) float
        Waits in seconds.

    Raises
    ------
    UsageError
        Lengths that differ, times that are not finite or not ascending, a service below 0.

    Notes
    -----
    The recursion as running sum less its running minimum (Lindley 1952), a block of jobs at a time: rounding stays
    that of the differences of arrivals, however many jobs there are.

    Examples
    --------
    >>> simulate([0.0, 1.0, 1.5], [1.2, 0.5, 0.1]).round(9).tolist()
    [0.0, 0.2, 0.2]
    """
    arrivals, services = _checked(arrivals_s, services_s)
    waits, before = np.zeros(len(arrivals)), 0.0
    for start in range(1, len(arrivals), BLOCK):
        stop = min(start + BLOCK, len(arrivals))
        steps = services[start - 1 : stop - 1] - np.diff(arrivals[start - 1 : stop])
        steps[0] += before
        walk = np.cumsum(steps)
        waits[start:stop] = walk - np.minimum(np.minimum.accumulate(walk), 0.0)
        before = waits[stop - 1]
    return waits


def backlog(arrivals_s: npt.ArrayLike, services_s: npt.ArrayLike, at_s: npt.ArrayLike) -> Floats:
    """Unfinished work, in seconds of service, at the times `at_s`; a job that arrives at such a time counts.

    Parameters
    ----------
    arrivals_s, services_s : (n,) float
        As for `simulate`.
    at_s : (m,) float
        Any times, in any order.

    Returns
    -------
    (m,) float

    Raises
    ------
    UsageError
        As `simulate`.

    Examples
    --------
    >>> backlog([0.0, 1.0], [2.0, 1.0], [-1.0, 0.5, 1.0, 2.5, 9.0]).tolist()
    [0.0, 1.5, 2.0, 0.5, 0.0]
    """
    arrivals, services = _checked(arrivals_s, services_s)
    at = np.asarray(at_s, float)
    if not len(arrivals):
        return np.zeros(at.shape)
    last = np.searchsorted(arrivals, at, side="right") - 1
    left = (simulate(arrivals, services) + services)[last] - (at - arrivals[last])
    return np.where(last >= 0, np.maximum(left, 0.0), 0.0)


def _checked(arrivals_s: npt.ArrayLike, services_s: npt.ArrayLike) -> tuple[Floats, Floats]:
    arrivals, services = np.asarray(arrivals_s, float), np.asarray(services_s, float)
    if arrivals.ndim != 1 or arrivals.shape != services.shape:
        raise UsageError(
            f"arrivals_s and services_s must be of one length; not of shapes {arrivals.shape}, {services.shape}"
        )
    if not (np.isfinite(arrivals).all() and (np.diff(arrivals) >= 0).all()):
        raise UsageError("arrivals_s must be finite and ascending")
    if not ((services >= 0) & (services < np.inf)).all():
        raise UsageError("services_s must be finite and not below 0")
    return arrivals, services
