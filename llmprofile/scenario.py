"""A client and its load as a queue, and what there is to see of it: waits, a sample path, what the client reports.

Pure: `explore` draws it and puts sliders to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr
from scipy.stats import gamma

from llmprofile.batches import DXG1, thinned
from llmprofile.errors import not_negative, positive, whole
from llmprofile.lindley import backlog, simulate
from llmprofile.queueing import MG1
from llmprofile.units import show_time

Floats = npt.NDArray[np.float64]

RUN_S = 60.0
"""A queue that can't keep up has no mean: what a run of this length would report is said instead."""
FULL = 1 - 1e-9
"""ρ from which a queue counts as one that can't keep up: what is left is rounding."""
POINTS, TAIL_SCALES = 600, 14.0
"""Of the curve of waits, and how far it is evaluated, in units of E[W²] / 2E[W]."""
WARM_UP, SHOWN, SHOWN_GROWING = 20_000, 40, 2_000
"""Tokens of the simulation: before the stretch that is shown, in it, and in it where the queue grows."""


@dataclass(frozen=True)
class Scenario:
    """A client and its load: where the sliders of the queue explorer stand.

    Parameters
    ----------
    rate_per_s : float
        Of requests, over all processes.
    tokens : int
        Of a request; each is an event that the client handles.
    service_s : float
        Mean time that this takes the client.
    scv : float
        Its squared coefficient of variation c²: constant at 0, exponential at 1; a gamma law.
    burst : int
        1: tokens come at random times (Poisson). More: those of so many streams come together, at equal distances.
    processes : int
        Among which requests are dealt at random.
    ttft_s : float
        The true mean TTFT.

    Raises
    ------
    UsageError
        A number that is not above 0 (`scv`: not of at least 0), or no whole number where one is needed.

    Examples
    --------
    >>> scenario = Scenario(rate_per_s=300, tokens=50, service_s=50e-6)
    >>> round(scenario.utilisation, 9), round(scenario.queue.mean_wait_s, 9)
    (0.75, 0.00015)
    """

    rate_per_s: float = 300.0
    tokens: int = 50
    service_s: float = 50e-6
    scv: float = 1.0
    burst: int = 1
    processes: int = 1
    ttft_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "service_s", "ttft_s"):
            positive(name, getattr(self, name))
        for name in ("tokens", "burst", "processes"):
            whole(name, getattr(self, name))
        not_negative("scv", self.scv)

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.rate_per_s * self.tokens

    @property
    def utilisation(self) -> float:
        """ρ of each process."""
        return self.tokens_per_s * self.service_s / self.processes

    @property
    def keeps_up(self) -> bool:
        return self.utilisation < FULL

    @property
    def slip(self) -> float:
        """Seconds by which waits grow in a second; 0 where the client keeps up, and at ρ = 1."""
        return self.utilisation - 1 if self.utilisation > 2 - FULL else 0.0

    @property
    def behind_s(self) -> float:
        """What a token waits on average for others of its burst: half of E[X(X − 1)] / E[X] services."""
        return (self.burst - 1) / self.processes / 2 * self.service_s

    @property
    def period_s(self) -> float:
        """From burst to burst."""
        return self.burst / self.tokens_per_s

    @property
    def queue(self) -> MG1 | DXG1:
        """That of one process, for its waits."""
        service = gamma(1 / self.scv, scale=self.service_s * self.scv) if self.scv else self.service_s
        if self.burst == 1:
            return MG1(self.tokens_per_s, service).split(self.processes)
        part = thinned(self.burst, self.processes)
        period_s = self.period_s
        if self.scv:  # where even the largest burst is done sooner but for 1e-9, a longer period changes nothing
            longest_s = gamma.isf(1e-9, part.values_s[-1] / self.scv, scale=self.service_s * self.scv)
            period_s = min(period_s, float(longest_s))
        return DXG1(period_s, part, service)


@dataclass(frozen=True, eq=False)
class SamplePath:
    """A stretch of the simulated queue of one process; times from its beginning.

    Attributes
    ----------
    length_s : float
    times_s, work_s : (m,) float
        Corners of the unfinished work over time.
    arrivals_s : (n,) float
    starts_s, ends_s : (k,) float
        Of the services that lie in it, or reach into it.
    """

    length_s: float
    times_s: Floats
    work_s: Floats
    arrivals_s: Floats
    starts_s: Floats
    ends_s: Floats


