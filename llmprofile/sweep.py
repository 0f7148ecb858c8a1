"""Client and server told apart from reported latencies alone, across runs: rates and numbers of processes.

A client's queue depends on the rate of each process, a server's latency on the rate of all. Different numbers of
processes at an equal rate tell them apart; rates alone don't.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import f as fisher

from llmprofile.errors import UsageError, positive
from llmprofile.markup import card
from llmprofile.units import show_rate, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SAME_RATE = 0.02
"""Rates that differ by no more than this share count as one rate of the server's."""
LEAST_LOAD, MOST_LOAD = 0.002, 0.9995
"""Utilisations of the busiest process, between which E[S] is looked for."""
MOST_SCV = 1000.0
GRID = 400
ZOOMS = 5
LEVEL = 0.95


@dataclass(frozen=True, eq=False)
class SweepFit:
    """Server latency, E[S] and c² of a client, from mean latencies that it reported.

    Attributes
    ----------
    parameters : DataFrame
        `mean_service_s`, `scv`, and a `server_s` for each of the server's rates: `estimate`, and 95 % interval `lo`,
        `hi`. NaN for what the latencies don't tell.
    points : DataFrame
        The data, and what the fit makes of each: `rate_per_s`, `processes`, `latency_s`, `fitted_s`, `server_s`,
        `client_s` (wait and service), `utilisation` of each process.
    sentences : tuple of str
        What could not be told apart, what was taken for granted, and where the intervals come from.
    """

    parameters: pd.DataFrame
    points: pd.DataFrame
    sentences: tuple[str, ...]

    @property
    def mean_service_s(self) -> float:
        return float(self.parameters["estimate"].iloc[0])

    @property
    def scv(self) -> float:
        return float(self.parameters["estimate"].iloc[1])

    def __repr__(self) -> str:
        return "\n".join([*(frame.to_string() for frame in self._tables()), *self.sentences])

    def _repr_html_(self) -> str:
        service, scv = (str(cell) for cell in self._tables()[0]["estimate"][:2])
        head = "Client and server are not told apart" if service == "–" else f"E[S] is {service}, c² {scv}"
        return card(head, self.sentences, self._tables())

    def _tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        rows = [_shown(str(name), *map(float, row)) for name, *row in self.parameters.itertuples()]
        shown = pd.DataFrame(rows, self.parameters.index, ["estimate", "95 % interval"]).rename_axis(None)
        points = self.points.copy().astype(object)
        points["rate_per_s"] = self.points["rate_per_s"].map(show_rate)
        points["utilisation"] = self.points["utilisation"].map(lambda rho: f"{rho:.2f}" if rho == rho else "–")
        for name in ("latency_s", "fitted_s", "server_s", "client_s"):
            points[name] = self.points[name].map(show_time)
        return shown, points.rename(columns=lambda name: str(name).removesuffix("_s").removesuffix("_per"))


def _shown(name: str, value: float, low: float, high: float) -> tuple[str, str]:
    form = "{:.3g}".format if name == "scv" else show_time
    return form(value) if value == value else "–", f"[{form(low)}, {form(high)}]" if low == low else "–"


@dataclass(frozen=True, eq=False)
class _Data:
    """Points, their weights, and which of the server's levels each has."""

    job_rate_per_s: Floats  # of one process
    latency_s: Floats
    weight: Floats
    level: Ints

    @property
    def levels(self) -> int:
        return int(self.level.max()) + 1

    @property
    def freedom(self) -> int:
        return len(self.latency_s) - self.levels - 2

    def server_s(self, client_s: Floats) -> Floats:
        """Best level of the server for a client's times, (…, n) to (…, levels)."""
        member = (self.level[:, None] == np.arange(self.levels)) * self.weight[:, None]
        return ((self.latency_s - client_s) @ member) / member.sum(axis=0)

    def parabola(self, service_s: Floats) -> tuple[Floats, Floats, Floats]:
        """Weighted sum of squares at the best levels, for each E[S]: a − 2 b c² + d (c²)² in the c² of the service."""
        constant_s = client_time_s(self.job_rate_per_s, service_s[:, None], np.zeros(()))
        slope_s = client_time_s(self.job_rate_per_s, service_s[:, None], np.ones(())) - constant_s
        missed_s = self.latency_s - constant_s - self.server_s(constant_s)[:, self.level]
        # the slope less its level: what of it no level of the server can take up
        bend_s = slope_s - (self.server_s(0 * slope_s) - self.server_s(slope_s))[:, self.level]
        products = (missed_s**2, missed_s * bend_s, bend_s**2)
        a, b, d = ((self.weight * product).sum(axis=1) for product in products)
        return a, b, d

    def profile(self, service_s: Floats) -> tuple[Floats, Floats]:
        """For each E[S] the c² from 0 up that fits best, and the sum of squares there."""
        a, b, d = self.parabola(service_s)
        scv = np.clip(b / d, 0, MOST_SCV)
        return scv, np.maximum(a - 2 * b * scv + d * scv**2, 0.0)


