"""Goodput held to the reference server's record, to known runs, and its interval to a share that a formula knows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmprofile as lp
from llmprofile.errors import UsageError
from llmprofile.latency import derive_latencies
from llmprofile.records import Run
from llmprofile.slo import goodput, meets, share_interval
from test_metrics import MS, UNSTAMPED, lindley_waits, make_run, seeded, stamp_columns

METRICS = ("ttft_s", "tpot_s", "ntpot_s", "e2e_s")

# the server's record

FAULTS = (
    {"kind": "stall", "at": 0, "stall_s": 0.05},
    {"kind": "stall", "at": 2, "stall_s": 0.06},
    {"kind": "reset", "at": 2},
)


def true_latencies(server: lp.ReferenceServer) -> pd.DataFrame:
    """What the server's record says of each request: its latencies, and whether it was answered whole."""
    truth = server.truth().sort_values("request_id", ignore_index=True)
    tokens = truth["tokens"].to_numpy(float)
    first_s, last_s = (((truth[f"{k}_ns"] - truth["arrive_first_ns"]) / 1e9).to_numpy(float, na_value=np.nan) for k in
                       ("first", "last"))  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where(tokens == 1, 0.0, (last_s - first_s) / (tokens - 1))
        columns = {"ttft_s": first_s, "tpot_s": tpot_s, "ntpot_s": last_s / tokens, "e2e_s": last_s}
    return pd.DataFrame(columns | {"ok": truth["fault"].isna() | (truth["fault"] == "stall")})


def timed(run: Run, truth: pd.DataFrame) -> tuple[Run, pd.DataFrame]:
    """Without the requests whose first token shared a read with what followed: they have a bracket for a time."""
    known = ~run.requests["bounded"].fillna(False).to_numpy(bool)
    assert known.sum() >= 20
    return dataclasses.replace(run, requests=run.requests[known]), truth[known]


def limits_between(true_s: pd.Series) -> list[float]:
    """Limits that no true value is near: the middles of the widest gaps, three at most, from 0 to beyond all."""
    known = np.sort(true_s[true_s > 0])
    edges = np.concatenate([[0.0], known, [1.5 * known[-1]]])
    gaps_s = np.diff(edges)
    widest = np.argsort(gaps_s)[-3:]
    widest = widest[gaps_s[widest] > 0.002]  # far above what lies between the two records of one token
    return [float(limit_s) for limit_s in np.sort((edges[widest] + edges[widest + 1]) / 2)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault['kind']} at {fault['at']}")
def test_goodput_equals_the_count_from_the_servers_truth_for_every_combination_of_limits(
    fault: dict[str, Any], tmp_path: Path
) -> None:
    with lp.ReferenceServer(ttft_s=0.03, itl_s=0.02, seed=3, fault=fault, fault_share=0.4) as server:
        run = lp.run_load(
            *(server.url, lp.Poisson(80), 80),
            output_tokens=lp.Uniform(1, 8),
            seed=5,
            out=tmp_path / "run",
            progress=False,
        )
        truth = true_latencies(server)
    assert len(truth) == len(run.requests) == 80
    run, truth = timed(run, truth)
    assert (run.requests["outcome"] == "ok").sum() == truth["ok"].sum()
    choices = [[None, *limits_between(truth[m])] for m in METRICS]
    counts = set()
    combinations = list(itertools.product(*choices))[1:]
    for k in np.random.default_rng(1).permutation(len(combinations))[:80]:
        limits = {m: limit_s for m, limit_s in zip(METRICS, combinations[k], strict=True) if limit_s is not None}
        met = truth["ok"] & (truth[list(limits)] <= pd.Series(limits)).all(axis=1)
        found = goodput(run, **limits)
        assert (found.n, found.met) == (len(truth), met.sum()), limits
        assert found.share == met.mean()
        counts.add(found.met)
    assert len(counts) >= 3


