"""What a worker wrote comes back whole, and as much of it as was written when the worker died."""

from __future__ import annotations

import itertools
import os
import stat
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmprofile.capture import (
    COUNTERS,
    ENDINGS,
    STATES,
    Board,
    CaptureWriter,
    Exchange,
    capture_path,
    pack,
    read_pairs,
    read_requests,
)
from llmprofile.units import MISSING_NS

seeded = settings(derandomize=True, deadline=None)

NO_CYCLES = (array("q"), array("q"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "capture").mkdir()
    return tmp_path


def written(folder: Path, batches: list[list[Exchange]], worker: int = 0) -> list[int]:
    """Write each batch as one flush; the sizes of the requests' file after each, which is not closed properly."""
    writer, sizes = CaptureWriter(folder, worker), []
    for batch in batches:
        writer.write([pack(e) for e in batch], NO_CYCLES, b"")
        sizes.append(capture_path(folder, "requests", worker).stat().st_size)
    writer.close()
    return sizes


def flat(batches: Any) -> list[dict[str, Any]]:
    return [{name: column[k] for name, column in b.items()} for b in batches for k in range(len(b["request_id"]))]


def unpacked(row: dict[str, Any]) -> Exchange:
    """A captured row as the exchange that it was."""
    sizes = np.frombuffer(row["sizes"], np.int32).tolist()
    ends = np.cumsum([0, *sizes]).tolist()
    cut = [row["bytes"][a:b] for a, b in itertools.pairwise(ends)]
    stamps = [row["stamps"][16 * k : 16 * k + 16] for k in range(len(sizes))]
    asked, seen = (np.frombuffer(row[name], np.int64).tolist() for name in ("asked_ns", "seen_ns"))
    assert len(row["stamps"]) == 16 * len(sizes)
    assert ends[-1] == len(row["bytes"])
    raw = {"stamps", "asked_ns", "seen_ns", "sizes", "bytes", "marks"}
    scalars = {name: value for name, value in row.items() if name not in raw}
    return Exchange(**scalars, reads=list(zip(stamps, asked, seen, cut, strict=True)), marks=array("q", row["marks"]))


def fields(exchange: Exchange) -> dict[str, Any]:
    return {name: getattr(exchange, name) for name in Exchange.__slots__}


stamps_ns = st.integers(MISSING_NS, 2**63 - 1)
reads = st.tuples(st.binary(min_size=16, max_size=16), stamps_ns, stamps_ns, st.binary(min_size=1, max_size=40))
exchanges = st.builds(
    Exchange,
    *(st.integers(0, 2**62), stamps_ns, stamps_ns, stamps_ns, stamps_ns, stamps_ns),
    ooo=st.none() | st.integers(0, 2**32 - 1),
    reused=st.booleans(),
    resent=st.booleans(),
    ended=st.sampled_from(ENDINGS),
    error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    reads=st.lists(reads, max_size=5),
    marks=st.lists(stamps_ns, max_size=6).map(lambda marks: array("q", marks)),
)


@settings(seeded, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(exchanges, max_size=4), max_size=3))
def test_exchanges_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, batches: Any) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "capture").mkdir()
    written(folder, batches)
    back = [unpacked(row) for row in flat(read_requests(folder, 0))]
    assert [fields(e) for e in back] == [fields(e) for batch in batches for e in batch]


def made(request_id: int, rng: np.random.Generator) -> Exchange:
    exchange = Exchange(request_id, due_ns=request_id, ended="complete")
    exchange.reads = [(rng.bytes(16), k, k + 1, b"data: " + rng.bytes(int(rng.integers(1, 60)))) for k in range(6)]
    return exchange


def test_many_requests_are_read_in_batches_that_fit_in_memory(folder: Path) -> None:
    rng = np.random.default_rng(1)
    batch = [made(k, rng) for k in range(700)]
    written(folder, [batch])
    back = list(read_requests(folder, 0))
    assert [len(b["request_id"]) for b in back] == [256, 256, 188]
    assert [fields(unpacked(row)) for row in flat(back)] == [fields(e) for e in batch]


def test_a_capture_cut_anywhere_still_gives_its_whole_batches(folder: Path) -> None:
    rng = np.random.default_rng(2)
    sizes = written(folder, [[made(10 * b + k, rng) for k in range(3 + b)] for b in range(4)])
    path = capture_path(folder, "requests", 0)
    whole = path.read_bytes()
    assert sizes[-1] < len(whole)  # the end of a stream that was closed
    for length in [*range(0, len(whole), 10), *sizes, len(whole)]:
        path.write_bytes(whole[:length])
        back = list(read_requests(folder, 0))
        complete = sum(size <= length for size in sizes)
        assert [b["request_id"] for b in back] == [[10 * b + k for k in range(3 + b)] for b in range(complete)], length


