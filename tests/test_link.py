"""Addresses and connections."""

from __future__ import annotations

import asyncio
import socket

import pytest

import llmprofile as lp
from llmprofile.clock import StampedSocket
from llmprofile.link import Link, connect, resolve


def link_of(*ports: int) -> Link:
    return Link("u", tuple((socket.AF_INET, ("127.0.0.1", port)) for port in ports), b"", ())


def test_resolve() -> None:
    assert resolve("127.0.0.1", 80) == ((socket.AF_INET, ("127.0.0.1", 80)),)
    assert {address[0] for _, address in resolve("localhost", 80)} <= {"127.0.0.1", "::1"}
    for name in ("no-such-host.invalid", "x" * 80, "a..b"):
        with pytest.raises(lp.UsageError, match="not known"):
            resolve(name, 80)


def test_the_first_address_that_answers_is_taken_and_the_last_reason_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port = listener.getsockname()[1]
        closed = other.getsockname()[1]
        other.close()
        sock = asyncio.run(connect(link_of(closed, port)))
        with sock:
            assert isinstance(sock, StampedSocket)
            assert sock.getpeername()[1] == port
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(connect(link_of(closed)))
        with pytest.raises(OSError, match="no address"):
            asyncio.run(connect(link_of()))


def test_what_would_give_a_secret_away_is_not_shown() -> None:
    link = Link("u", (), b"Authorization: hush", (("Authorization", "hush"),))
    assert "hush" not in repr(link)
