"""Steadiness of simulated queues: stationary ones, growing ones, and warm-ups of known length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import signal, stats

import llmprofile as lp
from llmprofile.records import Run
from llmprofile.steady import LEVEL, drift_p, mser5, steady_state

Floats = Any
STAMPS = ("sent_ns", "headers_ns", "last_seen_ns", "eof_ns", "begun_ns")


def make_run(at_s: Floats, ttft_s: Floats, outcome: Any = "ok", **meta: Any) -> Run:
    """A run of requests sent at these times, over with their first token."""
    sent_ns = 10**12 + np.rint(np.asarray(at_s) * 1e9).astype(np.int64)
    end_ns = sent_ns + np.rint(np.asarray(ttft_s) * 1e9).astype(np.int64)
    stamps = {"sent_ns": sent_ns, "begun_ns": sent_ns, "first_wire_ns": end_ns, "last_wire_ns": end_ns}
    stamps |= {"last_seen_ns": end_ns, "eof_ns": end_ns, "headers_ns": end_ns}
    requests = pd.DataFrame({name: pd.array(at_ns, "Int64") for name, at_ns in stamps.items()})
    requests["outcome"] = outcome
    for name in ("ttft_s", "e2e_s"):
        requests[name] = np.where(requests["outcome"] == "ok", ttft_s, np.nan)
    return Run(None, {"asked": {"client": "stamped", **meta}}, requests)


def queue(rho: float, n: int, seed: int, warm: int = 5000) -> tuple[Floats, Floats]:
    """Arrivals and sojourns of an M/M/1 queue of service rate 1 that has been going on for `warm` arrivals."""
    rng = np.random.default_rng(seed)
    gaps, services = rng.exponential(1 / rho, n + warm), rng.exponential(1.0, n + warm)
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    sojourns = walk - np.minimum.accumulate(walk) + services
    return np.cumsum(gaps)[warm:], sojourns[warm:]


def most_of(share: float, seeds: int) -> int:
    """How often something of this chance happens at most, in all but one in a thousand tries."""
    return int(stats.binom.ppf(0.999, seeds, share))


# the test for a trend


def p_values(make: Any, seeds: int) -> Floats:
    return np.array([drift_p(make(np.random.default_rng(seed))) for seed in range(seeds)])


@pytest.mark.parametrize("memory", [0.0, 0.9, 0.99], ids=lambda memory: f"AR {memory}")
def test_p_of_no_trend_is_uniform_however_a_sequence_is_correlated(memory: float) -> None:
    def make(rng: np.random.Generator) -> Floats:
        noise = rng.normal(size=12_000)
        return signal.lfilter([1.0], [1.0, -memory], noise)[2000:]

    found = p_values(make, 400)
    assert stats.kstest(found, "uniform").pvalue > 0.001


def test_a_regression_that_knows_of_no_correlation_finds_drift_in_every_second_queue() -> None:
    """What the cosines are for: at ρ = 0.8 an ordinary rank correlation with time is wrong most of the time."""
    alarms = ordinary = 0
    for seed in range(100):
        _, sojourn_s = queue(0.8, 10_000, seed)
        alarms += drift_p(sojourn_s) < 0.05
        ordinary += stats.spearmanr(np.arange(10_000), sojourn_s).pvalue < 0.05
    assert alarms <= most_of(0.07, 100)
    assert ordinary > 50


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_is_found(sign: int) -> None:
    found = p_values(lambda rng: rng.normal(size=1000) + sign * np.linspace(0, 2, 1000), 100)
    assert (found < 0.01).mean() > 0.95


def test_what_never_changes_has_no_trend_and_what_only_grows_has() -> None:
    assert drift_p(np.full(1000, 0.1)) == 1.0
    assert drift_p(np.zeros(3)) == 1.0
    assert drift_p(np.arange(1000.0)) < 1e-9


# the warm-up


@pytest.mark.parametrize("length", [50, 200, 400])
def test_a_warm_up_of_known_length_is_cut(length: int) -> None:
    cuts = []
    for seed in range(100):
        values = np.random.default_rng(seed).normal(size=1000)
        values[:length] += 4
        cuts.append(mser5(values))
    assert np.quantile(cuts, 0.05) >= length - 5
    assert np.median(cuts) <= length + 10


def test_little_is_cut_of_what_has_no_warm_up() -> None:
    cuts = np.array([mser5(np.random.default_rng(seed).normal(size=2000)) for seed in range(200)])
    assert np.median(cuts) <= 0.1 * 2000
    assert (cuts % 5 == 0).all() and cuts.max() <= 1000


def test_the_cut_is_where_the_squared_error_of_the_batches_is_least() -> None:
    values = np.random.default_rng(5).exponential(size=203)
    means = values[:200].reshape(40, 5).mean(axis=1)
    errors = [means[d:].var() / (40 - d) for d in range(21)]
    assert mser5(values) == 5 * int(np.argmin(errors))


def test_values_that_are_all_alike_are_not_cut() -> None:
    assert mser5(np.full(997, 0.1)) == 0
    assert mser5(np.concatenate([np.arange(50.0), np.full(950, 49.7)])) == 50
    assert mser5(np.zeros(4)) == 0


# runs


@pytest.mark.parametrize(("rho", "n"), [(0.3, 1000), (0.5, 2000), (0.8, 10_000)])
def test_a_stationary_queue_is_rarely_said_to_drift(rho: float, n: int) -> None:
    seeds = 100
    found = [steady_state(make_run(*queue(rho, n, seed))) for seed in range(seeds)]
    alarms = sum(not f.steady for f in found)
    # two tests at 1 % each, before and after the cut, are far from independent: some 1.5 %
    assert alarms <= most_of(2 * LEVEL, seeds)
    windows = np.array([f.window_s for f in found if f.steady])
    span_s = n / rho
    assert np.median(windows[:, 0]) < 0.2 * span_s
    assert (windows[:, 1] > 0.8 * span_s).all()


@pytest.mark.parametrize(("rho", "n", "least"), [(1.1, 2000, 0.85), (1.2, 2000, 0.98), (1.5, 500, 0.98)])
def test_a_growing_queue_is_never_stationary(rho: float, n: int, least: float) -> None:
    found = [steady_state(make_run(*queue(rho, n, seed, warm=0))) for seed in range(60)]
    never = [f for f in found if f.steady is False and f.window_s is None]
    assert len(never) >= 60 * least
    assert all(f.window_ns is None for f in never)
    assert all("Never stationary: " in f.sentence and "lower the rate" in f.sentence for f in never)
    assert {t.series for f in never for t in f.trends if t.drifts} == {"ttft_s", "in_flight"}


def test_users_who_wait_for_their_answers_have_no_rate_to_lower() -> None:
    at_s, ttft_s = queue(1.2, 2000, 0, warm=0)
    found = steady_state(make_run(at_s, ttft_s, rate_per_s=None, concurrency=8))
    assert "Never stationary: " in found.sentence
    assert found.sentence.endswith("; run for longer.")


def decaying(n: int, seed: int, length_s: float) -> tuple[Floats, Floats]:
    """TTFT that starts at 1 s and settles at 0.2 s, exponentially; 10 requests a second."""
    rng = np.random.default_rng(seed)
    at_s = np.sort(rng.uniform(0, n / 10, n))
    return at_s, rng.lognormal(np.log(0.2), 0.2, n) + 0.8 * np.exp(-at_s / (length_s / 3))


@pytest.mark.parametrize("length_s", [5.0, 30.0])
def test_a_warm_up_is_left_out_of_the_window(length_s: float) -> None:
    found = [steady_state(make_run(*decaying(1000, seed, length_s))) for seed in range(100)]
    assert sum(f.steady is True for f in found) >= 90
    starts_s = np.array([f.window_s[0] for f in found if f.steady and f.window_s])
    # after three time constants 0.8 s have become 0.04 s, the noise's standard deviation
    assert 0.5 * length_s < np.median(starts_s) < 2 * length_s
    assert (starts_s > 0).all()


def test_a_run_that_gets_slow_half_way_was_stationary_in_a_part() -> None:
    rng = np.random.default_rng(1)
    at_s = np.sort(rng.uniform(0, 100, 1000))
    ttft_s = rng.lognormal(np.log(0.2), 0.2, 1000) * np.where(at_s < 70, 1, 3)
    found = steady_state(make_run(at_s, ttft_s))
    assert found.steady is False
    assert found.window_s == (0.0, pytest.approx(50, abs=1))
    assert found.window_ns is not None
    assert found.window_ns[1] - found.window_ns[0] == pytest.approx(50e9, rel=0.02)
    assert found.sentence.startswith("Stationary only from 0 s to") and "TTFT went from" in found.sentence


def test_a_drift_too_small_to_matter_is_none() -> None:
    rng = np.random.default_rng(2)
    at_s = np.linspace(0, 1000, 20_000)
    for rise, steady in ((0.03, True), (0.2, False)):
        found = steady_state(make_run(at_s, 0.2 * (1 + rise * at_s / 1000) + rng.normal(0, 1e-3, 20_000)))
        assert found.steady is steady
        assert drift_p(0.2 * (1 + rise * at_s / 1000) + rng.normal(0, 1e-3, 20_000)) < 1e-6


def test_requests_in_flight_are_those_each_one_found() -> None:
    """A queue that holds still at 8 in flight, then at 12, with a TTFT that its client can't tell from before."""
    at_s = np.arange(2000) / 10
    ttft_s = np.full(2000, 0.85)
    run = make_run(at_s, ttft_s)
    assert steady_state(run).steady is True
    rising_s = 0.85 + 0.4 * np.linspace(0, 1, 2000)
    run.requests["eof_ns"] = run.requests["sent_ns"] + np.rint(rising_s * 1e9).astype(np.int64)
    found = steady_state(run)
    assert found.window_s is None
    (trend,) = (t for t in found.trends if t.drifts)
    assert trend.series == "in_flight"
    # what was sent in the last 0.85 s to 1.25 s, a tenth apart: quarters of a line from 8 to 12
    assert trend.means == pytest.approx([8.5, 9.5, 10.5, 11.5], abs=0.6)


