"""Pictures of queues and of fits: each function evaluates curves and draws them on an Axes, and estimates nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from llmprofile.errors import UsageError, one_of
from llmprofile.fitting import FitResult
from llmprofile.lindley import simulate
from llmprofile.style import (
    BLUE,
    GREY,
    INK,
    LOG_FROM,
    ORANGE,
    SERIES,
    VERMILION,
    axes_or_new,
    beside,
    key,
    level,
    log_ticks,
    milliseconds,
    name_ends,
    plain,
    say,
    styled,
)
from llmprofile.units import show_time

Floats = npt.NDArray[np.float64]

PAPERS_FACTOR = 2.3
"""By how much a single process inflates the mean TTFT, as arXiv 2605.24217 has it."""
TAIL_POINTS, TAIL = 1999, 1e-4
"""Quantiles that a fit is asked for, and the share at which a model's tail is cut off."""
CURVE_POINTS = 400
NAMES = {"MM1": "M/M/1", "MD1": "M/D/1", "MG1": "M/G/1", "MXG1": "M^X/G/1", "DXG1": "D^X/G/1"}
MARKED = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NEAR, EDGE = 1.15, 1.25
"""Windows that differ by less than the first factor are named together; the second is left beside the outer ones."""
NEVER = 1e6
"""How many times the highest finite value a curve is drawn at where the model is without bound."""


@styled
def wait_distribution(fit_or_model: Any, ax: Axes | None = None) -> Axes:
    """The share of events that take longer than a time, on a logarithmic axis: an exponential tail is a straight line.

    Of a fit, the time in the client (wait, wake-up and service) as it was measured and as the model has it, down to
    one in two thousand; of a model alone, the wait before service.

    Parameters
    ----------
    fit_or_model : FitResult, or a queue with `wait_cdf` and `wait_quantile`
    ax : Axes, optional

    Raises
    ------
    UsageError
        A model that offers no distribution.

    Examples
    --------
    >>> ax = wait_distribution(lp.MM1(rate_per_s=800, mean_service_s=0.001), lp.plots.blank_axes())
    >>> ax.get_xlabel(), round(float(ax.lines[0].get_ydata()[0]), 9)
    ('wait (ms)', 0.8)
    """
    if isinstance(fit_or_model, FitResult):
        return _measured_survival(fit_or_model, ax)
    if not hasattr(fit_or_model, "wait_cdf"):
        raise UsageError(f"fit_or_model must be a FitResult or a queue; not {fit_or_model!r}")
    return _model_survival(fit_or_model, ax)


def _measured_survival(fit: FitResult, ax: Axes | None) -> Axes:
    table, rho, ax = fit.qq(TAIL_POINTS), fit.model.utilisation, axes_or_new(ax)
    measured_s, predicted_s = (fit.times[c].to_dict()["mean"] for c in ("measured_s", "predicted_s"))
    entries = [(f"measured: mean {show_time(measured_s)}", INK)]
    curves = [("measured", INK, 2.6)]
    if np.isfinite(table["model_s"]).all():
        predicted = f"mean {show_time(predicted_s)}"
        curves.append(("model", VERMILION, 1.4))
    else:
        predicted = "can't keep up"
    entries.append((f"{fit.law} with wake-up: {predicted}", VERMILION))
    right_s = float(table[[f"{who}_s" for who, _, _ in curves]].to_numpy().max())
    _survival_axes(ax, right_s, 1 - float(table["q"].max()), "time in the client (ms)")
    for who, colour, width in curves:
        ax.plot(table[f"{who}_s"], 1 - table["q"], color=colour, lw=width, label=who)
    key(ax, entries)
    ax.set_title(f"Time of an event in the {fit.client} client at ρ = {rho:.2f}")
    return ax


