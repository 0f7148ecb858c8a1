"""Through a proxy that is asked for: every request takes it, for http in its words and for https in a tunnel."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from certificates import TlsFiles
from llmprofile.api import parse_target
from llmprofile.proxies import parse_proxy

CLIENTS = ("stamped", "conventional")
LOAD: dict[str, Any] = {"n": 12, "output_tokens": 4, "seed": 1, "progress": False}


class ForwardProxy:
    """A proxy of a few lines: notes the head of each request or tunnel, and hands bytes on both ways."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self.heads: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://me:s%40crt@127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self.serve, args=self.listener.accept()[:1], daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self.hand_over(client)

    def hand_over(self, client: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = client.recv(65536)
            if not more:
                return
            data += more
        head = data.split(b"\r\n\r\n")[0].decode()
        self.heads.append(head)
        if self.refuse:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        method, where, _ = head.split("\r\n")[0].split(" ")
        host, port = (where if method == "CONNECT" else where.split("/")[2]).split(":")
        with socket.create_connection((host, int(port))) as server:
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                server.sendall(data)
            back = threading.Thread(target=hand_on, args=(server, client), daemon=True)
            back.start()
            hand_on(client, server)
            back.join()


def hand_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy() -> Iterator[ForwardProxy]:
    found = ForwardProxy()
    yield found
    found.listener.close()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_requests_take_the_proxy(
    client: str, tls: bool, proxy: ForwardProxy, tls_files: TlsFiles, tmp_path: Path
) -> None:
    files = {"certfile": tls_files.certfile, "keyfile": tls_files.keyfile} if tls else {}
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.002, **files) as server:
        secure = {"ca_file": str(tls_files.ca_file)} if tls else {}
        run = lp.run_load(
            server.url, lp.Poisson(100), client=client, proxy=proxy.url, out=tmp_path / "run", **secure, **LOAD
        )
        path = server.url.partition(server.base_url)[2]
    assert run.meta["outcomes"] == {"ok": 12}
    assert run.events["wire_ns"].notna().all()
    asked = server.base_url if not tls else server.base_url.partition("://")[2]
    firsts = {head.split("\r\n")[0] for head in proxy.heads}
    if tls:
        assert {first.rpartition("/")[0] for first in firsts} == {f"CONNECT {asked} HTTP"}
    else:
        assert f"POST {asked}{path} HTTP/1.1" in firsts
        assert all(first.split(" ")[1].startswith(asked) for first in firsts)
    assert all("Proxy-Authorization: Basic bWU6c0BjcnQ=" in head for head in proxy.heads)
    # the proxy is on record, its password is not
    assert run.meta["asked"]["proxy"] == f"http://127.0.0.1:{proxy.listener.getsockname()[1]}"
    assert run.meta["machine"]["proxies_ignored"] == []
    written = (tmp_path / "run" / "run.json").read_text()
    assert "s%40crt" not in written
    assert "s@crt" not in json.loads(written)["asked"]["call"]


def test_the_environments_proxy_is_taken_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    plain, secure, near = (
        parse_target(f"{start}/v1/completions") for start in ("http://a.test", "https://a.test", "http://near.test")
    )
    assert parse_proxy("environment", plain) is None
    monkeypatch.setenv("http_proxy", "10.0.0.1:3128")
    monkeypatch.setenv("https_proxy", "http://10.0.0.2")
    monkeypatch.setenv("no_proxy", "near.test")
    assert repr(parse_proxy("environment", plain)) == "http://10.0.0.1:3128"
    assert repr(parse_proxy("environment", secure)) == "http://10.0.0.2"
    assert parse_proxy("environment", near) is None
    assert parse_proxy(None, plain) is None


@pytest.mark.parametrize(
    "asked", ["", "10.0.0.1", "https://u:pw@p", "socks5://p", "http://", "http://p:x", "http://p/x"]
)
def test_what_is_no_proxy_is_refused_without_its_password(asked: str) -> None:
    with pytest.raises(lp.UsageError, match="the proxy must be a URL like") as caught:
        parse_proxy(asked, parse_target("http://h/v1/completions"))
    assert "pw" not in str(caught.value)


def test_a_proxy_that_refuses_or_is_not_there_ends_before_anything_is_sent(tmp_path: Path) -> None:
    refusing = ForwardProxy(refuse=True)
    for proxy, why in ((refusing.url, "403 Forbidden"), ("http://127.0.0.1:1", "Connection refused")):
        with pytest.raises(lp.UsageError, match=f"no way to a.test port 443 through the proxy .*{why}"):
            lp.run_load("https://a.test/v1/completions", lp.Poisson(1), proxy=proxy, out=tmp_path / "run", **LOAD)
    assert not (tmp_path / "run").exists()
    refusing.listener.close()