@pytest.fixture(scope="module")
def slow_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, pd.DataFrame]]:
    """A conventional run whose client works 3 ms on each event; and the truth of it."""
    with lp.ReferenceServer(ttft_s=0.03, itl_s=0.06, seed=4, fault=FAULTS[0], fault_share=0.3) as server:
        run = lp.run_load(
            *(server.url, lp.Poisson(20), 60),
            client="conventional",
            event_work_s=0.003,
            output_tokens=3,
            seed=6,
            out=tmp_path_factory.mktemp("slow") / "run",
            progress=False,
        )
        yield run, true_latencies(server)


def test_what_a_biased_clock_fails_wrongly_is_counted_beside_the_truth(
    slow_client: tuple[Run, pd.DataFrame],
) -> None:
    run, truth = timed(*slow_client)
    handled_s, wrong = run.requests["ttft_handled_s"], []
    for limit_s in np.arange(0.031, 0.1, 0.0005):
        if (truth["ttft_s"] - limit_s).abs().min() > 0.0005:  # the two records of a token don't lie so far apart
            found = goodput(run, ttft_s=limit_s)
            truly, said = (truth["ttft_s"] <= limit_s).to_numpy(bool), (handled_s <= limit_s).to_numpy(bool)
            assert (found.clock, found.met) == ("handled", said.sum())
            assert found.frame.loc["wire", "met"] == truly.sum()
            assert found.frame.loc["handled", "failed_wrongly"] == (truly & ~said).sum()
            assert found.frame.loc["handled", "passed_wrongly"] == (said & ~truly).sum() == 0
            wrong.append(found.frame.loc["handled", "failed_wrongly"])
    assert max(wrong) > 5 and len(set(wrong)) > 2


# runs by hand


def test_each_clock_is_counted_and_held_to_the_wire() -> None:
    run = make_run(client="conventional", failed=(2,))
    found = goodput(run, ttft_s=0.021, e2e_s=0.053)
    assert (found.clock, found.n, found.met, found.share) == ("handled", 12, 0, 0.0)
    frame = found.frame
    assert frame["met"].to_dict() == {"wire": 11, "seen": 0, "handled": 0}
    assert frame["ttft_s"].to_dict() == {"wire": 11, "seen": 0, "handled": 0}
    assert frame["e2e_s"].to_dict() == {"wire": 11, "seen": 11, "handled": 0}
    assert frame["failed_wrongly"].tolist() == [pd.NA, 11, 11]
    assert frame["passed_wrongly"].tolist() == [pd.NA, 0, 0]
    assert "The handled clock fails 11 requests that meet the limits on the wire" in repr(found)
    assert "The seen clock would have failed 11" in repr(found)
    assert "1 did not end ok (1 http_error): they meet no limit." in found.notes


def test_a_clock_that_is_early_passes_wrongly() -> None:
    stamps = stamp_columns(12)
    early = {name: stamps[name] - 8 * MS for name in ("first_seen_ns", "last_seen_ns")}
    found = goodput(make_run(**early), ttft_s=0.017)
    assert found.met == 0
    assert found.frame.loc["seen", ["met", "failed_wrongly", "passed_wrongly"]].tolist() == [12, 0, 12]


def test_every_scheduled_request_is_in_the_denominator() -> None:
    stamps = stamp_columns(12)
    sent_ns = np.where(np.arange(12) >= 10, np.iinfo(np.int64).min, stamps["sent_ns"])
    outcomes = ["ok"] * 6 + ["timeout"] * 4 + ["unsent"] * 2
    found = goodput(make_run(12, sent_ns=sent_ns, outcome=outcomes), ttft_s=1.0)
    assert (found.n, found.met, found.share) == (12, 6, 0.5)
    # six of the ten that were sent, which left at 10/s
    assert found.rate_per_s == pytest.approx(6.0)
    assert "6 did not end ok (4 timeout, 2 unsent)" in found.notes[0]


