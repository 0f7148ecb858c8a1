"""Framing: the end of a response and its body must not depend on how the bytes were cut into reads."""

from __future__ import annotations

import contextlib
import gc
import gzip
import itertools
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.http1 import EndWatch, HttpError, parse

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n"


def length(body: bytes, more: bytes = b"", status: bytes = OK) -> bytes:
    return status + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(pieces: list[bytes], more: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = b"".join(b"%X;x=1\r\n%s\r\n" % (len(p), p) for p in pieces if p)
    return CHUNKED + more + b"\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


WHOLE = {
    "length": (length(b"hello"), 200, True, b"hello"),
    "no body": (length(b""), 200, True, b""),
    "chunked": (chunked([b"he", b"llo"]), 200, True, b"hello"),
    "trailers": (chunked([b"hello"], b"Trailer: X-T\r\n", b"X-T: 1\r\nX-E:\r\n"), 200, True, b"hello"),
    "close": (length(b"hi", b"Connection: close\r\n"), 200, False, b"hi"),
    "chunked close": (chunked([b"hi"], b"Connection: close\r\n"), 200, False, b"hi"),
    "http/1.0": (length(b"hi", status=b"HTTP/1.0 200 OK\r\n"), 200, False, b"hi"),
    "100 first": (b"HTTP/1.1 100 Continue\r\n\r\n" + length(b"hi"), 200, True, b"hi"),
    "two 103": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 2 + chunked([b"hi"]), 200, True, b"hi"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, True, b""),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, True, b""),
    "500": (length(b"no", status=b"HTTP/1.1 500 Oh\r\n"), 500, True, b"no"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_end_is_the_last_byte(name: str) -> None:
    raw, status, keep_alive, body = WHOLE[name]
    for cut in range(1, len(raw)):
        watch = EndWatch()
        assert not watch.feed(raw[:cut])
        assert watch.feed(raw[cut:])
        assert (watch.status, watch.keep_alive) == (status, keep_alive)
        response = parse([raw[:cut], raw[cut:]], eof=False)
        assert (response.status, response.keep_alive, response.body) == (status, keep_alive, body)
        assert response.complete and response.error is None and response.body_ends[-1] == len(body)
        assert not parse([raw[:cut]], eof=False).complete


@pytest.mark.parametrize("name", WHOLE)
def test_close_does_not_complete_a_framed_body(name: str) -> None:
    raw, _, _, body = WHOLE[name]
    head = raw.rfind(b"HTTP/1.") + raw[raw.rfind(b"HTTP/1.") :].index(b"\r\n\r\n") + 4
    for cut in range(len(raw)):
        response = parse([raw[:cut]], eof=True)
        assert not response.complete
        assert (response.status is not None) == (cut >= head)
        assert body.startswith(response.body)


def test_byte_by_byte() -> None:
    raw = chunked([b"he", b"llo"])
    response = parse([raw[i : i + 1] for i in range(len(raw))], eof=False)
    assert response.body == b"hello" and response.head_read == raw.index(b"\r\n\r\n") + 3
    reads = [next(i for i, end in enumerate(response.body_ends) if end > x) for x in range(5)]
    assert bytes(raw[i] for i in reads) == b"hello"


def test_body_that_the_close_ends() -> None:
    raw = OK + b"\r\nabc"
    watch = EndWatch()
    assert not watch.feed(raw)
    assert not parse([raw], eof=False).complete
    response = parse([raw, b"def"], eof=True)
    assert response.complete and not response.keep_alive
    assert response.body == b"abcdef" and response.body_ends == [3, 6]


@pytest.mark.parametrize("extra", [b"junk", b"HTTP/1.1 200", length(b"other"), chunked([b"other"]), b"\0"])
@pytest.mark.parametrize("name", ["length", "chunked", "close", "204"])
def test_bytes_beyond_the_end(name: str, extra: bytes) -> None:
    raw, status, _, body = WHOLE[name]
    for reads in ([raw + extra], [raw, extra]):
        watch = EndWatch()
        assert [watch.feed(read) for read in reads] == [True] * len(reads)
        assert watch.status == status and not watch.keep_alive
        response = parse(reads, eof=False)
        assert response.complete and response.body == body and response.error is None
        assert response.body_ends == [len(body)] * len(reads)


BROKEN = {
    "not HTTP": b"SSH-2.0-OpenSSH_9\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "chunk size": CHUNKED + b"\r\nzz\r\nhi\r\n",
    "chunk end": CHUNKED + b"\r\n2\r\nhixx",
    "both lengths": CHUNKED + b"Content-Length: 2\r\n\r\n",
    "negative length": OK + b"Content-Length: -2\r\n\r\n",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_framing(name: str) -> None:
    watch = EndWatch()
    with pytest.raises(HttpError) as caught:
        for i in range(len(BROKEN[name])):
            watch.feed(BROKEN[name][i : i + 1])
    assert str(caught.value)
    with pytest.raises(HttpError):
        watch.feed(OK)
    response = parse([BROKEN[name]], eof=True)
    assert response.error == str(caught.value)
    assert not response.complete and not response.keep_alive


def test_headers() -> None:
    more = b"X-A: 1 \r\nX-EMPTY:\r\nx-a:\t2\r\nX-L: caf\xe9\r\n"
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    raw = early + chunked([b"hi"], more, b"X-Trailer: 1\r\n")
    for cut in range(len(raw)):
        response = parse([raw[:cut], raw[cut:]], eof=False)
        assert response.headers == {
            "transfer-encoding": "chunked",
            "x-a": "1, 2",
            "x-empty": "",
            "x-l": "caf\xe9",
        }


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


BODY = bytes(random.Random(1).choices(b"abcdef\n", k=700))
CODED = {
    b"gzip": gzip.compress(BODY),
    b"GZip ": gzip.compress(BODY[:300]) + gzip.compress(BODY[300:]),
    b"x-gzip": gzip.compress(BODY),
    b"deflate": zlib.compress(BODY),
    b" deflate": bare_deflate(BODY),
    b"deflate, gzip": gzip.compress(zlib.compress(BODY)),
    b"identity": BODY,
}


@pytest.mark.parametrize("coding", CODED)
def test_content_codings(coding: bytes) -> None:
    more = b"Content-Encoding: " + coding + b"\r\n"
    for raw in (length(CODED[coding], more), chunked([CODED[coding][:9], CODED[coding][9:]], more)):
        for cut in range(0, len(raw), 5):
            response = parse([raw[:cut], raw[cut:]], eof=False)
            assert response.body == BODY and response.complete and response.error is None
            assert response.body_ends[1] == len(BODY)


def test_a_flushed_piece_of_a_coded_body_belongs_to_its_read() -> None:
    packer = zlib.compressobj(wbits=31)
    pieces = [packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH) for text in (b"one", b"three")]
    reads = [OK + b"Content-Encoding: gzip\r\n\r\n" + pieces[0], pieces[1], packer.flush()]
    response = parse(reads, eof=True)
    assert response.body == b"onethree" and response.body_ends == [3, 8, 8] and response.complete


@pytest.mark.parametrize(
    ("coding", "data", "word"),
    [
        (b"gzip", gzip.compress(BODY)[:-9], "too early"),
        (b"gzip", b"plain text", "decompressed"),
        (b"deflate", zlib.compress(BODY) + b"x", "after its end"),
        (b"br", b"xxx", "br is not one of gzip"),
    ],
)
def test_broken_coding(coding: bytes, data: bytes, word: str) -> None:
    response = parse([length(data, b"Content-Encoding: " + coding + b"\r\n")], eof=False)
    assert response.error is not None and word in response.error
    assert response.status == 200 and not response.complete


def test_no_body_needs_no_decoding() -> None:
    response = parse([length(b"", b"Content-Encoding: gzip\r\n")], eof=False)
    assert response.complete and response.body == b""


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    cuts=st.lists(st.integers(0, 500), max_size=12),
    framing=st.sampled_from(["chunked", "length", "close"]),
)
@settings(max_examples=300, deadline=None)
def test_body_and_reads_for_any_cuts(pieces: list[bytes], cuts: list[int], framing: str) -> None:
    body = b"".join(pieces)
    raw = {"chunked": chunked(pieces), "length": length(body), "close": OK + b"\r\n" + body}[framing]
    bounds = sorted({0, len(raw), *(cut % len(raw) for cut in cuts)})
    reads = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    response = parse(reads, eof=framing == "close")
    assert response.body == body and response.complete
    for i, end in enumerate(response.body_ends):
        so_far = parse([raw[: bounds[i + 1]]], eof=False)
        assert so_far.body == body[:end]
    watch = EndWatch()
    assert [watch.feed(read) for read in reads] == [False] * (len(reads) - 1) + [framing != "close"]


