"""What can be asked of the reference server: by whoever starts it, and by a request. Pure."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

from llmprofile.errors import UsageError, one_of, positive, whole

LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
FRAMINGS = ("chunked", "length", "close")
FAULTS = ("status", "reset", "close", "stall", "error")
MOST_TOKENS = 1_000_000
STREAM_HEADERS = (("Content-Type", "text/event-stream"),)


def checked_names(name: str, given: object, kind: type) -> dict[str, Any]:
    """`given` as keywords of a dataclass, or a sentence that says which name it doesn't know."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{name} must be a dict, such as {{'kind': 'status', 'status': 500}}; not {given!r}")
    for key in given:
        one_of(f"each name in {name}", str(key), [field.name for field in fields(kind)])
    return dict(given)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on purpose with one request.

    Attributes
    ----------
    kind : str
        `status`: an error answer, at once. `reset`: the connection is reset. `close`: it is closed, with no
        [DONE] and no end of the body. `error`: an error event and [DONE] in a 200 stream (not a stream: as
        `status`). `stall`: nothing leaves for `stall_s`, and what follows is later by that.
    at : int
        Tokens that leave before it; it strikes when the next one would have left. At 0 a `reset` or `close`
        lets no byte out. An answer that is not a stream is cut after half of its bytes when `at` is above 0.
    status : int
        Of `status`, and the code that an `error` event names.
    stall_s : float
        In the batching engine the whole step takes that much longer.
    reused : bool
        Strike only on a connection that has carried an answer before.

    Examples
    --------
    >>> Fault.of({"kind": "reset", "at": 3})
    Fault(kind='reset', at=3, status=500, stall_s=0.0, reused=False)
    """

    kind: str
    at: int = 0
    status: int = 500
    stall_s: float = 0.0
    reused: bool = False

    def __post_init__(self) -> None:
        one_of("the kind of a fault", self.kind, FAULTS)
        whole("at of a fault", self.at, 0)
        if not 200 <= whole("status of a fault", self.status) <= 599:
            raise UsageError(f"status of a fault must be between 200 and 599; not {self.status}")
        if self.kind == "stall":
            positive("stall_s", self.stall_s)

    @classmethod
    def of(cls, given: object) -> Fault | None:
        """From a `Fault`, a dict of its attributes, or None."""
        if given is None or isinstance(given, Fault):
            return given
        return cls(**{"kind": "none", **checked_names("fault", given, cls)})


@dataclass(frozen=True)
class Script:
    """An answer to the byte: `segments` of (seconds after arrival, bytes), each one send.

    Examples
    --------
    >>> Script.of({"segments": [[0.05, "aGk="]]}).segments
    ((0.05, b'hi'),)
    """

    segments: tuple[tuple[float, bytes], ...]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = STREAM_HEADERS
    framing: str = "chunked"

    @classmethod
    def of(cls, given: object) -> Script | None:
        """From a `Script`, a dict of its attributes (text segments are base64), or None."""
        if given is None or isinstance(given, Script):
            return given
        known = checked_names("script", given, cls)
        try:
            segments = tuple((float(t), _raw(data)) for t, data in known.pop("segments", ()))
            headers = tuple((str(k), str(v)) for k, v in dict(known.pop("headers", STREAM_HEADERS)).items())
        except (TypeError, ValueError) as error:
            form = "segments of a script must be [[seconds, bytes], ...] and its headers {name: text}"
            raise UsageError(f"{form}: {error}") from error
        times = [0.0, *(t for t, _ in segments)]
        if not segments or not all(earlier <= later < math.inf for earlier, later in pairwise(times)):
            raise UsageError("segments of a script must be at least one [seconds, bytes], seconds rising from 0")
        if not str(headers).isascii():
            raise UsageError("headers of a script must be ASCII")
        whole("status of a script", known.get("status", 200), 200)
        one_of("framing of a script", known.get("framing", "chunked"), FRAMINGS)
        return cls(segments, headers=headers, **known)


def _raw(data: str | bytes) -> bytes:
    return base64.b64decode(data, validate=True) if isinstance(data, str) else bytes(memoryview(data))


@dataclass(frozen=True)
class Style:
    """How answers look.

    Attributes
    ----------
    tokens : int
        Tokens of an answer whose request names no limit.
    model : str
    framing : str
        `chunked`, `length` (Content-Length) or `close` (the body ends with the connection).
    line_end : str
        `lf`, `crlf` or `cr`.
    tokens_per_event, events_per_write : int
        Tokens in an event; events in one send. The pace is then that of the sends.
    split_s : float, optional
        Each send in two, the first half so long before the second, which is the one that is due.

    Examples
    --------
    >>> Style(line_end="crlf").framing
    'chunked'
    """

    tokens: int = 16
    model: str = "reference"
    framing: str = "chunked"
    line_end: str = "lf"
    tokens_per_event: int = 1
    events_per_write: int = 1
    split_s: float | None = None

    def __post_init__(self) -> None:
        one_of("framing", self.framing, FRAMINGS)
        one_of("line_end", self.line_end, LINE_ENDS)
        for name in ("tokens", "tokens_per_event", "events_per_write"):
            whole(name, getattr(self, name))
        if self.split_s is not None:
            positive("split_s", self.split_s)


class Asked(NamedTuple):
    """What one request asks for."""

    chat: bool
    stream: bool
    tokens: int
    usage: bool
    prompt_words: int
    fault: Fault | None
    script: Script | None
    running_usage: bool = False


def read_request(style: Style, fault: Fault | None, script: Script | None, chat: bool, body: bytes) -> Asked:
    """Read a request's body; the server's own ways where it says nothing. `UsageError` says what is wrong.

    Examples
    --------
    >>> read_request(Style(), None, None, False, b'{"prompt": "a b", "max_tokens": 3}')[:5]
    (False, False, 3, False, 2)
    """
    try:
        said = json.loads(body)
    except ValueError as error:
        raise UsageError(f"the body is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise UsageError("the body must be a JSON object")
    tokens = said.get("max_completion_tokens", said.get("max_tokens"))
    if whole("max_tokens", style.tokens if tokens is None else tokens) > MOST_TOKENS:
        raise UsageError(f"max_tokens must be at most {MOST_TOKENS}; not {tokens}")
    options = said.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise UsageError(f"stream_options must be an object; not {options!r}")
    return Asked(
        chat=chat,
        stream=said.get("stream") is True,
        tokens=tokens or style.tokens,
        usage=bool(options.get("include_usage")),
        prompt_words=_words(said.get("messages" if chat else "prompt")),
        fault=Fault.of(said["fault"]) if "fault" in said else fault,
        script=Script.of(said["script"]) if "script" in said else script,
        running_usage=bool(options.get("continuous_usage_stats")),
    )


def _words(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, Mapping):
        return _words(prompt.get("content")) + _words(prompt.get("text"))
    if isinstance(prompt, list):  # token ids count one each
        return sum(_words(part) if isinstance(part, (str, list, Mapping)) else 1 for part in prompt)
    return 0
