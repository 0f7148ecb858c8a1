"""One place for what differs between APIs: where requests go, what they say, what their answers mean.

The first half makes requests (`Target` and what follows from it), the second reads answers (`read_event`,
`Answer`): completions and chat completions, streamed or in one body.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import re
import ssl
import string
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llmprofile.errors import UsageError, one_of

_PORTS = {"http": 80, "https": 443}
_REFUSED = {
    "x-request-id": "the client numbers its requests with it",
    "host": "it follows from the URL",
    "content-length": "it follows from the body",
    "transfer-encoding": "requests are sent in one piece",
    "expect": "requests are sent in one piece",
    "connection": "the client decides whether a connection is reused",
    "keep-alive": "the client decides whether a connection is reused",
    "upgrade": "the client speaks HTTP/1.1 only",
}
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")


@dataclass(frozen=True, repr=False)
class Target:
    """Where requests go, and how.

    Attributes
    ----------
    url : str
        As it was given.
    scheme : str
        ``"http"`` or ``"https"``.
    host : str
        A name, or an address (an IPv6 one without brackets).
    port : int
    path : str
        With the query.
    kind : str
        ``"completions"`` or ``"chat"``.
    headers : tuple of (name, value)
        The caller's, and the one that bears the key. Their values are never shown.
    verify : bool
        Whether the server's certificate has to be good.
    ca_file : str or None
        Certificates to trust in place of the system's.
    """

    url: str
    scheme: str
    host: str
    port: int
    path: str
    kind: str
    headers: tuple[tuple[str, str], ...] = ()
    verify: bool = True
    ca_file: str | None = None

    def __repr__(self) -> str:
        path, mark, _ = self.path.partition("?")  # a query may hold a key, too
        where = f"{self.scheme}://{_authority(self.scheme, self.host, self.port)}{path}{mark and '?...'}"
        names = ", ".join(name for name, _ in self.headers) or "none"
        return (
            f"Target({where}, {self.kind}, headers: {names}, verify={self.verify}, ca_file={self.ca_file!r})"
        )


def parse_target(
    url: str,
    headers: Mapping[str, str] | Iterable[tuple[str, str] | str] = (),
    api_key_env: str | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> Target:
    """Check where requests are to go.

    Parameters
    ----------
    url : str
        Its path ends with ``/completions`` or ``/chat/completions``.
    headers : mapping or iterable
        Pairs, or lines like ``"Name: value"``.
    api_key_env : str, optional
        Environment variable that holds the key, sent as ``Authorization: Bearer ...``.
    ca_file : path, optional
        PEM file of certificates to trust in place of the system's.
    verify : bool
        False takes any certificate.

    Raises
    ------
    UsageError
        One sentence says what is wrong; no header's value and no key is in it.

    Examples
    --------
    >>> parse_target("http://127.0.0.1:8000/v1/chat/completions")
    Target(http://127.0.0.1:8000/v1/chat/completions, chat, headers: none, verify=True, ca_file=None)
    """
    scheme, host, port, path = _split_url(url)
    kind = _kind(path, f"{scheme}://{_authority(scheme, host, port)}")
    pairs = _headers(headers.items() if isinstance(headers, Mapping) else headers)
    if api_key_env is not None:
        if any(name.lower() == "authorization" for name, _ in pairs):
            raise UsageError("give the header Authorization or api_key_env, not both")
        pairs = (*pairs, ("Authorization", f"Bearer {_key(api_key_env)}"))
    ca_file = None if ca_file is None else os.fspath(ca_file)
    _check_tls(scheme, ca_file, verify)
    return Target(url, scheme, host, port, path, kind, pairs, verify, ca_file)


def _split_url(url: str) -> tuple[str, str, int, str]:
    # urlsplit drops line ends and tabs without a word
    if re.search(r"[\x00-\x20\x7f]", url):
        raise UsageError("the URL holds a space or control character; write a space as %20")
    if "://" not in url:
        raise UsageError("the URL has no scheme; put http:// or https:// before it")
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        host = host if ":" in host else host.encode("idna").decode()
    except ValueError:
        raise UsageError("the URL's host can't be read; an IPv6 address stands in brackets") from None
    one_of("the URL's scheme", parts.scheme, tuple(_PORTS))
    if not host:
        raise UsageError("the URL has no host; write it as in http://127.0.0.1:8000/v1/completions")
    if parts.username is not None:
        raise UsageError("the URL must not hold a name or password; use a header, or api_key_env for a key")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, _port(parts), urllib.parse.quote(path, safe=string.punctuation)


def _port(parts: urllib.parse.SplitResult) -> int:
    try:
        port = _PORTS[parts.scheme] if parts.port is None else parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise UsageError("the URL's port must be a whole number from 1 to 65535")
    return port


def _authority(scheme: str, host: str, port: int) -> str:
    name = f"[{host.partition('%')[0]}]" if ":" in host else host  # a zone is known on this machine only
    return name if port == _PORTS[scheme] else f"{name}:{port}"


def _kind(path: str, server: str) -> str:
    path = path.partition("?")[0]
    if path.endswith("/chat/completions"):
        return "chat"
    if path.endswith("/completions"):
        return "completions"
    likely = f"{server}/v1/completions or {server}/v1/chat/completions"
    if path in ("", "/"):
        raise UsageError(f"the URL has no path; it is likely {likely}")
    raise UsageError(
        f"the URL's path must end with /completions or /chat/completions, as in {likely}; not {path}"
    )


def _headers(items: Iterable[tuple[str, str] | str]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
            name, colon, value = item.partition(":")
            if not colon:
                raise UsageError(f"header {number} has no colon; write it as 'Name: value'")
        else:
            name, value = item
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise UsageError(f"the name of header {number} may hold letters, digits and hyphens only")
        if name.lower() in _REFUSED:
            raise UsageError(f"the header {name} can't be set: {_REFUSED[name.lower()]}")
        pairs.append((name, _header_value(f"the header {name}", value)))
    return tuple(pairs)


def _header_value(what: str, value: object) -> str:
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise UsageError(f"{what} must be one line of Latin-1 text")
    return value.strip()


def _key(variable: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):
        raise UsageError("api_key_env must be the name of an environment variable, not the key itself")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(
            f"the environment variable {variable}, which is to hold the key, is not set or empty"
        )
    return _header_value(f"the key in {variable}", key)


def _check_tls(scheme: str, ca_file: str | None, verify: bool) -> None:
    if scheme == "http" and (ca_file is not None or not verify):
        raise UsageError("a CA file, or not verifying certificates, goes with https only; the URL is http")
    if ca_file is None:
        return
    if not verify:
        raise UsageError("give a CA file or switch verification off, not both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        with Path(ca_file).open("rb"):  # OpenSSL's own words for a missing file say less
            context.load_verify_locations(ca_file)
    except ssl.SSLError:
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the CA file {ca_file} can't be read: {reason}") from None
    if not context.cert_store_stats()["x509"]:
        raise UsageError(f"the CA file {ca_file} holds no certificate in PEM format")


def tls_context(target: Target) -> ssl.SSLContext | None:
    """The TLS settings that a target asks for; None for plain HTTP.

    Examples
    --------
    >>> tls_context(parse_target("https://127.0.0.1/v1/completions", verify=False)).check_hostname
    False
    """
    if target.scheme == "http":
        return None
    context = ssl.create_default_context(cafile=target.ca_file)
    context.set_alpn_protocols(["http/1.1"])
    if not target.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def request_headers(target: Target) -> tuple[tuple[str, str], ...]:
    """The headers of every request except Host, X-Request-Id and Content-Length; the caller's override ours.

    Examples
    --------
    >>> request_headers(parse_target("http://h/v1/completions", {"User-Agent": "me"}))[1:]
    (('Content-Type', 'application/json'), ('User-Agent', 'me'))
    """
    ours = (
        ("Accept", "text/event-stream, application/json"),
        ("Content-Type", "application/json"),
        ("User-Agent", _user_agent()),
    )
    theirs = {name.lower() for name, _ in target.headers}
    return tuple(pair for pair in ours if pair[0].lower() not in theirs) + target.headers


@functools.cache
def _user_agent() -> str:
    try:
        return f"llmprofile/{importlib.metadata.version('llmprofile')}"
    except importlib.metadata.PackageNotFoundError:
        return "llmprofile"


def request_head(target: Target) -> bytes:
    r"""The head of every request, up to the lines that differ.

    A request is ``head + b"X-Request-Id: " + name + b"\r\nContent-Length: " + length + b"\r\n\r\n" + body``.

    Examples
    --------
    >>> request_head(parse_target("http://[::1]:8000/v1/completions")).split(b"\r\n")[:2]
    [b'POST /v1/completions HTTP/1.1', b'Host: [::1]:8000']
    """
    host = _authority(target.scheme, target.host, target.port)
    lines = [f"POST {target.path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in request_headers(target)]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


def body_template(
    target: Target,
    model: str,
    stream: bool = True,
    usage: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> tuple[bytes, bytes, bytes]:
    r"""The parts of a request's body around what differs, so that the hot path only joins.

    Returns
    -------
    a, b, c : bytes
        A body is ``a + prompt + b + str(output_tokens) + c``. The prompt's quotation marks are in `a` and
        `b`; `prompt` is the prompt itself when it is ASCII without control characters, ``"`` and ``\``, else
        ``json.dumps(prompt)[1:-1]``.

    Raises
    ------
    UsageError
        `extra` would change what the other arguments ask for, or is not JSON.

    Examples
    --------
    >>> body_template(parse_target("http://h/v1/completions"), "m", stream=False)
    (b'{"model": "m", "prompt": "', b'", "max_tokens": ', b', "stream": false}')
    """
    rest = {"stream": stream, **_extra(extra)}
    if stream and usage:
        rest["stream_options"] = {"include_usage": True, **rest.get("stream_options", {})}
    head = f'{{"model": {json.dumps(model)}, '
    try:
        tail = ", " + json.dumps(rest, allow_nan=False)[1:]
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the extra fields of the request can't be written as JSON: {error}") from None
    if target.kind == "chat":
        parts = head + '"messages": [{"role": "user", "content": "', '"}], "max_tokens": ', tail
    else:
        parts = head + '"prompt": "', '", "max_tokens": ', tail
    a, b, c = (part.encode() for part in parts)
    return a, b, c


def _extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    fields = dict(extra or {})
    for name in ("model", "prompt", "messages", "max_tokens", "stream"):
        if name in fields:
            raise UsageError(
                f"the extra fields of the request can't hold {name}: it has an argument of its own"
            )
    if not isinstance(fields.get("stream_options", {}), dict):
        raise UsageError("stream_options must be a dict")
    return fields


def request_body(
    target: Target,
    model: str,
    prompt: str,
    output_tokens: int,
    stream: bool = True,
    usage: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The JSON body of one request.

    Parameters
    ----------
    target : Target
        Whose kind decides the shape.
    model, prompt : str
        As they are sent.
    output_tokens : int
        At most so many (``max_tokens``).
    stream : bool
        Whether to ask for an event stream.
    usage : bool
        Whether a stream is to end with the server's own counts.
    extra : mapping, optional
        Further fields, as they are (``temperature``, ``ignore_eos``); ``stream_options`` are added to ours.

    Raises
    ------
    UsageError
        `extra` would change what the other arguments ask for, or is not JSON.

    Examples
    --------
    >>> request_body(parse_target("http://h/v1/completions"), "m", "Hello", 5, stream=False)
    b'{"model": "m", "prompt": "Hello", "max_tokens": 5, "stream": false}'
    """
    a, b, c = body_template(target, model, stream, usage, extra)
    return b"".join((a, json.dumps(prompt)[1:-1].encode(), b, b"%d" % output_tokens, c))


# --- answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What a server says it counted, None for what it doesn't say; reasoning is part of completion."""

    completion_tokens: int | None
    prompt_tokens: int | None
    reasoning_tokens: int | None


TOKEN_KINDS = frozenset(("content", "reasoning", "tool"))
"""The kinds of event that are tokens."""


class Event(NamedTuple):
    """What the data of one server-sent event means.

    Attributes
    ----------
    kind : str
        ``"content"``, ``"reasoning"`` or ``"tool"``: a token. ``"none"``: none. ``"done"``: the end.
        ``"error"``: the server says so. ``"bad"``: not JSON.
    text : str
        Of the token.
    finished : bool
        Whether a choice gave a finish reason.
    usage : Usage or None
    message : str or None
        What is wrong.
    timings : dict or None
        The server's own timings, when they are a flat object of numbers.
    """

    kind: str
    text: str = ""
    finished: bool = False
    usage: Usage | None = None
    message: str | None = None
    timings: dict[str, float] | None = None


_raw_decode = json.JSONDecoder().raw_decode


def _load(data: bytes) -> Any:
    text = data.decode().strip(" \t\r\n")
    value, end = _raw_decode(text)  # half the time of json.loads on bytes
    if end != len(text):
        raise ValueError(f"something follows the value at character {end}")
    return value


def read_event(data: bytes) -> Event:
    """Say what one event means; never raises, whatever the bytes are.

    A token carries content, reasoning or a tool call in any choice; or empty text with neither role nor
    finish reason, which engines send for a token whose character is not complete yet.

    Examples
    --------
    >>> read_event(b'{"choices": [{"delta": {"content": "Hi"}, "finish_reason": null}]}')[:3]
    ('content', 'Hi', False)
    >>> read_event(b"[DONE]").kind, read_event(b"{not json").kind
    ('done', 'bad')
    """
    try:
        value = _load(data)
    except (ValueError, RecursionError) as error:
        if data.strip() == b"[DONE]":
            return Event("done")
        return Event("bad", message=f"an event is not JSON: {error}")
    if not isinstance(value, dict):
        return Event("none")
    if _is_error(value):
        return Event("error", message=_error_text(value))
    kind, text, finished = _read_choices(value.get("choices"))
    usage, timings = value.get("usage"), value.get("timings")
    if usage is None and timings is None:
        return Event(kind, text, finished)
    return Event(kind, text, finished, _read_usage(usage), None, _read_timings(timings))


def _is_error(value: dict[str, Any]) -> bool:
    # some servers put "error": null on every event
    return value.get("error") is not None or value.get("object") == "error"


def _read_choices(choices: Any) -> tuple[str, str, bool]:
    if not isinstance(choices, list):
        return "none", "", False
    found = [_read_choice(choice) for choice in choices if isinstance(choice, dict)]
    if len(found) == 1:
        return found[0]
    kinds = [kind for kind, _, _ in found]
    kind = next((kind for kind in ("content", "reasoning", "tool") if kind in kinds), "none")
    text = "".join(text for of, text, _ in found if of == kind)
    return kind, text, any(finished for _, _, finished in found)


def _read_choice(choice: dict[str, Any]) -> tuple[str, str, bool]:
    finished = bool(choice.get("finish_reason"))
    delta = choice.get("delta")
    if isinstance(delta, dict):
        kind, text = _read_delta(delta, finished)
        return kind, text, finished
    whole = choice.get("text")
    if isinstance(whole, str) and (whole or not finished):
        return "content", whole, finished
    return "none", "", finished


def _read_delta(delta: dict[str, Any], finished: bool) -> tuple[str, str]:
    content = _text(delta, "content", "refusal")
    if content:
        return "content", content
    reasoning = _text(delta, "reasoning_content", "reasoning")
    if reasoning:
        return "reasoning", reasoning
    tools = delta.get("tool_calls")
    if (isinstance(tools, list) and tools) or delta.get("function_call"):
        return "tool", ""
    if not finished and not delta.get("role"):
        if content is not None:
            return "content", ""
        if reasoning is not None:
            return "reasoning", ""
    return "none", ""


def _text(delta: dict[str, Any], *names: str) -> str | None:
    """The first text that isn't empty; else "" when one is there, else None."""
    found = None
    for name in names:
        value = delta.get(name)
        if isinstance(value, list):  # of parts
            value = "".join(
                p["text"] for p in value if isinstance(p, dict) and isinstance(p.get("text"), str)
            )
        if isinstance(value, str):
            if value:
                return value
            found = value
    return found


def _read_usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("completion_tokens_details")
    holder = details if isinstance(details, dict) else value
    usage = Usage(
        _count(value.get("completion_tokens")),
        _count(value.get("prompt_tokens")),
        _count(holder.get("reasoning_tokens")),
    )
    return None if usage == _NOTHING else usage


_NOTHING = Usage(None, None, None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


def _read_timings(value: Any) -> dict[str, float] | None:
    if isinstance(value, dict) and value and all(type(number) in (int, float) for number in value.values()):
        return value
    return None


def _error_text(value: dict[str, Any]) -> str:
    error = value.get("error")
    named = error.get("message") if isinstance(error, dict) else error
    for text in (named, value.get("message"), value.get("detail")):
        if isinstance(text, str) and text.strip():
            return _short(text)
    try:
        return _short(json.dumps(value))
    except RecursionError:
        return "an error without a message"


def _short(text: str) -> str:
    return " ".join(_whole_text(text).split())[:200]


def _whole_text(text: str) -> str:
    """Text that any encoding takes: halves of a character that came in two events are put together."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True)
class Answer:
    """What came back for one request, without times: offsets say which read brought what.

    Attributes
    ----------
    outcome : str
        ``"ok"``, ``"stream_error"``, ``"truncated"`` or ``"http_error"``.
    error : str or None
        Why it is not ok.
    ends : list of int
        For each token event, the offset in the body just after its last byte.
    sizes : list of int
        Bytes of each token event: from the end of the event before it, whatever that was, to its own.
    counts : list of int
        Tokens each of them holds: known from running totals when each came with one that grew, else 1.
    counts_known : bool
        Whether `counts` came from running totals, or the server's count means one token an event.
    kinds : list of str
        For each token event ``"content"``, ``"reasoning"`` or ``"tool"``.
    last_event_end : int
        Offset after the last event of any kind; 0 when there is none.
    all_ends : list of int
        The same for every event up to [DONE], which is among them.
    usage : Usage or None
        The last one. Its completion and reasoning tokens are None if tokens came after it.
    text : str
        All content.
    timings : dict or None
        The server's own, as they are.
    streamed : bool
        Whether it was an event stream.
    """

    outcome: str
    error: str | None = None
    ends: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    counts_known: bool = False
    kinds: list[str] = field(default_factory=list)
    last_event_end: int = 0
    all_ends: list[int] = field(default_factory=list)
    usage: Usage | None = None
    text: str = ""
    timings: dict[str, float] | None = None
    streamed: bool = False

    @property
    def output_tokens(self) -> int | None:
        """N: the server's count, else the number of token events; None for a body without a count."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return len(self.ends) if self.streamed or self.outcome == "http_error" else None

    @property
    def token_source(self) -> str | None:
        """Where `output_tokens` comes from: ``"usage"``, ``"events"`` or None."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return "usage"
        return "events" if self.streamed else None

    @property
    def streamed_tokens(self) -> int:
        """n: N less the reasoning tokens that the server counted and never showed."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return _visible(self.usage, "reasoning" in self.kinds)
        return len(self.ends)


def _visible(usage: Usage, shown: bool) -> int:
    total, reasoning = usage.completion_tokens or 0, usage.reasoning_tokens or 0
    # a server that says more reasoning than completion tokens does not count the one in the other
    return total if shown or reasoning > total else total - reasoning


def read_stream(status: int, events: Iterable[tuple[bytes, int]], complete: bool) -> Answer:
    """Read an answer that is an event stream.

    Parameters
    ----------
    status : int
        Of the response; one that isn't 2xx makes an ``http_error`` of any answer.
    events : iterable of (data, end)
        As `sse.EventParser` gives them; read up to [DONE]. The parser of a body that was cut short is not to
        be closed: half an event is none.
    complete : bool
        Whether the HTTP body ended as its framing says; after [DONE] that doesn't matter.

    Examples
    --------
    >>> events = [(b'{"choices": [{"text": "Hi", "finish_reason": "stop"}]}', 62), (b"[DONE]", 76)]
    >>> answer = read_stream(200, events, complete=True)
    >>> answer.outcome, answer.ends, answer.output_tokens, answer.token_source, answer.text
    ('ok', [62], 1, 'events', 'Hi')
    """
    if not 200 <= status < 300:
        return Answer("http_error", f"status {status}")
    read: list[tuple[int, Event]] = []
    for data, end in events:
        event = read_event(data)
        read.append((end, event))
        if event.kind == "done":
            break
    usage = _last_usage(read)
    outcome, error = _stream_outcome([event for _, event in read], complete, usage)
    all_ends = [end for end, _ in read]
    tokens = [
        (end, end - before, event)
        for before, (end, event) in zip([0, *all_ends], read, strict=False)
        if event.kind in TOKEN_KINDS
    ]
    kinds = [event.kind for _, _, event in tokens]
    counts = _running_counts([event.usage for _, _, event in tokens], "reasoning" in kinds)
    one_each = usage is not None and _visible(usage, "reasoning" in kinds) == len(tokens)
    return Answer(
        outcome,
        error,
        ends=[end for end, _, _ in tokens],
        sizes=[size for _, size, _ in tokens],
        counts=counts or [1] * len(tokens),
        counts_known=bool(tokens) and (counts is not None or one_each),
        kinds=kinds,
        last_event_end=all_ends[-1] if all_ends else 0,
        all_ends=all_ends,
        usage=usage,
        text=_whole_text("".join(event.text for _, _, event in tokens if event.kind == "content")),
        timings=next((event.timings for _, event in reversed(read) if event.timings), None),
        streamed=True,
    )


def _stream_outcome(events: list[Event], complete: bool, usage: Usage | None) -> tuple[str, str | None]:
    faults = [event.message for event in events if event.message is not None]
    if faults:
        return "stream_error", faults[0]
    done = bool(events) and events[-1].kind == "done"
    tokens = sum(event.kind in TOKEN_KINDS for event in events)
    after = f"after {tokens} token event{'' if tokens == 1 else 's'}"
    if not done and not complete:
        return "truncated", f"the body was cut short {after}"
    if not done and not any(event.finished for event in events):
        return "truncated", f"the stream ended {after} with neither [DONE] nor a finish reason"
    if not tokens and (usage is None or usage.completion_tokens != 0):
        return "truncated", "the stream ended without a token"
    return "ok", None


def _last_usage(read: list[tuple[int, Event]]) -> Usage | None:
    """The last usage; without its counts of the answer when tokens came after it."""
    stale = False
    for _, event in reversed(read):
        if event.usage is not None:
            return Usage(None, event.usage.prompt_tokens, None) if stale else event.usage
        stale = stale or event.kind in TOKEN_KINDS
    return None


def _running_counts(usages: list[Usage | None], shown: bool) -> list[int] | None:
    """Tokens of each event, when each came with a running total that had grown; else None."""
    totals = [0]
    for usage in usages:
        total = 0 if usage is None else _visible(usage, shown)
        if total <= totals[-1]:
            return None
        totals.append(total)
    return [after - before for before, after in itertools.pairwise(totals)]


def read_body(status: int, body: bytes, complete: bool) -> Answer:
    """Read an answer that is one JSON object.

    Parameters
    ----------
    status : int
        Of the response; one that isn't 2xx makes an ``http_error`` of any answer.
    body : bytes
        Without chunk framing and content coding.
    complete : bool
        Whether the HTTP body ended as its framing says.

    Examples
    --------
    >>> body = b'{"choices": [{"text": "Hi"}], "usage": {"completion_tokens": 1}}'
    >>> answer = read_body(200, body, complete=True)
    >>> answer.outcome, answer.text, answer.output_tokens, answer.ends
    ('ok', 'Hi', 1, [])
    """
    if not 200 <= status < 300:
        return Answer("http_error", _body_error(status, body))
    if not complete:
        return Answer("truncated", "the body was cut short")
    try:
        value = _load(body)
    except (ValueError, RecursionError) as error:
        return Answer("stream_error", f"the body is not JSON: {error}")
    if not isinstance(value, dict):
        return Answer("stream_error", "the body is not a JSON object")
    usage, timings = _read_usage(value.get("usage")), _read_timings(value.get("timings"))
    if _is_error(value):
        return Answer("stream_error", _error_text(value), usage=usage, timings=timings)
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices:
        return Answer("stream_error", "the body has no choices", usage=usage, timings=timings)
    # a message is written as one delta is
    deltas = [{**c, "delta": c.get("message")} for c in choices if isinstance(c, dict)]
    kind, text, _ = _read_choices(deltas)
    return Answer("ok", usage=usage, timings=timings, text=_whole_text(text) if kind == "content" else "")


def _body_error(status: int, body: bytes) -> str:
    try:
        value = _load(body)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return _error_text(value)
    return _short(body[:2000].decode(errors="replace")) or f"status {status}"


def read_answer(
    status: int, content_type: str, body: bytes, events: Iterable[tuple[bytes, int]] | None, complete: bool
) -> Answer:
    """Read an answer of any kind.

    Parameters
    ----------
    status : int
        Of the response; one that isn't 2xx makes an ``http_error`` of any answer.
    content_type : str
        The response's header of that name, "" when it has none.
    body : bytes
        Without chunk framing and content coding.
    events : iterable of (data, end), optional
        The body's events when it is an event stream.
    complete : bool
        Whether the HTTP body ended as its framing says.

    Examples
    --------
    >>> read_answer(200, "text/html", b"<html>", None, True).error
    'the answer is text/html, neither an event stream nor JSON'
    """
    media = content_type.partition(";")[0].strip().lower()
    is_json = media == "application/json" or media.endswith("+json") or (not media and body[:1] == b"{")
    if is_json or not 200 <= status < 300:
        return read_body(status, body, complete)
    if events is not None and media == "text/event-stream":
        return read_stream(status, events, complete)
    return Answer(
        "stream_error", f"the answer is {_short(media or 'of no type')}, neither an event stream nor JSON"
    )
