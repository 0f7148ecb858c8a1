"""A connection that takes 50 ms more to make: that is `connect_s`, no latency, and nothing once it is warm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import llmprofile as lp
from certificates import TlsFiles
from harness import NAMES, Sender, link_to, run
from llmprofile.link import Link
from test_clients import body
from tun import own_network, wire

MORE_S = 0.05
WITHIN_S = 0.005
"""Medians of single requests on a machine with other work."""
REQUESTS = 7
LATENCIES = ("ttft_s", "first_content_s", "e2e_s", "tpot_s", "ntpot_s", "upload_s")
FROM_BEGUN = ("lateness_s", "ttft_due_s", "e2e_due_s", "ttft_seen_s", "e2e_seen_s")
"""What a user waits for from the start: a new connection is part of that."""


@contextlib.contextmanager
def tls_server(more_s: float, tls_files: TlsFiles, **options: Any) -> Iterator[Link]:
    """The server is slow to shake hands."""
    files = {"certfile": tls_files.certfile, "keyfile": tls_files.keyfile}
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.002, connect_delay_s=more_s, **files) as server:
        yield link_to(server.url, ca_file=str(tls_files.ca_file), **options)


@contextlib.contextmanager
def far_server(more_s: float, tls_files: TlsFiles, **options: Any) -> Iterator[Link]:
    """The first packet of each TCP connection is late."""
    with (
        own_network(),
        lp.ReferenceServer(ttft_s=0.02, itl_s=0.002, host="0.0.0.0") as server,
        wire(int(server.base_url.rpartition(":")[2]), connect_s=more_s) as wired,
    ):
        yield link_to(server.url.replace("127.0.0.1", wired.host), **options)


PLACES = {"tls": tls_server, "wire": far_server}


def median_s(client: str, link: Link, folder: Path, warm: int = 0) -> pd.Series:
    """Medians of so many requests, one after another; `connect_s` of those that made a connection."""

    async def act(sender: Sender) -> None:
        await sender.client.warm(warm)
        for _ in range(REQUESTS):
            sender.start(body(max_tokens=8))
            await sender.all_done()

    requests, _ = run(client, link, folder, act)
    assert (requests["outcome"] == "ok").all()
    names = ["connect_s", *LATENCIES, *FROM_BEGUN]
    return requests[names].median().rename(len(requests["connect_s"].dropna()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("client", NAMES)
def test_a_slow_connection_shows_in_connect_s_and_in_no_latency(
    client: str, place: str, tls_files: TlsFiles, tmp_path: Path
) -> None:
    found = {}
    for more_s in (0.0, MORE_S):
        with PLACES[place](more_s, tls_files, fresh=True) as link:
            found[more_s] = median_s(client, link, tmp_path / f"fresh-{more_s}")
    plain, slow = found.values()
    assert (plain.name, slow.name) == (REQUESTS, REQUESTS)
    assert slow["connect_s"] > MORE_S
    assert slow["connect_s"] - plain["connect_s"] == pytest.approx(MORE_S, abs=WITHIN_S)
    for name in LATENCIES:
        assert slow[name] == pytest.approx(plain[name], abs=WITHIN_S), name
    # what counts from the request's start has it
    for name in FROM_BEGUN:
        assert slow[name] - plain[name] == pytest.approx(MORE_S, abs=WITHIN_S), name


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("client", NAMES)
def test_a_slow_connection_that_is_warm_shows_nowhere(
    client: str, place: str, tls_files: TlsFiles, tmp_path: Path
) -> None:
    found = {}
    for more_s in (0.0, MORE_S):
        with PLACES[place](more_s, tls_files) as link:
            found[more_s] = median_s(client, link, tmp_path / f"warm-{more_s}", warm=1)
    plain, slow = found.values()
    # the conventional client opens what it needs when it needs it: the first of seven
    assert plain.name == slow.name == (0 if client == "stamped" else 1)
    for name in (*LATENCIES, *FROM_BEGUN):
        assert slow[name] == pytest.approx(plain[name], abs=WITHIN_S), name


@pytest.mark.parametrize("client", NAMES)
def test_a_server_that_listens_late_to_a_connection_made_by_its_kernel_answers_late(
    client: str, tmp_path: Path
) -> None:
    """Without TLS nothing waits for the server but the request itself, which the kernel has taken: it is latency."""
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.002, connect_delay_s=MORE_S) as server:
        slow = median_s(client, link_to(server.url, fresh=True), tmp_path)
        truth = server.truth()
    assert slow["connect_s"] < WITHIN_S
    assert slow["ttft_s"] == pytest.approx(MORE_S, abs=WITHIN_S)
    true_s = (truth["first_sent_ns"] - truth["arrive_first_ns"]).astype(float).median() / 1e9
    assert slow["ttft_s"] == pytest.approx(true_s, abs=0.001)
