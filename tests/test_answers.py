"""Answers mean what the recorded streams say they must."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.answers import Answer, Usage, read_answer, read_body, read_event, read_stream
from llmprofile.http1 import Response, parse
from llmprofile.sse import EventParser, event_parser

# --- recorded streams ----------------------------------------------------------------

CASES = {case["name"]: case for case in json.loads((Path(__file__).parent / "data/streams.json").read_text())}


def segments(case: dict[str, Any]) -> tuple[list[float], list[bytes]]:
    return [s for s, _ in case["segments"]], [base64.b64decode(data) for _, data in case["segments"]]


def reads_of(case: dict[str, Any], pieces: list[bytes], framing: str) -> list[bytes]:
    """The reads of a response whose body comes in these pieces; its head is in the first one."""
    head = f"HTTP/1.1 {case['status']} Status\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in case["headers"].items())
    reads = list(pieces)
    if framing == "chunked":
        head += "Transfer-Encoding: chunked\r\n"
        reads = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece]
        reads[-1] += b"0\r\n\r\n"
    elif framing == "length":
        head += f"Content-Length: {sum(map(len, pieces))}\r\n"
    reads[0] = head.encode() + b"\r\n" + reads[0]
    return reads


def read_response(response: Response) -> Answer:
    parser = EventParser()
    events = parser.feed(response.body)
    if response.complete:
        events += parser.close()
    kind = response.headers.get("content-type", "")
    return read_answer(response.status or 0, kind, response.body, events, response.complete)


def measured(answer: Answer, response: Response, read_s: list[float]) -> dict[str, Any]:
    """What a run would report of it, sent at 0: a token's time is that of the read with its last byte."""
    at = [read_s[next(i for i, b in enumerate(response.body_ends) if b >= end)] for end in answer.ends]
    found: dict[str, Any] = {"outcome": answer.outcome, "status": response.status, "text": answer.text}
    found |= {"tokens": answer.output_tokens, "token_source": answer.token_source}
    if not at:
        return found
    n, total = answer.streamed_tokens, answer.output_tokens
    found |= {"ttft_s": at[0], "e2e_s": at[-1], "ntpot_s": at[-1] / total if total else None}
    found["tpot_s"] = (at[-1] - at[0]) / (n - 1) if n > 1 else None
    found["itl"] = [0.0] * (answer.counts[0] - 1)
    for before, now, count in zip(at, at[1:], answer.counts[1:], strict=False):
        found["itl"] += [(now - before) / count] * count
    if "content" in answer.kinds:
        found["first_content_s"] = at[answer.kinds.index("content")]
    return found


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("name", CASES)
def test_recorded_stream(name: str, framing: str) -> None:
    case = CASES[name]
    read_s, pieces = segments(case)
    response = parse(reads_of(case, pieces, framing), eof=framing == "close")
    assert response.complete and response.body == b"".join(pieces)
    answer = read_response(response)
    found = measured(answer, response, read_s)
    for key, expected in case["expect"].items():
        assert found[key] == (pytest.approx(expected) if isinstance(expected, (float, list)) else expected), key
    assert (answer.error is None) == (answer.outcome == "ok")


@pytest.mark.parametrize("name", CASES)
def test_recorded_stream_cut_anywhere(name: str) -> None:
    case = CASES[name]
    body = b"".join(segments(case)[1])
    whole = read_response(parse(reads_of(case, [body], "close"), eof=True))
    if case["status"] != 200:
        return
    cuts: Any = range(1, len(body))
    if len(body) > 20_000:
        cuts = random.Random(4).sample(cuts, 200)
    for cut in cuts:
        parser = EventParser()
        events = parser.feed(body[:cut]) + parser.feed(body[cut:]) + parser.close()
        assert read_stream(200, events, complete=True) == whole


@pytest.mark.parametrize("name", ["plain", "role_null_content", "crlf"])
def test_a_body_cut_short_is_never_ok_before_done(name: str) -> None:
    case = CASES[name]
    body = b"".join(segments(case)[1])
    done = body.index(b"data: [DONE]") + len(b"data: [DONE]") + (4 if name == "crlf" else 2)
    raw = reads_of(case, [body], "length")[0]
    head = len(raw) - len(body)
    for cut in range(len(body)):
        answer = read_response(parse([raw[: head + cut]], eof=True))
        assert answer.outcome == ("ok" if cut >= done else "truncated"), cut


