"""A picture of what a server says of itself over what its client measured; it estimates nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from llmprofile.errors import UsageError, one_of
from llmprofile.latency import CLOCKLESS, LABELS, column_of
from llmprofile.metrics import run_clock
from llmprofile.records import Run
from llmprofile.scrape import server_metrics
from llmprofile.style import (
    BLUE,
    GREEN,
    GREY,
    LOG_FROM,
    ORANGE,
    VERMILION,
    axes_or_new,
    log_ticks,
    milliseconds,
    styled,
)

Floats = npt.NDArray[np.float64]

_COLOURS = {"queue_s": ORANGE, "running": GREEN, "waiting": VERMILION, "cache_use": GREY}
_NAMES = {
    "queue_s": "server's queue time (left)",
    "running": "running (right)",
    "waiting": "waiting (right)",
    "cache_use": "cache in use, of the height",
}


@styled
def server_side(run: Run, metric: str = "ttft_s", ax: Axes | None = None) -> Axes:
    """What the server said of itself over what the client measured, on one time axis.

    A dot is an `ok` request at its sending, on the run's own clock. What is running and waiting is drawn from one
    scrape to the next, a queue time back to the scrape before, since which those that it is the mean of left the queue.

    Parameters
    ----------
    run : Run
        Made with `scrape_metrics`.
    metric : str
        A latency of `llmprofile.summary`; not "itl".
    ax : Axes, optional

    Raises
    ------
    UsageError
        An unknown metric, no `ok` request with it, or no server metrics.

    Examples
    --------
    >>> import dataclasses, pathlib, time
    >>> from llmprofile.scrape import scraping
    >>> meta = run.meta | {"asked": run.meta["asked"] | {"scrape_metrics": server.base_url}}
    >>> with scraping(pathlib.Path(), meta):  # as `run_load` does
    ...     time.sleep(0.5)
    >>> ax = server_side(dataclasses.replace(run, folder=pathlib.Path(), meta=meta), ax=lp.plots.blank_axes())
    >>> ax.get_ylabel()
    'TTFT (ms)'
    """
    one_of("metric", metric, [name for name in LABELS if name not in (*CLOCKLESS, "itl")])
    said, origin_ns = server_metrics(run), int(run.requests["sent_ns"].min())
    at_s, latency_s = _latencies(run, metric, origin_ns)
    ax = axes_or_new(ax)
    ax.plot(at_s, latency_s, ".", color=BLUE, ms=3, alpha=0.5, label=metric)
    shown = {name: said[said["metric"] == name] for name in _NAMES if name in set(said["metric"])}
    right = ax.twinx()
    for name, rows in shown.items():
        _draw(ax, right, name, rows)
    _left_axis(ax, latency_s)
    _right_axis(right)
    ax.set(xlabel="time since the first request was sent (s)", ylabel=f"{LABELS[metric]} (ms)")
    ax.set_title(f"What the server says ({', '.join(said['server'].unique())}) and what its client measured")
    _legend(ax, right, metric)
    return _say_failures(ax, said)


def _latencies(run: Run, metric: str, origin_ns: int) -> tuple[Floats, Floats]:
    ok = run.requests[run.requests["outcome"] == "ok"]
    latency_s = ok[column_of(metric, run_clock(run))].to_numpy(float, na_value=np.nan)
    at_s = ((ok["sent_ns"] - origin_ns) / 1e9).to_numpy(float, na_value=np.nan)
    known = ~np.isnan(latency_s) & ~np.isnan(at_s)
    if not known.any():
        raise UsageError(f"no ok request of this run has {LABELS[metric]} on the {run_clock(run)} clock")
    return at_s[known], latency_s[known]


def _draw(ax: Axes, right: Axes, name: str, rows: pd.DataFrame) -> None:
    at_s, values = (rows[column].to_numpy(float, na_value=np.nan) for column in ("at_s", "value"))
    if name == "cache_use":
        across = ax.get_xaxis_transform()
        ax.fill_between(at_s, values, step="post", transform=across, color=GREY, alpha=0.15, lw=0, label=name)
        return
    # a queue time is of those that left since the scrape before; the others hold to the next
    on, step = (ax, "steps-pre") if name == "queue_s" else (right, "steps-post")
    on.plot(at_s, values, color=_COLOURS[name], drawstyle=step, lw=1.4, label=name)


def _right_axis(right: Axes) -> None:
    right.set_visible(bool(right.lines))
    right.set(ylabel="requests in the server")
    right.set_ylim(bottom=0)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.grid(False)


def _legend(ax: Axes, right: Axes, metric: str) -> None:
    """Below the axes: two sets of curves leave no part of them free for certain."""
    names = {metric: f"{LABELS[metric]} (left)"} | _NAMES
    drawn = [artist for artist in (*ax.lines, *right.lines, *ax.collections) if artist.get_label() in names]
    labels = [names[str(artist.get_label())] for artist in drawn]
    ax.legend(drawn, labels, loc="upper left", bbox_to_anchor=(0, -0.17), ncols=3, markerscale=3, fontsize=9)


def _left_axis(ax: Axes, latency_s: Floats) -> None:
    low_s, high_s = np.quantile(latency_s, [0.005, 0.995])
    if low_s > 0 and high_s > LOG_FROM * low_s:
        ax.set_yscale("log")
        ax.set_ylim(latency_s.min() / 1.6, latency_s.max() * 1.6)
        log_ticks(ax.yaxis, low_s, high_s)
    else:
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))


def _say_failures(ax: Axes, said: pd.DataFrame) -> Axes:
    read, failed = said.attrs.get("read", 0), said.attrs.get("failed", 0)
    if failed:
        text = f"{failed} of {read + failed} scrapes failed: {', '.join(said.attrs['reasons'])}"
        ax.annotate(text, (0.01, 0.02), xycoords="axes fraction", color=GREY, fontsize=8.5)
    return ax