@dataclass(frozen=True, eq=False)
class QueueView:
    """What the queue explorer shows of a scenario.

    Attributes
    ----------
    scenario : Scenario
    mean_wait_s, p99_wait_s : float
        Of a token before its service; infinite where the queue can't keep up.
    reported_ttft_s : float
        The true mean TTFT with wait and service of a token; where the queue can't keep up, that of a run of 60 s.
    grows_per_s : float
        Tokens by which the queues of all processes together grow; 0 where they keep up.
    times_s, longer : (600,) float
        Times, and the share of the tokens that wait longer; empty where the queue can't keep up.
    path : SamplePath
    sentences : tuple of str
    """

    scenario: Scenario
    mean_wait_s: float
    p99_wait_s: float
    reported_ttft_s: float
    grows_per_s: float
    times_s: Floats
    longer: Floats
    path: SamplePath
    sentences: tuple[str, ...]

    @property
    def inflation(self) -> float:
        """How many times the true mean TTFT is reported."""
        return self.reported_ttft_s / self.scenario.ttft_s


def look_at_queue(scenario: Scenario) -> QueueView:
    """What there is to see: waits from closed forms, a stretch of a simulation, and both in words.

    Examples
    --------
    >>> view = look_at_queue(Scenario(rate_per_s=300, tokens=50, service_s=50e-6))
    >>> view.sentences[0]
    'ρ = 0.75: a token waits 0.15 ms on average (p99: 0.86 ms), and takes 50.0 µs.'
    """
    path = sample(scenario)
    if not scenario.keeps_up:
        reported_s = scenario.ttft_s + _growing_wait_s(scenario) + scenario.service_s
        grows_per_s = scenario.tokens_per_s * scenario.slip / scenario.utilisation
        none = np.empty(0)
        said = _in_words_growing(scenario, reported_s, grows_per_s)
        return QueueView(scenario, math.inf, math.inf, reported_s, grows_per_s, none, none, path, said)
    queue = scenario.queue
    mean_s, (times_s, longer) = queue.mean_wait_s, _survival(queue)
    logs = -np.log(np.maximum(longer, 1e-300))
    p99_s = float(np.interp(-math.log(0.01), logs, times_s)) if longer[0] > 0.01 else 0.0
    reported_s = scenario.ttft_s + mean_s + scenario.service_s
    said = _in_words(scenario, mean_s, p99_s, reported_s)
    return QueueView(scenario, mean_s, p99_s, reported_s, 0.0, times_s, longer, path, said)


