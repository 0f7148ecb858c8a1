"""The command line as a user types it: what it prints, its exit status, what it leaves on disk."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from certificates import TlsFiles
from conftest import free_port
from llmprofile.cli import _OPTIONS, main


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.002, seed=2) as server:
        yield server


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SMALL = ("--rate", "100", "--requests", "20", "--output-tokens", "4", "--seed", "1")


def test_a_run_prints_its_table_and_verdict(server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", server.url, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "wire clock" in out and "TTFT" in out and "20 ok" in out
    assert out.split(":")[0] in ("trustworthy", "biased", "invalid")
    (folder,) = Path("runs").iterdir()
    assert f"run folder: {Path('runs') / folder.name}" in out
    assert main(["show", str(folder)]) == 0
    assert "20 ok" in capsys.readouterr().out


def test_json_and_quiet(server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", server.chat_url, *SMALL, "--json", "--out", "a", "--processes", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.pop("folder") == "a"
    assert said == json.loads(Path("a/run.json").read_text())
    assert said["outcomes"] == {"ok": 20}
    assert main(["run", server.url, *SMALL, "--quiet", "--out", "b", "--client", "conventional"]) == 0
    assert capsys.readouterr() == ("", "")


def run_and_read(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a run says that it was asked for."""
    assert main(["run", *words, "--json"]) == 0
    asked: dict[str, Any] = json.loads(capsys.readouterr().out)["asked"]
    return asked


def test_every_flag_reaches_the_run(
    server: lp.ReferenceServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "hush-hush")
    flags = "--model m --arrivals gamma --burstiness 0.5 --rate 200 --concurrency 9 --duration 0.3 --prompt-tokens 9"
    flags += " --output-tokens 3 --processes 3 --seed 4 --salt 5 --client conventional --api-key-env MY_KEY --timeout 7"
    flags += " --no-stream --no-usage --fresh --keep-text --warm-connections 2 --connect-timeout 8"
    flags += f" --first-token-timeout 6 --scrape-metrics {server.base_url} --out here"
    asked = run_and_read(capsys, server.url, *flags.split(), "--header", "X-A: secret-b")
    wanted = {"arrivals": "Gamma(rate_per_s=200.0, burstiness=0.5)", "duration_s": 0.3, "n": None, "salt": 5}
    wanted |= {"max_in_flight": 9, "concurrency": 9, "prompt_tokens": 9, "output_tokens": 3, "processes": 3, "seed": 4}
    wanted |= {"client": "conventional", "model": "m", "timeout_s": 7.0, "stream": False, "usage": False}
    wanted |= {"fresh": True, "headers": ["X-A"], "api_key_env": "MY_KEY", "keep_text": True, "warm_connections": 2}
    wanted |= {"connect_timeout_s": 8.0, "first_token_timeout_s": 6.0, "scrape_metrics": server.base_url}
    assert {name: asked[name] for name in wanted} == wanted
    # neither the key nor a header's value is written anywhere
    for path in Path("here").iterdir():
        assert b"hush-hush" not in path.read_bytes() and b"secret-b" not in path.read_bytes()


def test_what_is_not_typed_is_as_run_load_has_it(
    server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = run_and_read(capsys, server.url, "--rate", "100", "--requests", "5", "--seed", "1", "--salt", "1")
    called = lp.run_load(server.url, lp.Poisson(100.0), 5, seed=1, salt=1, progress=False).meta["asked"]
    assert typed == called


def test_every_argument_of_a_load_has_a_flag() -> None:
    """But those of experiments on the client itself."""
    flags = {name for _, name, _ in _OPTIONS} - {"turns", "think_s", "shared_prefix"}
    others = {"url", "arrivals", "max_in_flight", "conversation", "progress", "event_work_s", "stamps"}
    assert flags | others == set(inspect.signature(lp.start_load).parameters)


@pytest.mark.parametrize(
    ("flags", "law"),
    [
        ("--rate 200 --requests 9", lp.Poisson(200.0)),
        ("--rate 200 --requests 9 --arrivals constant", lp.Constant(200.0)),
        ("--concurrency 3 --requests 9", lp.ClosedLoop(3)),
        ("--stages 50..300:0.2 --concurrency 4", lp.Stages([(lp.Ramp(50.0, 300.0, 0.2), 0.2)])),
        (
            "--stages 90:0.1,90..200:0.1,2e2:0.1 --arrivals gamma --burstiness 2",
            lp.Stages([(lp.Gamma(90.0, 2.0), 0.1), (lp.Ramp(90.0, 200.0, 0.1), 0.1), (lp.Gamma(200.0, 2.0), 0.1)]),
        ),
    ],
)
def test_arrivals(server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str], flags: str, law: Any) -> None:
    asked = run_and_read(capsys, server.url, *flags.split(), "--output-tokens", "3", "--seed", "1")
    assert asked["arrivals"] == repr(law)
    assert asked["max_in_flight"] == (4 if "300" in flags else None)


