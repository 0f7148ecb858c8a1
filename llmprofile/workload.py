"""What is asked of the server: when requests are due, how long they are, which of them belong together.

One schedule a run, drawn once from the seed. Each request is dealt to a worker by a seeded draw of its own, so the
requests, lengths and due times are the same for any number of processes, and a Poisson stream stays Poisson in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError, positive, whole
from llmprofile.laws import law_of
from llmprofile.prompts import PromptFile, PromptSource, SharedPrefix
from llmprofile.stages import MOST_REQUESTS, Ramp, Stages, due_within
from llmprofile.traces import MOST_TOKENS, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST_CLOSED_REQUESTS = 1_000_000
"""A closed loop with a duration has no length of its own; its schedule is drawn up to this many requests."""
LATEST_DUE_S = 3e9
"""Times are held in int64 nanoseconds: what is beyond is a slip of the pen."""
DEFAULT_TOKENS = {"prompt_tokens": 128, "output_tokens": 64}
"""Lengths where neither the caller nor a trace says any."""


@dataclass(frozen=True)
class Constant:
    """Arrivals at equal distances: request k is due at k / `rate_per_s`.

    Examples
    --------
    >>> Constant(rate_per_s=10).due_s(3, np.random.default_rng(0)).tolist()
    [0.0, 0.1, 0.2]
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)

    def due_s(self, n: int, rng: np.random.Generator) -> Floats:
        """The first `n` due times, (n,) seconds from the start."""
        return np.arange(n) / self.rate_per_s


@dataclass(frozen=True)
class Gamma:
    """Renewal arrivals with gamma gaps of shape `burstiness`: CV = 1/√burstiness, 1 is Poisson, less is burstier.

    Examples
    --------
    >>> gaps_s = np.diff(Gamma(rate_per_s=10, burstiness=0.25).due_s(100_000, np.random.default_rng(0)))
    >>> round(float(gaps_s.std() / gaps_s.mean()), 1)
    2.0
    """

    rate_per_s: float
    burstiness: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)
        positive("burstiness", self.burstiness)

    def due_s(self, n: int, rng: np.random.Generator) -> Floats:
        """The first `n` due times, (n,) seconds from the start."""
        return np.cumsum(rng.gamma(self.burstiness, 1 / self.rate_per_s / self.burstiness, n))


@dataclass(frozen=True)
class Poisson:
    """A Poisson stream: exponential gaps, the first one included.

    Examples
    --------
    >>> len(Poisson(rate_per_s=200).due_s(5, np.random.default_rng(0)))
    5
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        positive("rate_per_s", self.rate_per_s)

    def due_s(self, n: int, rng: np.random.Generator) -> Floats:
        """The first `n` due times, (n,) seconds from the start."""
        return np.cumsum(rng.exponential(1 / self.rate_per_s, n))


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` users: each sends its next request when its last one is answered.

    Examples
    --------
    >>> ClosedLoop(concurrency=8)
    ClosedLoop(concurrency=8)
    """

    concurrency: int

    def __post_init__(self) -> None:
        whole("concurrency", self.concurrency)


Arrivals = Constant | Poisson | Gamma | Ramp | Stages | Trace | ClosedLoop


def _tokens(name: str, tokens: int, least: int = 1) -> int:
    if whole(name, tokens, least) > MOST_TOKENS:
        raise UsageError(f"{name} must be at most {MOST_TOKENS:,} tokens; not {tokens}")
    return int(tokens)


def _check_moments(mean: float, sd: float, high: int | None) -> None:
    for name, value, least in (("mean", mean, 1), ("sd", sd, 0)):
        if not least <= positive(name, value) <= MOST_TOKENS:
            raise UsageError(f"{name} must be between {least} and {MOST_TOKENS:,} tokens; not {value}")
    if high is not None:
        _tokens("high", high)


@dataclass(frozen=True)
class Fixed:
    """Always `tokens` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        _tokens("tokens", self.tokens)

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """(n,) lengths in tokens."""
        return np.full(n, self.tokens)


@dataclass(frozen=True)
class Uniform:
    """Whole lengths from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _tokens("low", self.low)
        _tokens("high", self.high, self.low)

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """(n,) lengths in tokens."""
        return rng.integers(self.low, self.high, n, endpoint=True)


