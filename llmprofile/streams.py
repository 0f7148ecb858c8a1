"""Answers of the reference server on their way, and the record of what really left when. CLOCK_MONOTONIC."""

from __future__ import annotations

import io
import itertools
from array import array
from functools import partial
from typing import Any

import numpy as np

from llmprofile.clock import wall_minus_monotonic_ns
from llmprofile.replies import Answer
from llmprofile.sockets import Connection, clock

COLUMNS: dict[str, type] = {
    "id": str,
    "arrive_first_ns": np.int64,
    "stamped": bool,
    "prompt_words": np.int64,
    "fault": str,
    "arrive_ns": np.int64,
    "late_ns": np.int64,
    "queue_ns": np.int64,
    "gone": bool,
    "status": np.int64,
    "sends": np.int64,
}


class Stream:
    """One answer on its way: what leaves when, and when it really left."""

    def __init__(self, connection: Connection, reply: Answer, facts: tuple[Any, ...], record: Record) -> None:
        self.connection, self.reply, self.facts, self.record = connection, reply, facts, record
        self.sends, self.dues = reply.sends, [0] * len(reply.sends)
        self.left_ns, self.sent_ns = array("q"), array("q")
        self.i = self.late_ns = 0
        self.arrive_ns = self.admitted_ns = connection.last_ns
        self.done = self.gone = False
        record.in_flight += 1
        connection.on_gone = partial(self.end, True)

    def emit(self, due_ns: int) -> int | None:
        """Send what is due; return when the next is. The hot path: every token passes here."""
        data = self.sends[self.i]
        left_ns = clock()
        try:
            accepted = self.connection.send(data)
        except BlockingIOError:
            accepted = 0
        except OSError:
            self.connection.close()
            return None
        self.left_ns.append(left_ns)
        self.sent_ns.append(clock())
        if left_ns - due_ns > self.late_ns:
            self.late_ns = left_ns - due_ns
        if accepted < len(data):
            self.connection.hold(data[accepted:], self.sent_ns)
        self.i += 1
        if self.i < len(self.sends):
            return self.dues[self.i]
        self._finish()
        return None

    def stall_ns(self) -> int:
        """The stall asked for before the send that comes next."""
        stall = self.reply.stall
        return stall[1] if stall and stall[0] == self.i else 0

    def end(self, gone: bool) -> None:
        """Into the record, once; `gone`: the client left first."""
        if not self.done:
            self.done, self.gone = True, gone
            self.connection.on_gone = None
            self.record.add(self)

    def _finish(self) -> None:
        self.end(False)
        if self.reply.tail:
            self.connection.put(self.reply.tail)
        self.connection.finish(self.reply.ending)
        self.connection.resume()


class Record:
    """What really happened, one entry an answer that has ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[Any, ...]] = []
        self.in_flight = 0

    def add(self, stream: Stream) -> None:
        """An answer has ended."""
        self.in_flight -= 1
        sends = len(stream.left_ns)
        queue_ns = stream.admitted_ns - stream.arrive_ns
        figures = (stream.arrive_ns, stream.late_ns, queue_ns, stream.gone, stream.reply.status, sends)
        times = (stream.reply.counts[:sends], stream.left_ns, stream.sent_ns)
        self.ended.append((*stream.facts, *figures, *times))

    def packed(self) -> bytes:
        """All of it as npz: an array a column; counts and times of all sends end to end."""
        *columns, counts, left, sent = zip(*self.ended, strict=True) if self.ended else [()] * (len(COLUMNS) + 3)
        arrays: dict[str, Any] = {
            name: np.array(column, dtype=COLUMNS[name]) for name, column in zip(COLUMNS, columns, strict=True)
        }
        arrays["tokens_of_send"] = np.fromiter(itertools.chain.from_iterable(counts), dtype=np.int32)
        arrays["left_ns"] = np.frombuffer(b"".join(left), dtype=np.int64)
        arrays["sent_ns"] = np.frombuffer(b"".join(sent), dtype=np.int64)
        arrays["wall_minus_monotonic_ns"] = np.array(wall_minus_monotonic_ns()[1])
        arrays["in_flight"] = np.array(self.in_flight)
        out = io.BytesIO()
        np.savez(out, **arrays)
        return out.getvalue()
