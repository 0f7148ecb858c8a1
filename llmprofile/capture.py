"""What a worker leaves on disk while it runs: finished requests as raw bytes and stamps, cycles, counters.

Everything here survives `kill -9`: requests are appended to an Arrow stream at least once a second, cycles and clock
samples to flat files, and the counters live in a memory-mapped file that the caller polls.
"""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmprofile.units import MISSING_NS

Read = tuple[bytes, int, int, bytes]
"""(kernel stamp, CLOCK_MONOTONIC ns when the read was asked for, when the client had it, bytes)"""

ENDINGS = ("complete", "eof", "reset", "timeout", "connect_error", "cancelled", "bad_framing")
"""How an exchange ended, as the client saw it; what it means for the request is decided when it is parsed."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and what came back for it, as raw as it came.

    Attributes
    ----------
    reads : list of Read
        One entry a `recv` that returned bytes.
    marks : array of int64
        The conventional client only: (seen, handled) of each SSE event, in order; of the body when not a stream.
    ooo : int, optional
        Packets that came out of order on its connection meanwhile; None where nobody counted.
    ended : str
        One of `ENDINGS`.
    prompt : str or None
        What it said that was not said before, where texts are kept.
    """

    request_id: int
    due_ns: int = MISSING_NS
    begun_ns: int = MISSING_NS
    sent_ns: int = MISSING_NS
    sent_last_ns: int = MISSING_NS
    connect_ns: int = MISSING_NS
    ooo: int | None = None
    reused: bool = False
    resent: bool = False
    ended: str = ""
    error: str | None = None
    prompt: str | None = None
    reads: list[Read] = field(default_factory=list)
    marks: array[int] = field(default_factory=lambda: array("q"))


_INTS = ("request_id", "due_ns", "begun_ns", "sent_ns", "sent_last_ns", "connect_ns", "ooo")
_scalars = operator.attrgetter(*_INTS, "reused", "resent", "ended", "error", "prompt")
_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in _INTS]
    + [("reused", pa.bool_()), ("resent", pa.bool_()), ("ended", pa.string()), ("error", pa.string())]
    + [("prompt", pa.string())]
    + [(name, pa.large_binary()) for name in ("stamps", "asked_ns", "seen_ns", "sizes", "bytes", "marks")]
)


def pack(exchange: Exchange) -> tuple[Any, ...]:
    """An exchange as one row of the capture; done as each request ends, so that no flush has much to convert."""
    stamps, asked_ns, seen_ns, pieces = zip(*exchange.reads, strict=True) if exchange.reads else ((),) * 4
    return (
        *_scalars(exchange),
        b"".join(stamps),
        array("q", asked_ns).tobytes(),
        array("q", seen_ns).tobytes(),
        array("i", map(len, pieces)).tobytes(),
        b"".join(pieces),
        exchange.marks.tobytes(),
    )


ROWS_WRITTEN = 32
"""Requests a batch: its memory is used again for the next. Of larger ones the first took 20 ms of page faults each,
with the interpreter's lock held."""
ROWS_READ = 256


class CaptureWriter:
    """Appends a worker's finished requests, cycles and clock samples to the run folder.

    Files are readable by their owner only: they hold the answers' bodies.
    """

    def __init__(self, folder: Path, worker: int) -> None:
        self._requests = _private(capture_path(folder, "requests", worker))
        self._cycles = _private(capture_path(folder, "cycles", worker))
        self._clock = _private(capture_path(folder, "clock", worker))
        pa.array([], pa.int64())  # pyarrow's first array loads pandas: 0.2 s, which belong before the load
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._stream = pa.ipc.new_stream(self._requests, _SCHEMA, options=options)

    def write(self, rows: Sequence[tuple[Any, ...]], cycles: tuple[array[int], array[int]], clock: bytes) -> None:
        """Append and hand to the kernel; called in a thread, since compressing takes milliseconds."""
        # first what requests can't be read without: a worker may die, or a disk be full, at any point
        self._clock.write(clock)
        self._cycles.write(np.stack([np.frombuffer(c, np.int64) for c in cycles], axis=1).tobytes())
        for file in (self._clock, self._cycles):
            file.flush()
        for start in range(0, len(rows), ROWS_WRITTEN):
            columns = zip(*rows[start : start + ROWS_WRITTEN], strict=True)
            arrays = [pa.array(c, f.type) for c, f in zip(columns, _SCHEMA, strict=True)]
            self._stream.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
        self._requests.flush()

    def close(self) -> None:
        """End the stream properly."""
        self._stream.close()
        for file in (self._requests, self._cycles, self._clock):
            file.close()


