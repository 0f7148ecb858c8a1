"""Summaries of known samples, and intervals held to how often they cover a truth that a formula knows."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.errors import UsageError
from llmprofile.latency import CLOCKS, SUFFIX, derive_latencies
from llmprofile.metrics import (
    STATISTICS,
    block_intervals,
    describe,
    inter_token_s,
    rates,
    run_clock,
    summarise,
    summary,
)
from llmprofile.records import EVENTS, REQUESTS, Run, to_frame
from llmprofile.units import MISSING_NS

seeded = settings(derandomize=True, deadline=None)

MS = 1_000_000
Floats = Any

# samples


def test_describe_of_a_known_sample() -> None:
    values = np.arange(1.0, 1001.0)[::-1]
    row = describe(values, np.arange(1000.0), block_s=200.0)
    assert row["n"] == 1000
    figures = {name: row[name] for name in STATISTICS}
    assert figures == pytest.approx({"mean": 500.5, "p50": 500.5, "p90": 900.1, "p99": 990.01})
    assert row["note"] == "too short for an interval, which takes values in 20 blocks of 200 s"
    assert all(row[f"{name}_{end}"] is None for name in STATISTICS for end in ("lo", "hi"))


@pytest.mark.parametrize(
    ("n", "known", "note"),
    [
        (1, {"mean"}, "p50 needs 2 values; p90 needs 10 values; p99 needs 100 values"),
        (9, {"mean", "p50"}, "p90 needs 10 values; p99 needs 100 values"),
        (10, {"mean", "p50", "p90"}, "p99 needs 100 values"),
        (99, {"mean", "p50", "p90"}, "p99 needs 100 values"),
        (100, {"mean", "p50", "p90", "p99"}, ""),
    ],
)
def test_a_percentile_that_the_sample_cannot_support_is_left_out_and_said(n: int, known: set[str], note: str) -> None:
    row = describe(np.ones(n), np.arange(n) * 10.0, block_s=1.0)
    assert {name for name in STATISTICS if row[name] is not None} == known
    assert row["note"].startswith(note)
    assert all((row[f"{name}_lo"] is None) == (row[name] is None) for name in STATISTICS) or n < 20


def test_no_values_have_no_figures() -> None:
    row = describe(np.zeros(0), np.zeros(0), block_s=1.0)
    assert row["n"] == 0
    assert row["note"] == "no values"
    assert all(value is None for name, value in row.items() if name not in ("n", "note"))


# intervals


def lindley_waits(rho: float, n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Waits in an M/M/1 queue with service rate 1, and when they began; its first 1000 are left out.

    Waits are rounded to a twentieth of a service, far below an interval's width: fewer bins are quicker.
    """
    gaps, services = rng.exponential(1 / rho, n + 1000), rng.exponential(1.0, n + 1000)
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    return np.rint(20 * (walk - np.minimum.accumulate(walk)))[1000:] / 20, np.cumsum(gaps)[1000:]


def true_waits(rho: float) -> dict[str, float]:
    """P(W > t) = ρ exp(−(1 − ρ) t): its mean and 90th percentile."""
    return {"mean": rho / (1 - rho), "p90": math.log(rho / 0.1) / (1 - rho)}


def coverage(rho: float, n: int, blocks: int) -> dict[str, float]:
    """How often intervals from `blocks` blocks, and those of an independent resampling of the mean, cover the truth."""
    truth, seeds = true_waits(rho), 200
    hits = dict.fromkeys([*truth, "independent"], 0)
    for seed in range(seeds):
        waits, at_s = lindley_waits(rho, n, np.random.default_rng(seed))
        intervals, _ = block_intervals(waits, at_s, np.ptp(at_s) / (blocks + 0.5))
        for name, value in truth.items():
            low, high = intervals[name]
            assert low is not None
            assert high is not None
            hits[name] += low <= value <= high
        # what a bootstrap of single values tends to, as its resamples grow in number
        half = 1.96 * waits.std() / math.sqrt(n)
        hits["independent"] += abs(waits.mean() - truth["mean"]) <= half
    return {name: count / seeds for name, count in hits.items()}


@pytest.mark.parametrize(("rho", "n"), [(0.5, 2500), (0.8, 20_000)])
def test_intervals_cover_the_truth_of_a_queue_where_independent_ones_do_not(rho: float, n: int) -> None:
    covered = coverage(rho, n, blocks=40)
    # 95 % is what they aim at; 200 seeds tell it to 1.5 %, forty blocks are worth some percent less
    assert 0.88 <= covered["mean"] <= 0.99
    assert 0.88 <= covered["p90"] <= 0.99
    assert covered["independent"] <= 0.55


