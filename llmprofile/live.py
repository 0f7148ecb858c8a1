"""Live figures of a load that is going on, and how they look: a line of text, HTML with curves in SVG.

The workers aren't asked for anything: their counters lie in a memory-mapped file, and what they have finished in files
that are read on from where the last look ended. A few of the finished requests are parsed as all of them will be when
the run has ended, so that a live figure means what the run's own means. Brackets are left to the run's verdict.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmprofile.capture import capture_path
from llmprofile.clock import SLEEP_NS
from llmprofile.latency import LABELS, column_of
from llmprofile.markup import MARKS
from llmprofile.metrics import QUANTILES
from llmprofile.parsing import parse_rows
from llmprofile.records import Run
from llmprofile.trust import BIAS_S, BIAS_SHARE
from llmprofile.units import show_rate, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_ROWS, MOST_BYTES = 32, 150_000
"""Requests parsed in one update, and bytes of their answers after which no further one is."""
MOST_KEPT = 4096
"""The percentiles and the bias are taken over so many of the sampled requests, the latest."""
MOST_TURNS_BYTES = 4 << 20
SHOWN_S = 60.0
"""What the curves show: the last minute."""
AMBER_UP_TO = 5.0
"""Times what a mean TTFT or E2E may be off by; beyond, the light is red."""

_NO_PAIRS = np.zeros((0, 2), np.int64)
_METRICS = ("ttft_s", "e2e_s", "ntpot_s", "lateness_s")
_CURVES = ("at_s", "rate_per_s", "in_flight", "ttft_s", "utilisation")


class Watched(Protocol):
    """What of a load is needed to follow it; `supervise.Load` is one."""

    folder: Path

    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def progress(self) -> Any: ...
    @property
    def result(self) -> Run | Exception | None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class BiasSoFar:
    """How far a mean is off on the client's own clock, over the sampled requests whose wire times are known.

    Attributes
    ----------
    metric, clock : str
        What is off, on which clock (seen or handled).
    mean_s, true_s : float
        By how much, and the mean on the wire; NaN where there are no stamps.
    """

    metric: str
    clock: str
    mean_s: float
    true_s: float

    @property
    def allowed_s(self) -> float:
        return max(BIAS_S, BIAS_SHARE * self.true_s)

    @property
    def light(self) -> tuple[str, str]:
        """(colour, words).

        Examples
        --------
        >>> [BiasSoFar("ttft_s", "seen", off_s, 0.05).light[0] for off_s in (0.0004, -0.002, 0.003, np.nan)]
        ['green', 'amber', 'red', 'grey']
        """
        if math.isnan(self.mean_s):
            return "grey", "unknown"
        times = abs(self.mean_s) / self.allowed_s
        if times <= 1:
            return "green", "on the mark"
        return ("amber", "off") if times <= AMBER_UP_TO else ("red", "far off")


@dataclass(frozen=True)
class Figures:
    """What a dashboard shows at one moment.

    Attributes
    ----------
    state : str
        Of the load, as `Progress` has it.
    total : int or None
        Requests scheduled; None of a closed loop that ends by time.
    share : float
        How much of the load is done, 0 to 1.
    broken_off : int
        Requests that ended before their response did.
    rate_per_s, asked_per_s : float
        Requests sent per second so far, and asked for (NaN in a closed loop).
    turns : bool
        Whether what was asked for are conversations of several requests.
    slots : int or None
        The most requests that may be in flight.
    clock : str
        That of the percentiles.
    percentiles : dict
        Metric to p50, p90, p99, seconds; NaN where the sample can't say.
    utilisation : (processes,) float
        Share of the time that each worker's loop did not sleep, lately.
    outcomes : dict of str to int
        Of the sampled requests; `error` is the latest.
    sampled : int
        Requests parsed so far.
    history : dict of str to (m,) float
        `at_s`, `rate_per_s`, `in_flight`, `ttft_s`, `utilisation`, a value an update.
    """

    run_id: str
    state: str
    elapsed_s: float
    done: int
    total: int | None
    share: float
    in_flight: int
    broken_off: int
    rate_per_s: float
    asked_per_s: float
    turns: bool
    slots: int | None
    clock: str
    percentiles: dict[str, dict[str, float]]
    utilisation: Floats
    bias: BiasSoFar
    outcomes: dict[str, int]
    error: str | None
    sampled: int
    history: dict[str, Floats]


class _Tail:
    """One worker's files, read on from where the last look ended."""

    def __init__(self, folder: Path, worker: int) -> None:
        self.worker = worker
        self.utilisation = math.nan
        self._paths = {what: capture_path(folder, what, worker) for what in ("requests", "cycles", "clock")}
        self._read = dict.fromkeys(self._paths, 0)
        self._schema_bytes = 0
        self._samples = _NO_PAIRS
        self._returned_ns: int | None = None

    def clock(self) -> Ints:
        """All samples of the wall clock's offset."""
        self._samples = np.concatenate([self._samples, self._pairs("clock")])
        return self._samples

    def look_at_turns(self) -> None:
        """Note how busy the loop was in the turns that are new."""
        turns = self._pairs("cycles")
        if len(turns):
            self.utilisation = busy_share(turns, self._returned_ns)
            self._returned_ns = int(turns[-1, 1])

    def _pairs(self, what: str) -> Ints:
        """What a flat file has got since the last call, (n, 2) ns; of very much only the end."""
        try:
            with self._paths[what].open("rb") as file:
                whole = file.seek(0, 2) // 16 * 16
                start = max(self._read[what], whole - MOST_TURNS_BYTES)
                file.seek(start)
                data = file.read(whole - start)
        except OSError:  # not there yet, or merged already
            return _NO_PAIRS
        if start > self._read[what]:
            self._returned_ns = None  # what lies between was skipped
        self._read[what] = start + len(data)
        return np.frombuffer(data, np.int64).reshape(-1, 2)

    def batches(self) -> list[tuple[int, int]]:
        """Where the new batches of requests start and end; mapped, so that their bodies aren't read for it."""
        found: list[tuple[int, int]] = []
        try:
            with pa.memory_map(str(self._paths["requests"])) as file:
                file.seek(self._read["requests"])
                while True:
                    message = pa.ipc.read_message(file)
                    start, end = self._read["requests"], file.tell()
                    if message.type == "schema":
                        self._schema_bytes = end
                    else:
                        found.append((start, end))
                    self._read["requests"] = end
        except (EOFError, OSError, pa.ArrowInvalid):  # no more, or not whole yet
            return found

    def rows(self, start: int, end: int) -> dict[str, list[Any]]:
        """A batch as columns; none when the captures were merged meanwhile."""
        try:
            with self._paths["requests"].open("rb") as file:
                data = file.read(self._schema_bytes)
                file.seek(start)
                data += file.read(end - start)
        except OSError:
            return {"bytes": []}
        # threads that Arrow made here would keep the low priority of this one for ever
        options = pa.ipc.IpcReadOptions(use_threads=False)
        columns: dict[str, list[Any]] = pa.ipc.open_stream(data, options=options).read_next_batch().to_pydict()
        return columns


