"""Compressed answers through both clients: aiohttp unpacks them by itself, and the wire times must still be right."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmprofile as lp
from conftest import free_port
from cuts import CASES, EVENT_STREAM, check_cuts, events_of, raw_response, segments
from harness import NAMES, Sender, exchange, link_to, run

STEP_S = 0.03
WBITS = {"gzip": 31, "deflate": 15, "x-gzip": 31}
TEXTS = [{"choices": [{"index": 0, "text": f" {i}", "finish_reason": None}]} for i in range(6)]
ENCODINGS = [("gzip", 31), ("deflate", 15), ("deflate", -15)]


def packed(pieces: list[bytes], wbits: int) -> list[bytes]:
    """Each piece flushed, so that it can be unpacked when it has come; the last one ends the stream."""
    packer = zlib.compressobj(wbits=wbits)
    out = [packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]
    return [*out[:-1], out[-1] + packer.flush()]


def scripted(pieces: list[bytes], headers: dict[str, str]) -> bytes:
    """A request that is answered with these pieces, 30 ms apart."""
    import base64

    timed = [((i + 1) * STEP_S, base64.b64encode(piece).decode()) for i, piece in enumerate(pieces)]
    script = {"segments": timed, "headers": headers}
    return json.dumps({"prompt": "p", "stream": True, "script": script}).encode()


@pytest.mark.parametrize(("coding", "wbits"), ENCODINGS)
@pytest.mark.parametrize("client", NAMES)
def test_a_token_has_the_time_of_the_bytes_that_brought_it(
    client: str, coding: str, wbits: int, tmp_path: Path
) -> None:
    pieces = packed(events_of(*TEXTS), wbits)
    with lp.ReferenceServer() as server:
        bodies = [scripted(pieces, EVENT_STREAM | {"Content-Encoding": coding})] * 5
        requests, events = exchange(client, link_to(server.url), bodies, tmp_path, together=1)
        truth = server.tokens()
    assert requests["outcome"].tolist() == ["ok"] * 5, requests["error"].tolist()
    assert requests["answer"].tolist() == [" 0 1 2 3 4 5"] * 5
    events = events.assign(index=events.groupby("request_id").cumcount())
    # a row a segment in the record, of which the last is [DONE]
    both = events.merge(truth, on=["request_id", "index"]).astype(dict.fromkeys(("wire_ns", "wire_lo_ns"), np.int64))
    assert len(both) == 30
    assert (both["wire_ns"] > both["left_ns"]).all()
    assert (both["wire_lo_ns"] <= both["sent_ns"]).all()
    assert ((both["wire_ns"] - both["sent_ns"]) < STEP_S * 1e9 / 2).all()
    assert both["handled_ns"].notna().all() == (client == "conventional")


@pytest.mark.parametrize(("coding", "wbits"), ENCODINGS)
@pytest.mark.parametrize("name", ["plain", "utf8_split", "crlf", "multi_token_chunks"])
def test_recorded_streams_compressed_in_the_parser(name: str, coding: str, wbits: int, tmp_path: Path) -> None:
    """Cut at every byte: nothing but times may depend on it."""
    from cuts import parse_cut

    case = CASES[name]
    raw = raw_response(packed(segments(case)[1], wbits), case["headers"] | {"Content-Encoding": coding})
    requests, events = parse_cut(raw, range(1, len(raw.data)), tmp_path)
    assert (requests["outcome"] == case["expect"]["outcome"]).all()
    assert (requests["output_tokens"] == case["expect"]["tokens"]).all()
    assert requests["answer"].nunique() == 1
    read = events["read"].to_numpy(np.int64).reshape(len(requests), -1)
    # a later cut never moves an event to a later read, and events keep their order
    assert (np.diff(read, axis=0) <= 0).all() and (np.diff(read, axis=1) >= 0).all()
    assert read[0].tolist() == [1] * read.shape[1] and read[-1].tolist() == [0] * read.shape[1]


BROKEN: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str, str]] = {
    "cut short": (lambda pieces: [*pieces[:-1], pieces[-1][:-9]], "gzip", "ends too early"),
    "not compressed": (lambda _: [b"plain text"], "gzip", "can't be decompressed"),
    "unknown": (lambda pieces: pieces, "br", "br is not one of gzip"),
}


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_can_not_be_unpacked_says_why(name: str, client: str, tmp_path: Path) -> None:
    spoil, coding, why = BROKEN[name]
    pieces = spoil(packed(events_of(*TEXTS, done=False), 31))
    with lp.ReferenceServer() as server:
        body = scripted(pieces, EVENT_STREAM | {"Content-Encoding": coding})
        requests, _ = exchange(client, link_to(server.url), [body], tmp_path)
    assert requests["outcome"].tolist() == ["stream_error"]
    assert why in requests["error"][0]


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("asked", [None, "gzip"])
def test_compression_is_asked_for_by_the_caller_only(client: str, asked: str | None, tmp_path: Path) -> None:
    port, heads = free_port(), []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(raw_response(events_of(*TEXTS), EVENT_STREAM).data)
        await writer.drain()
        await reader.read()
        writer.close()

    async def act(sender: Sender) -> None:
        async with await asyncio.start_server(talk, "127.0.0.1", port):
            sender.start(b"{}")
            await sender.all_done(5.0)
            await sender.client.close()
            await asyncio.sleep(0.05)

    from llmprofile.api import parse_target, request_head, request_headers

    url = f"http://127.0.0.1:{port}/v1/completions"
    target = parse_target(url, {"Accept-Encoding": asked} if asked else {})
    with lp.ReferenceServer() as server:
        link: Any = link_to(server.url)
    own = type(link)(url, ((2, ("127.0.0.1", port)),), request_head(target), request_headers(target))
    requests, _ = run(client, own, tmp_path, act)
    assert requests["outcome"].tolist() == ["ok"]
    sent = [line for line in heads[0].lower().split(b"\r\n") if line.startswith(b"accept-encoding")]
    assert sent == ([b"accept-encoding: gzip"] if asked else [])


def test_an_uncompressed_stream_is_the_control(tmp_path: Path) -> None:
    check_cuts(raw_response(events_of(*TEXTS), EVENT_STREAM | {"Content-Encoding": "identity"}), tmp_path)
