"""A wrong argument is refused in one sentence that says what is allowed, whatever its type."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.errors import LlmprofileError, UsageError, not_negative, one_of, positive, whole

seeded = settings(derandomize=True, deadline=None)

NOT_NUMBERS: list[Any] = [True, False, None, "3", b"3", [3], (), {}, 1j, np.array([1.0, 2.0]), np.bool_(True), object]


def sentence(call: Any, *args: Any) -> str:
    with pytest.raises(UsageError) as caught:
        call(*args)
    return str(caught.value)


def test_a_usage_error_is_ours_and_a_value_error() -> None:
    assert issubclass(UsageError, LlmprofileError)
    assert issubclass(UsageError, ValueError)


def test_one_of_names_what_is_allowed() -> None:
    assert one_of("client", "stamped", ("stamped", "conventional")) == "stamped"
    said = sentence(one_of, "client", "fast", ("stamped", "conventional"))
    assert said == "client must be one of stamped, conventional; not fast"


@seeded
@given(value=st.floats(min_value=0, allow_infinity=False) | st.integers(0, 10**30))
def test_not_negative_returns_a_float(value: float) -> None:
    found = not_negative("cv", value)
    assert type(found) is float
    assert found == float(value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1e-9, math.nan, math.inf, -1, 10**400])
def test_not_negative_refuses_the_rest(value: Any) -> None:
    assert sentence(not_negative, "cv", value, " (s)").startswith("cv must be a finite number of at least 0 (s); not ")


@seeded
@given(value=st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(1, 10**30))
def test_positive_returns_what_it_was_given(value: float) -> None:
    assert positive("rate_per_s", value) is value


@seeded
@given(value=st.floats(max_value=0) | st.just(math.nan) | st.just(math.inf) | st.integers(max_value=0))
def test_positive_refuses_every_other_number(value: float) -> None:
    assert sentence(positive, "rate_per_s", value).startswith("rate_per_s must be a number above 0; not ")


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_positive_refuses_what_is_no_number(value: Any) -> None:
    assert sentence(positive, "timeout_s", value, " (seconds)").startswith(
        "timeout_s must be a number above 0 (seconds); not "
    )


def test_positive_takes_the_numbers_of_numpy_and_fractions_but_none_that_is_too_large() -> None:
    for value in (np.float32(0.5), np.int64(3), Fraction(1, 3)):
        assert positive("rate_per_s", value) is value  # type: ignore[arg-type]
    for value in (10**400, np.float64("nan"), np.float32("inf"), Decimal("NaN")):
        assert "must be a number above 0" in sentence(positive, "rate_per_s", value)


@seeded
@given(least=st.integers(-5, 5), value=st.integers(-(10**18), 10**18))
def test_whole_takes_whole_numbers_from_the_least_on(least: int, value: int) -> None:
    if value >= least:
        assert whole("processes", value, least) == value
    else:
        said = sentence(whole, "processes", value, least)
        assert said == f"processes must be a whole number of at least {least}; not {value}"


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 1.0, math.nan, Fraction(3), np.array([1, 2]), np.array(3)])
def test_whole_refuses_what_is_no_whole_number(value: Any) -> None:
    assert sentence(whole, "n", value).startswith("n must be a whole number of at least 1; not ")


def test_whole_makes_a_plain_int_of_numpys() -> None:
    assert type(whole("n", np.int32(7))) is int  # type: ignore[arg-type]