def _growing_wait_s(scenario: Scenario) -> float:
    """Mean wait in a run of 60 s that begins with an empty queue, where the queue grows.

    Work that arrives less time that passes is a Brownian motion of the same drift and variance, X; what waits at t is
    its highest point up to t, whose mean is ∫₀ᵗ E[max(X(s), 0)] / s ds (Spitzer).
    """
    regular = (scenario.burst > 1) / scenario.processes  # the number of tokens varies by the dealing alone
    work_s2 = scenario.utilisation * scenario.service_s * (scenario.scv + 1 - regular)  # its variance in a second
    sd_s, root = max(math.sqrt(work_s2), 1e-12), math.sqrt(RUN_S) * (np.arange(4000) + 0.5) / 4000  # of the time
    drifts = scenario.slip * root / sd_s
    gains = root * scenario.slip * ndtr(drifts) + sd_s * np.exp(-(drifts**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.mean(2 * gains * (RUN_S - root**2))) / math.sqrt(RUN_S) + scenario.behind_s


def _survival(queue: MG1 | DXG1) -> tuple[Floats, Floats]:
    mean_s = queue.mean_wait_s
    scale_s = (queue.var_wait_s + mean_s**2) / (2 * mean_s)  # of an exponential tail, exactly
    times_s = np.linspace(0.0, TAIL_SCALES * scale_s, POINTS)
    return times_s, 1 - queue.wait_cdf(times_s)


def _in_words(scenario: Scenario, mean_s: float, p99_s: float, reported_s: float) -> tuple[str, ...]:
    waits = f"a token waits {show_time(mean_s)} on average (p99: {show_time(p99_s)})"
    ttft, factor = show_time(scenario.ttft_s), show_factor(reported_s / scenario.ttft_s)
    said = [
        f"ρ = {show_utilisation(scenario.utilisation)}: {waits}, and takes {show_time(scenario.service_s)}.",
        f"A mean TTFT of {ttft} is reported as {show_time(reported_s)}: {factor} times the truth.",
    ]
    if scenario.burst > 1:
        each = f", {scenario.burst / scenario.processes:.3g} of them to each process" if scenario.processes > 1 else ""
        said.append(
            f"A burst of {scenario.burst} tokens comes every {show_time(scenario.period_s)}{each}: "
            f"{show_time(scenario.behind_s)} of the wait are for others of the same burst, at any ρ."
        )
    return tuple(said)


def _in_words_growing(scenario: Scenario, reported_s: float, grows_per_s: float) -> tuple[str, ...]:
    needed = math.floor(scenario.tokens_per_s * scenario.service_s / FULL) + 1
    where = "in 1 process" if scenario.processes == 1 else f"in {scenario.processes} processes together"
    waits = f", a token's wait by {show_time(scenario.slip)} per second" if grows_per_s else ", yet without bound"
    factor = show_factor(reported_s / scenario.ttft_s)
    return (
        f"ρ = {show_utilisation(scenario.utilisation)}: the client can't keep up. "
        f"The queue grows by {_tokens(grows_per_s)} per second ({where}){waits}.",
        f"There is no mean: in a run of {RUN_S:g} s a TTFT of {show_time(scenario.ttft_s)} is on average reported as "
        f"{show_time(reported_s)}, {factor} times the truth, and more in a longer run.",
        f"{needed:,} processes or more would keep up.",
    )


def show_utilisation(rho: float) -> str:
    """ρ for a label, never rounded up to 1.

    Examples
    --------
    >>> show_utilisation(0.75), show_utilisation(0.99999)
    ('0.75', '0.9999')
    """
    if 0.99 < rho < 1.01:
        return f"{math.floor(rho * 1e4) / 1e4:.4f}"
    return f"{rho:,.0f}" if rho >= 100 else f"{rho:.2f}" if rho >= 0.1 else f"{rho:.2g}"


def show_factor(factor: float) -> str:
    """How many times the truth something is.

    Examples
    --------
    >>> show_factor(1.0042), show_factor(2.3), show_factor(121.3)
    ('1.004', '2.30', '121')
    """
    return f"{factor:.3f}" if factor < 1.1 else f"{factor:.2f}" if factor < 10 else f"{factor:,.0f}"


def _tokens(n: float) -> str:
    return f"{n:,.0f} tokens" if n >= 10 else f"{n:.2g} tokens"


def sample(scenario: Scenario) -> SamplePath:
    """A stretch of the queue of one process, simulated: after 20,000 tokens, or from the first where the queue grows.

    Drawn alike for every scenario, so that a move shows what it changes and not other luck.

    Examples
    --------
    >>> path = sample(Scenario(burst=30, processes=3))
    >>> bool(path.arrivals_s.max() <= path.length_s)
    True
    """
    rate_per_s = scenario.tokens_per_s / scenario.processes
    start_s = WARM_UP / rate_per_s if scenario.keeps_up else 0.0
    shown_s = (SHOWN if scenario.keeps_up else SHOWN_GROWING) / rate_per_s
    if scenario.burst > 1:  # whole bursts, the first of them a little after the beginning
        start_s = max((math.ceil(start_s / scenario.period_s) - 0.1) * scenario.period_s, 0.0)
        shown_s = max(shown_s, 3 * scenario.period_s)
    arrivals_s = _arrivals_s(scenario, start_s + shown_s, np.random.default_rng(1))
    n, service_s, scv = len(arrivals_s), scenario.service_s, scenario.scv
    services_s = np.random.default_rng(2).gamma(1 / scv, service_s * scv, n) if scv else np.full(n, service_s)
    return _stretch(arrivals_s, services_s, start_s, shown_s)


def _arrivals_s(scenario: Scenario, end_s: float, rng: np.random.Generator) -> Floats:
    if scenario.burst == 1:
        return np.sort(rng.uniform(0.0, end_s, rng.poisson(scenario.tokens_per_s / scenario.processes * end_s)))
    sizes = rng.binomial(scenario.burst, 1 / scenario.processes, math.ceil(end_s / scenario.period_s))
    return np.repeat(np.arange(len(sizes)) * scenario.period_s, sizes)


def _stretch(arrivals_s: Floats, services_s: Floats, start_s: float, length_s: float) -> SamplePath:
    waits_s, end_s = simulate(arrivals_s, services_s), start_s + length_s
    inside = (arrivals_s >= start_s) & (arrivals_s < end_s)
    at_start_s = backlog(arrivals_s, services_s, [start_s]) if start_s else np.zeros(1)
    at_s = np.concatenate([[start_s], arrivals_s[inside]])
    found_s = np.concatenate([at_start_s, waits_s[inside]])
    left_s = np.concatenate([at_start_s, (waits_s + services_s)[inside]])
    gaps_s = np.diff(np.append(at_s, end_s))
    over_s = np.maximum(left_s - gaps_s, 0.0)  # when the next arrives
    times_s = np.column_stack([at_s, at_s, at_s + left_s - over_s]).ravel()
    work_s = np.column_stack([found_s, left_s, over_s]).ravel()
    times_s, work_s = np.append(times_s, end_s), np.append(work_s, over_s[-1])
    starts_s, ends_s = arrivals_s + waits_s, arrivals_s + waits_s + services_s
    served = (ends_s > start_s) & (starts_s < end_s)
    return SamplePath(
        length_s, times_s - start_s, work_s, at_s[1:] - start_s, starts_s[served] - start_s, ends_s[served] - start_s
    )
