"""What was drawn is held against the law it was drawn from, within four standard errors; and it repeats."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from llmprofile.errors import UsageError
from llmprofile.prompts import SharedPrefix
from llmprofile.stages import Stages
from llmprofile.workload import (
    MOST_CLOSED_REQUESTS,
    MOST_REQUESTS,
    MOST_TOKENS,
    ClosedLoop,
    Constant,
    Conversation,
    Empirical,
    Fixed,
    Gamma,
    Lognormal,
    Normal,
    Poisson,
    Schedule,
    Uniform,
    as_lengths,
    draw_schedule,
)

seeded = settings(derandomize=True, deadline=None)

OPEN_LAWS = [Constant(40), Poisson(40), Gamma(40, 0.25), Gamma(40, 4.0)]
LENGTHS = [Fixed(7), Uniform(3, 90), Normal(50, 20, 80), Lognormal(200, 100), Empirical([1, 5, 5, 200])]
law_ids = [repr(law) for law in OPEN_LAWS]


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


# arrival laws


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0, None], ids=lambda s: f"shape {s}" if s else "poisson")
def test_gaps_have_the_laws_rate_and_variation(shape: float | None) -> None:
    n, k = 200_000, shape or 1.0
    law = Gamma(40, shape) if shape else Poisson(40)
    gaps_s = np.diff(law.due_s(n, rng()), prepend=0.0)
    cv = 1 / math.sqrt(k)
    assert gaps_s.min() >= 0
    assert abs(gaps_s.mean() * 40 - 1) < 4 * cv / math.sqrt(n)
    # delta method, with the skewness 2/√k and the excess kurtosis 6/k of the gamma law
    assert abs(gaps_s.std() / gaps_s.mean() / cv - 1) < 4 * math.sqrt((0.5 + 0.5 / k) / n)
    assert stats.kstest(gaps_s * 40 * k, stats.gamma(k).cdf).pvalue > 1e-4


@seeded
@given(rate_per_s=st.floats(1e-3, 1e5), n=st.integers(1, 1000))
def test_constant_arrivals_start_at_zero_at_equal_distances(rate_per_s: float, n: int) -> None:
    due_s = Constant(rate_per_s).due_s(n, rng())
    assert due_s[0] == 0
    assert due_s == pytest.approx(np.arange(n) / rate_per_s, rel=1e-15)


@pytest.mark.parametrize("law", OPEN_LAWS, ids=law_ids)
@pytest.mark.parametrize("lengths", LENGTHS, ids=repr)
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(law: Any, lengths: Any) -> None:
    short, long = (draw_schedule(law, n=n, prompt_tokens=lengths, processes=3, seed=5) for n in (701, 5000))
    for name in ("due_s", "prompt_tokens", "output_tokens", "worker"):
        assert (getattr(short, name) == getattr(long, name)[:701]).all()


@pytest.mark.parametrize("law", OPEN_LAWS, ids=law_ids)
@pytest.mark.parametrize("duration_s", [0.5, 7.0, 60.0])
def test_a_duration_holds_what_falls_due_within_it_and_nothing_else(law: Any, duration_s: float) -> None:
    within = draw_schedule(law, duration_s=duration_s, seed=9).due_s
    beyond = draw_schedule(law, n=len(within) + 1, seed=9).due_s
    assert within[-1] < duration_s <= beyond[-1]
    assert (within == beyond[:-1]).all()


@pytest.mark.parametrize("duration_s", [1.0, 0.3, 2.05])
def test_constant_arrivals_of_a_duration_are_counted_without_a_fencepost_error(duration_s: float) -> None:
    assert len(draw_schedule(Constant(10), duration_s=duration_s)) == math.ceil(duration_s * 10 - 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_bursty_arrivals_that_need_a_longer_draw_than_expected_are_the_same_draw(seed: int) -> None:
    law = Gamma(10, 0.001)  # CV 32: a hundred seconds hold anything but the thousand that are expected
    within = draw_schedule(law, duration_s=100, seed=seed).due_s
    beyond = draw_schedule(law, n=len(within) + 1, seed=seed).due_s
    assert (within == beyond[:-1]).all()
    assert within[-1] < 100 <= beyond[-1]


def test_rate_is_gaps_over_their_span() -> None:
    assert draw_schedule(Constant(8), n=17).rate_per_s == pytest.approx(8)
    schedule = draw_schedule(Poisson(40), n=1000)
    assert schedule.rate_per_s == pytest.approx(999 / np.ptp(schedule.due_s))
    assert math.isnan(draw_schedule(Constant(8), n=1).rate_per_s)
    assert math.isnan(draw_schedule(ClosedLoop(2), n=10).rate_per_s)


# one Poisson stream, dealt


def streams(schedule: Schedule, processes: int) -> list[Any]:
    """Due times pooled, and of each worker, in units of their mean gap."""
    own = [schedule.due_s[schedule.worker == k] / processes for k in range(processes)]
    return [100 * s for s in ([schedule.due_s, *own] if processes > 1 else own)]


def dispersion_is_poissons(due: Any, window: float, level: float = 0.99) -> bool:
    """Whether the index of dispersion of counts in windows lies in the band that a Poisson stream keeps."""
    windows = int(due[-1] / window)
    counts = np.histogram(due, np.arange(windows + 1) * window)[0]
    index = counts.var(ddof=1) / counts.mean()
    low, high = stats.chi2(windows - 1).ppf([(1 - level) / 2, (1 + level) / 2]) / (windows - 1)
    return bool(low <= index <= high)


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_dealt_poisson_arrivals_are_poisson_pooled_and_in_each_worker(processes: int) -> None:
    held = {"dispersion": 0, "gaps": 0}
    tried = dict.fromkeys(held, 0)
    for seed in range(25):
        schedule = draw_schedule(Poisson(100), n=20_000 * processes, processes=processes, seed=seed)
        for due in streams(schedule, processes):
            tried["gaps"] += 1
            held["gaps"] += stats.kstest(np.diff(due, prepend=0.0), stats.expon.cdf).pvalue > 0.01
            for window in (10, 100, 1000):
                tried["dispersion"] += 1
                held["dispersion"] += dispersion_is_poissons(due, window)
    for what, n in tried.items():  # each holds 99 times of 100 when it is true
        assert abs(held[what] / n - 0.99) <= 4 * math.sqrt(0.99 * 0.01 / n), what


def test_the_dispersion_test_can_tell_other_streams_from_poissons() -> None:
    for law in (Constant(100), Gamma(100, 0.5), Gamma(100, 2.0)):
        due = streams(draw_schedule(law, n=20_000, seed=1), 1)[0]
        assert not any(dispersion_is_poissons(due, window) for window in (10, 100))


@pytest.mark.parametrize("law", [*OPEN_LAWS, ClosedLoop(10)], ids=repr)
def test_the_schedule_is_the_same_for_any_number_of_processes(law: Any) -> None:
    kinds = {"prompt_tokens": Uniform(1, 100), "output_tokens": Lognormal(60, 30), "seed": 11}
    one, two, five = (draw_schedule(law, n=3000, processes=k, **kinds) for k in (1, 2, 5))
    for other, processes in ((two, 2), (five, 5)):
        for name in ("due_s", "prompt_tokens", "output_tokens", "stage"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        dealt = np.bincount(other.worker, minlength=processes)
        assert len(dealt) == processes
        assert stats.chisquare(dealt).pvalue > 1e-4
    assert set(one.worker.tolist()) == {0}


def test_the_seed_is_all_that_a_schedule_depends_on() -> None:
    first, again, other = (draw_schedule(Poisson(5), n=100, output_tokens=Uniform(1, 9), seed=s) for s in (4, 4, 5))
    assert (first.due_s == again.due_s).all()
    assert (first.output_tokens == again.output_tokens).all()
    assert (first.due_s != other.due_s).all()
    assert (first.output_tokens != other.output_tokens).any()


def test_dealing_is_independent_of_times_and_lengths() -> None:
    n = 40_000
    schedule = draw_schedule(Poisson(5), n=n, output_tokens=Uniform(1, 9), prompt_tokens=Uniform(1, 9), processes=2)
    columns = [np.diff(schedule.due_s, prepend=0.0), schedule.prompt_tokens, schedule.output_tokens, schedule.worker]
    off_diagonal = np.corrcoef(columns)[np.triu_indices(4, 1)]
    assert np.abs(off_diagonal).max() < 4 / math.sqrt(n)
    repeats = np.corrcoef(schedule.worker[1:], schedule.worker[:-1])[0, 1]
    assert abs(repeats) < 4 / math.sqrt(n)


# conversations, servers and shared prefixes


def test_what_is_drawn_beside_leaves_the_rest_as_it_was() -> None:
    """Times, lengths and dealing come from the first four streams of the seed, whatever else is asked."""
    lengths = {"prompt_tokens": Uniform(1, 900), "output_tokens": Lognormal(60, 30)}
    streams_ = [np.random.default_rng(s) for s in np.random.SeedSequence(3).spawn(4)]
    for more in ({}, {"servers": 3}, {"prompts": SharedPrefix(4, 10)}, {"conversation": Conversation(1)}):
        schedule = draw_schedule(Poisson(40), n=50, processes=2, seed=3, **lengths, **more)  # type: ignore[arg-type]
        times, prompts, outputs, dealt = (copy.deepcopy(stream) for stream in streams_)
        np.testing.assert_array_equal(schedule.due_s, np.cumsum(times.exponential(1 / 40, 50)))
        np.testing.assert_array_equal(schedule.prompt_tokens, lengths["prompt_tokens"].draw(50, prompts))
        np.testing.assert_array_equal(schedule.output_tokens, lengths["output_tokens"].draw(50, outputs))
        np.testing.assert_array_equal(schedule.worker, dealt.random(50) >= 0.5)
        assert (schedule.turn == 0).all() and (schedule.conversation == np.arange(50)).all()


@pytest.mark.parametrize(
    "law", [Poisson(40), ClosedLoop(10), Stages([(Poisson(50), 2.0), (Constant(50), 2.0)])], ids=repr
)
def test_conversations_are_the_same_for_any_number_of_processes(law: Any) -> None:
    kinds: dict[str, Any] = {
        "conversation": Conversation(Uniform(1, 5), think_s=stats.expon(scale=2.0)),
        "prompts": SharedPrefix(7, 10),
        "servers": 3,
        "output_tokens": Uniform(1, 500),
        "n": 150,
        "seed": 11,
    }
    one, three = (draw_schedule(law, processes=k, **kinds) for k in (1, 3))
    for field in dataclasses.fields(one):
        if field.name not in ("worker", "slots"):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(three, field.name))
    assert len(np.unique(one.conversation)) == 150
    ids, turns = np.unique(one.conversation, return_counts=True)
    assert set(turns) == {1, 2, 3, 4, 5}
    assert (one.turn == np.concatenate([np.arange(k) for k in turns])).all()
    for name in ("worker", "stage", "server"):
        column = getattr(three, name)
        assert all(len(set(column[three.conversation == k])) == 1 for k in ids)
    assert (three.server == three.conversation % 3).all()
    later = three.turn > 0
    assert np.isnan(three.due_s[later]).all()
    assert (three.pick[later] == -1).all() and set(three.pick[~later]) == set(range(7))
    plain = draw_schedule(law, n=150, seed=11)
    np.testing.assert_array_equal(three.due_s[~later], plain.due_s)
    np.testing.assert_array_equal(three.rate_per_s, plain.rate_per_s)


def test_turns_groups_and_thinking_have_their_laws() -> None:
    schedule = draw_schedule(
        *(Poisson(40),),
        n=20_000,
        conversation=Conversation(Uniform(1, 4), think_s=stats.expon(scale=2.0)),
        prompts=SharedPrefix(5, 10),
        prompt_tokens=Uniform(3, 12),
    )
    turns = np.bincount(np.unique(schedule.conversation, return_counts=True)[1])[1:]
    assert stats.chisquare(turns).pvalue > 1e-4
    assert stats.chisquare(np.bincount(schedule.pick[schedule.turn == 0])).pvalue > 1e-4
    assert stats.kstest(schedule.think_s, stats.expon(scale=2.0).cdf).pvalue > 1e-4
    # lengths are drawn for each turn
    assert stats.chisquare(np.bincount(schedule.prompt_tokens)[3:]).pvalue > 1e-4
    of_turn = [schedule.prompt_tokens[schedule.turn == t] for t in (0, 1)]
    assert stats.ks_2samp(*of_turn).pvalue > 1e-4


def test_what_a_conversation_takes_at_most() -> None:
    schedule = draw_schedule(Constant(1), n=4, conversation=Conversation(3, think_s=2.0))
    assert schedule.longest_s(10.0) == 3 * 12.0
    assert draw_schedule(Constant(1), n=4).longest_s(10.0) == 10.0


def test_an_open_ended_closed_loop_of_conversations_is_bounded() -> None:
    schedule = draw_schedule(ClosedLoop(100), duration_s=1e6, conversation=Conversation(7))
    assert MOST_CLOSED_REQUESTS - 7 < len(schedule) <= MOST_CLOSED_REQUESTS
    assert (np.unique(schedule.conversation, return_counts=True)[1] == 7).all()


# slots and closed loops


@seeded
@given(processes=st.integers(1, 40), more=st.integers(0, 1000), closed=st.booleans())
def test_slots_sum_to_the_total_and_are_balanced(processes: int, more: int, closed: bool) -> None:
    total = processes + more
    law, cap = (ClosedLoop(total), None) if closed else (Poisson(10), total)
    slots = draw_schedule(law, n=5, processes=processes, max_in_flight=cap).slots
    assert slots is not None
    assert sum(slots) == total
    assert len(slots) == processes
    assert max(slots) - min(slots) <= 1


def test_an_open_loop_has_no_slots_unless_it_is_capped() -> None:
    assert draw_schedule(Poisson(10), n=5, processes=2).slots is None


def test_requests_are_dealt_in_proportion_to_slots() -> None:
    n = 30_000
    dealt = np.bincount(draw_schedule(ClosedLoop(3), n=n, processes=2).worker)
    assert abs(dealt[0] / n - 2 / 3) < 4 * math.sqrt(2 / 9 / n)


def test_a_closed_loop_is_due_when_a_slot_gets_free() -> None:
    schedule = draw_schedule(ClosedLoop(4), n=50)
    assert len(schedule) == 50
    assert np.isnan(schedule.due_s).all()


def test_a_closed_loop_with_a_duration_has_requests_enough_and_not_too_many() -> None:
    assert len(draw_schedule(ClosedLoop(2), duration_s=1.0)) >= 2000
    assert len(draw_schedule(ClosedLoop(2), duration_s=1e300)) == MOST_CLOSED_REQUESTS


# lengths


def mean_of(values: Any, mean: float) -> None:
    assert abs(values.mean() - mean) < 4 * values.std() / math.sqrt(len(values))


def sd_of(values: Any, sd: float) -> None:
    """Within four standard errors, by the sample's own kurtosis."""
    error = values.std() * math.sqrt((stats.kurtosis(values) + 2) / 4 / len(values))
    assert abs(values.std() - sd) < 4 * error


