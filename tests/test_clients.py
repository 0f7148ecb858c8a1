"""Both clients against real sockets: every recorded stream, reused and reset connections, timeouts, sizes."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from certificates import TlsFiles
from harness import NAMES, Sender, exchange, link_to, run
from joined import outside_bracket
from llmprofile.clock import CycleSelector
from llmprofile.conventional import _Handler
from llmprofile.latency import token_gaps

CASES = {case["name"]: case for case in json.loads((Path(__file__).parent / "data/streams.json").read_text())}
FRAMINGS = ("chunked", "length", "close")


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.002) as server:
        yield server


def body(**fields: Any) -> bytes:
    """A request's JSON."""
    return json.dumps({"prompt": "hello", "max_tokens": 4, "stream": True, **fields}).encode()


def scripted(case: dict[str, Any], framing: str) -> bytes:
    """A request that the server answers with a recorded stream."""
    script = {"segments": case["segments"], "status": case["status"], "headers": case["headers"], "framing": framing}
    return body(script=script)


def check_case(row: pd.Series, events: pd.DataFrame, case: dict[str, Any], late_s: float) -> None:
    """What must be reported for a recorded stream; times may be late by as much as the server was."""
    expect, name = case["expect"], case["name"]
    assert row["outcome"] == expect["outcome"], (name, row["error"])
    tokens = row["output_tokens"]
    assert (0 if pd.isna(tokens) else tokens) == expect["tokens"], name
    for key in ("token_source", "status"):
        assert key not in expect or row[key] == expect[key], name
    assert "text" not in expect or row["answer"] == expect["text"], name
    for metric in ("ttft_s", "first_content_s", "e2e_s", "tpot_s", "ntpot_s"):
        if metric in expect:
            wanted = math.nan if expect[metric] is None else expect[metric]
            assert row[metric] == pytest.approx(wanted, abs=late_s, nan_ok=True), (name, metric)
    if "itl" in expect:
        ids, at_ns, counts = (events[c].to_numpy(np.int64) for c in ("request_id", "wire_ns", "tokens"))
        gaps_s = token_gaps(ids, at_ns, counts)[0][1:]
        assert gaps_s.tolist() == pytest.approx(expect["itl"], abs=late_s), name


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("client", NAMES)
def test_every_recorded_stream(client: str, tls: bool, tls_files: TlsFiles, tmp_path: Path) -> None:
    pairs = list(itertools.product(CASES.values(), FRAMINGS))
    files = {"certfile": tls_files.certfile, "keyfile": tls_files.keyfile} if tls else {}
    with lp.ReferenceServer(**files) as server:
        link = link_to(server.url, ca_file=str(tls_files.ca_file) if tls else None)
        bodies = [scripted(case, framing) for case, framing in pairs]
        requests, events = exchange(client, link, bodies, tmp_path, together=6)
        truth, sends = server.record()
    truth = truth.set_index("request_id")
    took_s = (sends["sent_ns"] - sends["left_ns"]).groupby(sends["request_id"]).max() / 1e9
    by_request = dict(tuple(events.groupby("request_id")))
    for (case, framing), (_, row) in zip(pairs, requests.iterrows(), strict=True):
        own = by_request.get(row["request_id"], events.iloc[:0])
        if framing == "close" and case["name"] == "truncated":
            assert row["outcome"] == "truncated"
        own_truth = truth.loc[row["request_id"]]
        # bytes that do not fit the socket's buffers go on their way when the client reads: 300 kB take milliseconds
        transfer_s = own["bytes"].max() / 1e7 if len(own) else 0.0
        server_s = own_truth["late_ns"] / 1e9 + took_s.get(row["request_id"], 0.0)
        check_case(row, own, case, late_s=0.002 + transfer_s + server_s)


@pytest.mark.parametrize("client", NAMES)
def test_connections_are_kept_and_reused(server: lp.ReferenceServer, client: str, tmp_path: Path) -> None:
    requests, _ = exchange(client, link_to(server.url), [body()] * 5, tmp_path, together=1)
    assert requests["reused"].tolist() == [False, True, True, True, True]
    assert requests["connect_s"].notna().tolist() == [True, False, False, False, False]
    assert (requests["outcome"] == "ok").all()


