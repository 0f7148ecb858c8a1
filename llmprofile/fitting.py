"""From a run to the queue that its client was: M/G/1 or batches, judged by the times that the run measured.

Everything that a fitted queue predicts has also been measured. Times are predicted for one worker's queue: a job
waits, its loop may have to wake, it is served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import t as student

from llmprofile.batches import DXG1, MXG1
from llmprofile.errors import UsageError, positive
from llmprofile.jobs import VACATION_S, Arrivals, Costs, Jobs, Steady, dispersion, find_batches, mean_of
from llmprofile.markup import card
from llmprofile.metrics import BLOCKS_AT_LEAST
from llmprofile.queueing import MG1
from llmprofile.records import Run
from llmprofile.units import ns_to_s, show_rate, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

WITHIN = 0.20
"""A model fits when its mean is this near to the measured one."""
MUCH_AWAY = 0.01
"""A share of the time off the processor above which a fit tells as much of the machine as of the client."""
BUNCHED = 2.0
"""Arrivals with an index of dispersion above this are no Poisson stream, over the windows in which the queue lives."""
SIMULATED_JOBS = 200_000
QUANTILES = {"p90": 0.90, "p99": 0.99}
MG1_NAME, WOKEN_NAME, TRACE_NAME = "M/G/1", "M/G/1 with wake-up", "first come, first served, at the measured arrivals"
PERIODIC_NAME, POISSON_NAME = "D^X/G/1 with wake-up", "M^X/G/1 with wake-up"


@dataclass(frozen=True, eq=False)
class FitResult:
    """A queue fitted to a run, and how well it predicts what the run measured.

    Attributes
    ----------
    law : str
        The queue's name.
    model : MG1, MXG1 or DXG1
        One worker's queue, from all workers' jobs; without wake-ups.
    parameters : DataFrame
        By worker ("pooled", 0, 1, …) and name: `estimate`, standard error `se`, 95 % interval `lo`, `hi`.
    times : DataFrame
        `mean`, `p90`, `p99` of the events' time in the client: `predicted_s`, `predicted_se_s`, `measured_s`,
        `measured_se_s`. The prediction includes the wake-ups.
    rivals : DataFrame
        What each model says of the mean: `mean_s`, `error` (relative), `fits`.
    dispersion : DataFrame
        Index of dispersion of the arrivals by window: `window_s`, `pooled`, and one column a worker.
    verdict : str
        Whether the model fits, and which does when it doesn't.
    notes : tuple of str
    client : str
    """

    law: str
    model: MG1 | MXG1 | DXG1
    parameters: pd.DataFrame
    times: pd.DataFrame
    rivals: pd.DataFrame
    dispersion: pd.DataFrame
    verdict: str
    notes: tuple[str, ...]
    client: str
    _load: Arrivals = field(repr=False)
    _costs: Costs = field(repr=False)
    _measured_s: Floats = field(repr=False)
    _model_s: Floats = field(repr=False)

    def __repr__(self) -> str:
        tables = [frame.to_string() for frame in self._tables()]
        return "\n".join([f"{self.law} fitted to a {self.client} client", self.verdict, *tables, *self.notes])

    def _repr_html_(self) -> str:
        return card(self.verdict, [f"{self.law} fitted to a {self.client} client"], self._tables(), self.notes)

    def _tables(self) -> list[pd.DataFrame]:
        """What is shown: parameters, times, rivals, dispersion, in units that read best."""
        workers = self.parameters.index.get_level_values("worker").unique()
        shown = {w: _shown_parameters(self.parameters.loc[w]) for w in workers if w == "pooled" or len(workers) <= 5}
        times = pd.DataFrame({w: _with_error(self.times, w) for w in ("predicted", "measured")}, self.times.index)
        said = self.rivals
        rivals = pd.DataFrame({"mean": said["mean_s"].map(show_time), "error": said["error"].map(_percent)})
        curve = self.dispersion.drop(columns="window_s").map("{:.3g}".format)
        curve.index = pd.Index([f"{n}: {show_time(s)}" for n, s in self.dispersion["window_s"].items()])
        curve = curve[[w for w in curve.columns if w in shown]].add_prefix("dispersion ")
        return [pd.DataFrame(shown).rename_axis(None), times, rivals, curve]

    def predict(self, run: Run) -> pd.DataFrame:
        """What the fitted costs predict for another run, at its own rate and batches, and what that run measured.

        Parameters
        ----------
        run : Run
            Of the same client.

        Returns
        -------
        DataFrame
            As `times`; `predicted_se_s` is missing.

        Raises
        ------
        UsageError
            A run of another client, whose costs are others.

        Examples
        --------
        >>> fit_mg1(run).predict(run).index.tolist()
        ['mean', 'p90', 'p99']
        """
        if run.client != self.client:
            raise UsageError(
                f"the run to predict must be of a {self.client} client, as the fitted one; not {run.client}"
            )
        part = Steady.of(run)
        load = part.arrivals(part.threshold_s() if self.law != MG1_NAME else 0.0)
        predicted_s, _ = _predict(load, self._costs)
        return _times(predicted_s, part)

    def mean_time_s(self, jobs_per_s: float) -> float:
        """Mean time in the client of events that arrive alike at another rate of jobs a worker; infinite from ρ = 1.

        Examples
        --------
        >>> fit = fit_mg1(run)
        >>> fit.mean_time_s(10) < fit.mean_time_s(5000)
        True
        """
        return _predict(self._load.at_rate(positive("jobs_per_s", jobs_per_s)), self._costs)[0]["mean"]

    def qq(self, points: int = 199) -> pd.DataFrame:
        """Quantiles of the events' time in the client: `q`, `measured_s`, `model_s`; along the diagonal when it fits.

        Examples
        --------
        >>> fit_mg1(run).qq(9)["q"].round(1).tolist()
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
        """
        q = np.arange(1, points + 1) / (points + 1)
        columns = {"measured_s": np.quantile(self._measured_s, q), "model_s": _quantiles(self._model_s, q)}
        return pd.DataFrame({"q": q, **columns})


def fit_mg1(run: Run) -> FitResult:
    """Fit the queue of the paper, M/G/1: Poisson jobs, one server, any law of service.

    Parameters
    ----------
    run : Run
        With kernel stamps.

    Returns
    -------
    FitResult
        λ, E[S], c² and ρ of each worker and of all pooled, the wake-up, and the mean wait by Pollaczek and Khinchine.

    Raises
    ------
    UsageError
        No event carries a kernel stamp.

    Notes
    -----
    Standard errors are those of a jackknife over 20 to 50 blocks of time (Künsch 1989): neighbours share a queue.
    The wake-up is a server's set-up: it adds E[D] + λE[D²]/2, over 1 + λE[D], to the mean (Welch 1964).

    Examples
    --------
    >>> fit = fit_mg1(run)
    >>> 0 < fit.model.utilisation < 1
    True
    """
    return _fit(run, batches=False)


def fit_batch(run: Run) -> FitResult:
    """Fit a queue whose jobs come in batches: D^X/G/1 when these are periodic, as decode steps are, else M^X/G/1.

    Events of one worker are of one batch when they are no further apart than a threshold, which is the emptiest octave
    between short and long gaps (`jobs.batch_threshold_s`). Batches are periodic when the c² of their gaps is below 0.5.
    A server sends the events of a batch one after the other: predictions keep their mean spacing, the model has none.

    Parameters
    ----------
    run : Run
        With kernel stamps.

    Raises
    ------
    UsageError
        No event carries a kernel stamp.

    Examples
    --------
    >>> bool(fit_batch(run).parameters.loc["pooled", "estimate"]["batch_mean"] >= 1)
    True
    """
    return _fit(run, batches=True)


def _fit(run: Run, batches: bool) -> FitResult:
    part = Steady.of(run)
    threshold_s, costs = part.threshold_s(), part.costs()
    load, batch_load = part.arrivals(0.0), part.arrivals(threshold_s)
    parameters = _parameters(part, threshold_s if batches else None)
    predicted_s, model_s = _predict(batch_load if batches else load, costs)
    if not batches:  # which has a standard error
        predicted_s["mean"] = _cell(parameters, ("pooled", "mean_time_s"), "estimate")
    times = _times(predicted_s, part, math.nan if batches else _cell(parameters, ("pooled", "mean_time_s"), "se"))
    rivals = _rivals(times, load, batch_load, costs, part)
    curve, left_out = _dispersion(run, part, parameters)
    law = MG1_NAME if not batches else (PERIODIC_NAME if batch_load.periodic else POISSON_NAME).split()[0]
    return FitResult(
        law=law,
        model=_model(law, load, batch_load, costs),
        parameters=parameters,
        times=times,
        rivals=rivals,
        dispersion=curve,
        verdict=_verdict(law, rivals, times, curve),
        notes=tuple(filter(None, [*_notes(part, threshold_s if batches else None, batch_load), left_out])),
        client=run.client,
        _load=batch_load if batches else load,
        _costs=costs,
        _measured_s=part.event_times()[0],
        _model_s=model_s,
    )


def _model(law: str, load: Arrivals, batch_load: Arrivals, costs: Costs) -> MG1 | MXG1 | DXG1:
    if law == MG1_NAME:
        return MG1(load.rate_per_s, costs.service_s)
    rate_per_s, sizes = batch_load.batch_rate_per_s, batch_load.sizes
    return (
        DXG1(1 / rate_per_s, sizes, costs.service_s)
        if batch_load.periodic
        else MXG1(rate_per_s, sizes, costs.service_s)
    )


# estimates and their errors


def _parameters(part: Steady, threshold_s: float | None) -> pd.DataFrame:
    """Estimates with standard errors for all workers pooled and for each; with batches when there is a threshold."""
    totals = {str(jobs.worker): _totals(part, jobs, threshold_s) for jobs in part.loops}
    pooled = {name: np.sum([t[name] for t in totals.values()], axis=0) for name in next(iter(totals.values()))}
    frames = {who: _jackknife(t, part.too_short) for who, t in {"pooled": pooled, **totals}.items()}
    return pd.concat(frames, names=["worker", "parameter"])


def _totals(part: Steady, jobs: Jobs, threshold_s: float | None) -> Columns:
    """Sums over each block of time, from which every parameter follows."""
    blocks, block = part.blocks, part.block_of(jobs.arrival_ns)
    s, d, event = jobs.service_s, np.nan_to_num(jobs.wakeup_s), ~jobs.is_send
    columns = {"jobs": np.ones(len(jobs)), "s": s, "s2": s**2, "wakes": ~np.isnan(jobs.wakeup_s), "d": d, "d2": d**2}
    columns |= {"events": event, "event_s": s * event, "vacation_s": s * jobs.is_vacation}
    totals = {name: np.bincount(block, values.astype(float), blocks) for name, values in columns.items()}
    totals["span_s"] = np.full(blocks, part.span_s / blocks)
    if threshold_s is None:
        return totals
    starts_ns, sizes = find_batches(jobs, threshold_s)
    gaps_s, block = np.diff(ns_to_s(starts_ns - part.from_ns), prepend=np.nan), part.block_of(starts_ns)
    known, gaps_s = ~np.isnan(gaps_s), np.nan_to_num(gaps_s)
    columns = {
        "batches": np.ones(len(sizes)),
        "x": sizes,
        "x2": sizes**2,
        "gaps": known,
        "gap": gaps_s,
        "gap2": gaps_s**2,
    }
    return totals | {name: np.bincount(block, values.astype(float), blocks) for name, values in columns.items()}


def _statistics(totals: Columns) -> Columns:
    """The parameters, from totals of any shape."""
    rate_per_s, mean_s = totals["jobs"] / totals["span_s"], totals["s"] / totals["jobs"]
    second_s2, rho = totals["s2"] / totals["jobs"], totals["s"] / totals["span_s"]
    scv = second_s2 / mean_s**2 - 1
    wakes = np.maximum(totals["wakes"], 1)
    wakeup_s, wakeup_s2 = totals["d"] / wakes, totals["d2"] / wakes
    wait_s = np.where(rho < 1, rate_per_s * second_s2 / (2 * (1 - rho)), np.inf)
    woken_s = (wakeup_s + rate_per_s * wakeup_s2 / 2) / (1 + rate_per_s * wakeup_s)
    found = {"rate_per_s": rate_per_s, "mean_service_s": mean_s, "scv": scv, "utilisation": rho, "wakeup_s": wakeup_s}
    found |= {
        "slept_share": totals["wakes"] / totals["jobs"],
        "vacation_share": totals["vacation_s"] / totals["span_s"],
    }
    if "batches" not in totals:
        time_s = wait_s + woken_s + totals["event_s"] / totals["events"]
        return found | {"mean_wait_s": wait_s, "mean_time_s": time_s}
    batch_mean, gap_s = totals["x"] / totals["batches"], totals["gap"] / totals["gaps"]
    found |= {"batches_per_s": 1 / gap_s, "batch_mean": batch_mean}
    found["batch_scv"] = totals["x2"] / totals["batches"] / batch_mean**2 - 1
    return found | {"gap_scv": totals["gap2"] / totals["gaps"] / gap_s**2 - 1}


def _jackknife(totals: Columns, too_short: bool) -> pd.DataFrame:
    """Estimates, and errors by leaving out a block of time at a time; intervals on the logarithm: all are positive."""
    blocks = len(totals["jobs"])
    with np.errstate(divide="ignore", invalid="ignore"):
        estimates = pd.Series(
            {name: float(v) for name, v in _statistics({n: v.sum() for n, v in totals.items()}).items()}
        )
        without = pd.DataFrame(_statistics({name: v.sum() - v for name, v in totals.items()}))
        se = np.sqrt((blocks - 1) / blocks * ((without - without.mean()) ** 2).sum(skipna=False))
        spread = np.exp(float(student.ppf(0.975, blocks - 1)) * se / estimates.where(estimates > 0))
    known = pd.Series(np.nan if too_short else 1.0, estimates.index)
    return pd.DataFrame(
        {"estimate": estimates, "se": se, "lo": known * estimates / spread, "hi": known * estimates * spread}
    )


# predictions


def _predict(load: Arrivals, costs: Costs) -> tuple[dict[str, float], Floats]:
    """Mean, p90, p99 of the events' time in the client, and a simulated sample of it.

    Means are exact where a formula is known, which is the M/G/1 with set-up.
    """
    times_s = _simulated(load, costs)
    predicted = {"mean": float(times_s.mean()), **{n: float(_quantiles(times_s, q)) for n, q in QUANTILES.items()}}
    if not load.batched:
        predicted["mean"] = _mg1_mean_s(load, costs) + _woken_s(load, costs)
    return predicted, times_s


def _mg1_mean_s(load: Arrivals, costs: Costs) -> float:
    rho = load.rate_per_s * float(costs.service_s.mean())
    if rho >= 1:
        return math.inf
    return load.rate_per_s * float((costs.service_s**2).mean()) / (2 * (1 - rho)) + costs.event_mean_s


def _woken_s(load: Arrivals, costs: Costs) -> float:
    d = costs.wakeup_s if len(costs.wakeup_s) else np.zeros(1)
    return float((d.mean() + load.rate_per_s * (d**2).mean() / 2) / (1 + load.rate_per_s * d.mean()))


def _simulated(load: Arrivals, costs: Costs) -> Floats:
    """Times in the client of events that arrive as the model says; infinite where its queue has no end."""
    if load.rate_per_s * costs.service_s.mean() >= 1:
        return np.full(2, np.inf)
    rng = np.random.default_rng(0)
    sizes = rng.choice(load.sizes, max(100, int(SIMULATED_JOBS / load.sizes.mean())))
    gap_s = 1 / load.batch_rate_per_s
    gaps_s = np.full(len(sizes), gap_s) if load.periodic else rng.exponential(gap_s, len(sizes))
    starts_s, place = np.cumsum(gaps_s), np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return _through(np.sort(np.repeat(starts_s, sizes) + place * load.spacing_s), costs, rng)


def _through(at_s: Floats, costs: Costs, rng: np.random.Generator) -> Floats:
    """Send jobs through a loop that serves first come, first served, and wakes when it slept; the events' times."""
    job = rng.integers(0, len(costs.service_s), len(at_s))
    wakeup_s = rng.choice(costs.wakeup_s, len(at_s)) if len(costs.wakeup_s) else np.zeros(len(at_s))
    done_s, free_s = [], -math.inf
    for arrived_s, service_s, woken_s in zip(
        at_s.tolist(), costs.service_s[job].tolist(), wakeup_s.tolist(), strict=True
    ):
        free_s = (free_s if free_s > arrived_s else arrived_s + woken_s) + service_s
        done_s.append(free_s)
    warm = len(at_s) // 10
    return (np.array(done_s) - at_s)[warm:][~costs.is_send[job][warm:]]