def one_token_run(n: int = 12) -> Run:
    """As `make_run`, its even requests of a single token."""
    stamps = stamp_columns(n)
    for clock in ("wire", "seen", "handled"):
        last_ns = np.where(np.arange(n) % 2 == 0, stamps[f"first_{clock}_ns"], stamps[f"last_{clock}_ns"])
        stamps[f"last_{clock}_ns"] = last_ns
    tokens = np.where(np.arange(n) % 2 == 0, 1, 4)
    derived = derive_latencies(stamps, tokens, tokens)
    return make_run(n, output_tokens=tokens, **stamps, **derived)


def test_an_answer_of_one_token_meets_any_limit_on_tpot() -> None:
    run = one_token_run()
    assert run.requests["tpot_s"].isna().sum() == 6
    found = goodput(run, tpot_s=0.001)
    assert found.met == 6
    assert "6 answers of one token have no TPOT: they meet the limit on it." in found.notes
    assert goodput(run, tpot_s=0.011).met == 12
    assert goodput(run, tpot_s=0.011, ttft_s=0.001).met == 0


def test_what_has_no_time_meets_no_limit_and_is_said() -> None:
    run = make_run()
    for column in ("ttft_s", "tpot_s"):
        run.requests.loc[:3, column] = np.nan
    run.requests.loc[:3, "first_wire_ns"] = pd.NA
    for limits in ({"ttft_s": 1.0}, {"tpot_s": 1.0}):
        found = goodput(run, **limits)
        assert found.met == 8
        assert "4 ok requests have no token with a time on this clock: they meet no limit." in found.notes
    # it can't be told whether the other clock is wrong about these
    assert goodput(run, ttft_s=1.0).frame.loc["seen", ["failed_wrongly", "passed_wrongly"]].tolist() == [0, 0]


def test_a_bracket_that_holds_the_limit_is_said() -> None:
    stamps = stamp_columns(12)
    lo_ns = stamps["first_wire_ns"] - 10 * MS
    run = make_run(first_wire_lo_ns=lo_ns, bounded=np.arange(12) < 5)
    run.requests["first_wire_lo_ns"] = pd.array(lo_ns, "Int64")
    found = goodput(run, ttft_s=0.015)
    assert found.met == 0
    assert any("Of 5 the TTFT is known only within a bracket" in note and "41.7%" in note for note in found.notes)
    for limits in ({"ttft_s": 0.005}, {"ttft_s": 0.025}, {"ttft_s": 0.015, "e2e_s": 0.001}, {"e2e_s": 0.015}):
        assert not any("bracket" in note for note in goodput(run, **limits).notes)


def test_a_run_without_stamps_says_that_nothing_is_known_of_its_clock() -> None:
    found = goodput(make_run(**UNSTAMPED), ttft_s=0.021)
    assert (found.clock, found.met) == ("seen", 0)
    assert "wire" not in found.frame.index
    assert found.frame["failed_wrongly"].isna().all()
    assert any("not known" in note for note in found.notes)


