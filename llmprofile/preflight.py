"""What is checked before anything is sent or written: the server answers its door, the folder is new."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import ssl
from pathlib import Path

from llmprofile.api import Target, models_path, origin, request_head, request_headers, tls_context
from llmprofile.errors import UsageError
from llmprofile.link import Link, resolve
from llmprofile.proxies import Proxy, is_open, through, tunnel_request

SPARE_DESCRIPTORS = 100


def reach(target: Target, timeout_s: float, proxy: Proxy | None = None) -> Link:
    """Connect once, say nothing, and keep what a worker needs to do the same.

    Raises
    ------
    UsageError
        The host is unknown, no address answers, the proxy opens no way to it, or the certificate fails.
    """
    link = _link(target, timeout_s, proxy)
    tls = tls_context(target)
    failure: OSError | None = None
    connected = False
    for family, address in link.addresses:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            try:
                sock.connect(address)
                connected = True
                _open_tunnel(sock, link.tunnel)
                if tls is not None:
                    tls.wrap_socket(sock, server_hostname=target.host).close()
            except OSError as error:
                failure = error
            else:
                return link
    raise UsageError(_why_unreachable(target, proxy, failure, connected))


def _link(target: Target, timeout_s: float, proxy: Proxy | None) -> Link:
    head, headers = request_head(target), request_headers(target)
    if proxy is None:
        return Link(target.url, resolve(target.host, target.port), head, headers, connect_timeout_s=timeout_s)
    plain = target.scheme == "http"
    return Link(
        target.url,
        resolve(proxy.host, proxy.port),
        through(proxy, target, head) if plain else head,
        headers,
        proxy=proxy,
        tunnel=b"" if plain else tunnel_request(proxy, target),
        connect_timeout_s=timeout_s,
    )


def _open_tunnel(sock: socket.socket, request: bytes) -> None:
    if not request:
        return
    sock.sendall(request)
    reply = b""
    while not is_open(reply):
        data = sock.recv(4096)
        if not data:
            raise ConnectionError("the proxy closed the connection")
        reply += data


def _why_unreachable(target: Target, proxy: Proxy | None, failure: OSError | None, connected: bool) -> str:
    where = f"{target.host} port {target.port}"
    if proxy is not None and not isinstance(failure, ssl.SSLError):
        return f"no way to {where} through the proxy {proxy} ({failure}); is it the right one, and up?"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {where} can't be trusted ({failure.verify_message}); "
            "name its authority with ca_file, or ask for no check with verify=False"
        )
    if connected:
        why = getattr(failure, "reason", None) or failure
        return f"{where} does not speak TLS ({why}); is the URL http:// rather than https://?"
    if isinstance(failure, TimeoutError):
        return f"no connection to {where} within the connect timeout; is the server up and reachable?"
    return f"no connection to {where} ({failure}); is the server up?"


def first_model(target: Target, timeout_s: float, proxy: Proxy | None = None) -> str:
    """The first model that the server lists.

    Raises
    ------
    UsageError
        It lists none.
    """
    path = models_path(target)
    connection = _connection(target, timeout_s, proxy)
    asked, headers = path, dict(target.headers)
    if proxy is not None and target.scheme == "http":
        asked, headers = f"{origin('http', target.host, target.port)}{path}", headers | dict(proxy.headers)
    try:
        connection.request("GET", asked, headers=headers)
        response = connection.getresponse()
        status, body = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(f"asked for its models at {path}, the server did not answer ({error}); give model") from None
    finally:
        connection.close()
    try:
        model = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"the server lists no model at {path} (status {status}); give model") from None
    return str(model)


def _connection(target: Target, timeout_s: float, proxy: Proxy | None) -> http.client.HTTPConnection:
    host, port = (target.host, target.port) if proxy is None else (proxy.host, proxy.port)
    if target.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls_context(target))
    if proxy is not None:
        connection.set_tunnel(target.host, target.port, dict(proxy.headers))
    return connection


def check_folder(out: Path | str | None, name: str) -> Path:
    """The run folder to be made.

    Raises
    ------
    UsageError
        It exists, or it can't be made there.
    """
    folder = Path(out) if out is not None else Path("runs") / name
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists; a run folder is never overwritten, name a new one")
    near = next(parent for parent in folder.absolute().parents if parent.exists())
    if not near.is_dir():
        raise UsageError(f"{folder} can't be made: {near} is not a folder")
    return folder


def check_descriptors(slots: tuple[int, ...] | None) -> None:
    """Whether a closed loop's connections fit the limit on open files.

    Raises
    ------
    UsageError
        They don't.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(slots, default=0) + SPARE_DESCRIPTORS if slots else 0
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"a worker with {max(slots or ())} requests in flight needs {needed} open files and the limit is {hard}; "
            "raise it (ulimit -Hn) or use more processes"
        )
