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

import pandas as pd
import pytest

import llmprofile as lp
from engine import MODEL, TINY_MODEL, post
from harness import NAMES, exchange, link_to
from llmprofile.capture import read_requests

MAKE_MODEL = Path(__file__).parent / "engines" / "make_tiny_model.py"
OUTPUT_TOKENS = 100
CHAT = {"messages": [{"role": "user", "content": "the water and the people"}]}
USAGE = {"stream_options": {"include_usage": True}}
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


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("client", NAMES)
def test_a_run_counts_what_the_engine_counts(dasllama: str, client: str, path: str, tmp_path: Path) -> None:
    run = lp.run_load(
        f"{dasllama}/v1/{path}",
        lp.ClosedLoop(4),
        n=24,
        prompt_tokens=20,
        output_tokens=lp.Uniform(5, 40),
        client=client,
        out=tmp_path / "run",
        progress=False,
        keep_text=True,
    )
    rows = run.requests
    assert run.meta["asked"]["model"] == MODEL
    assert run.meta["outcomes"] == {"ok": 24}
    assert (rows["token_source"] == "usage").all()
    asked = lp.Uniform(5, 40)
    assert rows["output_tokens"].between(asked.low, asked.high).all()
    texts = pd.read_parquet(tmp_path / "run" / "texts.parquet")
    assert texts["request_id"].tolist() == rows["request_id"].tolist() == list(range(24))
    # a word is a token of this model: usage, token events and words are three counts of the same
    assert texts["answer"].str.split().str.len().tolist() == rows["output_tokens"].tolist()
    assert run.events.groupby("request_id")["tokens"].sum().tolist() == rows["output_tokens"].tolist()


@pytest.mark.parametrize("client", NAMES)
def test_ttft_agrees_with_the_engines_own(dasllama: str, client: str, tmp_path: Path) -> None:
    """The engine's clock starts after its HTTP and tokenizer and stops before its send: never later than the wire."""
    bodies = [
        json.dumps({"model": MODEL, **COMPLETION, "max_tokens": 20, "stream": True, **USAGE}).encode()
        for _ in range(30)
    ]
    link = link_to(f"{dasllama}/v1/completions", fresh=True)
    requests, _ = exchange(client, link, bodies, tmp_path, together=1)
    assert (requests["outcome"] == "ok").all()
    own = pd.DataFrame([timings(raw) for raw in captured(tmp_path)])
    outside_s = requests["ttft_s"] - own["ttft_ms"] / 1e3
    assert outside_s.min() > -0.001
    assert outside_s.median() < 0.02
    generating_s = requests["last_wire_ns"] - requests["first_wire_ns"]
    assert abs((generating_s / 1e9 - own["gen_ms"] / 1e3).median()) < 0.005


def captured(folder: Path) -> list[bytes]:
    """The raw answers, in the order of their requests."""
    (batch,) = read_requests(folder, 0)
    return [raw for _, raw in sorted(zip(batch["request_id"], batch["bytes"], strict=True))]


def timings(raw: bytes) -> dict[str, float]:
    """What the engine says of its own times in an answer."""
    found = [line for line in raw.splitlines() if b'"timings"' in line]
    return json.loads(found[-1].removeprefix(b"data: "))["timings"]
