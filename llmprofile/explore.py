"""Two explorers for a notebook: a queue with sliders, and a run by metric, clock and group.

Figures are SVG text, which takes no time and follows the notebook's theme. Pure functions make them; the widgets only
pass on where their sliders stand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets
import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.errors import UsageError, not_negative, one_of
from llmprofile.latency import CLOCKLESS, CLOCKS, LABELS, column_of
from llmprofile.markup import table
from llmprofile.metrics import block_length_s, describe, inter_token_s, run_clock
from llmprofile.records import Run, summary_table
from llmprofile.scenario import RUN_S, QueueView, SamplePath, Scenario, look_at_queue, show_factor, show_utilisation
from llmprofile.units import show_rate, show_time

Floats = npt.NDArray[np.float64]

# figures

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400, 52, 16, 28, 42
FEW_DECADES, LOG_FROM = 300.0, 8.0
TAIL = 1e-4  # the share at which a curve of waits is cut off
MOST_MARKED = 700  # tokens that can be told apart
STYLE = """<style>
.lpx {color: var(--jp-content-font-color1, inherit); font: 14px/1.5 var(--jp-content-font-family, sans-serif);
  --lpx0: #0072B2; --lpx1: #C45500; --lpx2: #00805E; --lpx3: #A8467E; --lpx4: #8A6100; --lpx5: #6B6B6B}
[data-jp-theme-light="false"] .lpx {--lpx0: #56B4E9; --lpx1: #FF9A4D; --lpx2: #3BC79B; --lpx3: #E29BC3;
  --lpx4: #E6B84D; --lpx5: #B0B0B0}
.lpx p {margin: 2px 0}
.lpx .row {display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: flex-start}
.lpx svg {flex: 1 1 340px; max-width: 460px; min-width: 300px; overflow: visible}
.lpx text {fill: currentColor; font: 11px var(--jp-content-font-family, sans-serif)}
.lpx text.head {font-size: 12.5px; font-weight: 600}
.lpx .grid {stroke: currentColor; opacity: .15}
.lpx .curve {fill: none; stroke-width: 1.8; stroke-linejoin: round}
.lpx .dashed {stroke-dasharray: 5 4}
.lpx table {border-collapse: collapse; font-variant-numeric: tabular-nums}
.lpx td, .lpx th {padding: 2px 12px 2px 2px; text-align: right; font-weight: normal; white-space: nowrap}
.lpx thead th {border-bottom: 1px solid currentColor}
.lpx td:first-child, .lpx th:first-child {text-align: left}
.lpx small {opacity: .8}
""" + "".join(
    f".lpx .s{k} {{stroke: var(--lpx{k})}} .lpx .f{k} {{fill: var(--lpx{k})}}\n" for k in range(6)
) + "</style>"  # fmt: skip
SERIES = 6


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6g}"


def _percent(share: float) -> str:
    return f"{share * 100:.6g}%"


@dataclass(frozen=True)
class _Axis:
    """Values from low to high on pixels from start to end."""

    low: float
    high: float
    start: float
    end: float
    show: Callable[[float], str] = _ms
    log: bool = False

    def at(self, values: npt.ArrayLike) -> Floats:
        """Pixels; what is beyond the axis is put on its end."""
        inside = np.clip(np.asarray(values, float), self.low, self.high)
        low, high = self.low, self.high
        if self.log:
            inside, low, high = np.log(inside), math.log(low), math.log(high)
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> Floats:
        if self.log:
            decades = 10.0 ** np.arange(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1.0,) if self.high > FEW_DECADES * self.low else (1.0, 2.0, 5.0)
            every = np.outer(decades, steps).ravel()
            return every[(every >= self.low * (1 - 1e-9)) & (every <= self.high * (1 + 1e-9))]
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(k * power for k in (1, 2, 5, 10) if k * power >= (self.high - self.low) / 5 * (1 - 1e-9))
        return np.arange(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1.0) * step


def _svg(height: int, title: str, *parts: str) -> str:
    head = f'<text class="head" x="4" y="14">{escape(title)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{head}{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _path(x: Floats, y: Floats, kind: str) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))}"/>'


def _frame(x: _Axis, y: _Axis, xlabel: str, ylabel: str) -> str:
    """Grid, ticks and names of two axes."""
    parts = []
    for value, pixel in zip(x.ticks(), x.at(x.ticks()), strict=True):
        parts.append(f'<path class="grid" d="M{pixel:.1f},{y.start}V{y.end}"/>')
        parts.append(_text(pixel, y.start + 15, x.show(value), "middle"))
    for value, pixel in zip(y.ticks(), y.at(y.ticks()), strict=True):
        parts.append(f'<path class="grid" d="M{x.start},{pixel:.1f}H{x.end}"/>')
        parts.append(_text(x.start - 6, pixel + 4, y.show(value), "end"))
    middle = (y.start + y.end) / 2
    turned = f'<text transform="translate(12,{middle}) rotate(-90)" text-anchor="middle">{escape(ylabel)}</text>'
    return "".join([*parts, turned, _text((x.start + x.end) / 2, y.start + 32, xlabel, "middle")])


def _dot(x: _Axis, y: _Axis, at: tuple[float, float], text: str, kind: int, above: bool = False) -> str:
    """A point with its name beside it, where a rising (above) or falling curve leaves room."""
    px, py = float(x.at(at[0])), float(y.at(at[1]))
    left = px > x.start + 0.7 * (x.end - x.start)
    down = left != above
    name = _text(px + (-7 if left else 7), py + (14 if down else -5), text, "end" if left else "start")
    return f'<circle class="f{kind}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>{name}'


def waits_svg(view: QueueView) -> str:
    """The share of the tokens that wait longer than a time, on a logarithmic axis."""
    title, height = "How long tokens wait for the client", 270
    shown = view.longer >= TAIL
    if not shown.any():
        text = "fewer than one token in 10,000 waits" if len(shown) else "no distribution: waits grow without end"
        return _svg(height, title, _text(WIDTH / 2, height / 2, text, "middle"))
    times_s, longer = view.times_s[shown], view.longer[shown]
    x = _Axis(0.0, float(max(times_s[-1], view.times_s[1])), LEFT, WIDTH - RIGHT)
    y = _Axis(TAIL, 1.0, height - BOTTOM, TOP, _percent, log=True)
    dots = [_dot(x, y, (view.mean_wait_s, _at(view, view.mean_wait_s)), f"mean {show_time(view.mean_wait_s)}", 1)]
    if view.p99_wait_s > 0:
        dots.append(_dot(x, y, (view.p99_wait_s, 0.01), f"p99 {show_time(view.p99_wait_s)}", 1))
    curve = _path(x.at(times_s), y.at(longer), "curve s1")
    return _svg(height, title, _frame(x, y, "wait (ms)", "share of tokens that wait longer"), curve, *dots)


def _at(view: QueueView, wait_s: float) -> float:
    return float(np.interp(wait_s, view.times_s, view.longer))


def path_svg(view: QueueView) -> str:
    """A stretch of one process's queue: arrivals and services as marks, unfinished work below them."""
    path, height, top, keeps_up = view.path, 270, 66, view.scenario.keeps_up
    x = _Axis(0.0, path.length_s, LEFT, WIDTH - RIGHT)
    y = _Axis(0.0, 1.05 * float(path.work_s.max()), height - BOTTOM, top)
    parts = [_frame(x, y, "time in one process (ms)", "unfinished work (ms)")]
    if len(path.arrivals_s) <= MOST_MARKED:
        parts += [_text(LEFT - 6, 34, "arrive", "end"), _text(LEFT - 6, 52, "serve", "end"), _marks(path, x)]
    parts.append(_path(x.at(path.times_s), y.at(path.work_s), "curve s0"))
    title = "What a token finds unfinished is what it waits"
    if not keeps_up:
        drift_s = view.scenario.slip * path.length_s
        parts.append(_path(x.at([0.0, path.length_s]), y.at([0.0, drift_s]), "curve dashed s1"))
        parts.append(_text(LEFT + 6, 34, f"dashed: +{show_time(view.scenario.slip)} per second", kind="f1"))
        title = "From the first token on, work piles up"
    return _svg(height, title, *parts)


def _marks(path: SamplePath, x: _Axis) -> str:
    ticks = "".join(f"M{a:.1f},25v11" for a in x.at(path.arrivals_s))
    blocks = "".join(
        f'<rect class="f1" opacity="{0.9 if k % 2 else 0.5}" x="{a:.1f}" y="44" height="9" '
        f'width="{max(b - a, 0.3):.1f}"/>'
        for k, (a, b) in enumerate(zip(x.at(path.starts_s), x.at(path.ends_s), strict=True))
    )
    return f'<path d="{ticks}" stroke="currentColor"/>{blocks}'


def ttft_svg(view: QueueView) -> str:
    """The true mean TTFT as a bar, and the reported one with what the client adds."""
    true_s, reported_s = view.scenario.ttft_s, view.reported_ttft_s
    start, end = 66.0, WIDTH - 125.0
    x = _Axis(0.0, max(reported_s, true_s), start, end)
    true, reported = float(x.at(true_s)), float(x.at(reported_s))
    span = "" if view.scenario.keeps_up else f" in {RUN_S:g} s"
    bars = [
        f'<rect class="f0" x="{start}" y="{y}" width="{true - start:.1f}" height="16"/>' for y in (26, 52)
    ] + [f'<rect class="f1" x="{true:.1f}" y="52" width="{max(reported - true, 1):.1f}" height="16"/>']  # fmt: skip
    texts = [
        _text(start - 6, 38, "true", "end"),
        _text(start - 6, 64, "reported", "end"),
        _text(true + 8, 38, show_time(true_s)),
        _text(max(reported, true + 1) + 8, 64, f"{show_time(reported_s)}{span}"),
    ]
    return _svg(78, f"Mean TTFT, reported at {show_factor(view.inflation)} times the truth", *bars, *texts)


def queue_html(view: QueueView) -> str:
    """All that is shown of a scenario."""
    said = "".join(f"<p>{'<b>' if k == 0 else ''}{escape(s)}</p>" for k, s in enumerate(view.sentences))
    said = said.replace("</p>", "</b></p>", 1)
    scenario = view.scenario
    bound = "without bound"
    row = {
        "utilisation ρ": show_utilisation(scenario.utilisation),
        "rate of tokens": show_rate(scenario.tokens_per_s),
        "mean wait": show_time(view.mean_wait_s) if scenario.keeps_up else bound,
        "p99 of the wait": show_time(view.p99_wait_s) if scenario.keeps_up else bound,
    }
    model = "M/G/1: tokens at random times" if scenario.burst == 1 else "D^X/G/1: tokens in bursts at equal distances"
    note = (
        f"{model}, gamma services, requests dealt at random; waits from closed forms, the stretch simulated. "
        "Reported TTFT is the true one with the wait and the service of a token."
    )
    figures = waits_svg(view) + path_svg(view)
    return (
        f'{STYLE}<div class="lpx">{said}<div class="row">{figures}</div>'
        f'<div class="row">{ttft_svg(view)}{table(pd.DataFrame([row]))}</div><small>{note}</small></div>'
    )


def explore_queue() -> Any:
    """Sliders for a client's load, and what its queue does to the latencies that it reports.

    Returns
    -------
    ipywidgets.VBox

    Examples
    --------
    >>> "ρ = 0.75" in explore_queue().children[-1].value
    True
    """
    sliders, shown = _queue_sliders(), ipywidgets.HTML()

    def move(_: Any = None) -> None:
        stand = {name: slider.value * UNITS.get(name, 1) for name, slider in sliders.items()}
        shown.value = queue_html(look_at_queue(Scenario(**stand)))

    for slider in sliders.values():
        slider.observe(move, "value")
    move()
    return ipywidgets.VBox([_grid(sliders.values()), shown])


UNITS = {"service_s": 1e-6, "ttft_s": 1e-3}
"""What sliders show in other units than seconds."""


def _queue_sliders() -> dict[str, Any]:
    wholes, numbers = ipywidgets.IntSlider, ipywidgets.SelectionSlider
    scv = ipywidgets.FloatSlider(1.0, min=0.0, max=8.0, step=0.25, readout_format=".3g", **_look("its variability c²"))
    return {
        "rate_per_s": numbers(options=_two_digits(4), value=300.0, **_look("requests per second")),
        "tokens": wholes(50, min=1, max=2000, **_look("tokens per request")),
        "service_s": numbers(options=_two_digits(3), value=50.0, **_look("service of a token (µs)")),
        "scv": scv,
        "burst": wholes(1, min=1, max=200, **_look("tokens in a burst")),
        "processes": wholes(1, min=1, max=16, **_look("processes")),
        "ttft_s": numbers(options=_two_digits(4), value=50.0, **_look("true mean TTFT (ms)")),
    }


def _two_digits(decades: int) -> list[tuple[str, float]]:
    """Every number of two digits from 1 on, with its label: what a logarithmic slider rounds away stays round."""
    values = [k * 10**e / 10 for e in range(decades) for k in range(10, 100)]
    return [(f"{value:g}", value) for value in [*values, 10.0**decades]]


def _look(description: str) -> dict[str, Any]:
    layout = ipywidgets.Layout(width="auto", min_width="300px")
    return {"description": description, "style": {"description_width": "11.5em"}, "layout": layout}


def _grid(controls: Any) -> Any:
    layout = ipywidgets.Layout(
        grid_template_columns="repeat(auto-fit, minmax(330px, 1fr))", align_items="center", max_width="1140px"
    )
    return ipywidgets.GridBox(list(controls), layout=layout)


# a run

GROUPINGS = ("none", "output length", "worker", "outcome")
MOST_LENGTHS, LENGTH_GROUPS = 6, 4
"""Output lengths beyond so many are put into so many groups of equal size."""


@dataclass(frozen=True, eq=False)
class RunView:
    """What the run explorer shows.

    Attributes
    ----------
    title, metric : str
    values_s : dict of group to (n,) float
    rows : list of dict
        As of `metrics.summarise`, a row a group, whose name stands for the metric's.
    sentence : str
        Which requests these are, and what became of all of them.
    """

    title: str
    metric: str
    values_s: dict[str, Floats]
    rows: list[dict[str, Any]]
    sentence: str


def look_at_run(
    run: Run, metric: str = "ttft_s", clock: str | None = None, grouping: str = "none", trim_s: float = 0.0
) -> RunView:
    """A metric of a run's requests, in groups, without those that began in the first `trim_s` seconds.

    Of `ok` requests only; by outcome, of all that have a value.

    Raises
    ------
    UsageError
        An unknown metric, clock or grouping; a negative time.

    Examples
    --------
    >>> look_at_run(run, "itl", grouping="worker").rows[0]["metric"]
    'worker 0'
    """
    one_of("metric", metric, LABELS)
    clock = one_of("clock", clock or run_clock(run), CLOCKS)
    one_of("grouping", grouping, GROUPINGS)
    kept = _trimmed(run, not_negative("trim_s", trim_s))
    ok = kept[kept["outcome"] == "ok"]
    e2e_s = _plain(ok[column_of("e2e_s", clock)])
    e2e_s = e2e_s[~np.isnan(e2e_s)]
    block_s = block_length_s(ok["begun_ns"], float(e2e_s.mean()) if len(e2e_s) else 0.0)
    values, rows = {}, []
    for name, part in _parts(kept if grouping == "outcome" else ok, grouping):
        values_s, at_s = _sample(run, part, metric, clock)
        known = ~np.isnan(values_s)
        values[name] = values_s[known]
        rows.append({"metric": name, "clock": clock, **describe(values_s[known], at_s[known], block_s)})
    where = "" if metric in CLOCKLESS else f" on the {clock} clock"
    by = "" if grouping == "none" else f", by {grouping}"
    return RunView(f"{LABELS[metric]}{where}{by}", metric, values, rows, _which(run, kept, trim_s))


def _plain(column: pd.Series) -> Floats:
    return column.to_numpy(float, na_value=np.nan)


def _begun_s(run: Run) -> Floats:
    """When requests began, or were due if they never did, from the first on."""
    begun_ns = run.requests["begun_ns"].fillna(run.requests["due_ns"])
    return _plain((begun_ns - begun_ns.min()) / 1e9)


def _trimmed(run: Run, trim_s: float) -> pd.DataFrame:
    return run.requests[~(_begun_s(run) < trim_s)]  # what has no time at all stays and is counted


def _parts(rows: pd.DataFrame, grouping: str) -> list[tuple[str, pd.DataFrame]]:
    if grouping == "none":
        return [("all", rows)]
    if grouping == "output length":
        tokens = pd.Series(_plain(rows["output_tokens"]), rows.index)
        many = tokens.nunique() > MOST_LENGTHS
        key = pd.qcut(tokens, LENGTH_GROUPS, duplicates="drop").cat.codes if many else tokens.fillna(-1)
        return [(_lengths(part), part) for _, part in rows.groupby(key)]
    key, word = rows[grouping], "worker " if grouping == "worker" else ""
    return [(f"{word}{name}", part) for name, part in rows.groupby(key, dropna=False)]


def _lengths(part: pd.DataFrame) -> str:
    tokens = part["output_tokens"].dropna()
    if tokens.empty:
        return "length unknown"
    low, high = tokens.min(), tokens.max()
    return f"{low:,} tokens" if low == high else f"{low:,}–{high:,} tokens"


def _sample(run: Run, part: pd.DataFrame, metric: str, clock: str) -> tuple[Floats, Floats]:
    """Values of these requests, whatever became of them, and when each was taken."""
    if metric == "itl":
        gaps = inter_token_s(dataclasses.replace(run, requests=part.assign(outcome="ok")), clock)
        return gaps["itl_s"].to_numpy(float), gaps["at_ns"].to_numpy(float) / 1e9
    return _plain(part[column_of(metric, clock)]), _plain(part["begun_ns"]) / 1e9


def _which(run: Run, kept: pd.DataFrame, trim_s: float) -> str:
    outcomes = ", ".join(f"{n:,} {outcome}" for outcome, n in kept["outcome"].value_counts().items())
    left_out = len(run.requests) - len(kept)
    without = f"; {left_out:,} that began in the first {show_time(trim_s)} are left out" if left_out else ""
    return f"{len(kept):,} of {len(run.requests):,} requests ({outcomes or 'none'}){without}."


def run_svg(view: RunView) -> str:
    """The share of the values up to a time, a curve a group; of the six largest groups where there are more."""
    height, label = 320, LABELS[view.metric]
    drawn = sorted((n for n in view.values_s if len(view.values_s[n])), key=lambda n: -len(view.values_s[n]))[:SERIES]
    if not drawn:
        return _svg(height, view.title, _text(WIDTH / 2, height / 2, f"none of these requests has {label}", "middle"))
    drawn = [name for name in view.values_s if name in drawn]
    x = _time_axis(np.concatenate([view.values_s[name] for name in drawn]))
    y, shares = _Axis(0.0, 1.0, height - BOTTOM, TOP + 8, _percent), np.linspace(0.0, 1.0, 401)
    of = "tokens" if view.metric == "itl" else "requests"
    parts = [_frame(x, y, f"{label} (ms)", f"share of {of}")]
    for k, name in enumerate(drawn):
        parts.append(_path(x.at(np.quantile(view.values_s[name], shares)), y.at(shares), f"curve s{k}"))
        if len(drawn) > 1:
            line = y.start - 8 - 14 * (len(drawn) - 1 - k)
            parts.append(_text(x.end - 4, line, f"{name} ({len(view.values_s[name]):,})", "end", f"f{k}"))
    if len(drawn) == 1:
        parts += _percentiles(next(row for row in view.rows if row["metric"] == drawn[0]), x, y)
    return _svg(height, view.title, *parts)


def _percentiles(row: dict[str, Any], x: _Axis, y: _Axis) -> list[str]:
    known = {name: row[name] for name in ("p50", "p90", "p99") if row[name] is not None}
    return [
        _dot(x, y, (value_s, int(name[1:]) / 100), f"{name} {show_time(value_s)}", 0, above=True)
        for name, value_s in known.items()
    ]


def _time_axis(values_s: Floats) -> _Axis:
    """Of nearly all values; logarithmic where they span much."""
    low_s, high_s = (float(v) for v in np.quantile(values_s, [0.005, 0.995]))
    if low_s > 0 and high_s > LOG_FROM * low_s:
        return _Axis(low_s / 1.6, high_s * 1.6, LEFT, WIDTH - RIGHT, log=True)
    margin_s = max(0.2 * (high_s - low_s), 1e-6)
    return _Axis(max(low_s - margin_s, 0.0 if low_s >= 0 else -math.inf), high_s + margin_s, LEFT, WIDTH - RIGHT)


def run_html(view: RunView) -> str:
    """All that is shown of a run: figure, table and notes."""
    shown, notes = summary_table(view.rows)
    said = f"<p>{escape(view.sentence)}</p>"
    more = f"<br>The curves are those of the {SERIES} largest groups." if len(shown) > SERIES else ""
    small = "<br>".join(map(escape, notes))
    return (
        f'{STYLE}<div class="lpx">{said}<div class="row">{run_svg(view)}'
        f"<div>{table(shown)}<small>{small}{more}</small></div></div></div>"
    )


def explore_run(run: Run) -> Any:
    """A run's latencies by metric, clock and group, without its warm-up: figure and table follow the controls.

    Parameters
    ----------
    run : Run

    Returns
    -------
    ipywidgets.VBox

    Raises
    ------
    UsageError
        What is no run.

    Examples
    --------
    >>> "200 of 200 requests" in explore_run(run).children[-1].value
    True
    """
    if not isinstance(run, Run):
        raise UsageError(f"run must be a Run, as of run_load or load; not {type(run).__name__}")
    controls, shown = _run_controls(run), ipywidgets.HTML()

    def move(_: Any = None) -> None:
        chosen = {name: control.value for name, control in controls.items()}
        shown.value = run_html(look_at_run(run, **chosen))

    for control in controls.values():
        control.observe(move, "value")
    move()
    return ipywidgets.VBox([_grid(controls.values()), shown])


def _run_controls(run: Run) -> dict[str, Any]:
    begun_s = _begun_s(run)
    span_s = float(np.nanmax(begun_s)) if np.isfinite(begun_s).any() else 0.0
    metrics = [(label, name) for name, label in LABELS.items()]
    return {
        "metric": ipywidgets.Dropdown(options=metrics, value="ttft_s", **_look("metric")),
        "clock": ipywidgets.Dropdown(options=CLOCKS, value=run_clock(run), **_look("clock")),
        "grouping": ipywidgets.Dropdown(options=GROUPINGS, **_look("groups")),
        "trim_s": ipywidgets.FloatSlider(0.0, max=span_s, step=max(span_s / 100, 1e-3), **_look("warm-up to cut (s)")),
    }
