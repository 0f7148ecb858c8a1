"""The client everyone writes: aiohttp, a task a request, JSON parsed on the event loop.

Its stopwatch is read where such clients read it: `begun` before the post, `seen` when the coroutine resumes with
bytes, `handled` when an event has been parsed. Its sockets are stamped as well and its raw bytes are kept, so that
what it reports can be held against when the bytes arrived.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from llmprofile.answers import TOKEN_KINDS, read_event
from llmprofile.capture import Exchange
from llmprofile.clock import StampedSocket, monotonic_ns, stamped_socket
from llmprofile.link import Link
from llmprofile.sse import EventParser, LineParser, event_parser
from llmprofile.units import s_to_ns

_current: contextvars.ContextVar[Exchange] = contextvars.ContextVar("exchange")
_STOPPED = ("cancelled", "the run was stopped")
_LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError)


class _Handler(ResponseHandler):
    """aiohttp's own protocol, which also keeps each read with its stamp for the exchange that owns the connection."""

    sock: StampedSocket | None = None
    exchange: Exchange | None = None

    def data_received(self, data: bytes, _take: Callable[[Any, bytes], None] = ResponseHandler.data_received) -> None:
        # aiohttp calls this without bytes as well, when it resumes reading
        if data and self.exchange is not None:
            sock = self.sock
            self.exchange.reads.append((sock.stamp, sock.asked_ns, monotonic_ns(), data))  # type: ignore[union-attr]
        _take(self, data)

    def eof_received(self) -> None:
        # under TLS a farewell is sent next, which is no part of the request
        if self.sock is not None:
            self.hand_over(None)
        super().eof_received()

    def hand_over(self, exchange: Exchange | None) -> None:
        """Give the exchange that had the connection what the socket noted, and the connection to the next."""
        assert self.sock is not None
        if self.exchange is not None:
            self.exchange.sent_ns = self.sock.first_send_ns
            self.exchange.sent_last_ns = self.sock.last_send_ns
            self.exchange.ooo = self.sock.out_of_order()
        self.exchange = exchange
        self.sock.mark_request()


class _Connector(aiohttp.TCPConnector):
    """aiohttp's connector without a limit, on stamped sockets; tells each exchange which connection it got."""

    def __init__(self, link: Link) -> None:
        super().__init__(
            limit=0,
            force_close=link.fresh,
            ssl=link.tls if link.tls is not None else True,
            socket_factory=lambda info: stamped_socket(info[0], link.stamps),
        )
        # aiohttp has no public way to another protocol; a test fails when this one is gone
        self._factory = functools.partial(_Handler, loop=asyncio.get_running_loop())  # type: ignore[assignment]
        self.owners: dict[Exchange, _Handler] = {}

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        began_ns = monotonic_ns()
        connection = await super().connect(req, traces, timeout)
        exchange, handler, transport = _current.get(), connection.protocol, connection.transport
        assert isinstance(handler, _Handler)
        assert transport is not None
        exchange.reused = handler.sock is not None
        if not exchange.reused:
            exchange.connect_ns = monotonic_ns() - began_ns
            # asyncio hands out a TransportSocket, which wraps the socket that we made
            handler.sock = transport.get_extra_info("socket")._sock
        handler.hand_over(exchange)
        self.owners[exchange] = handler
        return connection

    def release_exchange(self, exchange: Exchange) -> None:
        """The exchange is over; its connection may already serve the next."""
        handler = self.owners.pop(exchange, None)
        if handler is not None and handler.exchange is exchange:
            handler.hand_over(None)


