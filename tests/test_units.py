"""Nanoseconds to seconds and to labels: exact where it can be, missing stays missing, no number is shown wrong."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.units import MISSING_NS, elapsed_s, ns_to_s, s_to_ns, show_rate, show_time

seeded = settings(derandomize=True, deadline=None)

stamps = st.integers(-(2**61), 2**61)


@seeded
@given(duration_ns=st.integers(-(2**50), 2**50))
def test_nanoseconds_survive_seconds(duration_ns: int) -> None:
    assert s_to_ns(ns_to_s(duration_ns)) == duration_ns


def test_ns_to_s_takes_arrays() -> None:
    assert ns_to_s(np.array([0, 1_500_000])).tolist() == [0.0, 0.0015]


@seeded
@given(pairs=st.lists(st.tuples(stamps | st.just(MISSING_NS), stamps | st.just(MISSING_NS)), min_size=1))
def test_elapsed_is_the_difference_or_missing(pairs: list[tuple[int, int]]) -> None:
    later_ns, earlier_ns = np.array(pairs, np.int64).T
    for got_s, (later, earlier) in zip(elapsed_s(later_ns, earlier_ns), pairs, strict=True):
        if MISSING_NS in (later, earlier):
            assert math.isnan(got_s)
        else:
            assert got_s == pytest.approx((later - earlier) / 10**9, rel=1e-15)


def test_elapsed_keeps_nanoseconds_of_late_stamps() -> None:
    late_ns = 2**60  # a float64 of this many nanoseconds would be off by 128
    assert elapsed_s(np.array([late_ns + 1]), np.array([late_ns])).tolist() == [1e-9]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (123.456, "123.5 s"),
        (1.5, "1.50 s"),
        (0.25, "250.0 ms"),
        (0.0123, "12.3 ms"),
        (0.00123, "1.23 ms"),
        (0.00012, "0.12 ms"),
        (8.12e-6, "8.1 µs"),
        (-0.0005, "-0.50 ms"),
        (math.nan, "–"),
    ],
)
def test_show_time(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown


SIZES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


@seeded
@given(seconds=st.floats(1e-6, 1e5) | st.floats(-1e5, -1e-6))
def test_a_shown_time_is_within_half_of_its_last_digit(seconds: float) -> None:
    number, unit = show_time(seconds).split()
    last_digit = 10.0 ** -len(number.partition(".")[2])
    assert abs(float(number) * SIZES[unit] - seconds) <= 0.5001 * last_digit * SIZES[unit] + 1e-12 * abs(seconds)
    assert last_digit * SIZES[unit] <= 0.12 * abs(seconds)  # and that is never more than an eighth of it


@pytest.mark.parametrize(
    ("per_s", "shown"),
    [
        (400.0, "400/s"),
        (0.5, "0.5/s"),
        (4000.4, "4,000/s"),
        (9999.7, "10,000/s"),
        (20_000.0, "20,000/s"),
        (0.0, "0/s"),
        (math.nan, "–"),
    ],
)
def test_show_rate(per_s: float, shown: str) -> None:
    assert show_rate(per_s) == shown


@seeded
@given(per_s=st.floats(0.001, 1e9))
def test_a_shown_rate_has_four_right_digits_and_no_exponent(per_s: float) -> None:
    shown = show_rate(per_s)
    assert re.fullmatch(r"[\d,]+(\.\d+)?/s", shown)
    assert float(shown[:-2].replace(",", "")) == pytest.approx(per_s, rel=6e-4)
