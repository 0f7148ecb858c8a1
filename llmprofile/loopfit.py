"""What a client's event loop costs, from the turns of a run; and what that says of the time in the client elsewhere.

A turn's length is regressed on what was done in it. The costs then drive the gated loop over the arrivals of another
run, whose measured times in the client judge it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import brentq, nnls

from llmprofile.errors import UsageError, one_of, positive
from llmprofile.gated import GatedLoop, LoopTimes, Stretches, simulate_loop
from llmprofile.markup import card
from llmprofile.metrics import known_arrivals
from llmprofile.records import Run, plain_ns
from llmprofile.units import MISSING_NS, NS_PER_S, elapsed_s, show_rate, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

COSTS = ("poll", "read", "handle", "send", "end", "wakeup")
CLIENTS = ("stamped", "conventional")
STALL_S, DISTURBED_SHARE = 3e-4, 0.05
"""A turn that takes more than twice what it should and this is a stall; when stalls take this share, a fit says so."""
BLOCKS, TURNS_AT_LEAST, SLEEPS_AT_LEAST = 40, 200, 20
SIMULATED_EVENTS = 100_000
_EDGE_NS = 100_000  # the first request is begun in a turn whose poll returned this much earlier, at most

_COLUMNS = ("poll", "asleep", "read", "handle", "due", "sent", "end")
"""Of the regression; a request costs when it falls due and when it is sent (`send` is the sum), and when it ends."""
_SEND = [_COLUMNS.index(name) for name in ("due", "sent")]


@dataclass(frozen=True)
class LoopPrediction:
    """The time that events spent in a client, from the wire until seen or handled: as predicted and as measured.

    Attributes
    ----------
    client : {"stamped", "conventional"}
    events : int
    events_per_s : float
        Of each worker, on average.
    predicted, measured : dict
        `mean_s`, `p50_s`, `p90_s`, `p99_s`.
    paused_share : float
        Share of the run for which its loop was held up by stalls and late wake-ups. They are the machine's doing and
        no client's: the prediction takes them from the run, as it takes the arrivals.
    """

    client: str
    events: int
    events_per_s: float
    predicted: dict[str, float]
    measured: dict[str, float]
    paused_share: float

    @property
    def ratios(self) -> dict[str, float]:
        """Predicted over measured, by statistic."""
        return {name: self.predicted[name] / self.measured[name] for name in self.measured}

    @property
    def sentence(self) -> str:
        """How well the prediction does."""
        off, tail = self.ratios["mean_s"] - 1, self.ratios["p99_s"] - 1
        return (
            f"The mean time in the client is {'within 20 %' if abs(off) <= 0.2 else 'not within 20 %'} of what was "
            f"measured at {show_rate(self.events_per_s)} events a worker ({off:+.0%}), its p99 is off by {tail:+.0%}. "
            f"Stalls, {self.paused_share:.2%} of the time, are taken from the run."
        )

    def _cells(self) -> pd.DataFrame:
        rows = {"predicted": self.predicted, "measured": self.measured}
        return pd.DataFrame(rows).T.map(show_time).rename(columns=lambda name: name.removesuffix("_s"))

    def __repr__(self) -> str:
        return f"{self._cells().to_string()}\n{self.sentence}"

    def _repr_html_(self) -> str:
        return card(self.sentence, tables=[self._cells()])


@dataclass(frozen=True, eq=False)
class LoopFit:
    """What one run says of a client's event loop.

    Attributes
    ----------
    client : {"stamped", "conventional"}
    costs : DataFrame
        One row a worker and one for "all": of each of `COSTS` its estimate and standard error (`poll_s`,
        `poll_se_s`, …), `r2`, `turns`, `left_out` and `left_out_share` (stalls: how many turns, and their share of
        the time that the loop was awake), `other` and `other_share` (turns that did nothing that is counted: timers,
        connections), `late_wakeups` (left out). NaN is what the run can't tell.
    poll_law, wakeup_law : (n,) float
        What a turn costs beyond its events, with what the regression leaves over of turns that did not stall; measured
        wake-ups.
    coefficients : (7,) float
        Of the regression, all workers: poll, the poll's own cost, read, handle, and a request's due, sent and end.
    after_s : float
        How much of a turn's cost comes after its last event is done: in every turn, in no event's own time.
    sends_per_event : float
    check : LoopPrediction
        The same run, predicted from its own costs; a fair judgement takes `predict` and another run.
    """

    client: str
    costs: pd.DataFrame
    poll_law: Floats
    wakeup_law: Floats
    coefficients: Floats
    after_s: float
    sends_per_event: float
    check: LoopPrediction | None = None

    def cost_s(self, name: str) -> float:
        """One of `COSTS`, pooled over workers; 0 for what the run has nothing of."""
        value = self.costs[f"{one_of('a cost', name, COSTS)}_s"].fillna(0.0)
        return float(value["all"])

    def model(self, rate_per_s: float) -> GatedLoop:
        """The one-stage loop at a rate of events a worker, each with its share of the sends and ends of requests.

        For the conventional client, which has two stages, this is an approximation: see `predict`. Its times run to
        the end of an event's own cost; what a client reports is `after_s` less.
        """
        request_s = self.cost_s("send") + self.cost_s("end")
        service_s = self.cost_s("read") + self.cost_s("handle") + request_s * self.sends_per_event
        return GatedLoop(rate_per_s, poll=self.poll_law, service=service_s, wakeup=self.wakeup_law)

    def simulate(
        self,
        arrivals_s: npt.ArrayLike,
        sends_s: npt.ArrayLike | None = None,
        streams: npt.ArrayLike | None = None,
        rng: np.random.Generator | int = 0,
        pauses_s: npt.ArrayLike = (),
        ends: npt.ArrayLike | None = None,
    ) -> LoopTimes:
        """`simulate_loop` with these costs, for one worker's arrivals, due times, sockets, pauses and last events.

        Costs of polls and wake-ups come in stretches as they were measured: what slows a loop down lasts for a while.
        """
        costs: dict[str, Any] = {name: self.cost_s(name) for name in ("read", "handle", "send", "end")}
        costs |= {"poll": Stretches(self.poll_law), "wakeup": Stretches(self.wakeup_law)}
        load: dict[str, Any] = {"sends_s": sends_s, "streams": streams, "pauses_s": pauses_s, "ends": ends}
        return simulate_loop(arrivals_s, **costs, **load, rng=rng)

    def mean_time_s(self, jobs_per_s: float) -> float:
        """The mean time in the client of unsynchronised events at a rate of jobs a worker, sends among them.

        By `simulate` over Poisson arrivals, each on a socket of its own; infinite from ρ = 1 on.
        """
        sends = self.sends_per_event / (1 + self.sends_per_event) * positive("jobs_per_s", jobs_per_s)
        if self.model(jobs_per_s - sends).utilisation >= 1:
            return math.inf
        rng, span_s = np.random.default_rng(0), SIMULATED_EVENTS / (jobs_per_s - sends)
        arrivals_s, due_s = (
            np.sort(rng.uniform(0, span_s, int(rate * span_s))) for rate in (jobs_per_s - sends, sends)
        )
        ends = rng.random(len(arrivals_s)) < self.sends_per_event
        return float(self.simulate(arrivals_s, due_s, rng=rng, ends=ends).time_s.mean()) - self.after_s

    def predict(self, run: Run, rng: np.random.Generator | int = 0) -> LoopPrediction:
        """The time in the client of a run from its wire stamps and due times, beside what was measured.

        Raises
        ------
        UsageError
            A run of another client, or without stamps or turns.
        """
        if run.client != self.client:
            raise UsageError(f"a fit of the {self.client} client can't predict a run of the {run.client} one")
        draws = np.random.default_rng(rng)
        predicted, measured, paused_s, span_s = [], [], 0.0, 0.0
        for worker in _workers(run):
            load = _load_of(worker)
            pauses = _pauses(worker, self.coefficients, load.origin_ns)
            found = self.simulate(load.arrivals_s, load.due_s, load.streams, draws, pauses, load.ends)
            predicted.append(found.time_s[~np.isnan(load.times_s)] - self.after_s)
            known = ~np.isnan(worker.times_s)
            measured.append(worker.times_s[known])
            paused_s += float(pauses[:, 1].sum())
            span_s += float(np.ptp(load.arrivals_s))
        times_s = np.concatenate(measured)
        return LoopPrediction(
            client=self.client,
            events=len(times_s),
            events_per_s=len(times_s) / span_s if span_s else np.nan,
            predicted=_figures(np.concatenate(predicted)),
            measured=_figures(times_s),
            paused_share=paused_s / span_s if span_s else np.nan,
        )

    def _cells(self) -> pd.DataFrame:
        columns = {}
        for name in self.costs.index if len(self.costs) > 2 else ["all"]:
            row = self.costs.loc[name].to_dict()
            pairs = {cost: (row[f"{cost}_s"], row[f"{cost}_se_s"]) for cost in COSTS}
            cells = {c: f"{show_time(v)} ± {show_time(e)}" if e > 0 else show_time(v) for c, (v, e) in pairs.items()}
            columns["all" if name == "all" else f"worker {name}"] = cells | {"R²": f"{row['r2']:.2f}"}
        return pd.DataFrame(columns)

    def _lines(self) -> list[str]:
        row = self.costs.loc["all"]
        lines = [
            f"{row['left_out']:.0f} of {row['turns']:.0f} turns were stalls and left out, {row['left_out_share']:.1%} "
            f"of the time that the loop was awake; so were {row['late_wakeups']:.0f} late wake-ups. Predictions know "
            "nothing of them.",
            f"{row['other']:.0f} turns did nothing that is counted: {row['other_share']:.1%} of that time.",
        ]
        if row["left_out_share"] > DISTURBED_SHARE:
            lines.append("Something else kept the machine busy: fit a quieter run before predicting from this one.")
        if np.isnan(row["wakeup_s"]):
            lines.append("The loop hardly ever slept: its wake-up is unknown and taken as 0.")
        return lines

    def __repr__(self) -> str:
        check = [repr(self.check)] if self.check else []
        return "\n".join([self._head(), self._cells().to_string(), *self._lines(), *check])

    def _repr_html_(self) -> str:
        if self.check is None:
            return card(self._head(), tables=[self._cells()], notes=self._lines())
        return card(self.check.sentence, [self._head()], [self._cells(), self.check._cells()], self._lines())

    def _head(self) -> str:
        return f"Event loop of the {self.client} client: costs ± standard errors"


def fit_loop(run: Run) -> LoopFit:
    """Estimate what an event loop's turn costs: poll, read, handle, send; and its wake-up.

    The length of a turn, from its poll (entered when something was ready, returned when it slept) to the next one, is
    regressed on what was done in it: weights are 1 / expected length, no cost is below 0, and standard errors are of
    the sandwich kind over 40 blocks of successive turns a worker, robust to unequal and correlated residuals. These
    are mean costs. The wake-up runs from the first arrival to the return of a poll that slept, less what a poll costs.

    Stalls are left out and counted, since they are the machine's at that time: turns of more than twice the expected
    length and 0.3 ms (preemptions, mostly), wake-ups of more than ten times the median and 0.3 ms. So costs are of a
    loop that is left alone.

    Raises
    ------
    UsageError
        A run of another tool; without turns or kernel stamps; too few turns, or all of a kind.

    Examples
    --------
    >>> fit = fit_loop(run)
    >>> fit.client, fit.cost_s("read") > 0, fit.check.events
    ('stamped', True, 2000)
    """
    by_worker = {worker.number: _turns_of(worker) for worker in _workers(run)}
    pooled = _pool(list(by_worker.values()))
    turns: dict[Any, _Turns] = {"all": pooled, **by_worker}
    estimates = {name: _regress(own) for name, own in turns.items()}
    rows = {name: _row(estimates[name], own) for name, own in turns.items()}
    costs = pd.DataFrame.from_dict(rows, orient="index").rename_axis("worker")
    estimate = estimates["all"]
    fit = LoopFit(
        client=run.client,
        costs=costs,
        poll_law=_law_around(estimate.values[0], (pooled.length_s - pooled.design @ estimate.values)[estimate.kept]),
        wakeup_law=_wakeups(pooled, estimate.values),
        coefficients=estimate.values,
        after_s=_after_last_event(pooled, estimate, run.client),
        sends_per_event=float(pooled.design[:, 5].sum() / max(1, len(run.events))),
    )
    return dataclasses.replace(fit, check=fit.predict(run))


# turns of a run


@dataclass(frozen=True)
class _Worker:
    """One worker's part of a run, as plain arrays; MISSING_NS where there is no stamp."""

    number: int
    two_stages: bool
    cycles: dict[str, Ints]
    events: dict[str, Ints]
    requests: dict[str, Ints]

    @property
    def done_ns(self) -> Ints:
        """When each event was done: handled, or seen by a client that handles nothing."""
        return self.events["handled_ns" if self.two_stages else "seen_ns"]

    @property
    def times_s(self) -> Floats:
        """Each event's time in the client; NaN without a stamp of either end."""
        return elapsed_s(self.done_ns, self.events["wire_ns"])

    def turn_of(self, at_ns: Ints) -> Ints:
        """The turn that each time fell into."""
        return np.searchsorted(self.cycles["poll_returned_ns"], at_ns, side="right") - 1

    def count(self, turn: Ints) -> Ints:
        """How often each turn is named."""
        n = len(self.cycles["poll_returned_ns"])
        return np.bincount(turn[(turn >= 0) & (turn < n)], minlength=n)