@pytest.mark.parametrize("client", NAMES)
def test_a_reset_of_a_kept_alive_connection_is_sent_once_more(
    server: lp.ReferenceServer, client: str, tmp_path: Path
) -> None:
    """Reset before a byte of the answer on a connection that had served before: once more on a fresh one, marked."""
    bodies = [body(), body(fault={"kind": "reset", "at": 0, "reused": True}), body()]
    requests, _ = exchange(client, link_to(server.url), bodies, tmp_path, together=1)
    assert requests["outcome"].tolist() == ["ok", "ok", "ok"]
    assert requests["resent"].tolist() == [False, True, False]
    assert requests["reused"].tolist() == [False, False, True]


@pytest.mark.parametrize("client", NAMES)
def test_a_reset_that_is_not_sent_again(server: lp.ReferenceServer, client: str, tmp_path: Path) -> None:
    """Before the head on a fresh connection, and after some tokens on any."""
    bodies = [body(fault={"kind": "reset", "at": 0}), body(), body(fault={"kind": "reset", "at": 2})]
    requests, events = exchange(client, link_to(server.url), bodies, tmp_path, together=1)
    assert requests["outcome"].tolist() == ["connect_error", "ok", "truncated"]
    assert not requests["resent"].any()
    assert requests["error"].notna().tolist() == [True, False, True]
    assert (events["request_id"] == 2).sum() <= 2


@pytest.mark.parametrize("client", NAMES)
def test_idle_connections_that_the_server_closes_leave_the_pool(client: str, tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001, close_idle_s=0.0) as server:

        async def act(sender: Sender) -> None:
            for _ in range(3):
                sender.start(body())
                await sender.all_done()
                await asyncio.sleep(0.05)  # the loop sees the close

        requests, _ = run(client, link_to(server.url), tmp_path, act)
    assert (requests["outcome"] == "ok").all()
    assert not requests["reused"].any() and not requests["resent"].any()


@pytest.mark.parametrize("client", NAMES)
def test_timeouts(server: lp.ReferenceServer, client: str, tmp_path: Path) -> None:
    link = link_to(server.url, timeout_s=0.5, first_token_timeout_s=0.2)
    bodies = [
        body(fault={"kind": "stall", "at": 0, "stall_s": 2.0}),
        body(fault={"kind": "stall", "at": 2, "stall_s": 2.0}),
        body(),
    ]
    requests, events = exchange(client, link, bodies, tmp_path)
    assert requests["outcome"].tolist() == ["timeout", "timeout", "ok"]
    assert requests["error"].tolist()[:2] == ["no token within 0.2 s", "not finished within 0.5 s"]
    assert (events["request_id"] == 1).sum() == 2
    assert requests["output_tokens"].tolist()[1:] == [2, 4]


@pytest.mark.parametrize("client", NAMES)
def test_closed_port(client: str, tmp_path: Path, server: lp.ReferenceServer) -> None:
    from conftest import free_port

    port = free_port()
    link = link_to(server.url)
    closed = type(link)(
        url=f"http://127.0.0.1:{port}/v1/completions",
        addresses=((2, ("127.0.0.1", port)),),
        head=link.head,
        headers=link.headers,
    )
    requests, _ = exchange(client, closed, [body()] * 3, tmp_path)
    assert requests["outcome"].tolist() == ["connect_error"] * 3
    assert requests["error"].str.contains("refused|Connect call failed|Cannot connect").all()
    assert requests["sent_ns"].isna().all()


@pytest.mark.parametrize("client", NAMES)
def test_every_address_is_tried(client: str, tmp_path: Path, server: lp.ReferenceServer) -> None:
    """`localhost` may be ::1 first; the server listens on 127.0.0.1 alone."""
    link = link_to(server.url.replace("127.0.0.1", "localhost"))
    if client == "stamped":
        from dataclasses import replace

        port = link.addresses[0][1][1]
        link = replace(link, addresses=((10, ("::1", port, 0, 0)), *link.addresses))
    requests, _ = exchange(client, link, [body()] * 2, tmp_path)
    assert (requests["outcome"] == "ok").all()


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize("client", NAMES)
def test_long_prompts_are_sent_whole(server: lp.ReferenceServer, client: str, tmp_path: Path) -> None:
    requests, _ = exchange(client, link_to(server.url), [body(prompt="word " * 400_000)] * 3, tmp_path)
    assert (requests["outcome"] == "ok").all()
    assert (requests["upload_s"] > 0).all()
    assert (requests["sent_last_ns"] <= requests["first_wire_ns"]).all()
    assert (requests["prompt_tokens"] == 400_000).all()
    truth = server.truth().set_index("request_id").tail(3).sort_index()
    # the last byte can't arrive before its send began, nor the first before the first send did
    assert (truth["arrive_first_ns"].to_numpy() >= requests["sent_ns"].to_numpy(np.int64)).all()


