"""What requests say and to whom: against the record of the server that got them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from conftest import free_port
from llmprofile.prompts import TAG_TOKENS
from llmprofile.workload import draw_schedule
from recorder import Recorder, recorder
from small import CLIENTS, load, texts, truth_of


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.002, seed=3) as server:
        yield server


@pytest.fixture
def notes() -> Iterator[Recorder]:
    with recorder() as server:
        yield server


# --- to whom ---


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("processes", [1, 3])
def test_two_servers_get_alternate_requests(
    server: lp.ReferenceServer, tmp_path: Path, client: str, processes: int
) -> None:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.002, model="another") as other:
        urls = [f"{server.url}?key=secret", other.url]
        run = load(urls, tmp_path, client=client, processes=processes)
        got = [truth_of(each, run).index.tolist() for each in (server, other)]
    assert run.meta["outcomes"] == {"ok": 30}
    assert got == [list(range(0, 30, 2)), list(range(1, 30, 2))]
    assert run.requests["server"].tolist() == [0, 1] * 15
    assert run.meta["asked"]["url"] == [server.url, other.url]
    assert run.meta["asked"]["model"] == ["reference", "another"]
    assert "secret" not in (tmp_path / "run" / "run.json").read_text()
    if client == "stamped":  # each server has warm connections of its own
        assert run.requests["connect_s"].isna().all()
    assert server.base_url in lp.report(run, tmp_path / "report.html").read_text()


def test_one_server_in_a_list_is_one_server(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = load((server.url,), tmp_path, n=3)
    assert run.meta["asked"]["url"] == server.url
    assert run.requests[["server", "conversation", "turn"]].to_numpy().tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert {str(run.requests[name].dtype) for name in ("server", "conversation", "turn")} == {"Int64"}


def test_no_proxy_is_taken_from_the_environment(server: lp.ReferenceServer, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    code = f"""
        import os
        os.environ |= {{"HTTP_PROXY": {dead!r}, "http_proxy": {dead!r}, "ALL_PROXY": {dead!r}}}
        os.environ.pop("no_proxy", None), os.environ.pop("NO_PROXY", None), os.environ.pop("https_proxy", None)
        import llmprofile as lp
        for client in ("stamped", "conventional"):
            run = lp.run_load({server.url!r}, lp.Poisson(100), n=5, output_tokens=2, client=client,
                              out={str(tmp_path)!r} + "/" + client, progress=False)
            print(run.meta["outcomes"], run.meta["asked"]["proxy"], sorted(run.meta["machine"]["proxies_ignored"]))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["{'ok': 5} None ['ALL_PROXY', 'HTTP_PROXY', 'http_proxy']"] * 2, done.stderr
    assert dead not in (tmp_path / "stamped" / "run.json").read_text()


# --- what they say ---


