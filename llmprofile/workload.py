"""What is asked of the server: when requests are due, how long they are, what they say.

One schedule a run, drawn once from the seed. Each request is dealt to a worker by a seeded draw of its own, so the
requests, lengths and due times are the same for any number of processes, and a Poisson stream stays Poisson in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmprofile.errors import UsageError, positive, whole
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
class Schedule:
    """Every request of a run, in the order of its number.

    Attributes
    ----------
    due_s : (n,) float
        Seconds from the start; NaN in a closed loop, where a request is due when its slot gets free.
    prompt_tokens, output_tokens, worker, stage : (n,) int
    slots : (processes,) int, optional
        How many requests each worker may have in flight; None without a limit.
    """

    due_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    worker: Ints
    stage: Ints
    slots: tuple[int, ...] | None

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def rate_per_s(self) -> float:
        """The rate that was drawn: gaps over the span from the first to the last due time; NaN in a closed loop."""
        if len(self) < 2 or not self.due_s[-1] > self.due_s[0]:
            return math.nan
        return float((len(self) - 1) / (self.due_s[-1] - self.due_s[0]))


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
) -> Schedule:
    """Draw a run's requests: `n` of them, or as many as fall due within `duration_s`.

    A ramp, stages and a trace have an end of their own: `n` and `duration_s` may only cut them, and both may be left
    out. A trace has its own lengths; elsewhere these are 128 and 64 tokens when they are not given.

    Raises
    ------
    UsageError
        Neither or both of `n` and `duration_s`; no law; a number that is out of range; fewer slots than processes;
        lengths beside those of a trace.

    Examples
    --------
    >>> one, four = (draw_schedule(Poisson(100), n=50, processes=k, seed=7) for k in (1, 4))
    >>> bool((one.due_s == four.due_s).all()), sorted(set(four.worker.tolist()))
    (True, [0, 1, 2, 3])
    """
    if not isinstance(arrivals, Arrivals):
        allowed = "Constant, Poisson, Gamma, Ramp, Stages, Trace, ClosedLoop"
        raise UsageError(f"arrivals must be one of {allowed}; not {arrivals!r}")
    ends = isinstance(arrivals, Ramp | Stages | Trace)
    if (n is None) == (duration_s is None) and not (ends and n is None):
        raise UsageError("give either a number of requests or a duration, not both and not neither")
    whole("processes", processes)
    whole("seed", seed, 0)
    lengths = lengths_asked(arrivals, prompt_tokens, output_tokens)
    draws = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(4)]
    due_s = _due_s(arrivals, n, duration_s, draws[0])
    if not (isinstance(arrivals, ClosedLoop) or due_s[-1] <= LATEST_DUE_S):
        raise UsageError("the last request would fall due in more than a hundred years; ask for a higher rate")
    slots = _slots(arrivals, max_in_flight, processes)
    share = np.cumsum(slots if slots else [1] * processes)
    worker = np.searchsorted(share / share[-1], draws[3].random(len(due_s)), side="right")
    return Schedule(
        due_s=due_s,
        prompt_tokens=_lengths_of(arrivals, "prompt_tokens", lengths["prompt_tokens"], len(due_s), draws[1]),
        output_tokens=_lengths_of(arrivals, "output_tokens", lengths["output_tokens"], len(due_s), draws[2]),
        worker=worker,
        stage=arrivals.stage_of(due_s) if isinstance(arrivals, Stages) else np.zeros(len(due_s), np.int64),
        slots=slots,
    )


def lengths_asked(
    arrivals: Arrivals, prompt_tokens: Lengths | int | None, output_tokens: Lengths | int | None
) -> dict[str, Lengths | int | None]:
    """The lengths that are to be drawn: those given, or the defaults; None of a trace, which brings its own.

    Raises
    ------
    UsageError
        Lengths beside those of a trace.

    Examples
    --------
    >>> lengths_asked(Poisson(10), None, 5)
    {'prompt_tokens': 128, 'output_tokens': 5}
    """
    given = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    if not isinstance(arrivals, Trace):
        return {name: DEFAULT_TOKENS[name] if lengths is None else lengths for name, lengths in given.items()}
    for name, lengths in given.items():
        if lengths is not None:
            raise UsageError(f"a trace brings its own {name}; leave them out")
    return given


def _lengths_of(arrivals: Arrivals, name: str, lengths: Lengths | int | None, n: int, rng: np.random.Generator) -> Ints:
    if lengths is not None:
        return as_lengths(name, lengths).draw(n, rng)
    own: Ints = getattr(arrivals, name)
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


_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about "
    "out many then them these so some her would make like him into time has look two more write go see number no "
    "way could people my than first water been call who oil its now find long down day did get come made may part "
    "over new sound take only little work know place year live me back give most very after thing our just name "
    "good sentence man think say great where help through much before line right too mean old any same tell boy "
    "follow came want show also around form three small set put end does another well large must big even such "
    "because turn here why ask went men read need land different home us move try kind hand picture again change "
    "off play spell air away animal house point page letter mother answer found study still learn should world"
).split()
_TEXT_WORDS = 8192
TAG_TOKENS = 4
"""What the random first word of a prompt is taken to cost; the server's usage says what the whole really was."""


class Prompts:
    """Prompts of a wanted length that differ from the first word on, within a run and between salts.

    A tokenizer is not needed: common English words are one token each in most vocabularies, near enough.

    Examples
    --------
    >>> prompts = Prompts(salt=1)
    >>> prompts.text(0, 8).split()[0] == prompts.text(1, 8).split()[0]
    False
    """

    def __init__(self, salt: int) -> None:
        self._salt = whole("salt", salt, 0)
        words = np.random.default_rng(salt).choice(_WORDS, _TEXT_WORDS)
        self._text = " ".join(words) + " "
        self._starts = np.concatenate([[0], np.cumsum([len(w) + 1 for w in words])]).tolist()

    def text(self, request_id: int, tokens: int) -> str:
        """About `tokens` tokens of text; plain letters and spaces, nothing that JSON would escape."""
        mixed = (request_id * 0x9E3779B1 + self._salt) % (1 << 32)
        start = (mixed >> 7) % _TEXT_WORDS
        words = max(0, tokens - TAG_TOKENS)
        laps, stop = divmod(start + words, _TEXT_WORDS)
        text = self._text * laps + self._text[: self._starts[stop]]
        return f"{_letters(mixed)} {text[self._starts[start] :]}".rstrip()


def _letters(number: int) -> str:
    # seven letters hold 32 bits; odd multipliers make `mixed` one-to-one, so no two requests share a word
    return "".join(chr(97 + number // 26**k % 26) for k in range(7))