@pytest.mark.parametrize("client", NAMES)
def test_cancelled_in_flight(server: lp.ReferenceServer, client: str, tmp_path: Path) -> None:
    async def act(sender: Sender) -> None:
        for _ in range(3):
            sender.start(body(fault={"kind": "stall", "at": 2, "stall_s": 5.0}))
        await asyncio.sleep(0.2)
        sender.client.cancel()
        await sender.all_done(2.0)

    requests, events = run(client, link_to(server.url), tmp_path, act)
    assert requests["outcome"].tolist() == ["cancelled"] * 3
    assert len(events) == 6
    assert requests["ttft_s"].notna().all()


@pytest.mark.parametrize("client", NAMES)
def test_a_stop_ends_what_has_just_been_started_as_well(
    server: lp.ReferenceServer, client: str, tmp_path: Path
) -> None:
    async def act(sender: Sender) -> None:
        for _ in range(3):  # no turn of the loop between them and the stop
            sender.start(body())
        sender.client.cancel()
        await sender.all_done(5.0)

    requests, _ = run(client, link_to(server.url), tmp_path, act)
    assert requests["outcome"].tolist() == ["cancelled"] * 3
    assert requests["error"].tolist() == ["the run was stopped"] * 3


@pytest.mark.parametrize("client", NAMES)
def test_what_is_not_http(client: str, tmp_path: Path) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async def act(sender: Sender) -> None:
        listener = await asyncio.start_server(talk, "127.0.0.1", port)
        async with listener:
            sender.start(body())
            await sender.all_done(5.0)
            await sender.client.close()
            await asyncio.sleep(0.05)

    from conftest import free_port

    port = free_port()
    with lp.ReferenceServer() as server:
        link = link_to(server.url)
    other = type(link)(f"http://127.0.0.1:{port}/v1/completions", ((2, ("127.0.0.1", port)),), link.head, link.headers)
    requests, _ = run(client, other, tmp_path, act)
    assert requests["outcome"].tolist() == ["stream_error"]
    assert requests["error"].notna().all()


def test_a_first_token_is_looked_for_without_disturbing_the_rest(server: lp.ReferenceServer, tmp_path: Path) -> None:
    link = link_to(server.url, first_token_timeout_s=0.3)
    requests, _ = exchange("stamped", link, [body(max_tokens=400)], tmp_path)
    assert requests["outcome"].tolist() == ["ok"]
    assert requests["e2e_s"][0] > 0.3


def test_aiohttp_still_has_the_place_where_the_protocol_is_made() -> None:
    import aiohttp

    async def factory() -> Any:
        connector = aiohttp.TCPConnector()
        made = connector._factory()
        await connector.close()
        return made

    assert issubclass(_Handler, type(asyncio.run(factory())))


# --- controls: a delay of known length in the client shows as bias, in the server as latency ---

STALL_S = 0.06


def stall_every(n: int, sender_selector: CycleSelector) -> list[float]:
    """Let every n-th turn of the loop that found something ready sleep before it reads; how long each slept, s."""
    select, turns, slept_s = sender_selector.select, itertools.count(1), list[float]()

    def stalling(timeout: float | None = None) -> Any:
        ready = select(timeout)
        if ready and next(turns) % n == 0:
            began_s = time.monotonic()
            time.sleep(STALL_S)
            slept_s.append(time.monotonic() - began_s)
        return ready

    sender_selector.select = stalling  # type: ignore[method-assign]
    return slept_s


def beside_record(events: pd.DataFrame, server: lp.ReferenceServer) -> pd.DataFrame:
    """Tokens with the server's record of them."""
    events = events.assign(index=events.groupby("request_id").cumcount())
    both = events.merge(server.tokens(forget=True), on=["request_id", "index"])
    assert len(both) == len(events)
    return both.astype(dict.fromkeys(("wire_ns", "wire_lo_ns", "seen_ns", "left_ns", "sent_ns"), np.int64))