def test_never_raises_on_any_bytes() -> None:
    rng = random.Random(2)
    seeds = [raw for raw, *_ in WHOLE.values()] + list(BROKEN.values())
    seeds += [length(data, b"Content-Encoding: gzip\r\n") for data in (CODED[b"gzip"][:60], b"", b"\x1f")]
    outcomes = set()
    for _ in range(20_000):
        raw = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw) + 1)
            raw[at : at + rng.randint(0, 2)] = rng.choice((b"", b"\r\n", b"0", b":", b"\xff", rng.randbytes(2)))
        cut = rng.randrange(len(raw) + 1)
        reads = [bytes(raw[:cut]), bytes(raw[cut:])]
        response = parse(reads, eof=rng.random() < 0.5)
        assert len(response.body_ends) == 2 and response.body_ends[-1] == len(response.body)
        watch, ended = EndWatch(), None
        try:
            ended = [watch.feed(read) for read in reads][-1]
        except HttpError:
            assert response.error is not None
        if ended:
            assert watch.status == response.status
        outcomes.add((response.complete, response.error is None, ended))
    assert len(outcomes) > 4  # it has met complete, broken and unfinished responses


def test_a_finished_watch_needs_no_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for raw in (WHOLE["chunked"][0], BROKEN["chunk size"]):
            watch = EndWatch()
            with contextlib.suppress(HttpError):
                watch.feed(raw)
            parse([raw], eof=False)
            del watch
        kept = [o for o in gc.get_objects() if type(o).__module__ == "llmprofile.http1"]
    finally:
        gc.enable()
    assert not kept


