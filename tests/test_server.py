"""The reference server against its own law: its record must be what was asked, and what a socket sees."""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

from certificates import TlsFiles
from llmprofile.errors import UsageError
from llmprofile.pacing import Batch, Pace, due_times, jitter
from llmprofile.server import ReferenceServer

TTFT_NS, ITL_NS, TOKENS = 20_000_000, 5_000_000, 4


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer(ttft_s=TTFT_NS / 1e9, itl_s=ITL_NS / 1e9, tokens=TOKENS) as running:
        yield running


def address(server: ReferenceServer) -> tuple[str, int]:
    host, _, port = server.base_url.partition("//")[2].rpartition(":")
    return host, int(port)


def connect(server: ReferenceServer) -> socket.socket:
    return socket.create_connection(address(server), timeout=10)


def request(name: str = "run-0", path: str = "/v1/completions", **body: Any) -> bytes:
    said = json.dumps({"prompt": "one two three", "stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\nContent-Length: {len(said)}\r\n\r\n"
    return head.encode() + said


def read(sock: socket.socket, until: bytes = b"0\r\n\r\n") -> tuple[bytes, str]:
    """What came, and how it ended: `whole` (with `until`), `closed` or `reset`."""
    data = b""
    try:
        while not data.endswith(until):
            part = sock.recv(1 << 16)
            if not part:
                return data, "closed"
            data += part
    except ConnectionResetError:
        return data, "reset"
    return data, "whole"


def ask(server: ReferenceServer, *names: str, **body: Any) -> list[tuple[bytes, str]]:
    """All at once, each on its own connection."""
    socks = [connect(server) for _ in names]
    for name, sock in zip(names, socks, strict=True):
        sock.sendall(request(name, **body))
    answers = [read(sock) for sock in socks]
    for sock in socks:
        sock.close()
    return answers


def events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def text(data: bytes) -> str:
    choices = [choice for event in events(data) if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def row(server: ReferenceServer, name: str) -> Any:
    """The record's row of a request; its end may be recorded a moment after the client has seen it."""
    for _ in range(200):
        truth = server.truth()
        if (truth["id"] == name).any():
            return truth[truth["id"] == name].iloc[-1]
        time.sleep(0.01)
    raise AssertionError(f"{name} was never recorded")


def check_against_schedule(server: ReferenceServer, pace: Pace) -> pd.DataFrame:
    """No token leaves before it is due, and the latest one of a request is exactly `late_ns` late."""
    truth, tokens = server.record()
    for _, answer in truth.iterrows():
        left_ns = tokens.loc[tokens["id"] == answer["id"], "left_ns"].to_numpy()
        dues_ns = due_times(pace, answer["arrive_ns"], answer["tokens"], answer["request_id"])
        behind_ns = left_ns - np.array(dues_ns)
        assert behind_ns.min() >= 0
        assert behind_ns.max() == answer["late_ns"]
    return truth


@pytest.mark.parametrize("law", [{}, {"cv": 0.5, "seed": 7}, {"step": True}, {"step": True, "cv": 0.5}, {"itl_s": 0.0}])
def test_every_token_is_where_the_law_puts_it(law: dict[str, Any]) -> None:
    names = [f"run-{i}" for i in range(20)]
    with ReferenceServer(**{"ttft_s": 0.02, "itl_s": 0.005, "tokens": 10, **law}) as server:
        ask(server, *names)
        truth = check_against_schedule(server, Pace(**{"ttft_s": 0.02, "itl_s": 0.005, **law}))
    assert sorted(truth["id"]) == sorted(names)
    assert (truth["tokens"] == 10).all()
    assert (truth["queue_s"] == 0).all()


def test_fixed_schedule_is_ttft_then_itl() -> None:
    assert due_times(Pace(0.05, 0.01), 1_000, 3, 0) == [50_001_000, 60_001_000, 70_001_000]
    stalled = due_times(Pace(0.05, 0.01), 0, 4, 0, stall=(2, 7_000_000))
    assert stalled == [50_000_000, 60_000_000, 77_000_000, 87_000_000]


def test_steps_are_whole_multiples_shared_by_all() -> None:
    pace = Pace(0.05, 0.01, step=True)
    assert due_times(pace, 3_000_000, 3, 0) == [60_000_000, 70_000_000, 80_000_000]
    assert due_times(pace, 0, 2, 0) == [50_000_000, 60_000_000]


def test_jitter_has_the_mean_and_cv_asked_for() -> None:
    cv, n = 0.5, 200_000
    factors = jitter(Pace(cv=cv, seed=3), 11, n)
    assert abs(factors.mean() - 1) < 4 * cv / math.sqrt(n)
    logs = np.log(factors)  # normal with variance ln(1 + cv²), whose estimate has variance 2σ⁴/n
    log_variance = math.log1p(cv**2)
    assert abs(logs.var() - log_variance) < 4 * log_variance * math.sqrt(2 / n)


def test_a_request_draws_the_same_times_whenever_it_comes_and_another_seed_other_times() -> None:
    assert due_times(Pace(cv=0.5, seed=5), 0, 9, 77) == due_times(Pace(cv=0.5, seed=5), 0, 9, 77)
    assert due_times(Pace(cv=0.5, seed=5), 0, 9, 77) != due_times(Pace(cv=0.5, seed=6), 0, 9, 77)
    assert due_times(Pace(cv=0.5, seed=5), 0, 9, 77) != due_times(Pace(cv=0.5, seed=5), 0, 9, 78)


def test_one_place_is_a_single_server_queue() -> None:
    """The k-th of simultaneous requests waits k times what a request takes, less what it came later."""
    with ReferenceServer(ttft_s=0.01, itl_s=0.004, max_batch=1, tokens=3) as server:
        ask(server, *(f"run-{i}" for i in range(5)))
        truth = server.truth().sort_values("arrive_ns")
    takes_ns, arrive_ns = 10_000_000 + 2 * 4_000_000, truth["arrive_ns"].to_numpy()
    expected_s = (np.arange(5) * takes_ns - (arrive_ns - arrive_ns[0])) / 1e9
    np.testing.assert_allclose(truth["queue_s"], expected_s, atol=2e-9)
    assert (truth["first_ns"] >= truth["arrive_ns"] + truth["queue_s"] * 1e9 + 10_000_000 - 2).all()


def batch_by_hand(arrive_ns: list[int], tokens: int, places: int, cost: float) -> tuple[list[float], list[float]]:
    """Admission and last-token times of DESIGN's engine, written out: ttft 10 ms, itl 4 ms."""
    left, admitted, last = dict.fromkeys(range(len(arrive_ns)), tokens), {}, {}
    running: list[int] = []
    now = float(arrive_ns[0])
    while len(last) < len(arrive_ns):
        waiting = [k for k in left if k not in admitted]
        if not running:
            now = max(now, arrive_ns[waiting[0]])
        decoding = len(running)
        for k in waiting:
            if len(running) < places and arrive_ns[k] <= now:
                admitted[k] = now
                running.append(k)
        now += 4e6 * (1 + cost * (decoding - 1)) * (decoding > 0) + 10e6 * (len(running) > decoding)
        for k in list(running):
            left[k] -= 1
            if not left[k]:
                last[k] = now
                running.remove(k)
    return [admitted[k] for k in left], [last[k] for k in left]


def test_batches_admit_and_step_as_documented() -> None:
    with ReferenceServer(ttft_s=0.01, itl_s=0.004, max_batch=2, batch_cost=0.5, tokens=5) as server:
        ask(server, *(f"run-{i}" for i in range(6)))
        truth = server.truth().sort_values("arrive_ns")
    admitted_ns, last_ns = batch_by_hand(truth["arrive_ns"].tolist(), 5, places=2, cost=0.5)
    np.testing.assert_allclose(truth["arrive_ns"] + truth["queue_s"] * 1e9, admitted_ns, rtol=0, atol=300)
    behind_ns = truth["last_ns"].to_numpy(dtype=float) - np.array(last_ns)
    assert (behind_ns > -300).all()
    assert (behind_ns <= truth["late_ns"] + 300).all()


@dataclass
class Member:
    arrive_ns: int
    admitted_ns: int = -1
    done: bool = False

    def emit(self, due_ns: int) -> None:
        self.done = True

    def stall_ns(self) -> int:
        return 0


def test_a_step_admits_nobody_who_comes_after_its_beginning() -> None:
    engine = Batch(Pace(ttft_s=0.01, itl_s=0.004, max_batch=4))
    early, late = Member(1_000), Member(5_000)
    engine.waiting.extend([early, late])
    assert engine.begin(0) == 1_000 + 10_000_000  # an idle engine begins with an arrival, not before it
    assert (early.admitted_ns, late.admitted_ns) == (1_000, -1)
    early.done = True
    assert engine.begin(10_001_000) == 20_001_000
    assert late.admitted_ns == 10_001_000


def test_the_truth_lies_on_the_clock_of_a_run(server: ReferenceServer) -> None:
    with connect(server) as sock:
        before_ns = time.monotonic_ns()
        sock.sendall(request("run-41"))
        sent_ns = time.monotonic_ns()
        read(sock)
        after_ns = time.monotonic_ns()
    answer = row(server, "run-41")
    names = ("arrive_first_ns", "arrive_ns", "first_ns", "first_sent_ns", "last_ns", "last_sent_ns")
    stamps = [before_ns, *(answer[name] for name in names), after_ns]
    assert stamps == sorted(stamps)
    if sys.platform == "linux":  # where loopback delivers inside the send
        assert answer["arrive_ns"] <= sent_ns
    assert answer["request_id"] == 41
    assert answer["prompt_words"] == 3
    assert answer["stamped"] == (sys.platform == "linux")
    offset_ns = server.truth().attrs["wall_minus_monotonic_ns"]
    assert abs(time.time_ns() - time.monotonic_ns() - offset_ns) < 50_000_000


def test_tokens_are_the_truth_token_by_token(server: ReferenceServer) -> None:
    ask(server, "run-51")
    truth, tokens = server.record()
    mine, answer = tokens[tokens["id"] == "run-51"], truth[truth["id"] == "run-51"].iloc[0]
    assert mine["index"].tolist() == list(range(TOKENS))
    assert mine["left_ns"].iloc[[0, -1]].tolist() == [answer["first_ns"], answer["last_ns"]]
    assert mine["sent_ns"].iloc[[0, -1]].tolist() == [answer["first_sent_ns"], answer["last_sent_ns"]]
    assert mine["request_id"].tolist() == [51] * TOKENS


def test_the_record_stays_until_it_is_forgotten() -> None:
    with ReferenceServer(ttft_s=0.0, itl_s=0.0) as server:
        assert len(server.truth()) == len(server.tokens()) == 0
        ask(server, "run-1", "no number")
        assert server.truth()["request_id"].isna().sum() == 1
        assert len(server.tokens(forget=True)) == 32
        assert len(server.truth()) == 0


def test_streams_end_with_finish_reason_usage_and_done(server: ReferenceServer) -> None:
    ((data, _),) = ask(server, "run-2", max_tokens=3, stream_options={"include_usage": True})
    *tokens, usage, done = events(data)
    assert [t["choices"][0]["finish_reason"] for t in tokens] == [None, None, "length"]
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert usage["choices"] == []
    assert done == "[DONE]"


def test_chat_begins_with_a_role(server: ReferenceServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    ((data, _),) = ask(server, "run-3", path="/v1/chat/completions", messages=messages, max_completion_tokens=2)
    deltas = [event["choices"][0]["delta"] for event in events(data)[:-1]]
    assert deltas == [{"role": "assistant", "content": " tok"}, {"content": " tok"}]
    assert row(server, "run-3")["prompt_words"] == 2


def test_not_a_stream_comes_whole_when_its_last_token_is_due(server: ReferenceServer) -> None:
    asked = urllib.request.Request(server.chat_url, json.dumps({"messages": [], "max_tokens": 3}).encode())
    asked.add_header("X-Request-Id", "run-4")
    with urllib.request.urlopen(asked, timeout=10) as response:
        said = json.load(response)
    assert said["choices"][0]["message"]["content"] == " tok" * 3
    assert said["usage"]["completion_tokens"] == 3
    answer = row(server, "run-4")
    assert answer["first_ns"] == answer["last_ns"] >= answer["arrive_ns"] + TTFT_NS + 2 * ITL_NS
    assert answer["tokens"] == 3


def test_models_and_health(server: ReferenceServer) -> None:
    with urllib.request.urlopen(server.base_url + "/v1/models", timeout=10) as response:
        assert [model["id"] for model in json.load(response)["data"]] == ["reference"]
    with urllib.request.urlopen(server.base_url + "/health", timeout=10) as response:
        assert response.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404") as refusal:
        urllib.request.urlopen(server.base_url + "/nothing", timeout=10)
    refusal.value.close()


def test_a_kept_connection_serves_requests_one_after_the_other(server: ReferenceServer) -> None:
    with connect(server) as sock:
        sock.sendall(request("run-5") + request("run-6"))
        data = b""
        while data.count(b"[DONE]") < 2:
            data += sock.recv(1 << 16)
    assert row(server, "run-6")["first_ns"] > row(server, "run-5")["last_ns"]


@pytest.mark.parametrize("n", [1, 2])
def test_short_answers(server: ReferenceServer, n: int) -> None:
    ((data, end),) = ask(server, f"run-{70 + n}", max_tokens=n)
    assert (text(data), end) == (" tok" * n, "whole")
    assert events(data)[n - 1]["choices"][0]["finish_reason"] == "length"


FAULTS = [
    ({"kind": "status", "status": 429}, "whole", 0, b"HTTP/1.1 429 "),
    ({"kind": "reset"}, "reset", 0, b""),
    ({"kind": "reset", "at": 3}, "reset", 3, b"HTTP/1.1 200 "),
    ({"kind": "reset", "at": 9}, "reset", 4, b"HTTP/1.1 200 "),
    ({"kind": "close"}, "closed", 0, b""),
    ({"kind": "close", "at": 2}, "closed", 2, b"HTTP/1.1 200 "),
    ({"kind": "error", "at": 2}, "whole", 2, b"HTTP/1.1 200 "),
    ({"kind": "error"}, "whole", 0, b"HTTP/1.1 200 "),
    ({"kind": "stall", "at": 2, "stall_s": 0.1}, "whole", 4, b"HTTP/1.1 200 "),
]


@pytest.mark.parametrize(("fault", "end", "tokens", "opening"), FAULTS)
def test_faults_are_seen_and_recorded(
    server: ReferenceServer, fault: dict[str, Any], end: str, tokens: int, opening: bytes
) -> None:
    name = f"fault{fault}-1"
    with connect(server) as sock:
        sock.sendall(request(name, fault=fault))
        data, ended = read(sock, until=b"}}" if fault["kind"] == "status" else b"0\r\n\r\n")
    assert ended == end
    assert data[: len(opening)] == opening
    assert bool(data) == bool(opening)
    assert text(data) == " tok" * tokens
    has_error = b'"error"' in data
    assert has_error == (fault["kind"] in ("status", "error"))
    answer = row(server, name)
    assert (answer["tokens"], answer["fault"], answer["gone"]) == (tokens, fault["kind"], False)
    assert answer["status"] == fault.get("status", 200)
    assert pd.isna(answer["first_ns"]) == (tokens == 0)


def test_a_stall_is_in_the_record_and_is_no_lateness(server: ReferenceServer) -> None:
    ask(server, "stalled-1", fault={"kind": "stall", "at": 2, "stall_s": 0.1})
    tokens = server.tokens()
    left_ns = tokens.loc[tokens["id"] == "stalled-1", "left_ns"].to_numpy()
    answer = row(server, "stalled-1")
    dues_ns = answer["arrive_ns"] + TTFT_NS + ITL_NS * np.arange(4) + np.array([0, 0, 1, 1]) * 100_000_000
    assert (left_ns >= dues_ns).all()
    assert (left_ns - dues_ns).max() == answer["late_ns"]


def test_an_answer_that_is_no_stream_can_be_cut(server: ReferenceServer) -> None:
    with connect(server) as sock:
        sock.sendall(request("cut-1", stream=False, fault={"kind": "close", "at": 1}))
        data, end = read(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert end == "closed"
    assert 0 < len(body) < length
    assert row(server, "cut-1")["tokens"] == 0


def test_a_fault_for_reused_connections_spares_a_fresh_one(server: ReferenceServer) -> None:
    fault = {"kind": "reset", "reused": True}
    with connect(server) as sock:
        sock.sendall(request("fresh-1", fault=fault))
        assert read(sock)[1] == "whole"
        sock.sendall(request("reused-1", fault=fault))
        assert read(sock) == (b"", "reset")


def test_a_share_of_faults_is_drawn_by_seed_and_request() -> None:
    names = [f"run-{i}" for i in range(200)]
    struck = []
    for _ in range(2):
        with ReferenceServer(ttft_s=0.0, itl_s=0.0, tokens=1, fault={"kind": "status"}, fault_share=0.3) as server:
            with connect(server) as sock:
                for name in names:
                    sock.sendall(request(name, stream=False))
                    read(sock, until=b"}")
            truth = server.truth()
            struck.append(set(truth.loc[truth["fault"] == "status", "id"]))
    assert struck[0] == struck[1]
    assert abs(len(struck[0]) - 60) < 4 * math.sqrt(200 * 0.3 * 0.7)


def test_idle_connections_are_closed_when_asked() -> None:
    with ReferenceServer(ttft_s=0.0, itl_s=0.0, close_idle_s=0.0) as server, connect(server) as sock:
        sock.sendall(request())
        data, _ = read(sock)
        assert b"connection: close" not in data.lower()
        assert read(sock) == (b"", "closed")


def test_a_new_connection_can_be_kept_waiting() -> None:
    with ReferenceServer(ttft_s=0.0, itl_s=0.0, connect_delay_s=0.1) as server:
        before_ns = time.monotonic_ns()
        ask(server, "run-1")
        assert server.truth()["first_ns"].iloc[0] - before_ns >= 100_000_000


LOOKS = [
    {"framing": "length"},
    {"framing": "close"},
    {"line_end": "crlf"},
    {"line_end": "cr"},
    {"tokens_per_event": 3},
    {"events_per_write": 3},
    {"tokens_per_event": 2, "events_per_write": 2, "framing": "length"},
    {"split_s": 0.004},
]


@pytest.mark.parametrize("look", LOOKS)
def test_odd_framings_carry_the_same_text(look: dict[str, Any]) -> None:
    with ReferenceServer(ttft_s=0.01, itl_s=0.01, tokens=7, **look) as server:
        connection = http.client.HTTPConnection(server.base_url.partition("//")[2], timeout=10)
        connection.request("POST", "/v1/completions", b'{"stream": true}', {"X-Request-Id": "run-1"})
        data = connection.getresponse().read()
        connection.close()
        truth, tokens = server.record()
    assert text(data) == " tok" * 7
    assert data.endswith(b"[DONE]" + {"crlf": b"\r\n", "cr": b"\r"}.get(look.get("line_end", ""), b"\n") * 2)
    per_send = look.get("tokens_per_event", 1) * look.get("events_per_write", 1)
    assert truth["tokens"].tolist() == [7]
    assert tokens["left_ns"].nunique() == math.ceil(7 / per_send)


def test_a_split_event_comes_in_two_reads_and_its_token_with_the_second() -> None:
    with ReferenceServer(ttft_s=0.25, itl_s=0.0, tokens=1, split_s=0.2) as server, connect(server) as sock:
        sock.sendall(request("run-1"))
        first, early_ns = sock.recv(1 << 16), time.monotonic_ns()
        read(sock)
        answer = row(server, "run-1")
    assert b"data:" in first
    assert not first.endswith(b"\n\n\r\n")
    assert early_ns < answer["first_ns"]
    assert answer["first_ns"] >= answer["arrive_ns"] + 250_000_000


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_script_is_played_to_the_byte(framing: str) -> None:
    segments = [(0.02, b"data: {\xe4"), (0.05, b"\xb8\xad\n\n")]
    script = {
        "status": 203,
        "headers": {"Content-Type": "text/odd"},
        "segments": segments,
        "framing": framing,
    }
    with ReferenceServer(script=script) as server:
        connection = http.client.HTTPConnection(server.base_url.partition("//")[2], timeout=10)
        connection.request("POST", "/v1/completions", b"{}")
        response = connection.getresponse()
        assert (response.status, response.getheader("Content-Type")) == (203, "text/odd")
        assert response.read() == b"".join(data for _, data in segments)
        connection.close()
        truth, tokens = server.record()
    after_s = (tokens["left_ns"] - truth["arrive_ns"].iloc[0]) / 1e9
    assert (after_s >= [0.02, 0.05]).all()
    assert (after_s <= np.array([0.02, 0.05]) + truth["late_ns"].iloc[0] / 1e9 + 1e-9).all()


def test_a_request_brings_its_own_script(server: ReferenceServer) -> None:
    coded = base64.b64encode(b"data: [DONE]\n\n").decode()
    ((data, _),) = ask(server, "run-9", script={"segments": [[0.0, coded]]})
    assert data.endswith(b"\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_leaves_is_recorded(server: ReferenceServer) -> None:
    with connect(server) as sock:
        sock.sendall(request("left-1", max_tokens=1000))
        sock.recv(1)
    answer = row(server, "left-1")
    assert answer["gone"]
    assert 1 <= answer["tokens"] < 1000


def test_a_client_that_reads_late_gets_everything_and_the_record_says_when() -> None:
    n = 40_000
    with ReferenceServer(ttft_s=0.0, itl_s=0.0, framing="close") as server:
        sock = socket.socket()
        sock.settimeout(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.connect(address(server))
        with sock:
            sock.sendall(request("slow-1", max_tokens=n))
            row(server, "slow-1")  # all that the socket did not take waits in the server
            begun_ns = time.monotonic_ns()
            data, end = read(sock)
        answer = row(server, "slow-1")
    assert end == "closed"
    assert data.count(b"data: {") == n
    assert answer["last_ns"] < begun_ns < answer["last_sent_ns"]


def test_https_serves_the_same_and_is_stamped(tls_files: TlsFiles) -> None:
    trusting = ssl.create_default_context(cafile=tls_files.ca_file)
    files = {"certfile": tls_files.certfile, "keyfile": tls_files.keyfile}
    with ReferenceServer(ttft_s=0.02, itl_s=0.005, tokens=5, **files) as server:
        assert server.url.startswith("https://")
        for name in ("run-1", "run-2"):
            asked = urllib.request.Request(server.url, b'{"stream": true}', {"X-Request-Id": name})
            with urllib.request.urlopen(asked, timeout=10, context=trusting) as response:
                assert text(response.read()) == " tok" * 5
        truth = check_against_schedule(server, Pace(ttft_s=0.02, itl_s=0.005))
    assert truth["stamped"].all() == (sys.platform == "linux")


def falls_silent(host: str, port: int) -> bool:
    for _ in range(250):
        with socket.socket() as sock:
            if sock.connect_ex((host, port)):
                return True
        time.sleep(0.02)
    return False


def test_no_orphan_when_the_parent_is_killed() -> None:
    script = (
        "from llmprofile.server import ReferenceServer; import time; "
        "server = ReferenceServer(); print(server.base_url, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    host, _, port = parent.stdout.readline().strip().partition("//")[2].rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert falls_silent(host, int(port))


def test_an_interrupt_meant_for_the_notebook_does_not_end_it(server: ReferenceServer) -> None:
    os.kill(server.pid, signal.SIGINT)
    ((data, _),) = ask(server, "run-10")
    assert text(data) == " tok" * TOKENS


def test_closing_ends_the_process_and_the_record_is_gone() -> None:
    server = ReferenceServer()
    server.close()
    server.close()
    assert server._process.poll() == 0
    with pytest.raises(UsageError, match="closed"):
        server.truth()
    assert "closed" in server._repr_html_()


def test_it_shows_itself_like_its_constructor() -> None:
    with ReferenceServer(ttft_s=0.02, step=True, model="m") as server:
        port = address(server)[1]
        assert repr(server) == f"ReferenceServer(ttft_s=0.02, itl_s=0.01, step=True, model='m', port={port})"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"ttft_s": -1}, "ttft_s must be a finite number of at least 0"),
        ({"itl_s": math.nan}, "itl_s must be a finite number of at least 0"),
        ({"cv": "x"}, "cv must be a finite number"),
        ({"itl_s": 0, "step": True}, "step=True needs an itl_s above 0"),
        ({"max_batch": 0}, "max_batch must be a whole number of at least 1"),
        ({"max_batch": 4, "step": True}, "don't go together"),
        ({"batch_cost": 0.1}, "batch_cost needs max_batch"),
        ({"seed": -1}, "seed must be a whole number"),
        (
            {"fault": {"kind": "fire"}},
            "kind of a fault must be one of status, reset, close, stall, error; not fire",
        ),
        ({"fault": {"kind": "stall"}}, "stall_s must be a number above 0"),
        ({"fault": {"kind": "reset", "after": 3}}, "each name in fault must be one of"),
        ({"fault": "reset"}, "fault must be a dict"),
        ({"fault_share": 1.5}, "fault_share must be between 0 and 1"),
        ({"framing": "morse"}, "framing must be one of chunked, length, close; not morse"),
        ({"colour": 1}, "a parameter of ReferenceServer must be one of"),
        ({"split_s": 0.1, "max_batch": 2}, "split_s and max_batch don't go together"),
        ({"script": {"segments": []}}, "segments of a script"),
        ({"keyfile": "k.pem"}, "keyfile needs a certfile"),
        ({"certfile": "there-is-none.pem"}, "certfile there-is-none.pem can't be used"),
        ({"cpus": [100_000]}, "cpus"),
        ({"host": "no.such.host.invalid"}, "can't listen on"),
    ],
)
def test_bad_parameters_are_refused_in_a_sentence(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ReferenceServer(**asked)


def test_a_taken_port_is_refused(server: ReferenceServer) -> None:
    with pytest.raises(UsageError, match="can't listen on port"):
        ReferenceServer(port=address(server)[1])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"max_tokens": 0}', "max_tokens must be a whole number of at least 1"),
        (b'{"max_tokens": 9000000}', "max_tokens must be at most"),
        (b'{"stream_options": [1]}', "stream_options must be an object"),
        (b'{"fault": {"kind": "fire"}}', "kind of a fault"),
        (b'{"script": {"segments": [["soon", 7]]}}', "segments of a script"),
        (b'{"script": {"segments": [[0, "aGk="]], "headers": 7}}', "its headers"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(server: ReferenceServer, body: bytes, sentence: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as refusal:
        urllib.request.urlopen(urllib.request.Request(server.url, body), timeout=10)
    with refusal.value as answer:
        assert sentence in json.load(answer)["error"]["message"]


def test_what_is_not_http_is_refused_and_closed(server: ReferenceServer) -> None:
    with connect(server) as sock:
        sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        data, end = read(sock)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert end == "closed"