def test_a_request_that_ends_at_once_is_not_its_own_company() -> None:
    at_s, ended = np.arange(1000) / 10, np.arange(1000) % 2 == 0
    run = make_run(at_s, np.where(ended, 0.0, 0.05), np.where(ended, "connect_error", "ok"))
    assert steady_state(run).trends[1].means == (0, 0, 0, 0)


def test_requests_that_time_out_are_in_flight_for_the_timeout_and_lost_ones_to_the_end() -> None:
    at_s, ttft_s = np.arange(1000) / 10, np.full(1000, 0.55)
    out = np.where(np.arange(1000) % 5 == 0, "timeout", "ok")
    found = steady_state(make_run(at_s, ttft_s, out, timeout_s=10.0))
    # four fifths of 5.5 and a fifth of 100
    assert found.steady is True and found.trends[1].means[-1] == pytest.approx(0.8 * 5.5 + 0.2 * 100, abs=1)
    found = steady_state(make_run(at_s, ttft_s, np.where(out == "ok", "ok", "lost")))
    assert found.window_s is None and found.trends[1].means[-1] > 100


def test_the_window_selects_rows_by_their_stamps() -> None:
    run = make_run(*decaying(1000, 1, 30.0))
    found = steady_state(run)
    assert found.window_s is not None and found.window_ns is not None
    inside = run.requests["sent_ns"].between(*found.window_ns)
    at_s = (run.requests["sent_ns"] - run.requests["sent_ns"].min()) / 1e9
    assert (inside == at_s.between(*found.window_s)).all()
    assert found.warm_up_s == found.window_s[0]


