"""How a client reaches its server: addresses, TLS, timeouts; made once in the caller, used by both clients."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

from llmprofile.clock import StampedSocket, stamped_socket
from llmprofile.errors import UsageError
from llmprofile.proxies import Proxy, is_open

Address = tuple[int, tuple[Any, ...]]


@dataclass(frozen=True)
class Link:
    """Where requests go and how long they may take.

    Attributes
    ----------
    url : str
    addresses : tuple of (family, sockaddr)
        All of the host's, or of the proxy's before it, tried in this order.
    head : bytes
        The request's head up to the lines that differ from request to request.
    headers : tuple of (name, value)
        The same as pairs, for a client that writes its own head.
    proxy : Proxy, optional
    tunnel : bytes
        What has the proxy open a way to the server; empty where none is needed.
    tls : SSLContext, optional
    server_hostname : str, optional
        The name that the certificate must bear.
    stamps : bool
        Whether to ask the kernel for stamps.
    fresh : bool
        A new connection for each request.
    stream : bool
        Whether answers are event streams.
    connect_timeout_s, first_token_timeout_s, timeout_s : float
        Of a connection, from the start to the first token, of a whole request.
    event_work_s : float
        How long the conventional client computes on each event once its JSON is parsed.
    """

    url: str
    addresses: tuple[Address, ...]
    head: bytes = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    proxy: Proxy | None = None
    tunnel: bytes = field(default=b"", repr=False)
    tls: ssl.SSLContext | None = None
    server_hostname: str | None = None
    stamps: bool = True
    fresh: bool = False
    stream: bool = True
    connect_timeout_s: float = 30.0
    first_token_timeout_s: float = float("inf")
    timeout_s: float = 600.0
    event_work_s: float = 0.0


def resolve(host: str, port: int) -> tuple[Address, ...]:
    """Every address of a host.

    Raises
    ------
    UsageError
        The name is not known.

    Examples
    --------
    >>> resolve("127.0.0.1", 8000)[0][1]
    ('127.0.0.1', 8000)
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the host {host} is not known ({error}); check the URL") from None
    return tuple((int(family), address) for family, _, _, _, address in found)


async def connect(link: Link) -> StampedSocket:
    """A connected stamped socket to the first address that answers.

    Raises
    ------
    OSError
        None did; the last one's reason.
    """
    failure: OSError = OSError("the host has no address")
    for family, address in link.addresses:
        sock = stamped_socket(family, link.stamps)
        try:
            await asyncio.get_running_loop().sock_connect(sock, address)
            await _open_tunnel(sock, link.tunnel)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:  # cancelled: the descriptor must not outlive the attempt
            sock.close()
            raise
        else:
            return sock
    raise failure


async def _open_tunnel(sock: StampedSocket, request: bytes) -> None:
    if not request:
        return
    loop, reply = asyncio.get_running_loop(), b""
    await loop.sock_sendall(sock, request)
    while not is_open(reply):
        data = await loop.sock_recv(sock, 4096)
        if not data:
            raise OSError("the proxy closed the connection")
        reply += data
