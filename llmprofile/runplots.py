"""Pictures of runs: each function takes a result and draws it on an Axes, and estimates nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from llmprofile.bias import BiasTable
from llmprofile.comparison import Sample, sample
from llmprofile.errors import UsageError, one_of, whole
from llmprofile.latency import CLOCKLESS, CLOCKS, LABELS, column_of
from llmprofile.metrics import QUANTILES, describe, inter_token_s, known_arrivals, run_clock
from llmprofile.records import Run
from llmprofile.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LOG_FROM,
    ORANGE,
    PURPLE,
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
    rate_axis,
    styled,
    time_axis,
)
from llmprofile.units import show_time

Floats = npt.NDArray[np.float64]

CLOCK_COLOURS = {"wire": BLUE, "seen": VERMILION, "handled": VERMILION}
CLIENT_COLOURS = {"stamped": BLUE, "conventional": VERMILION}
PART_COLOURS = {"server": BLUE, "sending": ORANGE, "waiting": VERMILION, "handling": PURPLE}
DASHES, THICK_PT, THINNER_PT = ("-", "--", ":"), 2.8, 2.2
MOST_LENGTHS, LENGTH_GROUPS = 12, 8
"""Output lengths beyond so many are put into so many groups of equal size."""


@styled
def clocks(run: Run, metric: str = "ttft_s", ax: Axes | None = None) -> Axes:
    """One latency on two clocks: on the wire, and as this client would have reported it by its own clock.

    The client's own clock is handled for a conventional run and seen for any other. What lies between the curves is
    the client's doing.

    Parameters
    ----------
    run : Run
    metric : str
        A latency of `llmprofile.summary`, or "itl".
    ax : Axes, optional

    Raises
    ------
    UsageError
        An unknown metric, or one without values on one of the clocks, as where the kernel can't stamp.

    Examples
    --------
    >>> [line.get_label() for line in clocks(run, ax=lp.plots.blank_axes()).lines]
    ['seen', 'wire']
    """
    one_of("metric", metric, [name for name in LABELS if name not in CLOCKLESS])
    own = "handled" if run.client == "conventional" else "seen"
    wire_s, own_s = _values(run, metric, "wire", own)
    ax = axes_or_new(ax)
    time_axis(ax, np.concatenate([wire_s, own_s]))
    share = np.linspace(0, 1, 1001)
    between = (np.quantile(wire_s, share), np.quantile(own_s, share))
    ax.fill_betweenx(share, between[0], between[1], color=VERMILION, alpha=0.15, lw=0)
    # the wire's curve is the thinner one and drawn last, so that both show where they agree
    for clock, values_s, share_at, width, above in ((own, own_s, 0.3, 2.6, False), ("wire", wire_s, 0.7, 1.2, True)):
        ax.ecdf(values_s, color=CLOCK_COLOURS[clock], label=clock, lw=width)
        at = (float(np.quantile(values_s, share_at)), share_at)
        beside(ax, at, f"{clock} clock\nmean {show_time(values_s.mean())}", CLOCK_COLOURS[clock], above)
    text = f"the client's own clock is off by {_difference(own_s.mean() - wire_s.mean(), wire_s.mean())} in the mean"
    ax.annotate(text, (0.985, 0.04), xycoords="axes fraction", ha="right", color=INK)
    return _label(ax, run, metric, f"{LABELS[metric]} on two clocks")


@styled
def latency(run: Run, metric: str = "ttft_s", clock: str | None = None, ax: Axes | None = None) -> Axes:
    """How a latency of the `ok` requests is distributed, with its p50, p90 and p99 where the sample supports them.

    Parameters
    ----------
    run : Run
    metric : str
        A metric of `llmprofile.summary`.
    clock : {"wire", "seen", "handled"}, optional
        The run's own by default.
    ax : Axes, optional

    Raises
    ------
    UsageError
        An unknown metric or clock, or no values of it.

    Examples
    --------
    >>> [line.get_label() for line in latency(run, "e2e_s", clock="wire", ax=lp.plots.blank_axes()).lines]
    ['wire', 'p50', 'p90', 'p99']
    """
    one_of("metric", metric, LABELS)
    clock = one_of("clock", clock or run_clock(run), CLOCKS)
    (values_s,), ax = _values(run, metric, clock), axes_or_new(ax)
    time_axis(ax, values_s)
    colour = CLOCK_COLOURS[clock]
    ax.ecdf(values_s, color=colour, label=clock)
    row = describe(values_s, np.zeros(len(values_s)), block_s=1.0)
    for name, q in QUANTILES.items():
        if row[name] is not None:
            ax.plot(row[name], q, "o", color=colour, ms=5, label=name)
            beside(ax, (row[name], q), f"{name}  {show_time(row[name])}", INK)
    where = "" if metric in CLOCKLESS else f" on the {clock} clock"
    return _label(ax, run, metric, f"{LABELS[metric]}{where}")


def ntpot(run: Run, ax: Axes | None = None) -> Axes:
    """The distribution of NTPOT, a request's whole latency over its output tokens, on the run's own clock.

    Examples
    --------
    >>> ntpot(run, lp.plots.blank_axes()).get_xlabel()
    'NTPOT (ms)'
    """
    return latency(run, "ntpot_s", ax=ax)


@styled
def compare(runs: Mapping[str, Run], metric: str = "ttft_s", clock: str | None = None, ax: Axes | None = None) -> Axes:
    """One metric of several runs or tools: how it is distributed in each, and its mean with a 95 % interval.

    The mean is a dot on its curve, its interval a bar through it. A run that is too short for an interval has none.

    Parameters
    ----------
    runs : mapping of label to Run
    metric : str
        A metric of `llmprofile.summary`.
    clock : {"wire", "seen", "handled"}, optional
        Each run's own by default; where these differ, the labels say which it is.
    ax : Axes, optional

    Raises
    ------
    UsageError
        No run, an unknown metric or clock, or a run without values of it.

    Examples
    --------
    >>> ax = compare({"seed 1": run, "again": run}, "e2e_s", ax=lp.plots.blank_axes())
    >>> [line.get_label() for line in ax.lines]
    ['seed 1', 'mean of seed 1', 'again', 'mean of again']
    """
    if not isinstance(runs, Mapping) or not runs:
        raise UsageError("runs must be a mapping of label to Run that holds at least one")
    one_of("metric", metric, LABELS)
    samples, one_clock = _samples(runs, metric, clock)
    ax, entries = axes_or_new(ax), []
    time_axis(ax, np.concatenate([values_s for (values_s, _, _), _ in samples.values()]))
    for k, (name, (found, used)) in enumerate(samples.items()):
        colour, dashes = SERIES[k % len(SERIES)], DASHES[k // len(SERIES) % len(DASHES)]
        # later ones are thinner, so that all show where they agree
        ax.ecdf(found[0], color=colour, ls=dashes, label=name, lw=THICK_PT - THINNER_PT * k / len(samples))
        mean = _mean_on_curve(ax, found, name, colour)
        # a dollar sign would start a formula
        entries.append((f"{name}{'' if one_clock else f' ({used})'}: {mean}".replace("$", r"\$"), colour))
    where = "" if metric in CLOCKLESS else f" on the {used} clock" if one_clock else ", each on its own clock"
    unit = "tokens" if metric == "itl" else "ok requests"
    ax.set(ylim=(0, 1.02), xlabel=f"{LABELS[metric]} (ms)", ylabel=f"share of the {unit}")
    ax.set_title(f"{LABELS[metric]}{where}: distributions and means")
    key(ax, entries)
    return ax


@styled
def ntpot_by_length(run: Run, ax: Axes | None = None) -> Axes:
    """NTPOT by output length, on the run's own clock: median and quartiles of the `ok` requests of each length.

    Where there are more than twelve lengths, of eight groups of similar lengths.

    Raises
    ------
    UsageError
        No `ok` request with an NTPOT.

    Examples
    --------
    >>> ntpot_by_length(run, lp.plots.blank_axes()).get_xlabel()
    'output tokens'
    """
    groups, ax = _by_length([run], "ntpot_s"), axes_or_new(ax)
    _length_axes(ax, groups)
    _quartiles(ax, groups, BLUE, "NTPOT")
    title = f"NTPOT by output length on the {run_clock(run)} clock, {run.client} client"
    ax.set(ylabel="NTPOT (ms): median and quartiles", title=title)
    return ax


@styled
def ntpot_against_tpot(
    runs: Run | Sequence[Run], ttft_s: float | None = None, tpot_s: float | None = None, ax: Axes | None = None
) -> Axes:
    """NTPOT and TPOT as output length grows: NTPOT falls towards TPOT, as prefill is spread over more tokens.

    Medians and quartiles as in `ntpot_by_length`, of all runs together, each on its own clock.

    Parameters
    ----------
    runs : Run or sequence of Run
    ttft_s, tpot_s : float, optional
        Both given: draw what NTPOT is with these, (TTFT + (n − 1) TPOT) / n.
    ax : Axes, optional

    Raises
    ------
    UsageError
        No `ok` request with an NTPOT, or none with a TPOT.

    Examples
    --------
    >>> ax = ntpot_against_tpot(run, ttft_s=0.01, tpot_s=0.001, ax=lp.plots.blank_axes())
    >>> ax.lines[0].get_label(), ax.get_ylabel()
    ('formula', 'time per output token (ms)')
    """
    runs = [runs] if isinstance(runs, Run) else runs
    found, ax = {metric: _by_length(runs, metric) for metric in ("ntpot_s", "tpot_s")}, axes_or_new(ax)
    _length_axes(ax, pd.concat(list(found.values())))
    if ttft_s is not None and tpot_s is not None:
        n = np.geomspace(found["ntpot_s"]["tokens"].min(), found["ntpot_s"]["tokens"].max(), 200)
        curve_s = (ttft_s + (n - 1) * tpot_s) / n
        ax.plot(n, curve_s, color=GREY, lw=1.0, label="formula")
    ends = []
    for (metric, groups), colour in zip(found.items(), (BLUE, VERMILION), strict=True):
        _quartiles(ax, groups, colour, LABELS[metric])
        ends.append((groups["tokens"].iloc[-1], groups["median_s"].iloc[-1], LABELS[metric], colour))
    name_ends(ax, ends)
    if ttft_s is not None and tpot_s is not None:
        known = f"TTFT {show_time(ttft_s)}, TPOT {show_time(tpot_s)}"
        key(ax, [("(TTFT + (n − 1) TPOT) / n", GREY), (f"with {known}", GREY)])
    ax.set(ylabel="time per output token (ms)", title="NTPOT and TPOT by output length: medians and quartiles")
    return ax


@styled
def decomposition(tables: Mapping[float, BiasTable], ax: Axes | None = None) -> Axes:
    """What the reported mean TTFT is made of at each rate: the server's part, sending, waiting, handling.

    Above each bar stands by how much the report is off; beside it, as an outline, the mean lateness, which is in no
    latency.

    Parameters
    ----------
    tables : mapping of rate_per_s to BiasTable
        From `llmprofile.separate_bias`.
    ax : Axes, optional

    Raises
    ------
    UsageError
        No table, or none with a TTFT on the wire.

    Examples
    --------
    >>> ax = decomposition({200: lp.separate_bias(run)}, lp.plots.blank_axes())
    >>> [bars.get_label() for bars in ax.containers]
    ['server', 'sending', 'waiting', 'lateness']
    """
    rates = sorted(tables)
    rows = pd.DataFrame([tables[rate].frame.loc["ttft_s"] for rate in rates]).rename(columns={"true_s": "server_s"})
    if rows.empty or rows["server_s"].isna().all():
        raise UsageError("none of these tables has a TTFT on the wire, so its parts are not known")
    ax, at, tops_s, ends = axes_or_new(ax), np.arange(len(rates)), np.zeros(len(rates)), []
    for part, colour in PART_COLOURS.items():
        part_s = rows[f"{part}_s"].to_numpy(float)
        if not np.isnan(part_s).all():
            ax.bar(at, np.nan_to_num(part_s), 0.62, tops_s, color=colour, label=part)
            ends.append((at[-1] + 0.48, float(tops_s[-1] + np.nan_to_num(part_s)[-1] / 2), part, colour))
            tops_s += np.nan_to_num(part_s)
    lateness_s = [tables[rate].lateness_mean_s for rate in rates]
    ax.bar(at + 0.4, lateness_s, 0.1, fill=False, edgecolor=GREY, label="lateness")
    ends.append((at[-1] + 0.48, lateness_s[-1], "lateness", GREY))
    for x, top_s, server_s in zip(at, tops_s, rows["server_s"], strict=True):
        text = (
            "no kernel stamps" if np.isnan(server_s) else _difference(top_s - server_s, server_s).replace(" (", "\n(")
        )
        ax.annotate(text, (x, top_s), (0, 3), textcoords="offset points", ha="center", color=INK)
    ax.set(xticks=at, xticklabels=[f"{rate:g}" for rate in rates], xlabel="rate (requests/s)", ylabel="mean TTFT (ms)")
    ax.set(xlim=(-0.5, len(rates) - 0.5), ylim=(0, 1.22 * max(*tops_s, *np.nan_to_num(lateness_s))))
    ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.grid(False, axis="x")
    clocks_of = " and ".join(sorted({table.clock for table in tables.values()}))
    ax.set_title(f"What the mean TTFT of the {clocks_of} clock is made of")
    name_ends(ax, ends)
    return ax


@styled
def timeline(run: Run, n: int = 20, ax: Axes | None = None) -> Axes:
    """The first n requests of the schedule, a row each: due, sent, first token, tokens; on the run's own clock.

    A request that did not end well has its outcome written at its end.

    Parameters
    ----------
    run : Run
    n : int
    ax : Axes, optional

    Examples
    --------
    >>> [line.get_label() for line in timeline(run, n=10, ax=lp.plots.blank_axes()).lines]
    ['due', 'sent', 'token', 'first token']
    """
    shown = run.requests.head(whole("n", n)).reset_index(drop=True)
    clock, origin_ns = run_clock(run), shown[["due_ns", "sent_ns"]].min().min()
    if pd.isna(origin_ns):
        raise UsageError(f"none of the first {n} requests of this run was due or sent")
    ax = axes_or_new(ax)
    due_s, sent_s, first_s, last_s = (
        _since(shown[f"{name}_ns"], origin_ns) for name in ("due", "sent", f"first_{clock}", f"last_{clock}")
    )
    events = run.events[run.events["request_id"].isin(shown["request_id"])]
    token_row = pd.Series(shown.index, index=shown["request_id"])[events["request_id"]].to_numpy()
    rows = shown.index.to_numpy()
    ax.hlines(rows, sent_s, last_s, color="#D0D0D0", lw=1.0, zorder=1)
    ax.plot(due_s, rows, "|", color=GREY, ms=9, mew=1.4, label="due")
    ax.plot(sent_s, rows, ">", color=ORANGE, ms=4.5, label="sent")
    ax.plot(_since(events[f"{clock}_ns"], origin_ns), token_row, "|", color=BLUE, ms=5, mew=0.8, label="token")
    ax.plot(first_s, rows, "o", color=GREEN, ms=4.5, label="first token")
    ends_s = pd.DataFrame([last_s, sent_s, due_s]).max().fillna(0.0)
    for row in np.flatnonzero(shown["outcome"] != "ok"):
        text, at = f"  {shown['outcome'][row]}", (ends_s[row], row)
        ax.annotate(text, at, va="center", color=VERMILION, fontsize=8.5)
    xlabel = f"time since the first was due (s), {clock} clock"
    ax.set(xlabel=xlabel, ylabel="request", ylim=(len(shown) - 0.4, -0.6), title=f"The first {len(shown)} requests")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(False, axis="y")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2, handletextpad=0.2)
    return ax


@styled
def error_against_rate(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How far each client's TTFT was off at each rate: in the mean (drawn through), and at p99 (dashed).

    Parameters
    ----------
    table : DataFrame
        `rate_per_s`, `client`, `error_mean_s`, `error_p99_s`, a row a run; `llmprofile.demo` makes one.
        `true_mean_s` gives the scale when it is there.
    ax : Axes, optional

    Examples
    --------
    >>> table = pd.DataFrame({"rate_per_s": [50.0, 100.0], "client": ["conventional"] * 2,
    ...                       "error_mean_s": [0.001, 0.01], "error_p99_s": [0.002, 0.05]})
    >>> [line.get_label() for line in error_against_rate(table, lp.plots.blank_axes()).lines]
    ['conventional mean', 'conventional p99']
    """
    if table.empty:
        raise UsageError("the table holds no run, so there is nothing to draw")
    ax = axes_or_new(ax)
    rate_axis(ax, sorted(table["rate_per_s"].unique()))
    _error_axis(ax, table[["error_mean_s", "error_p99_s"]].to_numpy(float))
    if "true_mean_s" in table:
        true_s = float(table["true_mean_s"].median())
        level(ax, true_s, f"the true TTFT: {show_time(true_s)}", "true TTFT")
    ends = []
    for client, runs in table.sort_values("rate_per_s").groupby("client", sort=False):
        colour = CLIENT_COLOURS.get(str(client), GREEN)
        rates, mean_s, p99_s = (runs[c].to_numpy(float) for c in ("rate_per_s", "error_mean_s", "error_p99_s"))
        ax.plot(rates, mean_s, "o-", color=colour, ms=5, label=f"{client} mean")
        ax.plot(rates, p99_s, ".--", color=colour, lw=1.0, label=f"{client} p99")
        ends += [(rates[-1], e[-1], f"{client}, {what}", colour) for e, what in ((mean_s, "mean"), (p99_s, "p99"))]
    name_ends(ax, ends)
    ax.set(
        xlabel="rate (requests/s)", ylabel="error of the reported TTFT (ms)", title="How far off the reported TTFT is"
    )
    return ax


