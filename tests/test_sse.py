"""Events are those of the WHATWG rules, whatever the cuts: held against a byte-by-byte reading of them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.sse import EventParser, LineParser, event_parser

Events = list[tuple[bytes, int]]


def fed(pieces: list[bytes]) -> Events:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


def by_the_rules(stream: bytes) -> Events:
    """The definition, one byte at a time; the end of the stream ends its last line and event."""
    lines, line, i = [], b"", 0
    while i < len(stream):
        if stream[i : i + 1] in (b"\r", b"\n"):
            i += 2 if stream[i : i + 2] == b"\r\n" else 1
            lines.append((line, i))
            line = b""
        else:
            line += stream[i : i + 1]
            i += 1
    lines += [(line, i), (b"", i)] if line else [(b"", i)]
    if lines[0][0][:3] == b"\xef\xbb\xbf":
        lines[0] = lines[0][0][3:], lines[0][1]
    events: Events = []
    data: list[bytes] = []
    for line, end in lines:
        name, _, value = line.partition(b":")
        if not line and data:
            events.append((b"\n".join(data), end))
            data = []
        elif name == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
    return events


PIECES = [
    *(
        b"data: ",
        b"data:",
        b"data",
        b"da",
        b"x",
        b"{}",
        b" ",
        b":",
        b": ping",
        b"event: e",
        b"id:1",
        b"Data: ",
    ),
    *(b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n", b"\r\r", b"data: y\n\n", b"data: z\r\n\r\n"),
    *(b"\xef\xbb\xbf", b"\xef", b"\xc2\x85", b"\xe2\x80\xa8", b"\x0b", b"\x0c", b"\x1c", b"\x00"),
]
streams = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    bounds = [0, *sorted(a % (len(stream) + 1) for a in at), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(bounds)]


@given(stream=streams, at=st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=1500, deadline=None)
def test_any_stream_in_any_pieces(stream: bytes, at: list[int]) -> None:
    expected = by_the_rules(stream)
    assert fed([stream]) == expected
    assert fed(cut(stream, at)) == expected
    assert fed([stream[i : i + 1] for i in range(len(stream))]) == expected


@given(pieces=st.lists(st.binary(max_size=12), max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_bytes(pieces: list[bytes]) -> None:
    assert fed(pieces) == by_the_rules(b"".join(pieces))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends(end: bytes) -> None:
    stream = end.join([b"\xef\xbb\xbfdata: a", b"", b":", b"", b"data:b", b"data:  c", b"", b"data", b"", b""])
    a = len(b"\xef\xbb\xbfdata: a") + 2 * len(end)
    b = a + len(b":data:bdata:  c") + 5 * len(end)
    expected = [(b"a", a), (b"b\n c", b), (b"", len(stream))]
    for i in range(len(stream) + 1):
        for j in range(i, len(stream) + 1):
            assert fed([stream[:i], stream[i:j], stream[j:]]) == expected


def test_an_event_is_given_with_its_last_byte() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [(b"a", 9)]
    assert parser.feed(b"data: b\r\n\r") == []  # perhaps a LF follows, and belongs to the event
    assert parser.feed(b"\n") == [(b"b", 20)]
    assert parser.feed(b"data: c\r\r") == []
    assert parser.feed(b"d") == [(b"c", 29)]
    assert parser.feed(b"") == []
    assert parser.close() == []
    assert parser.close() == []


def test_other_separators_are_text() -> None:
    text = "a\u2028b\x85c\x0bd\x0ce\x1cf".encode()
    assert fed([b"data: " + text + b"\n\n"]) == [(text, len(text) + 8)]


def test_a_large_event_in_small_pieces() -> None:
    big = b"x" * 300_000
    stream = b"data: " + big + b"\n\ndata: y\n\n"
    rng = random.Random(3)
    pieces = cut(stream, [rng.randrange(len(stream)) for _ in range(50_000)])
    assert fed(pieces) == [(big, len(big) + 8), (b"y", len(stream))]


# --- JSON lines ---


def lines_by_the_rules(stream: bytes) -> Events:
    """LF ends a line, and so does the end of the stream; a line of blanks is none."""
    events: Events = []
    start = 0
    while start < len(stream):
        end = stream.find(b"\n", start)
        line, after = (stream[start:], len(stream)) if end < 0 else (stream[start:end], end + 1)
        if set(line) - set(b" \t\r"):
            events.append((line, after))
        start = after
    return events


LINE_PIECES = [b"{}", b'{"a": 1}', b"\n", b"\n\n", b"\r\n", b"\r", b" ", b"\xe2\x80\xa8", b"\x0b", b"\xff", b"x"]


@given(stream=st.lists(st.sampled_from(LINE_PIECES), max_size=30).map(b"".join), at=st.lists(st.integers(0, 99)))
@settings(max_examples=500, deadline=None)
def test_lines_in_any_pieces(stream: bytes, at: list[int]) -> None:
    for pieces in ([stream], cut(stream, at), [stream[i : i + 1] for i in range(len(stream))]):
        parser = LineParser()
        found = [line for piece in pieces for line in parser.feed(piece)] + parser.close()
        assert found == lines_by_the_rules(stream)
        assert parser.close() == []


@pytest.mark.parametrize(
    ("content_type", "parser"),
    [
        ("text/event-stream", EventParser),
        ("Text/Event-Stream;charset=utf-8", EventParser),
        ("application/x-ndjson", LineParser),
        ("application/jsonl ; charset=utf-8", LineParser),
        ("application/json", None),
        ("text/event-streamer", None),
        ("", None),
    ],
)
def test_which_parser_a_body_takes(content_type: str, parser: type | None) -> None:
    found = event_parser(content_type)
    assert found is None if parser is None else type(found) is parser