def test_a_trace_is_replayed_faster(server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"timestamp": 100 * k, "input_length": 9 + k, "output_length": 1 + k} for k in range(8)]
    Path("mooncake.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = run_and_read(capsys, server.url, "--trace", "mooncake.jsonl", "--speed-up", "5", "--out", "here")
    assert asked["arrivals"] == "Trace('mooncake.jsonl', speed=5.0)"
    requests = lp.load("here").requests
    assert requests["output_tokens"].tolist() == list(range(1, 9))
    assert requests["due_ns"].diff().dropna().tolist() == [20_000_000] * 7


def test_what_requests_say(server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?", "output_tokens": 5}\n')
    flags = ["--rate", "200", "--requests", "6", "--output-tokens", "3", "--seed", "1"]
    said = ["--system-prompt", "Be brief.", "--temperature", "0.5", "--sampling-seed", "7", "--ignore-eos"]
    more = ["--extra-body", '{"top_k": 3}', "--prompts", "prompts.jsonl", "--out", "a"]
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001) as second:
        asked = run_and_read(capsys, server.chat_url, second.chat_url, *flags, *said, *more)
    assert asked["url"] == [server.chat_url, second.chat_url]
    wanted = {"system_prompt": "Be brief.", "temperature": 0.5, "sampling_seed": 7, "ignore_eos": True}
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["extra_body"] == "{'top_k': 3}" and asked["prompts"].startswith(
        "PromptFile('prompts.jsonl', prompts=2"
    )
    requests = lp.load("a").requests
    assert requests["output_tokens"].tolist() == [3, 5] * 3
    assert requests["server"].tolist() == [0, 1] * 3
    words = ["--turns", "2", "--think", "0.05", "--shared-prefix", "2:20", "--out", "b"]
    asked = run_and_read(capsys, server.chat_url, *flags, *words)
    assert asked["prompts"] == "SharedPrefix(groups=2, tokens=20)"
    assert asked["conversation"] == repr(lp.Conversation(2, 0.05))
    assert lp.load("b").requests["turn"].tolist() == [0, 1] * 6


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--rate 0 --requests 5", "rate_per_s must be a number above 0"),
        ("--rate -3 --requests 5", "rate_per_s must be a number above 0"),
        ("--rate 5", "either a number of requests or a duration"),
        ("--rate 5 --requests 5 --duration 5", "either a number of requests or a duration"),
        ("--requests 5", "--rate"),
        ("--rate 5 --stages 5:5", "give one of --rate, --stages and --trace; not --rate and --stages"),
        ("--stages 5", "RATE..RATE:SECONDS, such as 10..80:60; not '5'"),
        ("--stages 5:1,x:2", "not 'x:2'"),
        ("--stages 1..2..3:4", "not '1..2..3:4'"),
        ("--stages 5:0", "duration of stage 0"),
        ("--stages 0..0:4", "asks for nothing"),
        ("--trace nowhere.csv", "there is no trace nowhere.csv"),
        ("--trace taken --arrivals constant", "--arrivals goes with --rate or --stages"),
        ("--rate 5 --requests 5 --speed-up 2", "--speed-up goes with --trace"),
        ("--rate 5 --requests 5 --shared-prefix 8", "GROUPS:TOKENS"),
        ("--rate 5 --requests 5 --shared-prefix 8:9:1", "GROUPS:TOKENS"),
        ("--rate 5 --requests 5 --shared-prefix 0:9", "groups"),
        ("--rate 5 --requests 5 --shared-prefix 8:9 --prompts p.jsonl", "not both"),
        ("--rate 5 --requests 5 --prompts nowhere.jsonl", "nowhere.jsonl"),
        ("--rate 5 --requests 5 --think 2", "--think goes with --turns"),
        ("--rate 5 --requests 5 --turns 0", "turns"),
        ("--rate 5 --requests 5 --extra-body [1]", "--extra-body must be a JSON object; not '[1]'"),
        ("--rate 5 --requests 5 --extra-body {", "--extra-body must be a JSON object: "),
        ("--rate 5 --requests 5 --scrape-metrics ftp://a", "scrape_metrics"),
        ("--rate 5 --requests 5 --proxy ftp://a", "proxy"),
        ("--rate 5 --requests 5 --burstiness 2", "--burstiness goes with --arrivals gamma"),
        ("--rate 5 --requests 5 --arrivals gamma", "needs --burstiness"),
        ("--concurrency 5 --requests 5 --arrivals poisson", "--arrivals goes with --rate"),
        ("--rate 5 --requests 5 --insecure", "https"),
        ("--rate 5 --requests 5 --ca-file nowhere.pem", "https"),
        ("--rate 5 --requests 5 --api-key-env NOT_SET_HERE", "NOT_SET_HERE"),
        ("--rate 5 --requests 5 --header nonsense", "colon"),
        ("--rate 5 --requests 5 --processes 0", "processes"),
        ("--rate 5 --requests 5 --out taken", "exists"),
        ("--rate 5 --requests 5 --timeout 0", "timeout_s"),
    ],
)
def test_wrong_use_is_one_sentence(
    server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str], flags: str, says: str
) -> None:
    Path("taken").mkdir()
    assert main(["run", server.url, *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1
    assert [p.name for p in Path().iterdir()] == ["taken"]
    assert list(Path("taken").iterdir()) == []


def test_servers_that_can_not_be_reached(
    tls_files: TlsFiles, server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with lp.ReferenceServer(certfile=tls_files.certfile, keyfile=tls_files.keyfile) as secure:
        urls = [secure.url, "http://no-such-host.invalid/v1/completions"]
        urls += [f"http://127.0.0.1:{free_port()}/v1/completions", server.base_url, f"{server.base_url}/v1/embeddings"]
        for url in urls:
            assert main(["run", url, *SMALL]) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1
        assert main(["run", secure.url, *SMALL, "--ca-file", str(tls_files.ca_file), "--quiet"]) == 0
        assert main(["run", secure.url, *SMALL, "--insecure", "--quiet", "--out", "careless"]) == 0
    assert len(list(Path("runs").iterdir())) == 1


def test_argparse_refuses_with_the_same_status(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["run"], ["run", "u", "--client", "fast"], ["run", "u", "--rate", "x"], ["walk"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert lp.__version__ in capsys.readouterr().out


def test_none_succeeded(capsys: pytest.CaptureFixture[str]) -> None:
    with lp.ReferenceServer(fault={"kind": "status", "status": 404}) as server:
        assert main(["run", server.url, *SMALL]) == 3
    out = capsys.readouterr().out
    assert "20 http_error" in out and "20 x " in out


def test_show_refuses_what_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("bad").mkdir()
    Path("bad/run.json").write_text("{")
    for folder in ("nowhere", "empty", "bad"):
        assert main(["show", folder]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llmprofile", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are found in /proc")
def test_ctrl_c_keeps_what_was_measured_and_says_so_by_status_4(server: lp.ReferenceServer) -> None:
    from llmprofile.capture import Board

    words = (server.url, "--rate", "100", "--duration", "60", "--output-tokens", "4", "--out", "here")
    child = started("run", *words)
    pause = threading.Event()
    for _ in range(1500):
        if Path("here/capture/board.bin").exists() and Board(Path("here"), 1).column("done")[0] > 100:
            break
        pause.wait(0.02)
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 4, err
    assert "interrupted" in out
    assert lp.load("here").meta["outcomes"]["ok"] > 80


def test_serve_serves_until_it_is_told_to_stop() -> None:
    port = free_port()
    child = started("serve", "--port", str(port), "--ttft", "0.01", "--itl", "0.001", "--max-batch", "4")
    assert child.stdout is not None
    line = child.stdout.readline()
    assert f"http://127.0.0.1:{port}/v1/completions" in line
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        assert json.load(answer)["data"]
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 0


def test_a_report_is_written_beside_the_runs_and_never_over_a_file(
    server: lp.ReferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, client in (("a", "stamped"), ("b", "conventional")):
        assert main(["run", server.url, *SMALL, "--quiet", "--out", f"runs/{name}", "--client", client]) == 0
    held = {path.name for path in Path("runs/a").iterdir()}
    assert main(["report", "runs/a"]) == 0
    assert capsys.readouterr().out == "report: a.html\n"
    assert main(["report", "runs/a", "runs/b/"]) == 0
    assert main(["report", "runs/b", "runs/a", "--out", "other.html"]) == 0
    pages = {path.name: path.read_text(encoding="utf-8") for path in Path().glob("*.html")}
    assert set(pages) == {"a.html", "a-b.html", "other.html"}
    assert lp.load("runs/a").meta["run_id"] in pages["a.html"]
    assert "a and b compared" in pages["a-b.html"] and "b and a compared" in pages["other.html"]
    capsys.readouterr()
    for words in (
        ["runs/a"],
        ["runs/a", "runs/b"],
        ["runs/a", "--out", "other.html"],
        ["runs/a", "--out", "no/x.html"],
    ):
        assert main(["report", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
    assert {path.name: path.read_text(encoding="utf-8") for path in Path().glob("*.html")} == pages
    assert {path.name for path in Path("runs/a").iterdir()} == held


def test_a_report_of_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    for words in (["empty"], ["nowhere"], ["empty", "nowhere"]):
        assert main(["report", *words]) == 2
        assert "is not a run folder" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["empty"]