def test_fixed_and_uniform_lengths() -> None:
    assert set(Fixed(7).draw(100, rng())) == {7}
    counts = np.bincount(Uniform(3, 12).draw(100_000, rng()))
    assert counts[:3].sum() == 0
    assert len(counts) == 13
    assert stats.chisquare(counts[3:]).pvalue > 1e-4
    assert set(Uniform(5, 5).draw(10, rng())) == {5}


def test_normal_lengths_have_their_moments_where_no_bound_is_near() -> None:
    lengths = Normal(500, 60).draw(200_000, rng())
    mean_of(lengths, 500)
    sd_of(lengths, math.sqrt(60**2 + 1 / 12))  # rounding adds a twelfth


def test_normal_lengths_pile_up_at_their_bounds() -> None:
    n = 100_000
    lengths = Normal(50, 40, 80).draw(n, rng())
    assert (lengths.min(), lengths.max()) == (1, 80)
    for bound, share in ((1, stats.norm(50, 40).cdf(1.5)), (80, stats.norm(50, 40).sf(79.5))):
        assert abs((lengths == bound).mean() - share) < 4 * math.sqrt(share / n)


@pytest.mark.parametrize(("mean", "sd"), [(200, 100), (1000, 200), (300, 450)])
def test_lognormal_lengths_have_the_mean_and_deviation_of_the_tokens(mean: float, sd: float) -> None:
    lengths = Lognormal(mean, sd).draw(400_000, rng())
    mean_of(lengths, mean)
    sd_of(lengths, sd)
    sigma2 = math.log1p((sd / mean) ** 2)
    median = mean / math.exp(sigma2 / 2)
    error = 1 / (2 * math.sqrt(400_000) * stats.lognorm(math.sqrt(sigma2), scale=median).pdf(median))
    assert abs(np.median(lengths) - median) < 0.5 + 4 * error