def test_intervals_of_independent_values_are_as_wide_as_the_standard_error() -> None:
    rng = np.random.default_rng(3)
    values, at_s = rng.exponential(1.0, 20_000), np.sort(rng.uniform(0, 1000, 20_000))
    intervals, why = block_intervals(values, at_s, block_s=5.0)
    assert why == ""
    widths = {name: high - low for name, (low, high) in intervals.items()}  # type: ignore[operator]
    z = 2 * 1.96 / math.sqrt(20_000)
    for name, expected in {"mean": z, "p50": z, "p90": z * 3.0, "p99": z * 9.95}.items():
        # √(q (1 − q)) / density for a quantile; the spread of 500 resamples' own quantiles is some 6 %
        assert widths[name] == pytest.approx(expected, rel=0.3), name


def test_more_values_than_bins_lose_nothing_that_shows() -> None:
    rng = np.random.default_rng(4)
    at_s = np.arange(50_000) / 100
    values = rng.lognormal(0, 1, 50_000)
    fine, _ = block_intervals(values, at_s, 5.0)
    coarse, _ = block_intervals(np.round(values, 2), at_s, 5.0)  # some 1500 different values: exact
    for name in STATISTICS:
        assert fine[name] == pytest.approx(coarse[name], abs=0.02 if name != "p99" else 0.05)


def test_values_of_two_kinds_keep_their_kind() -> None:
    values = (np.arange(1000) % 10 < 7).astype(float)  # seven tenths are 1
    intervals, _ = block_intervals(values, np.arange(1000.0), 20.0)
    assert {name: intervals[name] for name in ("p50", "p90", "p99")} == dict.fromkeys(("p50", "p90", "p99"), (1.0, 1.0))
    low, high = block_intervals(1 - values, np.arange(1000.0), 20.0)[0]["p50"]
    assert (low, high) == (0.0, 0.0)


samples = st.integers(0, 2**32).map(lambda seed: np.random.default_rng(seed))


@given(rng=samples, scale=st.floats(1e-6, 1e6), shift=st.floats(-1e3, 1e3))
@settings(seeded, max_examples=25)
def test_intervals_follow_scale_and_shift_of_values_and_of_time(rng: Any, scale: float, shift: float) -> None:
    values, at_s = rng.exponential(1.0, 300), np.sort(rng.uniform(0, 100, 300))
    plain, _ = block_intervals(values, at_s, 4.0)
    moved, _ = block_intervals(values * scale + shift * scale, at_s, 4.0)
    for name in STATISTICS:
        assert moved[name] == pytest.approx([(end + shift) * scale for end in plain[name]], rel=1e-9, abs=1e-9 * scale)
    other_time, _ = block_intervals(values, at_s * 8 + 1024, 32.0)  # powers of two: no rounding
    assert other_time == plain


@given(rng=samples)
@settings(seeded, max_examples=20)
def test_intervals_repeat_lie_in_order_and_within_the_sample(rng: Any) -> None:
    values, at_s = rng.exponential(1.0, 200), np.sort(rng.uniform(0, 30, 200))
    intervals, why = block_intervals(values, at_s, 1.0)
    assert why == ""
    assert block_intervals(values, at_s, 1.0)[0] == intervals
    order = rng.permutation(200)
    again = block_intervals(values[order], at_s[order], 1.0)[0]
    for name in STATISTICS:
        assert again[name] == pytest.approx(intervals[name], rel=1e-12)
        low, high = intervals[name]
        assert values.min() <= low <= high <= values.max()


def test_a_wider_level_gives_a_wider_interval() -> None:
    rng = np.random.default_rng(5)
    values, at_s = rng.exponential(1.0, 2000), np.arange(2000.0)
    (low, high), (lower, higher) = (block_intervals(values, at_s, 20.0, level)[0]["mean"] for level in (0.8, 0.99))
    assert lower < low < high < higher  # type: ignore[operator]


@pytest.mark.parametrize("n", [2, 3, 15, 1000])
def test_values_in_fewer_than_twenty_blocks_have_no_interval(n: int) -> None:
    # a long silence does not make blocks of two bursts
    at_s = np.concatenate([np.zeros(n - 1), [1000.0]])
    intervals, why = block_intervals(np.ones(n), at_s, 1.0)
    assert set(intervals.values()) == {(None, None)}
    assert why == "too short for an interval, which takes values in 20 blocks of 1 s"


def test_rare_values_have_an_interval_that_is_a_number() -> None:
    rng = np.random.default_rng(6)
    for _ in range(3):
        at_s = np.arange(21) * 50.0  # a value every fifty blocks
        intervals, why = block_intervals(rng.exponential(1.0, 21), at_s, 1.0)
        assert why == ""
        assert not any(math.isnan(end) for ends in intervals.values() for end in ends if end is not None)