def _workers(run: Run) -> Iterator[_Worker]:
    if run.client not in CLIENTS:
        raise UsageError(f"only runs of the clients {' and '.join(CLIENTS)} record their loop; not of {run.client}")
    run = known_arrivals(run)
    if not len(run.cycles) or not run.events["wire_ns"].notna().any():
        raise UsageError("a loop's costs need turns and kernel stamps; this run has none")
    worker_of = run.requests.set_index("request_id")["worker"]
    owner = worker_of.reindex(run.events["request_id"]).to_numpy()
    end = "handled" if run.client == "conventional" else "seen"
    stamps = ["request_id", "due_ns", "begun_ns", "sent_ns", "headers_ns", "eof_ns", f"last_{end}_ns"]
    for number in sorted(run.cycles["worker"].unique().tolist()):
        own = run.requests[run.requests["worker"] == number]
        yield _Worker(
            number=number,
            two_stages=run.client == "conventional",
            cycles=_plain(run.cycles[run.cycles["worker"] == number], run.cycles.columns),
            events=_plain(run.events[owner == number], ["request_id", "cycle", "wire_ns", "seen_ns", "handled_ns"]),
            requests={name.replace(f"last_{end}", "ended"): v for name, v in _plain(own, stamps).items()},
        )


def _plain(frame: pd.DataFrame, names: Any) -> dict[str, Ints]:
    return {name: plain_ns(frame[name]) for name in names}