def capture_path(folder: Path, what: str, worker: int) -> Path:
    """Where `what` ("requests", "cycles" or "clock") of a worker is captured."""
    return folder / "capture" / f"{what}-{worker}.{'arrows' if what == 'requests' else 'bin'}"


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def read_requests(folder: Path, worker: int) -> Iterator[dict[str, list[Any]]]:
    """A worker's captured requests, some hundreds at a time, as columns; up to where the file was cut, if it was."""
    path = capture_path(folder, "requests", worker)
    if not path.exists():
        return
    batches: list[pa.RecordBatch] = []
    with pa.OSFile(str(path)) as file:
        try:
            for batch in pa.ipc.open_stream(file):
                batches.append(batch)
                # a short one ends what was written together
                if batch.num_rows < ROWS_WRITTEN or sum(b.num_rows for b in batches) >= ROWS_READ:
                    yield pa.Table.from_batches(batches).to_pydict()
                    batches = []
        except (pa.ArrowInvalid, OSError):
            pass  # the worker died while it wrote; everything before is whole
    if batches:
        yield pa.Table.from_batches(batches).to_pydict()


def read_pairs(folder: Path, what: str, worker: int) -> npt.NDArray[np.int64]:
    """A worker's cycles (entered, returned) or clock samples (monotonic, wall − monotonic), (n, 2) ns."""
    path = capture_path(folder, what, worker)
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // 16 * 16], np.int64).reshape(-1, 2)


STATES = ("starting", "ready", "running", "done")
COUNTERS = ("state", "pid", "begun", "done", "failed", "in_flight", "reads", "opened")
"""`begun` counts requests, `opened` conversations: the same where each is of one turn."""


class Board:
    """The counters of all workers and the caller's two words to them, in one memory-mapped file.

    Attributes
    ----------
    workers : (processes, len(COUNTERS)) int64
        A worker writes its own row, the caller reads them all.
    """

    def __init__(self, folder: Path, processes: int, create: bool = False) -> None:
        path = folder / "capture" / "board.bin"
        if create:
            _private(path).close()
            os.truncate(path, 8 * (_WORDS + processes * len(COUNTERS)))
        words = np.memmap(path, np.int64, "r+")
        self._caller, self.workers = words[:_WORDS], words[_WORDS:].reshape(processes, len(COUNTERS))

    @property
    def start_ns(self) -> int:
        """CLOCK_MONOTONIC of the common start; 0 until the caller has set it."""
        return int(self._caller[0])

    @start_ns.setter
    def start_ns(self, value: int) -> None:
        self._caller[0] = value

    @property
    def stop(self) -> bool:
        """Whether the workers should stop sending and cancel what is in flight."""
        return bool(self._caller[1])

    @stop.setter
    def stop(self, value: bool) -> None:
        self._caller[1] = value

    @property
    def parent_pid(self) -> int:
        """The process that asked for the run, and collects it."""
        return int(self._caller[2])

    @parent_pid.setter
    def parent_pid(self, value: int) -> None:
        self._caller[2] = value

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """One counter of every worker, (processes,)."""
        return np.asarray(self.workers[:, COUNTERS.index(name)])

    def row(self, worker: int) -> npt.NDArray[np.int64]:
        """The counters of one worker, to write to."""
        return self.workers[worker]


_WORDS = 8
