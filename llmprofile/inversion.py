"""From what theory says of a wait to its distribution: transforms inverted, compounds convolved, quantiles found."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError

Floats = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]
Cdf = Callable[[Floats], Floats]

DECAY = 25.0  # A of the Euler algorithm: aliasing below e^−A = 1e-11, rounding 1e-16 e^(A/2) = 3e-11
PLAIN_TERMS, AVERAGED_TERMS = 40, 14
STEPS = 1 << 16  # of a lattice
TIMES_A_LATTICE = 4.0  # longest over shortest time that one lattice answers for
DAMPING = 1e-5  # of the lattice's last step: aliasing below its square, rounding 1e-16 over it
PARTS, MOST_ROUNDS = 128, 12  # a quantile's bracket shrinks by this factor at a time
NARROW = 1e-10  # of the quantile: its bracket
HIGHEST_QUANTILE = 1 - 1e-8


def invert(transform: Callable[[Complex], Complex], t: npt.ArrayLike, atom: float = 0.0) -> Floats:
    """P(W ≤ t) from the Laplace–Stieltjes transform of a wait W ≥ 0.

    Parameters
    ----------
    transform : callable
        s → E e^{−sW}, for a complex (m,) array with Re s > 0.
    t : array
        Times in seconds, of any shape.
    atom : float
        P(W = 0). It is taken off first, so that what is inverted begins at 0 without a jump.

    Returns
    -------
    float array
        Of `t`'s shape; 0 below 0.

    Notes
    -----
    The Euler algorithm of Abate and Whitt, "Numerical inversion of Laplace transforms of probability distributions",
    ORSA Journal on Computing 7 (1995): a Fourier series with its last terms averaged. For a distribution that is
    smooth above 0 the error is below 1e-9; near a jump it is not small: see `compound_cdf`.

    Examples
    --------
    >>> invert(lambda s: 0.5 + 0.5 / (1 + s), [0.0, 1.0], atom=0.5) - [0.5, 1 - 0.5 * np.exp(-1)]
    array([0., 0.])
    """
    t, result, inside = _at_the_ends(t, atom)
    times = t[inside]
    if not len(times):
        return result
    k = np.arange(PLAIN_TERMS + AVERAGED_TERMS + 1)
    s = ((DECAY + 2j * math.pi * k) / (2 * times[:, None])).astype(np.complex128)
    terms = ((transform(s.ravel()).reshape(s.shape) - atom) / s).real * (-1.0) ** k
    terms[:, 0] /= 2
    sums = np.cumsum(terms, axis=1)[:, PLAIN_TERMS:]
    binomial = np.array([math.comb(AVERAGED_TERMS, j) for j in range(AVERAGED_TERMS + 1)]) / 2.0**AVERAGED_TERMS
    result[inside] = np.clip(atom + math.exp(DECAY / 2) / times * (sums @ binomial), atom, 1.0)
    return result


def compound_cdf(part_cdf: Cdf, repeat: float, t: npt.ArrayLike, unit_s: float = 0.0) -> Floats:
    """P(X₁ + … + X_N ≤ t) of a geometric number N of independent parts, P(N = n) = (1 − ρ) ρⁿ.

    With ρ the utilisation and the parts residual services this is the wait in an M/G/1 queue (Beneš), for any law.

    Parameters
    ----------
    part_cdf : callable
        (m,) ascending times from 0 → P(X ≤ t); continuous, it may have kinks.
    repeat : float
        ρ, from 0 to below 1.
    t : array
        Times in seconds, of any shape.
    unit_s : float
        Where `part_cdf` has kinks at multiples of a time: that time. Steps then divide it.

    Returns
    -------
    float array
        Of `t`'s shape; 0 below 0, the atom 1 − ρ at 0.

    Notes
    -----
    Each part's mass is moved to the two ends of its step, half and half, so means stay and errors are of second order
    in the step (of first order within a step of a kink off the lattice); a step is at most t / 16,000. The lattice's
    generating function (1 − ρ) / (1 − ρ P(z)) is expanded by a damped FFT (Abate and Whitt, "Numerical inversion of
    probability generating functions", Operations Research Letters 12, 1992), which needs no end of the tail: each t is
    answered on a lattice of its own scale.

    Examples
    --------
    >>> def uniform(x):
    ...     return np.minimum(x, 1.0)  # the residual of a service that takes 1
    >>> compound_cdf(uniform, 0.5, [0.0, 1.0], unit_s=1.0).round(5).tolist()  # 0.5 and 0.5 e^0.5
    [0.5, 0.82436]
    """
    t, result, inside = _at_the_ends(t, 1 - repeat)
    scales = np.ceil(np.log(t, where=inside, out=np.zeros(t.shape)) / math.log(TIMES_A_LATTICE))
    for scale in np.unique(scales[inside]):
        group = inside & (scales == scale)
        result[group] = _on_one_lattice(part_cdf, repeat, t[group], unit_s)
    order = np.argsort(t, axis=None)
    result.ravel()[order] = np.maximum.accumulate(result.ravel()[order])  # lattices differ in the seventh digit
    return result


def _at_the_ends(t: npt.ArrayLike, atom: float) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Return t, the cdf where it needs no computing (up to 0, at infinity, NaN), and where it does."""
    t = np.asarray(t, float)
    known = np.where(np.isnan(t), np.nan, np.where(t < 0, 0.0, np.where(t == 0, atom, 1.0)))
    return t, known, (t > 0) & (t < np.inf)


def _on_one_lattice(part_cdf: Cdf, repeat: float, times: Floats, unit_s: float) -> Floats:
    step = float(times.max()) / (STEPS - 2)
    if unit_s > step:
        step = unit_s / math.floor(unit_s / step)
    masses = np.diff(part_cdf(np.linspace(0.0, STEPS * step, STEPS + 1)))
    masses = (masses + np.concatenate([[0.0], masses[:-1]])) / 2
    damping = DAMPING ** (np.arange(STEPS) / STEPS)
    circle = np.fft.rfft(masses * damping, 2 * STEPS)
    compound = np.fft.irfft((1 - repeat) / (1 - repeat * circle), 2 * STEPS)[:STEPS] / damping
    # a lattice point stands for half a step on either side
    at = np.concatenate([[0.0], (np.arange(STEPS) + 0.5) * step])
    cumulated = np.concatenate([[1 - repeat], np.cumsum(compound)])
    return np.clip(np.interp(times, at, cumulated), 1 - repeat, 1.0)


def quantile(cdf: Cdf, q: npt.ArrayLike, scale_s: float) -> Floats:
    """Return the least t ≥ 0 with cdf(t) ≥ q, for each q.

    Parameters
    ----------
    cdf : callable
        (m,) times → probabilities, not falling; it may have an atom at 0.
    q : array
        From 0 to 1 − 1e-8, where a computed tail still says something, or 1 (infinite).
    scale_s : float
        Where the search begins: any time above 0 of the law's order of magnitude.

    Returns
    -------
    float array
        Of `q`'s shape; 0 for q up to the atom.

    Raises
    ------
    UsageError
        A `q` outside.

    Examples
    --------
    >>> quantile(lambda t: 1 - 0.5 * np.exp(-t), [0.4, 0.5, 0.75], 1.0).round(9).tolist()
    [0.0, 0.0, 0.693147181]
    """
    q = np.asarray(q, float)
    if not (((q >= 0) & (q <= HIGHEST_QUANTILE)) | (q == 1)).all():
        raise UsageError(f"q must be between 0 and 1 − 1e-8, or 1; not {q[~((q >= 0) & (q <= HIGHEST_QUANTILE))][0]}")
    result = np.where(q == 1, np.inf, 0.0)
    above = (q > cdf(np.zeros(1))[0]) & (q < 1)
    if above.any():
        result[above] = _crossings(cdf, q[above], scale_s)
    return result


def _crossings(cdf: Cdf, levels: Floats, scale_s: float) -> Floats:
    high: Floats = np.full(len(levels), scale_s, float)
    low: Floats = np.zeros(len(levels))
    while (short := cdf(high) < levels).any():
        low[short] = high[short]
        high[short] *= 4.0
    for _ in range(MOST_ROUNDS):
        if (high - low <= NARROW * high).all():
            break
        grid = np.linspace(low, high, PARTS + 1, axis=1)
        reached = cdf(grid.ravel()).reshape(grid.shape) >= levels[:, None]
        reached[:, -1] = True  # it was, a round ago
        first = np.maximum(reached.argmax(axis=1), 1)
        rows = np.arange(len(levels))
        low, high = grid[rows, first - 1], grid[rows, first]
    return high