def _model_survival(model: Any, ax: Axes | None) -> Axes:
    name, rho = NAMES.get(type(model).__name__, type(model).__name__), float(model.utilisation)
    right_s = max(float(model.wait_quantile(1 - TAIL)), float(model.mean_time_s))
    stable = np.isfinite(right_s) and right_s > 0
    t_s = np.linspace(0, right_s if stable else 1.0, CURVE_POINTS)
    longer, ax = 1 - np.asarray(model.wait_cdf(t_s), float), axes_or_new(ax)
    _survival_axes(ax, float(t_s[-1]), TAIL, "wait (ms)")
    ax.set_title(f"How long an event waits in {name} at ρ = {rho:.2f}")
    if stable:
        ax.plot(t_s, longer, color=VERMILION, label=name)
        key(ax, [(f"{name}: mean {show_time(model.mean_wait_s)}", VERMILION)])
    else:
        ax.set_xticks([])
        say(ax, "the queue can't keep up: waits grow without bound" if right_s > 0 else "no event waits")
    return ax


def _survival_axes(ax: Axes, right_s: float, least: float, xlabel: str) -> None:
    ax.set(xlim=(0, right_s * 1.02), yscale="log", ylim=(least, 1.0), xlabel=xlabel)
    ax.set_ylabel("share of events that take longer")
    ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:g}%"))
    ax.yaxis.set_minor_formatter(NullFormatter())


@styled
def qq(fit: FitResult, ax: Axes | None = None) -> Axes:
    """Quantiles of the measured time in the client against the model's: on the diagonal where the model is right.

    Examples
    --------
    >>> [line.get_label() for line in qq(lp.fit_mg1(run), lp.plots.blank_axes()).lines]
    ['diagonal', 'quantiles', 'p50', 'p90', 'p99']
    """
    table, ax = fit.qq(), axes_or_new(ax)
    law = f"{fit.law} with wake-up"
    ax.set(xlabel=f"time in the client by {law} (ms)", ylabel="measured time in the client (ms)")
    ax.set_title(f"Measured against model: every half percent of the {fit.client} client's events")
    if not np.isfinite(table["model_s"]).all():
        say(ax, f"{law}: the queue can't keep up (ρ = {fit.model.utilisation:.2f})")
        return ax
    ends_s = table[["measured_s", "model_s"]].to_numpy().min(), table[["measured_s", "model_s"]].to_numpy().max()
    if ends_s[0] > 0 and ends_s[1] > LOG_FROM * ends_s[0]:
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            log_ticks(axis, *ends_s)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(milliseconds))
    ax.plot(ends_s, ends_s, color=GREY, lw=0.9, ls=":", label="diagonal")
    ax.plot(table["model_s"], table["measured_s"], ".", color=BLUE, ms=4, label="quantiles")
    for name, q in MARKED.items():
        model_s, measured_s = (float(np.interp(q, table["q"], table[c])) for c in ("model_s", "measured_s"))
        ax.plot(model_s, measured_s, "o", color=VERMILION, ms=5.5, label=name)
        beside(ax, (model_s, measured_s), name, VERMILION, above=measured_s > model_s)
    for text, at, ha, va in (("slower than the model", (0.02, 0.97), "left", "top"),
                             ("faster than the model", (0.98, 0.03), "right", "bottom")):  # fmt: skip
        ax.annotate(text, at, xycoords="axes fraction", ha=ha, va=va, color=GREY, fontsize=8.5)
    return ax