@dataclass(frozen=True)
class _Turns:
    """The turns of one worker, or of all, within the load; those that did nothing that is counted, only summed up.

    `design` has the columns of `_COLUMNS`, `number` says which turn of its worker each is; `front_s` runs from a turn's
    start to its last event done, with `front_ends` ends of requests before it; NaN is missing.
    """

    design: Floats
    length_s: Floats
    wakeup_s: Floats
    front_s: Floats
    front_ends: Ints
    number: Ints
    block: Ints
    other: int
    other_s: float


def _turns_of(worker: _Worker) -> _Turns:
    entered, returned = worker.cycles["poll_entered_ns"], worker.cycles["poll_returned_ns"]
    begun, sent = (v[v != MISSING_NS] for v in (worker.requests[name] for name in ("begun_ns", "sent_ns")))
    done = worker.done_ns[worker.done_ns != MISSING_NS]
    if not len(begun) or not len(done):
        raise UsageError(f"worker {worker.number} has no event from which a loop's costs could be told")
    first = _first_arrival(worker)
    # a task that was made in a turn runs in the next: the conventional client notices a due request a turn earlier
    due = worker.count(worker.turn_of(begun) - 1) if worker.two_stages else worker.count(np.empty(0, np.int64))
    sends, ended = worker.count(worker.turn_of(sent)), worker.requests["ended_ns"]
    ended = ended[ended != MISSING_NS]
    ends = worker.count(worker.turn_of(ended))
    reads, handled = worker.cycles["reads"], worker.cycles["handled"]
    pending = worker.two_stages & ((handled > 0) | (sends > 0))
    ready = pending | ((first != MISSING_NS) & (first <= entered))
    start = np.where(ready, entered, returned)
    length_s = np.append(entered[1:] - start[:-1], 0) / NS_PER_S
    design = np.column_stack([np.ones(len(start)), -1.0 * ~ready, reads, handled, due, sends, ends])
    within = (returned >= begun.min() - _EDGE_NS) & (returned <= done.max())
    within[-1] = False  # its end is not known
    counted = within & (design[:, 2:] > 0).any(axis=1)
    last = np.full(len(start), MISSING_NS)
    np.maximum.at(last, np.maximum(worker.turn_of(done), 0), done)
    before_last = ended[ended < last[worker.turn_of(ended)]]
    return _Turns(
        design=design[counted],
        length_s=length_s[counted],
        wakeup_s=np.where(~ready & (first > entered), (returned - first) / NS_PER_S, np.nan)[counted],
        front_s=np.where(last != MISSING_NS, (last - start) / NS_PER_S, np.nan)[counted],
        front_ends=worker.count(worker.turn_of(before_last))[counted],
        number=np.flatnonzero(counted),
        block=np.arange(counted.sum()) * BLOCKS // max(1, counted.sum()),
        other=int((within & ~counted).sum()),
        other_s=float(length_s[within & ~counted].sum()),
    )