def test_a_run_in_which_nothing_went_well_has_no_goodput() -> None:
    found = goodput(make_run(failed=tuple(range(12))), ttft_s=1.0, tpot_s=1.0)
    assert (found.met, found.share, found.rate_per_s) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "goodput needs a limit: at least one of ttft_s, tpot_s, ntpot_s, e2e_s (seconds)"),
        ({"ttft_s": 0.0}, "ttft_s must be a number above 0 (seconds); not 0.0"),
        ({"e2e_s": math.nan}, "e2e_s must be a number above 0 (seconds); not nan"),
        ({"ttft_s": 1.0, "clock": "wall"}, "clock must be one of wire, seen, handled; not wall"),
        ({"ttft_s": 1.0, "clock": "handled"}, "no ok request of this run has TTFT on the handled clock; leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], sentence: str, example_run: Run) -> None:
    with pytest.raises(UsageError) as refused:
        goodput(example_run, **asked)
    assert sentence in str(refused.value)


def test_it_shows_itself(example_run: Run) -> None:
    found = goodput(example_run, ttft_s=0.2, tpot_s=0.02)
    for shown in (repr(found), found._repr_html_()):
        assert "TTFT ≤ 200.0 ms" in shown and "TPOT ≤ 20.0 ms" in shown and "of 200 requests" in shown
        assert "failed wrongly" in shown


limit = st.one_of(st.none(), st.floats(1e-4, 0.2))


@given(limits=st.tuples(limit, limit, limit, st.floats(1e-4, 0.2)), more=st.floats(1.0, 10.0))
@seeded
def test_a_wider_limit_never_loses_a_request(limits: tuple[float | None, ...], more: float) -> None:
    run = one_token_run()
    asked = {m: limit_s for m, limit_s in zip(METRICS, limits, strict=True) if limit_s is not None}
    for clock in ("wire", "seen", "handled"):
        tight = meets(run, asked, clock)
        each = [meets(run, {m: limit_s}, clock) for m, limit_s in asked.items()]
        assert (tight == np.all([np.ones(12, bool), *each], axis=0)).all()
        assert (tight <= meets(run, {m: more * limit_s for m, limit_s in asked.items()}, clock)).all()


# the interval


@pytest.mark.parametrize(("rho", "n", "share"), [(0.5, 4000, 0.9), (0.8, 20_000, 0.9), (0.8, 20_000, 0.5)])
def test_the_interval_covers_the_share_of_a_queue_that_a_formula_knows(rho: float, n: int, share: float) -> None:
    """P(W ≤ t) = 1 − ρ exp(−(1 − ρ) t) in an M/M/1 queue of service rate 1."""
    limit, seeds, hits, naive = math.log(rho / (1 - share)) / (1 - rho), 150, 0, 0
    for seed in range(seeds):
        waits, at_s = lindley_waits(rho, n, np.random.default_rng(seed))
        met = waits <= limit
        true = 1 - rho * math.exp(-(1 - rho) * (math.floor(20 * limit) / 20 + 0.025))  # waits are rounded
        (low, high), why = share_interval(met, at_s, np.ptp(at_s) / 40.5)
        assert why == ""
        hits += low <= true <= high
        naive += abs(met.mean() - true) <= 1.96 * math.sqrt(share * (1 - share) / n)
    assert hits / seeds >= 0.88  # 95 % is aimed at; 150 seeds tell it to 1.8 %, forty blocks are worth some less
    assert naive / seeds <= 0.7


def test_independent_requests_are_worth_their_number() -> None:
    rng = np.random.default_rng(2)
    covered, widths = 0, []
    for _ in range(200):
        met = rng.random(2000) < 0.98
        (low, high), _ = share_interval(met, np.arange(2000.0), 40.0)
        covered += low <= 0.98 <= high
        widths.append(high - low)
    assert covered >= 178  # 190 expected, 3.1 a standard error; fifty blocks tell a variance to a fifth
    assert np.median(widths) == pytest.approx(2 * 1.96 * math.sqrt(0.98 * 0.02 / 2000), rel=0.25)


def test_a_run_in_which_all_meet_the_limits_is_worth_its_blocks() -> None:
    (low, high), _ = share_interval(np.ones(1000, bool), np.arange(1000.0), 999 / 50)
    z2 = 1.959964**2
    assert (low, high) == (pytest.approx(50 / (50 + z2), rel=1e-5), 1.0)
    (low, high), _ = share_interval(np.zeros(1000, bool), np.arange(1000.0), 999 / 50)
    assert (low, high) == (0.0, pytest.approx(z2 / (50 + z2), rel=1e-5))


def test_a_short_run_has_no_interval_and_says_so() -> None:
    found = goodput(make_run(), ttft_s=1.0)
    assert math.isnan(found.share_lo) and math.isnan(found.rate_hi_per_s)
    assert any(note.startswith("too short for an interval") for note in found.notes)
    long = goodput(make_run(600), ttft_s=1.0)
    assert 0.8 < long.share_lo < long.share == long.share_hi == 1.0
    assert long.rate_lo_per_s == pytest.approx(long.share_lo * 10.0)
