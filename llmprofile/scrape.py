"""What a server says of itself: its Prometheus page, read once a second while a load runs, on the client's time axis.

The page is read by a thread of the caller's process, never by a worker. What can't be read is counted with its reason
and not asked for again before its next turn.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from llmprofile.api import Target, tls_context
from llmprofile.clock import monotonic_ns
from llmprofile.errors import UsageError
from llmprofile.records import Run, read_table, write_table

EVERY_S, TIMEOUT_S = 1.0, 2.0
MOST_BYTES = 1 << 24
PAGES_AT_ONCE = 30
FILE = "metrics.parquet"
METRICS = pa.schema([("at_ns", pa.int64()), ("name", pa.string()), ("labels", pa.string()), ("value", pa.float64())])

SERVERS: dict[str, dict[str, tuple[str, ...]]] = {
    "vLLM": {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "cache_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "queue_s": ("vllm:request_queue_time_seconds",),
    },
    "SGLang": {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "cache_use": ("sglang:token_usage",),
        "queue_s": ("sglang:queue_time_seconds",),
    },
    "TGI": {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "queue_s": ("tgi_request_queue_duration",),
    },
    "llama.cpp": {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "cache_use": ("llamacpp:kv_cache_usage_ratio",),
    },
    "reference server": {
        "running": ("llmprofile:requests_running",),
        "waiting": ("llmprofile:requests_waiting",),
    },
}
"""For each server, our names and what it calls them (of several the first that it has).

`running`, `waiting`: requests. `cache_use`: a share (vLLM says "perc"). `queue_s`: a histogram in seconds.
"""


class Sample(NamedTuple):
    """One line of a metrics page; `labels` as JSON with sorted names, "{}" for none."""

    name: str
    labels: str
    value: float


_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]*\{(.*)\}[ \t]*|[ \t]+)(\S+)(?:[ \t]+-?\d+)?[ \t]*", re.ASCII)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,[ \t]*|\Z)', re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?|nan)", re.ASCII | re.IGNORECASE)
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parse_metrics(text: str) -> list[Sample]:
    """The samples of a page in Prometheus's text format, version 0.0.4, in its order; pure.

    Comments (HELP and TYPE too), empty lines and time stamps are left out. A histogram is its samples: `_bucket`
    with the label `le`, `_sum`, `_count`.

    Raises
    ------
    UsageError
        A line that is none of these.

    Examples
    --------
    >>> parse_metrics('# TYPE up gauge\\nup{job="a \\\\"b\\\\""} 1\\nsize +Inf 1700000000000\\n')
    [Sample(name='up', labels='{"job": "a \\\\"b\\\\""}', value=1.0), Sample(name='size', labels='{}', value=inf)]
    """
    lines = enumerate((line.strip(" \t\r") for line in text.split("\n")), 1)
    return [_sample(number, line) for number, line in lines if line and not line.startswith("#")]


def _sample(number: int, line: str) -> Sample:
    match = _SAMPLE.fullmatch(line)
    labels = None if match is None else _labels(match[2] or "")
    if match is None or labels is None or not _NUMBER.fullmatch(match[3]):
        raise UsageError(f"line {number} is no sample of a metrics page: {line[:80]!r}")
    return Sample(match[1], labels, float(match[3]))


@functools.lru_cache(maxsize=1 << 14)
def _labels(inside: str) -> str | None:
    """What stands between the braces, as JSON; None where it can't be read."""
    found: dict[str, str] = {}
    at, inside = 0, inside.strip(" \t")
    while at < len(inside):
        match = _LABEL.match(inside, at)
        if match is None or match[1] in found:
            return None
        found[match[1]] = re.sub(r"\\.", lambda escape: _ESCAPED.get(escape[0], escape[0]), match[2], flags=re.DOTALL)
        at = match.end()
    return json.dumps(found, sort_keys=True, ensure_ascii=False)


