"""An event loop as a queue: the gated loop with wake-up, in closed form for one stage and as a recursion for two.

asyncio polls, finds some sockets ready, reads all of them, runs what the reads woke, and only then polls again. So
what arrives during a turn waits for the next one (a gate), and a loop that finds nothing sleeps and has to be woken.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError, positive, whole
from llmprofile.laws import Law, law_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MEANS_ONLY = "the gated loop offers means only: the p99 of this model was 2–3 times too low at high load"


@dataclass(frozen=True)
class GatedLoop:
    """Poisson events at an event loop of one stage: a poll finds N events, all are done, then the loop polls again.

    A turn takes C = a + b₁ + … + b_N, and the next poll finds what arrived in C. When that is nothing, the loop sleeps
    until the next event and wakes after D, so it finds 1 + what arrived in D. With a = D = 0 this is M/G/1.

    Parameters
    ----------
    rate_per_s : float
        λ, of events.
    poll, service, wakeup : law, array of measured seconds, or number of seconds
        a: what a turn costs whatever it finds; b: what an event costs; D: from an event to the end of the sleep.

    Raises
    ------
    UsageError
        A rate that is not above 0; a time that is negative or missing.

    Examples
    --------
    >>> loop = GatedLoop(14_100, poll=10e-6, service=35e-6, wakeup=40e-6)
    >>> round(loop.mean_time_s * 1e6, 1), round(loop.utilisation, 2)
    (99.7, 0.49)
    """

    rate_per_s: float
    poll: Any
    service: Any
    wakeup: Any

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)
        for name in ("poll", "service", "wakeup"):
            object.__setattr__(self, name, law_of(getattr(self, name), name))

    @property
    def utilisation(self) -> float:
        """ρ = λE[b]: the share of time that events take; a busy loop's polls come on top, fewer the fuller it is."""
        return self.rate_per_s * self.service.mean_s

    @cached_property
    def idle_chance(self) -> float:
        """q₀, the chance that a poll finds nothing, so that the loop sleeps; 0 from ρ = 1 on.

        Q(z) = α(z) Q(β(z)) + q₀ (zδ(z) − 1) for the generating function Q of N, with α, β, δ those of what arrives in
        a, b, D; iterated along z₀ = β(0), z_{j+1} = β(z_j), and Q(0) = 0.
        """
        if self.utilisation >= 1:
            return 0.0
        below_one = _fixed_point_path(self.rate_per_s, self.service)
        s = self.rate_per_s * below_one
        poll, wakeup = self.poll.transform(s).real, self.wakeup.transform(s).real
        inside = np.concatenate([[1.0], np.cumprod(poll)])
        missed = inside[:-1] @ ((1 - below_one) * wakeup - 1)
        alone = float(self.poll.transform(self.rate_per_s).real)
        return float(alone * inside[-1] / (1 - alone * missed))

    @cached_property
    def batch_mean(self) -> float:
        """E[N], events a turn; infinite from ρ = 1 on."""
        if self.utilisation >= 1:
            return math.inf
        arrivals = self.rate_per_s * self.poll.mean_s + self.idle_chance * (1 + self.rate_per_s * self.wakeup.mean_s)
        return arrivals / (1 - self.utilisation)

    @cached_property
    def mean_time_s(self) -> float:
        """E[T], from an event's arrival to the end of its own service; infinite from ρ = 1 on."""
        rate, rho, q, m = self.rate_per_s, self.utilisation, self.idle_chance, self.batch_mean
        a, b, d = self.poll, self.service, self.wakeup
        if rho >= 1 or not math.isfinite(a.second_s2 + b.second_s2 + d.second_s2):
            return math.inf
        waking = q * (2 * rate * d.mean_s + rate**2 * d.second_s2)
        pairs = rate**2 * a.second_s2 + 2 * rate * a.mean_s * rho * m + rate**2 * b.second_s2 * m + waking
        pairs /= 1 - rho**2  # E[N(N − 1)]
        turn_s2 = a.second_s2 + (2 * a.mean_s * b.mean_s + b.second_s2) * m + b.mean_s**2 * pairs  # E[C²]
        asleep = q * (d.mean_s + rate * d.second_s2 / 2)
        return (a.mean_s * m + b.mean_s * (pairs + 2 * m) / 2 + rate * turn_s2 / 2 + asleep) / m

    @property
    def mean_wait_s(self) -> float:
        """E[T] − E[b]: from an event's arrival to the start of its own service, the poll's cost and waking included."""
        return self.mean_time_s - self.service.mean_s

    @property
    def var_wait_s(self) -> NoReturn:
        """Not offered: raises UsageError, which says why."""
        raise UsageError(MEANS_ONLY)

    def wait_cdf(self, t: npt.ArrayLike) -> NoReturn:
        """Not offered: raises UsageError, which says why."""
        raise UsageError(MEANS_ONLY)

    def wait_quantile(self, q: npt.ArrayLike) -> NoReturn:
        """Not offered: raises UsageError, which says why."""
        raise UsageError(MEANS_ONLY)

    def split(self, k: int) -> GatedLoop:
        """One of `k` loops among which requests are dealt at random.

        Examples
        --------
        >>> GatedLoop(14_100, poll=1e-5, service=3.5e-5, wakeup=4e-5).split(2)
        GatedLoop(rate_per_s=7050.0, poll=1e-05, service=3.5e-05, wakeup=4e-05)
        """
        return dataclasses.replace(self, rate_per_s=self.rate_per_s / whole("k", k))