@styled
def wait_against_rate(
    models: Mapping[str, Any],
    rates_per_s: npt.ArrayLike,
    measured: pd.DataFrame | None = None,
    ax: Axes | None = None,
    statistic: str = "mean_wait_s",
) -> Axes:
    """Mean wait of each model against rate, and what was measured.

    Rates at which a model can't keep up are beyond the top of the axes.

    Parameters
    ----------
    models : mapping of label to model
        A queue with a `rate_per_s` to be set, or a function of a rate that returns a queue or seconds.
    rates_per_s : (n,) float
        Where the curves are evaluated.
    measured : DataFrame, optional
        `rate_per_s` and `mean_s`; `lo_s` and `hi_s`, the ends of its interval, where there are any; `label`, whose
        model's colour a point takes.
    ax : Axes, optional
    statistic : {"mean_wait_s", "mean_time_s"}
        The wait before service, or wait and service.

    Raises
    ------
    UsageError
        A queue without a rate to set, another statistic, a table without its columns.

    Examples
    --------
    >>> ax = wait_against_rate({"M/M/1": lp.MM1(1, 0.001)}, [200, 500, 1200], ax=lp.plots.blank_axes())
    >>> ax.lines[0].get_ydata()[:2].round(6).tolist()
    [0.00025, 0.001]
    """
    one_of("statistic", statistic, ("mean_wait_s", "mean_time_s"))
    rates = np.asarray(rates_per_s, float)
    curves = {name: np.array([_at_rate(name, model, rate, statistic) for rate in rates.tolist()])
              for name, model in models.items()}  # fmt: skip
    points = pd.DataFrame({"rate_per_s": [], "mean_s": []}) if measured is None else measured
    if missing := {"rate_per_s", "mean_s"} - set(points):
        raise UsageError(f"measured must have the columns rate_per_s and mean_s; {' and '.join(missing)} is missing")
    ax = axes_or_new(ax)
    top_s = _wait_axis(ax, curves, points)
    colours = dict(zip(curves, SERIES * len(curves), strict=False))
    for name, mean_s in curves.items():
        ax.plot(rates, np.where(np.isposinf(mean_s), NEVER * top_s, mean_s), color=colours[name], label=name)
    entries = [*colours.items(), *_points(ax, points, colours)]
    if entries:
        key(ax, entries)
    what = {"mean_wait_s": "mean wait", "mean_time_s": "mean time in the client"}[statistic]
    ax.set(xlabel="rate of one queue (events/s)", ylabel=f"{what} (ms)", title=f"{what.capitalize()} against rate")
    return ax


def _at_rate(name: str, model: Any, rate_per_s: float, statistic: str) -> float:
    if callable(model):
        found = model(rate_per_s)
    elif dataclasses.is_dataclass(model) and "rate_per_s" in {f.name for f in dataclasses.fields(model)}:
        found = dataclasses.replace(model, rate_per_s=rate_per_s)  # type: ignore[type-var]
    else:
        raise UsageError(f"{name} must be a queue with a rate_per_s to set, or a function of a rate; not {model!r}")
    return float(getattr(found, statistic, found))


def _wait_axis(ax: Axes, curves: Mapping[str, Floats], points: pd.DataFrame) -> float:
    """A logarithmic axis for what is finite, up to well above what was measured; returns its top."""
    found = np.concatenate([*curves.values(), points["mean_s"].to_numpy(float), points.get("hi_s", [])])
    shown = found[np.isfinite(found) & (found > 0)]
    if not len(shown):
        shown = np.array([1e-5, 1e-3])
    known_s = float(points["mean_s"].max())
    top_s = max(4 * known_s if known_s > 0 else 0.0, min(1.3 * float(shown.max()), 30 * float(np.median(shown))))
    low_s = max(float(shown.min()) / 1.3, top_s / 1e5)
    ax.set(yscale="log", ylim=(low_s, top_s))
    log_ticks(ax.yaxis, low_s, top_s)
    ax.margins(x=0.02)
    return top_s


