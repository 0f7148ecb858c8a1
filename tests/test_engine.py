"""A real engine answers as the clients expect, and says itself how long it took.

What dasllama 0.6.6 was seen to do, and what tests must reckon with:

- `timings.ttft_ms` runs from when the request got one of the streams to its first token. The wait for a
  stream, the parsing of HTTP and JSON and the tokenizer come before it; the write to the socket comes after
  it: on an idle engine a fresh connection's client is 0.5 to 9 ms later, 1.4 ms in the median.
  `timings.gen_ms` runs from the first token to the last.
- It leaves Nagle's algorithm on: on a connection that is used again, what follows the answer's head waits
  for the client's delayed acknowledgement, some 40 ms, and tokens come in lumps. Fresh connections don't
  show it.
- A client that closes a connection after `[DONE]` but before the body's last chunk spoils, now and then,
  the next request, which gets an empty 200. So answers are read to their end.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from engine import MODEL, TINY_MODEL, post

MAKE_MODEL = Path(__file__).parent / "engines" / "make_tiny_model.py"
OUTPUT_TOKENS = 100
CHAT = {"messages": [{"role": "user", "content": "the water and the people"}]}
COMPLETION = {"prompt": "the water and the people"}


def test_model_is_what_its_script_writes() -> None:
    written = runpy.run_path(str(MAKE_MODEL))["model"]()
    assert written == TINY_MODEL.read_bytes()
    assert len(written) < 1_000_000


def streamed(url: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stream's events; it must end with [DONE]."""
    options = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "temperature": 1}
    body = post(url, {**options, **asked, "max_tokens": OUTPUT_TOKENS}).decode()
    *events, done = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def texts(events: list[dict[str, Any]]) -> list[str]:
    """Return the text of each event that carries one."""
    choices = [choice for event in events for choice in event["choices"]]
    found = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    return [text for text in found if text]


@pytest.mark.parametrize(("path", "asked"), [("completions", COMPLETION), ("chat/completions", CHAT)])
def test_engine_streams_every_token_then_usage_and_timings(dasllama: str, path: str, asked: dict[str, Any]) -> None:
    events = streamed(f"{dasllama}/v1/{path}", asked)
    said = texts(events)
    assert len(said) == OUTPUT_TOKENS
    assert all(text.strip().isalpha() for text in said)
    assert events[-1]["usage"]["completion_tokens"] == OUTPUT_TOKENS
    assert events[-1]["timings"]["ttft_ms"] > 0
    assert events[-1]["timings"]["gen_ms"] > 0


def test_a_word_is_a_token(dasllama: str) -> None:
    events = streamed(f"{dasllama}/v1/completions", COMPLETION)
    assert events[-1]["usage"]["prompt_tokens"] == 1 + len(COMPLETION["prompt"].split())
