"""What differs between APIs when they answer: which events are tokens, how many there were, how a request ended.

Completions and chat completions, by which most servers go, OpenAI's responses, Ollama's own lines and TGI's
`/generate_stream`, as streams and as one body: the one place that maps a payload to tokens. A payload is known by its
shape; nobody has to say which server it came from.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmprofile.units import NS_PER_S


@dataclass(frozen=True)
class Usage:
    """What a server says it counted, None for what it doesn't say; reasoning is part of completion."""

    completion_tokens: int | None
    prompt_tokens: int | None
    reasoning_tokens: int | None


TOKEN_KINDS = frozenset(("content", "reasoning", "tool"))
"""The kinds of event that are tokens."""


class Event(NamedTuple):
    """What one event of a stream means.

    Attributes
    ----------
    kind : str
        ``"content"``, ``"reasoning"`` or ``"tool"``: a token. ``"none"``: none. ``"done"``: the end.
        ``"error"``: the server says so. ``"bad"``: not JSON.
    text : str
        Of the token.
    finished : bool
        Whether a choice gave a finish reason.
    usage : Usage or None
    message : str or None
        What is wrong.
    timings : dict or None
        The numbers among the server's own timings, as they are.
    """

    kind: str
    text: str = ""
    finished: bool = False
    usage: Usage | None = None
    message: str | None = None
    timings: dict[str, float] | None = None


_raw_decode = json.JSONDecoder().raw_decode


def _load(data: bytes) -> Any:
    text = data.decode().strip(" \t\r\n")
    value, end = _raw_decode(text)  # half the time of json.loads on bytes
    if end != len(text):
        raise ValueError(f"something follows the value at character {end}")
    return value


def read_event(data: bytes) -> Event:
    """Say what one event means; never raises, whatever the bytes are.

    A token carries content, reasoning or a tool call in any choice; or empty text with neither role nor
    finish reason, which engines send for a token whose character is not complete yet.

    Examples
    --------
    >>> read_event(b'{"choices": [{"delta": {"content": "Hi"}, "finish_reason": null}]}')[:3]
    ('content', 'Hi', False)
    >>> read_event(b'{"type": "response.output_text.delta", "delta": "Hi"}').kind
    'content'
    >>> read_event(b"[DONE]").kind, read_event(b"{not json").kind
    ('done', 'bad')
    """
    try:
        value = _load(data)
    except (ValueError, RecursionError) as error:
        if data.strip() == b"[DONE]":
            return Event("done")
        return Event("bad", message=f"an event is not JSON: {error}")
    if not isinstance(value, dict):
        return Event("none")
    if _is_error(value):
        return Event("error", message=_error_text(value))
    if "choices" in value:
        return _read_openai(value)
    if str(value.get("type")).startswith("response."):
        return _read_responses(value)
    if "done" in value:
        return _read_ollama(value)
    return _read_tgi(value) if "token" in value else _read_openai(value)


def _read_whole(value: dict[str, Any]) -> Event:
    """Say what an answer in one body means, as if it were one event."""
    usage, timings = _read_usage(value.get("usage")), _read_timings(_said_of_time(value))
    if _is_error(value):
        return Event("error", "", False, usage, _error_text(value), timings)
    if value.get("object") == "response":
        return Event("content", _output_text(value.get("output")), True, usage, None, timings)
    if "done" in value:
        return _read_ollama(value)
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices:
        return Event("bad", "", False, usage, "the body has no choices", timings)
    # a message is written as one delta is
    deltas = [{**c, "delta": c.get("message")} for c in choices if isinstance(c, dict)]
    return Event(*_read_choices(deltas), usage, None, timings)


def _is_error(value: dict[str, Any]) -> bool:
    # some servers put "error": null on every event
    return value.get("error") is not None or value.get("object") == "error" or value.get("type") == "error"


# --- completions and chat completions ---


def _read_openai(value: dict[str, Any]) -> Event:
    kind, text, finished = _read_choices(value.get("choices"))
    usage, timings = value.get("usage"), _said_of_time(value)
    if usage is None and timings is None:
        return Event(kind, text, finished)
    return Event(kind, text, finished, _read_usage(usage), None, _read_timings(timings))