# a run, made by hand


def stamp_columns(n: int) -> dict[str, Any]:
    """`n` requests at 10/s, 20 ms to the first token, then 10 ms a token; seen 1 ms, handled 3 ms after the wire."""
    due_ns = 10**12 + np.arange(n) * 100 * MS
    stamps = {f"{name}_ns": due_ns + k * MS for name, k in {"due": 0, "begun": 2, "sent": 3, "sent_last": 4}.items()}
    for clock, after_ns in zip(CLOCKS, (0, MS, 3 * MS), strict=True):
        for token, at_ns in (("first", 20 * MS), ("content", 20 * MS), ("last", 50 * MS)):
            stamps[f"{token}_{clock}_ns"] = stamps["sent_ns"] + at_ns + after_ns
    return stamps


def make_run(n: int = 12, client: str = "stamped", failed: tuple[int, ...] = (), **changes: Any) -> Run:
    """A run of `n` requests of four tokens, an event each; `changes` replace columns of the request table."""
    stamps = stamp_columns(n) | {k: v for k, v in changes.items() if k.endswith("_ns")}
    four = np.full(n, 4)
    columns: dict[str, Any] = {k: pa.array(v, mask=v == MISSING_NS) for k, v in stamps.items() if k in REQUESTS.names}
    columns |= {k: pa.array(v) for k, v in derive_latencies(stamps, four, four).items()}
    outcomes = ["http_error" if k in failed else "ok" for k in range(n)]
    columns |= {"worker": pa.array(np.zeros(n, np.int64))}
    columns |= {"request_id": pa.array(np.arange(n)), "output_tokens": pa.array(four), "outcome": pa.array(outcomes)}
    columns |= {k: pa.array(v) for k, v in changes.items() if k not in stamps}
    table = pa.table([columns.get(f.name, pa.nulls(n, f.type)) for f in REQUESTS], REQUESTS)
    meta = {"asked": {"client": client}}
    return Run(None, meta, to_frame(table), {"events": events_of(stamps, n)})


def events_of(stamps: dict[str, Any], n: int) -> pd.DataFrame:
    columns: dict[str, Any] = {"request_id": np.repeat(np.arange(n), 4), "tokens": np.ones(4 * n, np.int64)}
    for clock in CLOCKS:
        first_ns = np.repeat(stamps[f"first_{clock}_ns"], 4)
        at_ns = np.where(first_ns == MISSING_NS, MISSING_NS, first_ns + np.tile(np.arange(4), n) * 10 * MS)
        columns[f"{clock}_ns"] = pa.array(at_ns, mask=at_ns == MISSING_NS)
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(4 * n, f.type) for f in EVENTS]
    return to_frame(pa.table(arrays, EVENTS))


MISSING = np.full(12, MISSING_NS)
UNSTAMPED = {f"{token}_wire_ns": MISSING for token in ("first", "content", "last")}


@pytest.mark.parametrize(
    ("clock", "ttft_s", "e2e_s"), [("wire", 0.020, 0.050), ("seen", 0.022, 0.052), ("handled", 0.024, 0.054)]
)
def test_a_summary_on_each_clock(clock: str, ttft_s: float, e2e_s: float) -> None:
    table = summary(make_run(failed=(3, 5)), clock)
    assert table.index.name == f"{clock} clock"
    assert table["n"].to_dict() == dict.fromkeys(table.index, 10) | {"itl": 30, "connect_s": 0}
    means = {
        "ttft_s": ttft_s,
        "first_content_s": ttft_s,
        "e2e_s": e2e_s,
        "tpot_s": 0.01,
        "ntpot_s": e2e_s / 4,
        "itl": 0.01,
    }
    due_s = {"wire": 0.003, "seen": 0.002, "handled": 0.002}[clock]
    means |= {"ttft_due_s": ttft_s + due_s, "e2e_due_s": e2e_s + due_s, "lateness_s": 0.003}
    for name, mean_s in means.items():
        assert table.loc[name, ["mean", "p50", "p90"]].tolist() == pytest.approx([mean_s] * 3), name
    assert table["p99"].isna().all()
    assert "p99 needs 100 values" in table.loc["ttft_s", "note"]
    assert table.loc["connect_s", "note"] == "no values"
    assert np.isnan(table.loc["connect_s", "mean"])


def test_only_ok_requests_enter_a_summary() -> None:
    slow = stamp_columns(12)
    for name in ("first_wire_ns", "last_wire_ns"):
        slow[name] = slow[name] + np.where(np.arange(12) == 7, 10**10, 0)
    run = make_run(failed=(7,), **{k: slow[k] for k in ("first_wire_ns", "last_wire_ns")})
    assert summary(run).loc[["ttft_s", "e2e_s", "itl"], "mean"].tolist() == pytest.approx([0.02, 0.05, 0.01])
    assert set(inter_token_s(run, "wire")["request_id"]) == set(range(12)) - {7}


