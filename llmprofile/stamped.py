"""The measuring client: an `asyncio.Protocol` on kernel-stamped sockets that stores bytes and parses nothing.

On the hot path a read costs one stamp, one clock reading, one append, and the C parser's look for the end of the
response. What the bytes mean is found out after the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from llmprofile.answers import TOKEN_KINDS, read_event
from llmprofile.capture import Exchange, Read
from llmprofile.clock import StampedSocket, monotonic_ns
from llmprofile.http1 import EndWatch, HttpError, parse
from llmprofile.link import Link, connect
from llmprofile.sse import event_parser
from llmprofile.units import MISSING_NS, s_to_ns

SWEEP_S = 0.02
"""How often timeouts are looked for; a request that times out does so at most this much late."""


class _Connection(asyncio.Protocol):
    """One connection: at most one exchange at a time, and its reads."""

    def __init__(self, client: StampedClient, sock: StampedSocket) -> None:
        self.client = client
        self.sock = sock
        self.exchange: Exchange | None = None
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, exchange: Exchange, payload: bytes) -> None:
        self.exchange = exchange
        self.payload = payload
        self.watch = EndWatch()
        self.reads: list[Read] = exchange.reads
        exchange.reused = self.used
        self.used = True
        self.sock.mark_request()
        self.transport.write(payload)

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:  # bytes that nobody asked for: the connection can't be trusted any more
            self.transport.abort()
            return
        self.reads.append((self.sock.stamp, self.sock.asked_ns, monotonic_ns(), data))
        try:
            if self.watch.feed(data):
                self.client.complete(self)
        except HttpError as error:
            self.end("bad_framing", str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.client.lost(self, exc)

    def eof_received(self) -> None:
        # under TLS a farewell is sent next, which is no part of the request
        if self.exchange is not None:
            self._note(self.exchange)

    def take(self) -> Exchange:
        """Give the exchange back, with what the socket noted of it."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        if exchange.sent_ns == MISSING_NS:
            self._note(exchange)
        return exchange

    def _note(self, exchange: Exchange) -> None:
        exchange.sent_ns, exchange.sent_last_ns = self.sock.first_send_ns, self.sock.last_send_ns
        exchange.ooo = self.sock.out_of_order()

    def end(self, ending: str, error: str | None) -> None:
        """Give up on the exchange, and on the connection with it."""
        exchange = self.take()
        self.transport.abort()
        self.client.finish(exchange, ending, error)


