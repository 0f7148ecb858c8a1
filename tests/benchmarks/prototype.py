"""The leanest client of the stamped kind that Python allows: nothing is checked, nothing is kept but stamps and bytes.

python prototype.py URL RATE REQUESTS PROMPT_WORDS TOKENS SEED NAME: Poisson arrivals on kept-alive connections that
were opened before; X-Request-Id NAME-<number>. It takes a response for ended when a read ends as a last chunk does.
Prints as JSON the processor seconds of the load, and [number, sent, kernel's stamp of the first token] in ns of the
wall clock.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

SO_TIMESTAMPNS = 35
Read = tuple[bytes, int, bytes]


class StampedSocket(socket.socket):
    """Logs (kernel stamp, wall clock, bytes) of every read."""

    __slots__ = ("log",)

    def __init__(self) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.setblocking(False)
        self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.log: list[Read] = []

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, control, _, _ = self.recvmsg(size, 32)
        self.log.append((control[0][2] if control else b"", time.time_ns(), data))
        return data


class Connection(asyncio.Protocol):
    """Looks at nothing but the end of each read."""

    def __init__(self, client: Client, sock: StampedSocket) -> None:
        self.client, self.sock = client, sock

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"0\r\n\r\n"):
            self.client.finish(self)


class Client:
    """Sends on an idle connection, or a new one, and keeps what was read."""

    def __init__(self, url: str, words: int, tokens: int, name: str) -> None:
        self.where = urlsplit(url)
        body = {"model": "m", "prompt": "hello " * words, "max_tokens": tokens, "stream": True}
        self.body = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        head = f"POST {self.where.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.head = head.encode() + b"Content-Length: %d\r\nX-Request-Id: " % len(self.body) + name.encode()
        self.idle: list[Connection] = []
        self.kept: list[tuple[int, int, list[Read]]] = []
        self.left = 0
        self.over = asyncio.Event()

    def finish(self, connection: Connection) -> None:
        self.kept.append((connection.number, connection.sent_ns, connection.sock.log))
        connection.sock.log = []
        self.idle.append(connection)
        self.left -= 1
        if not self.left:
            self.over.set()

    async def open(self) -> Connection:
        loop, sock = asyncio.get_running_loop(), StampedSocket()
        await loop.sock_connect(sock, (self.where.hostname, self.where.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, connection = await loop.create_connection(lambda: Connection(self, sock), sock=sock)
        return connection

    async def send(self, number: int) -> None:
        connection = self.idle.pop() if self.idle else await self.open()
        connection.number, connection.sent_ns = number, time.time_ns()
        connection.transport.write(b"%b-%d\r\n\r\n%b" % (self.head, number, self.body))

    async def load(self, due_s: list[float]) -> float:
        """Send the requests when they are due; the processor seconds until the last one is answered."""
        self.idle = [await self.open() for _ in range(min(256, len(due_s)))]
        self.left = len(due_s)
        start_s, cpu_s = time.monotonic() + 0.1, time.process_time()
        for number, after_s in enumerate(due_s):
            wait_s = start_s + after_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self.send(number)
        await self.over.wait()
        return time.process_time() - cpu_s


def first_token_ns(reads: list[Read]) -> int:
    stamp, seen_ns, _ = next(read for read in reads if b"data: {" in read[2])
    if not stamp:
        return seen_ns
    seconds, nanoseconds = struct.unpack("qq", stamp)
    return seconds * 10**9 + nanoseconds


def main(url: str, rate_per_s: str, requests: str, words: str, tokens: str, seed: str, name: str) -> None:
    rng = np.random.default_rng(np.random.SeedSequence(int(seed)).spawn(1)[0])  # what a run's schedule is drawn from
    due_s = np.cumsum(rng.exponential(1 / float(rate_per_s), int(requests))).tolist()
    client = Client(url, int(words), int(tokens), name)
    cpu_s = asyncio.run(client.load(due_s))
    rows = [(number, sent_ns, first_token_ns(reads)) for number, sent_ns, reads in client.kept]
    print(json.dumps({"cpu_s": cpu_s, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