def test_lognormal_lengths_stay_below_their_bound() -> None:
    assert Lognormal(200, 400, 900).draw(100_000, rng()).max() == 900


def test_empirical_lengths_come_as_often_as_they_were_seen() -> None:
    n = 60_000
    lengths = Empirical([10, 20, 20, 20, 70, 70]).draw(n, rng())
    seen = [(lengths == tokens).sum() for tokens in (10, 20, 70)]
    assert sum(seen) == n
    assert stats.chisquare(seen, [n / 6, n / 2, n / 3]).pvalue > 1e-4


@pytest.mark.parametrize("lengths", LENGTHS, ids=repr)
def test_lengths_are_whole_at_least_one_and_as_many_as_asked(lengths: Any) -> None:
    for n in (0, 1, 1000):
        drawn = lengths.draw(n, rng())
        assert drawn.shape == (n,)
        assert drawn.dtype == np.int64
        assert (drawn >= 1).all()
    assert as_lengths("output_tokens", lengths) is lengths


def test_a_number_stands_for_a_fixed_length() -> None:
    assert as_lengths("output_tokens", 64) == Fixed(64)
    schedule = draw_schedule(Constant(1), n=3, prompt_tokens=9, output_tokens=np.int64(5))  # type: ignore[arg-type]
    assert schedule.prompt_tokens.tolist() == [9, 9, 9]
    assert schedule.output_tokens.tolist() == [5, 5, 5]