def _read_choices(choices: Any) -> tuple[str, str, bool]:
    if not isinstance(choices, list):
        return "none", "", False
    found = [_read_choice(choice) for choice in choices if isinstance(choice, dict)]
    if len(found) == 1:
        return found[0]
    kinds = [kind for kind, _, _ in found]
    kind = next((kind for kind in ("content", "reasoning", "tool") if kind in kinds), "none")
    text = "".join(text for of, text, _ in found if of == kind)
    return kind, text, any(finished for _, _, finished in found)


def _read_choice(choice: dict[str, Any]) -> tuple[str, str, bool]:
    finished = bool(choice.get("finish_reason"))
    delta = choice.get("delta")
    if isinstance(delta, dict):
        kind, text = _read_delta(delta, finished)
        return kind, text, finished
    whole = choice.get("text")
    if isinstance(whole, str) and (whole or not finished):
        return "content", whole, finished
    return "none", "", finished


def _read_delta(delta: dict[str, Any], finished: bool) -> tuple[str, str]:
    content = _text(delta, "content", "refusal")
    if content:
        return "content", content
    reasoning = _text(delta, "reasoning_content", "reasoning")
    if reasoning:
        return "reasoning", reasoning
    tools = delta.get("tool_calls")
    if (isinstance(tools, list) and tools) or delta.get("function_call"):
        return "tool", ""
    if not finished and not delta.get("role"):
        if content is not None:
            return "content", ""
        if reasoning is not None:
            return "reasoning", ""
    return "none", ""


def _text(delta: dict[str, Any], *names: str) -> str | None:
    """The first text that isn't empty; else "" when one is there, else None."""
    found = None
    for name in names:
        value = delta.get(name)
        if isinstance(value, list):  # of parts
            value = "".join(p["text"] for p in value if isinstance(p, dict) and isinstance(p.get("text"), str))
        if isinstance(value, str):
            if value:
                return value
            found = value
    return found


def _read_usage(value: Any) -> Usage | None:
    """As completions and chat completions word it, or as responses do."""
    if not isinstance(value, dict):
        return None
    details = value.get("completion_tokens_details", value.get("output_tokens_details"))
    holder = details if isinstance(details, dict) else value
    completion = value.get("completion_tokens", value.get("output_tokens"))
    return _usage(completion, value.get("prompt_tokens", value.get("input_tokens")), holder.get("reasoning_tokens"))


def _usage(completion: Any, prompt: Any, reasoning: Any = None) -> Usage | None:
    usage = Usage(_count(completion), _count(prompt), _count(reasoning))
    return None if usage == _NOTHING else usage


