"""How far a run can be trusted, in sentences with a remedy, made in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmprofile.bias import (
    LEAST_FOR_P99,
    bounded_first_tokens,
    metric_bias,
    own_clock,
    paired_latencies,
    reordered_note,
)
from llmprofile.errors import UsageError, one_of
from llmprofile.estimate import MOST_PROCESSES, processes_needed
from llmprofile.fitting import fit_batch
from llmprofile.latency import CLOCKS, LABELS
from llmprofile.markup import card
from llmprofile.metrics import first_turns, run_clock
from llmprofile.records import Run
from llmprofile.steady import steady_state
from llmprofile.units import NS_PER_S, show_rate, show_time

WORDS = ("trustworthy", "biased", "invalid")
RATE_WITHIN = 0.02
"""How far the achieved rate may be from the drawn one, as a share of it."""
BIAS_S, BIAS_SHARE = 0.0005, 0.01
"""What a mean TTFT or E2E may be off by: seconds, or a share of it if that is more."""
MOST_FITTED = 200_000
"""Events of a biased run from which the processes that it needs are worked out."""
STARVED_TIMES, STARVED_SHARE = 1.5, 0.01
"""A client lacked a processor when its loop was at work for so many times its CPU time, and longer by such a share of
the run: polls cost CPU time as well, so that the loop's own work is less, by rights."""
_CHANGES = ("Ramp(", "Stages(", "Trace(")


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

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return card(f"{self.word} ({self.clock} clock)", self.sentences, word=self.word)

    def as_dict(self) -> dict[str, Any]:
        """Plain, for run.json."""
        return {**asdict(self), "sentences": list(self.sentences)}


def verdict(
    run: Run,
    clock: str | None = None,
    *,
    stamped_share: float = 0.99,
    rate_within: float = RATE_WITHIN,
    lateness_p99_s: float = 0.005,
    lateness_share: float = 0.01,
    bias_s: float = BIAS_S,
    bias_token_s: float = 0.00005,
    bias_share: float = BIAS_SHARE,
    bounded_share: float = 0.01,
    invalid_bounded_share: float = 0.10,
) -> Verdict:
    """Judge a run: stamps, rate and lateness kept, no lost worker, and the bias of its latencies' mean and p99.

    Of a load that was asked to be steady, a note says when it never was: see `steady_state`.

    Parameters
    ----------
    run : Run
    clock : {"wire", "seen", "handled"}, optional
        The run's own by default.
    stamped_share : float
        Least share of reads that carry a kernel stamp.
    rate_within : float
        How far the achieved rate may be from the drawn one, as a share of it.
    lateness_p99_s, lateness_share : float
        Most that the p99 of lateness may be: seconds, or a share of the mean E2E if that is more.
    bias_s, bias_token_s, bias_share : float
        Most that a mean or a p99 may be off: seconds (TTFT, E2E; and TPOT, ITL, NTPOT), or a share of the true value
        if that is more.
    bounded_share, invalid_bounded_share : float
        Most of the first tokens that may be bounded before a run is biased, and before it is invalid.

    Raises
    ------
    UsageError
        An unknown clock.

    Examples
    --------
    >>> lp.verdict(run).clock
    'wire'
    """
    clock = one_of("clock", clock or run_clock(run), CLOCKS)
    limits = _Limits(bias_s, bias_token_s, bias_share)
    too_many = _bounded(run, clock, invalid_bounded_share) if clock == "wire" else []
    invalid = [
        *_lost(run),
        *_no_ok(run),
        *(_unstamped(run, stamped_share) if clock == "wire" else []),
        *_rate_missed(run, rate_within),
        *_late(run, lateness_p99_s, lateness_share),
        *too_many,
    ]
    biased = _biased(run, clock, limits, stamped_share)
    biased += [] if too_many else _bounded(run, clock, bounded_share)
    word = "invalid" if invalid else "biased" if biased else "trustworthy"
    sentences = invalid + biased or [_all_well(run, clock)]
    return Verdict(word, clock, (*sentences, *_notes(run, clock, limits)))


@dataclass(frozen=True)
class _Limits:
    """Most that a figure may be off."""

    latency_s: float
    token_s: float
    share: float

    def allowed_s(self, metric: str, true_s: float) -> float:
        least_s = self.latency_s if metric in ("ttft_s", "e2e_s") else self.token_s
        return max(least_s, self.share * true_s)


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


def _unstamped(run: Run, least: float) -> list[str]:
    reads, unstamped = run.meta.get("reads", 0), run.meta.get("unstamped_reads", 0)
    if not reads or 1 - unstamped / reads >= least:
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


