"""Random cuts and mutations of recorded answers: no crash, no hang, nothing that depends on where the reads fall.

    python tests/benchmarks/fuzz.py [--n 1000000] [--seed 1]

Each answer is a recorded stream of some API in some framing and coding, in three of four rounds with bytes changed,
in one of four cut short. It is parsed in one read and in random ones. What it means must be the same, each event must
belong to the read that brought its last byte, and the hot path's watch must see the end where the parser does. A
million take about five minutes; 20,000 are a test.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import random
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmprofile.answers import Answer, read_answer
from llmprofile.http1 import EndWatch, HttpError, Response, parse
from llmprofile.sse import event_parser

CASES = json.loads((Path(__file__).parent.parent / "data" / "streams.json").read_text())
MUTATIONS = (
    *(b'"', b"{", b"}", b"[]", b"null", b"-1", b"1e999", b"\\ud83d", b"\n", b"\n\n", b"\r", b"\r\n", b"\xff", b""),
    *(b"data: ", b"data", b":", b"0\r\n\r\n", b"5\r\n", b"[DONE]", b'"error": 1, ', b'"done": true', b"\xef\xbb\xbf"),
)
LONGEST_S = 5
"""No answer of this size may take that long."""

OTHER_APIS: list[tuple[str, list[Any]]] = [
    (
        "text/event-stream",
        [
            {"type": "response.created", "response": {"object": "response", "usage": None}},
            {"type": "response.reasoning_text.delta", "delta": "so"},
            {"type": "response.output_text.delta", "delta": " é\U0001f600"},
            {"type": "response.function_call_arguments.delta", "delta": "{}"},
            {"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 3}}},
        ],
    ),
    (
        "application/x-ndjson",
        [
            {"response": " a", "done": False},
            {"message": {"role": "assistant", "content": "é", "thinking": "x"}, "done": False},
            {"response": "", "done": True, "eval_count": 2, "eval_duration": 7, "prompt_eval_count": 4},
        ],
    ),
    (
        "text/event-stream",
        [
            {"token": {"id": 1, "text": " a", "special": False}, "generated_text": None, "details": None},
            {"token": {"id": 2, "text": "</s>", "special": True}, "generated_text": " a", "details": {}},
        ],
    ),
    ("application/json", [{"choices": [{"text": "Hi", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}]),
]


def bodies(longest: int = 20_000) -> list[tuple[int, str, list[bytes]]]:
    """(status, content type, pieces) of everything recorded, and of the other APIs."""
    found = []
    for case in CASES:
        pieces = [base64.b64decode(data) for _, data in case["segments"]]
        if sum(map(len, pieces)) <= longest:
            found.append((case["status"], case["headers"].get("Content-Type", ""), pieces))
    for media, payloads in OTHER_APIS:
        form = "data: {}\n\n" if media == "text/event-stream" else "{}\n"
        found.append((200, media, [form.format(json.dumps(p)).encode() for p in payloads]))
    return found


def answers() -> list[bytes]:
    """Whole responses: every body in every framing and coding."""
    return [
        response(status, media, pieces, framing, coding)
        for status, media, pieces in bodies()
        for framing in ("chunked", "length", "close")
        for coding in ("", "", "gzip", "deflate")
    ]


def response(status: int, media: str, pieces: list[bytes], framing: str, coding: str) -> bytes:
    """The bytes of one response."""
    lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {media}"]
    if coding:
        packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
        pieces = [packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) for piece in pieces] + [packer.flush()]
        lines.append(f"Content-Encoding: {coding}")
    if framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece] + [b"0\r\n\r\n"]
    elif framing == "length":
        lines.append(f"Content-Length: {sum(map(len, pieces))}")
    return "\r\n".join([*lines, "", ""]).encode() + b"".join(pieces)


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """The bytes with up to three changes, anywhere; now and then cut short."""
    changed = bytearray(raw)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.choice((0, 1, 1, 4))] = rng.choice(MUTATIONS)
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.25 else changed)


def cut(rng: random.Random, raw: bytes) -> list[bytes]:
    """The bytes in random reads: a few, or one for each byte."""
    if rng.random() < 0.05:
        return [raw[i : i + 1] for i in range(len(raw))]
    bounds = sorted({0, len(raw), *(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(1, 12)))})
    return [raw[a:b] for a, b in itertools.pairwise(bounds)]


def understood(reads: list[bytes], eof: bool) -> tuple[Response, Answer | None]:
    """What a run makes of these reads."""
    response = parse(reads, eof)
    if response.status is None:
        return response, None
    media = response.headers.get("content-type", "")
    parser = event_parser(media)
    events = None
    if parser is not None:
        events = parser.feed(response.body) + (parser.close() if response.complete else [])
    return response, read_answer(response.status, media, response.body, events, response.complete)


def watched(reads: list[bytes]) -> tuple[bool, bool]:
    """What the hot path makes of them: whether the response ended, and whether its framing broke."""
    watch = EndWatch()
    try:
        for read in reads:
            if watch.feed(read):
                return True, False
    except HttpError:
        return False, True
    return False, False


def check(raw: bytes, reads: list[bytes], eof: bool) -> str:
    """Hold an answer in these reads against the same in one; its outcome."""
    whole, pieces = understood([raw], eof), understood(reads, eof)
    for name in ("status", "headers", "body", "complete", "keep_alive", "error"):
        assert getattr(whole[0], name) == getattr(pieces[0], name), name
    assert whole[1] == pieces[1]
    ended, broken = watched(reads)
    assert (ended, broken) == watched([raw])
    assert not broken or whole[0].error is not None
    if whole[0].error is None and not eof:
        assert ended == whole[0].complete
    check_reads(raw, reads, pieces[0])
    if whole[1] is None:
        return "no head"
    check_answer(whole[1], len(whole[0].body))
    return whole[1].outcome


def check_reads(raw: bytes, reads: list[bytes], response: Response) -> None:
    """The body as it was after each of some reads is what those reads alone bring."""
    ends = response.body_ends
    assert len(ends) == len(reads) and ends == sorted(ends)
    assert not ends or ends[-1] == len(response.body)
    for i in {0, len(reads) // 2} if reads else ():
        assert len(parse([b"".join(reads[: i + 1])], eof=False).body) == ends[i], i


def check_answer(answer: Answer, size: int) -> None:
    """What holds of every answer."""
    assert (answer.error is None) == (answer.outcome == "ok")
    n = len(answer.ends)
    assert n == len(answer.sizes) == len(answer.counts) == len(answer.kinds)
    assert answer.ends == sorted(answer.ends) and all(0 < end <= size for end in answer.ends)
    assert all(count > 0 for count in answer.counts) and all(0 < s <= size for s in answer.sizes)
    assert answer.streamed_tokens >= 0 and (answer.output_tokens is None or answer.output_tokens >= 0)
    (answer.text + (answer.error or "")).encode()


@contextmanager
def no_longer_than(limit_s: int) -> Iterator[None]:
    """Raise in what takes longer."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(n: int, seed: int) -> Counter[str]:
    """Check n answers; how many had which outcome. Raises at the first that fails, with what repeats it."""
    seeds, outcomes = answers(), Counter[str]()
    for i in range(n):
        rng = random.Random(f"{seed} {i}")
        raw = mutated(rng, rng.choice(seeds))
        reads, eof = cut(rng, raw), rng.random() < 0.5
        try:
            with no_longer_than(LONGEST_S):
                outcomes[check(raw, reads, eof)] += 1
        except Exception as error:
            error.add_note(f"number {i} of seed {seed}, eof={eof}: {reads!r}")
            raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began_s = time.monotonic()
    outcomes = fuzz(asked.n, asked.seed)
    took_s = time.monotonic() - began_s
    print(f"{asked.n} answers in {took_s:.0f} s ({asked.n / took_s:.0f} a second): {dict(outcomes.most_common())}")


if __name__ == "__main__":
    main()