# --- events --------------------------------------------------------------------------


def chat(delta: Any, finish: Any = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def text(value: Any, finish: Any = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}], **more}


def usage(completion: Any, prompt: Any = 5, **more: Any) -> dict[str, Any]:
    return {"completion_tokens": completion, "prompt_tokens": prompt, **more}


TOOL = [{"index": 0, "function": {"arguments": "{}"}}]
EVENTS: list[tuple[Any, str, str, bool]] = [
    (text(" a"), "content", " a", False),
    (text(" a", "stop"), "content", " a", True),
    (text(""), "content", "", False),
    (text("", "length"), "none", "", True),
    (text(None), "none", "", False),
    (text("a", ""), "content", "a", False),
    (chat({"content": "a"}), "content", "a", False),
    (chat({"content": ""}), "content", "", False),
    (chat({"content": "", "role": None}), "content", "", False),
    (chat({"content": "", "role": "assistant"}), "none", "", False),
    (chat({"content": "", "reasoning_content": None, "tool_calls": None}), "content", "", False),
    (chat({"content": ""}, "stop"), "none", "", True),
    (chat({"content": None}), "none", "", False),
    (chat({}), "none", "", False),
    (chat(None), "none", "", False),
    (chat({"role": "assistant", "content": "a"}), "content", "a", False),
    (chat({"reasoning_content": "r"}), "reasoning", "r", False),
    (chat({"reasoning": "r", "content": ""}), "reasoning", "r", False),
    (chat({"reasoning_content": ""}), "reasoning", "", False),
    (chat({"reasoning_content": "", "role": "assistant"}), "none", "", False),
    (chat({"reasoning_content": "r", "content": "c"}), "content", "c", False),
    (chat({"refusal": "no"}), "content", "no", False),
    (chat({"refusal": "no", "content": ""}), "content", "no", False),
    (chat({"refusal": None, "content": ""}), "content", "", False),
    (chat({"tool_calls": TOOL}), "tool", "", False),
    (chat({"tool_calls": TOOL, "content": "", "role": "assistant"}), "tool", "", False),
    (chat({"tool_calls": []}), "none", "", False),
    (chat({"tool_calls": "x"}), "none", "", False),
    (chat({"function_call": {"name": "f", "arguments": ""}}), "tool", "", False),
    (
        chat({"content": [{"type": "text", "text": "a"}, {"text": "b"}, {"text": 1}, 2]}),
        "content",
        "ab",
        False,
    ),
    (chat({"content": 7}), "none", "", False),
    (
        {"choices": [{"delta": {}, "finish_reason": "stop"}, {"delta": {"content": "b"}}]},
        "content",
        "b",
        True,
    ),
    ({"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}}]}, "content", "ab", False),
    ({"choices": [{"delta": {"reasoning": "a"}}, {"delta": {"content": "b"}}]}, "content", "b", False),
    ({"choices": []}, "none", "", False),
    ({"choices": {"0": 1}}, "none", "", False),
    ({"choices": [None, 3, "x", []]}, "none", "", False),
    ({"error": None, **text("a")}, "content", "a", False),
    ({}, "none", "", False),
    ([], "none", "", False),
    (None, "none", "", False),
    ("ping", "none", "", False),
]


@pytest.mark.parametrize(("value", "kind", "content", "finished"), EVENTS)
def test_what_an_event_means(value: Any, kind: str, content: str, finished: bool) -> None:
    assert read_event(json.dumps(value).encode()) == (kind, content, finished, None, None, None)
    assert read_event(b" \n" + json.dumps(value, indent=1).encode() + b"\n ")[0] == kind


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"error": {"message": "boom", "code": 500}}, "boom"),
        ({"error": "boom"}, "boom"),
        ({"object": "error", "message": "boom\n  at x"}, "boom at x"),
        ({"error": {"code": 7}}, '{"error": {"code": 7}}'),
        ({"error": {"message": "x" * 999}, **text("a")}, "x" * 200),
        ({"error": {"message": "half \ud83d"}}, "half \ufffd"),
    ],
)
def test_an_error_event(value: Any, message: str) -> None:
    event = read_event(json.dumps(value).encode())
    assert (event.kind, event.message) == ("error", message)


