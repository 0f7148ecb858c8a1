"""One look for all figures: colours, axes, ticks, names of curves, saving.

Data stay in seconds, and labels show milliseconds. Colours are those of Okabe and Ito (2008), which colour-blind
readers can tell apart; curves are named where they run rather than in a legend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

Floats = npt.NDArray[np.float64]

BLUE, VERMILION, GREEN, ORANGE, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7"
GREY, INK = "#6B6B6B", "#333333"
SERIES = (VERMILION, BLUE, GREEN, PURPLE, ORANGE)
"""Colours of curves that stand for nothing in particular, in this order."""
SIZE_IN, SAVED_DPI = (7.0, 3.6), 150
LINE_PT, KEY_PT, LETTER_PT = 11.0, 12.5, 5.2
LOG_FROM = 8.0
"""A time axis is logarithmic when its 99.5th percentile is this many times its 0.5th."""

FEW_DECADES = 300.0

_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}

P = ParamSpec("P")


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """The package's style, for a while."""
    # rc_context would also undo what a notebook's backend sets when it wakes up at the first figure
    before = {name: mpl.rcParams[name] for name in _STYLE}
    mpl.rcParams.update(_STYLE)
    try:
        yield
    finally:
        mpl.rcParams.update(before)


def styled(draw: Callable[P, Axes]) -> Callable[P, Axes]:
    """Draw in the package's style and leave the caller's settings as they were."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Axes:
        with _style():
            return draw(*args, **kwargs)

    return wrapper


def blank_axes(width_in: float = SIZE_IN[0], height_in: float = SIZE_IN[1]) -> Axes:
    """Axes on a figure that belongs to no window and no notebook cell, for `save`.

    Examples
    --------
    >>> blank_axes(5.0, 3.0).figure.get_size_inches().tolist()
    [5.0, 3.0]
    """
    with _style():
        return Figure(figsize=(width_in, height_in), layout="constrained").add_subplot()


def save(ax: Axes, path: Path) -> None:
    """Write the figure that an Axes is on; the path's suffix says as what.

    Examples
    --------
    >>> save(blank_axes(), Path("blank.svg"))
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.savefig(path, dpi=SAVED_DPI)


def axes_or_new(ax: Axes | None) -> Axes:
    """The Axes that was given, or one on a new figure of the package's size."""
    return plt.subplots(figsize=SIZE_IN, layout="constrained")[1] if ax is None else ax


def milliseconds(seconds: float, _: Any = None) -> str:
    """A tick's label: seconds shown as milliseconds.

    Examples
    --------
    >>> milliseconds(0.0005)
    '0.5'
    """
    return f"{seconds * 1e3:.6g}"


def plain(value: float, _: Any = None) -> str:
    """A tick's label: the number itself."""
    return f"{value:.6g}"


def time_axis(ax: Axes, values_s: Floats) -> None:
    """Limits and ticks for seconds that are shown as milliseconds; logarithmic where they span much."""
    low_s, high_s = np.quantile(values_s, [0.005, 0.995])
    if low_s > 0 and high_s > LOG_FROM * low_s:
        ax.set_xscale("log")
        ax.set_xlim(low_s / 1.6, values_s.max() * 1.3)
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        width_s = max(float(high_s - low_s), 1e-6)
        ax.set_xlim(max(low_s - 0.35 * width_s, 0.0 if low_s >= 0 else -np.inf), high_s + 0.35 * width_s)
    ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))


def beside(ax: Axes, at: tuple[float, float], text: str, colour: str, above: bool = False) -> None:
    """Text next to a point of a rising curve: left above it or right below it, where the curve isn't."""
    shift, ha, va = ((-6, 1), "right", "bottom") if above else ((7, -1), "left", "top")
    ax.annotate(text, at, shift, textcoords="offset points", ha=ha, va=va, color=colour)