def test_too_few_requests_and_too_short_a_run_say_so() -> None:
    at_s, ttft_s = np.arange(99) / 10, np.full(99, 0.05)
    few = steady_state(make_run(at_s, ttft_s))
    assert (few.steady, few.window_s) == (None, None)
    assert few.sentence == "Too few requests to tell: 99 of 100 that are needed."
    rng = np.random.default_rng(3)
    at_s = np.arange(2000) / 2000 * 60  # a minute of requests that last seven seconds
    short = steady_state(make_run(at_s, np.where(at_s < 1, 7.5, rng.normal(7, 0.1, 2000))))
    assert (short.steady, short.window_s, short.window_ns) == (None, None, None)
    assert short.sentence.startswith("Too short to tell: there are ")
    assert "requests last 7.0" in short.sentence and "more than 10 times" in short.sentence
    none = steady_state(make_run(np.arange(200) / 10, np.ones(200), "connect_error"))
    assert none.steady is None and "0 of 100" in none.sentence


def test_a_server_that_is_asked_for_more_than_it_can_do(tmp_path: Path) -> None:
    """Four places of 0.11 s each: 36 requests a second at most, and 60 are sent."""
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.01, max_batch=4, seed=1) as server:
        run = lp.run_load(
            *(server.url, lp.Poisson(60), 160), output_tokens=10, seed=2, out=tmp_path / "run", progress=False
        )
    found = steady_state(run)
    assert (found.steady, found.window_s) == (False, None)
    assert "TTFT went from" in found.sentence and "requests in flight went from" in found.sentence


def test_a_short_run_that_fills_up_is_not_said_to_grow() -> None:
    """Seven request durations: the first is spent until there are as many in flight as there will be."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        at_s = np.cumsum(rng.exponential(0.01, 400))
        found = steady_state(make_run(at_s, rng.normal(0.55, 0.02, 400)))
        assert (found.steady, found.window_s) == (None, None)
        assert found.sentence.startswith("Too short to tell: there are ")


def test_answers_that_are_no_streams_are_judged_by_their_e2e() -> None:
    at_s, sojourn_s = queue(1.5, 600, 1, warm=0)
    run = make_run(at_s, sojourn_s)
    run.requests["ttft_s"] = np.nan
    found = steady_state(run)
    assert found.window_s is None and "E2E went from" in found.sentence


def test_it_shows_itself() -> None:
    found = steady_state(make_run(*queue(1.5, 600, 1, warm=0)))
    for shown in (repr(found), found._repr_html_()):
        assert (
            "Never stationary" in shown
            and "requests in flight" in shown
            and "p of no drift" in shown
            and "first quarter" in shown
        )
    assert math.isfinite(found.trends[0].p)
    assert "Too few" in repr(steady_state(make_run(np.arange(5), np.ones(5))))
