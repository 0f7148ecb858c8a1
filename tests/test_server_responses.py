"""OpenAI's responses (`/v1/responses`): typed events, of which the deltas are tokens, and a usage in the last one.

The stream ends with `response.completed`, `response.incomplete` or `response.failed`, some servers add [DONE].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from cuts import EVENT_STREAM, FRAMINGS, check_cuts, events_of, raw_response
from harness import NAMES
from llmprofile.answers import Usage, read_body, read_event
from llmprofile.api import parse_target, request_body
from replay import replayed

URL = "http://h/v1/responses"


def typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": 1, **fields}


def usage(output: int, reasoning: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": 7,
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": 7 + output,
    }


def ended(kind: str, **fields: Any) -> dict[str, Any]:
    return typed(kind, response={"object": "response", "error": None, "output": [], **fields})


EVENTS = [
    (ended("created", status="in_progress", usage=None), "none", "", False),
    (ended("in_progress", usage=None), "none", "", False),
    (typed("output_item.added", item={"type": "message", "content": []}), "none", "", False),
    (typed("content_part.added", part={"type": "output_text", "text": ""}), "none", "", False),
    (typed("output_text.delta", delta=" a"), "content", " a", False),
    (typed("output_text.delta", delta=""), "content", "", False),
    (typed("output_text.delta", delta=None), "none", "", False),
    (typed("output_text.done", text=" a b"), "none", "", False),
    (typed("refusal.delta", delta="no"), "content", "no", False),
    (typed("reasoning_text.delta", delta="hm"), "reasoning", "hm", False),
    (typed("reasoning_summary_text.delta", delta="hm"), "reasoning", "hm", False),
    (typed("reasoning_text.done", text="hm"), "none", "", False),
    (typed("function_call_arguments.delta", delta='{"a"'), "tool", "", False),
    (typed("function_call_arguments.done", arguments='{"a": 1}'), "none", "", False),
    (typed("mcp_call_arguments.delta", delta="{"), "tool", "", False),
    (typed("custom_tool_call_input.delta", delta="x"), "tool", "", False),
    (typed("code_interpreter_call_code.delta", delta="x"), "tool", "", False),
    (typed("output_audio.delta", delta="x"), "none", "", False),
    (ended("completed"), "none", "", True),
    (ended("incomplete", incomplete_details={"reason": "max_output_tokens"}), "none", "", True),
    (typed("completed", response=None), "none", "", False),
]


@pytest.mark.parametrize(("value", "kind", "text", "finished"), EVENTS)
def test_what_an_event_means(value: Any, kind: str, text: str, finished: bool) -> None:
    assert read_event(json.dumps(value).encode()) == (kind, text, finished, None, None, None)


def test_usage_is_in_the_last_event() -> None:
    event = read_event(json.dumps(ended("completed", usage=usage(9, 4))).encode())
    assert event.usage == Usage(9, 7, 4) and event.finished


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ended("failed", error={"code": "server_error", "message": "boom"}), "boom"),
        (ended("failed", output=[{"text": "private"}]), "the response failed"),
        ({"type": "error", "code": "server_error", "message": "boom", "param": None}, "boom"),
        ({"type": "error", "error": {"message": "boom"}}, "boom"),
    ],
)
def test_failures(value: Any, message: str) -> None:
    event = read_event(json.dumps(value).encode())
    assert (event.kind, event.message) == ("error", message)


REASONED = [
    ended("created", usage=None),
    typed("reasoning_text.delta", delta="so"),
    typed("reasoning_text.delta", delta=" far"),
    typed("output_text.delta", delta="Hi"),
    typed("output_text.delta", delta=" you"),
    typed("output_text.done", text="Hi you"),
    ended("completed", usage=usage(4, 2)),
]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_stream_cut_at_every_byte(framing: str, tmp_path: Path) -> None:
    row, events = check_cuts(raw_response(events_of(*REASONED, done=False), EVENT_STREAM, framing), tmp_path)
    assert (row["outcome"], row["output_tokens"], row["token_source"]) == ("ok", 4, "usage")
    assert (row["prompt_tokens"], row["answer"]) == (7, "Hi you")
    assert len(events) == 4


@pytest.mark.parametrize(
    ("last", "outcome", "error"),
    [
        ([ended("incomplete", usage=usage(1))], "ok", None),
        ([ended("failed", error={"message": "boom"})], "stream_error", "boom"),
        ([{"type": "error", "message": "boom"}], "stream_error", "boom"),
        ([], "truncated", "the stream ended after 1 token event with neither [DONE] nor a finish reason"),
    ],
)
def test_how_a_stream_ends(last: list[Any], outcome: str, error: str | None, tmp_path: Path) -> None:
    pieces = events_of(ended("created"), typed("output_text.delta", delta="a"), *last, done=False)
    row, _ = check_cuts(raw_response(pieces, EVENT_STREAM), tmp_path)
    assert row["outcome"] == outcome and (row["error"] == error or error is None)


def test_a_body() -> None:
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}, {"text": " you"}]}
    value = {"object": "response", "status": "completed", "error": None, "usage": usage(2)}
    answer = read_body(200, json.dumps({**value, "output": [{"type": "reasoning"}, message]}).encode(), True)
    assert (answer.outcome, answer.text, answer.output_tokens) == ("ok", "Hi you", 2)
    failed = read_body(200, json.dumps({**value, "error": {"message": "boom"}}).encode(), True)
    assert (failed.outcome, failed.error) == ("stream_error", "boom")
    assert read_body(200, json.dumps({**value, "output": None}).encode(), True).text == ""


def test_the_request() -> None:
    body = request_body(parse_target(URL), "m", 'say "a"', 9, extra={"temperature": 0})
    asked = {"model": "m", "input": 'say "a"', "max_output_tokens": 9, "stream": True, "temperature": 0}
    assert json.loads(body) == asked
    with pytest.raises(lp.UsageError, match="max_output_tokens"):
        request_body(parse_target(URL), "m", "p", 9, extra={"max_output_tokens": 1})


@pytest.mark.parametrize("client", NAMES)
def test_a_run(client: str, tmp_path: Path) -> None:
    pieces = events_of(*REASONED, done=False)
    run = replayed("/v1/responses", pieces, EVENT_STREAM, client, tmp_path)
    assert run.meta["outcomes"] == {"ok": 3}
    assert run.requests["output_tokens"].tolist() == [4] * 3
    assert run.events.groupby("request_id").size().tolist() == [4] * 3
