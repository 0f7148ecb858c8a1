"""llama.cpp's llama-server: completions and chat, with its `timings` beside the usage.

`prompt_ms` runs from when a slot took the request up to its first token, `predicted_ms` from there to its last.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cuts import EVENT_STREAM, check_cuts, events_of, raw_response
from llmprofile.answers import read_event, server_times_s

TIMINGS = {
    "cache_n": 0,
    "prompt_n": 7,
    "prompt_ms": 15.0,
    "prompt_per_token_ms": 2.142857,
    "prompt_per_second": 466.7,
    "predicted_n": 3,
    "predicted_ms": 40.0,
    "predicted_per_token_ms": None,  # as it writes what is no number
    "predicted_per_second": 75.0,
}


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"finish_reason": finish, "index": 0, "delta": delta}
    return {"choices": [choice], "object": "chat.completion.chunk", **more}


USAGE = {"completion_tokens": 3, "prompt_tokens": 7, "total_tokens": 10}
STREAM = [
    chunk({"role": "assistant", "content": None}),
    chunk({"content": "a"}),
    chunk({"content": " b"}),
    chunk({"content": " c"}),
    chunk({}, "length"),
    {"choices": [], "usage": USAGE, "timings": TIMINGS},
]


def test_timings_without_a_number_for_everything() -> None:
    timings = read_event(json.dumps(STREAM[-1]).encode()).timings
    assert timings == {name: value for name, value in TIMINGS.items() if value is not None}
    assert server_times_s(timings) == (0.015, 0.04)
    assert server_times_s({"ttft_ms": 2.5}) == pytest.approx((0.0025, math.nan), nan_ok=True)
    assert all(map(math.isnan, server_times_s({"predicted_n": 3})))
    assert all(map(math.isnan, server_times_s(None)))


def test_a_stream_cut_at_every_byte(tmp_path: Path) -> None:
    row, events = check_cuts(raw_response(events_of(*STREAM), EVENT_STREAM), tmp_path)
    assert (row["outcome"], row["output_tokens"], len(events)) == ("ok", 3, 3)