_NOTHING = Usage(None, None, None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


def _said_of_time(value: dict[str, Any]) -> Any:
    """What an answer holds of its server's own times: llama.cpp and dasllama say `timings`, vLLM `metrics`."""
    return value.get("timings") or value.get("metrics")


def _read_timings(value: Any) -> dict[str, float] | None:
    if not isinstance(value, dict):
        return None
    # llama.cpp writes null for what is per token where there was none
    numbers = {k: v for k, v in value.items() if type(v) in (int, float) and abs(v) < _MOST}
    return numbers or None


_MOST = 1e18


# --- OpenAI's responses ---


def _read_responses(value: dict[str, Any]) -> Event:
    """A typed event. What it calls a reasoning summary is shown to the reader as reasoning is, and counts as that."""
    name, _, what = str(value["type"]).removeprefix("response.").rpartition(".")
    delta, response = value.get("delta"), value.get("response")
    if what == "delta" and isinstance(delta, str):
        kind = _delta_kind(name)
        return Event(kind, delta if kind in ("content", "reasoning") else "")
    if name or not isinstance(response, dict):
        return Event("none")
    usage, timings = _read_usage(response.get("usage")), _read_timings(response.get("timings"))
    if what == "failed":
        why = _error_text(response) if response.get("error") else "the response failed"
        return Event("error", "", True, usage, why, timings)
    return Event("none", "", what in ("completed", "incomplete"), usage, None, timings)


def _delta_kind(name: str) -> str:
    if name in ("output_text", "refusal"):
        return "content"
    if name.startswith("reasoning"):
        return "reasoning"
    return "tool" if "_call_" in name or name == "custom_tool_call_input" else "none"


def _output_text(items: Any) -> str:
    messages = [i for i in items if isinstance(i, dict) and i.get("type") == "message"] if type(items) is list else []
    return "".join(_text(message, "content") or "" for message in messages)


# --- Ollama's /api/generate and /api/chat ---


def _read_ollama(value: dict[str, Any]) -> Event:
    """One line: its text is in `response` or `message`; the last one says `done`, and what Ollama counted and timed."""
    message = value.get("message")
    holder = message if isinstance(message, dict) else value
    content, reasoning = _text(holder, "content", "response"), _text(holder, "thinking")
    done, tools = value.get("done") is True, holder.get("tool_calls")
    usage = _usage(value.get("eval_count"), value.get("prompt_eval_count"))
    timings = _read_timings({k: v for k, v in value.items() if k.endswith("_duration")})
    # Ollama keeps an incomplete character back: a line without text is no token
    if content:
        return Event("content", content, done, usage, None, timings)
    if reasoning:
        return Event("reasoning", reasoning, done, usage, None, timings)
    return Event("tool" if isinstance(tools, list) and tools else "none", "", done, usage, None, timings)


# --- TGI's /generate_stream ---


def _read_tgi(value: dict[str, Any]) -> Event:
    """One token; the last one has the whole text beside it, and details when they were asked for."""
    token, details = value.get("token"), value.get("details")
    if not isinstance(token, dict):
        return Event("none")
    text = "" if token.get("special") else _text(token, "text") or ""
    said = details if isinstance(details, dict) else {}
    usage = _usage(said.get("generated_tokens"), said.get("input_length"))
    return Event("content", text, value.get("generated_text") is not None, usage)


# --- what goes for all ---


def server_times_s(timings: dict[str, float] | None) -> tuple[float, float]:
    """From when a server began on the prompt to its first token, and from there to its last; NaN where it doesn't say.

    By the words of dasllama (`ttft_ms`, `gen_ms`), llama.cpp (`prompt_ms`, `predicted_ms`), vLLM (`metrics`, started
    with --enable-per-request-metrics) and Ollama (nanoseconds; loading the model counts). All leave out what comes
    before: the way, reading the request, tokenizing it, and the wait for one of the server's slots.

    Examples
    --------
    >>> server_times_s({"prompt_ms": 20.0, "predicted_ms": 400.0, "predicted_n": 20})
    (0.02, 0.4)
    """
    said = timings or {}
    for first, last in _TIMES_MS:
        if first in said or last in said:
            return said.get(first, math.nan) / 1e3, said.get(last, math.nan) / 1e3
    first_ns = said.get("load_duration", 0) + said.get("prompt_eval_duration", math.nan)
    return first_ns / NS_PER_S, said.get("eval_duration", math.nan) / NS_PER_S


_TIMES_MS = (
    ("ttft_ms", "gen_ms"),
    ("prompt_ms", "predicted_ms"),
    ("time_to_first_token_ms", "generation_time_ms"),
)


def _error_text(value: dict[str, Any]) -> str:
    error = value.get("error")
    named = error.get("message") if isinstance(error, dict) else error
    for text in (named, value.get("message"), value.get("detail")):
        if isinstance(text, str) and text.strip():
            return _short(text)
    try:
        return _short(json.dumps(value))
    except RecursionError:
        return "an error without a message"


def _short(text: str) -> str:
    return " ".join(_whole_text(text).split())[:200]


def _whole_text(text: str) -> str:
    """Text that any encoding takes: halves of a character that came in two events are put together."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- a whole answer ---


@dataclass(frozen=True)
class Answer:
    """What came back for one request, without times: offsets say which read brought what.

    Attributes
    ----------
    outcome : str
        ``"ok"``, ``"stream_error"``, ``"truncated"`` or ``"http_error"``.
    error : str or None
        Why it is not ok.
    ends : list of int
        For each token event, the offset in the body just after its last byte.
    sizes : list of int
        Bytes of each token event: from the end of the event before it, whatever that was, to its own.
    counts : list of int
        Tokens each of them holds: known from running totals when each came with one that grew, else 1.
    counts_known : bool
        Whether `counts` came from running totals, or the server's count means one token an event.
    kinds : list of str
        For each token event ``"content"``, ``"reasoning"`` or ``"tool"``.
    last_event_end : int
        Offset after the last event of any kind; 0 when there is none.
    all_ends : list of int
        The same for every event up to [DONE], which is among them.
    usage : Usage or None
        The last one. Its completion and reasoning tokens are None if tokens came after it.
    text : str
        All content.
    timings : dict or None
        The server's own, as they are.
    streamed : bool
        Whether it was an event stream.
    """

    outcome: str
    error: str | None = None
    ends: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    counts_known: bool = False
    kinds: list[str] = field(default_factory=list)
    last_event_end: int = 0
    all_ends: list[int] = field(default_factory=list)
    usage: Usage | None = None
    text: str = ""
    timings: dict[str, float] | None = None
    streamed: bool = False

    @property
    def output_tokens(self) -> int | None:
        """N: the server's count, else the number of token events; None for a body without a count."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return len(self.ends) if self.streamed or self.outcome == "http_error" else None

    @property
    def token_source(self) -> str | None:
        """Where `output_tokens` comes from: ``"usage"``, ``"events"`` or None."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return "usage"
        return "events" if self.streamed else None

    @property
    def streamed_tokens(self) -> int:
        """n: N less the reasoning tokens that the server counted and never showed."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return _visible(self.usage, "reasoning" in self.kinds)
        return len(self.ends)


def _visible(usage: Usage, shown: bool) -> int:
    total, reasoning = usage.completion_tokens or 0, usage.reasoning_tokens or 0
    # a server that says more reasoning than completion tokens does not count the one in the other
    return total if shown or reasoning > total else total - reasoning


def read_stream(status: int, events: Iterable[tuple[bytes, int]], complete: bool) -> Answer:
    """Read an answer that is an event stream.

    Parameters
    ----------
    status : int
        Of the response; one that isn't 2xx makes an ``http_error`` of any answer.
    events : iterable of (data, end)
        As `sse.EventParser` gives them; read up to [DONE]. The parser of a body that was cut short is not to
        be closed: half an event is none.
    complete : bool
        Whether the HTTP body ended as its framing says; after [DONE] that doesn't matter.

    Examples
    --------
    >>> events = [(b'{"choices": [{"text": "Hi", "finish_reason": "stop"}]}', 62), (b"[DONE]", 76)]
    >>> answer = read_stream(200, events, complete=True)
    >>> answer.outcome, answer.ends, answer.output_tokens, answer.token_source, answer.text
    ('ok', [62], 1, 'events', 'Hi')
    """
    if not 200 <= status < 300:
        return Answer("http_error", f"status {status}")
    read: list[tuple[int, Event]] = []
    for data, end in events:
        event = read_event(data)
        read.append((end, event))
        if event.kind == "done":
            break
    usage = _last_usage(read)
    read = _with_wordless_end(read, usage)
    outcome, error = _stream_outcome([event for _, event in read], complete, usage)
    all_ends = [end for end, _ in read]
    tokens = [
        (end, end - before, event)
        for before, (end, event) in zip([0, *all_ends], read, strict=False)
        if event.kind in TOKEN_KINDS
    ]
    kinds = [event.kind for _, _, event in tokens]
    counts = _running_counts([event.usage for _, _, event in tokens], "reasoning" in kinds)
    one_each = usage is not None and _visible(usage, "reasoning" in kinds) == len(tokens)
    return Answer(
        outcome,
        error,
        ends=[end for end, _, _ in tokens],
        sizes=[size for _, size, _ in tokens],
        counts=counts or [1] * len(tokens),
        counts_known=bool(tokens) and (counts is not None or one_each),
        kinds=kinds,
        last_event_end=all_ends[-1] if all_ends else 0,
        all_ends=all_ends,
        usage=usage,
        text=_whole_text("".join(event.text for _, _, event in tokens if event.kind == "content")),
        timings=next((event.timings for _, event in reversed(read) if event.timings), None),
        streamed=True,
    )


def _stream_outcome(events: list[Event], complete: bool, usage: Usage | None) -> tuple[str, str | None]:
    faults = [event.message for event in events if event.message is not None]
    if faults:
        return "stream_error", faults[0]
    done = bool(events) and events[-1].kind == "done"
    tokens = sum(event.kind in TOKEN_KINDS for event in events)
    after = f"after {tokens} token event{'' if tokens == 1 else 's'}"
    if not done and not complete:
        return "truncated", f"the body was cut short {after}"
    if not done and not any(event.finished for event in events):
        return "truncated", f"the stream ended {after} with neither [DONE] nor a finish reason"
    if not tokens and (usage is None or usage.completion_tokens != 0):
        return "truncated", "the stream ended without a token"
    return "ok", None


def _last_usage(read: list[tuple[int, Event]]) -> Usage | None:
    """The last usage; without its counts of the answer when tokens came after it."""
    stale = False
    for _, event in reversed(read):
        if event.usage is not None:
            return Usage(None, event.usage.prompt_tokens, None) if stale else event.usage
        stale = stale or event.kind in TOKEN_KINDS
    return None


def _with_wordless_end(read: list[tuple[int, Event]], usage: Usage | None) -> list[tuple[int, Event]]:
    """The event that says why an answer ends as a token, if the server counts one more than have come.

    It is the token that ended it, or half a character (vLLM, llama.cpp); elsewhere that event holds none.
    """
    at = max((k for k, (_, event) in enumerate(read) if event.finished), default=None)
    if usage is None or at is None or read[at][1].kind != "none":
        return read
    tokens = [event for _, event in read if event.kind in TOKEN_KINDS]
    shown = any(event.kind == "reasoning" for event in tokens)
    running = _running_counts([event.usage for event in (*tokens, read[at][1])], shown)
    if _visible(usage, shown) != len(tokens) + 1 and (running is None or not tokens):
        return read
    kind = tokens[-1].kind if tokens else "content"
    return [*read[:at], (read[at][0], read[at][1]._replace(kind=kind)), *read[at + 1 :]]


def _running_counts(usages: list[Usage | None], shown: bool) -> list[int] | None:
    """Tokens of each event, when each came with a running total that had grown; else None."""
    totals = [0]
    for usage in usages:
        total = 0 if usage is None else _visible(usage, shown)
        if total <= totals[-1]:
            return None
        totals.append(total)
    return [after - before for before, after in itertools.pairwise(totals)]


def read_body(status: int, body: bytes, complete: bool) -> Answer:
    """Read an answer that is one JSON object.

    Parameters
    ----------
    status : int
        Of the response; one that isn't 2xx makes an ``http_error`` of any answer.
    body : bytes
        Without chunk framing and content coding.
    complete : bool
        Whether the HTTP body ended as its framing says.

    Examples
    --------
    >>> body = b'{"choices": [{"text": "Hi"}], "usage": {"completion_tokens": 1}}'
    >>> answer = read_body(200, body, complete=True)
    >>> answer.outcome, answer.text, answer.output_tokens, answer.ends
    ('ok', 'Hi', 1, [])
    """
    if not 200 <= status < 300:
        return Answer("http_error", _body_error(status, body))
    if not complete:
        return Answer("truncated", "the body was cut short")
    try:
        value = _load(body)
    except (ValueError, RecursionError) as error:
        return Answer("stream_error", f"the body is not JSON: {error}")
    if not isinstance(value, dict):
        return Answer("stream_error", "the body is not a JSON object")
    said = _read_whole(value)
    if said.message is not None:
        return Answer("stream_error", said.message, usage=said.usage, timings=said.timings)
    text = _whole_text(said.text) if said.kind == "content" else ""
    return Answer("ok", usage=said.usage, timings=said.timings, text=text)


def _body_error(status: int, body: bytes) -> str:
    try:
        value = _load(body)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return _error_text(value)
    return _short(body[:2000].decode(errors="replace")) or f"status {status}"


def read_answer(
    status: int, content_type: str, body: bytes, events: Iterable[tuple[bytes, int]] | None, complete: bool
) -> Answer:
    """Read an answer of any kind.

    Parameters
    ----------
    status : int
        Of the response; one that isn't 2xx makes an ``http_error`` of any answer.
    content_type : str
        The response's header of that name, "" when it has none.
    body : bytes
        Without chunk framing and content coding.
    events : iterable of (data, end), optional
        The body's events; None when it is no stream of them (`sse.event_parser` knows).
    complete : bool
        Whether the HTTP body ended as its framing says.

    Examples
    --------
    >>> read_answer(200, "text/html", b"<html>", None, True).error
    'the answer is text/html, neither an event stream nor JSON'
    """
    media = content_type.partition(";")[0].strip().lower()
    is_json = media == "application/json" or media.endswith("+json") or (not media and body[:1] == b"{")
    if is_json or not 200 <= status < 300:
        return read_body(status, body, complete)
    if events is not None:
        return read_stream(status, events, complete)
    return Answer("stream_error", f"the answer is {_short(media or 'of no type')}, neither an event stream nor JSON")