@pytest.mark.parametrize(("coding", "wbits"), [(b"gzip", 31), (b"deflate", 15), (b"deflate", -15)])
@pytest.mark.parametrize("chunks", [False, True])
def test_what_a_broken_coding_held_does_not_depend_on_the_cuts(coding: bytes, wbits: int, chunks: bool) -> None:
    """Up to the first wrong byte, wherever the reads fell: zlib keeps to itself what it had of a piece that broke."""
    packer = zlib.compressobj(wbits=wbits)
    spoilt = packer.compress(BODY[:300]) + packer.flush(zlib.Z_SYNC_FLUSH) + b"\xff\xff"
    more = b"Content-Encoding: " + coding + b"\r\n"
    raw = chunked([spoilt[:9], spoilt[9:]], more) if chunks else length(spoilt, more)
    for cut in range(len(raw)):
        response = parse([raw[:cut], raw[cut:]], eof=False)
        assert response.body == BODY[:300] and not response.complete
        assert response.error is not None and "can't be decompressed" in response.error


def test_a_framing_error_is_told_before_one_of_the_coding() -> None:
    more = b"Content-Encoding: gzip\r\n"
    raw = chunked([b"plain text"], more).replace(b"0\r\n\r\n", b"zz\r\n\r\n")
    errors = {parse([raw[:cut], raw[cut:]], eof=False).error for cut in range(1, len(raw))}
    assert len(errors) == 1 and "decompressed" not in str(errors)


def test_an_unknown_coding_leaves_no_body() -> None:
    raw = length(b"data: x\n\n", b"Content-Encoding: br\r\n")
    for cut in range(1, len(raw)):
        response = parse([raw[:cut], raw[cut:]], eof=False)
        assert response.body == b"" and response.body_ends == [0, 0] and "br is not one of" in str(response.error)


def test_a_head_that_never_completed_has_no_headers() -> None:
    raw = OK + b"Content-Type: text/plain\r\nBad}: x\r\n\r\n"
    for cut in range(1, len(raw)):
        response = parse([raw[:cut], raw[cut:]], eof=True)
        assert (response.status, response.headers) == (None, {}) and response.error is not None


@pytest.mark.parametrize("extra", [b"\r\n", b"\r\n\r\n"])
def test_line_ends_after_a_response_are_no_extra_bytes(extra: bytes) -> None:
    raw, *_ = WHOLE["length"]
    assert parse([raw + extra], eof=False).keep_alive and parse([raw, extra], eof=False).keep_alive
    assert not parse([raw, extra + b"x"], eof=False).keep_alive