DEEP = 200_000
BAD = [
    b"",
    b"{not json",
    b"{} {}",
    b'{"a": "\xe4"}',
    b"\xff",
    b"[DONE",
    b"1" * 5000,
    b"[" * DEEP,
    b'{"a":' * DEEP,
]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_what_is_not_json(data: bytes) -> None:
    event = read_event(data)
    assert event.kind == "bad" and event.message and len(event.message) < 200


@pytest.mark.parametrize("depth", [*range(100, 1100, 7), 5000, 100_000])
def test_depth_is_no_crash(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    assert read_event(nested).kind in ("none", "bad")
    assert read_event(b'{"error": ' + nested + b"}").kind in ("error", "bad")
    assert read_body(500, b'{"detail": ' + nested + b"}", True).outcome == "http_error"


@pytest.mark.parametrize("data", [b"[DONE]", b" [DONE] ", b"[DONE]\r"])
def test_done(data: bytes) -> None:
    assert read_event(data).kind == "done"


def test_usage_and_timings() -> None:
    details = {"completion_tokens_details": {"reasoning_tokens": 3}}
    event = read_event(json.dumps({"choices": [], "usage": usage(9, **details), "timings": {"ttft_ms": 2.5}}).encode())
    assert event == ("none", "", False, Usage(9, 5, 3), None, {"ttft_ms": 2.5})
    assert read_event(json.dumps({"usage": usage(9, reasoning_tokens=3)}).encode()).usage == Usage(9, 5, 3)
    odd: Any
    for odd in (3.0, "3", -1, True, None, [3], 2**40):
        assert read_event(json.dumps({"usage": usage(odd)}).encode()).usage == Usage(None, 5, None)
        assert read_event(json.dumps({"usage": usage(odd, None)}).encode()).usage is None
    for odd in (None, [], "x", 5):
        assert read_event(json.dumps({"usage": odd, **text("a")}).encode())[:4] == (
            "content",
            "a",
            False,
            None,
        )
    mixed = {"a": None, "b": 1.5, "c": True, "d": 10**400, "e": "x"}
    assert read_event(json.dumps({"timings": mixed}).encode()).timings == {"b": 1.5}
    for odd in (None, [], {}, {"a": "b"}, {"a": {"b": 1}}, {"a": None}):
        assert read_event(json.dumps({"timings": odd}).encode()).timings is None


NAMES = [
    "choices",
    "delta",
    "text",
    "content",
    "usage",
    "completion_tokens",
    "completion_tokens_details",
    "error",
    "message",
    "detail",
    "role",
    "tool_calls",
    "finish_reason",
    "timings",
    "reasoning",
]
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)


@given(values=st.lists(ODD, max_size=6), status=st.sampled_from([200, 500]))
@settings(max_examples=200, deadline=None)
def test_any_json_is_an_answer(values: list[Any], status: int) -> None:
    events = [(json.dumps(value).encode(), 10 * (i + 1)) for i, value in enumerate(values)]
    for answer in (read_stream(status, events, True), *(read_body(status, data, True) for data, _ in events)):
        check(answer)


def check(answer: Answer) -> None:
    """What holds of every answer."""
    assert answer.outcome in ("ok", "stream_error", "truncated", "http_error")
    assert (answer.error is None) == (answer.outcome == "ok")
    n = len(answer.ends)
    assert n == len(answer.sizes) == len(answer.counts) == len(answer.kinds)
    assert all(count > 0 for count in answer.counts) and all(size > 0 for size in answer.sizes)
    assert set(answer.ends) <= set(answer.all_ends) and answer.ends == sorted(answer.ends)
    assert answer.last_event_end == max(answer.all_ends, default=0)
    assert set(answer.kinds) <= {"content", "reasoning", "tool"}
    assert answer.streamed_tokens >= 0
    assert (answer.output_tokens is None) <= (not answer.streamed)
    (answer.text + (answer.error or "")).encode()


def test_mutated_streams_never_crash() -> None:
    rng = random.Random(5)
    bodies = [b"".join(segments(case)[1]) for case in CASES.values()]
    bodies = [body for body in bodies if len(body) < 20_000]
    tokens = [
        b'"',
        b"{",
        b"}",
        b"null",
        b"[]",
        b"-1",
        b"\n\n",
        b"\r",
        b"\\ud83d",
        b"data: ",
        b"\xff",
        b"1e999",
        b"",
    ]
    outcomes = set()
    for _ in range(20_000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(body))
            body[at : at + rng.choice((0, 1, 4))] = rng.choice(tokens)
        data = bytes(body[: rng.randint(0, 2 * len(body))])
        parser, complete = EventParser(), rng.random() < 0.7
        events = parser.feed(data) + (parser.close() if complete else [])
        answer = read_stream(200, events, complete)
        check(answer)
        check(read_body(rng.choice((200, 404)), data, complete))
        outcomes.add(answer.outcome)
    assert outcomes == {"ok", "stream_error", "truncated"}


