"""Latencies are the formulas of the table in the design, worked by hand and held to the identities between them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.latency import CLOCKS, LATENCIES, SUFFIX, derive_latencies, is_bounded, token_gaps
from llmprofile.units import MISSING_NS

seeded = settings(derandomize=True, deadline=None)

MS = 1_000_000
STAMPS = ["due", "begun", "sent", "sent_last"] + [
    f"{token}_{clock}" for token in ("first", "content", "reasoning", "last") for clock in CLOCKS
]
COLUMNS = {f"{name}{SUFFIX[clock]}" for name in (*LATENCIES, "first_reasoning") for clock in CLOCKS}
COLUMNS |= {"lateness_s", "upload_s"}


def derived(streamed: int, n: int, **at_ms: float) -> dict[str, float]:
    """The latencies of one request whose stamps are given in milliseconds; those not given are missing."""
    stamps = {f"{name}_ns": np.array([MISSING_NS]) for name in STAMPS}
    stamps |= {f"{name}_ns": np.array([round(ms * MS)]) for name, ms in at_ms.items()}
    found = derive_latencies(stamps, np.array([streamed]), np.array([n]))
    return {name: float(value[0]) for name, value in found.items()}


def known(latencies: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in latencies.items() if not math.isnan(value)}


WHOLE = {
    "due": 100,
    "begun": 103,
    "sent": 104,
    "sent_last": 109,
    "first_wire": 154,
    "first_seen": 155,
    "first_handled": 157,
    "reasoning_wire": 154,
    "reasoning_seen": 155,
    "reasoning_handled": 157,
    "content_wire": 174,
    "content_seen": 176,
    "content_handled": 179,
    "last_wire": 254,
    "last_seen": 258,
    "last_handled": 265,
}


def test_a_request_that_has_everything() -> None:
    # 11 tokens streamed, 14 counted by usage: three of reasoning were never shown
    assert derived(11, 14, **WHOLE) == pytest.approx(
        {
            "ttft_s": 0.050,
            "first_content_s": 0.070,
            "first_reasoning_s": 0.050,
            "e2e_s": 0.150,
            "tpot_s": 0.010,
            "ntpot_s": 0.150 / 14,
            "ttft_due_s": 0.054,
            "e2e_due_s": 0.154,
            "lateness_s": 0.004,
            "upload_s": 0.005,
            "ttft_seen_s": 0.052,
            "first_content_seen_s": 0.073,
            "first_reasoning_seen_s": 0.052,
            "e2e_seen_s": 0.155,
            "tpot_seen_s": 0.0103,
            "ntpot_seen_s": 0.155 / 14,
            "ttft_due_seen_s": 0.055,
            "e2e_due_seen_s": 0.158,
            "ttft_handled_s": 0.054,
            "first_content_handled_s": 0.076,
            "first_reasoning_handled_s": 0.054,
            "e2e_handled_s": 0.162,
            "tpot_handled_s": 0.0108,
            "ntpot_handled_s": 0.162 / 14,
            "ttft_due_handled_s": 0.057,
            "e2e_due_handled_s": 0.165,
        },
        rel=1e-12,
    )


def test_the_columns_are_those_of_the_table() -> None:
    assert set(derived(1, 1)) == COLUMNS


def test_one_token_has_no_time_per_output_token() -> None:
    latencies = derived(1, 1, **(WHOLE | {"last_wire": 154, "last_seen": 155, "last_handled": 157}))
    assert {name for name in COLUMNS if "tpot" in name and "ntpot" not in name} == COLUMNS - set(known(latencies))
    assert latencies["ttft_s"] == latencies["e2e_s"] == latencies["ntpot_s"] == 0.05


def test_a_request_that_was_sent_and_never_answered() -> None:
    sent = {name: WHOLE[name] for name in ("due", "begun", "sent", "sent_last")}
    assert known(derived(0, -1, **sent)) == {"lateness_s": 0.004, "upload_s": 0.005}


def test_a_request_that_was_never_sent_has_nothing() -> None:
    assert known(derived(-1, -1, due=100)) == {}


def test_an_answer_in_one_body_ends_with_its_last_byte_and_has_no_first_token() -> None:
    ends = {"last_wire": 254, "last_seen": 258}
    sent = {name: WHOLE[name] for name in ("due", "begun", "sent", "sent_last")}
    assert known(derived(-1, 15, **sent, **ends)) == pytest.approx(
        {
            "e2e_s": 0.150,
            "ntpot_s": 0.010,
            "e2e_due_s": 0.154,
            "lateness_s": 0.004,
            "upload_s": 0.005,
            "e2e_seen_s": 0.155,
            "ntpot_seen_s": 0.155 / 15,
            "e2e_due_seen_s": 0.158,
        }
    )


@pytest.mark.parametrize("n", [0, -1])
def test_no_output_tokens_or_an_unknown_number_leave_ntpot_out(n: int) -> None:
    latencies = derived(11, n, **WHOLE)
    assert COLUMNS - set(known(latencies)) == {"ntpot_s", "ntpot_seen_s", "ntpot_handled_s"}


def test_without_kernel_stamps_only_the_wire_clock_is_blind() -> None:
    unstamped = {name: at for name, at in WHOLE.items() if "wire" not in name}
    seen = known(derived(11, 14, **unstamped))
    whole = known(derived(11, 14, **WHOLE))
    assert seen == {n: v for n, v in whole.items() if n.endswith(("_seen_s", "_handled_s", "lateness_s", "upload_s"))}


def test_the_stamped_client_has_no_handled_clock() -> None:
    stamped = {name: at for name, at in WHOLE.items() if "handled" not in name}
    missing = COLUMNS - set(known(derived(11, 14, **stamped)))
    assert missing == {f"{name}_handled_s" for name in (*LATENCIES, "first_reasoning")}


def test_without_a_due_time_the_rest_is_known() -> None:
    missing = COLUMNS - set(known(derived(11, 14, **{n: at for n, at in WHOLE.items() if n != "due"})))
    assert missing == {"lateness_s"} | {f"{name}{SUFFIX[c]}" for name in ("ttft_due", "e2e_due") for c in CLOCKS}


def test_a_reasoning_answer_without_content_has_no_first_content() -> None:
    reasoning = {name: at for name, at in WHOLE.items() if "content" not in name}
    assert COLUMNS - set(known(derived(11, 14, **reasoning))) == {f"first_content{SUFFIX[c]}" for c in CLOCKS}


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], Any, Any]:
    """Requests whose stamps ascend: begun, sent, first and last token, seen after wire and handled after seen."""
    n = draw(st.integers(1, 10))
    base_ns = draw(st.integers(0, 2**61))
    gaps_ns = st.lists(st.integers(0, 10**12), min_size=n, max_size=n).map(np.array)
    stamps: dict[str, Any] = {}
    at_ns = np.full(n, base_ns, np.int64)
    for name in STAMPS:
        at_ns = at_ns + draw(gaps_ns)
        stamps[f"{name}_ns"] = at_ns
    streamed = draw(st.lists(st.integers(2, 5000), min_size=n, max_size=n).map(np.array))
    return stamps, streamed, streamed + draw(st.integers(0, 100))


@seeded
@given(case=requests())
def test_the_identities_hold_on_every_clock(case: tuple[dict[str, Any], Any, Any]) -> None:
    stamps, streamed, n = case
    found = derive_latencies(stamps, streamed, n)
    for clock, suffix in SUFFIX.items():
        ttft_s, tpot_s, e2e_s = (found[f"{name}{suffix}"] for name in ("ttft", "tpot", "e2e"))
        assert e2e_s == pytest.approx(ttft_s + tpot_s * (streamed - 1), rel=1e-12, abs=1e-9)
        assert e2e_s == pytest.approx(found[f"ntpot{suffix}"] * n, rel=1e-12)
        start_ns = stamps["sent_ns" if clock == "wire" else "begun_ns"]
        late_s = (start_ns - stamps["due_ns"]) / 1e9
        assert found[f"ttft_due{suffix}"] == pytest.approx(ttft_s + late_s, rel=1e-12, abs=1e-9)
        assert found[f"e2e_due{suffix}"] == pytest.approx(e2e_s + late_s, rel=1e-12, abs=1e-9)


@seeded
@given(case=requests())
def test_the_bias_is_the_sum_of_its_parts(case: tuple[dict[str, Any], Any, Any]) -> None:
    stamps, streamed, n = case
    found = derive_latencies(stamps, streamed, n)
    for latency, token in (("ttft", "first"), ("first_content", "content"), ("e2e", "last")):
        parts_ns = {
            "sending": stamps["sent_ns"] - stamps["begun_ns"],
            "waiting": stamps[f"{token}_seen_ns"] - stamps[f"{token}_wire_ns"],
            "handling": stamps[f"{token}_handled_ns"] - stamps[f"{token}_seen_ns"],
        }
        bias_s = found[f"{latency}_handled_s"] - found[f"{latency}_s"]
        # differences of float seconds: exact to the latencies' last bits
        assert bias_s == pytest.approx(sum(parts_ns.values()) / 1e9, rel=1e-12, abs=1e-10)


@seeded
@given(case=requests(), gone=st.sets(st.sampled_from(STAMPS), max_size=8))
def test_a_missing_stamp_makes_missing_figures_and_never_wrong_ones(case: Any, gone: set[str]) -> None:
    stamps, streamed, n = case
    whole = derive_latencies(stamps, streamed, n)
    without = {k: np.full_like(v, MISSING_NS) if k.removesuffix("_ns") in gone else v for k, v in stamps.items()}
    for name, value in derive_latencies(without, streamed, n).items():
        assert np.isnan(value).all() or (value == whole[name]).all()


# brackets


@pytest.mark.parametrize(
    ("width_ms", "latency_ms", "exact", "bounded"),
    [
        (0.09, 1, False, False),  # below 0.1 ms, whatever share of the latency
        (0.11, 1, False, True),
        (0.49, 50, False, False),  # below 1 %
        (0.51, 50, False, True),
        (100, 50, True, False),  # the last event of its read
        (100, math.nan, False, False),  # no latency to be bounded
    ],
)
def test_a_latency_is_bounded_when_its_bracket_is_wide(
    width_ms: float, latency_ms: float, exact: bool, bounded: bool
) -> None:
    wire_ns = np.array([10**15])
    lo_ns = wire_ns - round(width_ms * MS)
    assert is_bounded(wire_ns, lo_ns, np.array([exact]), np.array([latency_ms / 1e3])).tolist() == [bounded]


def test_a_latency_without_stamps_is_not_bounded() -> None:
    gone, there = np.array([MISSING_NS]), np.array([10**15])
    for wire_ns, lo_ns in ((gone, gone), (gone, there), (there, gone)):
        assert not is_bounded(wire_ns, lo_ns, np.array([False]), np.array([0.05])).any()


# gaps between tokens

events = st.lists(  # a request: its events as (gap to the one before, tokens)
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(1, 6)), min_size=1, max_size=8), max_size=6
)


@seeded
@given(streams=events)
def test_a_requests_gaps_sum_to_last_minus_first_and_are_one_fewer_than_tokens(streams: Any) -> None:
    ids = np.repeat(np.arange(len(streams)), [len(s) for s in streams]).astype(np.int64)
    flat = list(itertools.chain(*streams))
    tokens = np.array([t for _, t in flat], np.int64)
    at_ns = np.array([10**15 + gap for s in streams for gap in np.cumsum([g for g, _ in s])], np.int64)
    gaps_s, repeats = token_gaps(ids, at_ns, tokens)
    assert repeats.tolist() == tokens.tolist()
    owner = np.repeat(ids, repeats)
    for k, stream in enumerate(streams):
        own = gaps_s[owner == k]
        assert len(own) == sum(t for _, t in stream)
        assert math.isnan(own[0])
        assert not np.isnan(own[1:]).any()
        assert own[1 : stream[0][1]].tolist() == [0.0] * (stream[0][1] - 1)
        assert own[1:].sum() == pytest.approx(sum(g for g, _ in stream[1:]) / 1e9, rel=1e-12, abs=1e-12)


def test_an_events_gap_is_shared_over_its_tokens() -> None:
    ids, at_ns = np.array([3, 3, 3, 8]), np.array([0, 60 * MS, 70 * MS, 65 * MS])
    gaps_s, _ = token_gaps(ids, at_ns, np.array([1, 3, 1, 2]))
    assert gaps_s == pytest.approx([math.nan, 0.02, 0.02, 0.02, 0.01, math.nan, 0.0], nan_ok=True)


def test_an_unstamped_event_leaves_the_gaps_on_both_its_sides_out() -> None:
    at_ns = np.array([0, MISSING_NS, 20 * MS, 30 * MS])
    gaps_s, _ = token_gaps(np.zeros(4, np.int64), at_ns, np.array([1, 2, 1, 1]))
    assert gaps_s == pytest.approx([math.nan] * 4 + [0.01], nan_ok=True)


def test_no_events_have_no_gaps() -> None:
    none = np.zeros(0, np.int64)
    assert [len(a) for a in token_gaps(none, none, none)] == [0, 0]