def busy_share(turns: Ints, returned_ns: int | None = None) -> float:
    """Share of the time that a loop did not sleep in a poll, NaN when there is no time.

    Parameters
    ----------
    turns : (n, 2) int64
        When each poll was entered and when it returned, at least one.
    returned_ns : int, optional
        When the poll before them returned.

    Examples
    --------
    >>> busy_share(np.array([[30_000, 130_000], [150_000, 200_000]]), returned_ns=0)
    0.25
    """
    start_ns = int(turns[0, 0]) if returned_ns is None else returned_ns
    polls_ns, span_ns = turns[:, 1] - turns[:, 0], int(turns[-1, 1]) - start_ns
    return 1 - float(polls_ns[polls_ns > SLEEP_NS].sum()) / span_ns if span_ns > 0 else math.nan


class _Sample:
    """The latest sampled requests: their latencies on the wire and on the client's own clock."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.count = 0
        self.outcomes: Counter[str] = Counter()
        self.error: str | None = None
        columns = [column_of(metric, clock) for clock in ("wire", own) for metric in _METRICS]
        self._ring = {name: np.full(MOST_KEPT, np.nan) for name in columns}

    def add(self, table: pa.Table) -> None:
        """Take in parsed requests: latencies of those that are ok, lateness of all."""
        outcomes = table["outcome"].to_pylist()
        self.outcomes.update(outcomes)
        self.error = next((e for e in reversed(table["error"].to_pylist()) if e), self.error)
        places = (self.count + np.arange(len(outcomes))) % MOST_KEPT
        ok = np.array([outcome == "ok" for outcome in outcomes], bool)
        for name, kept in self._ring.items():
            kept[places] = np.where(ok | (name == "lateness_s"), table[name].to_numpy(), np.nan)
        self.count += len(outcomes)

    def of(self, metric: str, clock: str, newest: int = MOST_KEPT) -> Floats:
        """A metric of the newest sampled requests where they have one."""
        places = (self.count - 1 - np.arange(min(newest, self.count, MOST_KEPT))) % MOST_KEPT
        values = self._ring[column_of(metric, clock)][places]
        return values[~np.isnan(values)]

    @property
    def clock(self) -> str:
        """The clock that the run will be read on, as `metrics.run_clock` has it."""
        if self.own == "handled":
            return "handled"
        stamped = len(self.of("e2e_s", "wire")) or not len(self.of("e2e_s", "seen"))
        return "wire" if stamped else "seen"

    def percentiles(self) -> dict[str, dict[str, float]]:
        return {metric: _percentiles(self.of(metric, self.clock)) for metric in ("ttft_s", "ntpot_s", "lateness_s")}

    def bias(self) -> BiasSoFar:
        """Of TTFT; of E2E where nothing is a stream."""
        for metric in ("ttft_s", "e2e_s"):
            wire, own = self._ring[column_of(metric, "wire")], self._ring[column_of(metric, self.own)]
            both = ~np.isnan(own - wire)
            if both.any():
                return BiasSoFar(metric, self.own, float(np.mean((own - wire)[both])), float(np.mean(wire[both])))
        return BiasSoFar("ttft_s", self.own, math.nan, math.nan)


def _percentiles(values: Floats) -> dict[str, float]:
    enough = {name: q for name, q in QUANTILES.items() if len(values) >= round(1 / (1 - q))}
    return {name: float(np.quantile(values, q)) if name in enough else math.nan for name, q in QUANTILES.items()}


class Live:
    """Follows a load: each `update` reads what is new and gives the figures of the moment; so does its repr, as a line.

    Parameters
    ----------
    load : Watched

    Examples
    --------
    >>> load = lp.start_load(server.url, lp.Poisson(rate_per_s=100), n=20, output_tokens=4)
    >>> live = Live(load)
    >>> _ = load.wait()
    >>> live.update().done
    20
    """

    def __init__(self, load: Watched) -> None:
        asked = load.meta["asked"]
        self._load = load
        self._tails = [_Tail(load.folder, worker) for worker in range(asked["processes"])]
        self._sample = _Sample("seen" if asked["client"] == "stamped" else "handled")
        self._rng = np.random.default_rng(0)
        self._history: deque[tuple[float, ...]] = deque(maxlen=int(4 * SHOWN_S))
        self._begun: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=5)
        self._rate_per_s = math.nan

    def __repr__(self) -> str:
        return as_line(self.update())

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        return {"text/plain": repr(self)}

    def update(self) -> Figures:
        """Read what is new, a bounded part of it, and sum up."""
        progress = self._load.progress
        if progress.state == "running":
            taken = self._read()
            self._note(progress, taken)
        return self._figures(progress)

    def _read(self) -> int:
        """Parse some of the new requests, at random; how many."""
        new = [(tail, place) for tail in self._tails for place in tail.batches()]
        before, size = self._sample.count, 0
        for k in self._rng.permutation(len(new)):
            rows = MOST_ROWS - self._sample.count + before
            if rows <= 0 or size >= MOST_BYTES:
                break
            tail, place = new[k]
            batch, clock = tail.rows(*place), tail.clock()
            sizes = np.array([len(body) for body in batch["bytes"]], np.int64)
            order = self._rng.permutation(len(sizes))[:rows]
            keep = order[: np.searchsorted(np.cumsum(sizes[order]), MOST_BYTES - size) + 1]
            size += int(sizes[keep].sum())
            if len(keep) and len(clock):
                chosen = {name: [column[row] for row in keep] for name, column in batch.items()}
                self._sample.add(parse_rows(chosen, clock, tail.worker))
        for tail in self._tails:
            tail.look_at_turns()
        return self._sample.count - before

    def _note(self, progress: Any, taken: int) -> None:
        """Add a point to the curves."""
        (then_s, then), (_, before) = self._begun[0], self._begun[-1]
        now_s, begun = progress.elapsed_s, progress.begun
        self._begun.append((now_s, begun))
        if begun > max(before, 1):  # what is sent no more is no lower rate
            self._rate_per_s = (begun - 1) / now_s
        ttft_s = self._sample.of("ttft_s", self._sample.clock, taken)
        rate_per_s = (begun - then) / (now_s - then_s) if now_s > then_s else math.nan
        middle_s = float(np.median(ttft_s)) if len(ttft_s) else math.nan
        self._history.append((now_s, rate_per_s, progress.in_flight, middle_s, _mean(self._utilisation())))

    def _utilisation(self) -> Floats:
        return np.array([tail.utilisation for tail in self._tails])

    def _figures(self, progress: Any) -> Figures:
        meta, sample = self._load.meta, self._sample
        asked, asked_per_s = meta["asked"], meta["asked"]["rate_per_s"]
        open_ended = asked["n"] is None and asked_per_s is None
        share = progress.elapsed_s / asked["duration_s"] if open_ended else progress.done / progress.scheduled
        points = np.array(self._history, float).reshape(-1, len(_CURVES))
        return Figures(
            run_id=meta["run_id"],
            state=progress.state,
            elapsed_s=progress.elapsed_s,
            done=progress.done,
            total=None if open_ended else progress.scheduled,
            share=min(share, 1.0),
            in_flight=progress.in_flight,
            broken_off=progress.failed,
            rate_per_s=self._rate_per_s,
            asked_per_s=math.nan if asked_per_s is None else asked_per_s,
            turns=asked.get("conversation") is not None,
            slots=asked["concurrency"],
            clock=sample.clock,
            percentiles=sample.percentiles(),
            utilisation=self._utilisation(),
            bias=sample.bias(),
            outcomes=dict(sample.outcomes),
            error=sample.error,
            sampled=sample.count,
            history=dict(zip(_CURVES, points.T, strict=True)),
        )


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


# --- how they look ---


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which can show more than text.

    Examples
    --------
    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def as_line(figures: Figures) -> str:
    """The figures as a line of plain text."""
    f = figures
    bias_text = show_bias(f.bias.mean_s)
    ttft, late = f.percentiles["ttft_s"], f.percentiles["lateness_s"]
    parts = [
        f"{f.state} {f.elapsed_s:.1f} s: {_how_many(f)}, {f.in_flight} in flight",
        f"{show_rate(f.rate_per_s)} ({_asked(f)})",
        f"TTFT p50 {show_time(ttft['p50'])}, p99 {show_time(ttft['p99'])}",
        f"lateness p99 {show_time(late['p99'])}",
        f"ρ {show_share(_mean(f.utilisation))}",
        f"bias {bias_text}: {f.bias.light[1]}",
    ]
    return "; ".join(parts)


def show_bias(seconds: float) -> str:
    """A signed time, "–" for NaN."""
    return ("" if math.isnan(seconds) or seconds < 0 else "+") + show_time(seconds)


def show_share(share: float) -> str:
    """A share with two digits, "–" for NaN."""
    return "–" if math.isnan(share) else f"{share:.2f}"


def _how_many(f: Figures) -> str:
    return f"{f.done:,} done" if f.total is None else f"{f.done:,} of {f.total:,} done"


def _asked(f: Figures) -> str:
    if math.isnan(f.asked_per_s):
        return f"closed loop of {f.slots:,}"
    what = "conversations asked" if f.turns else "asked"
    return f"{show_rate(f.asked_per_s)} {what}" + (f", at most {f.slots:,} in flight" if f.slots else "")


_STYLE = """<style>
.llmprofile-live{font:13px/1.4 var(--jp-ui-font-family,system-ui,sans-serif);max-width:1160px;
 color:var(--jp-ui-font-color1,currentColor);font-variant-numeric:tabular-nums;--line:var(--jp-border-color2,#8886)}
.llmprofile-live small{font-size:11.5px;opacity:.8}
.llmprofile-live .bar{height:6px;border-radius:3px;background:var(--line);margin:4px 0 10px;overflow:hidden}
.llmprofile-live .bar div{height:100%;background:var(--jp-brand-color1,#1976d2)}
.llmprofile-live .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:8px}
.llmprofile-live .tile{border:1px solid var(--line);border-radius:4px;padding:6px 10px;min-width:0;
 overflow-wrap:anywhere;display:flex;flex-direction:column}
.llmprofile-live .foot{display:block;margin-top:4px}
.llmprofile-live .big{font-size:20px;line-height:1.5}
.llmprofile-live .three{display:grid;grid-template-columns:repeat(3,1fr)}
.llmprofile-live .big>span{font-size:15px}
.llmprofile-live .three span{font-size:15px;line-height:1.6;white-space:nowrap}
.llmprofile-live svg{display:block;width:100%;height:34px;margin-top:auto;color:var(--jp-brand-color1,#1976d2)}
.llmprofile-live .light{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.35em}
</style>"""


def as_html(figures: Figures) -> str:
    """The figures as HTML with curves in SVG, for a light or a dark page."""
    tiles = "".join(f'<div class="tile"><b>{escape(name)}</b>{body}</div>' for name, body in _tiles(figures))
    head = f"<b>{escape(figures.state)}</b> · {_how_many(figures)} · {figures.elapsed_s:.1f} s"
    return (
        f'{_STYLE}<div class="llmprofile-live"><div>{head} <small>run {escape(figures.run_id)}</small></div>'
        f'<div class="bar"><div style="width:{100 * figures.share:.1f}%"></div></div>'
        f'<div class="tiles">{tiles}</div><small class="foot">{escape(_sampled(figures))}</small></div>'
    )


def _sampled(f: Figures) -> str:
    newest = f"; percentiles and bias over its latest {MOST_KEPT:,}" if f.sampled > MOST_KEPT else ""
    return (
        f"Latencies, bias and outcomes: sample of {f.sampled:,} requests{newest}. Curves: the last minute, from 0 up."
    )


def _tiles(f: Figures) -> Iterator[tuple[str, str]]:
    """(heading, HTML) of each."""
    history = f.history
    yield "Rate", _big(show_rate(f.rate_per_s), _asked(f)) + sparkline(history["at_s"], history["rate_per_s"])
    yield "In flight", _big(f"{f.in_flight:,}") + sparkline(history["at_s"], history["in_flight"])
    ttft = sparkline(history["at_s"], history["ttft_s"])
    yield f"{LABELS['ttft_s']} ({f.clock} clock)", _three(f.percentiles["ttft_s"]) + ttft
    yield f"{LABELS['ntpot_s']} ({f.clock} clock)", _three(f.percentiles["ntpot_s"])
    yield "Lateness", _three(f.percentiles["lateness_s"]) + "<small>sent after it was due: the client's fault</small>"
    yield "Client utilisation ρ", _utilisation(f) + sparkline(history["at_s"], history["utilisation"], most=1.0)
    yield f"Bias of the mean {LABELS[f.bias.metric]} so far", _bias(f)
    yield "Outcomes", _outcomes(f)


def _big(text: str, small: str = "") -> str:
    return f'<div class="big">{escape(text)}</div>' + (f"<small>{escape(small)}</small>" if small else "")


def _three(percentiles: dict[str, float]) -> str:
    cells = [f"<div><small>{name}</small><br><span>{show_time(s)}</span></div>" for name, s in percentiles.items()]
    return f'<div class="three">{"".join(cells)}</div>'


def _utilisation(f: Figures) -> str:
    known = f.utilisation[~np.isnan(f.utilisation)]
    busiest = f"; the busiest of {len(known)} workers: {known.max():.2f}" if len(known) > 1 else ""
    return _big(show_share(_mean(known)), f"share of the time that its loop did not sleep{busiest}")


_COLOURS = {"green": MARKS["trustworthy"], "amber": MARKS["biased"], "red": MARKS["invalid"], "grey": "#888"}


def _light(colour: str, html: str) -> str:
    return f'<div class="big"><span class="light {colour}" style="background:{_COLOURS[colour]}"></span>{html}</div>'


def _bias(f: Figures) -> str:
    colour, words = f.bias.light
    if colour == "grey":
        why = "no kernel stamps in the sample" if f.sampled else "nothing parsed yet"
        return f"{_light(colour, words)}<small>{why}</small>"
    allowed = f"up to {show_time(f.bias.allowed_s)} is on the mark"
    figures = "the figures here are the wire's" if f.clock == "wire" else "it is in the figures here"
    light = _light(colour, f"{show_bias(f.bias.mean_s)}: <span>{words}</span>")
    return f"{light}<small>on the client's own clock ({f.bias.clock}); {allowed}; {figures}</small>"


def _outcomes(f: Figures) -> str:
    shares = ", ".join(f"{n / f.sampled:.1%} {outcome}" for outcome, n in f.outcomes.items())
    broken = f"{f.broken_off:,} broken off" if f.broken_off else ""
    error = f"latest error: {f.error[:160]}" if f.error else ""
    lines = [escape(line) for line in (f"of the sample: {shares or '–'}", broken, error) if line]
    return f'<div class="big">{f.done:,} done</div><small>{"<br>".join(lines)}</small>'


_WIDE, _HIGH = 200.0, 30.0


def sparkline(at_s: Floats, values: Floats, most: float | None = None) -> str:
    """A curve of the last minute as SVG, from 0 up to `most` or the highest value; NaN is left out.

    Examples
    --------
    >>> "<polyline" in sparkline(np.array([0.0, 1.0]), np.array([3.0, np.nan]))
    True
    """
    known = ~np.isnan(values)
    now_s = float(at_s[-1]) if len(at_s) else 0.0
    known &= at_s >= now_s - SHOWN_S
    span_s = min(max(now_s, 1.0), SHOWN_S)
    top = most or float(np.max(values[known], initial=0.0)) or 1.0
    x = _WIDE * (1 - (now_s - at_s[known]) / span_s)
    y = _HIGH - (_HIGH - 3) * np.minimum(values[known] / top, 1.0)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    line = 'fill="none" stroke="currentColor" vector-effect="non-scaling-stroke"'
    return (
        f'<svg viewBox="0 0 {_WIDE:g} {_HIGH + 2:g}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="M0 {_HIGH:g}H{_WIDE:g}" {line} opacity=".3"/>'
        f'<polyline points="{points}" {line} stroke-width="1.5"/></svg>'
    )
