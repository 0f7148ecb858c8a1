"""Every recorded stream, cut at every byte: events and text never depend on it, times do exactly as defined."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest

from cuts import CASES, FRAMINGS, check_cuts, parse_cut, raw_response, segments

BIG = 20_000


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_stream_cut_at_every_byte(name: str, framing: str, tmp_path: Path) -> None:
    case = CASES[name]
    raw = raw_response(segments(case)[1], case["headers"], framing, case["status"])
    cuts = random.Random(6).sample(range(1, len(raw.data)), 200) if len(raw.data) > BIG else None
    row, events = check_cuts(raw, tmp_path, cuts)
    expect = case["expect"]
    assert row["outcome"] == expect["outcome"], row["error"]
    assert (0 if pd.isna(row["output_tokens"]) else row["output_tokens"]) == expect["tokens"]
    assert "text" not in expect or row["answer"] == expect["text"]
    assert len(events) <= max(1, expect["tokens"]) or expect["outcome"] != "ok"


def test_the_check_sees_a_time_that_is_off(tmp_path: Path) -> None:
    """Told that the body begins a byte later than it does, the check must find a cut whose time is wrong."""
    case = CASES["plain"]
    raw = raw_response(segments(case)[1], case["headers"])
    raw.raw_starts.setflags(write=True)
    raw.raw_starts[:] += 1
    with pytest.raises(AssertionError):
        check_cuts(raw, tmp_path)


def test_a_first_read_without_a_byte_of_the_body(tmp_path: Path) -> None:
    case = CASES["plain"]
    raw = raw_response(segments(case)[1], case["headers"])
    requests, events = parse_cut(raw, [raw.head], tmp_path)
    assert events["read"].eq(1).all() and requests["headers_ns"].tolist() == [200]
