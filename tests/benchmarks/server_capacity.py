"""How many chunks per second the reference server carries on one core.

    python tests/benchmarks/server_capacity.py [--rates 400 800 1000] [--tokens 50] [--seconds 3]
                                               [--step] [--cv 0.5] [--client PROGRAM]

The server keeps to the first core and the client to the others. PROGRAM is called with port, rate, seconds
and tokens and makes that load (open loop, kept-alive connections); without one, this script reads for itself.
Printed for each rate: chunks a second in the middle half of the run, the server's processor time per chunk,
and how far requests were behind schedule at their worst token.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import subprocess
import time
from pathlib import Path

import numpy as np

from llmprofile.server import ReferenceServer

END = b"0\r\n\r\n"


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_load(port: int, rate_per_s: float, seconds: float, tokens: int) -> None:
    """Poisson requests at their due times. Nothing is parsed: an answer ends with the last chunk's bytes."""
    body = b'{"prompt": "hello", "max_tokens": %d, "stream": true}' % tokens
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    rng = np.random.default_rng(1)
    due_s = time.monotonic() + 0.1 + np.cumsum(rng.exponential(1 / rate_per_s, round(rate_per_s * seconds)))
    selector, idle, sent, done = selectors.DefaultSelector(), [], 0, 0
    while done < len(due_s):
        while sent < len(due_s) and due_s[sent] <= time.monotonic():
            if idle:
                sock = idle.pop()
            else:
                sock = socket.create_connection(("127.0.0.1", port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(sock, selectors.EVENT_READ)
            sock.send(request)
            sent += 1
        wait_s = max(due_s[sent] - time.monotonic(), 0) if sent < len(due_s) else 1.0
        for key, _ in selector.select(wait_s):
            if key.fileobj.recv(1 << 16).endswith(END):  # type: ignore[union-attr]
                idle.append(key.fileobj)
                done += 1
    for sock in idle:
        sock.close()


def measure(server: ReferenceServer, client: str | None, rate_per_s: float, seconds: float, tokens: int) -> str:
    port, before_s = int(server.base_url.rpartition(":")[2]), cpu_s(server.pid)
    if client is None:
        make_load(port, rate_per_s, seconds, tokens)
    else:
        subprocess.run([client, str(port), str(rate_per_s), str(seconds), str(tokens)], check=True)
    spent_s = cpu_s(server.pid) - before_s
    truth, each = server.record(forget=True)
    early_ns, late_ns = np.quantile(each["left_ns"], [0.25, 0.75])
    per_s = len(each) / 2 / (late_ns - early_ns) * 1e9
    worst_ms = np.quantile(truth["late_ns"] / 1e6, [0.5, 0.99])
    cost_us = spent_s / len(each) * 1e6
    late = f"late p50 {worst_ms[0]:.2f} ms, p99 {worst_ms[1]:.2f} ms"
    return f"{rate_per_s:7.0f} requests/s asked {per_s:9.0f} chunks/s {cost_us:6.1f} µs a chunk   {late}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[400, 800, 1000])
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--cv", type=float, default=0.0)
    parser.add_argument("--client")
    asked = parser.parse_args()
    first, *others = sorted(os.sched_getaffinity(0))
    with ReferenceServer(step=asked.step, cv=asked.cv, cpus=[first]) as server:
        os.sched_setaffinity(0, others or [first])
        for rate_per_s in asked.rates:
            print(measure(server, asked.client, rate_per_s, asked.seconds, asked.tokens), flush=True)


if __name__ == "__main__":
    main()
