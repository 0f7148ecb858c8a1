"""From the reads of a response to the answer in it: after a run, and between the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from llmprofile.answers import Answer, read_answer
from llmprofile.http1 import Response, parse
from llmprofile.sse import event_parser

CLIENT_OUTCOMES = frozenset(("connect_error", "timeout", "cancelled"))
"""Endings that say what became of a request, whatever was read of its answer."""


def read_response(response: Response) -> tuple[Answer, list[int] | None]:
    """What a response says, and the ends of its events; None when it isn't an event stream.

    Examples
    --------
    >>> head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\n\\r\\n"
    >>> answer, ends = read_response(parse([head + b'{"choices": [{"text": "Hi"}]}'], eof=True))
    >>> answer.text, ends
    ('Hi', None)
    """
    kind = response.headers.get("content-type", "")
    parser = event_parser(kind)
    if parser is None:
        return read_answer(response.status or 0, kind, response.body, None, response.complete), None
    events = parser.feed(response.body)
    if response.complete:  # the end of the body ends its last event; a cut does not
        events += parser.close()
    answer = read_answer(response.status or 0, kind, response.body, events, response.complete)
    return answer, [end for _, end in events]


def text_if_ok(ended: str, reads: Sequence[bytes]) -> str | None:
    """The text of an answer whose outcome will be `ok`, else None.

    Parameters
    ----------
    ended : str
        One of `capture.ENDINGS`.
    reads : sequence of bytes

    Examples
    --------
    >>> text_if_ok("timeout", []) is None
    True
    """
    response = parse(reads, eof=ended in ("complete", "eof"))
    if ended in CLIENT_OUTCOMES or response.head_read is None:
        return None
    answer, _ = read_response(response)
    return answer.text if answer.outcome == "ok" else None