def _by_length(runs: Sequence[Run], metric: str) -> pd.DataFrame:
    """Quartiles of a metric of the `ok` requests by output length: `tokens`, `low_s`, `median_s`, `high_s`."""
    parts = [pd.DataFrame({"tokens": [], "value_s": []})]
    for run in runs:
        ok = run.requests[run.requests["outcome"] == "ok"]
        columns = {"tokens": ok["output_tokens"], "value_s": ok[column_of(metric, run_clock(run))]}
        parts.append(pd.DataFrame(columns).dropna().astype(float))
    known = pd.concat(parts)
    if known.empty:
        raise UsageError(f"no ok request has {LABELS[metric]} and its number of output tokens")
    few = known["tokens"].nunique() <= MOST_LENGTHS
    group = known["tokens"] if few else pd.qcut(known["tokens"], LENGTH_GROUPS, duplicates="drop")
    by_group = known.groupby(group.to_numpy(), observed=True)
    quartiles = {name: by_group["value_s"].quantile(q) for name, q in _QUARTILES.items()}
    return pd.DataFrame({"tokens": by_group["tokens"].median(), **quartiles}).reset_index(drop=True)


_QUARTILES = {"low_s": 0.25, "median_s": 0.5, "high_s": 0.75}


def _quartiles(ax: Axes, groups: pd.DataFrame, colour: str, label: str) -> None:
    median_s = groups["median_s"]
    bars_s = [median_s - groups["low_s"], groups["high_s"] - median_s]
    ax.errorbar(
        groups["tokens"], median_s, bars_s, fmt="o-", ms=4.5, capsize=3, elinewidth=1.2, color=colour, label=label
    )