def rate_axis(ax: Axes, rates_per_s: list[float]) -> None:
    """A logarithmic x axis with a tick at each of these rates."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(rates_per_s))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))


def log_ticks(axis: Axis, low: float, high: float, show: Callable[[float], str] = milliseconds) -> None:
    """Labels of a logarithmic axis from low to high: decades, and 2 and 5 between them where decades are few."""

    def two_and_five(value: float, _: Any = None) -> str:
        return show(value) if f"{value:e}"[0] in "25" else ""

    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axis.set_minor_formatter(NullFormatter() if high > FEW_DECADES * low else FuncFormatter(two_and_five))


def level(ax: Axes, y: float, text: str, label: str) -> None:
    """A dotted line across the axes, with its text on it at the left: what the rest is to be compared with."""
    ax.axhline(y, color=GREY, lw=0.9, ls=":", label=label)
    at, halo = (0.01, y), {"fc": "white", "ec": "none", "pad": 0.6}
    ax.annotate(text, at, (0, 3), xycoords=ax.get_yaxis_transform(), textcoords="offset points", color=GREY,
                fontsize=8.5, bbox=halo)  # fmt: skip


def say(ax: Axes, text: str) -> None:
    """A sentence where there is nothing to draw."""
    ax.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=GREY)


def key(ax: Axes, entries: list[tuple[str, str]]) -> None:
    """Lines of text (text, colour) that say which curve is which, in a part of the axes that curves leave free."""
    ax.autoscale_view()  # else the limits are not known yet, and so not where the curves run
    points_per_dot = 72 / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    width_pt, height_pt = ax.bbox.width * points_per_dot, ax.bbox.height * points_per_dot
    wide = min(1.0, max(len(text) for text, _ in entries) * LETTER_PT / width_pt)
    high = (len(entries) + 0.5) * KEY_PT / height_pt
    drawn = _drawn(ax)

    def hidden(corner: tuple[float, float]) -> int:
        inside = (drawn >= corner) & (drawn <= np.add(corner, (wide, high)))
        return int(inside.all(axis=1).sum())

    lefts, bottoms = (0.99 - wide, 0.01, 0.5 - wide / 2), (0.99 - high, 0.02, 0.5 - high / 2)
    left, bottom = min(((x, y) for x in lefts for y in bottoms), key=hidden)
    for line, (text, colour) in enumerate(entries):
        at, shift = (left, bottom + high), (4, -(line + 0.25) * KEY_PT)
        ax.annotate(text, at, shift, "axes fraction", "offset points", va="top", color=colour, fontsize=9)


def _drawn(ax: Axes) -> Floats:
    """Points on what lines draw, close together, as shares of the axes' width and height, (n, 2)."""
    found = [np.empty((0, 2))]
    for line in ax.lines:
        at = ax.transAxes.inverted().transform(line.get_transform().transform(line.get_xydata()))
        at = at[np.isfinite(at).all(axis=1)]
        if len(at) and line.get_linestyle() != "None":
            steps = np.linspace(0, len(at) - 1, 4000)
            at = np.column_stack([np.interp(steps, np.arange(len(at)), column) for column in at.T])
        found.append(at)
    return np.concatenate(found)


def name_ends(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """The curves' names at their right ends (x, y, name, colour), moved apart where they would overlap."""
    ax.autoscale_view()  # limits are otherwise found when the figure is drawn
    known = sorted((end for end in ends if not np.isnan(end[1])), key=lambda end: end[1])
    points_per_dot = 72 / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    wanted_pt = [float(ax.transData.transform((x, y))[1]) * points_per_dot for x, y, _, _ in known]
    placed_pt = _apart(wanted_pt, float(ax.bbox.y1) * points_per_dot)
    for (x, y, text, colour), wanted, placed in zip(known, wanted_pt, placed_pt, strict=True):
        shift = (8, placed - wanted)
        ax.annotate(text, (x, y), shift, textcoords="offset points", va="center", color=colour, annotation_clip=False)


def _apart(wanted_pt: list[float], top_pt: float) -> list[float]:
    """Heights of lines of text, ascending: a line apart at least, and none above the top as long as there is room."""
    placed: list[float] = []
    for y in wanted_pt:
        placed.append(max(y, placed[-1] + LINE_PT) if placed else y)
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], top_pt)
        top_pt = placed[k] - LINE_PT
    return placed