def _points(ax: Axes, points: pd.DataFrame, colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """Draw what was measured; returns what of it the key must name."""
    labels = points["label"] if "label" in points else pd.Series("measured", points.index)
    for label, own in points.groupby(labels, sort=False):
        mean_s = own["mean_s"].to_numpy(float)
        ends_s = [own[c].to_numpy(float) if c in own else np.full(len(own), np.nan) for c in ("lo_s", "hi_s")]
        bars_s = [np.nan_to_num(mean_s - ends_s[0]), np.nan_to_num(ends_s[1] - mean_s)]
        colour = colours.get(str(label), INK)
        ax.errorbar(own["rate_per_s"], mean_s, bars_s, fmt="o", ms=5, capsize=3, color=colour, label=f"{label} points")
    return [(str(label), INK) for label in labels.unique() if label not in colours]


@styled
def inflation(
    load: npt.ArrayLike,
    factor: npt.ArrayLike | Mapping[str, npt.ArrayLike],
    ax: Axes | None = None,
    against: str = "rate",
    run_s: float | None = None,
) -> Axes:
    """How many times the true mean TTFT is reported, against rate or utilisation, with the paper's 2.3 for comparison.

    Parameters
    ----------
    load : (n,) float
        Requests per second, or ρ.
    factor : (n,) float, or mapping of label to it
        Reported mean over true mean; NaN or infinite where there is none.
    ax : Axes, optional
    against : {"rate", "utilisation"}
        What `load` is.
    run_s : float, optional
        How long the runs were, to be said in the title: past ρ = 1 the factor grows as long as a run lasts.

    Raises
    ------
    UsageError
        Lengths that differ, or another `against`.

    Examples
    --------
    >>> ax = inflation([0.5, 0.9], [1.01, 2.5], lp.plots.blank_axes(), against="utilisation", run_s=60)
    >>> [line.get_label() for line in ax.lines]
    ['paper', 'factor']
    """
    one_of("against", against, ("rate", "utilisation"))
    at = np.asarray(load, float)
    series = factor if isinstance(factor, Mapping) else {"factor": factor}
    values = {name: np.asarray(own, float) for name, own in series.items()}
    for name, own in values.items():
        if own.shape != at.shape:
            raise UsageError(f"{name} must have a value for each load, {len(at)}; not of shape {own.shape}")
    ax, ends = axes_or_new(ax), []
    level(ax, PAPERS_FACTOR, "the paper's 2.3", "paper")
    for (name, own), colour in zip(values.items(), SERIES * len(values), strict=False):
        ax.plot(at, own, "o-", ms=5, color=colour, label=name)
        known, beyond = np.flatnonzero(np.isfinite(own)), at[np.isposinf(own)]
        if len(known) and isinstance(factor, Mapping):
            ends.append((at[known[-1]], own[known[-1]], name, colour))
        if len(beyond):  # on the edge: more than any axis holds
            (marks,) = ax.plot(beyond, np.ones(len(beyond)), "^", color=colour, ms=7, label=f"{name} without bound")
            marks.set(transform=ax.get_xaxis_transform(), clip_on=False)
    _factor_axis(ax, np.concatenate([np.zeros(0), *values.values()]))
    name_ends(ax, ends)
    xlabel = {"rate": "rate (requests/s)", "utilisation": "utilisation ρ of the client"}[against]
    length = "" if run_s is None else f", runs of {run_s:g} s"
    ax.set(xlabel=xlabel, ylabel="reported / true mean TTFT", title=f"How many times the true TTFT is reported{length}")
    return ax


def _factor_axis(ax: Axes, factors: Floats) -> None:
    known = factors[np.isfinite(factors) & (factors > 0)]
    ax.set(yscale="log", ylim=(min([0.9, *known / 1.1]), max([2.8, *known * 1.2])))
    narrow = ax.get_ylim()[1] < 8
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0) if narrow else (1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda times, _: f"{times:g}×"))


@styled
def dispersion(fit: FitResult, ax: Axes | None = None) -> Axes:
    """Index of dispersion of the arrivals by window, of all workers and of each: 1 is Poisson, more comes in bunches.

    Examples
    --------
    >>> [line.get_label() for line in dispersion(lp.fit_mg1(run), lp.plots.blank_axes()).lines][:2]
    ['Poisson', 'pooled']
    """
    table, ax = fit.dispersion.dropna(), axes_or_new(ax)
    ax.set(xscale="log", yscale="log", xlabel="window (ms)", ylabel="index of dispersion")
    ax.set_title(f"Arrivals at the {fit.client} client: variance over mean of their number in a window")
    ax.axhline(1.0, color=GREY, lw=0.9, ls=":", zorder=1, label="Poisson")
    if table.empty:
        say(ax, "no window is short enough for this run")
        return ax
    left_s, right_s = float(table["window_s"].min() / EDGE), float(table["window_s"].max() * EDGE)
    workers = [c for c in table.columns if c not in ("window_s", "pooled")]
    ends = [(right_s, 1.0, "Poisson: 1", GREY)]
    for who in ["pooled", *(workers if len(workers) > 1 else [])]:
        colour, width = (BLUE, 1.8) if who == "pooled" else (ORANGE, 0.9)
        ax.plot(table["window_s"], table[who], "o-", ms=4.5, lw=width, color=colour, label=who)
        ends.append((right_s, table[who].iloc[-1], "all" if who == "pooled" else f"worker {who}", colour))
    ax.set_xlim(left_s, right_s)
    log_ticks(ax.xaxis, left_s, right_s)
    indices = table.drop(columns="window_s").to_numpy()
    low, high = min(0.45, 0.8 * indices[indices > 0].min(initial=1.0)), max(2.2, 1.25 * indices.max())
    ax.set_ylim(low, high)
    log_ticks(ax.yaxis, low, high, plain)
    _name_windows(ax, table["window_s"], np.sqrt(low * high) > table["pooled"])
    name_ends(ax, ends)
    return ax