# bad input

numbers = st.floats(1e-3, 1e3)
not_positive: Any = (
    st.floats(max_value=0)
    | st.sampled_from([math.nan, math.inf, -math.inf, 0, True, False, None, "3", b"3", [3], 1j, 10**400])
    | st.integers(max_value=0)
)
not_whole: Any = not_positive | st.floats(0.001, 1000) | st.just(2**70)

BAD_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "constant": Constant,
    "poisson": Poisson,
    "gamma rate": lambda bad: Gamma(bad, 1.0),
    "gamma shape": lambda bad: Gamma(1.0, bad),
    "normal mean": lambda bad: Normal(bad, 1.0),
    "normal sd": lambda bad: Normal(1.0, bad),
    "lognormal mean": lambda bad: Lognormal(bad, 1.0),
    "lognormal sd": lambda bad: Lognormal(1.0, bad),
    "duration": lambda bad: draw_schedule(Constant(1), duration_s=bad),
}
BAD_COUNTS: dict[str, Callable[[Any], Any]] = {
    "concurrency": ClosedLoop,
    "fixed": Fixed,
    "uniform low": lambda bad: Uniform(bad, 9),
    "uniform high": lambda bad: Uniform(1, bad),
    "normal high": lambda bad: Normal(10, 3, bad),
    "lognormal high": lambda bad: Lognormal(10, 3, bad),
    "empirical": lambda bad: Empirical([5, bad]),
    "n": lambda bad: draw_schedule(Constant(1), n=bad),
    "processes": lambda bad: draw_schedule(Constant(1), n=1, processes=bad),
    "in flight": lambda bad: draw_schedule(Constant(1), n=1, max_in_flight=bad),
    "prompt": lambda bad: draw_schedule(Constant(1), n=1, prompt_tokens=bad),
    "output": lambda bad: draw_schedule(Constant(1), n=1, output_tokens=bad),
}
MAY_BE_NONE = {"normal high", "lognormal high", "in flight", "prompt", "output"}
MAY_BE_LARGE = {"concurrency", "processes", "in flight"}


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    said = str(caught.value)
    assert len(said.split()) > 4
    assert "\n" not in said
    return said