class StampedClient:
    """Sends requests over kept-alive connections, one at a time on each, without a limit on their number.

    Parameters
    ----------
    link : Link
    done : callable
        Called with each exchange when it has ended, in the loop.
    """

    def __init__(self, link: Link, done: Callable[[Exchange], None]) -> None:
        self._link = link
        self._done = done
        self._idle: dict[_Connection, None] = {}
        self._in_flight: dict[Exchange, _Connection | asyncio.Task[None]] = {}
        self._unanswered: deque[Exchange] = deque()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def warm(self, connections: int) -> None:
        """Open connections before they are needed; those that fail are left to their requests to report."""
        tries = await asyncio.gather(*(self._open() for _ in range(connections)), return_exceptions=True)
        self._idle.update((t, None) for t in tries if isinstance(t, _Connection))

    def start(self, exchange: Exchange, name: bytes, body: bytes) -> None:
        """Send a request now, on an idle connection or a new one. `name` is its X-Request-Id."""
        exchange.begun_ns = monotonic_ns()
        length = b"%d" % len(body)
        payload = b"".join(
            (self._link.head, b"X-Request-Id: ", name, b"\r\nContent-Length: ", length, b"\r\n\r\n", body)
        )
        if self._idle:
            connection, _ = self._idle.popitem()
            self._send(connection, exchange, payload)
        else:
            self._in_flight[exchange] = self._loop.create_task(self._send_fresh(exchange, payload))
        self._unanswered.append(exchange)

    def _send(self, connection: _Connection, exchange: Exchange, payload: bytes) -> None:
        self._in_flight[exchange] = connection
        connection.send(exchange, payload)

    async def _open(self) -> _Connection:
        async with asyncio.timeout(self._link.connect_timeout_s):
            sock = await connect(self._link)
            _, connection = await self._loop.create_connection(
                lambda: _Connection(self, sock),
                sock=sock,
                ssl=self._link.tls,
                server_hostname=self._link.server_hostname,
            )
        return connection

    async def _send_fresh(self, exchange: Exchange, payload: bytes) -> None:
        began_ns = monotonic_ns()
        try:
            connection = await self._open()
        except TimeoutError:
            self.finish(exchange, "connect_error", f"no connection within {self._link.connect_timeout_s} s")
        except OSError as error:
            self.finish(exchange, "connect_error", str(error) or type(error).__name__)
        else:
            exchange.connect_ns = monotonic_ns() - began_ns
            self._send(connection, exchange, payload)

    def complete(self, connection: _Connection) -> None:
        """The response has ended: keep the connection if both sides may, and give the exchange back."""
        exchange = connection.take()
        if connection.watch.keep_alive and not self._link.fresh and not self._stopping:
            self._idle[connection] = None
        else:
            connection.transport.abort()  # all is read; under TLS a polite close would wait for the server's
        self.finish(exchange, "complete", None)

    def lost(self, connection: _Connection, exc: Exception | None) -> None:
        """The connection is gone: resend what it never began to answer, once; end what it did."""
        self._idle.pop(connection, None)
        if connection.exchange is None:
            return
        exchange = connection.take()
        if not exchange.reads and exchange.reused and not exchange.resent:
            exchange.resent = True
            exchange.connect_ns = exchange.sent_ns = MISSING_NS
            self._in_flight[exchange] = self._loop.create_task(self._send_fresh(exchange, connection.payload))
        elif exc is None:
            self.finish(exchange, "eof", "the server closed the connection")
        else:
            self.finish(exchange, "reset", str(exc) or type(exc).__name__)

    def finish(self, exchange: Exchange, ending: str, error: str | None) -> None:
        """Note how an exchange ended and hand it over."""
        self._in_flight.pop(exchange, None)
        exchange.ended, exchange.error = ending, error
        self._done(exchange)

    def _end(self, exchange: Exchange, ending: str, error: str) -> None:
        holder = self._in_flight[exchange]
        if isinstance(holder, _Connection):
            holder.end(ending, error)
        else:
            holder.cancel()
            self.finish(exchange, ending, error)

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        now_ns, link = monotonic_ns(), self._link
        if link.first_token_timeout_s < link.timeout_s:
            self._sweep_unanswered(now_ns - s_to_ns(link.first_token_timeout_s))
        else:
            self._unanswered.clear()
        while self._in_flight:
            oldest = next(iter(self._in_flight))
            if now_ns - oldest.begun_ns <= s_to_ns(link.timeout_s):
                break
            self._end(oldest, "timeout", f"not finished within {link.timeout_s} s")

    def _sweep_unanswered(self, before_ns: int) -> None:
        # each request is looked at once, when its time for a first token is up: only then is anything parsed
        while self._unanswered and self._unanswered[0].begun_ns <= before_ns:
            exchange = self._unanswered.popleft()
            if exchange in self._in_flight and not has_token(exchange.reads):
                self._end(exchange, "timeout", f"no token within {self._link.first_token_timeout_s} s")

    def cancel(self) -> None:
        """End everything that is in flight."""
        self._stopping = True
        for exchange in list(self._in_flight):
            self._end(exchange, "cancelled", "the run was stopped")

    async def close(self) -> None:
        """Close the idle connections; nothing may be in flight."""
        self._stopping = True
        self._sweeper.cancel()
        for connection in list(self._idle):
            connection.transport.abort()  # not politely, as above
        for _ in range(4):  # TLS, transport and protocol each hear of it one turn of the loop later
            await asyncio.sleep(0)


def has_token(reads: list[Read]) -> bool:
    """Whether what has been read so far holds a token."""
    response = parse([r[3] for r in reads], eof=False)
    parser = event_parser(response.headers.get("content-type", ""))
    return parser is not None and any(read_event(data).kind in TOKEN_KINDS for data, _ in parser.feed(response.body))