def _fixed_point_path(rate: float, service: Law) -> Floats:
    """1 − z_j along z_{j+1} = β(z_j) from z₀ = β(0), until what is left adds up to less than 1e-9."""
    rho, bend = rate * service.mean_s, rate**2 * service.second_s2 / 2
    path, u = [], 1 - float(service.transform(rate).real)
    # close to 1 a difference of transforms loses its digits, which the series of second order keeps
    near = 1e-5 / max(1.0, bend)
    while u > 1e-9 * (1 - rho):
        path.append(u)
        u = 1 - float(service.transform(rate * u).real) if u > near else u * (rho - bend * u)
    return np.array(path)


@dataclass(frozen=True, eq=False)
class Stretches:
    """Measured costs for `simulate_loop`, drawn in stretches of `length` that followed each other: slow phases last.

    Examples
    --------
    >>> Stretches(np.array([1.0, 2.0, 3.0]), length=3).sample(4, np.random.default_rng(1))
    array([2., 3., 1., 2.])
    """

    values_s: Floats
    length: int = 1000

    @property
    def mean_s(self) -> float:
        """Of the measured costs."""
        return float(self.values_s.mean())

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """(n,) draws; a stretch that comes to the end goes on at the start."""
        starts = rng.integers(0, len(self.values_s), -(-n // self.length))
        return self.values_s[(starts[:, None] + np.arange(self.length)).ravel()[:n] % len(self.values_s)]


@dataclass(frozen=True, eq=False)
class LoopTimes:
    """What `simulate_loop` found: n events and m sends in K turns.

    Attributes
    ----------
    time_s, wait_s : (n,) float
        From each event's arrival until it was handled, and until it was read.
    late_s : (m,) float
        From when each send was due until it was done.
    turn : (n,) int
        In which turn each event was read.
    polled_s, turn_s : (K,) float
        When each turn's poll looked (what had arrived by then is its batch), and how long the turn took from there.
    slept : (K,) bool
        Whether the poll had to wait; `polled_s` is then when it woke.
    batch, reads, handled, sends : (K,) int
        What each turn did: events and sockets read, events handled, requests sent.
    """

    time_s: Floats
    wait_s: Floats
    late_s: Floats
    turn: Ints
    polled_s: Floats
    turn_s: Floats
    slept: npt.NDArray[np.bool_]
    batch: Ints
    reads: Ints
    handled: Ints
    sends: Ints


def simulate_loop(
    arrivals_s: npt.ArrayLike,
    poll: Any,
    read: Any,
    handle: Any,
    wakeup: Any,
    *,
    sends_s: npt.ArrayLike | None = None,
    send: Any = 0.0,
    rng: np.random.Generator | int = 0,
    streams: npt.ArrayLike | None = None,
    pauses_s: npt.ArrayLike = (),
    ends: npt.ArrayLike | None = None,
    end: Any = 0.0,
) -> LoopTimes:
    """Run given arrivals through an event loop of two stages, as an ordinary asyncio client has.

    Turn k polls (a), handles what turn k − 1 read (h an event), sends what was due at that turn's poll (s each), and
    reads what had arrived by its own poll (r a socket): C_k = a + hN_{k−1} + sM_{k−1} + rN_k. It sleeps only when
    nothing is ready and nothing pending, and wakes D after the next arrival or due time. Without a cost of handling
    there is one stage: an event is done when its own read is, and sends follow the reads of their turn. An event that
    ends its request costs e more once it is done, which those behind it wait for: with decode steps the requests that
    end are the oldest, and so the first of a burst.

    Parameters
    ----------
    arrivals_s : (n,) float
        When events arrived, in order.
    poll, read, handle, wakeup, send, end : law, array of measured seconds, number of seconds, or Stretches
        a, r, h, D, s and e.
    sends_s : (m,) float, optional
        When requests are due, in order.
    rng : Generator or int
        Draws the costs; a number is a seed.
    streams : (n,) int, optional
        The socket of each event: those that wait on one socket take one read and are handled one by one. Without it
        each event has a socket of its own.
    pauses_s : (k, 2) float, optional
        When the loop was off its processor, in order, and for how long: vacations, between two turns.
    ends : (n,) bool, optional
        Which events end their request; none by default.

    Raises
    ------
    UsageError
        Times that are not finite and in order; a cost that is negative or missing; `streams` or `ends` of another
        length.

    Examples
    --------
    >>> found = simulate_loop([0.0, 1.0, 1.0], poll=0.001, read=0.01, handle=0.02, wakeup=0.003)
    >>> found.time_s.round(3).tolist(), found.batch.tolist()
    ([0.035, 0.045, 0.065], [1, 0, 2, 0])
    """
    arrivals, due = _in_order("arrivals_s", arrivals_s), _in_order("sends_s", () if sends_s is None else sends_s)
    before = _event_before(streams, len(arrivals))
    laws = {"poll": poll, "read": read, "handle": handle, "wakeup": wakeup, "send": send, "end": end}
    costs = {name: value if isinstance(value, Stretches) else law_of(value, name) for name, value in laws.items()}
    two_stages = costs["handle"].mean_s > 0
    most_turns = (1 + two_stages) * (len(arrivals) + len(due)) + 1
    sizes = {"poll": most_turns, "wakeup": most_turns, "send": len(due)}
    draws = np.random.default_rng(rng)
    drawn = {name: law.sample(sizes.get(name, len(arrivals)), draws) for name, law in costs.items()}
    drawn["end"] = drawn["end"] * _flags("ends", ends, len(arrivals))
    pauses = np.asarray(pauses_s, float).reshape(-1, 2)
    _in_order("the starts of pauses_s", pauses[:, 0])
    turns = _Turns(arrivals, due, before, drawn, two_stages)
    turns.run([*pauses.tolist(), [math.inf, 0.0]])
    return turns.times()


def _in_order(name: str, times_s: npt.ArrayLike) -> Floats:
    times = np.asarray(times_s, float)
    if times.ndim != 1 or not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise UsageError(f"{name} must be finite times in ascending order, in one dimension")
    return times


def _flags(name: str, flags: npt.ArrayLike | None, n: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(n, bool) if flags is None else np.asarray(flags)
    if found.shape != (n,) or found.dtype != bool:
        raise UsageError(f"{name} must be {n} truth values, one for each arrival")
    return found


def _event_before(streams: npt.ArrayLike | None, n: int) -> Ints:
    """The event before each on its socket; −1 for the first, and for all where sockets are not shared."""
    before = np.full(n, -1)
    if streams is None:
        return before
    sockets = np.asarray(streams)
    if sockets.shape != (n,) or sockets.dtype.kind not in "iu":
        raise UsageError(f"streams must be {n} whole numbers, the socket of each arrival")
    order = np.argsort(sockets, kind="stable")
    same = np.flatnonzero(sockets[order][1:] == sockets[order][:-1])
    before[order[same + 1]] = order[same]
    return before


class _Turns:
    """The recursion, turn by turn; costs are sums up to each draw, so that a turn's are one difference."""

    def __init__(self, arrivals: Floats, due: Floats, before: Ints, drawn: dict[str, Floats], two_stages: bool) -> None:
        self.arrivals, self.due, self.before, self.drawn, self.two_stages = arrivals, due, before, drawn, two_stages
        self.sums = {
            name: np.concatenate([[0.0], np.cumsum(drawn[name])]) for name in ("read", "handle", "send", "end")
        }
        self.polled: list[float] = []
        self.ended: list[float] = []
        self.slept: list[bool] = []
        # after each turn, and before the first: how many events, sends and sockets were taken up
        self.events, self.taken, self.sockets = [0], [0], [0]

    def run(self, pauses: list[list[float]]) -> None:
        arrivals, due, before = self.arrivals.tolist(), self.due.tolist(), self.before.tolist()
        read, handle, send, end = (self.sums[name].tolist() for name in ("read", "handle", "send", "end"))
        poll, wakeup = self.drawn["poll"].tolist(), self.drawn["wakeup"].tolist()
        merged, back = bool((self.before >= 0).any()), self.two_stages
        now, i, j, reads, i_before, j_before, paused = -math.inf, 0, 0, 0, 0, 0, 0
        n, m = len(arrivals), len(due)
        while True:
            while pauses[paused][0] <= now:  # it began in the turn before
                now, paused = now + pauses[paused][1], paused + 1
            i_next, j_next = bisect_right(arrivals, now, i), bisect_right(due, now, j)
            idle = i_next == i and j_next == j and not (back and (i > i_before or j > j_before))
            if idle:
                if i == n and j == m:
                    break
                now = min(arrivals[i] if i < n else math.inf, due[j] if j < m else math.inf) + wakeup[len(self.polled)]
                while pauses[paused][0] <= now:  # it began while the loop slept
                    now, paused = max(now, sum(pauses[paused])), paused + 1
                i_next, j_next = bisect_right(arrivals, now, i), bisect_right(due, now, j)
            new_reads = sum(b < i for b in before[i:i_next]) if merged else i_next - i
            self.polled.append(now)
            self.slept.append(idle)
            now += poll[len(self.polled) - 1] + read[reads + new_reads] - read[reads]
            # with two stages, what the turn before took up is handled and sent in this one
            now += handle[i] - handle[i_before] + send[j] - send[j_before] if back else send[j_next] - send[j]
            now += end[i] - end[i_before] if back else end[i_next] - end[i]
            self.ended.append(now)
            i_before, j_before, i, j, reads = i, j, i_next, j_next, reads + new_reads
            self.events.append(i)
            self.taken.append(j)
            self.sockets.append(reads)

    def times(self) -> LoopTimes:
        polled, events, taken, sockets = (np.array(v) for v in (self.polled, self.events, self.taken, self.sockets))
        begun = polled + self.drawn["poll"][: len(polled)]
        batch, sends = np.diff(events), np.diff(taken)
        turn = np.repeat(np.arange(len(polled)), batch)
        socket = self._sockets_of(turn, events)
        due_in, sending = np.repeat(np.arange(len(polled)), sends), np.arange(taken[-1])
        handling_s = np.diff(self.sums["handle"][events]) + np.diff(self.sums["end"][events])
        sending_s = np.diff(self.sums["send"][taken])
        place = np.empty(len(turn), np.int64)
        place[np.argsort(socket, kind="stable")] = np.arange(len(turn))
        ended_s = self._ended_before(place, events[turn])
        read_s = _since(self.sums["read"], socket, sockets[turn])
        if self.two_stages:
            read_at = (begun + _one_later(handling_s + sending_s))[turn] + read_s
            at_send = (begun + _one_later(handling_s))[due_in + 1]
            handled_at = begun[turn + 1] + _since(self.sums["handle"], place, events[turn]) + ended_s
        else:
            read_at = begun[turn] + read_s + ended_s
            at_send = (begun + np.diff(self.sums["read"][sockets]) + handling_s)[due_in]
        sent_at = at_send + _since(self.sums["send"], sending, taken[due_in])
        return LoopTimes(
            time_s=(handled_at if self.two_stages else read_at) - self.arrivals,
            wait_s=read_at - self.arrivals,
            late_s=sent_at - self.due,
            turn=turn,
            polled_s=polled,
            turn_s=np.array(self.ended) - polled,
            slept=np.array(self.slept, bool),
            batch=batch,
            reads=np.diff(sockets),
            handled=_one_later(batch) if self.two_stages else batch,
            sends=_one_later(sends) if self.two_stages else sends,
        )

    def _ended_before(self, place: Ints, first: Ints) -> Floats:
        """What the ends of requests cost between a turn's first event and each of its others."""
        ordered = np.empty(len(place))
        ordered[place] = self.drawn["end"]
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        before: Floats = sums[place] - sums[first]
        return before

    def _sockets_of(self, turn: Ints, events: Ints) -> Ints:
        """The number of the read that brought each event: its own, or that of the one before it on its socket."""
        first = self.before < events[turn]
        read = np.cumsum(first) - 1
        for k in np.flatnonzero(~first).tolist():
            read[k] = read[self.before[k]]
        return read


def _since(sums: Floats, number: Ints, start: Ints) -> Floats:
    """The cost of draws from `start` to `number`, this one included."""
    return sums[number + 1] - sums[start]


def _one_later(values: Any) -> Any:
    """Each turn's value, in the turn after it."""
    later = np.roll(values, 1)
    later[:1] = 0
    return later
