"""The reference server's side of a connection: requests in, with their stamps; bytes out, without waiting."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import struct
import sys
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

from llmprofile.clock import turn_stamps_on, wall_minus_monotonic_ns
from llmprofile.errors import UsageError
from llmprofile.units import NS_PER_S

STAMPS = sys.platform == "linux"
_READ_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, for no time, so that close() resets
clock = time.monotonic_ns


def receive(sock: socket.socket) -> tuple[bytes, int, bool]:
    """Bytes, when they arrived on the monotonic clock, and whether the kernel said so."""
    if not STAMPS:
        return sock.recv(_READ_BYTES), clock(), False
    data, control, _, _ = sock.recvmsg(_READ_BYTES, 32)
    if not control:
        return data, clock(), False
    seconds, nanoseconds = struct.unpack("qq", control[0][2])
    return data, seconds * NS_PER_S + nanoseconds - wall_minus_monotonic_ns()[1], True


def listening(host: str, port: int) -> socket.socket:
    """A listening socket whose connections are stamped and send at once, or a `UsageError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address[:2], family=family, backlog=4096)
    except OSError as error:
        raise UsageError(f"can't listen on port {port} of {host}: {error}") from error
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit both options
    if STAMPS:
        turn_stamps_on(sock)
    return sock


def await_stamps(tries: int = 100) -> None:
    """Return once the kernel stamps: it begins some time after the first socket has asked."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as receiver,
    ):
        turn_stamps_on(receiver)
        for _ in range(tries):
            sender.send(b"?")
            if receive(receiver)[2]:
                return
            time.sleep(0.002)


class Request(NamedTuple):
    """One HTTP request; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


def take(inbox: bytearray) -> Request | None:
    """Remove the first whole request; None while there is none. `UsageError` when it isn't one we can read.

    Examples
    --------
    >>> take(bytearray(b"GET /health HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")).headers
    {'host': 'a'}
    """
    end = inbox.find(b"\r\n\r\n")
    if end < 0:
        return None
    first, *lines = inbox[:end].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    parts, length = first.split(" "), headers.get("content-length", "0")
    if len(parts) != 3 or parts[2] != "HTTP/1.1" or not length.isdigit() or "transfer-encoding" in headers:
        raise UsageError("a request must be HTTP/1.1, its body with a Content-Length")
    whole = end + 4 + int(length)
    if len(inbox) < whole:
        return None
    body = bytes(inbox[end + 4 : whole])
    del inbox[:whole]
    return Request(parts[0], parts[1], headers, body)


class Tunnel:
    """TLS between buffers, so that the socket itself is read with its stamps."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def opened(self, data: bytes) -> bytes:
        """The plain bytes in `data`; `ssl.SSLError` when it isn't TLS."""
        self._incoming.write(data)
        plain = b""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while part := self._tls.read(_READ_BYTES):  # shakes hands first
                plain += part
        return plain

    def sealed(self, data: bytes) -> bytes:
        """`data` as it goes on the wire, after whatever the protocol itself has to say."""
        if data:
            self._tls.write(data)
        return self._outgoing.read()

    def ended(self) -> bytes:
        """The closing alert."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._outgoing.read()


class Owner(Protocol):
    """Who answers the requests of a connection."""

    @property
    def selector(self) -> selectors.BaseSelector:
        """What waits for the sockets."""

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer, now or later; `connection.finish` once that is done."""

    def refuse(self, connection: Connection, sentence: str) -> None:
        """Say that this is no request."""

    def rested(self, connection: Connection) -> None:
        """The connection is idle again."""


class Connection:
    """One client's connection.

    Attributes
    ----------
    send : callable
        `socket.send`, or what stands in for it under TLS and while earlier bytes wait for the socket.
    on_gone : callable, optional
        Set while an answer is on its way; called when the connection ends before it.
    first_ns, last_ns : int
        Arrival of the first and the last byte of the request.
    """

    def __init__(self, owner: Owner, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.owner, self.sock = owner, sock
        self._tunnel = Tunnel(tls) if tls else None
        self._plain_send: Callable[[bytes], int] = self._send_sealed if self._tunnel else sock.send
        self.send: Callable[[bytes], int] = self._plain_send
        self.on_gone: Callable[[], None] | None = None
        self.first_ns = self.last_ns = self.answered = 0
        self.stamped = True
        self._inbox, self._backlog = bytearray(), bytearray()
        self._held = self._flushed = 0
        self._owed: list[tuple[int, array[int], int]] = []
        self._ending = "keep"
        sock.setblocking(False)

    def open(self, _due_ns: int = 0) -> None:
        """Begin to listen to the client."""
        self.owner.selector.register(self.sock, selectors.EVENT_READ, self._ready)

    def put(self, data: bytes) -> None:
        """Send what the socket takes now, and the rest when it can."""
        try:
            self._out(self._tunnel.sealed(data) if self._tunnel else data)
        except OSError:
            self.close()

    def hold(self, rest: bytes, sent_ns: array[int] | None = None) -> None:
        """Keep what the socket didn't take; the last of `sent_ns` becomes the time when it has gone."""
        if not self._backlog:
            self.owner.selector.modify(self.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._ready)
            if self._tunnel is None:
                self.send = _nothing
        self._backlog += rest
        self._held += len(rest)
        if sent_ns is not None:
            self._owed.append((self._held, sent_ns, len(sent_ns) - 1))

    def finish(self, ending: str) -> None:
        """The answer has left: close as asked (after the backlog), or go on to the next request."""
        self.on_gone, self._ending = None, ending
        self.answered += 1
        if ending == "reset" or (ending == "close" and not self._backlog):
            self.close(ending)
        elif ending == "keep" and self.sock.fileno() >= 0:
            self.owner.rested(self)

    def resume(self) -> None:
        """Hand over requests, one at a time."""
        try:
            while self.on_gone is None and self._ending == "keep" and (request := take(self._inbox)):
                self.owner.handle(self, request)
                self.first_ns = self.last_ns
        except UsageError as error:
            self.owner.refuse(self, str(error))
            self.finish("close")

    def close(self, ending: str = "close") -> None:
        """Close, or reset; whoever was answering is told."""
        if self.sock.fileno() < 0:
            return
        self.owner.selector.unregister(self.sock)
        self._ending = ending
        with contextlib.suppress(OSError):  # the other side may have gone first
            if ending == "reset":
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            elif self._tunnel:
                self.sock.send(self._tunnel.ended())
        self.sock.close()
        self.send = self._plain_send = _refuse
        if self.on_gone is not None:
            self.on_gone()

    def close_if_idle(self, answered: int, _due_ns: int) -> None:
        """Close, unless a request has come since the connection had given `answered` answers."""
        if self.on_gone is None and self.answered == answered:
            self.close()

    def _ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ and self.sock.fileno() >= 0:
                self._read()
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def _read(self) -> None:
        data, arrive_ns, stamped = receive(self.sock)
        if not data:
            self.close()
            return
        if self._tunnel:
            data = self._tunnel.opened(data)
            self._out(self._tunnel.sealed(b""))
        if not self._inbox:
            self.first_ns, self.stamped = arrive_ns, True
        self.last_ns, self.stamped = arrive_ns, self.stamped and stamped
        self._inbox += data
        self.resume()

    def _out(self, data: bytes) -> None:
        try:
            accepted = 0 if self._backlog else self.sock.send(data)
        except BlockingIOError:
            accepted = 0
        if accepted < len(data):
            self.hold(data[accepted:])

    def _send_sealed(self, data: bytes) -> int:
        self._out(self._tunnel.sealed(data))  # type: ignore[union-attr]
        return len(data)

    def _flush(self) -> None:
        accepted = self.sock.send(self._backlog)
        now_ns = clock()
        del self._backlog[:accepted]
        self._flushed += accepted
        while self._owed and self._owed[0][0] <= self._flushed:
            _, sent_ns, index = self._owed.pop(0)
            sent_ns[index] = now_ns
        if not self._backlog:
            self.owner.selector.modify(self.sock, selectors.EVENT_READ, self._ready)
            self.send = self._plain_send
            if self._ending != "keep":
                self.close(self._ending)


def _nothing(_data: bytes) -> int:
    return 0


def _refuse(_data: bytes) -> int:
    raise BrokenPipeError("the connection is closed")
