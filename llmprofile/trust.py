"""How far a run can be trusted, in sentences with a remedy, made in one place."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from llmprofile.errors import one_of
from llmprofile.latency import CLOCKS, LABELS, column_of
from llmprofile.metrics import run_clock
from llmprofile.records import Run
from llmprofile.units import show_rate, show_time

WORDS = ("trustworthy", "biased", "invalid")


@dataclass(frozen=True)
class Verdict:
    """A judgement of a run as read on one clock.

    Attributes
    ----------
    word : {"trustworthy", "biased", "invalid"}
    clock : str
    sentences : tuple of str
        Why, with a remedy; what holds for another clock comes as a note at the end.
    """

    word: str
    clock: str
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([f"{self.word}:", *self.sentences])

    def _repr_html_(self) -> str:
        return f"<div><b>{self.word}</b> ({self.clock} clock): {escape(' '.join(self.sentences))}</div>"

    def as_dict(self) -> dict[str, Any]:
        """Plain, for run.json."""
        return {**asdict(self), "sentences": list(self.sentences)}


def verdict(
    run: Run,
    clock: str | None = None,
    *,
    stamped_share: float = 0.99,
    rate_within: float = 0.02,
    lateness_p99_s: float = 0.005,
    bias_s: float = 0.0005,
    bias_share: float = 0.01,
    bounded_share: float = 0.01,
    invalid_bounded_share: float = 0.10,
) -> Verdict:
    """Judge a run: stamps, rate and lateness kept, no lost worker, and the bias of its mean TTFT (or latency).

    Parameters
    ----------
    run : Run
    clock : {"wire", "seen", "handled"}, optional
        The run's own by default.
    stamped_share, rate_within, lateness_p99_s, bias_s, bias_share, bounded_share, invalid_bounded_share : float
        Thresholds: a run is kept to them.

    Examples
    --------
    >>> lp.verdict(run).clock
    'wire'
    """
    clock = one_of("clock", clock or run_clock(run), CLOCKS)
    invalid = [
        *_lost(run),
        *_no_ok(run),
        *_unstamped(run, clock, stamped_share),
        *_rate_missed(run, rate_within),
        *_late(run, lateness_p99_s),
        *_bounded(run, clock, invalid_bounded_share),
    ]
    biased = _biased(run, clock, bias_s, bias_share)
    if not invalid:
        biased += _bounded(run, clock, bounded_share)
    word = "invalid" if invalid else "biased" if biased else "trustworthy"
    sentences = invalid + biased or [_all_well(run, clock)]
    return Verdict(word, clock, (*sentences, *_notes(run, clock, bias_s, bias_share)))


def _ok(run: Run) -> Any:
    return run.requests[run.requests["outcome"] == "ok"]


def _values(column: Any) -> Any:
    values = column.to_numpy(float, na_value=np.nan)
    return values[~np.isnan(values)]


def _lost(run: Run) -> list[str]:
    n = run.meta["lost_workers"]
    return [f"{n} worker(s) died, {run.meta['lost_requests']} requests were lost; run it again."] if n else []


def _no_ok(run: Run) -> list[str]:
    return [] if len(_ok(run)) else ["No request succeeded; see the column error of run.requests."]


def _unstamped(run: Run, clock: str, least: float) -> list[str]:
    reads, unstamped = run.meta.get("reads", 0), run.meta.get("unstamped_reads", 0)
    if clock != "wire" or not reads or 1 - unstamped / reads >= least:
        return []
    return [f"Only {1 - unstamped / reads:.1%} of the reads carry a kernel stamp, {least:.0%} are needed."]


def _rate_missed(run: Run, within: float) -> list[str]:
    drawn, achieved = run.meta["rates"]["drawn_per_s"], run.meta["rates"]["achieved_per_s"]
    if drawn is None or achieved is None or abs(achieved / drawn - 1) <= within or run.meta["ended"] != "complete":
        return []
    return [
        f"The rate was {show_rate(achieved)} where {show_rate(drawn)} was drawn, off by more than {within:.0%}; "
        "use more processes or a lower rate."
    ]


def _late(run: Run, most_s: float) -> list[str]:
    lateness_s = _values(run.requests["lateness_s"])
    if run.meta["asked"]["rate_per_s"] is None or not len(lateness_s):
        return []
    mean_s = np.mean(_values(_ok(run)["e2e_seen_s"]) if len(_ok(run)) else [0.0])
    p99_s, allowed_s = float(np.quantile(lateness_s, 0.99)), max(most_s, 0.01 * float(mean_s))
    if p99_s <= allowed_s:
        return []
    return [
        f"Requests left late: p99 of lateness is {show_time(p99_s)}, above {show_time(allowed_s)}; "
        "use more processes, a lower rate, or no cap on the requests in flight."
    ]


def _bounded(run: Run, clock: str, most: float) -> list[str]:
    bounded = _values(_ok(run)["bounded"].astype("Float64"))
    if clock != "wire" or not len(bounded) or bounded.mean() <= most:
        return []
    return [
        f"{bounded.mean():.1%} of the first tokens shared a read with what followed, so that their times are known "
        "only within a bracket; use more processes, if it isn't the server that sends them together."
    ]


def _bias(run: Run, clock: str) -> tuple[str, float, float]:
    """(metric, mean bias, mean truth) of the clock against the wire, over requests that have both; NaN without any."""
    ok = _ok(run)
    for metric in ("ttft_s", "e2e_s"):
        reported, true = (ok[column_of(metric, c)].to_numpy(float, na_value=np.nan) for c in (clock, "wire"))
        both = ~np.isnan(reported) & ~np.isnan(true)
        if both.any():
            return LABELS[metric], float(np.mean((reported - true)[both])), float(np.mean(true[both]))
    return "TTFT", math.nan, math.nan


def _biased(run: Run, clock: str, most_s: float, most_share: float) -> list[str]:
    if clock == "wire":
        return []
    metric, bias_s, true_s = _bias(run, clock)
    if math.isnan(bias_s):
        return ["The kernel's stamps are missing, so the client's bias is unknown."] if len(_ok(run)) else []
    if abs(bias_s) <= max(most_s, most_share * true_s):
        return []
    return [
        f"Mean {metric} on the {clock} clock is off by {show_time(bias_s)} ({bias_s / true_s:+.1%} of the true "
        f"{show_time(true_s)}); read the wire clock, or use the stamped client or more processes."
    ]


def _notes(run: Run, clock: str, most_s: float, most_share: float) -> list[str]:
    """What an ordinary clock would have said of a run that is read on the wire."""
    metric, bias_s, true_s = _bias(run, "seen")
    notes = []
    if clock == "wire" and abs(bias_s) > max(most_s, most_share * true_s):
        notes.append(f"Note: this client's own clock would have put mean {metric} off by {show_time(bias_s)}.")
    if run.meta.get("clock_steps"):
        notes.append(f"Note: the wall clock was set {run.meta['clock_steps']} time(s) during the run; corrected.")
    return notes


def _all_well(run: Run, clock: str) -> str:
    metric, bias_s, _ = _bias(run, clock)
    if clock == "wire":
        return "the times are the kernel's, rate and lateness were kept."
    return f"mean {metric} on the {clock} clock is off by {show_time(bias_s)}, rate and lateness were kept."
