"""vLLM: chat and completions, whose tokens may lack text, and `metrics` when started to say them.

A token whose bytes are half a character has the text "", as has the one that ends an answer; the last token shares its
event with the finish reason. What is here was said by vLLM 0.32 with --enable-per-request-metrics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from cuts import EVENT_STREAM, check_cuts, events_of, raw_response
from harness import NAMES
from llmprofile.answers import read_stream, server_times_s
from replay import STEP_S, replayed

METRICS = {
    "time_to_first_token_ms": 18.0,
    "generation_time_ms": 42.0,
    "queue_time_ms": 0.05,
    "mean_itl_ms": 10.5,
    "tokens_per_second": 82.9,
}
ROLE = {"role": "assistant", "content": ""}


def chat(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
    return {"object": "chat.completion.chunk", "choices": [choice], **more}


def completion(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return {"object": "text_completion", "choices": [choice], **more}


def said(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 26, "total_tokens": 26 + tokens, "completion_tokens": tokens}}


def end(tokens: int) -> dict[str, Any]:
    return {"choices": [], "metrics": METRICS, **said(tokens)}


STREAMS = {
    "/v1/chat/completions": [chat(ROLE), chat({"content": ""}), chat({"content": "ab"}), chat({"content": ""}, "stop")],
    "/v1/completions": [completion(""), completion("ab"), completion("", "length")],
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_cut_at_every_byte(path: str, tmp_path: Path) -> None:
    row, events = check_cuts(raw_response(events_of(*STREAMS[path], end(3)), EVENT_STREAM), tmp_path)
    assert (row["outcome"], row["output_tokens"], row["answer"], len(events)) == ("ok", 3, "ab", 3)


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("path", STREAMS)
def test_the_last_token_has_no_text_and_a_time(path: str, client: str, tmp_path: Path) -> None:
    """Three tokens 20 ms apart: none of the latencies may stop at the second."""
    run = replayed(path, events_of(*STREAMS[path], end(3)), EVENT_STREAM, client, tmp_path)
    assert lp.token_mismatches(run).empty
    assert run.requests["tpot_s"].to_numpy() == pytest.approx([STEP_S] * 3, abs=STEP_S / 4)
    times = lp.timing_differences(run)
    assert times["server_ttft_s"].tolist() == [0.018] * 3 and times["server_generation_s"].tolist() == [0.042] * 3


def tokens_of(*events: dict[str, Any]) -> tuple[str, list[int], bool]:
    answer = read_stream(200, [(json.dumps(event).encode(), k) for k, event in enumerate(events)], True)
    return answer.outcome, answer.ends, answer.counts_known


def test_the_end_is_a_token_only_by_the_servers_count() -> None:
    two = completion("a"), completion("b")
    finish = completion("", "stop")
    assert tokens_of(*two, finish, end(3)) == ("ok", [0, 1, 2], True)
    assert tokens_of(*two, finish, end(2)) == ("ok", [0, 1], True)
    assert tokens_of(*two, finish, end(4)) == ("ok", [0, 1], False)
    assert tokens_of(*two, finish) == ("ok", [0, 1], False)
    # running totals say it of events that hold several
    running = completion("ab", **said(2)), completion("cd", **said(4))
    assert tokens_of(*running, finish | said(5)) == ("ok", [0, 1, 2], True)
    assert tokens_of(*running, finish | said(4)) == ("ok", [0, 1], True)


def test_an_answer_of_one_token_without_text() -> None:
    assert tokens_of(completion("", "length"), end(1)) == ("ok", [0], True)
    assert tokens_of(chat(ROLE), chat({"content": ""}, "stop"), end(1)) == ("ok", [1], True)
    assert tokens_of(completion("", "stop"))[0] == "truncated"


def test_the_names_of_its_times() -> None:
    assert server_times_s(METRICS) == (0.018, 0.042)
    assert read_stream(200, [(json.dumps(end(1)).encode(), 9)], True).timings == METRICS
