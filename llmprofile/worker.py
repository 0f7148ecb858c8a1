"""One worker process: an event loop, a client, its part of the schedule, and what it writes down.

`work` is what joblib runs. It lives in the package, so that nothing depends on a notebook's `__main__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import gc
import heapq
import json
import os
import platform
import resource
import signal
import sys
import time
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmprofile.api import Target, tls_context, word_messages
from llmprofile.capture import STATES, Board, CaptureWriter, Exchange, pack
from llmprofile.clock import (
    CycleSelector,
    keep_stamping,
    monotonic_ns,
    run_precisely,
    stamps_work,
    wall_minus_monotonic_ns,
)
from llmprofile.conventional import ConventionalClient
from llmprofile.link import Link
from llmprofile.machine import peak_memory_bytes
from llmprofile.prompts import Message, Prompts, PromptSource, escaped
from llmprofile.reading import text_if_ok
from llmprofile.stamped import StampedClient
from llmprofile.units import NS_PER_S, s_to_ns

CLIENTS: dict[str, type[StampedClient] | type[ConventionalClient]] = {
    "stamped": StampedClient,
    "conventional": ConventionalClient,
}
FLUSH_S = 0.5
WATCH_S = 0.05
START_TIMEOUT_S = 120.0
_READY, _RUNNING, _DONE = (STATES.index(s) for s in ("ready", "running", "done"))
_MOST_GARBAGE = 2_000_000


@dataclass(frozen=True)
class Job:
    """A worker's part of a run.

    Attributes
    ----------
    folder : Path
    run_id : str
    worker, processes : int
    client : str
    targets : tuple of Target
        A server each; for a TLS context of the worker's own: contexts don't travel between processes.
    links : tuple of Link
    request_id, prompt_tokens, output_tokens, server, turn, pick : (n,) int64
        As in the schedule.
    due_ns : (n,) int64
        From the common start, of first turns; None in a closed loop.
    think_ns : (n,) int64
        From the end of the turn before.
    slots : int or None
        The most requests in flight; in a closed loop, conversations.
    duration_ns : int or None
        When a closed loop stops sending.
    bodies : tuple of tuple of bytes
        Of each server: the request's JSON around what is said and the number of output tokens.
    listed : bool
        Whether what is said is a list of messages.
    prompts : PromptFile, SharedPrefix or None
    salt : int
        Of the prompts.
    keep_text : bool
    warm : tuple of int
        Connections to open to each server before the start.
    """

    folder: Path
    run_id: str
    worker: int
    processes: int
    parent_pid: int
    client: str
    targets: tuple[Target, ...]
    links: tuple[Link, ...]
    request_id: np.ndarray
    due_ns: np.ndarray | None
    think_ns: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    server: np.ndarray
    turn: np.ndarray
    pick: np.ndarray
    slots: int | None
    duration_ns: int | None
    bodies: tuple[tuple[bytes, ...], ...]
    listed: bool
    prompts: PromptSource | None
    salt: int
    keep_text: bool
    warm: tuple[int, ...]


def ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to all of its processes, to the caller; it tells the workers to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def work(job: Job) -> dict[str, Any]:
    """Run a worker's part of the load; what is worth knowing about the process that did it.

    Everything measured is in the run folder when this returns.
    """
    with _quiet_process():
        facts: dict[str, Any] = run_precisely(lambda selector: _Worker(job, selector).run())
    if _orphaned(job):
        os._exit(1)  # nobody is left to take the result, or to end this process
    return facts


def _orphaned(job: Job) -> bool:
    """Whether the process that asked for the work is gone."""
    try:
        os.kill(job.parent_pid, 0)
    except ProcessLookupError:
        return True
    return os.getppid() == 1


@contextlib.contextmanager
def _quiet_process() -> Any:
    """No automatic garbage collection, short thread slices, precise timers, as many open files as may be."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS says "infinity" and does not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: 1 ns instead of 50 µs
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # aiohttp warns of long prompts, since copying one takes the loop's time; that time is measured here
            warnings.filterwarnings("ignore", "Sending a large body", ResourceWarning)
            yield
    finally:
        gc.enable()
        gc.unfreeze()
        sys.setswitchinterval(interval)


Said = tuple[Message, ...]

FIRE_NS = 1_000_000
"""After so long of sending, what has arrived is read before the rest is sent: a long prompt takes milliseconds."""


