"""Both clients without processes: requests of any body through real sockets, parsed as a run's are."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from llmprofile.api import parse_target, tls_context
from llmprofile.capture import CaptureWriter, Exchange, pack
from llmprofile.clock import (
    CycleSelector,
    keep_stamping,
    monotonic_ns,
    run_precisely,
    stamps_work,
    wall_minus_monotonic_ns,
)
from llmprofile.link import Link
from llmprofile.parsing import parse_worker
from llmprofile.preflight import reach
from llmprofile.records import to_frame
from llmprofile.worker import CLIENTS

NAMES = tuple(CLIENTS)


def link_to(url: str, ca_file: str | None = None, **options: Any) -> Link:
    """The link that a worker would make."""
    target = parse_target(url, ca_file=ca_file)
    tls = tls_context(target)
    return dataclasses.replace(reach(target, 10.0), tls=tls, server_hostname=target.host if tls else None, **options)


def exchange(
    client: str, link: Link, bodies: Sequence[bytes], folder: Path, together: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Send the bodies, so many at once, the next when all of those are answered; the request and event tables."""
    return run(client, link, folder, lambda sender: _send_all(sender, bodies, together))


class Sender:
    """A client in a running loop, with what it has given back."""

    def __init__(self, client: str, link: Link, selector: CycleSelector) -> None:
        self.selector = selector
        self.done: list[Exchange] = []
        self.client = CLIENTS[client](link, self.done.append)
        self.begun = 0

    def start(self, body: bytes) -> None:
        """Begin the next request."""
        self.client.start(Exchange(self.begun, monotonic_ns()), b"test-%d" % self.begun, body)
        self.begun += 1

    async def all_done(self, within_s: float = 20.0) -> None:
        """Wait until every request has come back."""
        async with asyncio.timeout(within_s):
            while len(self.done) < self.begun:  # noqa: ASYNC110  a poll is plain enough here
                await asyncio.sleep(0.002)


async def _send_all(sender: Sender, bodies: Sequence[bytes], together: int) -> None:
    for first in range(0, len(bodies), together):
        for body in bodies[first : first + together]:
            sender.start(body)
        await sender.all_done()


def run(client: str, link: Link, folder: Path, act: Callable[[Sender], Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Let `act` use a client, then parse what came back."""
    (folder / "capture").mkdir(parents=True)
    if link.stamps:
        assert stamps_work()

    async def main(selector: CycleSelector) -> None:
        clock = array("q", wall_minus_monotonic_ns())
        sender = Sender(client, link, selector)
        await act(sender)
        await sender.client.close()
        clock.extend(wall_minus_monotonic_ns())
        writer = CaptureWriter(folder, 0)
        writer.write([pack(e) for e in sender.done], selector.take_cycles(), clock.tobytes())
        writer.close()

    with keep_stamping():
        run_precisely(main)
    parse_worker(folder, 0, keep_text=True)
    part = folder / "capture"
    requests = to_frame(pq.read_table(part / "answers-0.parquet")).sort_values("request_id", ignore_index=True)
    texts = to_frame(pq.read_table(part / "texts-0.parquet"))
    return requests.merge(texts, on="request_id"), to_frame(pq.read_table(part / "events-0.parquet"))
