"""Packets that are lost, held back or late on a wire of our own: what is marked, what is missing, what stays right."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmprofile as lp
from certificates import TlsFiles
from harness import NAMES, Sender, exchange, link_to, run
from joined import tokens_beside_truth
from llmprofile.jobs import loop_jobs
from test_clients import body
from tun import Wire, own_network, wire

TTFT_S, ITL_S = 0.03, 0.01
HOLD_S = 4.5 * ITL_S
"""Four tokens come before the one that is held."""
TOKENS = 20


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with own_network():
        yield


@pytest.fixture(scope="module")
def server(network: None) -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=TTFT_S, itl_s=ITL_S, host="0.0.0.0") as server:
        yield server


def port_of(server: lp.ReferenceServer) -> int:
    return int(server.base_url.rpartition(":")[2])


def over(wired: Wire, server: lp.ReferenceServer) -> str:
    """The server's address at the other end of the wire."""
    return server.url.replace("127.0.0.1", wired.host)


def scripted(word: str) -> bytes:
    """A request whose answer holds the word, as its third token of seven."""
    texts = ["a", "b", word, "d", "e", "f", "g"]
    said = [f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n' for text in texts] + ["data: [DONE]\n\n"]
    segments = [[TTFT_S + ITL_S * k, base64.b64encode(event.encode()).decode()] for k, event in enumerate(said)]
    return body(script={"segments": segments})


@pytest.mark.parametrize("hold_s", [HOLD_S, math.inf], ids=["late", "lost"])
@pytest.mark.parametrize("client", NAMES)
def test_requests_whose_packets_came_out_of_order_are_marked_and_no_others(
    server: lp.ReferenceServer, tmp_path: Path, client: str, hold_s: float
) -> None:
    """Every second request on one connection; a lost packet is sent again, after those that follow have come."""
    bodies = [scripted("calm"), scripted("rough")] * 4
    with wire(port_of(server), every=1, marker="rough", hold_s=hold_s) as wired:
        requests, events = exchange(client, link_to(over(wired, server)), bodies, tmp_path, together=1)
        assert wired.held() == 4
    assert (requests["outcome"] == "ok").all()
    assert requests["reused"].tolist() == [False] + [True] * 7
    assert requests["reordered"].tolist() == [False, True] * 4
    assert events.groupby("request_id")["wire_ns"].apply(lambda at_ns: at_ns.is_monotonic_increasing).all()
    assert (events["wire_lo_ns"] <= events["wire_ns"]).all()


@pytest.mark.parametrize("client", NAMES)
def test_what_the_network_repaired_is_no_delay_of_the_client(
    server: lp.ReferenceServer, tmp_path: Path, client: str
) -> None:
    """One packet in 100 held back: the client delay of requests that met one is missing everywhere."""
    with wire(port_of(server), every=100, hold_s=HOLD_S) as wired:
        made = load(over(wired, server), tmp_path, client, n=40)
        held = wired.held()
    rows, both = made.requests, tokens_beside_truth(made, server)
    marked = rows["reordered"].to_numpy(bool)
    assert made.meta["outcomes"] == {"ok": 40}
    # a packet that no other follows in time is late and not out of order
    assert held // 2 <= marked.sum() <= held
    # what waited for a packet that was held: its read bears that one's stamp, or that of one which came before it, by
    # the kernel's way of joining packets; the latter would make the rest of the hole the client's
    followed = both[both["index"] < TOKENS - 1]
    waited = followed.loc[followed["seen_ns"] - followed["left_ns"] > HOLD_S * 1e9, "request_id"].unique()
    assert held // 2 <= len(waited) and np.isin(waited, rows.loc[marked, "request_id"]).all()
    # of the others everything is as it always is
    calm = both[both["request_id"].isin(rows.loc[~marked, "request_id"])]
    assert (calm["wire_ns"] >= calm["left_ns"]).all()
    assert both.groupby("request_id")["wire_ns"].apply(lambda at_ns: at_ns.is_monotonic_increasing).all()

    bias = lp.separate_bias(made)
    assert bias.frame["n"].tolist()[:3] == [40 - marked.sum()] * 3
    assert bias.frame.loc["itl", "n"] == (40 - marked.sum()) * (TOKENS - 1)
    assert f"{marked.sum()} request" in bias.notes[0] and "reordered" in bias.notes[0]
    own = "seen" if client == "stamped" else "handled"
    known = (rows.loc[~marked, f"ttft_{own}_s"] - rows.loc[~marked, "ttft_s"]).mean()
    assert bias.frame.loc["ttft_s", "difference_s"] == pytest.approx(known, abs=1e-9)
    [jobs] = loop_jobs(made)
    assert jobs.unplaced == marked.sum() * TOKENS
    assert len(jobs) == 40 + (40 - marked.sum()) * TOKENS
    # latencies stay: of the wire as well
    assert rows["ttft_s"].notna().all() and rows["e2e_s"].notna().all()


def load(url: str, folder: Path, client: str, **options: Any) -> lp.Run:
    asked = {"output_tokens": TOKENS, "prompt_tokens": 10, "seed": 4, "progress": False}
    return lp.run_load(url, lp.Poisson(40), out=folder / "run", client=client, **(asked | options))


@pytest.mark.parametrize("client", NAMES)
def test_a_wire_in_order_leaves_nothing_missing(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    with wire(port_of(server)) as wired:
        made = load(over(wired, server), tmp_path, client, n=12)
    assert made.requests["reordered"].tolist() == [False] * 12
    bias = lp.separate_bias(made)
    assert (bias.frame["n"] > 0).all() and bias.frame.loc["ttft_s", "n"] == 12
    assert not any("reordered" in note for note in bias.notes)
    assert loop_jobs(made)[0].unplaced == 0


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("client", NAMES)
def test_order_is_known_to_the_end_of_every_connection(
    client: str, fresh: bool, tls_files: TlsFiles, tmp_path: Path
) -> None:
    """Under TLS a connection may be closed before its request is handed over."""
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.002, certfile=tls_files.certfile, keyfile=tls_files.keyfile) as server:
        link = link_to(server.url, ca_file=str(tls_files.ca_file), fresh=fresh)

        async def act(sender: Sender) -> None:
            for _ in range(2):
                sender.start(body())
                sender.start(body())
                await sender.all_done()
            await asyncio.sleep(0.05)  # for the last one's end

        requests, _ = run(client, link, tmp_path, act)
    assert requests["reordered"].tolist() == [False] * 4


@pytest.mark.parametrize("client", NAMES)
def test_without_stamps_nobody_knows(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    requests, _ = exchange(client, link_to(server.url, stamps=False), [body()] * 2, tmp_path)
    assert requests["reordered"].isna().all()
