"""What a worker's loop had to do, job by job: from a run's stamps to the services of a queue.

Jobs are events and sends, in the order in which they were done. An event arrives when the kernel stamped it, a send
when it is due; an event is done when it was handled (seen, by the stamped client, which does not handle), a send
when its last byte was given to the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.errors import UsageError
from llmprofile.metrics import BLOCKS_AT_LEAST, MOST_BLOCKS, block_length_s, known_arrivals
from llmprofile.records import Run, plain_ns
from llmprofile.units import MISSING_NS, NS_PER_S, ns_to_s, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

VACATION_S, VACATION_MEDIANS = 0.001, 50
"""A service is a vacation when it takes more than both, after a mean service for each job that waited at its end."""
LEAST_OCTAVES = 3
PERIODIC_SCV = 0.5
"""Batches whose gaps vary less than this are periodic; c² is 0 for a clock, 1 for a Poisson stream."""
MAX_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Jobs:
    """The jobs of one worker's loop, in the order in which they were done.

    Attributes
    ----------
    worker : int
    arrival_ns, done_ns : (n,) int64
    is_send : (n,) bool
    service_s : (n,) float
        From the job before it was done, or from when the loop was awake with something to do, until this one was.
    wakeup_s : (n,) float
        How long the loop took to wake before this job, from the first arrival that it slept through to the poll's
        return; NaN where it did not sleep.
    is_vacation : (n,) bool
        A service so long that the process must have been off the processor.
    unplaced : int
        Events and sends that lack a stamp, or an arrival (`metrics.known_arrivals`), and so are not among the jobs.
    """

    worker: int
    arrival_ns: Ints
    done_ns: Ints
    is_send: Bools
    service_s: Floats
    wakeup_s: Floats
    is_vacation: Bools
    unplaced: int

    def __len__(self) -> int:
        return len(self.done_ns)

    @property
    def time_s(self) -> Floats:
        """(n,) time in the client, from arrival to done."""
        return ns_to_s(self.done_ns - self.arrival_ns)

    def between(self, from_ns: int, until_ns: int) -> Jobs:
        """The jobs that arrived in [from_ns, until_ns)."""
        keep = (self.arrival_ns >= from_ns) & (self.arrival_ns < until_ns)
        names = ("arrival_ns", "done_ns", "is_send", "service_s", "wakeup_s", "is_vacation")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})


def loop_jobs(run: Run) -> list[Jobs]:
    """The jobs of each worker that had any.

    A response's head and its end cost the loop something too, but are no jobs: that work counts with the job that
    waits for it.

    Parameters
    ----------
    run : Run

    Raises
    ------
    UsageError
        No event carries a kernel stamp, so that nobody knows when the jobs arrived.

    Examples
    --------
    >>> [jobs] = loop_jobs(run)
    >>> len(jobs), int(jobs.is_send.sum())
    (2200, 200)
    """
    table = _job_table(run)
    known = (table["arrival_ns"] != MISSING_NS) & (table["done_ns"] != MISSING_NS)
    if not (known & ~table["is_send"]).any():
        raise UsageError("a run's jobs need events with kernel stamps and times at which they were done; it has none")
    cycles = run.cycles
    found = []
    for worker in sorted(table.loc[known, "worker"].unique().tolist()):
        polls = cycles.loc[cycles["worker"] == worker, ["poll_entered_ns", "poll_returned_ns"]].to_numpy(np.int64)
        own = table["worker"] == worker
        arrival_ns, done_ns, is_send = (
            table.loc[own & known, n].to_numpy() for n in ("arrival_ns", "done_ns", "is_send")
        )
        found.append(make_jobs(worker, arrival_ns, done_ns, is_send, polls, int(np.sum(own & ~known))))
    return found


def _job_table(run: Run) -> pd.DataFrame:
    requests, events = run.requests, known_arrivals(run).events
    done = "seen_ns" if run.client == "stamped" else "handled_ns"
    worker_of = requests.set_index("request_id")["worker"]
    sent = requests[requests["sent_ns"].notna()]
    parts = [
        pd.DataFrame(
            {
                "worker": frame["request_id"].map(worker_of).to_numpy(np.int64),
                "arrival_ns": plain_ns(frame[arrival]),
                "done_ns": plain_ns(end),
                "is_send": np.full(len(frame), is_send),
            }
        )
        for frame, arrival, end, is_send in (
            (events, "wire_ns", events[done], False),
            (sent, "due_ns", sent["sent_last_ns"].fillna(sent["sent_ns"]), True),
        )
    ]
    return pd.concat(parts, ignore_index=True)


def make_jobs(worker: int, arrival_ns: Ints, done_ns: Ints, is_send: Bools, polls_ns: Ints, unplaced: int = 0) -> Jobs:
    """Order jobs by when they were done, and work out what each cost.

    Parameters
    ----------
    worker : int
    arrival_ns, done_ns : (n,) int64
    is_send : (n,) bool
    polls_ns : (m, 2) int64
        When each poll of the loop was entered and when it returned, in order; may be empty: then no sleep is known.
    unplaced : int

    Examples
    --------
    >>> polls_ns = np.array([[0, 120_000]])  # asleep until 20 µs after the first arrival
    >>> jobs = make_jobs(0, np.array([100_000, 110_000]), np.array([150_000, 180_000]), np.zeros(2, bool), polls_ns)
    >>> jobs.service_s.round(6).tolist(), jobs.wakeup_s.round(6).tolist()
    ([3e-05, 3e-05], [2e-05, nan])
    """
    order = np.lexsort((arrival_ns, done_ns))
    arrival_ns, done_ns, is_send = arrival_ns[order], done_ns[order], is_send[order]
    # the loop has something to do from the earliest arrival that is not done yet, whichever job it does first
    waiting_ns = np.minimum.accumulate(arrival_ns[::-1])[::-1]
    previous_ns = np.concatenate([waiting_ns[:1], done_ns[:-1]])
    begin_ns = np.minimum(np.maximum(waiting_ns, previous_ns), done_ns)
    awake_ns = np.where(waiting_ns >= previous_ns, _awake_ns(waiting_ns, polls_ns), begin_ns)
    slept = (awake_ns > begin_ns) & (awake_ns <= done_ns)
    service_s = ns_to_s(done_ns - np.where(slept, awake_ns, begin_ns))
    wakeup_s = np.where(slept, ns_to_s(awake_ns - begin_ns), np.nan)
    vacation = _vacations(arrival_ns, done_ns, service_s)
    return Jobs(worker, arrival_ns, done_ns, is_send, service_s, wakeup_s, vacation, unplaced)


def _awake_ns(at_ns: Ints, polls_ns: Ints) -> Ints:
    """When the poll in progress at each time returned; the time itself where none was."""
    if not len(polls_ns):
        return at_ns
    poll = np.searchsorted(polls_ns[:, 1], at_ns)
    known = np.minimum(poll, len(polls_ns) - 1)
    inside = (poll < len(polls_ns)) & (polls_ns[known, 0] < at_ns)
    return np.where(inside, polls_ns[known, 1], at_ns)


def _vacations(arrival_ns: Ints, done_ns: Ints, service_s: Floats) -> Bools:
    # the first job of a burst is done after the whole burst has been read: a turn of the loop, not a vacation
    if not len(service_s):
        return np.zeros(0, bool)
    waiting = np.searchsorted(np.sort(arrival_ns), done_ns, side="right") - np.arange(len(done_ns))
    least_s = max(VACATION_S, VACATION_MEDIANS * float(np.median(service_s)))
    return service_s > least_s + waiting * service_s.mean()


def batch_threshold_s(gaps_s: Floats) -> float:
    """The gap above which an event begins a new batch; 0 where no batches stand out.

    Gaps are counted in octaves. Bursts show as two heaps: most gaps are short, most of the time is in long ones. The
    threshold is the emptiest octave between the two. When these are less than three octaves apart, as they are for
    exponential gaps (most at 1/λ, most of the time at 2/λ), there is one heap, and nothing to tell apart.

    Parameters
    ----------
    gaps_s : (n,) float
        Gaps between successive events of one worker.

    Examples
    --------
    >>> bursts_s = np.tile([*[10e-6] * 49, 0.0095], 100)
    >>> 10e-6 < batch_threshold_s(bursts_s) < 0.0095
    True
    >>> batch_threshold_s(np.random.default_rng(1).exponential(0.001, 10_000))
    0.0
    """
    if not len(gaps_s):
        return 0.0
    octave = np.floor(np.log2(np.maximum(gaps_s, 1e-9))).astype(int)
    lowest = int(octave.min())
    counts, times = np.bincount(octave - lowest), np.bincount(octave - lowest, gaps_s)
    many, long = int(counts.argmax()), int(times.argmax())
    if long - many < LEAST_OCTAVES:
        return 0.0
    between = counts[many + 1 : long]
    emptiest = np.flatnonzero(between == between.min())
    return float(2.0 ** (lowest + many + 1 + emptiest[len(emptiest) // 2] + 0.5))


def event_gaps_s(jobs: Jobs) -> Floats:
    """Gaps between successive arrivals of events, (n,) seconds."""
    return ns_to_s(np.diff(np.sort(jobs.arrival_ns[~jobs.is_send])))


def find_batches(jobs: Jobs, threshold_s: float) -> tuple[Ints, Ints]:
    """When each batch of jobs begins, (b,) ns, and its size, (b,).

    Events that are no further apart than the threshold are of one batch; a send counts with the batch before it.
    With a threshold of 0 each job is its own batch.

    Examples
    --------
    >>> jobs = make_jobs(0, np.array([0, 5, 900]), np.array([20, 40, 950]), np.zeros(3, bool), np.zeros((0, 2), int))
    >>> [column.tolist() for column in find_batches(jobs, 100e-9)]
    [[0, 900], [2, 1]]
    """
    order = np.argsort(jobs.arrival_ns, kind="stable")
    arrival_ns = jobs.arrival_ns[order]
    if threshold_s == 0:
        return arrival_ns, np.ones(len(arrival_ns), np.int64)
    events_ns = arrival_ns[~jobs.is_send[order]]
    first = np.concatenate([[True], np.diff(events_ns) > threshold_s * NS_PER_S])[: len(events_ns)]
    starts_ns = events_ns[first]
    ends = np.searchsorted(arrival_ns, np.append(starts_ns[1:], MAX_NS), side="left")
    return starts_ns, np.diff(np.concatenate([np.searchsorted(arrival_ns, starts_ns[:1]), ends]))


def dispersion(arrival_ns: Ints, from_ns: int, until_ns: int, window_s: float) -> float:
    """Index of dispersion: variance over mean of the counts in windows of this length; 1 for a Poisson stream.

    Source: Cox and Lewis, The Statistical Analysis of Series of Events (1966).

    Examples
    --------
    >>> dispersion(np.arange(0, 1_000_000_000, 1_000_000), 0, 1_000_000_000, 0.01)
    0.0
    """
    window_ns = window_s * NS_PER_S
    windows = int((until_ns - from_ns) / window_ns) if window_ns > 0 else 0
    if windows < 2:
        return math.nan
    slot = ((arrival_ns - from_ns) / window_ns).astype(np.int64)
    counts = np.bincount(slot[(slot >= 0) & (slot < windows)], minlength=windows)
    return float(counts.var(ddof=1) / counts.mean()) if counts.any() else math.nan


@dataclass(frozen=True, eq=False)
class Arrivals:
    """How jobs came to one worker's queue.

    Attributes
    ----------
    rate_per_s : float
        Of jobs.
    sizes : (b,) int64
        Of batches, one worker's after another's.
    gap_scv : float
        Squared coefficient of variation of the gaps between batches.
    spacing_s : float
        Mean gap between the events of a batch: a server sends them one after the other.
    """

    rate_per_s: float
    sizes: Ints
    gap_scv: float
    spacing_s: float = 0.0

    @property
    def batch_rate_per_s(self) -> float:
        return self.rate_per_s / float(self.sizes.mean())

    @property
    def batched(self) -> bool:
        return bool(self.sizes.max() > 1)

    @property
    def periodic(self) -> bool:
        return self.batched and self.gap_scv < PERIODIC_SCV

    def at_rate(self, rate_per_s: float) -> Arrivals:
        """The same arrivals at another rate: gaps shrink, or batches, which keep their times, gain or lose jobs.

        A batch of X becomes Binomial(X, share) when jobs are dealt elsewhere; batches that end up empty leave gaps.
        """
        share, rng = rate_per_s / self.rate_per_s, np.random.default_rng(0)
        if not self.batched:
            return replace(self, rate_per_s=rate_per_s)
        sizes = self.sizes * int(share) + rng.binomial(self.sizes, share % 1)
        kept = float((sizes > 0).mean())
        scv = kept * self.gap_scv + 1 - kept  # a gap is a geometric number of the gaps before
        sizes = sizes[sizes > 0] if kept else np.ones(1, np.int64)  # at next to no rate jobs come one by one
        return Arrivals(rate_per_s, sizes, scv, self.spacing_s / min(1.0, share))


@dataclass(frozen=True, eq=False)
class Costs:
    """What jobs cost the client: (n,) services, whether they were of sends, and (m,) wake-ups."""

    service_s: Floats
    is_send: Bools
    wakeup_s: Floats

    @property
    def event_mean_s(self) -> float:
        return float(self.service_s[~self.is_send].mean())


@dataclass(frozen=True, eq=False)
class Steady:
    """The jobs of a run while its load was steady: from a mean request duration after the first request to the last.

    Attributes
    ----------
    loops : list of Jobs
        One a worker.
    from_ns, until_ns : int
    block_s : float
        How long blocks of time should be for what happens in one to say little about the next.
    note : str
        What is left out.
    """

    loops: list[Jobs]
    from_ns: int
    until_ns: int
    block_s: float
    note: str

    @classmethod
    def of(cls, run: Run) -> Steady:
        loops, requests = loop_jobs(run), run.requests
        begun_ns = requests["begun_ns"].dropna().to_numpy(np.int64)
        e2e_s = mean_of(requests["e2e_s"])
        first_ns = min(int(jobs.arrival_ns.min()) for jobs in loops)
        last_ns = max(int(jobs.arrival_ns.max()) for jobs in loops) + 1
        from_ns, until_ns, note = first_ns, last_ns, ""
        if len(begun_ns) and begun_ns.max() - begun_ns.min() > 2 * e2e_s * NS_PER_S:
            from_ns, until_ns = max(first_ns, int(begun_ns.min() + e2e_s * NS_PER_S)), min(last_ns, int(begun_ns.max()))
            left = ns_to_s(last_ns - first_ns - (until_ns - from_ns))
            note = (
                f"{show_time(left)} of {show_time(ns_to_s(last_ns - first_ns))}, when load grew or faded, are left out."
            )
        elif len(begun_ns) > 1 and e2e_s > 0:
            note = "The run is shorter than two request durations: its load was never steady."
        loops = [jobs.between(from_ns, until_ns) for jobs in loops]
        loops = [jobs for jobs in loops if not jobs.is_send.all()]
        if not loops:
            raise UsageError("a fit needs events while the load is steady; this run has none")
        return cls(loops, from_ns, until_ns, block_length_s(pd.Series([from_ns, until_ns]), e2e_s), note)

    @property
    def span_s(self) -> float:
        return float(ns_to_s(self.until_ns - self.from_ns))

    @property
    def blocks(self) -> int:
        return int(np.clip(self.span_s / self.block_s, BLOCKS_AT_LEAST, MOST_BLOCKS))

    @property
    def too_short(self) -> bool:
        return self.span_s / self.block_s < BLOCKS_AT_LEAST

    def block_of(self, at_ns: Ints) -> Ints:
        return ((at_ns - self.from_ns) * (self.blocks / (self.until_ns - self.from_ns))).astype(np.int64)

    def threshold_s(self) -> float:
        return batch_threshold_s(np.concatenate([event_gaps_s(jobs) for jobs in self.loops]))

    def arrivals(self, threshold_s: float) -> Arrivals:
        found = [find_batches(jobs, threshold_s) for jobs in self.loops]
        gaps_s = np.concatenate([ns_to_s(np.diff(starts_ns)) for starts_ns, _ in found])
        jobs = sum(len(jobs) for jobs in self.loops)
        scv = float(gaps_s.var() / gaps_s.mean() ** 2) if gaps_s.any() else math.nan
        within_s = np.concatenate([event_gaps_s(loop) for loop in self.loops])
        within_s = within_s[within_s <= threshold_s]
        spacing_s = float(within_s.mean()) if len(within_s) else 0.0
        sizes = np.concatenate([sizes for _, sizes in found])
        return Arrivals(jobs / self.span_s / len(self.loops), sizes, scv, spacing_s)

    def costs(self) -> Costs:
        service_s, is_send, wakeup_s = (
            np.concatenate([getattr(jobs, name) for jobs in self.loops])
            for name in ("service_s", "is_send", "wakeup_s")
        )
        return Costs(service_s, is_send, wakeup_s[~np.isnan(wakeup_s)])

    def event_times(self) -> tuple[Floats, Ints]:
        """Every event's time in the client, and the block it arrived in."""
        columns = [(j.time_s[~j.is_send], self.block_of(j.arrival_ns[~j.is_send])) for j in self.loops]
        return np.concatenate([times_s for times_s, _ in columns]), np.concatenate([block for _, block in columns])


def mean_of(column: pd.Series) -> float:
    """The mean of what is known; 0 when nothing is."""
    values = column.dropna().to_numpy(float)
    return float(values.mean()) if len(values) else 0.0