# --- answers -------------------------------------------------------------------------


def stream(*values: Any, done: bool = True, complete: bool = True) -> Answer:
    payloads = [json.dumps(value).encode() for value in values]
    payloads += [b"[DONE]"] * done
    body = b"".join(b"data: %s\n\n" % payload for payload in payloads)
    answer = read_stream(200, EventParser().feed(body), complete)
    check(answer)
    return answer


def test_offsets_and_sizes() -> None:
    body = b': ping\n\ndata: {"choices": [{"text": "a"}]}\n\ndata: {}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
    body += b"data: [DONE]\n\ndata: {}\n\n"
    answer = read_stream(200, EventParser().feed(body), True)
    first, last = body.index(b"data: {}\n"), body.index(b"data: [DONE]")
    assert answer.ends == [first, last] and answer.sizes == [first, last - first - 10]
    assert answer.all_ends == [first, first + 10, last, last + 14]
    assert answer.last_event_end == last + 14


def test_running_totals_say_how_many_tokens_an_event_holds() -> None:
    role = chat({"role": "assistant", "content": ""}, usage=usage(0))
    answer = stream(role, *(chat({"content": "x"}, usage=usage(total)) for total in (2, 6, 10)))
    assert answer.counts == [2, 4, 4] and answer.counts_known
    assert (answer.output_tokens, answer.streamed_tokens) == (10, 10)
    last = chat({"content": "x"}, "stop", usage=usage(7))
    assert stream(last).counts == [7]


@pytest.mark.parametrize("totals", [(2, 2, 3), (1, None, 3), (3, 2, 1), (None, None, 3), (0, 1, 2), (3, 3, 3)])
def test_totals_that_do_not_run_say_nothing(totals: tuple[int | None, ...]) -> None:
    answer = stream(*(text("x", usage=None if t is None else usage(t)) for t in totals))
    assert answer.counts == [1, 1, 1] and answer.output_tokens == totals[-1]


def test_counts_are_known_when_the_server_counts_as_many() -> None:
    events = [text("a"), text("b", "stop")]
    assert not stream(*events).counts_known
    assert stream(*events, {"choices": [], "usage": usage(2)}).counts_known
    assert not stream(*events, {"choices": [], "usage": usage(5)}).counts_known


def test_usage_before_later_tokens_is_no_count() -> None:
    answer = stream(chat({"role": "assistant"}, usage=usage(1)), chat({"content": "a"}), chat({"content": "b"}, "stop"))
    assert answer.usage == Usage(None, 5, None)
    assert (answer.output_tokens, answer.token_source) == (2, "events")


@pytest.mark.parametrize(
    ("reasoning", "shown", "streamed"),
    [(7, False, 3), (7, True, 10), (0, False, 10), (10, False, 0), (30, False, 10)],
)
def test_reasoning_that_is_counted_and_never_shown(reasoning: int, shown: bool, streamed: int) -> None:
    deltas = [{"reasoning_content": "r"}] * shown + [{"content": "c"}] * 3
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    answer = stream(*map(chat, deltas), {"choices": [], "usage": usage(10, **details)})
    assert (answer.output_tokens, answer.streamed_tokens) == (10, streamed)
    assert answer.counts_known == (streamed == 3)


def test_hidden_reasoning_is_not_in_the_first_event() -> None:
    def running(total: int) -> dict[str, Any]:
        return usage(total, completion_tokens_details={"reasoning_tokens": 100})

    answer = stream(*(chat({"content": "c"}, usage=running(total)) for total in (101, 103)))
    assert answer.counts == [1, 2] and answer.streamed_tokens == 3


