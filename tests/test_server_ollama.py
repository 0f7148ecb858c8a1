"""Ollama's own API (`/api/generate`, `/api/chat`): JSON lines, the last of which says what was counted and timed.

What its source shows, and counts must reckon with: `eval_count` counts the end-of-sequence token, which has no line, so
that an answer that ends by itself counts one more than it shows; text that may be the beginning of a stop word, or of
a character, is kept back, so that a line may hold several tokens. `prompt_eval_count` may be left out when the prompt
was cached. `eval_duration` runs from the first token, `prompt_eval_duration` up to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from cuts import FRAMINGS, JSON_LINES, check_cuts, lines_of, raw_response
from harness import NAMES, exchange, link_to
from llmprofile.answers import Usage, read_body, read_event, server_times_s
from llmprofile.api import parse_target, request_body
from replay import STEP_S, replayed

GENERATE, CHAT = "http://h:11434/api/generate", "http://h:11434/api/chat"
NAMED = {"model": "m", "created_at": "2025-10-26T17:15:24.097767Z"}
COUNTED = {
    "total_duration": 174_560_334,
    "load_duration": 10_000_000,
    "prompt_eval_count": 11,
    "prompt_eval_duration": 13_000_000,
    "eval_count": 3,
    "eval_duration": 40_000_000,
}


def line(text: str | None, done: bool = False, **more: Any) -> dict[str, Any]:
    return {**NAMED, "response": text, "done": done, **more}


def said(content: str, done: bool = False, more: dict[str, Any] | None = None, **message: Any) -> dict[str, Any]:
    return {**NAMED, "message": {"role": "assistant", "content": content, **message}, "done": done, **(more or {})}


LINES = [
    (line(" a"), "content", " a", False),
    (line(""), "none", "", False),
    (line("!", True), "content", "!", True),
    (line("", True, done_reason="stop"), "none", "", True),
    (line("", thinking="hm"), "reasoning", "hm", False),
    (line(None), "none", "", False),
    (said("a"), "content", "a", False),
    (said(""), "none", "", False),
    (said("", thinking="hm"), "reasoning", "hm", False),
    (said("", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), "tool", "", False),
    (said("", tool_calls=[]), "none", "", False),
    (said("", True), "none", "", True),
    ({**NAMED, "message": "x", "done": False}, "none", "", False),
    ({**NAMED, "status": "loading", "done": 1}, "none", "", False),
]


@pytest.mark.parametrize(("value", "kind", "text", "finished"), LINES)
def test_what_a_line_means(value: Any, kind: str, text: str, finished: bool) -> None:
    assert read_event(json.dumps(value).encode()) == (kind, text, finished, None, None, None)


def test_the_last_line_counts_and_times() -> None:
    event = read_event(json.dumps(line("", True, done_reason="stop", **COUNTED)).encode())
    assert event.usage == Usage(3, 11, None) and event.finished
    assert server_times_s(event.timings) == (0.023, 0.04)
    cached = {k: v for k, v in COUNTED.items() if k != "prompt_eval_count"}
    assert read_event(json.dumps(line("", True, **cached)).encode()).usage == Usage(3, None, None)


STREAMS = {
    "generate": [line(" a"), line(" b"), line(" c"), line("", True, done_reason="length", **COUNTED)],
    "chat": [said(" a"), said(" b"), said(" c"), said("", True, COUNTED)],
    "text in the last line": [line(" a"), line(" b"), line(" c", True, **COUNTED)],
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_cut_at_every_byte(name: str, framing: str, tmp_path: Path) -> None:
    row, events = check_cuts(raw_response(lines_of(*STREAMS[name]), JSON_LINES, framing), tmp_path)
    assert (row["outcome"], row["output_tokens"], row["prompt_tokens"]) == ("ok", 3, 11)
    assert (row["answer"], len(events)) == (" a b c", 3)


@pytest.mark.parametrize(
    ("pieces", "outcome", "error"),
    [
        (lines_of(line("a"), {"error": "model runner has stopped"}), "stream_error", "model runner has stopped"),
        (lines_of(line("a")), "truncated", "the stream ended after 1 token event with neither [DONE] nor a finish"),
        ([*lines_of(line("a")), b'{"response": "b", "do'], "stream_error", "an event is not JSON"),
        ([*lines_of(line("a")), json.dumps(line("", True)).encode()], "ok", ""),  # the last line has no LF
        ([b"\r\n", *lines_of(line("a", True)), b"\n \n"], "ok", ""),
    ],
)
def test_how_a_stream_ends(pieces: list[bytes], outcome: str, error: str, tmp_path: Path) -> None:
    row, _ = check_cuts(raw_response(pieces, JSON_LINES), tmp_path)
    assert row["outcome"] == outcome and str(row["error"] or "").startswith(error)


def test_bodies() -> None:
    for value in (line("Hi", True, **COUNTED), said("Hi", True, COUNTED)):
        answer = read_body(200, json.dumps(value).encode(), True)
        assert (answer.outcome, answer.text, answer.output_tokens) == ("ok", "Hi", 3)
    missing = read_body(404, b'{"error":"model \'x\' not found"}', True)
    assert (missing.outcome, missing.error) == ("http_error", "model 'x' not found")


def test_requests() -> None:
    extra = {"options": {"temperature": 0, "seed": 1}, "keep_alive": "5m"}
    options = {"num_predict": 9, "temperature": 0, "seed": 1}
    common = {"model": "m", "stream": True, "keep_alive": "5m", "options": options}
    assert json.loads(request_body(parse_target(GENERATE), "m", 'a "b"', 9, extra=extra)) == {
        **common,
        "prompt": 'a "b"',
    }
    messages = [{"role": "user", "content": 'a "b"'}]
    assert json.loads(request_body(parse_target(CHAT), "m", 'a "b"', 9, extra=extra)) == {
        **common,
        "messages": messages,
    }
    plain = {"model": "m", "prompt": "p", "options": {"num_predict": 9}, "stream": False}
    assert json.loads(request_body(parse_target(GENERATE), "m", "p", 9, stream=False)) == plain
    for bad in ({"options": {"num_predict": 1}}, {"options": 1}, {"options": {"a": {1}}}):
        with pytest.raises(lp.UsageError):
            request_body(parse_target(GENERATE), "m", "p", 9, extra=bad)


@pytest.mark.parametrize("client", NAMES)
def test_a_run(client: str, tmp_path: Path) -> None:
    run = replayed("/api/generate", lines_of(*STREAMS["generate"]), JSON_LINES, client, tmp_path)
    assert run.meta["outcomes"] == {"ok": 3}
    assert run.requests["output_tokens"].tolist() == [3] * 3
    assert run.events.groupby("request_id").size().tolist() == [3] * 3
    gaps_s = run.events.groupby("request_id")["wire_ns"].diff().dropna().astype(float) / 1e9
    assert gaps_s.median() == pytest.approx(STEP_S, rel=0.1)
    assert run.events["handled_ns"].notna().all() == (client == "conventional")


@pytest.mark.parametrize("client", NAMES)
def test_a_first_token_in_a_line_is_seen_in_time(client: str, tmp_path: Path) -> None:
    """The stream is longer than a first token may take; it must not be taken for one without a token."""
    timed = [((i + 1) * STEP_S, piece) for i, piece in enumerate(lines_of(*STREAMS["generate"]))]
    with lp.ReferenceServer(script={"segments": timed, "headers": JSON_LINES}) as server:
        link = link_to(server.url, first_token_timeout_s=2.5 * STEP_S)
        requests, _ = exchange(client, link, [b"{}"] * 3, tmp_path, together=1)
    assert requests["outcome"].tolist() == ["ok"] * 3