def _length_axes(ax: Axes, groups: pd.DataFrame) -> None:
    """Output tokens against a time; each logarithmic where it spans much."""
    tokens, low_s, high_s = groups["tokens"], groups["low_s"].min(), groups["high_s"].max()
    if tokens.max() > LOG_FROM * tokens.min():
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(plain))
    if low_s > 0 and high_s > LOG_FROM * low_s:
        ax.set_yscale("log")
        log_ticks(ax.yaxis, low_s, high_s)
    ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.set_xlabel("output tokens")


def _values(run: Run, metric: str, *on: str) -> list[Floats]:
    """A metric's values on these clocks, over the `ok` requests that have it on all of them (ITL: over the tokens)."""
    run = known_arrivals(run) if len(on) > 1 else run
    ok = run.requests[run.requests["outcome"] == "ok"]
    if metric == "itl":
        values_s = [inter_token_s(run, clock)["itl_s"].to_numpy(float) for clock in on]
    else:
        names = [column_of(metric, clock) for clock in on]
        known = ok[names].dropna()
        values_s = [known[name].to_numpy(float) for name in names]
    if not all(len(v) for v in values_s):
        raise UsageError(f"no ok request of this run has {LABELS[metric]} on the {' and the '.join(on)} clock")
    return values_s


def _since(stamps_ns: pd.Series, origin_ns: int) -> Floats:
    return ((stamps_ns - origin_ns) / 1e9).to_numpy(float, na_value=np.nan)