@pytest.mark.parametrize("name", BAD_NUMBERS)
@settings(seeded, max_examples=40)
@given(bad=not_positive)
def test_what_must_be_a_positive_number_is_refused_otherwise(name: str, bad: Any) -> None:
    refused(lambda: BAD_NUMBERS[name](bad))


@pytest.mark.parametrize("name", BAD_COUNTS)
@settings(seeded, max_examples=40)
@given(bad=not_whole)
def test_what_must_be_a_whole_number_is_refused_otherwise(name: str, bad: Any) -> None:
    if (bad is None and name in MAY_BE_NONE) or (bad in (2**70, 10**400) and name in MAY_BE_LARGE):
        return
    refused(lambda: BAD_COUNTS[name](bad))


SENTENCES: dict[str, tuple[Callable[[], Any], str]] = {
    "both": (lambda: draw_schedule(Constant(1), n=1, duration_s=1), "either a number of requests or a duration"),
    "neither": (lambda: draw_schedule(Constant(1)), "either a number of requests or a duration"),
    "no law": (lambda: draw_schedule("poisson", n=1), "Constant, Poisson, Gamma"),  # type: ignore[arg-type]
    "rate alone": (lambda: draw_schedule(40, n=1), "Constant, Poisson, Gamma"),  # type: ignore[arg-type]
    "seed": (lambda: draw_schedule(Constant(1), n=1, seed=-1), "seed must be a whole number of at least 0"),
    "word as seed": (lambda: draw_schedule(Constant(1), n=1, seed="x"), "seed must be"),  # type: ignore[arg-type]
    "low above high": (lambda: Uniform(9, 3), "high must be a whole number of at least 9; not 3"),
    "no lengths": (lambda: Empirical([]), "at least one length"),
    "one length": (lambda: Empirical(5), "Empirical needs"),  # type: ignore[arg-type]
    "long": (lambda: Fixed(MOST_TOKENS + 1), f"at most {MOST_TOKENS:,}"),
    "long mean": (lambda: Lognormal(1e300, 1), f"{MOST_TOKENS:,}"),
    "few slots": (lambda: draw_schedule(ClosedLoop(3), n=9, processes=4), "fewer than 4 processes"),
    "low cap": (lambda: draw_schedule(Poisson(1), n=9, processes=4, max_in_flight=3), "max_in_flight 3 is fewer"),
    "closed and capped": (lambda: draw_schedule(ClosedLoop(3), n=9, max_in_flight=3), "has its concurrency"),
    "nothing due": (lambda: draw_schedule(Poisson(1e-6), duration_s=1), "no request falls due within 1 s"),
    "many": (lambda: draw_schedule(Constant(1), n=MOST_REQUESTS + 1), f"at most {MOST_REQUESTS:,}"),
    "many due": (lambda: draw_schedule(Constant(1e12), duration_s=1e9), f"{MOST_REQUESTS:,}"),
    "too many due": (lambda: draw_schedule(Constant(1e300), duration_s=1e300), f"{MOST_REQUESTS:,}"),
    "rare": (lambda: draw_schedule(Constant(1e-10), n=2), "years"),
    "rarer": (lambda: draw_schedule(Poisson(1e-320), n=2), "years"),
    "many turns": (
        lambda: draw_schedule(Constant(1), n=MOST_REQUESTS // 10, conversation=Conversation(11)),
        "at most 20,000,000 turns in all; not 22,000,000",
    ),
    "endless talk": (
        lambda: draw_schedule(ClosedLoop(9), duration_s=9, conversation=Conversation(MOST_TOKENS)),
        "at most 20,000,000 turns in all",
    ),
    "long thinking": (
        lambda: draw_schedule(Constant(1), n=1, conversation=Conversation(2, think_s=1e12)),
        "think_s must be at most a hundred years",
    ),
    "no servers": (lambda: draw_schedule(Constant(1), n=1, servers=0), "servers must be a whole number"),
    "hopelessly bursty": (lambda: draw_schedule(Gamma(1, 1e-320), n=2), "years"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
def test_what_is_wrong_is_said(name: str) -> None:
    make, part = SENTENCES[name]
    assert part in refused(make)
