"""TGI's `/generate_stream`: a token an event, the last with the whole text, and details when they were asked for.

There is no [DONE]. `generated_tokens` counts special tokens, which have an event and no text of the answer's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from cuts import EVENT_STREAM, FRAMINGS, check_cuts, events_of, raw_response
from harness import NAMES
from llmprofile.answers import Usage, read_event
from llmprofile.api import parse_target, request_body
from replay import replayed

URL = "http://h/generate_stream"


def token(text: str, special: bool = False, **more: Any) -> dict[str, Any]:
    one = {"id": 5, "text": text, "logprob": -1.0, "special": special}
    return {"index": 1, "token": one, "generated_text": None, "details": None, **more}


DETAILS = {"finish_reason": "eos_token", "generated_tokens": 3, "seed": None, "input_length": 6}
STREAM = [token(" a"), token(" b"), token("</s>", True, generated_text=" a b", details=DETAILS)]


@pytest.mark.parametrize(
    ("value", "kind", "text", "finished"),
    [
        (token(" a"), "content", " a", False),
        (token(""), "content", "", False),
        (token("</s>", True), "content", "", False),
        (token(" b", generated_text=" a b"), "content", " b", True),
        ({"index": 1, "token": None}, "none", "", False),
    ],
)
def test_what_an_event_means(value: Any, kind: str, text: str, finished: bool) -> None:
    assert read_event(json.dumps(value).encode()) == (kind, text, finished, None, None, None)


def test_details_are_the_usage() -> None:
    assert read_event(json.dumps(STREAM[-1]).encode()).usage == Usage(3, 6, None)
    error = read_event(b'{"error": "Request failed during generation", "error_type": "generation"}')
    assert (error.kind, error.message) == ("error", "Request failed during generation")


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_stream_cut_at_every_byte(framing: str, tmp_path: Path) -> None:
    pieces = [piece.replace(b"data: ", b"data:") for piece in events_of(*STREAM, done=False)]  # as TGI writes it
    row, events = check_cuts(raw_response(pieces, EVENT_STREAM, framing), tmp_path)
    assert (row["outcome"], row["output_tokens"], row["prompt_tokens"]) == ("ok", 3, 6)
    assert (row["answer"], row["token_source"], len(events)) == (" a b", "usage", 3)


def test_the_request() -> None:
    target, extra = parse_target(URL), {"parameters": {"temperature": 0.5}}
    asked = {"model": "m", "inputs": "p", "stream": True}
    parameters = {"max_new_tokens": 9, "details": True, "temperature": 0.5}
    assert json.loads(request_body(target, "m", "p", 9, extra=extra)) == {**asked, "parameters": parameters}
    parameters = {"max_new_tokens": 9, "details": False}
    assert json.loads(request_body(target, "m", "p", 9, usage=False)) == {**asked, "parameters": parameters}
    for bad in ({"parameters": {"max_new_tokens": 1}}, {"parameters": 1}, {"inputs": "q"}):
        with pytest.raises(lp.UsageError):
            request_body(target, "m", "p", 9, extra=bad)
    with pytest.raises(lp.UsageError, match="nothing but streams"):
        request_body(target, "m", "p", 9, stream=False)


@pytest.mark.parametrize("client", NAMES)
def test_a_run(client: str, tmp_path: Path) -> None:
    run = replayed("/generate_stream", events_of(*STREAM, done=False), EVENT_STREAM, client, tmp_path)
    assert run.meta["outcomes"] == {"ok": 3}
    assert run.requests["output_tokens"].tolist() == [3] * 3
