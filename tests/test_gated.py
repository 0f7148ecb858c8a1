"""The gated loop against its simulation, against M/G/1 where it is one, and the recursion against a plain simulator."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import expon, gamma, poisson

from llmprofile.errors import UsageError
from llmprofile.gated import GatedLoop, LoopTimes, simulate_loop

US = 1e-6
CONSTANT = {"poll": 10 * US, "service": 35 * US, "wakeup": 40 * US}
EXPONENTIAL = {name: expon(scale=mean_s) for name, mean_s in CONSTANT.items()}
# events a second, and the mean times in µs that were computed and simulated elsewhere
CHECKED = [
    (CONSTANT, 2_600, 85.0, 85.0),
    (CONSTANT, 14_100, 99.7, 99.8),
    (CONSTANT, 24_000, 207.8, 204.5),
    (EXPONENTIAL, 2_600, 88.7, 88.6),
    (EXPONENTIAL, 14_100, 124.0, 124.2),
    (EXPONENTIAL, 24_000, 309.9, 305.8),
]


def one_stage(loop: GatedLoop, n: int, seed: int) -> LoopTimes:
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / loop.rate_per_s, n))
    return simulate_loop(arrivals_s, loop.poll, loop.service, 0.0, loop.wakeup, rng=rng)


def standard_error(values: Any, batches: int = 40) -> float:
    """Of a mean of correlated values, from the means of `batches` stretches."""
    means = [part.mean() for part in np.array_split(values, batches)]
    return float(np.std(means, ddof=1) / math.sqrt(batches))


# closed form


@pytest.mark.parametrize(("laws", "rate_per_s", "closed_us", "simulated_us"), CHECKED)
def test_closed_form_has_the_values_found_before(
    laws: Any, rate_per_s: float, closed_us: float, simulated_us: float
) -> None:
    mean_us = GatedLoop(rate_per_s, **laws).mean_time_s / US
    assert mean_us == pytest.approx(closed_us, abs=0.051)
    assert mean_us == pytest.approx(simulated_us, rel=0.02)


@pytest.mark.parametrize(("laws", "rate_per_s"), [check[:2] for check in CHECKED])
def test_closed_form_equals_its_simulation(laws: Any, rate_per_s: float) -> None:
    loop = GatedLoop(rate_per_s, **laws)
    found = one_stage(loop, 200_000, seed=1)
    for closed, values in (
        (loop.mean_time_s, found.time_s),
        (loop.batch_mean, found.batch),
        (loop.idle_chance, found.slept),
    ):
        assert abs(values.mean() - closed) <= 4 * standard_error(values)


@pytest.mark.parametrize(
    ("poll", "service", "wakeup"),
    [
        ([1e-5, 2e-5, 9e-5], [1e-5] * 9 + [2e-4], 0.0),
        (gamma(0.3, scale=1e-4), 3e-5, gamma(4, scale=1e-5)),
        (0.0, gamma(0.5, scale=6e-5), [1e-5, 3e-4]),
    ],
)
@pytest.mark.parametrize("rate_per_s", [3_000, 20_000])
def test_closed_form_equals_simulation_for_other_laws(poll: Any, service: Any, wakeup: Any, rate_per_s: float) -> None:
    loop = GatedLoop(rate_per_s, poll, service, wakeup)
    found = one_stage(loop, 200_000, seed=2)
    assert abs(found.time_s.mean() - loop.mean_time_s) <= 4 * standard_error(found.time_s)
    assert abs(found.batch.mean() - loop.batch_mean) <= 4 * standard_error(found.batch)


def test_chance_of_an_idle_poll_is_that_of_its_markov_chain() -> None:
    # constant laws: after a turn of N events as many are ready as arrived in a + bN; after none, 1 + those in D
    loop = GatedLoop(14_100, **CONSTANT)
    n = np.arange(200)
    arrived = poisson.pmf(n, loop.rate_per_s * (10 * US + 35 * US * n[1:, None]))
    step = arrived[:, 1:] + arrived[:, :1] * poisson.pmf(n[1:] - 1, loop.rate_per_s * 40 * US)
    share = np.full(199, 1 / 199)
    for _ in range(300):
        share = share @ step
    assert share @ n[1:] == pytest.approx(loop.batch_mean, rel=1e-8)
    assert share @ arrived[:, 0] == pytest.approx(loop.idle_chance, rel=1e-8)


@pytest.mark.parametrize("service", [3e-5, expon(scale=3e-5), gamma(0.4, scale=1e-4), [1e-5, 2e-5, 3e-4]])
@pytest.mark.parametrize("rho", [0.05, 0.5, 0.9, 0.99])
def test_without_poll_and_waking_it_is_mg1(service: Any, rho: float) -> None:
    mean_s = GatedLoop(1.0, 0.0, service, 0.0).utilisation
    loop = GatedLoop(rho / mean_s, 0.0, service, 0.0)
    pollaczek_khinchine_s = loop.rate_per_s * loop.service.second_s2 / (2 * (1 - rho))
    assert loop.mean_wait_s == pytest.approx(pollaczek_khinchine_s, rel=1e-6)
    assert loop.batch_mean * (1 - rho) == pytest.approx(loop.idle_chance)


@pytest.mark.parametrize("laws", [CONSTANT, EXPONENTIAL])
def test_a_rare_event_wakes_the_loop_and_is_served_alone(laws: Any) -> None:
    loop = GatedLoop(1e-3, **laws)
    assert loop.mean_time_s == pytest.approx(85 * US, rel=1e-6)
    assert loop.batch_mean == pytest.approx(1.0, abs=1e-6)
    assert loop.idle_chance == pytest.approx(1.0, abs=1e-6)
    # to first order in λ: arrivals in a wake-up D or in the turn after it
    slope = (GatedLoop(1.0, **laws).mean_time_s - GatedLoop(0.5, **laws).mean_time_s) / 0.5
    n, seed = 400_000, 3
    found = one_stage(GatedLoop(500.0, **laws), n, seed)
    assert abs(found.time_s.mean() - (85 * US + 500 * slope)) <= 4 * standard_error(found.time_s) + 85 * US * 0.02**2


@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_a_loop_that_is_never_idle_turns_as_long_as_its_load_says(rho: float) -> None:
    # long polls: always something ready, so q₀ = 0 and E[C] = E[a] / (1 − ρ), whatever the laws
    loop = GatedLoop(rho / 1e-5, poll=1e-2, service=1e-5, wakeup=1.0)
    assert loop.idle_chance == pytest.approx(0.0, abs=1e-12)
    assert loop.batch_mean / loop.rate_per_s == pytest.approx(1e-2 / (1 - rho))


def test_time_grows_with_rate_and_with_every_cost() -> None:
    rates = np.linspace(100, 28_000, 40)
    times = [GatedLoop(rate, **EXPONENTIAL).mean_time_s for rate in rates]
    assert (np.diff(times) > 0).all()
    assert (np.diff([GatedLoop(rate, **EXPONENTIAL).idle_chance for rate in rates]) < 0).all()
    for name in CONSTANT:
        longer = {**CONSTANT, name: 1.2 * CONSTANT[name]}
        assert GatedLoop(14_100, **longer).mean_time_s > GatedLoop(14_100, **CONSTANT).mean_time_s


@pytest.mark.parametrize("rate_per_s", [1 / 35e-6, 40_000, 1e9])
def test_an_overloaded_loop_has_infinite_means(rate_per_s: float) -> None:
    loop = GatedLoop(rate_per_s, **CONSTANT)
    assert loop.mean_time_s == loop.mean_wait_s == loop.batch_mean == math.inf
    assert loop.idle_chance == 0.0
    assert math.isfinite(loop.split(50_000).mean_time_s)


def test_close_to_saturation_the_figures_stay_figures() -> None:
    times = [GatedLoop(rho / 35e-6, **EXPONENTIAL).mean_time_s * (1 - rho) for rho in (0.9, 0.99, 0.999)]
    # T grows as 1 / (1 − ρ)
    assert times[2] == pytest.approx(times[1], rel=0.01)


def test_a_split_loop_is_the_loop_at_a_share_of_the_rate() -> None:
    assert GatedLoop(24_000, **CONSTANT).split(3) == GatedLoop(8_000, **CONSTANT)
    with pytest.raises(UsageError, match="k must be a whole number of at least 1; not 0"):
        GatedLoop(24_000, **CONSTANT).split(0)


def test_a_loop_shows_itself_as_its_constructor() -> None:
    loop = GatedLoop(200.0, poll=1e-05, service=[1e-05, 3e-05], wakeup=0.0)
    assert repr(loop) == "GatedLoop(rate_per_s=200.0, poll=1e-05, service=[1e-05, 3e-05], wakeup=0.0)"
    assert eval(repr(loop), {"GatedLoop": GatedLoop}) == loop


def test_a_distribution_is_not_offered_and_it_says_why() -> None:
    loop = GatedLoop(14_100, **CONSTANT)
    for ask in (lambda: loop.var_wait_s, lambda: loop.wait_cdf(1e-4), lambda: loop.wait_quantile(0.99)):
        with pytest.raises(UsageError, match="means only: the p99 of this model was 2–3 times too low"):
            ask()


@pytest.mark.parametrize(
    "changes",
    [{"rate_per_s": -1.0}, {"rate_per_s": math.nan}, {"poll": -1e-6}, {"service": [1.0, math.nan]}, {"wakeup": "long"}],
)
def test_bad_input_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        GatedLoop(**({"rate_per_s": 1.0, **CONSTANT} | changes))


# the recursion


def plain_loop(
    arrivals: list[float], sockets: list[int], due: list[float], ends: set[int], cost: dict[str, float]
) -> dict[str, Any]:
    """asyncio's loop, event by event, with a queue of callbacks as it has: what is queued at a poll is run after it."""
    events, sends = deque(enumerate(arrivals)), deque(enumerate(due))
    woken: list[tuple[str, list[int]]] = []
    out: dict[str, Any] = {
        "read": {},
        "handled": {},
        "sent": {},
        "reads": [],
        "n_handled": [],
        "turns": 0,
        "asleep": 0.0,
    }
    now, ended = 0.0, 0.0
    while events or sends or woken:
        first = min([t for queue in (events, sends) for _, t in list(queue)[:1]], default=math.inf)
        if not woken and first > now:
            now = first + cost["wakeup"]
            out["asleep"] += now - ended
        waiting: dict[int, list[int]] = {}
        while events and events[0][1] <= now:
            k, _ = events.popleft()
            waiting.setdefault(sockets[k], []).append(k)
        requests = []
        while sends and sends[0][1] <= now:
            requests.append(sends.popleft()[0])
        now += cost["poll"]
        out["n_handled"].append(0)
        run_now = [*woken, *[("read", ks) for ks in waiting.values()]]
        woken = []
        if not cost["handle"]:
            run_now += [("send", [k]) for k in requests]
        for what, ks in run_now:
            if what == "read":
                now += cost["read"]
                out["read"] |= dict.fromkeys(ks, now)
                if cost["handle"]:
                    woken.append(("handle", ks))
            for k in ks if what != "read" or not cost["handle"] else []:
                now += 0.0 if what == "read" else cost[what]
                out["sent" if what == "send" else "handled"][k] = now
                out["n_handled"][-1] += what != "send"
                now += cost["end"] if what != "send" and k in ends else 0.0
        if cost["handle"]:
            woken += [("send", [k]) for k in requests]
        out["reads"].append(len(waiting))
        out["turns"] += 1
        ended = now
    return out