def _difference(gap_s: float, of_s: float) -> str:
    """A difference with its sign, and as a share of what it is a difference to unless that is next to nothing."""
    share = gap_s / of_s
    text = f"{'+' if gap_s >= 0 else '-'}{show_time(abs(gap_s))}" + (f" ({share:+.1%})" if abs(share) >= 5e-4 else "")
    return text.replace("-", "−")


def _error_axis(ax: Axes, errors_s: Floats) -> None:
    if (errors_s <= 0).any():  # what is below zero has no logarithm
        ax.set_yscale("symlog", linthresh=1e-5)
    else:
        ax.set_yscale("log")
    sizes_s = np.abs(errors_s)
    log_ticks(ax.yaxis, np.nanmin(sizes_s, initial=1.0), np.nanmax(sizes_s, initial=0.0))


def _label(ax: Axes, run: Run, metric: str, title: str) -> Axes:
    ok, n = int((run.requests["outcome"] == "ok").sum()), len(run.requests)
    requests = f"{n:,} requests" if ok == n else f"the {ok:,} ok of {n:,} requests"
    ylabel = f"share of the tokens of {requests}" if metric == "itl" else f"share of {requests}"
    ax.set(ylim=(0, 1.02), xlabel=f"{LABELS[metric]} (ms)", ylabel=ylabel, title=f"{title}, {run.client} client")
    return ax


