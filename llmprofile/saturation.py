"""How much a server can take: the highest rate at which it meets limits, or which it sustains."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.bisection import (
    FAILS,
    INTERRUPTED,
    MEETS,
    OPEN,
    UNMEASURED,
    Rule,
    Sample,
    Step,
    block_growths,
    most_steps,
    search,
)
from llmprofile.capacity import progress_bar, sweep_folder
from llmprofile.errors import UsageError, positive, whole
from llmprofile.latency import LABELS, column_of
from llmprofile.launch import run_load
from llmprofile.markup import card
from llmprofile.metrics import run_clock
from llmprofile.records import Run
from llmprofile.slo import meets
from llmprofile.trust import RATE_WITHIN
from llmprofile.units import NS_PER_S, show_rate, show_time
from llmprofile.windows import bounds_ns, due_between
from llmprofile.workload import Arrivals, Poisson

Floats = npt.NDArray[np.float64]

BLOCKS = 10
"""Of a run: from 10 to 30 are right for means of batches. Source: Schmeiser, Operations Research 30 (1982) 556."""


@dataclass(frozen=True, eq=False)
class Saturation:
    """How much a server can take; it shows itself.

    Attributes
    ----------
    rate_per_s : float
        The highest rate that was shown to be met; NaN where none was.
    fails_per_s : float
        The lowest rate that was shown not to be; NaN where none was.
    confidence : float
        That both are right, whatever the true limit is, if a higher rate is never easier to meet.
    sentences : tuple of str
        What was found, and what stayed open.
    steps : tuple of Step
        In the order in which they were tried.
    runs : tuple of Run
    """

    rate_per_s: float
    fails_per_s: float
    confidence: float
    sentences: tuple[str, ...]
    steps: tuple[Step, ...]
    runs: tuple[Run, ...] = ()

    @property
    def table(self) -> pd.DataFrame:
        """One row a rate that was tried, by rate: the columns are those of `Step`."""
        frame = pd.DataFrame([vars(step) for step in self.steps]).sort_values("rate_per_s", ignore_index=True)
        return frame.dropna(axis="columns", how="all")

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, self._cells().to_string(index=False)])

    def _repr_html_(self) -> str:
        return card(self.sentences[0], self.sentences[1:], [self._cells()])

    def _cells(self) -> pd.DataFrame:
        table = self.table
        shown: dict[str, Any] = {"rate": table["rate_per_s"].map(show_rate), "runs": table["runs"]}
        for name, form in (("share", "{:.1%}"), ("growth", "{:.2%}")):
            if name in table and (name == "share" or np.isfinite(table["growth_lo"]).any()):
                columns = (table[name], table[f"{name}_lo"], table[f"{name}_hi"])
                shown[name] = [_with_bounds(form, *map(float, figures)) for figures in zip(*columns, strict=True)]
        return pd.DataFrame(shown | {"decision": table["decision"]})


def _with_bounds(form: str, value: float, low: float, high: float) -> str:
    bounds = f" [{form.format(low)}, {form.format(high)}]" if math.isfinite(low) else ""
    return "–" if math.isnan(value) else form.format(value) + bounds


def find_saturation(
    url: str | Sequence[str],
    low_per_s: float,
    high_per_s: float,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    ntpot_s: float | None = None,
    e2e_s: float | None = None,
    share: float = 0.95,
    growth: float = 0.02,
    confidence: float = 0.95,
    within: float = 0.1,
    most_runs: int = 5,
    duration_s: float = 30.0,
    warmup_s: float = 0.0,
    law: Callable[[float], Arrivals] = Poisson,
    seed: int | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    **options: Any,
) -> Saturation:
    """Find the highest rate at which a server meets an SLO or, without limits, the highest that it sustains.

    With limits a rate is met when at least `share` of all scheduled requests end `ok` within every limit. Without
    limits it is sustained when at least `share` of them end `ok` and TTFT (from due) grows by no more than `growth`
    seconds per second: a server that can take μ of λ requests/s falls behind by λ/μ − 1 seconds each second.

    Rates are halved on a logarithmic scale. At each, runs of `duration_s` are repeated until the bounds on the share,
    and on growth, decide, or for `most_runs`. A rate that stays undecided is named, and the search goes on below it for
    a rate that is met and above it for one that is not. A server must be left to drain: an overloaded run lasts until
    its last request is answered or timed out.

    Parameters
    ----------
    url : str, or a list of them
        As for `run_load`.
    low_per_s, high_per_s : float
        Where to look; both are tried first.
    ttft_s, tpot_s, ntpot_s, e2e_s : float, optional
        The most that each may be, on the run's own clock.
    share, growth, confidence : float
        As above; `confidence` is of the whole answer.
    within : float
        How far the ends may stay apart, as a share of the lower.
    most_runs : int
        At each rate.
    duration_s, warmup_s : float
        Of each run, and what of its beginning is left out. A queue starts empty: a run must be longer than it takes
        to fill, or a rate that is too high seems to be met.
    law : callable
        Makes a rate's arrival law.
    seed : int, optional
        The k-th run has `seed` + k; drawn by default.
    out : path, optional
        The folder for the runs' folders; `runs/<UTC time>-saturation` by default.
    progress : bool
    **options
        Of `run_load`. With `max_in_flight`, requests that wait for their slot count as the server's delay in `growth`
        alone; without it, a run whose client fell behind its rate by 2 % is not held against the server.

    Returns
    -------
    Saturation
        Of the steps so far when a run is interrupted.

    Raises
    ------
    UsageError
        A number out of range, an option that the search sets itself, or what `run_load` refuses.

    Notes
    -----
    The error allowed is shared out over every bound that is looked at, at every rate, which leaves slack: at 90 %, 300
    and 299 of 300 searches on a simulated M/D/1 queue were right, with the limit at ρ = 0.5 and at 0.8. The confidence
    takes for granted that a higher rate is never easier to meet, that runs say nothing of one another, and the ten
    blocks of a run little.

    Examples
    --------
    >>> found = find_saturation(server.url, 50, 100, e2e_s=1.0, share=0.8, within=1.0, duration_s=1, output_tokens=4,
    ...                         seed=1, out="search", progress=False)
    >>> found.rate_per_s, found.sentences[0]
    (100, 'At least 80% of requests meet E2E ≤ 1.00 s up to 100/s and beyond: nothing higher was tried.')
    """
    asked = {"ttft_s": ttft_s, "tpot_s": tpot_s, "ntpot_s": ntpot_s, "e2e_s": e2e_s}
    limits = {name: positive(name, limit_s, " (seconds)") for name, limit_s in asked.items() if limit_s is not None}
    _check_search(low_per_s, high_per_s, share, confidence)
    for name, value in (("within", within), ("growth", growth), ("duration_s", duration_s)):
        positive(name, value)
    if not 0 <= warmup_s < duration_s:
        raise UsageError(f"warmup_s must be at least 0 and below duration_s, {duration_s}; not {warmup_s}")
    whole("most_runs", most_runs)
    folder = sweep_folder(out, "saturation", options)
    first = secrets.randbits(31) if seed is None else whole("seed", seed, 0)
    rule = Rule(share, None if limits else growth)
    runs: list[Run] = []
    most = most_steps(low_per_s, high_per_s, within) * most_runs

    with progress_bar(most, "search", progress) as bar:

        def measure(rate_per_s: float) -> Sample:
            own: dict[str, Any] = {
                "out": folder / f"{len(runs) + 1:02}-{rate_per_s:.4g}-per-s",
                "seed": first + len(runs),
            }
            run = run_load(url, law(rate_per_s), duration_s=duration_s, **options, **own, progress=progress)
            runs.append(run)
            bar.update()
            return sample_of(run, limits, warmup_s)

        steps = search(measure, low_per_s, high_per_s, rule, confidence, within, most_runs)
    return conclude(steps, limits, rule, confidence, tuple(runs))


def _check_search(low_per_s: float, high_per_s: float, share: float, confidence: float) -> None:
    positive("low_per_s", low_per_s, " (requests/s)")
    if not positive("high_per_s", high_per_s, " (requests/s)") > low_per_s:
        raise UsageError(f"high_per_s must be above low_per_s, {low_per_s}; not {high_per_s}")
    for name, value in (("share", share), ("confidence", confidence)):
        if not 0 < positive(name, value) < 1:
            raise UsageError(f"{name} must be between 0 and 1; not {value}")


def sample_of(run: Run, limits: Mapping[str, float], warmup_s: float = 0.0) -> Sample:
    """What a run says of its rate: its requests in ten blocks of time, and how TTFT grew.

    Examples
    --------
    >>> sample = sample_of(run, {"e2e_s": 1.0})
    >>> sample.met.tolist() == sample.total.tolist(), int(sample.total.sum())
    (True, 200)
    """
    clock, (from_ns, until_ns) = run_clock(run), bounds_ns(run, warmup_s, 0.0)
    own, ok = due_between(run, from_ns, until_ns), (run.requests["outcome"] == "ok").to_numpy(bool)
    met = meets(run, limits, clock) if limits else ok
    due_ns = run.requests["due_ns"].fillna(run.requests["begun_ns"])[own].to_numpy(np.int64)
    block = np.minimum((due_ns - from_ns) * BLOCKS // max(1, until_ns - from_ns), BLOCKS - 1)
    total = np.bincount(block, minlength=BLOCKS)
    counts = np.bincount(block, met[own], BLOCKS).astype(np.int64)
    growths = _growths(run.requests[own & ok], clock)
    return Sample(counts[total > 0], total[total > 0], growths, _delivered(run), run.meta["ended"] == "complete")


def _delivered(run: Run) -> bool:
    """Whether the client kept the rate, or had to wait for slots, which is the server's doing."""
    lateness_s = run.requests["lateness_s"].dropna().to_numpy(float)
    if run.meta["asked"].get("max_in_flight") is not None or not len(lateness_s):
        return True
    first_ns, last_ns = bounds_ns(run, 0.0, 0.0)
    # who falls behind by a share of the rate is late by that share of the run at its end, by half of it in the median;
    # and the median forgives a hiccup
    return float(np.median(lateness_s)) <= RATE_WITHIN / 2 * (last_ns - first_ns) / NS_PER_S


