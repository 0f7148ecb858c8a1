"""Where an HTTP/1.1 response ends, and what its body is (httptools does the framing). Pure, no I/O."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser


class HttpError(Exception):
    """A server sent bytes that are not an HTTP/1.1 response; the message says where they went wrong."""


def _refuse(data: bytes) -> None:
    raise HttpParserError("bytes after the end of the response")


class EndWatch:
    r"""Watches one response for its end, on the hot path: no headers, no body, one C call a read.

    Informational (1xx) responses are passed over. A body that only the close of the connection ends is never
    reported as complete: the close itself says so.

    Attributes
    ----------
    status : int
        The final status; 0 until the response is complete.
    keep_alive : bool
        Whether the connection may carry another request; valid once complete. False as well when the server
        sent bytes beyond the response.

    Examples
    --------
    >>> watch = EndWatch()
    >>> watch.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nh"), watch.feed(b"i")
    (False, True)
    >>> watch.status, watch.keep_alive
    (200, True)
    """

    __slots__ = ("_feed", "_parser", "complete", "keep_alive", "status")

    def __init__(self) -> None:
        self.complete = False
        self.keep_alive = False
        self.status = 0
        self._parser: Any = HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data

    def feed(self, data: bytes) -> bool:
        """Take one read; return whether the response is complete.

        Raises
        ------
        HttpError
            The framing is broken, or the server switched protocols.
        """
        try:
            self._feed(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.keep_alive = False
            if not self.complete:
                self._release()
                raise HttpError(_sentence(error)) from None
        if self.complete:
            self._release()
            return True
        return False

    def _release(self) -> None:
        # The parser holds our methods and we hold the parser: without this cut each response would wait for
        # the garbage collector, which is off inside the measured window.
        self._feed = _refuse
        self._parser = None

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self.complete and not 100 <= status < 200:
            self.complete = True
            self.status = status
            self.keep_alive = self._parser.should_keep_alive()


@dataclass(frozen=True)
class Response:
    """A whole response, and which read brought which part of it.

    Attributes
    ----------
    status : int or None
        None when the head never completed.
    headers : dict
        Of the final head, once it is complete: lower-case names, repeated ones joined by ``", "``. Trailers are not
        among them.
    body : bytes
        Without chunk framing and content coding.
    body_ends : list of int
        One a read: length of the decoded body after it. Body offset ``x`` came with the first read ``i`` that
        has ``body_ends[i] > x``.
    head_read : int or None
        Index of the read that completed the head.
    complete : bool
        Whether the body ended as its framing says it must.
    keep_alive : bool
        Whether the connection could carry another request.
    error : str or None
        What is wrong with the framing or the coding.
    """

    status: int | None
    headers: dict[str, str]
    body: bytes
    body_ends: list[int]
    head_read: int | None
    complete: bool
    keep_alive: bool
    error: str | None


def parse(reads: Sequence[bytes], eof: bool) -> Response:
    r"""Parse a response from its reads; never raises, whatever the bytes are.

    Parameters
    ----------
    reads : sequence of bytes
        What each ``recv`` returned, in order.
    eof : bool
        Whether the server closed the connection after the last read. That ends a body without a length; a
        chunked one or one with a length is cut short by it.

    Examples
    --------
    >>> head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    >>> response = parse([head + b"2\r\nhi\r\n", b"1\r\n!\r\n0\r\n\r\n"], eof=False)
    >>> response.body, response.body_ends, response.complete
    (b'hi!', [2, 3], True)
    """
    state = _Parse()
    body_ends = []
    for index, read in enumerate(reads):
        if state.complete:
            state.go_on(read)
        elif state.framing_error is None:
            state.feed(read, index)
        body_ends.append(len(state.body))
    state.finish(eof)
    error = state.framing_error or state.coding_error
    return Response(
        status=state.status,
        headers=state.whole_headers(),
        body=bytes(state.body),
        body_ends=body_ends,
        head_read=state.head_read,
        complete=state.complete and error is None,
        keep_alive=state.keep_alive and error is None,
        error=error,
    )


class _Parse:
    """What `parse` knows so far; httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, list[str]] = {}
        self.head_read: int | None = None
        self.complete = False
        self.keep_alive = False
        self.framing_error: str | None = None
        self.coding_error: str | None = None
        self.body = self._raw = bytearray()  # two things when there is a coding
        self._raw_end: int | None = None
        self._codings: list[_Coding] = []
        self._read = 0
        self.on_body = self._raw.extend  # straight into the buffer: no Python frame for each chunk
        self._parser = HttpResponseParser(self)

    def feed(self, read: bytes, index: int) -> None:
        self._read = index
        try:
            self._parser.feed_data(read)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.keep_alive = False
            if not self.complete:
                self.framing_error = _sentence(error)
        if self.complete:
            del self._raw[self._raw_end :]  # what came after the end is no part of this response
        if self.body is not self._raw:
            self._decode()

    def go_on(self, read: bytes) -> None:
        """Take a read after the end of the response; line ends may follow it."""
        if read.strip(b"\r\n"):
            self.keep_alive = False

    def _decode(self) -> None:
        data = bytes(self._raw)
        self._raw.clear()
        if self.coding_error is None:
            for coding in self._codings:
                data = coding.feed(data)
                if coding.error is not None and self.coding_error is None:
                    self.coding_error = f"the body can't be decompressed: {coding.error}"
            self.body += data

    def finish(self, eof: bool) -> None:
        del self._parser  # it holds our methods: a cycle
        if eof and self.status is not None and not self._framed():
            self.complete = True
        if self.complete and any(coding.open for coding in self._codings):
            self.coding_error = self.coding_error or "the compressed body ends too early"

    def whole_headers(self) -> dict[str, str]:
        # of a head that never completed, how many are known would depend on where the reads fell
        return {} if self.status is None else {name: ", ".join(values) for name, values in self.headers.items()}

    def _framed(self) -> bool:
        last = ",".join(self.headers.get("transfer-encoding", [])).rpartition(",")[2]
        return last.strip().lower() == "chunked" or "content-length" in self.headers

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False
        else:
            self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is None:  # later ones are trailers
            values = self.headers.setdefault(name.decode("latin-1").lower(), [])
            values.append(value.decode("latin-1").strip())

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.status is None and not 100 <= status < 200:
            self.status = status
            self.head_read = self._read
            self._codings, self.coding_error = _codings(",".join(self.headers.get("content-encoding", [])))
            if self._codings or self.coding_error:
                self.body = bytearray()

    def on_message_complete(self) -> None:
        if self.status is not None and not self.complete:
            self.complete = True
            self.keep_alive = self._parser.should_keep_alive()
            self._raw_end = len(self._raw)


