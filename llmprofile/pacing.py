"""When the reference server's tokens leave: a fixed schedule, or a batching engine. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError, not_negative, whole
from llmprofile.units import s_to_ns

_STEP_SLACK_NS = 1_000  # a gap of one step, a rounding error longer, is still one step
_FAULT_KEY = 1 << 63  # keeps the fault draw apart from the jitter of the same request


@dataclass(frozen=True)
class Pace:
    """The law of the server's token times.

    Attributes
    ----------
    ttft_s, itl_s : float
        Time to the first token and between tokens.
    cv : float
        Coefficient of variation of a lognormal factor of mean 1 on each of these times; with `max_batch`, on
        the length of each step.
    step : bool
        Token times are rounded up to whole multiples of `itl_s` on the monotonic clock, so that all streams
        emit in the same burst.
    seed : int
        A request's factors depend on this and on the number at the end of its X-Request-Id alone.
    max_batch : int, optional
        Requests share an engine, a `Batch`, that runs at most so many.
    batch_cost : float
        Share of `itl_s` that each further running sequence adds to a step of that engine.

    Examples
    --------
    >>> Pace(ttft_s=0.02, itl_s=0.005).cv
    0.0
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    cv: float = 0.0
    step: bool = False
    seed: int = 1
    max_batch: int | None = None
    batch_cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s", "cv", "batch_cost"):
            not_negative(name, getattr(self, name))
        if whole("seed", self.seed, 0) >= 1 << 63:
            raise UsageError(f"seed must be below 2**63; not {self.seed}")
        if self.step and self.itl_s == 0:
            raise UsageError("step=True needs an itl_s above 0: it is the length of the step")
        if self.max_batch is not None:
            whole("max_batch", self.max_batch)
            if self.step:
                raise UsageError("step and max_batch don't go together: a batching engine has its own steps")
        elif self.batch_cost:
            raise UsageError("batch_cost needs max_batch: only the batching engine has a batch")


def _draws(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))


def jitter(pace: Pace, number: int, n: int) -> npt.NDArray[np.float64]:
    """Lognormal factors of mean 1 and coefficient of variation `pace.cv`; shape (n,).

    With s² = ln(1 + cv²) the factor is exp(s·z − s²/2), z standard normal.

    Examples
    --------
    >>> jitter(Pace(), 0, 2)
    array([1., 1.])
    """
    if not pace.cv:
        return np.ones(n)
    log_variance = math.log1p(pace.cv**2)
    normal = _draws(pace.seed, number).standard_normal(n)
    return np.exp(math.sqrt(log_variance) * normal - log_variance / 2)


def struck(seed: int, number: int, share: float) -> bool:
    """Whether a fault that befalls a share of requests befalls this one.

    Examples
    --------
    >>> struck(1, 0, 1.0), struck(1, 0, 0.0)
    (True, False)
    """
    return share >= 1 or bool(_draws(seed, number + _FAULT_KEY).random() < share)


def due_times(pace: Pace, arrive_ns: int, n: int, number: int, stall: tuple[int, int] | None = None) -> list[int]:
    """When each of `n` sends is due on the fixed schedule: `ttft_s` after arrival, then `itl_s` apart.

    Absolute: a late send does not delay the next. `stall` is (index, ns): that much later from there on.

    Examples
    --------
    >>> due_times(Pace(ttft_s=0.05, itl_s=0.01), 0, 3, 0)
    [50000000, 60000000, 70000000]
    """
    gaps_s = np.full(n, pace.itl_s)
    gaps_s[0] = pace.ttft_s
    gaps_ns = gaps_s * jitter(pace, number, n) * 1e9
    if stall is not None and stall[0] < n:
        gaps_ns[stall[0]] += stall[1]
    if pace.step:
        return _on_steps(gaps_ns, arrive_ns, s_to_ns(pace.itl_s))
    dues: list[int] = (arrive_ns + np.rint(gaps_ns.cumsum()).astype(np.int64)).tolist()
    return dues


def _on_steps(gaps_ns: npt.NDArray[np.float64], arrive_ns: int, step_ns: int) -> list[int]:
    steps = np.maximum(np.ceil((gaps_ns - _STEP_SLACK_NS) / step_ns), 1).astype(np.int64)
    steps[0] = -(-(arrive_ns + int(gaps_ns[0])) // step_ns)
    dues: list[int] = (steps.cumsum() * step_ns).tolist()
    return dues


def halves(dues_ns: list[int], split_ns: int) -> list[int]:
    """Two times for each: a first half `split_ns` earlier (not before the send before), a second when due.

    Examples
    --------
    >>> halves([50, 60], 20)
    [30, 50, 50, 60]
    """
    before = [dues_ns[0] - split_ns, *dues_ns]
    return [t for due, last in zip(dues_ns, before, strict=False) for t in (max(due - split_ns, last), due)]


class Member(Protocol):
    """What the batching engine knows of a sequence."""

    arrive_ns: int
    admitted_ns: int
    done: bool

    def emit(self, due_ns: int) -> int | None:
        """Send the next token."""

    def stall_ns(self) -> int:
        """The stall asked for before the token that this step will emit."""


class Batch:
    """An engine that batches continuously: at the end of each step every running sequence emits one token.

    Requests wait in a queue, first come first served, for one of `max_batch` places at the start of a step.
    A step over d sequences that run already takes `itl_s`·(1 + `batch_cost`·(d − 1)), nothing when d = 0. A
    step that admits requests takes `ttft_s` longer, however many they are: their prefill runs in one pass,
    and the others wait for it. A newcomer's first token leaves at that step's end. So a lone request of N
    tokens takes `ttft_s` + (N−1)·`itl_s`, and with `max_batch=1` the server is a single-server queue.

    Examples
    --------
    >>> engine = Batch(Pace(ttft_s=0.05, itl_s=0.01, max_batch=2))
    >>> engine.begin(0)
    0
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.waiting: deque[Member] = deque()
        self.running: list[Member] = []
        self._steps = 0

    def begin(self, start_ns: int) -> int:
        """Start a step: admit what waits and fits; return when the step ends."""
        pace = self.pace
        self.running = [member for member in self.running if not member.done]
        decoding = len(self.running)
        if self.waiting and not decoding:
            start_ns = max(start_ns, self.waiting[0].arrive_ns)
        while self.waiting and len(self.running) < (pace.max_batch or 1) and self.waiting[0].arrive_ns <= start_ns:
            member = self.waiting.popleft()
            if not member.done:
                member.admitted_ns = start_ns
                self.running.append(member)
        length_s = pace.ttft_s * (len(self.running) > decoding)
        length_s += pace.itl_s * (1 + pace.batch_cost * (decoding - 1)) if decoding else 0.0
        self._steps += 1
        length_s *= float(jitter(pace, self._steps, 1)[0])
        return start_ns + s_to_ns(length_s) + sum(member.stall_ns() for member in self.running)
