"""What the reference server answers: request to bytes, whole, broken on purpose or scripted. Pure, no I/O."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

from llmprofile.asked import LINE_ENDS, STREAM_HEADERS, Asked, Fault, Script, Style
from llmprofile.units import s_to_ns

_WORD = " tok"
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class Answer(NamedTuple):
    """What one request gets: sends, the tokens that each completes, and what leaves right after the last.

    `offsets_ns` (after arrival) are given where the pace has no say; `stall` is (index of a send, ns).
    """

    sends: list[bytes]
    counts: list[int]
    tail: bytes = b""
    ending: str = "keep"
    status: int = 200
    stall: tuple[int, int] | None = None
    offsets_ns: list[int] | None = None


def head(status: int, headers: Iterable[tuple[str, str]], framing: str, length: int) -> bytes:
    """Status line and headers, with the one that says where the body ends.

    Examples
    --------
    >>> head(200, [], "length", 5)
    b'HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\n'
    """
    end = {"chunked": "Transfer-Encoding: chunked", "close": "Connection: close"}
    lines = [
        f"HTTP/1.1 {status} {_PHRASES.get(status, '')}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    lines.append(end.get(framing, f"Content-Length: {length}"))
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def whole_answer(status: int, said: object, kind: str = "application/json") -> bytes:
    """A whole response with its length: JSON, or bytes as they are."""
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    return head(status, [("Content-Type", kind)], "length", len(body)) + body


def error_said(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI-compatible engines word it."""
    return {"error": {"message": message, "type": "reference_server", "param": None, "code": status}}


def framed(data: bytes, framing: str) -> bytes:
    """`data` as a chunk, in chunked framing; else as it is."""
    return b"%x\r\n%b\r\n" % (len(data), data) if framing == "chunked" else data


def _event(style: Style, said: object) -> bytes:
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    return framed(b"data: " + data + LINE_ENDS[style.line_end] * 2, style.framing)


def _object(chat: bool, style: Style, choices: list[Any], **more: Any) -> dict[str, Any]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": style.model, "choices": choices, **more}


def _usage(prompt_words: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_words, "total_tokens": prompt_words + tokens, "completion_tokens": tokens}


