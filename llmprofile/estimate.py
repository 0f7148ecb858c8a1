"""What a queueing model says where nothing measures: a client's bias without kernel stamps, and processes for a load.

A loop's own clock says when it polled, and whether it slept. What arrives while it is busy waits for the next poll, on
average for half of the turn that it fell into; what arrives while it sleeps waits until the loop is awake.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.bias import BiasTable, separate_bias
from llmprofile.clock import SLEEP_NS
from llmprofile.errors import UsageError, positive
from llmprofile.fitting import FitResult
from llmprofile.latency import CLOCKS, LATENCIES, derive_latencies
from llmprofile.loopfit import LoopFit
from llmprofile.records import Run, plain_ns
from llmprofile.units import MISSING_NS, NS_PER_S, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_SHARED = 0.01
"""First tokens that share a read with what followed, above which nobody can tell when they came."""
MOST_PROCESSES = 64


def estimate_bias(run: Run) -> BiasTable:
    """The bias as the gated loop's model has it, from the client's own clock alone; kernel stamps are not looked at.

    A poll that had to sleep was woken by what it found: that arrived a wake-up earlier, as timers of this run take to
    wake the loop. A poll that returned at once found what arrived in the turn before, of which half is the mean
    wait (Poisson events fall into a turn anywhere; those of decode steps do not). To this is added what the
    client's clock saw itself: from the poll to seen and handled, and from begun to sent.

    Parameters
    ----------
    run : Run
        Of one of our clients: their loops' turns are recorded.

    Returns
    -------
    BiasTable
        `true_s` and `difference_s` are estimates. They are missing, and a note says so, where more than 1 % of the
        first tokens shared a read with what followed.

    Raises
    ------
    UsageError
        A run without a record of its loop's turns.

    Examples
    --------
    >>> estimate_bias(run).estimated
    True
    """
    if not len(run.cycles) or not len(run.events):
        raise UsageError("an estimate of the bias needs tokens and the turns of the client's loop; this run has none")
    wakeup_s = timer_wakeup_s(run)
    arrival_ns = _arrivals_ns(run, wakeup_s)
    shared = _first_shared(run)
    if shared > MOST_SHARED:
        arrival_ns = np.full(len(arrival_ns), MISSING_NS)
    table = separate_bias(_as_if_stamped(run, arrival_ns))
    return dataclasses.replace(table, notes=_notes(shared, wakeup_s), estimated=True)


def _notes(shared: float, wakeup_s: float) -> tuple[str, ...]:
    if shared > MOST_SHARED:
        return (
            f"{shared:.1%} of the first tokens shared a read with what followed: how long they had waited can't be "
            "told from the client's own clock; use more processes, or a machine whose kernel stamps what it receives.",
        )
    woken = "unknown, taken as 0" if math.isnan(wakeup_s) else show_time(wakeup_s)
    return (
        f"An estimate, not a measurement: what arrived in a busy turn is taken to have waited for half of it; the "
        f"loop's wake-up is {woken}.",
    )


def timer_wakeup_s(run: Run) -> float:
    """How long a sleeping loop took to wake for a request that fell due, mean seconds; NaN when none was slept for.

    Examples
    --------
    >>> 0 < timer_wakeup_s(run) < 0.1
    True
    """
    late_s = []
    for worker, turns in run.cycles.groupby("worker"):
        entered, returned = (turns[f"poll_{name}_ns"].to_numpy(np.int64) for name in ("entered", "returned"))
        due = run.requests.loc[run.requests["worker"] == worker, "due_ns"].dropna().to_numpy(np.int64)
        turn = np.searchsorted(returned, due)
        known = turn < len(returned)
        slept_for = entered[turn[known]] + SLEEP_NS < due[known]
        late_s.append((returned[turn[known]] - due[known])[slept_for] / NS_PER_S)
    values = np.concatenate(late_s)
    return float(np.mean(values)) if len(values) else math.nan


def _arrivals_ns(run: Run, wakeup_s: float) -> Ints:
    """When each event arrived, as the model has it, (events,) ns."""
    events, arrival_ns = run.events, np.full(len(run.events), MISSING_NS)
    worker_of = run.requests.set_index("request_id")["worker"]
    owner = worker_of.reindex(events["request_id"]).to_numpy()
    woken_ns = 0.0 if math.isnan(wakeup_s) else wakeup_s * NS_PER_S
    for worker, turns in run.cycles.groupby("worker"):
        own = np.flatnonzero((owner == worker) & (events["cycle"] >= 0).to_numpy())
        arrival_ns[own] = _poll_arrivals_ns(turns, woken_ns)[events["cycle"].to_numpy(np.int64)[own]]
    # several polls may lie between a request's sending and its first token, but no token comes before the sending
    sent_ns = run.requests.set_index("request_id")["sent_ns"].reindex(events["request_id"])
    return np.maximum(arrival_ns, plain_ns(sent_ns))


def _poll_arrivals_ns(turns: pd.DataFrame, woken_ns: float) -> Ints:
    """When what each poll found had arrived, on average over what it found, (turns,) ns."""
    entered, returned = (turns[f"poll_{name}_ns"].to_numpy(np.int64) for name in ("entered", "returned"))
    slept = returned - entered > SLEEP_NS
    # what came before the last poll returned was found by that one, had it slept; if not, before it was entered
    since = np.concatenate([entered[:1], np.where(slept, returned, entered)[:-1]])
    found = np.maximum(turns["reads"].to_numpy(), 1)
    # the first woke the loop, the others came at any time until it was awake
    woken = np.maximum(returned - woken_ns * (found + 1) / (2 * found), entered)
    return np.where(slept, woken, (since + entered) / 2).astype(np.int64)


def _first_shared(run: Run) -> float:
    """Share of the first tokens that came in one read with the next."""
    ids, read = (run.events[name].to_numpy(np.int64) for name in ("request_id", "read"))
    first = np.concatenate([[True], ids[1:] != ids[:-1]])
    with_next = np.concatenate([(ids[1:] == ids[:-1]) & (read[1:] == read[:-1]), [False]])
    return float(with_next[first].mean())


def _as_if_stamped(run: Run, arrival_ns: Ints) -> Run:
    """The run with these arrivals for wire stamps, its latencies derived anew."""
    events = run.events.assign(wire_ns=_nullable(arrival_ns), wire_lo_ns=_nullable(arrival_ns))
    of_request = events.groupby("request_id")["wire_ns"]
    requests = run.requests.set_index("request_id", drop=False)
    for name, stamp in (("first", of_request.first()), ("last", of_request.last())):
        for clock in ("wire", "wire_lo"):
            requests[f"{name}_{clock}_ns"] = stamp.reindex(requests.index)
    stamps = {
        f"{name}_ns": plain_ns(requests[f"{name}_ns"])
        for name in (
            "due",
            "begun",
            "sent",
            "sent_last",
            *(f"{token}_{c}" for token in ("first", "last") for c in CLOCKS),
        )
    }
    stamps |= {f"content_{clock}_ns": np.full(len(requests), MISSING_NS) for clock in CLOCKS}
    streamed = events.groupby("request_id")["tokens"].sum().reindex(requests.index).fillna(-1).to_numpy(np.int64)
    tokens = requests["output_tokens"].to_numpy(np.int64, na_value=-1)
    derived = derive_latencies(stamps, streamed, tokens)
    wire = {f"{name}_s": derived[f"{name}_s"] for name in LATENCIES}
    requests = requests.assign(**wire, bounded=pd.array([False] * len(requests), "boolean")).reset_index(drop=True)
    return dataclasses.replace(run, folder=None, requests=requests, _tables={"events": events, "cycles": run.cycles})


def _nullable(stamps_ns: Ints) -> pd.Series:
    return pd.Series(stamps_ns, dtype="Int64").mask(pd.Series(stamps_ns == MISSING_NS))


@dataclass(frozen=True)
class Processes:
    """How many client processes keep the mean time that an event spends in its client within a budget.

    Attributes
    ----------
    needed : int or None
        None when not even 64 do.
    budget_s : float
    mean_time_s : tuple of float
        What is predicted for 1, 2, … processes, up to those needed.
    cores : int
        Of this machine.
    """

    needed: int | None
    budget_s: float
    mean_time_s: tuple[float, ...]
    cores: int

    def __str__(self) -> str:
        budget, last = show_time(self.budget_s), show_time(self.mean_time_s[-1])
        if self.needed is None:
            return (
                f"No number of processes keeps an event within {budget}: in {MOST_PROCESSES} of them it takes {last}."
            )
        one = "" if self.needed == 1 else f" (in one: {show_time(self.mean_time_s[0])})"
        said = f"{self.needed} process{'es keep' if self.needed > 1 else ' keeps'} an event's mean time in the client"
        more = f" This machine has {self.cores} cores: use more machines." if self.needed > self.cores else ""
        return f"{said} within {budget}, at {last}{one}.{more}"

    def _repr_html_(self) -> str:
        return f"<div>{escape(str(self))}</div>"


def processes_needed(
    fit: FitResult | LoopFit, rate_per_s: float, output_tokens: float, budget_s: float = 0.0005
) -> Processes:
    """The fewest client processes that keep the mean time of an event in the client within a budget.

    Requests are dealt at random, so that each process has its share of the jobs: a request's sending and its tokens.
    What a process cannot cure is what an event costs when nothing else is waiting.

    Parameters
    ----------
    fit : FitResult or LoopFit
        Of `fit_mg1`, `fit_batch` (bursts: batches are thinned) or `fit_loop` (unsynchronised streams).
    rate_per_s : float
        Of requests, over all processes.
    output_tokens : float
        Mean tokens a request.
    budget_s : float
        By default what the verdict allows the mean TTFT.

    Raises
    ------
    UsageError
        A number that is not above 0.

    Examples
    --------
    >>> processes_needed(lp.fit_mg1(run), 1, output_tokens=10, budget_s=1.0).needed
    1
    """
    jobs_per_s = positive("rate_per_s", rate_per_s) * (positive("output_tokens", output_tokens) + 1)
    positive("budget_s", budget_s, " (seconds)")
    times_s = []
    for k in range(1, MOST_PROCESSES + 1):
        times_s.append(fit.mean_time_s(jobs_per_s / k))
        if times_s[-1] <= budget_s:
            break
    needed = len(times_s) if times_s[-1] <= budget_s else None
    return Processes(needed, budget_s, tuple(times_s), os.cpu_count() or 1)
