"""A run, or two compared, as one HTML file for somebody who has neither Python nor the run.

Nothing in it comes from elsewhere: figures and style are inside, there is no script, and the page forbids both to load
and to run anything. All text from outside is escaped.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from llmprofile import plots
from llmprofile.bias import BiasTable, separate_bias
from llmprofile.comparison import asked_differences, differences
from llmprofile.errors import UsageError
from llmprofile.fitting import FitResult, fit_batch, fit_mg1
from llmprofile.latency import LABELS
from llmprofile.markup import card, lines, table
from llmprofile.metrics import run_clock
from llmprofile.records import Run, summary_table
from llmprofile.trust import verdict
from llmprofile.units import show_rate, show_time

MOST_ERRORS, LONGEST_TEXT = 10, 300
TIMELINE_ROWS, TIMELINE_TOKENS = 20, 2000
"""The timeline shows so many requests, or fewer where they have many tokens: each is a mark in the file."""
_WORKER_FACTS = (
    "worker",
    "host",
    "cpu_s",
    "stamping",
    "involuntary_switches",
    "peak_memory_bytes",
    "affinity",
    "failure",
)


def report(run: Run | Sequence[Run], path: Path | str) -> Path:
    """Write a run, or two that are compared, as one HTML file that needs nothing else.

    Of one run: verdict, what was asked, outcomes, rates, latencies and bias with their intervals, figures, the queue
    that its client was, machine, versions, seed and salt. Of two: the differences of their means and p99s with
    intervals, what differs in what was asked, and both runs side by side.

    Parameters
    ----------
    run : Run, or a sequence of two
    path : path
        A file that doesn't exist yet.

    Returns
    -------
    Path

    Raises
    ------
    UsageError
        The file exists or can't be written, or there are not one or two runs. Then nothing was written.

    Examples
    --------
    >>> report(run, "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    True
    """
    runs = [run] if isinstance(run, Run) else list(run) if isinstance(run, Sequence) else []
    if len(runs) not in (1, 2) or not all(isinstance(r, Run) for r in runs):
        raise UsageError("a report is of one Run, or of a sequence of two to compare")
    path = new_file(path)
    page = _one(runs[0]) if len(runs) == 1 else _two(*runs)
    _write(path, page.encode("utf-8", "backslashreplace"))
    return path


def new_file(path: Path | str) -> Path:
    """A file that can be made, or a sentence that says why not.

    Raises
    ------
    UsageError
        It exists, or its folder doesn't.

    Examples
    --------
    >>> new_file("report.html").name
    'report.html'
    """
    path = Path(path)
    try:
        exists = path.exists() or path.is_symlink()
    except OSError as error:  # such as a name that is too long
        raise UsageError(f"{path} can't be written: {error.strerror}") from None
    if exists:
        raise UsageError(_EXISTS.format(path))
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} can't be written: {path.absolute().parent} is not a folder")
    return path


_EXISTS = "{} exists; a report overwrites nothing, name a new file"


def _write(path: Path, page: bytes) -> None:
    """Write a new file whole or not at all."""
    try:
        with path.open("xb") as file:
            try:
                file.write(page)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        raise UsageError(_EXISTS.format(path)) from None
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from None


# one run


def _one(run: Run) -> str:
    asked = run.meta["asked"]
    bias, (fits, unfit) = separate_bias(run), _fits(run)
    return _page(
        f"Run {run.meta['run_id']}",
        f"{_said('', asked.get('model'))} at {_said('', asked.get('url'))}, {run.client} client, {_started(run)}",
        _verdict(run),
        _section("What was asked", _facts(_asked(run)), f"<pre>{escape(str(asked.get('call', '')))}</pre>"),
        _section("Outcomes", table(_outcomes(run)), _errors(run)),
        _section("Rates", _facts(_rates(run))),
        _latencies("Latencies", run),
        _section("Bias of the client's own clock", bias._repr_html_()),
        _section("Figures", _pair(_run_figures(run, bias))),
        _section("The client as a queue", *unfit, _pair([*_fit_figures(fits), *(fit._repr_html_() for fit in fits)])),
        _section("Machine", _facts(run.meta.get("machine", {})), _workers(run)),
        _section("Versions", _facts(run.meta.get("versions", {}))),
        _WORDS,
    )


def _verdict(run: Run) -> str:
    found = run.meta.get("verdict") or verdict(run).as_dict()
    return card(f"{found['word']} ({found['clock']} clock)", found["sentences"], word=found["word"])


def _started(run: Run) -> str:
    ended = run.meta.get("ended")
    early = "" if ended == "complete" else f", ended early ({ended})" if ended else ", not collected"
    return f"started {run.meta.get('started_utc', 'at an unknown time')}{early}"


def _asked(run: Run) -> dict[str, Any]:
    """All that was asked, but for what wasn't used."""
    unused: tuple[Any, ...] = (None, [], "")
    return {name: value for name, value in run.meta["asked"].items() if name != "call" and value not in unused}


def _outcomes(run: Run) -> pd.DataFrame:
    counts = run.meta["outcomes"]
    total = sum(counts.values())
    rows = {outcome: [f"{n:,}", f"{n / total:.1%}"] for outcome, n in counts.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["requests", "share"]).rename_axis("outcome")


def _errors(run: Run) -> str:
    """The commonest reasons why requests came to nothing, in the words of the server or the system."""
    beside = {name: run.meta.get(name, 0) for name in ("lost_workers", "lost_requests", "resent", "clock_steps")}
    counted = [f"{name.replace('_', ' ')}: {n}" for name, n in beside.items() if n]
    failed = run.requests[run.requests["outcome"] != "ok"]
    found = failed.groupby(["outcome", "status", "error"], dropna=False).size().sort_values(ascending=False)
    shown = found.head(MOST_ERRORS).rename("requests").reset_index()
    shown["error"] = [_short(text) for text in shown["error"]]
    more = [f"and {len(found) - len(shown)} more kinds"] if len(found) > len(shown) else []
    return f'<div class="facts">{table(shown)}</div><small>{lines([*counted, *more])}</small>'


def _short(text: Any) -> Any:
    return text[:LONGEST_TEXT] + " …" if isinstance(text, str) and len(text) > LONGEST_TEXT else text


def _rates(run: Run) -> dict[str, Any]:
    words = {"asked_per_s": "asked", "drawn_per_s": "drawn", "achieved_per_s": "achieved", "tokens_per_s": "tokens"}
    rates = run.meta["rates"]
    return {word: show_rate(rates[name]) for name, word in words.items() if rates.get(name) is not None}


def _latencies(title: str, run: Run) -> str:
    shown, notes = summary_table(run.meta["summary"])
    if shown.empty:
        return _section(title, "<p>No request has any.</p>")
    about = "Of the ok requests, with 95 % intervals by a bootstrap over blocks of time."
    return _section(title, f"<p>{about}</p>", table(shown), f"<small>{lines(notes)}</small>")


def _fits(run: Run) -> tuple[list[FitResult], list[str]]:
    """The run's client as a queue, the better fit first; and why it can't be one."""
    try:
        fits = [fit_mg1(run), fit_batch(run)]
    except UsageError as error:
        return [], [f"<p>No queue is fitted: {escape(str(error))}.</p>"]
    return sorted(fits, key=_misfit), []


def _misfit(fit: FitResult) -> float:
    predicted_s, measured_s = (fit.times[name].to_dict()["mean"] for name in ("predicted_s", "measured_s"))
    return float(abs(predicted_s / measured_s - 1))


def _workers(run: Run) -> str:
    workers = run.meta.get("workers") or []
    rows = [{name: _said(name, of.get(name)) for name in _WORKER_FACTS} for of in workers]
    return f'<div class="facts">{table(pd.DataFrame(rows))}</div>'


# figures


def _run_figures(run: Run, bias: BiasTable) -> list[str]:
    figures = [
        _figure("clocks", lambda ax: plots.clocks(run, ax=ax), "TTFT on both clocks"),
        _figure("latency", lambda ax: plots.latency(run, ax=ax), "TTFT and its percentiles"),
        _figure("ntpot", lambda ax: plots.ntpot(run, ax=ax), "NTPOT and its percentiles"),
        _figure("timeline", lambda ax: plots.timeline(run, _timeline_rows(run), ax), "the first requests"),
    ]
    rate_per_s = run.meta["rates"].get("achieved_per_s")
    if run.client == "conventional" and rate_per_s:
        parts = {float(f"{rate_per_s:.3g}"): bias}
        figures.append(_figure("parts", lambda ax: plots.decomposition(parts, ax), "what the mean TTFT is made of"))
    return figures


def _timeline_rows(run: Run) -> int:
    most = run.requests["output_tokens"].head(TIMELINE_ROWS).max()
    return TIMELINE_ROWS if pd.isna(most) else max(3, min(TIMELINE_ROWS, TIMELINE_TOKENS // max(int(most), 1)))


def _fit_figures(fits: Sequence[FitResult]) -> list[str]:
    if not fits:
        return []
    best = fits[0]
    return [
        _figure("wait", lambda ax: plots.wait_distribution(best, ax), "time in the client, measured and modelled"),
        _figure("dispersion", lambda ax: plots.dispersion(best, ax), "how bunched the arrivals are"),
    ]


def _figure(name: str, draw: Callable[[Any], Any], what: str) -> str:
    """A figure as SVG, or the sentence that says why there is none. `name` keeps its ids apart from other figures'."""
    image, no_facts = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    try:
        ax = draw(plots.blank_axes())
    except UsageError as error:
        return f"<p>No figure of {escape(what)}: {escape(str(error))}.</p>"
    ax.get_figure(root=True).savefig(image, format="svg", transparent=True, metadata=no_facts)
    return f"<figure>{_inline(image.getvalue(), name, what)}</figure>"


_COLOURS = {
    "#333333": "ink", "#555555": "soft", "#6b6b6b": "soft", "#888888": "soft", "#d0d0d0": "line", "#e4e4e4": "faint",
    "#ffffff": "paper", "#0072b2": "blue", "#d55e00": "vermilion", "#009e73": "green", "#e69f00": "orange",
    "#cc79a7": "purple",
}  # fmt: skip
"""The plots' colours, and what the page calls them: in the dark theme they are others."""


def _inline(svg: str, name: str, what: str) -> str:
    """An SVG file as a part of the page, in the page's colours and as wide as there is room."""
    svg = svg[svg.index("<svg") :]
    for pattern in (r"<!--.*?-->", r"<defs>\s*<style.*?</style>\s*</defs>", r'\sxmlns(:\w+)?="[^"]*"'):
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" aria-label="{escape(what)}" \1>', svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('xlink:href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda found: _variable(found[0]), svg)


def _variable(colour: str) -> str:
    return f"var(--{_COLOURS[colour]})" if colour in _COLOURS else colour


# two runs


def _two(a: Run, b: Run) -> str:
    names = [f"{who}: {_name(run)}" for who, run in zip("AB", (a, b), strict=True)]
    of_both = list(zip(names, (a, b), strict=True))
    return _page(
        f"{_name(a)} and {_name(b)} compared",
        "; ".join(f"{name}, {run.client} client, {_started(run)}" for name, run in of_both),
        _pair(f"<h2>{escape(name)}</h2>{_verdict(run)}" for name, run in of_both),
        _section("What was measured", *_measured(a, b)),
        _section("Figures", _pair(_comparing_figures(dict(of_both)))),
        _section("What differs in what was asked", _differing(a, b)),
        _section("Outcomes", _pair(table(_outcomes(run)) + _errors(run) for run in (a, b))),
        _section("Rates", _side_by_side(_rates(a), _rates(b))),
        *(_latencies(f"Latencies of {name}", run) for name, run in of_both),
        *(
            _section(f"Bias of the client's own clock in {name}", separate_bias(run)._repr_html_())
            for name, run in of_both
        ),
        _section("Machine", _side_by_side(*(run.meta.get("machine", {}) for run in (a, b)))),
        _section("Versions", _side_by_side(*(run.meta.get("versions", {}) for run in (a, b)))),
        _section("Calls", *(f"<pre>{escape(str(run.meta['asked'].get('call', '')))}</pre>" for run in (a, b))),
        _WORDS,
    )


def _name(run: Run) -> str:
    return run.folder.absolute().name if run.folder else str(run.meta["run_id"])


def _measured(a: Run, b: Run) -> tuple[str, ...]:
    found = differences(a, b)
    if found.empty:
        return ("<p>The runs have no metric in common.</p>",)
    clocks = [run_clock(run) for run in (a, b)]
    tables = [_differences(found, statistic) for statistic in ("mean", "p99")]
    unlike = f"A is read on its {clocks[0]} clock, B on its {clocks[1]} clock." if len(set(clocks)) > 1 else ""
    return f"<p>{_COMPARED} {unlike}</p>", _pair(map(table, tables)), f"<small>{lines(_reasons(found))}</small>"


def _reasons(found: pd.DataFrame) -> list[str]:
    """Why something is missing, each once, with the metrics it holds for where that isn't all."""
    owners: dict[str, list[str]] = {}
    for metric, note in found["note"].items():
        owners.setdefault(note, []).append(LABELS[str(metric)])
    return [
        note if len(labels) == len(found) else f"{', '.join(labels)}: {note}" for note, labels in owners.items() if note
    ]


def _differences(found: pd.DataFrame, statistic: str) -> pd.DataFrame:
    rows = {}
    for metric, row in found.iterrows():
        times = [show_time(row[f"{statistic}_{who}_s"]) for who in "ab"]
        rows[LABELS[str(metric)]] = [f"{row['n_a']:,}", f"{row['n_b']:,}", *times, _difference(row, statistic)]
    columns = ["n of A", "n of B", "A", "B", "B − A"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(statistic)


_COMPARED = (
    "In brackets: 95 % intervals of the difference, by a bootstrap over blocks of time in each run. An interval that "
    "holds 0 may be chance. They tell of these two runs: what changes from one run to the next of the same kind is not "
    "in them, so compare several runs of each before you call a configuration faster."
)


def _difference(row: Any, statistic: str) -> str:
    gap_s, low_s, high_s = (row[f"{statistic}_{end}_s"] for end in ("difference", "lo", "hi"))
    if pd.isna(gap_s):
        return "–"
    share = f" ({gap_s / row[f'{statistic}_a_s']:+.1%})" if row[f"{statistic}_a_s"] > 0 else ""
    interval = "" if pd.isna(low_s) else f" [{show_time(low_s)}, {show_time(high_s)}]"
    return f"{'+' * bool(gap_s > 0)}{show_time(gap_s)}{share}{interval}".replace("-", "−")


def _comparing_figures(runs: Mapping[str, Run]) -> list[str]:
    metrics = ("ttft_s", "e2e_s", "tpot_s", "ntpot_s")
    return [_figure(m, partial(plots.compare, runs, m, None), f"{LABELS[m]} of both") for m in metrics]


def _differing(a: Run, b: Run) -> str:
    found = asked_differences(a, b)
    if found.empty:
        return "<p>Nothing.</p>"
    return _side_by_side(found["a"].to_dict(), found["b"].to_dict())


def _side_by_side(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> str:
    names = list({**a, **b})
    columns = {who: [_said(name, of.get(name)) for name in names] for who, of in zip("AB", (a, b), strict=True)}
    return f'<div class="facts">{table(pd.DataFrame(columns, names))}</div>'


# the page


def _page(title: str, about: str, *sections: str) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_STYLE}</style>'
    body = f"<h1>{escape(title)}</h1><p>{escape(about)}</p>{''.join(sections)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _pair(parts: Iterable[str]) -> str:
    return f'<div class="pair">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def _facts(facts: Mapping[str, Any]) -> str:
    shown = pd.DataFrame({"": [_said(name, value) for name, value in facts.items()]}, list(facts))
    return f'<div class="facts one">{table(shown)}</div>'


def _said(name: str, value: Any) -> str:
    """A fact in words; its name says in what unit it is."""
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int | float):
        show = show_rate if name.endswith("_per_s") else show_time if name.endswith("_s") else _number
        return f"{value / 1e6:.0f} MB" if name.endswith("_bytes") else show(value)
    return _short(str(value).encode("utf-8", "backslashreplace").decode())  # no table takes half a character


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


_WORDS = _section(
    "Words",
    "<dl>"
    + "".join(
        f"<dt>{word}</dt><dd>{meaning}</dd>"
        for word, meaning in {
            "due, begun, sent": "when a request should leave; when the client's code starts on it; when its first "
            "byte is handed to the kernel.",
            "wire clock": "a token's time is when the kernel received it: what the server and the network took.",
            "seen, handled clock": "a token's time is when the client got round to it, or had dealt with it: what an "
            "ordinary load generator reports. It includes the client's own waiting.",
            "bias": "what the client's own clock says, less what the wire says.",
            "TTFT": "time to first token.",
            "TPOT": "time per output token after the first: (last − first) / (tokens − 1).",
            "ITL": "inter-token latency: the gap before each token after the first.",
            "NTPOT": "normalised time per output token: the whole latency / output tokens.",
            "E2E": "from the start of a request to its last token.",
            "lateness": "sent − due. Not latency: the client's fault, and in no other figure.",
            "verdict": "trustworthy, biased or invalid, with the reason and a remedy.",
        }.items()
    )
    + "</dl>",
)

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #c4ccd4;
  --faint: #e6eaee; --tint: #f5f7f9; --blue: #0072b2; --vermilion: #d55e00; --green: #009e73; --orange: #e69f00;
  --purple: #cc79a7; --jp-success-color1: #1a7f37; --jp-warn-color1: #c27a00; --jp-error-color1: #cf222e;
  --jp-border-color1: #8c959f; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e4e8ec; --soft: #a3adb8; --line: #4a535d; --faint: #2b3138; --tint: #1e2329;
    --blue: #56b4e9; --vermilion: #ff8a3d; --green: #2ecc9b; --orange: #f0b429; --purple: #e29ac4;
    --jp-success-color1: #3fb950; --jp-warn-color1: #e3a008; --jp-error-color1: #ff6b63; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 28px 0 8px; } p { margin: 4px 0 12px; }
table { border-collapse: collapse; margin: 10px 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--faint);
  overflow-wrap: normal; text-wrap: balance; }
th { font-weight: 500; color: var(--soft); } thead th { vertical-align: bottom; border-color: var(--line); }
tbody th, thead th:first-child, .facts th, .facts td { text-align: left; }
@media (min-width: 900px) { td { white-space: nowrap; } }
@media (max-width: 899px) { table { font-size: 11.5px; } td, th { padding-right: 8px; } }
.facts td { overflow-wrap: anywhere; white-space: normal; text-wrap: wrap; }
.facts.one thead { display: none; }
.facts.one table { display: block; }
.facts.one tbody { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr));
  gap: 0 24px; }
.facts.one tr { display: grid; grid-template-columns: 140px 1fr; border-bottom: 1px solid var(--faint); }
.facts.one th, .facts.one td { border: 0; }
pre { margin: 10px 0; padding: 10px; background: var(--tint); white-space: pre-wrap; font-size: 12px; }
small { display: block; color: var(--soft); font-size: 12.5px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 0 32px; }
.pair > div { min-width: 0; }
figure { margin: 8px 0; } svg { display: block; width: 100%; max-width: 720px; height: auto; fill: var(--ink); }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; font-size: 13px; }
dt { font-weight: 500; } dd { margin: 0; }
@media print { body { max-width: none; padding: 0; font-size: 12px; } table { font-size: 10px; }
  td, th { padding-right: 8px; } h2 { break-after: avoid; }
  figure, tr, pre { break-inside: avoid; } }
"""