def _first_arrival(worker: _Worker) -> Ints:
    """The first wire stamp among what each turn read; MISSING_NS where it read no stamped event."""
    wire, cycle, latest = worker.events["wire_ns"], worker.events["cycle"], np.iinfo(np.int64).max
    known = (wire != MISSING_NS) & (cycle >= 0)
    first = np.full(len(worker.cycles["poll_returned_ns"]), latest)
    np.minimum.at(first, cycle[known], wire[known])
    return np.where(first == latest, MISSING_NS, first)


def _pool(parts: list[_Turns]) -> _Turns:
    names = ("design", "length_s", "wakeup_s", "front_s", "front_ends", "number")
    arrays = {name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
    block = np.concatenate([p.block + k * BLOCKS for k, p in enumerate(parts)])
    return _Turns(**arrays, block=block, other=sum(p.other for p in parts), other_s=sum(p.other_s for p in parts))


# regression


@dataclass(frozen=True)
class _Estimate:
    """Costs in seconds by `_COLUMNS`, 0 for what never happened; their covariance; which turns are no stalls."""

    values: Floats
    covariance: Floats
    kept: Bools
    r2: float


def _regress(turns: _Turns) -> _Estimate:
    if len(turns.length_s) < TURNS_AT_LEAST:
        raise UsageError(f"a loop's costs need {TURNS_AT_LEAST} turns that did something; not {len(turns.length_s)}")
    design, y = turns.design.copy(), turns.length_s
    if (design[:, 1] == -1).all():
        design[:, 1] = 0  # never anything ready: a poll's own cost is part of the wake-up
    used = (design != 0).any(axis=0)
    kept, expected, values = np.ones(len(y), bool), np.ones(len(y)), np.zeros(len(_COLUMNS))
    if np.linalg.matrix_rank(design[:, used]) < used.sum():
        raise UsageError("a loop's costs can't be told apart where all turns are of a kind; measure at a higher rate")
    for step in range(10):
        weights = 1 / np.sqrt(expected[kept])
        values[used], _ = nnls(design[kept][:, used] * weights[:, None], y[kept] * weights)
        expected = np.maximum(design @ values, 0.1 * np.median(y))
        stalled = y > 2 * expected + STALL_S
        if step > 2 and (stalled == ~kept).all():
            break
        kept = ~stalled
    active = values > 0
    covariance = np.zeros((len(values), len(values)))
    covariance[np.ix_(active, active)] = _sandwich(
        design[kept][:, active], (y - design @ values)[kept], 1 / expected[kept], turns.block[kept]
    )
    spread = ((y[kept] - y[kept].mean()) ** 2).sum()
    return _Estimate(values, covariance, kept, float(1 - ((y - design @ values)[kept] ** 2).sum() / spread))


def _sandwich(design: Floats, residual: Floats, weight: Floats, block: Ints) -> Floats:
    """Covariance of weighted least squares whose residuals are correlated within blocks (Liang & Zeger 1986)."""
    bread = np.linalg.inv(design.T @ (design * weight[:, None]))
    _, place = np.unique(block, return_inverse=True)
    scores = np.zeros((place.max() + 1, design.shape[1]))
    np.add.at(scores, place, design * (weight * residual)[:, None])
    return bread @ (scores.T @ scores) @ bread * len(scores) / max(1, len(scores) - 1)


def _row(estimate: _Estimate, turns: _Turns) -> dict[str, float]:
    """One row of `LoopFit.costs`."""
    values, covariance = estimate.values, estimate.covariance
    row = {}
    for name in ("poll", "read", "handle", "send", "end"):
        parts = _SEND if name == "send" else [_COLUMNS.index(name)]
        happened = (turns.design[:, parts] != 0).any()
        row[f"{name}_s"] = float(values[parts].sum()) if happened else np.nan
        variance = float(covariance[np.ix_(parts, parts)].sum())
        row[f"{name}_se_s"] = variance**0.5 if variance > 0 else np.nan
    slept = _on_time(turns.wakeup_s)
    row["wakeup_s"] = row["wakeup_se_s"] = np.nan
    if slept.sum() >= SLEEPS_AT_LEAST:
        wakeup_s, one = turns.wakeup_s[slept], np.ones((slept.sum(), 1))
        row["wakeup_s"] = float(_wakeups(turns, values).mean())
        error2 = _sandwich(one, wakeup_s - wakeup_s.mean(), one[:, 0], turns.block[slept])[0, 0]
        row["wakeup_se_s"] = float(error2 + covariance[1, 1]) ** 0.5
    awake_s, stalled = turns.length_s.sum() + turns.other_s, ~estimate.kept
    shares = {"left_out_share": turns.length_s[stalled].sum() / awake_s, "other_share": turns.other_s / awake_s}
    counts = {"turns": len(stalled) + turns.other, "left_out": stalled.sum(), "other": turns.other}
    counts["late_wakeups"] = (~np.isnan(turns.wakeup_s)).sum() - slept.sum()
    return row | {"r2": estimate.r2} | {k: float(v) for k, v in (counts | shares).items()}


def _on_time(wakeup_s: Floats) -> Bools:
    """Which turns slept and woke as the loop does, not held up by something else."""
    known = wakeup_s[~np.isnan(wakeup_s)]
    most_s = 10 * float(np.median(known)) + STALL_S if len(known) else 0.0
    return wakeup_s <= most_s


def _wakeups(turns: _Turns, values: Floats) -> Floats:
    """The measured wake-ups less the poll's own cost, which every turn has; 0 where the loop hardly slept."""
    slept = _on_time(turns.wakeup_s)
    return np.maximum(turns.wakeup_s[slept] - values[1], 0.0) if slept.sum() >= SLEEPS_AT_LEAST else np.zeros(1)


def _law_around(cost_s: float, residual_s: Floats) -> Floats:
    """A cost with what is left over of each turn, none below 0: shifted so that the mean stays what it was."""
    mean_s = max(0.0, cost_s + float(residual_s.mean()))
    spread = cost_s + residual_s
    if mean_s == 0:
        return np.zeros(1)
    shift = brentq(lambda s: np.maximum(spread - s, 0.0).mean() - mean_s, spread.min() - mean_s, spread.max())
    return np.maximum(spread - shift, 0.0)


def _after_last_event(turns: _Turns, estimate: _Estimate, client: str) -> float:
    """The part of a turn's fixed cost that comes when its events are done, on average over turns with any."""
    column = _COLUMNS.index("handle" if client == "conventional" else "read")
    with_any = estimate.kept & ~np.isnan(turns.front_s) & (turns.design[:, column] > 0)
    values = estimate.values
    before = turns.front_s - turns.design[:, column] * values[column] - turns.design[:, 1] * values[1]
    before -= turns.front_ends * values[_COLUMNS.index("end")]
    return float(values[0] - before[with_any].mean()) if with_any.any() else 0.0


def _pauses(worker: _Worker, coefficients: Floats, origin_ns: int) -> Floats:
    """When a run's loop was held up, by a stall or a late wake-up, and for how long, (k, 2) seconds from the origin."""
    turns = _turns_of(worker)
    entered, returned = (worker.cycles[f"poll_{name}_ns"][turns.number] for name in ("entered", "returned"))
    expected_s = turns.design @ coefficients
    stalled = turns.length_s > 2 * expected_s + STALL_S
    late = ~np.isnan(turns.wakeup_s) & ~_on_time(turns.wakeup_s)
    usual_s = np.nanmedian(turns.wakeup_s) if late.any() else 0.0
    asleep_s = np.where(late, turns.wakeup_s - usual_s, 0.0)
    at_s = np.concatenate(
        [(returned - origin_ns)[late] / NS_PER_S - asleep_s[late], (entered - origin_ns)[stalled] / NS_PER_S]
    )
    length_s = np.concatenate([asleep_s[late], (turns.length_s - expected_s)[stalled]])
    return np.column_stack([at_s, length_s])[np.argsort(at_s, kind="stable")]


# the load of a run


@dataclass(frozen=True)
class _Load:
    """What one worker's loop had to deal with: reads on the wire with their sockets, due times; seconds from a start.

    `times_s` is an event's measured time in the client, NaN for a read that held no token; `ends` marks the last event
    of each request; `origin_ns` is the start.
    """

    arrivals_s: Floats
    streams: Ints
    ends: Bools
    times_s: Floats
    due_s: Floats
    origin_ns: int


def _load_of(worker: _Worker) -> _Load:
    events, requests = worker.events, worker.requests
    ids, wire = np.concatenate([_bare_reads(worker), np.stack([events["request_id"], events["wire_ns"]], axis=1)]).T
    times_s = np.full(len(ids), np.nan)
    times_s[len(ids) - len(worker.done_ns) :] = worker.times_s
    ends = np.zeros(len(ids), bool)
    ends[len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]] = True
    ends &= np.arange(len(ids)) >= len(ids) - len(worker.done_ns)
    due = requests["due_ns"][(requests["due_ns"] != MISSING_NS) & (requests["sent_ns"] != MISSING_NS)]
    order = np.argsort(wire, kind="stable")
    order = order[wire[order] != MISSING_NS]
    origin = min(due.min(initial=wire[order[0]]), wire[order[0]])
    seconds = ((wire[order] - origin) / NS_PER_S, np.sort(due - origin) / NS_PER_S)
    return _Load(seconds[0], ids[order], ends[order], times_s[order], seconds[1], int(origin))


def _bare_reads(worker: _Worker) -> Ints:
    """(request, stamp) of the reads without a token event that a run records: a response's head and its end."""
    requests, events = worker.requests, worker.events
    ends = [np.stack([requests["request_id"], requests[name]], axis=1) for name in ("headers_ns", "eof_ns")]
    pairs = np.unique(np.concatenate(ends), axis=0)
    known = pd.MultiIndex.from_arrays([events["request_id"], events["wire_ns"]])
    bare = ~pd.MultiIndex.from_arrays(list(pairs.T)).isin(known) & (pairs[:, 1] != MISSING_NS)
    return pairs[bare]


def _figures(times_s: Floats) -> dict[str, float]:
    if not len(times_s):
        return dict.fromkeys(("mean_s", "p50_s", "p90_s", "p99_s"), np.nan)
    p50_s, p90_s, p99_s = np.quantile(times_s, [0.50, 0.90, 0.99])
    return {"mean_s": float(times_s.mean()), "p50_s": float(p50_s), "p90_s": float(p90_s), "p99_s": float(p99_s)}
