"""The process behind `ReferenceServer`: one thread, a selector, a heap of timers, a record of what left when.

Started as `python -m llmprofile.serving` with one line of JSON on its standard input; says on its standard
output where it listens; ends when its standard input does, or its parent. Its times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import resource
import select
import selectors
import signal
import ssl
import sys
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from llmprofile.asked import Fault, Script, Style, read_request
from llmprofile.errors import UsageError
from llmprofile.pacing import Batch, Pace, due_times, halves, struck
from llmprofile.replies import answer, error_said, whole_answer
from llmprofile.sockets import (
    STAMPS,
    Connection,
    Request,
    await_stamps,
    clock,
    listening,
)
from llmprofile.streams import Record, Stream
from llmprofile.units import NS_PER_S, s_to_ns

Act = Callable[[int], int | None]
"""What a timer does: gets when it was due, returns when it is due again, or None."""

_PATHS = ("/v1/completions", "/v1/chat/completions")
_SCRIPTED_PATHS = ("/v1/responses", "/api/generate", "/api/chat", "/generate_stream")
"""Of other APIs: answered by a server with a script, and by no other."""


class Service:
    """Reads requests, keeps the timers, answers."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.pace, self.style = Pace(**asked["pace"]), Style(**asked["style"])
        self.fault, self.fault_share = Fault.of(asked["fault"]), asked["fault_share"]
        self.script = Script.of(asked["script"])
        self.connect_delay_s, self.close_idle_s = asked["connect_delay_s"], asked["close_idle_s"]
        self.tls = _tls(asked["certfile"], asked["keyfile"])
        self.batch = Batch(self.pace) if self.pace.max_batch else None
        self.batch_works = self.stopping = False
        self.record = Record()
        self.selector = selectors.DefaultSelector()
        self.parent = os.getppid()
        self.requests = 0
        self._heap: list[tuple[int, int, Act]] = []
        self._order = itertools.count()
        self.listener = listening(asked["host"], asked["port"])
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, self._stop)
        self.at(clock(), self._look_for_parent)

    def at(self, due_ns: int, act: Act) -> None:
        """Call `act` when `due_ns` comes."""
        heappush(self._heap, (due_ns, next(self._order), act))

    def run(self) -> None:
        """Serve until told to stop.

        The wait is on the selector's own descriptor: `epoll_wait` would round to a millisecond. What is due
        is compared with a time taken before the poll, so an arrival comes before what is due after it.
        """
        heap, ready, selector = self._heap, [self.selector.fileno()], self.selector
        while not self.stopping:
            wait_s = (heap[0][0] - clock()) / NS_PER_S
            if select.select(ready, [], [], wait_s if wait_s > 0 else 0)[0]:
                now_ns = clock()
                for key, mask in selector.select(0):
                    key.data(mask)
            else:
                now_ns = clock()
            while heap[0][0] <= now_ns:
                _, order, act = heap[0]
                again_ns = act(heappop(heap)[0])
                if again_ns is not None:
                    heappush(heap, (again_ns, order, act))

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer one request, or begin to."""
        where, _, query = request.target.partition("?")
        path = where if where.startswith("/") else "/" + where.split("/", 3)[-1]  # a proxy may leave the whole URL
        if request.method == "POST" and (path in _PATHS or (self.script is not None and path in _SCRIPTED_PATHS)):
            self._begin(connection, request, "chat" in path)
            return
        connection.put(self._page(path, query) if request.method == "GET" else _error(404, "no such path"))
        connection.finish(_ending("keep", request))

    def refuse(self, connection: Connection, sentence: str) -> None:
        """Answer that this is no request."""
        connection.put(_error(400, sentence))

    def rested(self, connection: Connection) -> None:
        """Arrange the end of an idle connection, if that was asked for."""
        if self.close_idle_s is not None:
            self.at(clock() + s_to_ns(self.close_idle_s), partial(connection.close_if_idle, connection.answered))

    def _page(self, path: str, query: str) -> bytes:
        if path == "/truth":
            said = self.record.packed()
            if query == "forget=1":
                self.record.ended.clear()
            return whole_answer(200, said, "application/octet-stream")
        if path == "/metrics":
            return whole_answer(200, self._metrics(), "text/plain; version=0.0.4")
        if path == "/v1/models":
            model = {"id": self.style.model, "object": "model", "created": 1, "owned_by": "llmprofile"}
            return whole_answer(200, {"object": "list", "data": [model]})
        return whole_answer(200, {"status": "ok"}) if path == "/health" else _error(404, "no such path")

    def _metrics(self) -> bytes:
        """Answers in the engine, and those that wait for it, as Prometheus reads them."""
        waiting = len(self.batch.waiting) if self.batch else 0
        counts = {"running": self.record.in_flight - waiting, "waiting": waiting}
        pages = (f"# TYPE llmprofile:requests_{k} gauge\nllmprofile:requests_{k} {n}\n" for k, n in counts.items())
        return "".join(pages).encode()

    def _begin(self, connection: Connection, request: Request, chat: bool) -> None:
        self.requests += 1
        name = request.headers.get("x-request-id", "")
        digits = name.rpartition("-")[2]
        number = int(digits) if digits.isdecimal() and len(digits) < 19 else self.requests
        strikes = self.fault is not None and struck(self.pace.seed, number, self.fault_share)
        try:
            asked = read_request(self.style, self.fault if strikes else None, self.script, chat, request.body)
        except UsageError as error:
            self.refuse(connection, str(error))
            connection.finish(_ending("keep", request))
            return
        if asked.fault and asked.fault.reused and not connection.answered:
            asked = asked._replace(fault=None)
        reply = answer(self.style, asked)
        reply = reply._replace(ending=_ending(reply.ending, request))
        fault = asked.fault.kind if asked.fault else ""
        facts = (name, connection.first_ns, connection.stamped, asked.prompt_words, fault)
        self._schedule(Stream(connection, reply, facts, self.record), number)

    def _schedule(self, stream: Stream, number: int) -> None:
        reply, split_s = stream.reply, self.style.split_s
        if reply.offsets_ns is not None:
            stream.dues = [stream.arrive_ns + offset_ns for offset_ns in reply.offsets_ns]
        elif self.batch is not None:
            self.batch.waiting.append(stream)
            if not self.batch_works:
                self.batch_works = True
                self.at(self.batch.begin(stream.arrive_ns), self._step)
            return
        elif split_s is None:
            stream.dues = due_times(self.pace, stream.arrive_ns, len(reply.sends), number, reply.stall)
        else:
            dues = due_times(self.pace, stream.arrive_ns, len(reply.sends) // 2, number, reply.stall)
            stream.dues = halves(dues, s_to_ns(split_s))
        self.at(stream.dues[0], stream.emit)

    def _step(self, due_ns: int) -> int | None:
        """The batching engine's step is over: a token for each running sequence, and the next step."""
        engine = self.batch
        assert engine is not None
        for stream in engine.running:
            stream.emit(due_ns)
        self.batch_works = bool(engine.waiting) or not all(stream.done for stream in engine.running)
        return engine.begin(due_ns) if self.batch_works else None

    def _accept(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection = Connection(self, self.listener.accept()[0], self.tls)
                if self.connect_delay_s:
                    self.at(clock() + s_to_ns(self.connect_delay_s), connection.open)
                else:
                    connection.open()

    def _stop(self, _mask: int) -> None:
        self.stopping = not os.read(0, 1 << 16)

    def _look_for_parent(self, due_ns: int) -> int:
        self.stopping = self.stopping or os.getppid() != self.parent
        return due_ns + NS_PER_S


def _error(status: int, sentence: str) -> bytes:
    return whole_answer(status, error_said(status, sentence))


def _ending(ending: str, request: Request) -> str:
    asked = request.headers.get("connection", "").lower() == "close"
    return "close" if asked and ending == "keep" else ending


def _tls(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:
        raise UsageError(f"certfile {certfile} can't be used: {error}") from error
    return context


def _settle(cpus: list[int] | None) -> None:
    """Make this process punctual, and deaf to a notebook's interrupt, which reaches the whole group."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # some systems say "no limit" and then refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")  # select() may otherwise wake 50 µs late
    if STAMPS:
        await_stamps()
    gc.freeze()
    gc.disable()


def main() -> None:
    """Read what is asked, say where we listen, serve."""
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        service = Service(asked)
        _settle(asked["cpus"])
    except (UsageError, OSError) as error:
        _tell(error=str(error))
        return
    _tell(port=service.listener.getsockname()[1])
    service.run()


def _tell(**said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