class ConventionalClient:
    """Sends requests as an ordinary asyncio benchmark does.

    Parameters
    ----------
    link : Link
    done : callable
        Called with each exchange when it has ended, in the loop.
    """

    def __init__(self, link: Link, done: Callable[[Exchange], None]) -> None:
        self._link = link
        self._done = done
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}
        self._connector = _Connector(link)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            headers=dict(link.headers),
            skip_auto_headers=("Accept-Encoding",),
            timeout=aiohttp.ClientTimeout(total=link.timeout_s, connect=link.connect_timeout_s),
            proxy=None if link.proxy is None else str(link.proxy),
            proxy_auth=None if link.proxy is None or link.proxy.login is None else aiohttp.BasicAuth(*link.proxy.login),
        )

    async def warm(self, connections: int) -> None:
        """aiohttp opens its connections when they are needed, as an ordinary tool's are."""

    def start(self, exchange: Exchange, name: bytes, body: bytes) -> None:
        """Send a request now, in a task of its own. `name` is its X-Request-Id."""
        task = asyncio.get_running_loop().create_task(self._run(exchange, name.decode(), body))
        self._tasks[exchange] = task
        task.add_done_callback(functools.partial(self._never_begun, exchange))

    def _never_begun(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        # a task that is cancelled before its first step runs none of its code
        if self._tasks.get(exchange) is task:
            self._finish(exchange, *_STOPPED)

    async def _run(self, exchange: Exchange, name: str, body: bytes) -> None:
        if not exchange.resent:
            exchange.begun_ns = monotonic_ns()
        _current.set(exchange)
        try:
            await self._post(exchange, name, body)
            ending, error = "complete", None
        except asyncio.CancelledError:
            ending, error = _STOPPED
        except Exception as failure:  # noqa: BLE001  whatever else aiohttp raises ends this request, not the run
            # a kept-alive connection that was closed before a byte of an answer says nothing about the request
            if isinstance(failure, _LOST) and not exchange.reads and exchange.reused and not exchange.resent:
                self._connector.release_exchange(exchange)
                exchange.resent = True
                self.start(exchange, name.encode(), body)
                return
            ending, error = self._failed(exchange, failure)
        self._finish(exchange, ending, error)

    def _finish(self, exchange: Exchange, ending: str, error: str | None) -> None:
        self._connector.release_exchange(exchange)
        exchange.ended, exchange.error = ending, error
        del self._tasks[exchange]
        self._done(exchange)

    def _failed(self, exchange: Exchange, failure: Exception) -> tuple[str, str]:
        if isinstance(failure, TimeoutError):
            return self._timed_out(exchange, failure)
        if isinstance(failure, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
            return "eof", str(failure)
        return ("reset" if exchange.reads else "connect_error"), str(failure) or type(failure).__name__

    def _timed_out(self, exchange: Exchange, timeout: TimeoutError) -> tuple[str, str]:
        link = self._link
        if isinstance(timeout, aiohttp.ConnectionTimeoutError):
            return "connect_error", f"no connection within {link.connect_timeout_s} s"
        if monotonic_ns() - exchange.begun_ns >= s_to_ns(link.timeout_s):
            return "timeout", f"not finished within {link.timeout_s} s"
        return "timeout", f"no token within {link.first_token_timeout_s} s"

    async def _post(self, exchange: Exchange, name: str, body: bytes) -> None:
        limit_s = self._link.first_token_timeout_s
        async with asyncio.timeout(None if limit_s == float("inf") else limit_s) as first_token:
            async with self._session.post(self._link.url, data=body, headers={"X-Request-Id": name}) as response:
                parser = event_parser(response.content_type) if response.status == 200 else None
                if parser is None:
                    first_token.reschedule(None)
                    await _read_body(exchange, response)
                    return
                # read right here: each coroutine between a task and what it awaits costs at every event
                feed = _stream(exchange, parser, first_token, s_to_ns(self._link.event_work_s))
                async for chunk in response.content.iter_any():
                    feed(chunk)

    def cancel(self) -> None:
        """End everything that is in flight."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Close the session with its connections."""
        await self._session.close()


def _stream(
    exchange: Exchange, parser: EventParser | LineParser, first_token: asyncio.Timeout, work_ns: int
) -> Callable[[bytes], None]:
    """What an ordinary client does with the pieces of one event stream, and the times at which it does it.

    `work_ns` stands for what it does besides with each event: decode, count, print.
    """
    parse, mark, waiting = parser.feed, exchange.marks.append, True

    def feed(chunk: bytes) -> None:
        nonlocal waiting
        seen_ns = monotonic_ns()
        for data, _ in parse(chunk):
            _loads(data)  # and let go of: who kept every answer's objects would parse into cold memory
            if work_ns:
                _work_until(monotonic_ns() + work_ns)
            mark(seen_ns)
            mark(monotonic_ns())
            if waiting and read_event(data).kind in TOKEN_KINDS:
                waiting = False
                first_token.reschedule(None)

    return feed


def _work_until(end_ns: int) -> None:
    while monotonic_ns() < end_ns:
        pass


async def _read_body(exchange: Exchange, response: aiohttp.ClientResponse) -> None:
    body = await response.read()
    exchange.marks.append(monotonic_ns())
    _loads(body)
    exchange.marks.append(monotonic_ns())


def _loads(data: bytes) -> Any:
    """What an ordinary client makes of an event; one that isn't JSON is judged when the run is collected."""
    try:
        return None if data == b"[DONE]" else json.loads(data)
    except ValueError:
        return None