def metrics_target(url: str, ca_file: str | None = None, verify: bool = True) -> Target:
    """Where a metrics page is; its path is `/metrics` where the URL has none. No key and no header is sent there.

    Raises
    ------
    UsageError
        It is no http(s) URL, or holds what could be a secret: it is written into `run.json`.

    Examples
    --------
    >>> metrics_target("http://127.0.0.1:8000").path
    '/metrics'
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or parts.username is not None or parts.query:
        raise UsageError(
            "scrape_metrics must be the URL of a metrics page, such as http://127.0.0.1:8000/metrics, with no name, "
            "password or query in it"
        )
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    port = port or (443 if parts.scheme == "https" else 80)
    return Target(url, parts.scheme, host, port, path, "metrics", (), verify, ca_file)


def check_page(target: Target) -> None:
    """Read the page once, before a load is started.

    Raises
    ------
    UsageError
        It can't be read, or is no metrics page.

    Examples
    --------
    >>> check_page(metrics_target(server.base_url))
    """
    try:
        samples = parse_metrics(fetch(target))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UsageError(f"no metrics at {target.url}: {_reason(error)}") from None
    if not samples:
        raise UsageError(f"no metrics at {target.url}: the page is empty")


def fetch(target: Target, timeout_s: float = TIMEOUT_S) -> str:
    """The text of a page, over a connection of its own; no redirect is followed and no proxy used.

    Raises
    ------
    OSError, http.client.HTTPException, ValueError
        It did not come, not in time, not with status 200, not whole, or not as UTF-8.

    Examples
    --------
    >>> fetch(metrics_target(server.base_url)).splitlines()[0]
    '# TYPE llmprofile:requests_running gauge'
    """
    until_s = time.monotonic() + timeout_s
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    tls: dict[str, Any] = {"context": tls_context(target)} if target.scheme == "https" else {}
    connection = kind(target.host, target.port, timeout=timeout_s, **tls)
    try:
        connection.connect()
        sock = connection.sock
        connection.request("GET", target.path, headers={"Accept": "text/plain; version=0.0.4"})
        with connection.getresponse() as response:
            return _whole(response, sock, until_s).decode()
    finally:
        connection.close()


def _whole(response: http.client.HTTPResponse, sock: socket.socket, until_s: float) -> bytes:
    """The body of a good answer, if all of it comes in time."""
    if response.status != 200:
        raise ValueError(f"status {response.status}")
    body = b""
    while part := response.read1(1 << 16):
        body += part
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        if len(body) > MOST_BYTES:
            raise ValueError(f"the page is longer than {MOST_BYTES} bytes")
        if response.isclosed():  # from Python 3.13 on an answer closes its socket with its last byte
            break
        sock.settimeout(left_s)
    if response.length:
        raise ValueError("the page was cut short")
    return body


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"not there within {TIMEOUT_S:g} s"
    return "it is not UTF-8" if isinstance(error, UnicodeError) else str(error) or type(error).__name__


@dataclass
class _Scraper:
    """Reads a page at fixed times until it is over; `failed` counts reasons, `missed` the turns that were taken up."""

    target: Target
    path: Path
    over: threading.Event = field(default_factory=threading.Event)
    read: int = 0
    missed: int = 0
    longest_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    broken: str | None = None

    def run(self) -> None:
        draft = self.path.with_suffix(".tmp")
        try:
            write_table(draft, self._parts(), METRICS)
            draft.replace(self.path)
        except (OSError, pa.ArrowException) as error:  # a full disk, or a folder that is gone: no reason to lose a run
            self.broken = str(error)

    def _parts(self) -> Iterator[pa.Table]:
        pages: list[pa.Table] = []
        due_s = time.monotonic()
        while not self.over.wait(max(0.0, due_s - time.monotonic())):
            pages += self._page()
            if len(pages) >= PAGES_AT_ONCE:
                yield pa.concat_tables(pages)
                pages = []
            turns = max(1, int(-(-(time.monotonic() - due_s) // EVERY_S)))
            self.missed += turns - 1
            due_s += turns * EVERY_S
        yield pa.concat_tables([METRICS.empty_table(), *pages])

    def _page(self) -> list[pa.Table]:
        """The page as a table; nothing where it can't be read."""
        asked_ns = monotonic_ns()
        try:
            text = fetch(self.target)
            answered_ns = monotonic_ns()
            samples = parse_metrics(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failed[_reason(error)] += 1
            return []
        self.read += 1
        self.longest_s = max(self.longest_s, (answered_ns - asked_ns) / 1e9)
        at_ns = np.full(len(samples), (asked_ns + answered_ns) // 2)
        columns = (at_ns, *zip(*samples, strict=True)) if samples else ([], [], [], [])
        return [pa.table(list(map(pa.array, columns, METRICS.types)), METRICS)]

    def facts(self) -> dict[str, Any]:
        return {
            "url": self.target.url,
            "read": self.read,
            "failed": self.failed.total(),
            "missed": self.missed,
            "reasons": dict(self.failed),
            "longest_s": self.longest_s,
            "broken": self.broken,
        }


@contextlib.contextmanager
def scraping(folder: Path, meta: dict[str, Any]) -> Iterator[None]:
    """While the block runs, read the page that `meta["asked"]` names as `scrape_metrics`, if it names one.

    The samples go to `metrics.parquet` in the folder, and what became of the scrapes to `meta["scrape"]`: `read`,
    `failed` with `reasons`, `missed` (turns that a slow page took up), `longest_s` (a page's longest time), `broken`
    (why the samples could not be kept).

    Examples
    --------
    >>> meta = {"asked": {"scrape_metrics": server.base_url}}
    >>> with scraping(Path(), meta):
    ...     time.sleep(0.5)
    >>> meta["scrape"]["read"], meta["scrape"]["failed"]
    (1, 0)
    """
    asked = meta["asked"]
    if asked.get("scrape_metrics") is None:
        yield
        return
    target = metrics_target(asked["scrape_metrics"], asked.get("ca_file"), asked.get("verify", True))
    scraper = _Scraper(target, folder / FILE)
    thread = threading.Thread(target=scraper.run, name="llmprofile-scrape", daemon=True)
    thread.start()
    try:
        yield
    finally:
        scraper.over.set()
        thread.join(2 * TIMEOUT_S)
        if thread.is_alive():
            scraper.broken = "the last scrape did not end"
        meta["scrape"] = scraper.facts()


def server_samples(run: Run) -> pd.DataFrame:
    """Everything that was read from the server's metrics page while the run was going on.

    Returns
    -------
    DataFrame
        `at_ns` (between asking and answer, CLOCK_MONOTONIC of the caller's machine), `name`, `labels` (JSON), `value`.

    Raises
    ------
    UsageError
        Nothing was.

    Examples
    --------
    >>> server_samples(run)
    Traceback (most recent call last):
    llmprofile.errors.UsageError: this run has no server metrics: name the page with scrape_metrics
    """
    path = run.folder / FILE if run.folder else None
    if path is None or not path.exists():
        why = (run.meta.get("scrape") or {}).get("broken")
        raise UsageError(f"this run has no server metrics: {why or 'name the page with scrape_metrics'}")
    return read_table(path)


def server_metrics(run: Run) -> pd.DataFrame:
    """What the server said of itself during a run, under our names, one row a value.

    Parameters
    ----------
    run : Run

    Returns
    -------
    DataFrame
        `at_ns`; `at_s`, seconds since the first request was sent; `server`; `metric`; `value`. Metrics: `running` and
        `waiting`, requests, summed where a page has several (engines, ranks); `cache_use`, a share, their mean;
        `queue_s`, mean time in the server's queue of the requests that left it since the scrape before, NaN when none
        did or the counter began anew. `attrs` holds what became of the scrapes.

    Raises
    ------
    UsageError
        Nothing was read, or no name that is known: `SERVERS` lists them, `server_samples` has all others.

    Examples
    --------
    >>> import dataclasses
    >>> meta = run.meta | {"asked": {"scrape_metrics": server.base_url}}
    >>> with scraping(Path(), meta):  # as `run_load` does
    ...     time.sleep(0.5)
    >>> server_metrics(dataclasses.replace(run, folder=Path(), meta=meta))["metric"].tolist()
    ['running', 'waiting']
    """
    samples = server_samples(run)
    samples["value"] = samples["value"].astype(float)
    parts = []
    for server, metrics in SERVERS.items():
        for metric, names in metrics.items():
            values = _values(samples, metric, names)
            parts.append(
                pd.DataFrame({"at_ns": values.index, "server": server, "metric": metric, "value": values.array})
            )
    frame = pd.concat(parts, ignore_index=True)
    if frame.empty:
        raise UsageError(
            f"the page at {run.meta['asked'].get('scrape_metrics')} has none of the names of {', '.join(SERVERS)}; "
            "server_samples(run) has what it holds"
        )
    frame.insert(1, "at_s", (frame["at_ns"] - int(run.requests["sent_ns"].min())) / 1e9)
    frame.attrs = dict(run.meta.get("scrape") or {})
    return frame


def _values(samples: pd.DataFrame, metric: str, names: tuple[str, ...]) -> pd.Series:
    """A metric's values by the time of their scrape."""
    known = set(samples["name"])
    if metric == "queue_s":
        name = next((name for name in names if f"{name}_count" in known), names[0])
        summed, count = (_summed(samples, f"{name}_{part}").diff() for part in ("sum", "count"))
        return (summed / count).where((count > 0) & (summed >= 0))
    name = next((name for name in names if name in known), names[0])
    by_scrape = samples[samples["name"] == name].groupby("at_ns")["value"]
    return by_scrape.mean() if metric == "cache_use" else by_scrape.sum(min_count=1)


def _summed(samples: pd.DataFrame, name: str) -> pd.Series:
    return samples[samples["name"] == name].groupby("at_ns")["value"].sum(min_count=1)