def _quantiles(values: Floats, q: Any) -> Any:
    return np.quantile(values, q) if np.isfinite(values).all() else np.full(np.shape(q), np.inf)


def _times(predicted_s: dict[str, float], part: Steady, mean_se_s: float = math.nan) -> pd.DataFrame:
    """Predicted and measured figures of the events' time in the client."""
    times_s, block = part.event_times()

    def figures(values: Floats) -> list[float]:
        return [float(values.mean()), *np.quantile(values, list(QUANTILES.values())).tolist()]

    without = np.array([figures(times_s[block != b]) for b in range(part.blocks) if (block != b).any()])
    se = np.sqrt((len(without) - 1) / len(without) * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    columns = {"predicted_s": list(predicted_s.values()), "predicted_se_s": [mean_se_s, *[math.nan] * len(QUANTILES)]}
    return pd.DataFrame({**columns, "measured_s": figures(times_s), "measured_se_s": se}, index=["mean", *QUANTILES])


def _cell(frame: Any, row: Any, column: str) -> float:
    return float(frame.at[row, column])


# judgement


def _rivals(times: pd.DataFrame, load: Arrivals, batch_load: Arrivals, costs: Costs, part: Steady) -> pd.DataFrame:
    """What each model says of the mean; batches where they stand out."""
    means = {MG1_NAME: _mg1_mean_s(load, costs), WOKEN_NAME: _mg1_mean_s(load, costs) + _woken_s(load, costs)}
    if batch_load.batched:
        name = PERIODIC_NAME if batch_load.periodic else POISSON_NAME
        means[name] = float(_simulated(batch_load, costs).mean())
    rng, n = np.random.default_rng(0), sum(len(jobs) for jobs in part.loops)
    traces = [np.sort(ns_to_s(jobs.arrival_ns - part.from_ns)) for jobs in part.loops]
    parts = [_through(trace, costs, rng) * (len(trace) / n) for trace in traces]
    means[TRACE_NAME] = float(sum(times_s.mean() for times_s in parts if len(times_s)))
    measured_s = _cell(times, "mean", "measured_s")
    frame = pd.DataFrame({"mean_s": pd.Series(means)})
    frame["error"] = frame["mean_s"] / measured_s - 1
    frame["fits"] = frame["error"].abs() <= WITHIN
    return frame


def _dispersion(run: Run, part: Steady, parameters: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The curve over windows that mean something to this run, and a sentence on those that are too long for it."""
    names = ("rate_per_s", "mean_service_s", "utilisation")
    rate_per_s, mean_s, rho = (_cell(parameters, ("pooled", name), "estimate") for name in names)
    relaxed_s = mean_s / max(1 - rho, 1e-6) ** 2
    windows = {"10 gaps": 10 / rate_per_s, "E[S]/(1−ρ)²": relaxed_s, "ITL": mean_of(run.requests["tpot_s"])}
    windows |= {"request": mean_of(run.requests["e2e_s"]), "1 s": 1.0}
    kept = {name: window_s for name, window_s in windows.items() if 0 < window_s <= part.span_s / 10}
    everyone_ns = np.concatenate([jobs.arrival_ns for jobs in part.loops])
    streams = {"pooled": everyone_ns, **{str(jobs.worker): jobs.arrival_ns for jobs in part.loops}}
    ends = (part.from_ns, part.until_ns)
    curve = {who: [dispersion(at_ns, *ends, window_s) for window_s in kept.values()] for who, at_ns in streams.items()}
    frame = pd.DataFrame({"window_s": list(kept.values()), **curve}, index=list(kept)).sort_values("window_s")
    lost = [
        f"{name} ({show_time(s)})" if s > 0 else f"{name} (unknown)" for name, s in windows.items() if name not in kept
    ]
    return frame, f"Dispersion left out, as longer than a tenth of the run: {', '.join(lost)}." if lost else ""


def _verdict(law: str, rivals: pd.DataFrame, times: pd.DataFrame, curve: pd.DataFrame) -> str:
    """One sentence: does it fit, and which model does when it doesn't."""
    mine = WOKEN_NAME if law == MG1_NAME else next((n for n in rivals.index if n.startswith(law)), WOKEN_NAME)
    fitting = rivals.index[rivals["fits"]]
    said = f"{mine} puts the mean time in the client at {show_time(_cell(rivals, mine, 'mean_s'))} where "
    said += f"{show_time(_cell(times, 'mean', 'measured_s'))} was measured ({_error(rivals, mine)}): "
    bunched = float(curve.drop(columns=["window_s", "pooled"]).iloc[0].mean()) if len(curve) else math.nan
    poisson = mine != WOKEN_NAME or not bunched > BUNCHED
    if mine in fitting and poisson:
        return said + "it fits."
    measured_s, se = _cell(times, "mean", "measured_s"), _cell(times, "mean", "measured_se_s")
    unsure = mine not in fitting and abs(_cell(rivals, mine, "mean_s") - measured_s) <= 2 * se
    if unsure:
        said += f"it can't be ruled out, as the measured mean has a standard error of {show_time(se)}"
    else:
        said += "near" if mine in fitting else "it does not fit"
    if (unsure or mine in fitting) and not poisson:
        said += f", but arrivals are no Poisson stream (index of dispersion {bunched:.1f} over "
        said += f"{show_time(float(curve['window_s'].iloc[0]))}), so don't count on it at another rate"
    others = [name for name in fitting if name not in (MG1_NAME, WOKEN_NAME, mine)]
    if others:  # batches, if they do, before what only this run's own arrivals explain
        return f"{said}; {others[0]} fits ({_error(rivals, others[0])})."
    if unsure or mine in fitting:
        return f"{said}."
    return f"{said}, nor does any first come, first served: an event loop is a gated queue; see fit_loop."


def _error(rivals: pd.DataFrame, name: str) -> str:
    return _percent(_cell(rivals, name, "error"))


def _notes(part: Steady, threshold_s: float | None, batch_load: Arrivals) -> list[str]:
    wakeups_s = part.costs().wakeup_s
    late_s, spent_s = wakeups_s[wakeups_s > VACATION_S], part.span_s * len(part.loops)
    vacations_s = np.concatenate([jobs.service_s[jobs.is_vacation] for jobs in part.loops])
    unplaced = sum(jobs.unplaced for jobs in part.loops)
    notes = [part.note]
    if part.too_short:
        notes.append(
            f"Too short for intervals, which take {BLOCKS_AT_LEAST} blocks of {show_time(part.block_s)}; "
            "standard errors are those of shorter blocks, and may be too small."
        )
    if len(vacations_s):
        share = f"{vacations_s.sum() / spent_s:.1%} of the time; they count as service"
        notes.append(f"{len(vacations_s)} vacations (services off the processor), {share}.")
    if len(late_s):
        notes.append(
            f"{len(late_s)} wake-ups took more than {show_time(VACATION_S)}, {late_s.sum() / spent_s:.1%} of the time."
        )
    if vacations_s.sum() + late_s.sum() > MUCH_AWAY * spent_s:
        notes.append("The loop often had no processor: this fit tells of the machine, and holds for no quieter one.")
    if unplaced:
        notes.append(f"{unplaced} events or sends lack a stamp and are left out.")
    if threshold_s is not None:
        notes.append(
            f"Batches: events no more than {show_time(threshold_s)} apart, {show_time(batch_load.spacing_s)} on "
            f"average; c² of the gaps {batch_load.gap_scv:.2g}."
            if threshold_s
            else "No batches stand out: there is one heap of gaps, and each job is its own batch."
        )
    return notes


def _percent(share: float) -> str:
    return format(share, "+.0%") if math.isfinite(share) else "without bound"


def _with_error(times: pd.DataFrame, who: str) -> list[str]:
    pairs = zip(times[f"{who}_s"], times[f"{who}_se_s"], strict=True)
    return [show_time(value) + (f" ± {show_time(se)}" if math.isfinite(se) else "") for value, se in pairs]


def _shown_parameters(frame: pd.DataFrame) -> dict[str, str]:
    return {str(name): _shown(str(name), row["estimate"], row["se"]) for name, row in frame.iterrows()}


def _shown(name: str, value: float, se: float) -> str:
    form = show_rate if name.endswith("_per_s") else show_time if name.endswith("_s") else "{:.3g}".format
    return form(value) + (f" ± {form(se)}" if math.isfinite(se) else "")