def client_time_s(job_rate_per_s: Floats, service_s: Floats, scv: Floats) -> Floats:
    """Wait and service of a job by Pollaczek and Khinchine, seconds; for ρ < 1.

    Examples
    --------
    >>> client_time_s(np.array([5000.0]), np.array(100e-6), np.array(1.0)).round(9).tolist()
    [0.0002]
    """
    rho = job_rate_per_s * service_s
    return service_s * (1 + rho * (1 + scv) / (2 * (1 - rho)))


def fit_sweep(
    rate_per_s: npt.ArrayLike,
    latency_s: npt.ArrayLike,
    processes: npt.ArrayLike,
    jobs_per_request: float = 1,
) -> SweepFit:
    """Tell a client's queue from its server's latency, from mean latencies at several rates and numbers of processes.

    The model: latency = server's + wait and service of one job in an M/G/1 queue whose jobs come at
    rate × `jobs_per_request` / processes. Where rates occur with several numbers of processes the server's latency
    may be another at each rate; where none does it is taken to be the same at all, and the result says so.

    Parameters
    ----------
    rate_per_s, latency_s, processes : (n,) array
        Rate of requests, mean latency that was reported, and number of processes, of each run.
    jobs_per_request : float
        How many things a client's loop has to do for a request: its events and the send.

    Returns
    -------
    SweepFit
        NaN for what the data don't tell: with one number of processes, client and server stay together.

    Raises
    ------
    UsageError
        Arrays of different lengths, fewer than four points, numbers that are not above 0.

    Notes
    -----
    Least squares of relative errors. Intervals are those of the profile likelihood: all values at which the sum of
    squares, at the best of all others, is below its least times 1 + F/ν, F the quantile of Fisher's law with 1 and ν
    degrees of freedom. Source: Bates and Watts, Nonlinear Regression Analysis (1988), 6.1. They cover E[S] in 94 to
    97 % where each latency errs by the same share. Queues err by more near saturation: with two numbers of processes up
    to ρ = 0.9 and 100,000 jobs a run, intervals cover in 95 % where the server's means err by 0.05 %, in 90 % where by
    0.01 %, and in 43 % where these don't err at all.

    Examples
    --------
    >>> rate_per_s, processes = np.array([100, 200, 300, 360] * 2), np.repeat([1, 2], 4)
    >>> rho = rate_per_s * 50 / processes * 50e-6
    >>> latency_s = 0.05 + 50e-6 * (1 + rho / (1 - rho))
    >>> fit = fit_sweep(rate_per_s, latency_s, processes, jobs_per_request=50)
    >>> round(fit.mean_service_s * 1e6, 1), round(fit.scv, 2)
    (50.0, 1.0)
    """
    rates, latencies, workers = _checked(rate_per_s, latency_s, processes)
    positive("jobs_per_request", jobs_per_request)
    levels = _levels(rates)
    if len(np.unique(workers)) == 1:
        return _together(rates, latencies, workers, levels)
    shared = [len(np.unique(workers[levels == k])) > 1 for k in range(levels.max() + 1)]
    constant = not any(shared)
    data = _Data(
        job_rate_per_s=rates * jobs_per_request / workers,
        latency_s=latencies,
        weight=1 / latencies**2,
        level=np.zeros_like(levels) if constant else levels,
    )
    if data.freedom < 0:
        raise UsageError(
            f"{len(rates)} points can't tell {data.levels} server latencies, E[S] and c²; "
            "give more numbers of processes at each rate"
        )
    sentences = [_ASSUMED] if constant else []
    return _separated(data, rates, workers, sentences)