def test_a_capture_that_goes_on_with_zeros_is_read_up_to_them(folder: Path) -> None:
    # what some file systems leave after a power cut
    sizes = written(folder, [[made(k, np.random.default_rng(k))] for k in range(3)])
    path = capture_path(folder, "requests", 0)
    path.write_bytes(path.read_bytes()[: sizes[1]] + bytes(1000))
    assert [b["request_id"] for b in read_requests(folder, 0)] == [[0], [1]]


def test_a_worker_that_wrote_nothing_left_nothing(folder: Path) -> None:
    assert list(read_requests(folder, 3)) == []
    assert read_pairs(folder, "cycles", 3).shape == (0, 2)


def test_what_was_flushed_is_there_without_a_close(folder: Path) -> None:
    writer = CaptureWriter(folder, 0)
    writer.write([pack(made(7, np.random.default_rng(7)))], (array("q", [1, 3]), array("q", [2, 4])), b"\1" * 16)
    assert [b["request_id"] for b in read_requests(folder, 0)] == [[7]]
    assert read_pairs(folder, "cycles", 0).tolist() == [[1, 2], [3, 4]]
    assert len(read_pairs(folder, "clock", 0)) == 1
    writer.close()


def test_a_full_disk_keeps_what_was_written_and_the_clock_it_needs(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    rng = np.random.default_rng(3)
    large = Exchange(1, reads=[(bytes(16), 1, 2, rng.bytes(1 << 20))])
    writer = CaptureWriter(folder, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # no file may grow beyond 64 KB
    try:
        with pytest.raises(OSError, match="large"):
            writer.write([pack(made(0, rng)), pack(large)], (array("q", [1]), array("q", [2])), b"\1" * 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # stamps can't be read without a sample of the clock, so it is never behind the requests
    assert len(read_pairs(folder, "clock", 0)) == 1
    assert read_pairs(folder, "cycles", 0).tolist() == [[1, 2]]
    assert list(read_requests(folder, 0)) == []
    writer.close()


@settings(seeded, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(stamps_ns, stamps_ns), max_size=10), torn=st.binary(max_size=15))
def test_pairs_lose_no_more_than_a_torn_tail(folder: Path, pairs: list[tuple[int, int]], torn: bytes) -> None:
    whole = np.array(pairs, np.int64).reshape(-1, 2)
    for what in ("cycles", "clock"):
        capture_path(folder, what, 0).write_bytes(whole.tobytes() + torn)
        assert read_pairs(folder, what, 0).tolist() == whole.tolist()


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_files_are_their_owners_alone_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        CaptureWriter(folder, 2).close()
        Board(folder, 3, create=True)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder / "capture").iterdir()}
    assert modes == dict.fromkeys(["requests-2.arrows", "cycles-2.bin", "clock-2.bin", "board.bin"], 0o600)


def test_nothing_is_overwritten(folder: Path) -> None:
    CaptureWriter(folder, 0).close()
    Board(folder, 1, create=True)
    with pytest.raises(FileExistsError):
        CaptureWriter(folder, 0)
    with pytest.raises(FileExistsError):
        Board(folder, 1, create=True)


# the board


def test_the_board_is_shared_between_its_readers(folder: Path) -> None:
    ours = Board(folder, 3, create=True)
    theirs = Board(folder, 3)
    assert (theirs.start_ns, theirs.stop) == (0, False)
    ours.start_ns, ours.stop = 2**62 + 1, True
    assert (theirs.start_ns, theirs.stop) == (2**62 + 1, True)
    for worker in range(3):
        theirs.row(worker)[:] = [10 * worker + k for k in range(len(COUNTERS))]
    for k, name in enumerate(COUNTERS):
        assert ours.column(name).tolist() == [k, 10 + k, 20 + k]
    assert ours.start_ns == 2**62 + 1  # counters and words do not overlap
    assert Board(folder, 3).workers.tolist() == ours.workers.tolist()  # and outlive their writers


def test_a_worker_starts_at_the_first_state(folder: Path) -> None:
    board = Board(folder, 2, create=True)
    assert [STATES[s] for s in board.column("state")] == ["starting", "starting"]
    with pytest.raises(ValueError, match="not in"):
        board.column("nonsense")