@dataclass(frozen=True)
class Normal:
    """Normal lengths, rounded, at least 1 (and at most `high`, if given: both pile up at their bounds)."""

    mean: float
    sd: float
    high: int | None = None

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.sd, self.high)

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """(n,) lengths in tokens."""
        return _lengths(rng.normal(self.mean, self.sd, n), self.high)


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths with this `mean` and standard deviation `sd`, in tokens, rounded, at least 1.

    Examples
    --------
    >>> int(Lognormal(mean=200, sd=100).draw(200_000, np.random.default_rng(0)).mean().round(-1))
    200
    """

    mean: float
    sd: float
    high: int | None = None

    def __post_init__(self) -> None:
        _check_moments(self.mean, self.sd, self.high)

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """(n,) lengths in tokens."""
        sigma2 = math.log1p((self.sd / self.mean) ** 2)
        return _lengths(rng.lognormal(math.log(self.mean) - sigma2 / 2, math.sqrt(sigma2), n), self.high)


@dataclass(frozen=True)
class Empirical:
    """Lengths drawn with replacement from those seen elsewhere."""

    tokens: tuple[int, ...]

    def __init__(self, tokens: Sequence[int]) -> None:
        if not hasattr(tokens, "__len__") or len(tokens) == 0:
            raise UsageError("Empirical needs a sequence of at least one length")
        object.__setattr__(self, "tokens", tuple(_tokens("an empirical length", t) for t in tokens))

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """(n,) lengths in tokens."""
        return rng.choice(np.array(self.tokens), n)


Lengths = Fixed | Uniform | Normal | Lognormal | Empirical


def _lengths(values: Floats, high: int | None) -> Ints:
    return np.clip(np.rint(values), 1, MOST_TOKENS if high is None else high).astype(np.int64)


def as_lengths(name: str, lengths: Lengths | int) -> Lengths:
    """A length law; a whole number stands for `Fixed`.

    Examples
    --------
    >>> as_lengths("output_tokens", 64)
    Fixed(tokens=64)
    """
    if isinstance(lengths, Lengths):
        return lengths
    return Fixed(_tokens(name, lengths))


@dataclass(frozen=True)
class Conversation:
    """Requests that belong together: each turn says what was said and answered before, and something new.

    The arrival law schedules conversations, and `n` counts them; lengths are drawn for each turn's new text and
    answer. A later turn is due when its user has thought, beginning when the client noticed the end of the answer. In
    a closed loop a user holds one conversation at a time, thinking included. Where there is nothing to think, the time
    that the client takes to read the answer shows as lateness.

    Parameters
    ----------
    turns : int or a law of lengths
        Requests of a conversation.
    think_s : float, array or scipy.stats frozen law
        Between an answer and the next turn; an array stands for its values, all equally likely.

    Raises
    ------
    UsageError
        Turns that are no whole number above 0; a negative time.

    Examples
    --------
    >>> Conversation(turns=3, think_s=2)
    Conversation(turns=3, think_s=2.0)
    """

    turns: Lengths | int
    think_s: Any = 0.0

    def __post_init__(self) -> None:
        as_lengths("turns", self.turns)
        object.__setattr__(self, "think_s", law_of(self.think_s, "think_s"))


@dataclass(frozen=True)
class Schedule:
    """Every request of a run, in the order of its number: conversation by conversation, turn by turn.

    Attributes
    ----------
    due_s : (n,) float
        Seconds from the start; NaN in a closed loop, where a request is due when its slot gets free, and of a later
        turn, which is due when its user has thought.
    prompt_tokens, output_tokens, worker, stage : (n,) int
    server : (n,) int
        Which of the URLs: conversations are dealt to them in turn.
    conversation, turn : (n,) int
        Both counted from 0; without conversations each request is one of its own.
    think_s : (n,) float
        From the end of the turn before to this one.
    pick : (n,) int
        The line of the prompt file; or the group of the shared prefix, -1 in later turns, which have none.
    slots : (processes,) int, optional
        How many requests each worker may have in flight; None without a limit.
    """

    due_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    worker: Ints
    stage: Ints
    server: Ints
    conversation: Ints
    turn: Ints
    think_s: Floats
    pick: Ints
    slots: tuple[int, ...] | None

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def rate_per_s(self) -> float:
        """The rate that was drawn, of conversations where there are any; NaN in a closed loop.

        Gaps over the span from the first to the last due time.
        """
        due_s = self.due_s[self.turn == 0]
        if len(due_s) < 2 or not due_s[-1] > due_s[0]:
            return math.nan
        return float((len(due_s) - 1) / (due_s[-1] - due_s[0]))

    def longest_s(self, timeout_s: float) -> float:
        """What a conversation takes at most, its thinking included."""
        return float(np.bincount(self.conversation, timeout_s + self.think_s).max())


def draw_schedule(
    arrivals: Arrivals,
    *,
    n: int | None = None,
    duration_s: float | None = None,
    prompt_tokens: Lengths | int | None = None,
    output_tokens: Lengths | int | None = None,
    processes: int = 1,
    max_in_flight: int | None = None,
    seed: int = 0,
    servers: int = 1,
    prompts: PromptSource | None = None,
    conversation: Conversation | None = None,
) -> Schedule:
    """Draw a run's requests: `n` of them, or as many as fall due within `duration_s`.

    A ramp, stages and a trace have an end of their own: `n` and `duration_s` may only cut them, and both may be left
    out. A trace has its own lengths; elsewhere these are 128 and 64 tokens when they are not given. A prompt file has
    its own prompts, and may have lengths of outputs.

    Raises
    ------
    UsageError
        Neither or both of `n` and `duration_s`; no law; a number that is out of range; fewer slots than processes;
        lengths beside those of a trace or a prompt file; conversations of either.

    Examples
    --------
    >>> one, four = (draw_schedule(Poisson(100), n=50, processes=k, seed=7) for k in (1, 4))
    >>> bool((one.due_s == four.due_s).all()), sorted(set(four.worker.tolist()))
    (True, [0, 1, 2, 3])
    >>> draw_schedule(Constant(10), n=2, conversation=Conversation(turns=3)).turn.tolist()
    [0, 1, 2, 0, 1, 2]
    """
    _check_drawn(arrivals, n, duration_s, prompts, conversation)
    whole("processes", processes)
    whole("seed", seed, 0)
    lengths = lengths_asked(arrivals, prompt_tokens, output_tokens, prompts)
    draws = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(7)]
    due_s = _due_s(arrivals, n, duration_s, draws[0])
    if not (isinstance(arrivals, ClosedLoop) or due_s[-1] <= LATEST_DUE_S):
        raise UsageError("the last request would fall due in more than a hundred years; ask for a higher rate")
    turns = _turns(conversation, len(due_s), draws[5], isinstance(arrivals, ClosedLoop) and n is None)
    due_s, own = due_s[: len(turns)], np.repeat(np.arange(len(turns)), turns)
    turn = np.arange(len(own)) - np.repeat(np.cumsum(turns) - turns, turns)
    slots = _slots(arrivals, max_in_flight, processes)
    share = np.cumsum(slots if slots else [1] * processes)
    worker = np.searchsorted(share / share[-1], draws[3].random(len(due_s)), side="right")
    stage = arrivals.stage_of(due_s) if isinstance(arrivals, Stages) else np.zeros(len(due_s), np.int64)
    pick = _pick(prompts, own, turn, draws[4])
    tokens = [_lengths_of(arrivals, *law, len(own), rng) for law, rng in zip(lengths.items(), draws[1:3], strict=True)]
    return Schedule(
        due_s=np.where(turn == 0, due_s[own], np.nan),
        prompt_tokens=tokens[0],
        output_tokens=_with_files_lengths(prompts, pick, tokens[1]),
        worker=worker[own],
        stage=stage[own],
        server=own % whole("servers", servers),
        conversation=own,
        turn=turn,
        think_s=_think_s(conversation, len(own), draws[6]),
        pick=pick,
        slots=slots,
    )


def _check_drawn(
    arrivals: Any, n: int | None, duration_s: float | None, prompts: Any, conversation: Conversation | None
) -> None:
    if not isinstance(arrivals, Arrivals):
        allowed = "Constant, Poisson, Gamma, Ramp, Stages, Trace, ClosedLoop"
        raise UsageError(f"arrivals must be one of {allowed}; not {arrivals!r}")
    ends = isinstance(arrivals, Ramp | Stages | Trace)
    if (n is None) == (duration_s is None) and not (ends and n is None):
        raise UsageError("give either a number of requests or a duration, not both and not neither")
    if not isinstance(prompts, PromptSource | None):
        raise UsageError(f"prompts must be a PromptFile or a SharedPrefix; not {prompts!r}")
    if not isinstance(conversation, Conversation | None):
        raise UsageError(f"conversation must be a Conversation; not {conversation!r}")
    for what, there in (("a trace", isinstance(arrivals, Trace)), ("a prompt file", isinstance(prompts, PromptFile))):
        if there and conversation is not None:
            raise UsageError(f"conversations can't be had of {what}, which holds single requests")


def _turns(conversation: Conversation | None, n: int, rng: np.random.Generator, open_ended: bool) -> Ints:
    """How many requests each conversation has; fewer conversations where their number is only a bound."""
    if conversation is None:
        return np.ones(n, np.int64)
    turns = as_lengths("turns", conversation.turns).draw(n, rng)
    if open_ended and turns[0] <= MOST_CLOSED_REQUESTS:
        return turns[np.cumsum(turns) <= MOST_CLOSED_REQUESTS]
    if turns.sum() > MOST_REQUESTS:
        raise UsageError(f"conversations must have at most {MOST_REQUESTS:,} turns in all; not {turns.sum():,}")
    return turns


def _think_s(conversation: Conversation | None, n: int, rng: np.random.Generator) -> Floats:
    think_s: Floats = np.zeros(n) if conversation is None else conversation.think_s.sample(n, rng)
    if not think_s.max() <= LATEST_DUE_S:
        raise UsageError("think_s must be at most a hundred years, however it is drawn")
    return think_s


def _pick(prompts: PromptSource | None, own: Ints, turn: Ints, rng: np.random.Generator) -> Ints:
    if isinstance(prompts, PromptFile):
        return own % len(prompts.messages)
    if isinstance(prompts, SharedPrefix):
        return np.where(turn == 0, rng.integers(prompts.groups, size=len(own))[own], -1)
    return np.full(len(own), -1)


def _with_files_lengths(prompts: PromptSource | None, pick: Ints, drawn: Ints) -> Ints:
    if not isinstance(prompts, PromptFile):
        return drawn
    own = np.array([tokens or 0 for tokens in prompts.output_tokens])[pick]
    return np.where(own > 0, own, drawn)


def lengths_asked(
    arrivals: Arrivals,
    prompt_tokens: Lengths | int | None,
    output_tokens: Lengths | int | None,
    prompts: PromptSource | None = None,
) -> dict[str, Lengths | int | None]:
    """The lengths that are to be drawn: those given, or the defaults; None of a trace or file, which bring their own.

    Raises
    ------
    UsageError
        Lengths beside those of a trace or of a prompt file.

    Examples
    --------
    >>> lengths_asked(Poisson(10), None, 5)
    {'prompt_tokens': 128, 'output_tokens': 5}
    """
    given = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    bring = dict.fromkeys(given, "a trace") if isinstance(arrivals, Trace) else {}
    if isinstance(prompts, PromptFile):
        if bring:
            raise UsageError("a trace has lengths of its prompts and a prompt file has prompts: use one of the two")
        bring = {"prompt_tokens": "a prompt file"}
    for name, who in bring.items():
        if given[name] is not None:
            raise UsageError(f"{who} brings its own {name}; leave them out")
    return {n: DEFAULT_TOKENS[n] if given[n] is None and n not in bring else given[n] for n in given}


def _lengths_of(arrivals: Arrivals, name: str, lengths: Lengths | int | None, n: int, rng: np.random.Generator) -> Ints:
    if lengths is not None:
        return as_lengths(name, lengths).draw(n, rng)
    own: Ints = getattr(arrivals, name, np.zeros(n, np.int64))  # the words of a file are counted by nobody
    return own[:n]


def _due_s(arrivals: Arrivals, n: int | None, duration_s: float | None, rng: np.random.Generator) -> Floats:
    if n is not None and whole("n", n) > MOST_REQUESTS:
        raise UsageError(f"n must be at most {MOST_REQUESTS:,} requests; not {n}")
    if duration_s is not None:
        positive("duration_s", duration_s)
    if isinstance(arrivals, ClosedLoop):
        most = MOST_CLOSED_REQUESTS if duration_s is None else arrivals.concurrency * (duration_s * 1000 + 1)
        return np.full(n or int(min(MOST_CLOSED_REQUESTS, most)), np.nan)
    if isinstance(arrivals, Trace):
        due_s = arrivals.due_s[:n]
        due_s = due_s if duration_s is None else due_s[due_s < duration_s]
    elif n is not None:
        due_s = arrivals.due_s(n, rng)
    else:
        own_s = arrivals.duration_s if isinstance(arrivals, Ramp | Stages) else math.inf
        duration_s = own_s if duration_s is None else min(duration_s, own_s)
        due_s = due_within(arrivals, duration_s, rng)
    if len(due_s) == 0:
        within = "" if duration_s is None else f" within {duration_s} s"
        raise UsageError(f"no request falls due{within} at {arrivals.rate_per_s} requests/s; ask for longer")
    return due_s


def _slots(arrivals: Arrivals, max_in_flight: int | None, processes: int) -> tuple[int, ...] | None:
    if isinstance(arrivals, ClosedLoop):
        if max_in_flight is not None:
            raise UsageError("max_in_flight caps an open loop; a closed loop has its concurrency")
        total, name = arrivals.concurrency, "concurrency"
    elif max_in_flight is not None:
        total, name = whole("max_in_flight", max_in_flight), "max_in_flight"
    else:
        return None
    if total < processes:
        raise UsageError(f"{name} {total} is fewer than {processes} processes; ask for at most {total} processes")
    return tuple(total // processes + (k < total % processes) for k in range(processes))
