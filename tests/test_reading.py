"""Which answers a conversation goes on with: those whose outcome will be ok."""

from __future__ import annotations

import json

import pytest

from llmprofile.reading import text_if_ok

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices": [{"text": "%b", "index": 0}]}\n\n' % word for word in (b"Hello", b", you", b"")]
DONE = b"data: [DONE]\n\n"


def chunked(*parts: bytes, end: bool = True) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n" * end


def whole(status: int, said: object) -> bytes:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[k : k + size] for k in range(0, len(data), size)]


@pytest.mark.parametrize(
    ("ended", "data", "text"),
    [
        ("complete", chunked(*EVENTS, DONE), "Hello, you"),
        ("reset", chunked(*EVENTS, DONE, end=False), "Hello, you"),
        ("complete", whole(200, {"choices": [{"message": {"content": "Hi"}}]}), "Hi"),
        ("complete", chunked(*EVENTS), None),  # neither [DONE] nor a finish reason
        ("eof", chunked(*EVENTS, end=False), None),
        ("reset", b"", None),
        ("complete", chunked(b'data: {"error": {"message": "no"}}\n\n', DONE), None),
        ("complete", whole(500, {"error": "no"}), None),
        ("complete", whole(200, b"{"), None),
        ("timeout", chunked(*EVENTS, DONE), None),
        ("cancelled", chunked(*EVENTS, DONE), None),
        ("connect_error", b"", None),
        ("bad_framing", b"HTTP/9 nonsense\r\n\r\n", None),
    ],
)
def test_an_answer_goes_on_if_it_is_ok(ended: str, data: bytes, text: str | None) -> None:
    for size in (1, 7, 10_000):
        assert text_if_ok(ended, cut(data, size)) == text