_ASSUMED = (
    "No rate occurs with two numbers of processes, so the server's latency was taken to be the same at all rates; "
    "if it isn't, what it grows by counts as the client's."
)

_INTERVALS = (
    "Intervals: profile likelihood, {} degrees of freedom, each latency taken to err by the same share. Where a "
    "process can hardly keep up it errs by more, so that they are too narrow; repeated runs help."
)


def _checked(rate_per_s: npt.ArrayLike, latency_s: npt.ArrayLike, processes: npt.ArrayLike) -> tuple[Floats, ...]:
    given = {"rate_per_s": rate_per_s, "latency_s": latency_s, "processes": processes}
    try:
        arrays = {name: np.asarray(values, float) for name, values in given.items()}
    except (TypeError, ValueError):
        raise UsageError("rate_per_s, latency_s and processes must be arrays of numbers") from None
    lengths = {array.shape for array in arrays.values()}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise UsageError("rate_per_s, latency_s and processes must be arrays of one length, a value a run")
    for name, array in arrays.items():
        if not (np.isfinite(array) & (array > 0)).all():
            raise UsageError(f"{name} must hold finite numbers above 0 only")
    if np.any(arrays["processes"] % 1):
        raise UsageError("processes must hold whole numbers only")
    if len(arrays["latency_s"]) < 4:
        raise UsageError(f"a sweep needs at least 4 runs; not {len(arrays['latency_s'])}")
    return tuple(arrays.values())


def _levels(rates: Floats) -> Ints:
    """A number for each rate, the same for rates that are as good as one."""
    order = np.argsort(rates)
    apart = np.diff(rates[order]) > SAME_RATE * rates[order][:-1]
    levels = np.empty(len(rates), np.int64)
    levels[order] = np.concatenate([[0], np.cumsum(apart)])
    return levels


def _together(rates: Floats, latencies: Floats, workers: Floats, levels: Ints) -> SweepFit:
    """What is known with one number of processes: the sum."""
    names = ["mean_service_s", "scv", *_server_names(rates, levels)]
    parameters = pd.DataFrame(np.nan, names, ["estimate", "lo", "hi"])
    points = pd.DataFrame({"rate_per_s": rates, "processes": workers.astype(int), "latency_s": latencies})
    points[["fitted_s", "server_s", "client_s", "utilisation"]] = np.nan
    sentence = (
        "With one number of processes client and server can't be told apart: latency_s is both together. Repeat a rate "
        "with another number of processes."
    )
    return SweepFit(parameters, points, (sentence,))


def _server_names(rates: Floats, levels: Ints) -> list[str]:
    if levels.max() == 0 and np.ptp(rates) > SAME_RATE * rates.min():
        return ["server_s"]
    return [f"server_s at {show_rate(float(rates[levels == k].mean()))}" for k in range(levels.max() + 1)]


def _separated(data: _Data, rates: Floats, workers: Floats, sentences: list[str]) -> SweepFit:
    service_s, scv = _best(data)
    client_s = client_time_s(data.job_rate_per_s, np.array(service_s), np.array(scv))
    server_s = data.server_s(client_s)
    bounds, open_ends = _bounds(data, service_s, scv)
    names = ["mean_service_s", "scv", *_server_names(rates, data.level)]
    estimates = np.array([service_s, scv, *server_s])
    ends = {"lo": np.minimum(bounds[:, 0], estimates), "hi": np.maximum(bounds[:, 1], estimates)}
    parameters = pd.DataFrame({"estimate": estimates, **ends}, names)
    points = pd.DataFrame({"rate_per_s": rates, "processes": workers.astype(int), "latency_s": data.latency_s})
    points["fitted_s"], points["server_s"] = client_s + server_s[data.level], server_s[data.level]
    points["client_s"], points["utilisation"] = client_s, data.job_rate_per_s * service_s
    if data.freedom == 0:
        sentences = [*sentences, "As many unknowns as points: the fit passes through all, and there are no intervals."]
        return SweepFit(parameters, points, tuple(sentences))
    sentences = [*sentences, *_untold(parameters, points, open_ends, float(data.job_rate_per_s.max()))]
    return SweepFit(parameters, points, (*sentences, _INTERVALS.format(data.freedom)))