@lru_cache(maxsize=256)
def _token_event(
    style: Style, chat: bool, tokens: int, first: bool, last: bool, usage: tuple[int, int] | None = None
) -> bytes:
    text = _WORD * tokens
    delta = {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
    choice = {"index": 0, **(delta if chat else {"text": text})}
    choice |= {"logprobs": None, "finish_reason": "length" if last else None}
    return _event(style, _object(chat, style, [choice], **({"usage": _usage(*usage)} if usage else {})))


@lru_cache(maxsize=1024)
def _writes(
    style: Style, chat: bool, tokens: int, prompt_words: int | None = None
) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """The sends that carry a stream's tokens, and how many each carries.

    With `prompt_words` each event also says the usage so far.
    """
    step = style.tokens_per_event
    sizes = [min(step, tokens - start) for start in range(0, tokens, step)]
    last = len(sizes) - 1
    totals = [None if prompt_words is None else (prompt_words, total) for total in itertools.accumulate(sizes)]
    events = [
        _token_event(style, chat, size, i == 0, i == last, total)
        for i, (size, total) in enumerate(zip(sizes, totals, strict=True))
    ]
    starts = range(0, len(events), style.events_per_write)
    groups = [slice(start, start + style.events_per_write) for start in starts]
    return tuple(b"".join(events[g]) for g in groups), tuple(sum(sizes[g]) for g in groups)


def answer(style: Style, asked: Asked) -> Answer:
    """The bytes that a request gets.

    Examples
    --------
    >>> from llmprofile.asked import Asked, Style
    >>> reply = answer(Style(), Asked(False, True, 3, False, 2, None, None))
    >>> reply.counts, reply.tail
    ([1, 1, 1], b'e\\r\\ndata: [DONE]\\n\\n\\r\\n0\\r\\n\\r\\n')
    """
    if asked.script is not None:
        return _played(asked.script)
    fault = asked.fault
    if fault and (fault.kind == "status" or (fault.kind == "error" and not asked.stream)):
        said = whole_answer(fault.status, error_said(fault.status, "a fault that was asked for"))
        return Answer([said], [0], status=fault.status, offsets_ns=[0])
    whole_reply = _streamed(style, asked) if asked.stream else _at_once(style, asked)
    reply = _with_fault(style, whole_reply, fault) if fault else whole_reply
    length = _length(reply if fault and fault.kind == "error" else whole_reply) if style.framing == "length" else 0
    if style.split_s is not None:
        reply = _in_halves(reply)
    if asked.stream and (reply.tail or any(reply.sends)):
        reply.sends[0] = head(200, STREAM_HEADERS, style.framing, length) + reply.sends[0]
    return reply


def _length(reply: Answer) -> int:
    return sum(map(len, reply.sends)) + len(reply.tail)


def _end(framing: str) -> tuple[bytes, str]:
    return b"0\r\n\r\n" if framing == "chunked" else b"", "close" if framing == "close" else "keep"


def _played(script: Script) -> Answer:
    parts = [data for _, data in script.segments]
    sends = [framed(data, script.framing) for data in parts]
    sends[0] = head(script.status, script.headers, script.framing, sum(map(len, parts))) + sends[0]
    tail, ending = _end(script.framing)
    offsets_ns = [s_to_ns(t) for t, _ in script.segments]
    return Answer(sends, [1] * len(sends), tail, ending, script.status, offsets_ns=offsets_ns)


def _streamed(style: Style, asked: Asked) -> Answer:
    running = asked.prompt_words if asked.running_usage else None
    sends, counts = _writes(style, asked.chat, asked.tokens, running)
    said = _object(asked.chat, style, [], usage=_usage(asked.prompt_words, asked.tokens))
    usage = _event(style, said) if asked.usage else b""
    end, ending = _end(style.framing)
    return Answer(list(sends), list(counts), usage + _event(style, b"[DONE]") + end, ending)


def _at_once(style: Style, asked: Asked) -> Answer:
    text = _WORD * asked.tokens
    said = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    choice = {"index": 0, **said, "finish_reason": "length"}
    body = _object(False, style, [choice], usage=_usage(asked.prompt_words, asked.tokens))
    body["object"] = "chat.completion" if asked.chat else "text_completion"
    unsent = asked.tokens - 1  # tokens before the last are made, and nothing leaves for them
    return Answer([b""] * unsent + [whole_answer(200, body)], [0] * unsent + [asked.tokens])


def _with_fault(style: Style, reply: Answer, fault: Fault) -> Answer:
    """`reply`, stalled before or cut at the send that holds token `fault.at`."""
    index = before = 0
    while index < len(reply.sends) and before + reply.counts[index] <= fault.at:
        before += reply.counts[index]
        index += 1
    if fault.kind == "stall":
        return reply._replace(stall=(index, s_to_ns(fault.stall_s)))
    sends, counts = reply.sends[:index], reply.counts[:index]
    if fault.kind == "error":
        said = error_said(fault.status, "a fault that was asked for")
        end, ending = _end(style.framing)
        tail = _event(style, b"[DONE]") + end
        return Answer([*sends, _event(style, said)], [*counts, 0], tail, ending)
    cut = reply.sends[index] if before < fault.at and index < len(reply.sends) else b""
    return Answer([*sends, cut[: len(cut) // 2]], [*counts, 0], b"", fault.kind)


def _in_halves(reply: Answer) -> Answer:
    cuts = [(data[: len(data) // 2], data[len(data) // 2 :]) for data in reply.sends]
    sends = [half for pair in cuts for half in pair]
    return reply._replace(sends=sends, counts=[n for count in reply.counts for n in (0, count)])