@pytest.mark.parametrize(
    ("values", "done", "complete", "outcome"),
    [
        ([text("a")], True, True, "ok"),
        ([text("a")], True, False, "ok"),  # everything came; only the framing's end is missing
        ([text("a", "stop")], False, True, "ok"),
        ([text("a", "stop")], False, False, "truncated"),
        ([text("a")], False, True, "truncated"),
        ([], True, True, "truncated"),
        ([], False, True, "truncated"),
        ([text("", "stop")], True, True, "truncated"),
        ([text("", "stop"), {"choices": [], "usage": usage(0)}], True, True, "ok"),
        ([text("", "stop"), {"choices": [], "usage": usage(4)}], True, True, "truncated"),
        ([text("a"), {"error": "x"}], False, False, "stream_error"),
        ([{"error": "x"}, text("a", "stop")], True, True, "stream_error"),
    ],
)
def test_how_a_stream_ended(values: list[Any], done: bool, complete: bool, outcome: str) -> None:
    assert stream(*values, done=done, complete=complete).outcome == outcome


def test_errors_say_what_happened_without_the_answers_text() -> None:
    assert stream(text("a"), done=False).error == (
        "the stream ended after 1 token event with neither [DONE] nor a finish reason"
    )
    answer = read_stream(200, [(b'{"text": "private', 10)], True)
    assert answer.outcome == "stream_error" and "private" not in str(answer.error)


def test_a_character_in_two_events_is_put_together() -> None:
    assert stream(text("\ud83d"), text("\ude00!", "stop")).text == "\U0001f600!"
    assert stream(text("\ud83d", "stop")).text == "\ufffd"


def test_timings_are_kept_as_they_are() -> None:
    timings = {"prompt_ms": 1.5, "predicted_n": 2}
    assert stream(text("a", "stop", timings=timings), {"choices": [], "usage": usage(1)}).timings == timings


def test_a_body() -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": None}
    value = {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": usage(2),
        "timings": {"a": 1},
    }
    answer = read_body(200, json.dumps(value).encode(), True)
    assert answer == Answer("ok", usage=Usage(2, 5, None), text="Hi", timings={"a": 1})
    assert (answer.output_tokens, answer.token_source) == (2, "usage")
    plain = read_body(200, b'{"choices": [{"text": "Hi", "finish_reason": "stop"}]}', True)
    assert (plain.text, plain.output_tokens, plain.token_source) == ("Hi", None, None)


@pytest.mark.parametrize(
    ("status", "body", "complete", "outcome", "error"),
    [
        (200, b'{"choices": [{"text": "a"}', False, "truncated", "the body was cut short"),
        (200, b'{"error": {"message": "boom"}}', True, "stream_error", "boom"),
        (200, b'{"usage": {}}', True, "stream_error", "the body has no choices"),
        (200, b'{"choices": []}', True, "stream_error", "the body has no choices"),
        (200, b"[1]", True, "stream_error", "the body is not a JSON object"),
        (500, b'{"error": {"message": "no"}}', True, "http_error", "no"),
        (422, b'{"detail": "field required"}', True, "http_error", "field required"),
        (502, b"<html>\n  Bad\tGateway", True, "http_error", "<html> Bad Gateway"),
        (503, b"", True, "http_error", "status 503"),
        (500, b'"just text"', True, "http_error", '"just text"'),
        (500, b"\xff" * 900, False, "http_error", "\ufffd" * 200),
    ],
)
def test_other_bodies(status: int, body: bytes, complete: bool, outcome: str, error: str) -> None:
    answer = read_body(status, body, complete)
    assert (answer.outcome, answer.error) == (outcome, error)
    assert read_answer(status, "application/json", body, None, complete) == answer


def test_the_content_type_decides() -> None:
    body = b'{"choices": [{"text": "a"}]}'
    stream = b'data: {"choices": [{"text": "b", "finish_reason": "x"}]}\n\n'
    lines = b'{"choices": [{"text": "c", "finish_reason": "x"}]}\n'

    def read(media: str, data: bytes = body, status: int = 200) -> Answer:
        parser = event_parser(media)
        events = None if parser is None else parser.feed(data)
        return read_answer(status, media, data, events, True)

    assert read("text/event-stream", stream).text == read("Text/Event-Stream; charset=utf-8", stream).text == "b"
    assert read("application/x-ndjson", lines).text == read("application/jsonl; charset=utf-8", lines).text == "c"
    assert read("application/json; charset=utf-8").text == read("application/problem+json").text == read("").text == "a"
    for other in ("text/html", "text/event-streamer", "application/x-ndjsons"):
        answer = read(other)
        assert answer.outcome == "stream_error" and other in str(answer.error)
    assert read("text/event-stream", stream, 404).outcome == "http_error"
    assert read("", b"data: x").outcome == "stream_error"