def _untold(parameters: pd.DataFrame, points: pd.DataFrame, open_ends: set[str], fastest: float) -> list[str]:
    """Blank what the rates don't tell, and say it."""
    said = []
    if "service" in open_ends:
        most_s = float(parameters["hi"].iloc[0])
        limited = f"E[S] is no more than {show_time(most_s)}. " if most_s * fastest < 0.99 else ""
        parameters.loc[:, :] = np.nan
        points[["server_s", "client_s", "utilisation"]] = np.nan
        said.append(
            "The rates don't bend the curve enough: E[S] and c² can't be told apart, nor either from the server's "
            f"latency. {limited}Go nearer to the rate at which a process can't keep up, or repeat the runs."
        )
    elif "scv" in open_ends:
        parameters.loc["scv"] = np.nan
        said.append(f"c² can't be told, as {MOST_SCV:,.0f} still fits; the lower end of E[S] is the one for that c².")
    return said


def _grid(data: _Data) -> Floats:
    """Where E[S] is looked for at first: nearly nothing up to a busiest process that can hardly keep up."""
    low, high = np.geomspace(LEAST_LOAD, 0.5, GRID), np.geomspace(0.5, 1 - MOST_LOAD, GRID)
    return np.concatenate([low, 1 - high[1:]]) / float(data.job_rate_per_s.max())


def _best(data: _Data) -> tuple[float, float]:
    services_s = _grid(data)
    for _ in range(ZOOMS):
        at = int(data.profile(services_s)[1].argmin())
        services_s = np.linspace(services_s[max(at - 1, 0)], services_s[min(at + 1, len(services_s) - 1)], GRID)
    scv, misfit = data.profile(services_s)
    at = int(misfit.argmin())
    return float(services_s[at]), float(scv[at])


def _bounds(data: _Data, service_s: float, scv: float) -> tuple[Floats, set[str]]:
    """Profile intervals of E[S], c² and each level, (levels + 2, 2), and which of the first two have no end."""
    if data.freedom == 0:
        return np.full((data.levels + 2, 2), np.nan), set()
    least = float(data.profile(np.array([service_s]))[1][0])
    allowed = least * (1 + float(fisher.ppf(LEVEL, 1, data.freedom)) / data.freedom)
    services_s = whole_s = _grid(data)
    for _ in range(2):  # the second time between the ends, which the first finds to a step
        services_s = np.sort(np.append(services_s, service_s))
        inside = np.flatnonzero((data.profile(services_s)[1] <= allowed) | (services_s == service_s))
        ends_s = services_s[max(inside[0] - 1, 0)], services_s[min(inside[-1] + 1, len(services_s) - 1)]
        services_s = np.linspace(*ends_s, GRID)
    a, b, d = data.parabola(services_s)
    half = np.sqrt(np.maximum(allowed - (a - b**2 / d), 0) / d)
    low, high = np.clip(b / d - half, 0, MOST_SCV), np.clip(b / d + half, 0, MOST_SCV)
    allows = data.profile(services_s)[1] <= allowed
    ends_scv = min([scv, *low[allows]]), max([scv, *high[allows]])
    open_ends = {"service"} if ends_s[0] <= whole_s[0] or ends_s[1] >= whole_s[-1] else set()
    open_ends |= {"scv"} if ends_scv[1] >= MOST_SCV else set()
    scvs = np.linspace(low[allows], high[allows], 41, axis=1)
    return np.array([ends_s, ends_scv, *_server_bounds(data, services_s[allows], scvs, allowed)]), open_ends


def _server_bounds(data: _Data, services_s: Floats, scvs: Floats, allowed: float) -> Floats:
    """For each level, how far it can move at any client before the sum of squares is more than is allowed."""
    a, b, d = (column[:, None] for column in data.parabola(services_s))
    spare = np.maximum(allowed - (a - 2 * b * scvs + d * scvs**2), 0)
    server_s = data.server_s(client_time_s(data.job_rate_per_s, services_s[:, None, None], scvs[..., None]))
    reach_s = np.sqrt(spare[..., None] / np.bincount(data.level, data.weight, data.levels))
    low, high = (server_s + sign * reach_s for sign in (-1, 1))
    return np.stack([low.min(axis=(0, 1), initial=np.inf), high.max(axis=(0, 1), initial=-np.inf)], axis=1)
