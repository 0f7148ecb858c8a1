"""An HTTP proxy between client and server, where one is asked for; none is taken unasked."""

from __future__ import annotations

import base64
import os
import urllib.parse
import urllib.request
from dataclasses import dataclass

from llmprofile.api import Target, origin
from llmprofile.errors import UsageError

ENVIRONMENT = "environment"
LONGEST_REPLY = 65536


@dataclass(frozen=True, repr=False)
class Proxy:
    """Where a proxy listens; its password is never shown.

    Attributes
    ----------
    host : str
    port : int
    login : (str, str) or None
        Name and password.
    """

    host: str
    port: int
    login: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return origin("http", self.host, self.port)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What a request says to the proxy itself."""
        if self.login is None:
            return ()
        return (("Proxy-Authorization", f"Basic {base64.b64encode(':'.join(self.login).encode()).decode()}"),)


def parse_proxy(asked: str | None, target: Target) -> Proxy | None:
    """The proxy for a target: none, one that is given, or ``"environment"``: what the environment names for it.

    Parameters
    ----------
    asked : str, optional
        ``http://host:port``, with ``name:password@`` before the host if the proxy wants them, or ``"environment"``.
    target : Target

    Raises
    ------
    UsageError
        It is no such URL; no password is in the sentence.

    Examples
    --------
    >>> from llmprofile.api import parse_target
    >>> parse_proxy("http://me:secret@10.0.0.1:3128", parse_target("http://h/v1/completions"))
    http://10.0.0.1:3128
    """
    if asked == ENVIRONMENT:
        named = urllib.request.getproxies()
        asked = named.get(target.scheme, named.get("all"))
        if urllib.request.proxy_bypass(f"{target.host}:{target.port}"):
            return None
        asked = f"http://{asked}" if asked and "://" not in asked else asked
    if asked is None:
        return None
    try:
        parts = urllib.parse.urlsplit(asked)
        host, port = parts.hostname, parts.port or 80
    except (ValueError, AttributeError):
        host, port = None, 0
    if not host or parts.scheme != "http" or parts.path not in ("", "/"):
        raise UsageError('the proxy must be a URL like http://10.0.0.1:3128, or "environment"')
    login = (
        (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")) if parts.username else None
    )
    return Proxy(host, port, login)


def proxies_ignored() -> list[str]:
    """Environment variables that name a proxy, by name: what is not taken where no proxy was asked for.

    Examples
    --------
    >>> os.environ["http_proxy"] = "http://127.0.0.1:9"
    >>> "http_proxy" in proxies_ignored()
    True
    >>> del os.environ["http_proxy"]
    """
    names = ("http_proxy", "https_proxy", "all_proxy")
    return [name for name in (*names, *map(str.upper, names)) if os.environ.get(name)]


def through(proxy: Proxy, target: Target, head: bytes) -> bytes:
    r"""The head of a plain request as it is sent to a proxy: the whole URL in its first line.

    Examples
    --------
    >>> from llmprofile.api import parse_target, request_head
    >>> target = parse_target("http://h/v1/completions")
    >>> through(Proxy("p", 80), target, request_head(target)).split(b"\r\n")[0]
    b'POST http://h/v1/completions HTTP/1.1'
    """
    first, rest = head.split(b"\r\n", 1)
    method, path, version = first.split(b" ")
    where = origin("http", target.host, target.port).encode()
    lines = [b" ".join((method, where + path, version)), *(f"{k}: {v}".encode() for k, v in proxy.headers)]
    return b"\r\n".join([*lines, rest])


def tunnel_request(proxy: Proxy, target: Target) -> bytes:
    r"""What opens a way through a proxy to a server that speaks TLS.

    Examples
    --------
    >>> from llmprofile.api import parse_target
    >>> tunnel_request(Proxy("p", 80), parse_target("https://h/v1/completions"))
    b'CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n'
    """
    host = f"[{target.host}]" if ":" in target.host else target.host
    where = f"{host}:{target.port}"
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}", *(f"{name}: {value}" for name, value in proxy.headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def is_open(reply: bytes) -> bool:
    r"""Whether a proxy has opened the way; False while its answer has not ended.

    Raises
    ------
    OSError
        It refused, or said something else.

    Examples
    --------
    >>> is_open(b"HTTP/1.1 200 OK\r\n"), is_open(b"HTTP/1.1 200 OK\r\n\r\n")
    (False, True)
    """
    if b"\r\n\r\n" not in reply and len(reply) < LONGEST_REPLY:
        return False
    first = reply.split(b"\r\n", 1)[0].decode("latin-1")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status.startswith("2"):
        raise OSError(f"the proxy refused: {first[:100]}")
    return True