def _growths(rows: pd.DataFrame, clock: str) -> Floats:
    """Growth of TTFT from due between blocks; of E2E where there is no stream."""
    due_s = rows["due_ns"].to_numpy(float, na_value=np.nan) / NS_PER_S
    for metric in ("ttft_due_s", "e2e_due_s"):
        values_s = rows[column_of(metric, clock)].to_numpy(float, na_value=np.nan)
        known = ~np.isnan(values_s) & ~np.isnan(due_s)
        if known.any():
            return block_growths(due_s[known], values_s[known], BLOCKS)
    return np.zeros(0)


def conclude(
    steps: list[Step], limits: Mapping[str, float], rule: Rule, confidence: float, runs: tuple[Run, ...] = ()
) -> Saturation:
    """The answer that steps give.

    Examples
    --------
    >>> from llmprofile.bisection import judge
    >>> samples = [(10.0, Sample(np.full(50, 10), np.full(50, 10))), (40.0, Sample(np.full(50, 5), np.full(50, 10)))]
    >>> steps = [judge(rate_per_s, [sample], Rule(0.9), 0.99) for rate_per_s, sample in samples]
    >>> print(conclude(steps, {"ttft_s": 0.2}, Rule(0.9), 0.95).sentences[0])
    At least 90% of requests meet TTFT ≤ 200.0 ms at 10/s, and not at 40/s: with 95% confidence the limit lies
    between.
    """
    met = [step.rate_per_s for step in steps if step.decision == MEETS]
    failed = [step.rate_per_s for step in steps if step.decision == FAILS]
    rate_per_s, fails_per_s = max(met, default=math.nan), min(failed, default=math.nan)
    limit = " and ".join(f"{LABELS[metric]} ≤ {show_time(limit_s)}" for metric, limit_s in limits.items())
    what = f"At least {rule.share:.0%} of requests " + (f"meet {limit}" if limits else "succeed")
    if rule.growth is not None:
        what += f" and TTFT grows by at most {rule.growth:.0%} of the time that passes"
    sure = f"with {confidence:.0%} confidence"
    if not met and failed:
        said = f"{what} at no rate that was tried: not at {show_rate(fails_per_s)}, {sure}."
    elif not met:
        said = f"{what}: this could not be shown at {show_rate(steps[0].rate_per_s)}, the lowest rate."
    elif steps[-1].decision == MEETS and len(steps) == 2 and not failed:
        said = f"{what} up to {show_rate(rate_per_s)} and beyond: nothing higher was tried."
    elif not failed:
        said = f"{what} at {show_rate(rate_per_s)}, {sure}; no higher rate was shown to fail."
    else:
        said = f"{what} at {show_rate(rate_per_s)}, and not at {show_rate(fails_per_s)}: {sure} the limit lies between."
    return Saturation(rate_per_s, fails_per_s, confidence, (said, *_open(steps)), tuple(steps), runs)


def _open(steps: list[Step]) -> list[str]:
    """What stayed open, and why."""
    rates = {
        decision: ", ".join(show_rate(step.rate_per_s) for step in steps if step.decision == decision)
        for decision in (OPEN, UNMEASURED, INTERRUPTED)
    }
    said = {
        OPEN: "Undecided after all runs: {}; more or longer runs decide it.",
        UNMEASURED: "At {} the client did not keep the rate: use more processes; it is not held against the server.",
        INTERRUPTED: "Interrupted at {}: the search did not end.",
    }
    return [said[decision].format(shown) for decision, shown in rates.items() if shown]