def _late(run: Run, most_s: float, most_share: float) -> list[str]:
    lateness_s = _values(run.requests["lateness_s"])
    if run.meta["asked"]["rate_per_s"] is None or not len(lateness_s):
        return []
    mean_s = np.mean(_values(_ok(run)["e2e_seen_s"]) if len(_ok(run)) else [0.0])
    p99_s, allowed_s = float(np.quantile(lateness_s, 0.99)), max(most_s, most_share * float(mean_s))
    if p99_s <= allowed_s:
        return []
    return [
        f"Requests left late: p99 of lateness is {show_time(p99_s)}, above {show_time(allowed_s)}; "
        "use more processes, a lower rate, or no cap on the requests in flight."
    ]


def _bounded(run: Run, clock: str, most: float) -> list[str]:
    share, bracket_s = bounded_first_tokens(run)
    if math.isnan(share) or share <= most:
        return []
    known = (
        "their times are known only within a bracket"
        if clock == "wire"
        else f"the bias of their TTFT may be up to {show_time(bracket_s)} more (mean of their brackets)"
    )
    return [
        f"{share:.1%} of the first tokens shared a read with what followed, so that {known}; "
        "use more processes, if it isn't the server that sends them together."
    ]


@dataclass(frozen=True)
class _Off:
    """How far a clock's mean and p99 of a metric are off; `times` of what is allowed the worse of them is."""

    metric: str
    found: Mapping[str, float]
    limits: _Limits

    def times(self, of: str) -> float:
        """How many times what is allowed the mean ("") or the p99 ("_p99") is off; 0 where it isn't known."""
        off_s, true_s = self.found[f"difference{of}_s"], self.found[f"true{of}_s"]
        return 0.0 if math.isnan(off_s) else abs(off_s) / self.limits.allowed_s(self.metric, true_s)

    @property
    def worst(self) -> float:
        return max(self.times(""), self.times("_p99"))

    def by(self, of: str) -> str:
        """By how much, in words."""
        off_s, true_s = self.found[f"difference{of}_s"], self.found[f"true{of}_s"]
        share = f" ({off_s / true_s:+.1%} of the true {show_time(true_s)})" if true_s > 0 else ""
        return f"{show_time(off_s)}{share}"


def _off(run: Run, clock: str, limits: _Limits) -> list[_Off]:
    """Every metric of the clock against the wire, the worst first."""
    found = {metric: metric_bias(paired_latencies(run, metric), clock) for metric in _JUDGED}
    return sorted((_Off(m, f, limits) for m, f in found.items() if f["n"]), key=lambda off: -off.worst)


_JUDGED = ("ttft_s", "e2e_s", "tpot_s", "itl", "ntpot_s")
_MOST_NAMED = 3


def _biased(run: Run, clock: str, limits: _Limits, least_stamped: float) -> list[str]:
    if clock == "wire" or not len(_ok(run)):
        return []
    every = _off(run, clock, limits)
    if not every:
        stamped = _ok(run)["last_wire_ns"].notna().any()
        missing = f"This client has no {clock} clock" if stamped else "The kernel's stamps are missing"
        return [f"{missing}, so the client's bias is unknown."]
    beyond = [off for off in every if off.worst > 1]
    said = [_off_text(off, clock) for off in beyond[:_MOST_NAMED]]
    said = [f"{text}; {_remedy(run, limits)}." if k == 0 else f"{text}." for k, text in enumerate(said)]
    rest = ", ".join(LABELS[off.metric] for off in beyond[_MOST_NAMED:])
    more = [f"And {len(beyond) - _MOST_NAMED} more: {rest}."] if rest else []
    return [*said, *more, *_unstamped(run, least_stamped)]


def _off_text(off: _Off, clock: str) -> str:
    label, mean, p99 = LABELS[off.metric], off.times("") > 1, off.times("_p99") > 1
    if not mean:
        return f"p99 of {label} on the {clock} clock is off by {off.by('_p99')}"
    return f"Mean {label} on the {clock} clock is off by {off.by('')}" + (f", its p99 by {off.by('_p99')}" * p99)


def _remedy(run: Run, limits: _Limits) -> str:
    """What to do about a bias."""
    other = "" if run.client == "stamped" else "the stamped client or "
    return f"read the wire clock, or use {other}{_processes(run, limits)}"