def compare(seed: int, n: int, load: float, streams: int, handle: float) -> None:
    rng = np.random.default_rng(seed)
    cost = {"poll": 0.3, "read": 1.0, "handle": handle, "wakeup": 0.7, "send": 2.0, "end": 1.7}
    arrivals = 10 + np.cumsum(rng.exponential((1.0 + handle) / load, n))
    due = np.sort(rng.uniform(10, arrivals[-1], n // 5))
    sockets = rng.integers(0, streams, n) if streams else None
    own = np.arange(n) if sockets is None else sockets
    last = n - 1 - np.unique(own[::-1], return_index=True)[1]  # an end is the last of its socket
    ends = np.isin(np.arange(n), rng.permutation(last)[: -(-len(last) // 3)])
    found = simulate_loop(arrivals, **cost, sends_s=due, streams=sockets, ends=ends)
    truth = plain_loop(arrivals.tolist(), own.tolist(), due.tolist(), set(np.flatnonzero(ends).tolist()), cost)
    for name, at, start in (
        ("read", found.wait_s, arrivals),
        ("handled", found.time_s, arrivals),
        ("sent", found.late_s, due),
    ):
        np.testing.assert_allclose(at + start, [truth[name][k] for k in range(len(start))], atol=1e-7)
    assert found.reads.tolist() == truth["reads"]
    assert found.handled.tolist() == truth["n_handled"]


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 200),
    load=st.floats(0.02, 3.0),
    streams=st.sampled_from([0, 1, 3, 50]),
    handle=st.sampled_from([0.0, 1.5]),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_recursion_equals_a_plain_simulator(seed: int, n: int, load: float, streams: int, handle: float) -> None:
    compare(seed, n, load, streams, handle)


def test_recursion_equals_a_plain_simulator_over_a_long_run() -> None:
    compare(seed=0, n=20_000, load=0.7, streams=200, handle=1.5)


@pytest.mark.parametrize("handle", [0.0, gamma(2, scale=0.4)])
@pytest.mark.parametrize("streams", [None, 4])
def test_everything_is_done_once_and_time_adds_up(handle: Any, streams: int | None) -> None:
    rng = np.random.default_rng(4)
    arrivals = np.cumsum(rng.exponential(2.0, 5000))
    sockets = None if streams is None else rng.integers(0, streams, 5000)
    due = arrivals[::10] + 0.5
    found = simulate_loop(arrivals, 0.1, expon(scale=0.5), handle, 0.2, sends_s=due, send=0.3, streams=sockets, rng=rng)
    assert found.batch.sum() == found.handled.sum() == 5000
    assert found.sends.sum() == 500
    assert found.reads.sum() == 5000 if streams is None else found.reads.sum() < 5000
    assert (found.reads <= found.batch).all()
    assert np.array_equal(np.bincount(found.turn, minlength=len(found.batch)), found.batch)
    assert (found.wait_s > 0).all()
    assert (found.time_s >= found.wait_s).all()
    assert (found.late_s > 0.3).all()
    # turns follow each other, with a gap only where the loop slept
    gaps = found.polled_s[1:] - (found.polled_s + found.turn_s)[:-1]
    assert np.abs(gaps[~found.slept[1:]]).max() < 1e-9
    assert gaps[found.slept[1:]].min() >= 0.2 - 1e-9
    work = 0.1 * len(found.batch) + 0.3 * 500 + 0.5 * found.reads.sum()
    spread = 0.5**2 * 5000
    if handle != 0.0:
        work, spread = work + handle.mean() * 5000, spread + handle.var() * 5000
    assert abs(found.turn_s.sum() - work) <= 4 * math.sqrt(spread)


def test_waiting_events_of_one_socket_take_one_read() -> None:
    # the loop is held up by the first event; five of one socket wait together
    arrivals, sockets = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [9, 7, 7, 7, 7, 7]
    merged = simulate_loop(arrivals, 0.0, 1.0, 0.0, 0.0, streams=sockets)
    assert merged.reads.tolist() == [1, 1]
    assert (merged.time_s + arrivals).tolist() == pytest.approx([1.0] + [2.0] * 5)
    apart = simulate_loop(arrivals, 0.0, 1.0, 0.0, 0.0)
    assert (apart.time_s + arrivals).tolist() == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    two = simulate_loop(arrivals, 0.0, 1.0, 0.5, 0.0, streams=sockets)
    assert (two.wait_s + arrivals).tolist() == pytest.approx([1.0] + [2.5] * 5)
    assert (two.time_s + arrivals).tolist() == pytest.approx([1.5, 3.0, 3.5, 4.0, 4.5, 5.0])


def test_two_stages_overlap_reading_with_the_next_gate() -> None:
    # each event handled a turn after its read, and none of them sleeps over a pending one
    found = simulate_loop([0.0, 0.5], 0.0, 1.0, 2.0, 0.25)
    assert found.polled_s.tolist() == [0.25, 1.25, 4.25]
    assert found.slept.tolist() == [True, False, False]
    assert found.time_s.tolist() == [3.25, 5.75]


def test_a_due_send_wakes_the_loop() -> None:
    found = simulate_loop([5.0], 0.0, 1.0, 0.0, 0.25, sends_s=[2.0], send=0.5)
    assert found.late_s.tolist() == [0.75]
    assert found.time_s.tolist() == [1.25]


def test_a_seed_repeats_its_draws() -> None:
    arrivals = np.arange(100.0)
    costs = [expon(scale=0.3)] * 4
    one, two, three = (simulate_loop(arrivals, *costs, rng=seed) for seed in (5, 5, 6))
    for name in (f.name for f in fields(LoopTimes)):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert not np.array_equal(one.time_s, three.time_s)


def test_nothing_to_do_takes_no_turn() -> None:
    found = simulate_loop([], 1.0, 1.0, 1.0, 1.0)
    assert [len(getattr(found, f.name)) for f in fields(LoopTimes)] == [0] * len(fields(LoopTimes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals_s": [1.0, 0.0]}, "arrivals_s must be finite times in ascending order"),
        ({"arrivals_s": [math.nan]}, "arrivals_s must be finite"),
        ({"ends": [True]}, "ends must be 2 truth values"),
        ({"ends": [0, 1]}, "ends must be 2 truth values"),
        ({"sends_s": [[1.0]]}, "sends_s must be .* in one dimension"),
        ({"streams": [1, 2, 3]}, "streams must be 2 whole numbers"),
        ({"streams": [0.5, 1.0]}, "streams must be 2 whole numbers"),
        ({"read": -1.0}, "read must be"),
        ({"send": math.nan}, "send must be"),
    ],
)
def test_arrivals_and_costs_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    given_ = {"arrivals_s": [0.0, 1.0], "poll": 0.1, "read": 1.0, "handle": 1.0, "wakeup": 0.1} | changes
    with pytest.raises(UsageError, match=message):
        simulate_loop(**given_)


def test_the_end_of_a_request_holds_up_those_behind_it_and_not_itself() -> None:
    arrivals, costs = [0.0, 0.0, 0.0], {"poll": 0.0, "read": 0.5, "wakeup": 0.0, "end": 10.0}
    one = simulate_loop(arrivals, handle=0.0, ends=[False, True, False], **costs)
    assert one.time_s.tolist() == [0.5, 1.0, 11.5]
    two = simulate_loop(arrivals, handle=1.0, ends=[False, True, False], **costs)
    assert two.time_s.tolist() == [2.5, 3.5, 14.5]
    assert two.turn_s.sum() == 3 * 1.5 + 10


def test_pauses_hold_up_what_they_catch_and_what_comes_behind() -> None:
    costs = {"poll": 0.001, "read": 0.01, "handle": 0.02, "wakeup": 0.003}
    # one pause in the turn that reads the event, one while the loop sleeps before the second event, one long over
    arrivals_s, pauses_s = [0.0, 1.0, 2.0], [[0.005, 0.1], [0.999, 0.05], [1.5, 0.01]]
    found = simulate_loop(arrivals_s, **costs, pauses_s=pauses_s)
    plain = simulate_loop(arrivals_s, **costs)
    more_s = found.time_s - plain.time_s
    assert more_s[0] == pytest.approx(0.1)
    assert more_s[1] == pytest.approx(0.999 + 0.05 - 1.003)
    assert more_s[2] == pytest.approx(0.0, abs=1e-12)


def test_pauses_are_in_order() -> None:
    with pytest.raises(UsageError, match="pauses_s"):
        simulate_loop([0.0], 0.001, 0.01, 0.02, 0.003, pauses_s=[[1.0, 0.1], [0.5, 0.1]])
