"""What differs between APIs when one asks: where a request goes, what its head and body say."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import ssl
import string
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmprofile.errors import UsageError, not_negative, one_of, whole

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


class _Shape(NamedTuple):
    """How an API words a request.

    Attributes
    ----------
    ending : str
        Of the path by which it is known.
    field : str
        What holds the prompt: one text, or a list of messages.
    limit : str
        The field that says how many tokens are wanted.
    holder : str
        The object that `limit` stands in with other options; "" for the request itself.
    models : str
        The path of the list of models, from where `ending` begins.
    knows : tuple of str
        The fields of sampling that it knows.
    """

    ending: str
    field: str
    limit: str
    holder: str = ""
    models: str = "/models"
    knows: tuple[str, ...] = ("temperature", "seed")


_VLLM = ("temperature", "seed", "ignore_eos")
_SHAPES = {
    "chat": _Shape("/chat/completions", "messages", "max_tokens", knows=_VLLM),
    "completions": _Shape("/completions", "prompt", "max_tokens", knows=_VLLM),
    "responses": _Shape("/responses", "input", "max_output_tokens", knows=("temperature",)),
    "ollama": _Shape("/api/generate", "prompt", "num_predict", "options", "/v1/models"),
    "ollama_chat": _Shape("/api/chat", "messages", "num_predict", "options", "/v1/models"),
    "tgi": _Shape("/generate_stream", "inputs", "max_new_tokens", "parameters", "/v1/models"),
}


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
        ``"completions"``, ``"chat"``, ``"responses"``, ``"ollama"`` (/api/generate), ``"ollama_chat"`` (/api/chat)
        or ``"tgi"`` (/generate_stream): how requests are worded.
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
        where = f"{origin(self.scheme, self.host, self.port)}{path}{mark and '?...'}"
        names = ", ".join(name for name, _ in self.headers) or "none"
        return f"Target({where}, {self.kind}, headers: {names}, verify={self.verify}, ca_file={self.ca_file!r})"


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
        Its path ends with ``/completions``, ``/chat/completions``, ``/responses``, Ollama's ``/api/generate`` or
        ``/api/chat``, or TGI's ``/generate_stream``.
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
    kind = _kind(path, origin(scheme, host, port))
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


def origin(scheme: str, host: str, port: int) -> str:
    """A URL up to its path: an IPv6 address in brackets, the port where it isn't the usual one.

    Examples
    --------
    >>> origin("http", "::1", 8000), origin("https", "h", 443)
    ('http://[::1]:8000', 'https://h')
    """
    return f"{scheme}://{_authority(scheme, host, port)}"


def _authority(scheme: str, host: str, port: int) -> str:
    name = f"[{host.partition('%')[0]}]" if ":" in host else host  # a zone is known on this machine only
    return name if port == _PORTS[scheme] else f"{name}:{port}"


def _kind(path: str, server: str) -> str:
    path = path.partition("?")[0]
    for kind, shape in _SHAPES.items():
        if path.endswith(shape.ending):
            return kind
    likely = f"{server}/v1/completions or {server}/v1/chat/completions"
    if path in ("", "/"):
        raise UsageError(f"the URL has no path; it is likely {likely}")
    *endings, last = (shape.ending for shape in _SHAPES.values())
    endings_text = f"{', '.join(endings)} or {last}"
    raise UsageError(f"the URL's path must end with {endings_text}, as in {likely}; not {path}")


def models_path(target: Target) -> str:
    """Where a server lists its models.

    Examples
    --------
    >>> models_path(parse_target("http://h/x/v1/chat/completions"))
    '/x/v1/models'
    >>> models_path(parse_target("http://h/api/generate"))
    '/v1/models'
    """
    shape = _SHAPES[target.kind]
    return target.path.partition("?")[0].removesuffix(shape.ending) + shape.models


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
        raise UsageError(f"the environment variable {variable}, which is to hold the key, is not set or empty")
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


def takes_messages(target: Target, dialogue: bool) -> bool:
    """Whether what is said goes out as a list of messages: to a chat always, to responses where more than one is said.

    Examples
    --------
    >>> takes_messages(parse_target("http://h/v1/responses"), dialogue=False)
    False
    """
    return _SHAPES[target.kind].field == "messages" or (target.kind == "responses" and dialogue)


def word_messages(messages: Iterable[tuple[bytes, bytes]], listed: bool) -> bytes:
    r"""Messages as they stand in a request's body; in one text, joined by blank lines and without their roles.

    Parameters
    ----------
    messages : iterable of (role, text)
        Each as between the quotation marks of a JSON string.
    listed : bool
        As `takes_messages` says.

    Examples
    --------
    >>> word_messages([(b"user", b"Why?")], listed=True), word_messages([(b"user", b"a"), (b"user", b"b")], False)
    (b'{"role": "user", "content": "Why?"}', b'a\\n\\nb')
    """
    if listed:
        return b", ".join([b'{"role": "%b", "content": "%b"}' % message for message in messages])
    return rb"\n\n".join([text for _, text in messages])


def body_template(
    target: Target,
    model: str,
    stream: bool = True,
    usage: bool = True,
    extra: Mapping[str, Any] | None = None,
    *,
    dialogue: bool = False,
    system_prompt: str | None = None,
    ignore_eos: bool = False,
    temperature: float | None = None,
    sampling_seed: int | None = None,
) -> tuple[bytes, ...]:
    r"""The parts of a request's body around what differs, so that the hot path only joins.

    Parameters
    ----------
    target, model, stream, usage, extra
        As for `request_body`.
    dialogue : bool
        Whether more than one message may be said.
    system_prompt : str, optional
        A system message before all others; `instructions` of responses; before the prompt where there is one text.
    ignore_eos : bool
        Ask for neither less nor more than the output tokens (`ignore_eos`, `min_tokens`).
    temperature, sampling_seed : optional
        `temperature` and `seed`, where the API has them.

    Returns
    -------
    before, *after : bytes
        A body is ``before + word_messages(…) + str(output_tokens).join(after)``.

    Raises
    ------
    UsageError
        `extra` would change what the other arguments ask for, or is not JSON; the API doesn't know an argument.

    Examples
    --------
    >>> body_template(parse_target("http://h/v1/completions"), "m", stream=False)
    (b'{"model": "m", "prompt": "', b'", "max_tokens": ', b', "stream": false}')
    """
    shape, listed = _SHAPES[target.kind], takes_messages(target, dialogue)
    rest = {"stream": stream, **_extra(extra, shape)}
    _add_sampling(rest, shape, {"temperature": temperature, "seed": sampling_seed, "ignore_eos": ignore_eos or None})
    _ask_for_usage(rest, target.kind, stream, usage)
    opening = _opening(rest, target.kind, listed, system_prompt)
    options = rest.pop(shape.holder, {})
    try:
        tail = ", " + json.dumps(rest, allow_nan=False)[1:]
        inner = json.dumps(options, allow_nan=False)[1:-1]
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the extra fields of the request can't be written as JSON: {error}") from None
    opened = f'"{shape.holder}": {{' if shape.holder else ""
    closed = f"{inner and ', '}{inner}}}" if shape.holder else ""
    before = f'{{"model": {json.dumps(model)}, "{shape.field}": {opening}'
    ending = "]" if listed else '"'
    limits = [f'{ending}, {opened}"{shape.limit}": ', ', "min_tokens": '][: 1 + ignore_eos]
    return tuple(part.encode() for part in (before, *limits, closed + tail))


def _opening(rest: dict[str, Any], kind: str, listed: bool, system_prompt: str | None) -> str:
    """What begins the list of messages or the one text, with the system prompt."""
    if system_prompt is None:
        return "[" if listed else '"'
    if not isinstance(system_prompt, str) or not system_prompt:
        raise UsageError("system_prompt must be a text that is not empty")
    if kind == "responses":
        if "instructions" in rest:
            raise UsageError("the extra fields of the request can't hold instructions beside system_prompt")
        rest["instructions"] = system_prompt
        return "[" if listed else '"'
    text = json.dumps(system_prompt)
    return f'[{{"role": "system", "content": {text}}}, ' if listed else text[:-1] + r"\n\n"


def _add_sampling(rest: dict[str, Any], shape: _Shape, given: dict[str, Any]) -> None:
    """Put what was given to where the API has it."""
    fields = {name: value for name, value in given.items() if value is not None}
    arguments = {"seed": "sampling_seed"}
    for name in fields:
        if name not in shape.knows:
            raise UsageError(f"{arguments.get(name, name)} can't be had: {shape.ending} has no {name}")
    if "temperature" in fields:
        not_negative("temperature", fields["temperature"])
    if "seed" in fields:
        whole("sampling_seed", fields["seed"], 0)
    if not fields:
        return
    place = rest.get(shape.holder, {}) if shape.holder else rest
    for name in (*fields, *(["min_tokens"] if "ignore_eos" in fields else [])):
        if name in place:
            raise UsageError(f"the extra fields of the request can't hold {name}: it was given as an argument as well")
    if shape.holder:
        rest[shape.holder] = {**place, **fields}
    else:
        rest |= fields


def _ask_for_usage(rest: dict[str, Any], kind: str, stream: bool, usage: bool) -> None:
    """Have a stream end with the server's own counts; responses and Ollama say them unasked."""
    if kind == "tgi" and not stream:
        raise UsageError("/generate_stream has nothing but streams; stream=False can't be had of it")
    if kind == "tgi":
        rest["parameters"] = {"details": usage, **rest.get("parameters", {})}
    elif kind in ("completions", "chat") and stream and usage:
        rest["stream_options"] = {"include_usage": True, **rest.get("stream_options", {})}


_ASKED_ELSEWHERE = ("model", "prompt", "messages", "input", "inputs", "max_tokens", "max_output_tokens", "stream")


def _extra(extra: Mapping[str, Any] | None, shape: _Shape) -> dict[str, Any]:
    fields = dict(extra or {})
    for name in ("stream_options", shape.holder):
        if not isinstance(fields.get(name, {}), dict):
            raise UsageError(f"{name} must be a dict")
    taken = [name for name in _ASKED_ELSEWHERE if name in fields]
    if shape.holder and shape.limit in fields.get(shape.holder, {}):
        taken.append(shape.limit)
    for name in taken:
        raise UsageError(f"the extra fields of the request can't hold {name}: it has an argument of its own")
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
        At most so many (``max_tokens``, or as the API calls it).
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
    before, *after = body_template(target, model, stream, usage, extra)
    said = word_messages([(b"user", json.dumps(prompt)[1:-1].encode())], takes_messages(target, dialogue=False))
    return b"".join((before, said, (b"%d" % output_tokens).join(after)))
