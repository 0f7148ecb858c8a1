"""Body bytes to events, wherever reads cut them: server-sent ones (WHATWG HTML, section 9.2.6) and JSON lines. Pure."""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class EventParser:
    r"""Splits a body, fed in any pieces, into events; what comes out never depends on where the cuts were.

    Lines end with LF, CRLF or CR and with nothing else. Comments and the fields event, id and retry are
    passed over, and an event without a data line isn't one. Nothing is decoded or stripped.

    Examples
    --------
    >>> parser = EventParser()
    >>> parser.feed(b'data: {"a"'), parser.feed(b": 1}\n\n: ping\n\ndata: x")
    ([], [(b'{"a": 1}', 16)])
    >>> parser.close()
    [(b'x', 31)]
    """

    __slots__ = ("_data", "_end", "_line")

    def __init__(self) -> None:
        self._end = 0  # offset in the stream after the last complete line
        self._data: list[bytes] = []  # data lines of the event that is open
        self._line: list[bytes] = []  # pieces of the line that is open

    def feed(self, chunk: bytes) -> list[tuple[bytes, int]]:
        """Take the next bytes; return the events that they completed.

        Returns
        -------
        list of (data, end)
            `data`: the data lines joined by LF. `end`: offset in the whole stream just after the last byte of
            the blank line that ended the event.
        """
        events: list[tuple[bytes, int]] = []
        if chunk.find(b"\r") >= 0:  # twice as fast as `in`, which first tries its operand as a number
            self._feed_lines(chunk, events)
            return events
        start, size, end = 0, len(chunk), self._end
        at_event = not (self._line or self._data)
        while start < size:
            stop = chunk.find(b"\n", start)
            if at_event and chunk.startswith(b"data: ", start) and chunk.startswith(b"\n\n", stop):
                end += stop + 2 - start
                events.append((chunk[start + 6 : stop], end))
                start = stop + 2
            else:  # anything but one data line: line by line, to where an event is sure to start
                blank = chunk.find(b"\n\n", start)
                cut = blank + 2 if blank >= 0 else size
                self._end = end
                self._feed_lines(chunk[start:cut], events)
                start, end, at_event = cut, self._end, True
        self._end = end
        return events

    def close(self) -> list[tuple[bytes, int]]:
        """End the stream, and with it the event that is still open."""
        events: list[tuple[bytes, int]] = []
        line = b"".join(self._line)
        self._line = []
        if line:
            self._take_line(line, events)
        if self._data:
            self._take_line(b"", events)
        return events

    def _feed_lines(self, chunk: bytes, events: list[tuple[bytes, int]]) -> None:
        pieces = self._line
        if pieces and pieces[-1].endswith(b"\r"):  # perhaps the first half of a CRLF: look at it again
            chunk = b"".join(pieces) + chunk
            pieces.clear()
        lines = chunk.splitlines(keepends=True)
        # a CR at the very end is held back, with its line, until the next byte is known
        tail = b"" if chunk.endswith(b"\n") else lines.pop()
        for line in lines:
            if pieces:
                line = b"".join(pieces) + line
                pieces.clear()
            self._take_line(line, events)
        if tail:
            pieces.append(tail)

    def _take_line(self, line: bytes, events: list[tuple[bytes, int]]) -> None:
        self._end += len(line)
        if self._end == len(line):  # the first line of the stream
            line = line.removeprefix(_BOM)
        line = line.rstrip(b"\r\n")
        if not line:
            if self._data:
                events.append((b"\n".join(self._data), self._end))
                self._data = []
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            self._data.append(b"")


class LineParser:
    r"""Splits a body of JSON lines, fed in any pieces, as `EventParser` splits one of events.

    A line ends with LF, or with the body; a blank one is none.

    Examples
    --------
    >>> parser = LineParser()
    >>> parser.feed(b'{"done": fa'), parser.feed(b'lse}\n\n{"done"')
    ([], [(b'{"done": false}', 16)])
    """

    __slots__ = ("_end", "_line")

    def __init__(self) -> None:
        self._end = 0  # offset in the stream after the last complete line
        self._line: list[bytes] = []  # pieces of the line that is open

    def feed(self, chunk: bytes) -> list[tuple[bytes, int]]:
        """Take the next bytes; return the lines that they completed: data, and the offset after their LF."""
        events: list[tuple[bytes, int]] = []
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            line = b"".join((*self._line, piece))
            self._line.clear()
            self._end += len(line) + 1
            if line.strip(b" \t\r"):
                events.append((line, self._end))
        if rest:
            self._line.append(rest)
        return events

    def close(self) -> list[tuple[bytes, int]]:
        """End the stream, and with it the line that is still open."""
        line = b"".join(self._line)
        self._line.clear()
        self._end += len(line)
        return [(line, self._end)] if line.strip(b" \t\r") else []


_LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")


def event_parser(content_type: str) -> EventParser | LineParser | None:
    """The parser for a body of this type: of server-sent events, of JSON lines, or None for what is no stream.

    Examples
    --------
    >>> type(event_parser("text/event-stream; charset=utf-8")).__name__, event_parser("text/html")
    ('EventParser', None)
    """
    media = content_type.partition(";")[0].strip().lower()
    if media == "text/event-stream":
        return EventParser()
    return LineParser() if media in _LINES else None
