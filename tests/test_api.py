"""Targets and requests are what was asked for."""

from __future__ import annotations

import json
import math
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.api import (
    body_template,
    models_path,
    parse_target,
    request_body,
    request_head,
    request_headers,
    takes_messages,
    tls_context,
    word_messages,
)
from llmprofile.errors import UsageError

COMPLETIONS = "http://127.0.0.1:8000/v1/completions"
CHAT = "http://127.0.0.1:8000/v1/chat/completions"
SECRET = "s3cret-value"


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "kind", "host_line"),
    [
        ("http://h/v1/completions", "h", 80, "/v1/completions", "completions", "h"),
        ("HTTPS://H:443/chat/completions", "h", 443, "/chat/completions", "chat", "h"),
        ("https://h:80/x/chat/completions?v=1&w", "h", 80, "/x/chat/completions?v=1&w", "chat", "h:80"),
        ("http://[::1]:8000/completions#f", "::1", 8000, "/completions", "completions", "[::1]:8000"),
        (
            "http://b\u00fccher.de/\u00fc/completions",
            "xn--bcher-kva.de",
            80,
            "/%C3%BC/completions",
            "completions",
            None,
        ),
        ("http://h/v1/completions?a=/b", "h", 80, "/v1/completions?a=/b", "completions", "h"),
        ("http://h/a%20b/completions", "h", 80, "/a%20b/completions", "completions", "h"),
        ("http://h/v1/responses", "h", 80, "/v1/responses", "responses", "h"),
        ("http://h:11434/api/generate", "h", 11434, "/api/generate", "ollama", "h:11434"),
        ("http://h:11434/api/chat", "h", 11434, "/api/chat", "ollama_chat", "h:11434"),
        ("http://h/api/chat/completions", "h", 80, "/api/chat/completions", "chat", "h"),
        ("http://h/generate_stream", "h", 80, "/generate_stream", "tgi", "h"),
    ],
)
def test_urls(url: str, host: str, port: int, path: str, kind: str, host_line: str | None) -> None:
    target = parse_target(url)
    assert (target.url, target.host, target.port, target.path, target.kind) == (url, host, port, path, kind)
    lines = request_head(target).decode().split("\r\n")
    assert lines[:2] == [f"POST {path} HTTP/1.1", f"Host: {host_line or host}"] and lines[-1] == ""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000/v1/completions", ["no scheme", "http://"]),
        ("ftp://h/v1/completions", ["http, https", "not ftp"]),
        ("http:///v1/completions", ["no host"]),
        ("http://:80/v1/completions", ["no host"]),
        ("http://h:x/v1/completions", ["port", "1 to 65535"]),
        ("http://h:70000/v1/completions", ["port", "1 to 65535"]),
        ("http://h:0/v1/completions", ["port", "1 to 65535"]),
        ("http://[::1/v1/completions", ["host can't be read"]),
        ("http://a..b/v1/completions", ["host can't be read"]),
        (f"http://me:{SECRET}@h/v1/completions", ["name or password", "api_key_env"]),
        ("http://h:8000", ["no path", "http://h:8000/v1/completions", "http://h:8000/v1/chat/completions"]),
        ("http://h/", ["no path", "http://h/v1/completions"]),
        ("http://h/?a=b", ["no path"]),
        ("http://h/v1/models", ["/v1/completions", "/v1/chat/completions", "/api/chat", "not /v1/models"]),
        ("http://h/generate", ["/api/generate", "/generate_stream", "not /generate"]),
        ("http://h/v1/completions/", ["must end with"]),
        ("http://h/v1?x=/completions", ["must end with", "not /v1"]),
        ("http://h/v1 /completions", ["space"]),
        ("http://h/v1\n/completions", ["control"]),
    ],
)
def test_urls_that_are_refused(url: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(url)
    assert all(word in str(caught.value) for word in words)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        *[(name, SECRET) for name in ("X-Request-Id", "host", "Content-Length", "Transfer-Encoding", "Connection")],
        ("X-A", f"{SECRET}\r\nX-B: 1"),
        ("X-A", f"{SECRET}\n"),
        ("X-A", f"{SECRET}\x00"),
        ("X-A", f"{SECRET}\u20ac"),
        ("X A", SECRET),
        ("X-A\r\nX-B", SECRET),
        ("", SECRET),
        f"Bearer {SECRET}",
        f"Authorization Bearer {SECRET}: x",
        ("X-A", 5),
    ],
)
def test_headers_that_are_refused(header: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(COMPLETIONS, [header])
    assert SECRET not in str(caught.value)


def test_headers_override_ours_and_stay_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPROFILE_TEST_KEY", f" {SECRET}\n")
    target = parse_target(f"{CHAT}?key={SECRET}", ["accept:  x/y ", ("X-A", SECRET)], api_key_env="LLMPROFILE_TEST_KEY")
    assert SECRET not in repr(target) and "X-A" in repr(target)
    head = request_head(target)
    assert head.endswith(f"X-A: {SECRET}\r\nAuthorization: Bearer {SECRET}\r\n".encode())
    assert b"accept: x/y\r\n" in head and b"Accept:" not in head and b"Encoding" not in head
    assert b"\r\nContent-Type: application/json\r\n" in head and b"\r\nUser-Agent: llmprofile" in head
    assert [name for name, _ in request_headers(parse_target(CHAT))] == [
        "Accept",
        "Content-Type",
        "User-Agent",
    ]


def test_keys_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMPROFILE_TEST_KEY", raising=False)
    with pytest.raises(UsageError, match=r"LLMPROFILE_TEST_KEY.*not set"):
        parse_target(CHAT, api_key_env="LLMPROFILE_TEST_KEY")
    monkeypatch.setenv("LLMPROFILE_TEST_KEY", f"{SECRET}\nX: y")
    with pytest.raises(UsageError, match="one line") as caught:
        parse_target(CHAT, api_key_env="LLMPROFILE_TEST_KEY")
    assert SECRET not in str(caught.value)
    with pytest.raises(UsageError, match="not the key itself") as caught:
        parse_target(CHAT, api_key_env=SECRET)
    assert SECRET not in str(caught.value)
    with pytest.raises(UsageError, match="not both"):
        parse_target(CHAT, {"authorization": "x"}, api_key_env="LLMPROFILE_TEST_KEY")


CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBlDCCATugAwIBAgIUPQtjKpDGR7AE+GLwYWCmS901XUcwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTE3MTIyMVoYDzIxMjYxMTA1
MTcxMjIxWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASH0looXuPyc9PWPxKZJppEPmQ+pqTau7OXH35DX4GyEMP7eSWRZ+AS
F3Sc/cAzIwfE6gylVXb1wwwo3RIoS4V3o2kwZzAdBgNVHQ4EFgQUxpfy3+jMKC/h
Qi+tHBZBJtD5OT0wHwYDVR0jBBgwFoAUxpfy3+jMKC/hQi+tHBZBJtD5OT0wDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
RwAwRAIgQNOTPqpLTxP4hN86t+PPy5YdWJnd6dahs90uP7FVDVYCIAluokIL7mu2
OJI+Ng6Ofb5R2HSjDv+t+za4AKKdmhHT
-----END CERTIFICATE-----
"""


def test_tls(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text(CERTIFICATE)
    url = "https://localhost/v1/completions"
    target = parse_target(url, ca_file=ca_file)
    own = tls_context(target)
    assert own is not None and own.verify_mode == ssl.CERT_REQUIRED and own.check_hostname
    assert own.cert_store_stats()["x509"] == 1  # that file, and not the system's beside it
    unsafe = tls_context(parse_target(url, verify=False))
    assert unsafe is not None and unsafe.verify_mode == ssl.CERT_NONE and not unsafe.check_hostname
    usual = tls_context(parse_target(url))
    assert usual is not None and usual.verify_mode == ssl.CERT_REQUIRED and usual.check_hostname
    assert tls_context(parse_target(COMPLETIONS)) is None


def test_tls_that_is_refused(tmp_path: Path) -> None:
    ca_file, empty = tmp_path / "ca.pem", tmp_path / "empty.pem"
    ca_file.write_text(CERTIFICATE)
    empty.write_text("no certificate\n")
    url = "https://localhost/v1/completions"
    for path, word in (
        (tmp_path / "none.pem", "No such file"),
        (tmp_path, "directory"),
        (empty, "no certificate"),
    ):
        with pytest.raises(UsageError, match=word):
            parse_target(url, ca_file=path)
    with pytest.raises(UsageError, match="not both"):
        parse_target(url, ca_file=ca_file, verify=False)
    for more in ({"ca_file": ca_file}, {"verify": False}):
        with pytest.raises(UsageError, match="https only"):
            parse_target(COMPLETIONS, **more)


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@given(prompt=st.text(max_size=40), n=st.integers(1, 10**6), stream=st.booleans(), usage=st.booleans())
@settings(max_examples=60, deadline=None)
def test_bodies(url: str, prompt: str, n: int, stream: bool, usage: bool) -> None:
    target, extra = parse_target(url), {"temperature": 0.5, "ignore_eos": True}
    body = request_body(target, 'm"\u00e9', prompt, n, stream, usage, extra)
    asked = [{"role": "user", "content": prompt}] if target.kind == "chat" else prompt
    expected = {"model": 'm"\u00e9', "max_tokens": n, "stream": stream, **extra}
    expected["messages" if target.kind == "chat" else "prompt"] = asked
    if stream and usage:
        expected["stream_options"] = {"include_usage": True}
    assert json.loads(body) == expected
    before, b, c = body_template(target, 'm"\u00e9', stream, usage, extra)
    said = word_messages([(b"user", json.dumps(prompt)[1:-1].encode())], takes_messages(target, dialogue=False))
    assert before + said + b + str(n).encode() + c == body


def test_a_plain_prompt_is_its_own_json() -> None:
    prompt = "".join(map(chr, range(32, 127))).replace('"', "").replace("\\", "")
    target = parse_target(CHAT)
    before, b, c = body_template(target, "m", True, True, None)
    said = word_messages([(b"user", prompt.encode())], listed=True)
    assert before + said + b + b"7" + c == request_body(target, "m", prompt, 7)


def test_extra_fields() -> None:
    target = parse_target(COMPLETIONS)
    more = {"stream_options": {"continuous_usage_stats": True}}
    options = json.loads(request_body(target, "m", "p", 1, extra=more))["stream_options"]
    assert options == {"include_usage": True, "continuous_usage_stats": True}
    assert "ignore_eos" not in json.loads(request_body(target, "m", "p", 1))
    for name in ("model", "prompt", "messages", "max_tokens", "stream"):
        with pytest.raises(UsageError, match=name):
            request_body(target, "m", "p", 1, extra={name: 1})
    for bad in ({"a": {1, 2}}, {"a": math.nan}, {"stream_options": 1}):
        with pytest.raises(UsageError):
            request_body(target, "m", "p", 1, extra=bad)


PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "ollama": "/api/generate",
    "ollama_chat": "/api/chat",
    "tgi": "/generate_stream",
}


def worded(kind: str, messages: list[tuple[str, str]], n: int, **options: Any) -> dict[str, Any]:
    """What a server of this kind would read."""
    target = parse_target(f"http://h{PATHS[kind]}")
    before, *after = body_template(target, "m", **options)
    escaped = [(role.encode(), json.dumps(text)[1:-1].encode()) for role, text in messages]
    said = word_messages(escaped, takes_messages(target, options.get("dialogue", False)))
    body: dict[str, Any] = json.loads(before + said + str(n).encode().join(after))
    return body


ASKED = {"system_prompt": 'Be "brief".', "temperature": 0, "sampling_seed": 7}
TALK = [("user", 'a "b"\n'), ("assistant", "c\\"), ("user", "\u00e9")]
MESSAGES = [{"role": role, "content": text} for role, text in TALK]
SYSTEM = {"role": "system", "content": 'Be "brief".'}
JOINED = 'Be "brief".\n\na "b"\n\n\nc\\\n\n\u00e9'


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("completions", {"prompt": JOINED, "max_tokens": 5, "temperature": 0, "seed": 7}),
        ("chat", {"messages": [SYSTEM, *MESSAGES], "max_tokens": 5, "temperature": 0, "seed": 7}),
        ("ollama", {"prompt": JOINED, "options": {"num_predict": 5, "temperature": 0, "seed": 7}}),
        ("ollama_chat", {"messages": [SYSTEM, *MESSAGES], "options": {"num_predict": 5, "temperature": 0, "seed": 7}}),
        (
            "tgi",
            {"inputs": JOINED, "parameters": {"max_new_tokens": 5, "details": True, "temperature": 0, "seed": 7}},
        ),
    ],
)
def test_how_each_api_words_a_dialogue(kind: str, expected: dict[str, Any]) -> None:
    usage = {"stream_options": {"include_usage": True}} if kind in ("completions", "chat") else {}
    body = worded(kind, TALK, 5, dialogue=True, **ASKED)
    assert body == {"model": "m", "stream": True, **expected, **usage}


def test_how_responses_word_a_dialogue() -> None:
    expected = {"model": "m", "stream": True, "max_output_tokens": 5, "temperature": 0.5, "instructions": "Be brief."}
    asked = {"system_prompt": "Be brief.", "temperature": 0.5}
    assert worded("responses", TALK, 5, dialogue=True, **asked) == {**expected, "input": MESSAGES}
    assert worded("responses", [("user", "Why?")], 5, **asked) == {**expected, "input": "Why?"}


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_as_many_tokens_as_asked(kind: str) -> None:
    body = worded(kind, [("user", "a")], 37, ignore_eos=True, extra={"top_k": 3})
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["top_k"]) == (37, 37, True, 3)
    assert "ignore_eos" not in worded(kind, [("user", "a")], 37)
    alone = worded(kind, [("user", "a")], 37, extra={"ignore_eos": True})
    assert alone["ignore_eos"] and "min_tokens" not in alone


def test_sampling_leaves_the_callers_fields_as_they_are() -> None:
    extra = {"options": {"top_k": 3}}
    body = worded("ollama", [("user", "a")], 5, extra=extra, temperature=1.5)
    assert body["options"] == {"num_predict": 5, "top_k": 3, "temperature": 1.5}
    assert extra == {"options": {"top_k": 3}}


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        *[
            (kind, {"ignore_eos": True}, f"{PATHS[kind]} has no ignore_eos")
            for kind in ("ollama", "ollama_chat", "tgi")
        ],
        ("responses", {"ignore_eos": True}, "no ignore_eos"),
        ("responses", {"sampling_seed": 1}, "sampling_seed can't be had"),
        ("chat", {"sampling_seed": -1}, "sampling_seed must be a whole number of at least 0"),
        ("chat", {"temperature": -0.1}, "temperature must be a finite number"),
        ("chat", {"temperature": "warm"}, "temperature must be a finite number"),
        ("chat", {"system_prompt": 3}, "system_prompt must be a text"),
        ("chat", {"temperature": 0, "extra": {"temperature": 0}}, "temperature: it was given as an argument"),
        ("chat", {"ignore_eos": True, "extra": {"min_tokens": 3}}, "min_tokens: it was given as an argument"),
        ("tgi", {"sampling_seed": 3, "extra": {"parameters": {"seed": 3}}}, "seed: it was given as an argument"),
    ],
)
def test_sampling_that_is_refused(kind: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        worded(kind, [("user", "a")], 5, **options)


@pytest.mark.parametrize(
    ("path", "models"),
    [
        ("/v1/completions", "/v1/models"),
        ("/x/v1/chat/completions?key=a", "/x/v1/models"),
        ("/v1/responses", "/v1/models"),
        ("/api/generate", "/v1/models"),
        ("/x/api/chat", "/x/v1/models"),
        ("/generate_stream", "/v1/models"),
    ],
)
def test_where_models_are_listed(path: str, models: str) -> None:
    assert models_path(parse_target(f"http://h{path}")) == models