def _processes(run: Run, limits: _Limits) -> str:
    """How many processes keep the bias of the mean TTFT within its limit, by the run's own arrivals and costs."""
    ttft = paired_latencies(run, "ttft_s")
    sending_s, true_s = ttft["sending_s"].mean(), ttft["wire"].mean()  # a request's own sending stays what it is
    budget_s = limits.allowed_s("ttft_s", true_s) - sending_s
    turns, tokens = len(run.requests) / max(1, len(first_turns(run.requests))), _ok(run)["output_tokens"].mean()
    rate_per_s = (run.meta["rates"]["achieved_per_s"] or 0.0) * turns
    if not (budget_s > 0 and rate_per_s and tokens > 0):
        return "more processes"
    try:
        fit = fit_batch(_beginning(run))
    except UsageError:  # nothing to fit
        return "more processes"
    if fit.mean_time_s(rate_per_s * (tokens + 1) / MOST_PROCESSES) > budget_s:  # the search for it would be long
        return "more processes"
    found = processes_needed(fit, rate_per_s, float(tokens), budget_s)
    if found.needed is None or found.needed <= run.meta["asked"]["processes"]:
        return "more processes"
    return f"{found.needed} processes, which should keep its mean within {show_time(budget_s + sending_s)}"


def _beginning(run: Run) -> Run:
    """The run until as many events had come as a fit needs; all of it where it has no more."""
    if len(run.events) <= MOST_FITTED:
        return run
    wire_ns = run.events["wire_ns"].to_numpy(float, na_value=np.nan)
    until_ns = np.partition(wire_ns, MOST_FITTED)[MOST_FITTED]  # NaN goes to the end
    requests = run.requests[(run.requests["sent_ns"] < until_ns).fillna(False)]
    return replace(run, requests=requests, _tables={"events": run.events[wire_ns < until_ns], "cycles": run.cycles})


def _notes(run: Run, clock: str, limits: _Limits) -> list[str]:
    """What disturbed the run; the client's own clock beside the wire; what could not be judged."""
    notes = [*_starved_note(run), *_drift_note(run), *(f"Note: {note}" for note in reordered_note(run))]
    if clock == "wire":
        notes += _own_clock_note(_off(run, own_clock(run), limits))
    elif 0 < len(_ok(run)) < LEAST_FOR_P99:
        notes.append(f"Note: a p99 is judged from {LEAST_FOR_P99} requests on.")
    if run.meta.get("clock_steps"):
        notes.append(f"Note: the wall clock was set {run.meta['clock_steps']} time(s) during the run; corrected.")
    return notes


def _starved_note(run: Run) -> list[str]:
    """That a worker's loop had work to do and no processor to do it on; what came before the load doesn't count."""
    awake_s, cpu_s, span_s = np.zeros(3)
    cycles = run.cycles[(run.cycles["poll_entered_ns"] >= run.requests["begun_ns"].min()).fillna(False)]
    for facts in run.meta.get("workers", []):
        own = cycles[cycles["worker"] == facts["worker"]]
        entered_ns, returned_ns = (own[f"poll_{name}_ns"].to_numpy(np.int64) for name in ("entered", "returned"))
        if len(own):
            awake_s += float((entered_ns[1:] - returned_ns[:-1]).sum()) / NS_PER_S
            span_s += float(returned_ns[-1] - entered_ns[0]) / NS_PER_S
            cpu_s += facts["cpu_s"]
    if not (awake_s > STARVED_TIMES * cpu_s and awake_s - cpu_s > STARVED_SHARE * span_s):
        return []
    return [
        f"Note: the client was at work for {show_time(awake_s)} and had a processor for {show_time(cpu_s)} of it: "
        "something else took its cores, the server perhaps; give it cores of its own."
    ]


def _drift_note(run: Run) -> list[str]:
    """That a run drifted, unless its load was asked to change."""
    if str(run.meta["asked"].get("arrivals", "")).startswith(_CHANGES):
        return []
    found = steady_state(run)
    return [f"Note: its means depend on how long it lasted. {found.sentence}"] if found.steady is False else []


def _own_clock_note(every: list[_Off]) -> list[str]:
    beyond = [off for off in every if off.worst > 1]
    if not beyond:
        return []
    worst, label = beyond[0], LABELS[beyond[0].metric]
    of = "" if worst.times("") > 1 else "_p99"
    what, more = f"p99 of {label}" if of else f"mean {label}", len(beyond) - 1
    by = show_time(worst.found[f"difference{of}_s"])
    others = f", and {more} more metric{'s'[: more - 1]}" if more else ""
    return [f"Note: this client's own clock would have put {what} off by {by}{others}."]


def _all_well(run: Run, clock: str) -> str:
    if clock == "wire":
        return "the times are the kernel's, rate and lateness were kept."
    for metric in ("ttft_s", "e2e_s"):
        found = metric_bias(paired_latencies(run, metric), clock)
        if found["n"]:
            break
    off = show_time(found["difference_s"])
    return f"mean {LABELS[metric]} on the {clock} clock is off by {off}, rate and lateness were kept."