def _samples(runs: Mapping[str, Run], metric: str, clock: str | None) -> tuple[dict[str, tuple[Sample, str]], bool]:
    """Each run's sample and the clock it is on; and whether that is one for all, or matters to none."""
    found = {}
    for name, run in runs.items():
        used = one_of("clock", clock or run_clock(run), CLOCKS)
        found[name] = sample(run, metric, used), used
        if not len(found[name][0][0]):
            raise UsageError(f"no ok request of {name} has {LABELS[metric]} on the {used} clock")
    return found, metric in CLOCKLESS or len({used for _, used in found.values()}) == 1


def _mean_on_curve(ax: Axes, found: Sample, name: str, colour: str) -> str:
    """Mark a mean and its interval on the curve of its sample; both in words."""
    row, values_s = describe(*found), found[0]
    mean_s, low_s, high_s = (row[key] for key in ("mean", "mean_lo", "mean_hi"))
    share = float((values_s <= mean_s).mean())
    ax.plot(mean_s, share, "o", color=colour, ms=5, label=f"mean of {name}")
    if low_s is None:
        return f"mean {show_time(mean_s)}"
    ax.hlines(share, low_s, high_s, color=colour, lw=4, alpha=0.4)
    (mean, low, high), units = zip(*(show_time(time_s).split() for time_s in (mean_s, low_s, high_s)), strict=True)
    if len(set(units)) > 1:
        return f"mean {mean} {units[0]} [{low} {units[1]}, {high} {units[2]}]"
    return f"mean {mean} [{low}, {high}] {units[0]}"
