"""20,000 answers of the fuzz command, which checks a million (`tests/benchmarks/fuzz.py`)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

FUZZ: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / "benchmarks" / "fuzz.py"))
OUTCOMES = {"ok", "stream_error", "truncated", "http_error", "no head"}


@pytest.mark.parametrize("seed", range(4))
def test_no_crash_no_hang_no_count_that_depends_on_the_cuts(seed: int) -> None:
    outcomes = FUZZ["fuzz"](5_000, seed)
    assert sum(outcomes.values()) == 5_000
    assert set(outcomes) == OUTCOMES  # it has met all that can happen
    assert min(outcomes.values()) > 25


def test_every_recorded_answer_passes_unchanged() -> None:
    for raw in FUZZ["answers"]():
        for size in (1, 7, len(raw)):
            reads = [raw[i : i + size] for i in range(0, len(raw), size)]
            FUZZ["check"](raw, reads, True)


def test_the_check_sees_a_read_that_went_missing() -> None:
    raw = FUZZ["answers"]()[0]
    with pytest.raises(AssertionError):
        FUZZ["check"](raw, [raw[:300], raw[310:]], True)