@pytest.mark.parametrize("client", CLIENTS)
def test_a_files_prompts_arrive_to_the_word(notes: Recorder, tmp_path: Path, client: str) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "\u00e9\u2028\n".'}]
    lines: list[dict[str, Any]] = [{"prompt": "Why?"}, {"messages": talk, "output_tokens": 9}, {"prompt": "Who?"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    file = lp.PromptFile(path)
    run = load(notes.chat_url, tmp_path, prompts=file, n=10, processes=2, client=client, keep_text=True)
    assert run.meta["outcomes"] == {"ok": 10}
    assert run.meta["asked"]["prompts"] == repr(file)
    assert run.meta["asked"]["prompt_tokens"] is None
    asked = [line.get("messages") or [{"role": "user", "content": line["prompt"]}] for line in lines]
    assert {k: body["messages"] for k, body in notes.bodies.items()} == {k: asked[k % 3] for k in range(10)}
    assert [notes.bodies[k]["max_tokens"] for k in range(4)] == [4, 9, 4, 4]
    kept = ["\n\n".join(message["content"] for message in messages) for messages in asked]
    assert texts(run)["prompt"].tolist() == [kept[k % 3] for k in range(10)]


def test_one_text_gets_a_files_messages_joined(notes: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
    path.write_text(json.dumps({"messages": talk}))
    load(notes.url, tmp_path, prompts=lp.PromptFile(path), n=2, system_prompt="Be brief.")
    said = "Be brief.\n\nsystem says\n\nuser says\n\nassistant says\n\nuser says"
    assert {k: body["prompt"] for k, body in notes.bodies.items()} == {0: said, 1: said}
    run = load(f"{notes.base_url}/v1/responses", tmp_path, prompts=lp.PromptFile(path), n=1, out=tmp_path / "responses")
    assert notes.bodies[0]["input"] == talk
    assert run.meta["outcomes"] == {"ok": 1}


def test_shared_prefixes_are_as_many_as_asked_and_the_same_in_every_process(tmp_path: Path) -> None:
    found = []
    for processes in (1, 3):
        with recorder() as notes:
            options = {"prompts": lp.SharedPrefix(groups=4, tokens=50), "prompt_tokens": 20, "n": 60}
            load(notes.url, tmp_path, processes=processes, out=tmp_path / str(processes), **options)
            found.append({k: body["prompt"].split(" ") for k, body in notes.bodies.items()})
    assert found[0] == found[1]
    assert len({" ".join(words[:50]) for words in found[0].values()}) == 4
    assert len({words[0] for words in found[0].values()}) == 4
    assert len({words[50] for words in found[0].values()}) == 60
    assert {len(words) for words in found[0].values()} == {50 + 20 - TAG_TOKENS + 1}


def test_what_goes_with_every_request(notes: Recorder, tmp_path: Path) -> None:
    asked = {"system_prompt": "Be brief.", "ignore_eos": True, "temperature": 0.5, "sampling_seed": 3, "n": 3}
    run = load(notes.chat_url, tmp_path, output_tokens=lp.Uniform(1, 1000), **asked)
    lengths = draw_schedule(lp.Poisson(150), n=3, output_tokens=lp.Uniform(1, 1000), seed=5).output_tokens
    for k, body in notes.bodies.items():
        assert body["max_tokens"] == body["min_tokens"] == lengths[k]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["ignore_eos"], body["temperature"], body["seed"]) == (True, 0.5, 3)
    assert {name: run.meta["asked"][name] for name in asked} == asked
    assert run.meta["asked"]["conversation"] is None


# --- what is refused ---


def test_what_is_refused(notes: Recorder, server: lp.ReferenceServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Why?"}\n')
    file, prefix, talk = lp.PromptFile(path), lp.SharedPrefix(2, 5), lp.Conversation(2)
    trace = lp.Trace({"due_s": [0.0], "prompt_tokens": [5], "output_tokens": [5]})
    law, before = lp.Poisson(10), sorted(tmp_path.rglob("*"))
    url, chat, tgi = notes.url, notes.chat_url, f"{notes.base_url}/generate_stream"
    responses, ollama = f"{notes.base_url}/v1/responses", f"{notes.base_url}/api/generate"
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([], law, {}, "at least one"),
        (5, law, {}, "url must be a text"),
        ([url, 5], law, {}, "url must be a text"),
        ([url, chat], law, {}, "one API; not of completions and chat"),
        ([url, "http://127.0.0.1"], law, {}, "no path"),
        ([url, f"http://127.0.0.1:{free_port()}/v1/completions"], law, {}, "no connection"),
        (url, law, {"prompts": "prompts.jsonl"}, "PromptFile or a SharedPrefix"),
        (url, law, {"prompts": file, "prompt_tokens": 5}, "a prompt file brings its own prompt_tokens"),
        (url, law, {"prompts": file, "conversation": talk}, "prompt file, which holds single requests"),
        (url, trace, {"prompts": file, "n": None}, "use one of the two"),
        (url, trace, {"conversation": talk, "n": None}, "a trace, which holds single requests"),
        (url, law, {"conversation": 3}, "must be a Conversation"),
        (url, law, {"system_prompt": ""}, "system_prompt must be a text"),
        (url, law, {"n": None, "prompts": prefix}, "not both and not neither"),
        (responses, law, {"ignore_eos": True}, "ignore_eos can't be had: /responses has no ignore_eos"),
        (responses, law, {"sampling_seed": 1}, "sampling_seed can't be had: /responses has no seed"),
        (ollama, law, {"ignore_eos": True}, "/api/generate has no ignore_eos"),
        (tgi, law, {"ignore_eos": True}, "/generate_stream has no ignore_eos"),
        (url, law, {"temperature": -1}, "temperature must be"),
        (url, law, {"temperature": float("nan")}, "temperature must be"),
        (url, law, {"temperature": True}, "temperature must be"),
        (url, law, {"sampling_seed": 1.5}, "sampling_seed must be"),
        (url, law, {"temperature": 1, "extra_body": {"temperature": 1}}, "given as an argument as well"),
        (url, law, {"sampling_seed": 1, "extra_body": {"seed": 1}}, "can't hold seed"),
        (url, law, {"ignore_eos": True, "extra_body": {"ignore_eos": True}}, "can't hold ignore_eos"),
        (url, law, {"ignore_eos": True, "extra_body": {"min_tokens": 1}}, "can't hold min_tokens"),
        (tgi, law, {"temperature": 1, "extra_body": {"parameters": {"temperature": 1}}}, "can't hold temperature"),
        (ollama, law, {"sampling_seed": 1, "extra_body": {"options": {"seed": 1}}}, "can't hold seed"),
        (responses, law, {"system_prompt": "a", "extra_body": {"instructions": "b"}}, "beside system_prompt"),
    ]
    for where, arrivals, options, why in cases:
        with pytest.raises(lp.UsageError, match=why) as caught:
            lp.run_load(where, arrivals, **({"n": 1, "out": tmp_path / "new", "progress": False} | options))
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert notes.bodies == {}
