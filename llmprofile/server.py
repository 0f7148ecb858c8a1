"""A reference server in a process of its own: an OpenAI-compatible server whose every token time is known."""

from __future__ import annotations

import base64
import http.client
import json
import os
import selectors
import ssl
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd

from llmprofile.asked import Fault, Script, Style
from llmprofile.errors import LlmprofileError, UsageError, not_negative, one_of, whole
from llmprofile.pacing import Pace
from llmprofile.truth import Arrays, token_frame, truth_frame, unpack

_DEFAULTS: dict[str, Any] = {
    **asdict(Pace()),
    **asdict(Style()),
    **dict.fromkeys(("fault", "script", "cpus", "certfile", "keyfile", "close_idle_s")),
    "fault_share": 1.0,
    "connect_delay_s": 0.0,
    "host": "127.0.0.1",
    "port": 0,
}
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_FETCH_TIMEOUT_S = 60.0


class ReferenceServer:
    """An OpenAI-compatible server with known token times, and faults on demand.

    It serves `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics` from a process of
    its own, which ends with this one, and keeps a record of what it really did. The record's times are CLOCK_MONOTONIC
    of this machine, as a run's are: the two join by request id and can be subtracted. Arrivals are the
    kernel's stamps, so the truth does not suffer the server's own queue.

    A request may carry `"fault": {...}` or `"script": {...}` in its body, which stands in for the server's.

    Parameters
    ----------
    ttft_s, itl_s, cv, step, seed, max_batch, batch_cost
        The law of the token times: see `llmprofile.pacing.Pace`, and `Batch` for what `max_batch` brings in.
    fault : dict, optional
        What goes wrong on purpose: see `llmprofile.asked.Fault`; such as `{"kind": "reset", "at": 3}`.
    fault_share : float
        Share of the requests that it befalls, drawn by seed and request id.
    port : int
        0: any free one.
    host : str
    cpus : iterable of int, optional
        Cores to keep to, where the system can.
    certfile, keyfile : str, optional
        Serve https with these.
    close_idle_s : float, optional
        Close a connection that has been idle for so long (0: at once), although keeping it was promised.
    connect_delay_s : float
        Listen to a new connection so long after it was made. TCP connects all the same, by the kernel's hand;
        a TLS handshake waits, and so does the first answer.
    script : dict, optional
        An answer to the byte for every request: see `llmprofile.asked.Script`.
    **style
        Attributes of `llmprofile.asked.Style`: tokens, model, framing, line_end, tokens_per_event,
        events_per_write, split_s.

    Raises
    ------
    UsageError
        A parameter that makes no sense, a port that can't be had, a certificate that can't be read.

    Examples
    --------
    >>> with ReferenceServer(ttft_s=0.02, itl_s=0.005) as server:
    ...     len(server.truth())
    0
    """

    def __init__(
        self,
        ttft_s: float = 0.05,
        itl_s: float = 0.01,
        *,
        cv: float = 0.0,
        step: bool = False,
        seed: int = 1,
        max_batch: int | None = None,
        batch_cost: float = 0.0,
        fault: Mapping[str, Any] | Fault | None = None,
        fault_share: float = 1.0,
        port: int = 0,
        host: str = "127.0.0.1",
        cpus: Iterable[int] | None = None,
        certfile: str | os.PathLike[str] | None = None,
        keyfile: str | os.PathLike[str] | None = None,
        close_idle_s: float | None = None,
        connect_delay_s: float = 0.0,
        script: Mapping[str, Any] | Script | None = None,
        **style: Any,
    ) -> None:
        for name in style:
            one_of("a parameter of ReferenceServer", name, [field.name for field in fields(Style)])
        if not (not_negative("fault_share", fault_share) <= 1):
            raise UsageError(f"fault_share must be between 0 and 1; not {fault_share}")
        if certfile is None and keyfile is not None:
            raise UsageError("keyfile needs a certfile")
        asked: dict[str, Any] = {
            "pace": asdict(Pace(ttft_s, itl_s, cv, step, seed, max_batch, batch_cost)),
            "style": asdict(Style(**style)),
            "fault": _as_dict(Fault.of(fault)),
            "fault_share": fault_share,
            "script": _as_dict(Script.of(script)),
            "host": host,
            "port": whole("port", port, 0),
            "cpus": None if cpus is None else _cores(cpus),
            "certfile": None if certfile is None else os.fspath(certfile),
            "keyfile": None if keyfile is None else os.fspath(keyfile),
            "close_idle_s": None if close_idle_s is None else not_negative("close_idle_s", close_idle_s),
            "connect_delay_s": not_negative("connect_delay_s", connect_delay_s),
        }
        _together(asked)
        self._process = _start()
        self._end = weakref.finalize(self, _stop, self._process)
        self._asked = {**asked, "port": _told(self._process, asked, self._end)}

    @property
    def base_url(self) -> str:
        """Where the server is, without a path."""
        scheme = "http" if self._asked["certfile"] is None else "https"
        host = self._reachable_host()
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._asked['port']}"

    @property
    def url(self) -> str:
        """The address of completions."""
        return self.base_url + "/v1/completions"

    @property
    def chat_url(self) -> str:
        """The address of chat completions."""
        return self.base_url + "/v1/chat/completions"

    @property
    def pid(self) -> int:
        """The process that serves."""
        return self._process.pid

    def truth(self, forget: bool = False) -> pd.DataFrame:
        """What really happened, one row an answer that has ended; `forget` empties the record.

        Columns: `id` (X-Request-Id), `request_id` (the number at its end), `arrive_first_ns` and `arrive_ns`
        (the request's first and last byte; `stamped`: by the kernel's word), `first_ns` and `last_ns` (just
        before the send of the first and the last token), `first_sent_ns` and `last_sent_ns` (just after it),
        `tokens`, `prompt_words`, `late_ns` (the most that a send was behind schedule), `queue_s` (from
        arrival until the batching engine took it in), `status`, `gone` (the client left first), `fault`.
        `attrs["in_flight"]` counts the answers that have not ended; `attrs["wall_minus_monotonic_ns"]` leads
        to the wall clock.
        """
        return truth_frame(self._fetch(forget))

    def tokens(self, forget: bool = False) -> pd.DataFrame:
        """When each token left, one row a token: `id`, `request_id`, `index`, `left_ns`, `sent_ns`.

        Before and after the send of the event's last byte. Of a script, a row a segment.
        """
        return token_frame(self._fetch(forget))

    def record(self, forget: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
        """`truth()` and `tokens()` of the same moment."""
        fetched = self._fetch(forget)
        return truth_frame(fetched), token_frame(fetched)

    def wait(self) -> None:
        """Return when the server has ended."""
        self._process.wait()

    def close(self) -> None:
        """End the server; its record is gone with it."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        asked = {**self._asked["pace"], **self._asked["style"], **self._asked}
        always = ("ttft_s", "itl_s", "port")
        shown = {k: asked[k] for k in ("ttft_s", "itl_s", *_DEFAULTS) if k in always or asked[k] != _DEFAULTS[k]}
        return f"ReferenceServer({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _repr_html_(self) -> str:
        state = "serving at" if self._end.alive else "closed; was at"
        return f"<code>{escape(repr(self))}</code><br>{state} <a href='{self.base_url}'>{self.base_url}</a>"

    def _reachable_host(self) -> str:
        host: str = self._asked["host"]
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

    def _fetch(self, forget: bool) -> Arrays:
        if not self._end.alive:
            raise UsageError("the reference server is closed, and its record with it; ask before the block ends")
        host, port = self._reachable_host(), self._asked["port"]
        if self._asked["certfile"] is None:
            connection = http.client.HTTPConnection(host, port, timeout=_FETCH_TIMEOUT_S)
        else:
            trusted = _trusting(self._asked["certfile"])
            connection = http.client.HTTPSConnection(host, port, timeout=_FETCH_TIMEOUT_S, context=trusted)
        try:
            connection.request("GET", "/truth" + ("?forget=1" if forget else ""))
            return unpack(connection.getresponse().read())
        except OSError as error:
            raise LlmprofileError(f"the reference server (process {self.pid}) does not answer: {error}") from error
        finally:
            connection.close()


def _together(asked: dict[str, Any]) -> None:
    if asked["style"]["split_s"] is not None and asked["pace"]["max_batch"] is not None:
        raise UsageError("split_s and max_batch don't go together: the engine's steps have no halves")


def _as_dict(given: Fault | Script | None) -> dict[str, Any] | None:
    return None if given is None else asdict(given)


def _cores(cpus: Iterable[int]) -> list[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("cpus can't be chosen on this system; leave the parameter out")
    chosen, allowed = sorted(cpus), sorted(os.sched_getaffinity(0))
    if not chosen or not set(chosen) <= set(allowed):
        raise UsageError(f"cpus must be some of {', '.join(map(str, allowed))}; not {chosen}")
    return chosen


def _start() -> subprocess.Popen[bytes]:
    package = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "llmprofile.serving"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server ends with its standard input; if it doesn't, it is killed."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _told(process: subprocess.Popen[bytes], asked: dict[str, Any], end: Callable[[], object]) -> int:
    """Tell the process what to do; the port where it listens."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = json.dumps(asked, default=lambda raw: base64.b64encode(raw).decode())
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            heard = selector.select(_START_TIMEOUT_S)
        said = json.loads(process.stdout.readline() or b"{}") if heard else {}
    except OSError:
        heard, said = [], {}
    if "port" not in said:
        end()
        why = "ended at once; its standard error says why" if heard else "did not say in time where it listens"
        raise UsageError(said["error"]) if "error" in said else LlmprofileError(f"the reference server {why}")
    port: int = said["port"]
    return port


def _trusting(certfile: str) -> ssl.SSLContext:
    """A context that trusts this server's own certificate, whoever signed it and whatever name it bears."""
    context = ssl.create_default_context(cafile=certfile)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