def _sentence(error: Exception) -> str:
    if isinstance(error, HttpParserUpgrade):
        return "the server switched to another protocol"
    return str(error) or "not an HTTP response"


class _Coding:
    """Undoes gzip or deflate, piece by piece."""

    def __init__(self, gzip: bool) -> None:
        self._gzip = gzip
        self._inflate = zlib.decompressobj(31) if gzip else None
        self.open = False  # begun and not ended
        self.error: str | None = None

    def feed(self, data: bytes) -> bytes:
        """What these bytes hold, up to the first that is wrong; `error` says what is."""
        out = []
        while data and self.error is None:
            if self._inflate is None:
                # "deflate" should be zlib's format, whose first byte ends in 8; some servers send it bare
                self._inflate = zlib.decompressobj(15 if data[0] & 15 == 8 else -15)
            elif self._inflate.eof and self._gzip:
                self._inflate = zlib.decompressobj(31)  # gzip may have several members
            elif self._inflate.eof:
                self.error = "bytes after its end"
                break
            before = self._inflate.copy()
            try:
                out.append(self._inflate.decompress(data))
            except zlib.error as error:
                # zlib keeps what it had of this piece to itself; the body must not depend on where pieces end
                out.append(_until_it_breaks(before, data))
                self.error = str(error)
            data = self._inflate.unused_data
            self.open = not self._inflate.eof
        return b"".join(out)


def _until_it_breaks(inflate: Any, data: bytes) -> bytes:
    out: list[bytes] = []
    with contextlib.suppress(zlib.error):
        out.extend(inflate.decompress(data[i : i + 1]) for i in range(len(data)))
    return b"".join(out)


def _codings(names: str) -> tuple[list[_Coding], str | None]:
    codings = []
    for name in reversed([n.strip().lower() for n in names.split(",")]):
        if name in ("gzip", "x-gzip", "deflate"):
            codings.append(_Coding(gzip=name != "deflate"))
        elif name not in ("", "identity"):
            return [], f"the body's content-encoding {name[:40]} is not one of gzip, deflate, identity"
    return codings, None