class _Worker:
    """The pacing of one worker: starts requests when they are due, and keeps the books.

    `queue` holds what is due by time: (due, position in the job, what was said before), of an open loop the next
    conversation to begin and any turns whose user is thinking. `talks` holds the requests in flight that have a turn
    after them, with all that was said. Answers are read for it in a thread beside the writer's: no
    turn waits for a flush.
    """

    def __init__(self, job: Job, selector: CycleSelector) -> None:
        self.job = job
        self.selector = selector
        self.board = Board(job.folder, job.processes)
        self.counters = self.board.row(job.worker)
        self.prompts = Prompts(job.salt, job.prompts)
        self.firsts: list[int] = np.flatnonzero(job.turn == 0).tolist()
        self.queue: list[tuple[int, int, Said]] = []
        self.talks: dict[int, tuple[int, Said]] = {}
        self.clock = array("q", wall_minus_monotonic_ns())
        self.rows: list[tuple[Any, ...]] = []
        self.flushing: asyncio.Future[None] | None = None
        self.failure: str | None = None
        self.begun = self.opened = self.closed = self.in_flight = self.finished = self.failed = self.reads = 0
        self.stopped = False
        self.timer: asyncio.TimerHandle | None = None

    async def run(self) -> dict[str, Any]:
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        job = self.job
        stamping = job.links[0].stamps and stamps_work()
        with keep_stamping(), ThreadPoolExecutor(2) as self.threads:
            self.writer = CaptureWriter(job.folder, job.worker)
            links = map(_with_tls, job.targets, job.links)
            self.clients = [CLIENTS[job.client](link, self._done) for link in links]
            await asyncio.gather(*(client.warm(n) for client, n in zip(self.clients, job.warm, strict=True)))
            await self._wait_for_start()
            cpu_s = time.process_time()
            self._begin()
            await self.over.wait()
            cpu_s = time.process_time() - cpu_s
            await asyncio.gather(*(client.close() for client in self.clients))
            await self._finish_writing()
        self._count(_DONE)
        return {"cpu_s": cpu_s, "stamping": stamping, "failure": self.failure, **_process_facts(self.job.worker)}

    async def _wait_for_start(self) -> None:
        self._count(_READY)
        patience_ns = monotonic_ns() + s_to_ns(START_TIMEOUT_S)
        while not self.board.start_ns:
            await asyncio.sleep(0.002)
            if self.board.stop or _orphaned(self.job) or monotonic_ns() > patience_ns:
                self.stopped = True
                return

    def _begin(self) -> None:
        job, start_ns = self.job, self.board.start_ns
        self.due_ns = None if job.due_ns is None else (job.due_ns + start_ns).tolist()
        self.stop_ns = None if job.duration_ns is None else start_ns + job.duration_ns
        self.watched_ns = self.flushed_ns = monotonic_ns()
        self._watch()
        if self.stopped or not self.firsts:
            self._check_over()
        elif self.due_ns is not None:
            self._queue_next()
            self._fire()
        else:
            self.loop.call_at(start_ns / NS_PER_S, self._open_users, start_ns, min(job.slots or 1, len(self.firsts)))

    def _queue_next(self) -> None:
        """Queue the next conversation of an open loop to begin."""
        assert self.due_ns is not None
        if self.opened < len(self.firsts):
            first = self.firsts[self.opened]
            heapq.heappush(self.queue, (self.due_ns[first], first, ()))

    def _fire(self) -> None:
        """Start what is due; a late request is sent at once, and its lateness shows."""
        slots, pause_ns = self.job.slots, monotonic_ns() + FIRE_NS
        if self.timer is not None:
            self.timer.cancel()
        while self.queue and not self.stopped:
            due_ns, k, before = self.queue[0]
            if slots is not None and self.in_flight >= slots:
                return  # the request whose slot gets free calls again
            now_ns = monotonic_ns()
            if due_ns > now_ns or now_ns > pause_ns:
                self.timer = self.loop.call_at(due_ns / NS_PER_S, self._fire)
                return
            heapq.heappop(self.queue)
            self._start(due_ns, k, before)
            if not before:
                self._queue_next()

    def _open_users(self, due_ns: int, users: int) -> None:
        """Have the users of a closed loop begin, with pauses for what arrives meanwhile."""
        pause_ns = monotonic_ns() + FIRE_NS
        while users and monotonic_ns() <= pause_ns:
            self._open(due_ns)
            users -= 1
        if users:
            self.loop.call_soon(self._open_users, due_ns, users)

    def _open(self, due_ns: int) -> None:
        """Begin the next conversation of a closed loop, if there is one."""
        if self.opened < len(self.firsts):
            self._start(due_ns, self.firsts[self.opened], ())
        else:
            self._check_over()

    def _start(self, due_ns: int, k: int, before: Said) -> None:
        job = self.job
        if self.stopped or (self.stop_ns is not None and due_ns >= self.stop_ns):
            self._check_over()
            return
        self.opened += not before
        self.begun += 1
        self.in_flight += 1
        request_id, server = int(job.request_id[k]), job.server[k]
        own = self.prompts.messages(request_id, int(job.prompt_tokens[k]), int(job.pick[k]))
        opening, *after = job.bodies[server]
        limits = (b"%d" % job.output_tokens[k]).join(after)
        body = b"".join((opening, word_messages((*before, *own), job.listed), limits))
        exchange = Exchange(request_id, due_ns)
        if job.keep_text:
            exchange.prompt = "\n\n".join(json.loads(b'"%b"' % text) for _, text in own)
        if k + 1 < len(job.turn) and job.turn[k + 1]:
            self.talks[request_id] = k, (*before, *own)
        self.clients[server].start(exchange, f"{job.run_id}-{request_id}".encode(), body)

    def _done(self, exchange: Exchange) -> None:
        at_ns, talk = monotonic_ns(), self.talks.pop(exchange.request_id, None)
        self.rows.append(pack(exchange))
        self.in_flight -= 1
        self.finished += 1
        self.failed += exchange.ended != "complete"
        self.reads += len(exchange.reads)
        if talk is None:
            self._close(at_ns)
        else:
            reads = [data for *_, data in exchange.reads]
            reading = self.loop.run_in_executor(self.threads, text_if_ok, exchange.ended, reads)
            reading.add_done_callback(functools.partial(self._go_on, at_ns, *talk))
        if self.due_ns is not None and self.job.slots is not None:
            self.loop.call_soon(self._fire)
        self._check_over()

    def _close(self, at_ns: int) -> None:
        """A conversation is over; a closed loop's user begins another."""
        self.closed += 1
        if self.due_ns is None:
            self.loop.call_soon(self._open, at_ns)

    def _go_on(self, at_ns: int, k: int, said: Said, reading: asyncio.Future[str | None]) -> None:
        """Have the turn after position `k` follow its answer, which ended at `at_ns`; or nothing, if that failed."""
        answer = reading.result()
        if answer is None:
            self._close(at_ns)
            self._check_over()
            return
        due_ns, said = at_ns + int(self.job.think_ns[k + 1]), (*said, (b"assistant", escaped(answer)))
        if self.due_ns is None:
            self.loop.call_at(due_ns / NS_PER_S, self._start, due_ns, k + 1, said)
        else:
            heapq.heappush(self.queue, (due_ns, k + 1, said))
            self._fire()

    def _check_over(self) -> None:
        past = self.stop_ns is not None and monotonic_ns() >= self.stop_ns
        if self.in_flight == 0 and (self.stopped or past or self.closed == len(self.firsts)):
            self.stopped = True  # a turn whose user is still thinking stays unsent
            self.over.set()

    def _watch(self) -> None:
        """Every 50 ms: counters out, orders in; twice a second a flush; every second the clock and the parent."""
        if self.over.is_set():
            return
        self._count(_RUNNING)
        now_ns = monotonic_ns()
        if (self.board.stop or self.failure) and not self.stopped:
            self._stop()
        if now_ns - self.flushed_ns > s_to_ns(FLUSH_S) and (self.flushing is None or self.flushing.done()):
            self.flushed_ns = now_ns
            self._flush()
        if now_ns - self.watched_ns > NS_PER_S:
            self.watched_ns = now_ns
            self.clock.extend(wall_minus_monotonic_ns())
            if _orphaned(self.job):
                self._stop()
            if gc.get_count()[0] > _MOST_GARBAGE:
                gc.collect()
        self._check_over()
        self.loop.call_later(WATCH_S, self._watch)

    def _stop(self) -> None:
        self.stopped = True
        for client in self.clients:
            client.cancel()
        self._check_over()

    def _flush(self) -> None:
        rows, self.rows = self.rows, []
        clock, self.clock = self.clock.tobytes(), array("q")
        write = self.writer.write
        self.flushing = self.loop.run_in_executor(self.threads, write, rows, self.selector.take_cycles(), clock)
        self.flushing.add_done_callback(self._note_failure)

    def _note_failure(self, flushing: asyncio.Future[None]) -> None:
        error = flushing.exception()
        if error is not None:
            self.failure = f"the capture could not be written: {error}"
            self.board.stop = True

    async def _finish_writing(self) -> None:
        if self.flushing is not None:
            await asyncio.wait([self.flushing])
        self.clock.extend(wall_minus_monotonic_ns())
        self._flush()
        assert self.flushing is not None
        await asyncio.wait([self.flushing])
        if self.failure is None:
            self.writer.close()

    def _count(self, state: int) -> None:
        counts = (self.begun, self.finished, self.failed, self.in_flight, self.reads, self.opened)
        self.counters[:] = (state, os.getpid(), *counts)


def _with_tls(target: Target, link: Link) -> Link:
    tls = tls_context(target)
    return dataclasses.replace(link, tls=tls, server_hostname=target.host if tls else None)


def _process_facts(worker: int) -> dict[str, Any]:
    """What a reader of the run may want to know of the process that made the load."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    at_ns, offset_ns = wall_minus_monotonic_ns()
    return {
        "worker": worker,
        "pid": os.getpid(),
        "host": platform.node(),
        "monotonic_ns": at_ns,
        "wall_ns": at_ns + offset_ns,
        "peak_memory_bytes": peak_memory_bytes(),
        "most_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "involuntary_switches": usage.ru_nivcsw,
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