@pytest.mark.parametrize("client", NAMES)
def test_a_stall_in_the_client_is_bias_of_that_length_and_leaves_the_wire_alone(client: str, tmp_path: Path) -> None:
    """Tokens 100 ms apart, every third read stalled by 60 ms: stalled tokens are seen 60 ms later than others."""
    with lp.ReferenceServer(ttft_s=0.1, itl_s=0.1) as server:
        bodies = [body(max_tokens=8)] * 4

        slept_s: list[float] = []

        async def act(sender: Sender) -> None:
            nonlocal slept_s
            slept_s = stall_every(3, sender.selector)
            for request in bodies:
                sender.start(request)
            await sender.all_done()

        _, events = run(client, link_to(server.url), tmp_path, act)
        both = beside_record(events, server)
    assert len(both) == 32
    seen = "handled_ns" if client == "conventional" else "seen_ns"
    delay_s = (both[seen].astype(np.int64) - both["wire_ns"]) / 1e9
    stalled = delay_s > STALL_S / 2
    assert 4 <= stalled.sum() < 32
    # positive control: the stall, all of it, is measured as bias
    found_s = delay_s[stalled].median() - delay_s[~stalled].median()
    assert found_s == pytest.approx(np.median(slept_s), rel=0.02)
    # negative control: the wire is where the server's record says, within what that record leaves open
    assert outside_bracket(both).empty
    error_ns = both["wire_ns"] - both["sent_ns"]
    assert error_ns[stalled].max() < 5_000_000


def test_the_conventional_client_works_on_each_event_for_as_long_as_asked(tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.005) as server:
        handled_s = {}
        for work_s in (0.0, 0.002):
            link = link_to(server.url, event_work_s=work_s)
            _, events = exchange("conventional", link, [body(max_tokens=40)], tmp_path / str(work_s))
            first = events.drop_duplicates("read")  # of events that share a read, the one that needn't wait
            handled_s[work_s] = (first["handled_ns"] - first["seen_ns"]).to_numpy(float) / 1e9
    assert handled_s[0.002].min() >= 0.002
    # each lasts as long as asked and what JSON takes; single ones are disturbed by whatever else runs here
    more_s = np.median(handled_s[0.002]) - np.median(handled_s[0.0])
    assert more_s == pytest.approx(0.002, rel=0.1)


@pytest.mark.parametrize("client", NAMES)
def test_brackets_hold_when_a_stall_merges_tokens(client: str, tmp_path: Path) -> None:
    """Tokens 5 ms apart and stalls of 60 ms: the kernel merges what waits, and the bracket says so."""
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.005) as server:

        async def act(sender: Sender) -> None:
            stall_every(5, sender.selector)
            for _ in range(5):
                sender.start(body(max_tokens=60))
            await sender.all_done()

        requests, events = run(client, link_to(server.url), tmp_path, act)
        both = beside_record(events, server)
    assert len(both) == 300
    assert outside_bracket(both).empty
    late_s = (both["wire_ns"] - both["sent_ns"]) / 1e9
    assert late_s.max() > 0.02, "tokens that waited in one read carry the stamp of the last"
    assert (requests["outcome"] == "ok").all()
    # where a read held one event, nothing is merged and the stamp is exact
    alone = both.groupby(["request_id", "read"])["index"].transform("size") == 1
    last = both.groupby("request_id")["index"].transform("max") == both["index"]
    assert late_s[alone & ~last].max() < 0.005


def test_a_stall_in_the_server_is_latency_and_no_bias(server: lp.ReferenceServer, tmp_path: Path) -> None:
    late = body(fault={"kind": "stall", "at": 0, "stall_s": 0.2})
    requests, _ = exchange("stamped", link_to(server.url), [body(), late] * 5, tmp_path, together=1)
    moved_s = requests["ttft_s"][1::2].median() - requests["ttft_s"][::2].median()
    assert moved_s == pytest.approx(0.2, rel=0.02)
    bias_s = (requests["ttft_seen_s"] - requests["ttft_s"]).to_numpy()
    assert np.abs(np.median(bias_s[1::2]) - np.median(bias_s[::2])) < 0.002