def _name_windows(ax: Axes, windows_s: pd.Series, above: pd.Series) -> None:
    """What each window is, upright at the top or the bottom; those that are as good as one are named together."""
    at: list[tuple[float, bool]] = []
    names: list[str] = []
    for name, window_s, high in zip(windows_s.index, windows_s, above, strict=True):
        if at and window_s < NEAR * at[-1][0]:
            names[-1] += f", {name}"
        else:
            at.append((float(window_s), bool(high)))
            names.append(str(name))
    for (x, high), name in zip(at, names, strict=True):
        ax.axvline(x, color=GREY, lw=0.6, ls=":", zorder=1)
        y, va = (0.97, "top") if high else (0.03, "bottom")
        halo = {"fc": "white", "ec": "none", "pad": 0.6}
        ax.annotate(name, (x, y), xycoords=ax.get_xaxis_transform(), rotation=90, ha="center", va=va,
                    color=GREY, fontsize=8.5, zorder=1.5, bbox=halo)  # fmt: skip


@styled
def sample_path(arrivals_s: npt.ArrayLike, services_s: npt.ArrayLike, ax: Axes | None = None) -> Axes:
    """Unfinished work of a queue over time: it jumps by a service when a job arrives, and is worked off.

    What a job finds is what it waits.

    Parameters
    ----------
    arrivals_s, services_s : (n,) float
        As for `llmprofile.simulate`: a few dozen jobs read best.
    ax : Axes, optional

    Raises
    ------
    UsageError
        As `simulate`.

    Examples
    --------
    >>> ax = sample_path([0.0, 1.0], [2.0, 1.0], lp.plots.blank_axes())
    >>> [tuple(map(float, point)) for point in ax.lines[0].get_xydata()]
    [(0.0, 0.0), (0.0, 2.0), (1.0, 1.0), (1.0, 1.0), (1.0, 2.0), (3.0, 0.0)]
    """
    waits_s = simulate(arrivals_s, services_s)
    at_s, left_s = np.asarray(arrivals_s, float), waits_s + np.asarray(services_s, float)
    ax = axes_or_new(ax)
    ax.set(xlabel="time (ms)", ylabel="unfinished work (ms)", title="A queue's work: what a job finds is what it waits")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(milliseconds))
    if not len(at_s):
        say(ax, "no job arrives")
        return ax
    gap_s = np.append(np.diff(at_s), np.inf)
    until_s = at_s + np.minimum(left_s, gap_s)
    path_s = np.column_stack([waits_s, left_s, np.maximum(left_s - gap_s, 0.0)]).ravel()
    times_s = np.column_stack([at_s, at_s, until_s]).ravel()
    ax.plot(times_s, path_s, color=BLUE, lw=1.4, label="work")
    ax.fill_between(times_s, path_s, color=BLUE, alpha=0.12, lw=0)
    ax.vlines(at_s, 0, waits_s, color=VERMILION, lw=1.6, label="waits")
    ax.plot(at_s, np.zeros(len(at_s)), "^", color=INK, ms=5, clip_on=False, zorder=5, label="arrivals")
    ax.set_ylim(0, 1.15 * max(float(left_s.max()), 1e-9))
    found = f"what it finds: its wait (at most {show_time(float(waits_s.max()))})"
    key(ax, [("▲ a job arrives", INK), (found, VERMILION), ("jump: its service", BLUE)])
    return ax