def test_a_run_is_read_on_the_clock_of_its_client() -> None:
    assert run_clock(make_run()) == "wire"
    assert run_clock(make_run(client="conventional")) == "handled"
    blind = make_run(**UNSTAMPED)
    assert run_clock(blind) == "seen"
    assert summary(blind).index.name == "seen clock"
    assert summary(blind).loc["ttft_s", "mean"] == pytest.approx(0.022)
    assert summary(blind, "wire").loc["ttft_s", "note"] == "no values"
    ends_alone = {name: MISSING for name in UNSTAMPED if not name.startswith("last")}
    assert run_clock(make_run(**ends_alone)) == "wire"  # not a stream


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(UsageError, match="clock must be one of wire, seen, handled; not wall"):
        summary(make_run(), "wall")


def test_a_run_without_an_ok_request_is_summarised_as_nothing() -> None:
    table = summary(make_run(failed=tuple(range(12))))
    assert (table["n"] == 0).all()
    assert (table["note"] == "no values").all()


def test_tokens_that_events_do_not_account_for_are_noted() -> None:
    assert "tokens than events" not in summary(make_run()).loc["itl", "note"]
    more = np.array([4, 7, 4, 9, 4, 4, 4, 4, 4, 4, 4, 4])
    note = summary(make_run(output_tokens=more, failed=(3,))).loc["itl", "note"]
    assert "1 request has more or fewer tokens than events" in note


def test_a_summary_as_json_has_null_for_what_is_missing() -> None:
    rows = summarise(make_run())
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert {row["clock"] for row in rows} == {"wire"}


def test_a_long_run_has_intervals_around_its_figures() -> None:
    rng = np.random.default_rng(7)
    stamps = stamp_columns(600)
    jitter_ns = rng.integers(0, 5 * MS, 600)
    run = make_run(600, **{name: stamps[name] + jitter_ns for name in ("first_wire_ns", "last_wire_ns")})
    table = summary(run)
    ttft = table.loc["ttft_s"]
    assert ttft["note"] == ""
    for name in STATISTICS:
        assert ttft[f"{name}_lo"] <= ttft[name] <= ttft[f"{name}_hi"]
    error_s = jitter_ns.std() / 1e9 / math.sqrt(600)
    assert ttft["mean_hi"] - ttft["mean_lo"] == pytest.approx(2 * 1.96 * error_s, rel=0.3)


def test_a_run_of_few_rare_requests_can_be_written_down() -> None:
    due_ns = 10**12 + np.arange(3) * 10**10  # one every ten seconds, over in 50 ms
    moved = {name: at_ns - stamp_columns(3)["due_ns"] + due_ns for name, at_ns in stamp_columns(3).items()}
    json.dumps(summarise(make_run(3, **moved)), allow_nan=False)


def test_gaps_of_an_unstamped_read_are_left_out() -> None:
    run = make_run(2)
    run.events.loc[1, "wire_ns"] = pd.NA
    assert len(inter_token_s(run, "wire")) == 4
    assert len(inter_token_s(run, "seen")) == 6


# rates


def test_a_rate_is_gaps_over_the_span_of_the_sends() -> None:
    found = rates(make_run(12), 10.0, 9.9)
    assert found == pytest.approx(
        {
            "asked_per_s": 10.0,
            "drawn_per_s": 9.9,
            "achieved_per_s": 10.0,
            # 48 tokens from the first send to the last token: eleven gaps of 100 ms, and 51 ms
            "tokens_per_s": 48 / 1.151,
        }
    )


def test_what_failed_or_was_never_sent_counts_where_it_belongs() -> None:
    stamps = stamp_columns(12)
    sent_ns = np.where(np.arange(12) >= 10, MISSING_NS, stamps["sent_ns"])
    found = rates(make_run(12, failed=(9, 10, 11), sent_ns=sent_ns), None, math.nan)
    assert found == pytest.approx(
        {"asked_per_s": None, "drawn_per_s": None, "achieved_per_s": 10.0, "tokens_per_s": 36 / 0.851}
    )


@pytest.mark.parametrize("sends", [0, 1, 2])
def test_rates_of_no_span_are_missing(sends: int) -> None:
    sent_ns = np.where(np.arange(12) < sends, 10**12, MISSING_NS)
    assert rates(make_run(sent_ns=sent_ns), 10.0, 10.0)["achieved_per_s"] is None


def test_every_clock_has_its_columns() -> None:
    columns = make_run().requests.columns
    assert {f"ttft{suffix}" for suffix in SUFFIX.values()} <= set(columns)
