"""What requests say, to whom and in which order: against the record of the server that got them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from conftest import free_port
from llmprofile.laws import law_of
from llmprofile.prompts import TAG_TOKENS, Prompts
from llmprofile.records import Run
from llmprofile.workload import draw_schedule
from recorder import WORDS, Recorder, recorder

CLIENTS = ["stamped", "conventional"]
FAILED, ENDED = "an earlier turn of its conversation failed", "the run ended before it was sent"


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.002, seed=3) as server:
        yield server


@pytest.fixture
def notes() -> Iterator[Recorder]:
    with recorder() as server:
        yield server


def load(url: Any, folder: Path, law: Any = None, **options: Any) -> Run:
    """A small run; options override it."""
    asked = {"n": 30, "output_tokens": 4, "seed": 5, "salt": 7, "out": folder / "run", "progress": False}
    return lp.run_load(url, law or lp.Poisson(150), **(asked | options))


def texts(run: Run) -> pd.DataFrame:
    assert run.folder is not None
    return pd.read_parquet(run.folder / "texts.parquet").set_index("request_id")


def truth_of(server: lp.ReferenceServer, run: Run) -> pd.DataFrame:
    truth = server.truth()
    return truth[truth["id"].str.startswith(run.meta["run_id"])].set_index("request_id").sort_index()


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


# --- in which order ---


def in_order(run: Run) -> pd.DataFrame:
    """The requests, once it is clear that every one has its row and its place."""
    rows = run.requests
    assert rows["request_id"].is_monotonic_increasing and rows["request_id"].is_unique
    assert rows["conversation"].is_monotonic_increasing
    assert (rows["turn"] == rows.groupby("conversation").cumcount()).all()
    assert sum(run.meta["outcomes"].values()) == len(rows)
    for column in ("worker", "server", "stage"):  # a conversation stays where it is
        assert (rows.groupby("conversation")[column].nunique() == 1).all()
    return rows


def words(text: Any) -> int:
    return len(str(text).split())


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", ["url", "chat_url"])
def test_a_turn_says_what_was_said_and_answered_before(
    server: lp.ReferenceServer, tmp_path: Path, client: str, kind: str
) -> None:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.002) as other:
        run = load(
            [getattr(server, kind), getattr(other, kind)],
            tmp_path,
            conversation=lp.Conversation(turns=lp.Uniform(1, 4), think_s=0.05),
            client=client,
            prompt_tokens=lp.Uniform(5, 40),
            output_tokens=lp.Uniform(1, 9),
            processes=3,
            keep_text=True,
        )
        truth = pd.concat([truth_of(each, run) for each in (server, other)]).sort_index()
    rows, said = in_order(run), texts(run)
    assert run.meta["outcomes"] == {"ok": len(rows)}
    assert rows["conversation"].nunique() == 30 and rows["turn"].max() == 3
    assert (rows["server"] == rows["conversation"] % 2).all()
    own, answered = said["prompt"].map(words).to_numpy(), said["answer"].map(words).to_numpy()
    by = rows["conversation"].to_numpy()
    sums = pd.Series(own + answered).groupby(by).cumsum() - answered
    assert truth["prompt_words"].tolist() == sums.tolist()
    assert (answered == rows["output_tokens"]).all()
    # a later turn is due when its user has thought, from when the client noticed the end of the turn before
    later = rows["turn"].to_numpy() > 0
    thought_s = (rows["due_ns"] - rows["eof_ns"].shift())[later].to_numpy(float) / 1e9
    assert (thought_s >= 0.05).all()
    assert np.median(thought_s) < 0.25
    assert (rows["sent_ns"] >= rows["due_ns"]).all()
    # the salt repeats what is new
    plain = new_texts(7, rows, run)
    assert said["prompt"].tolist() == plain


def new_texts(salt: int, rows: pd.DataFrame, run: Run) -> list[str]:
    lengths = draw_schedule(
        lp.Poisson(150),
        n=30,
        prompt_tokens=lp.Uniform(5, 40),
        seed=run.meta["asked"]["seed"],
        conversation=lp.Conversation(turns=lp.Uniform(1, 4)),
    ).prompt_tokens
    prompts = Prompts(salt)
    return [prompts.text(k, int(tokens)) for k, tokens in zip(rows["request_id"], lengths, strict=True)]


def test_messages_of_a_conversation(notes: Recorder, tmp_path: Path) -> None:
    options = {"conversation": lp.Conversation(turns=3), "n": 2, "keep_text": True, "system_prompt": "Be brief."}
    run = load(notes.chat_url, tmp_path, prompts=lp.SharedPrefix(1, 5), **options)
    said = texts(run)["prompt"].tolist()
    assert [text.split()[0] == said[0].split()[0] for text in said] == [True, False, False] * 2
    system = {"role": "system", "content": "Be brief."}
    for k, body in notes.bodies.items():
        first = k - k % 3
        users = [{"role": "user", "content": said[j]} for j in range(first, k + 1)]
        answers = [{"role": "assistant", "content": WORDS}] * (k - first)
        talk: list[Any] = [None] * (len(users) + len(answers))
        talk[::2], talk[1::2] = users, answers
        assert body["messages"] == [system, *talk]
    run = load(f"{notes.base_url}/v1/responses", tmp_path, out=tmp_path / "responses", **options)
    assert [message["role"] for message in notes.bodies[2]["input"]] == ["user", "assistant"] * 2 + ["user"]
    assert notes.bodies[2]["instructions"] == "Be brief."
    run = load(f"{notes.base_url}/generate_stream", tmp_path, out=tmp_path / "tgi", **options)
    one, two = texts(run)["prompt"].tolist()[:2]
    assert notes.bodies[1]["inputs"] == f"Be brief.\n\n{one}\n\n{WORDS}\n\n{two}"


@pytest.mark.parametrize("law", [lp.Poisson(150), lp.ClosedLoop(6)], ids=repr)
def test_a_turn_that_fails_ends_its_conversation(tmp_path: Path, law: Any) -> None:
    with lp.ReferenceServer(ttft_s=0.005, itl_s=0.001, fault={"kind": "close", "at": 2}, fault_share=0.3) as faulty:
        run = load(faulty.url, tmp_path, law, conversation=lp.Conversation(turns=4), processes=2)
        truth = truth_of(faulty, run)
    rows = in_order(run)
    assert len(rows) == 120
    ended = rows.groupby("conversation")["outcome"].agg(list)
    for outcomes in ended:
        good = outcomes.index("truncated") if "truncated" in outcomes else 4
        assert outcomes == [*["ok"] * good, *["truncated"] * (good < 4), *["unsent"] * (3 - good)]
    assert {tuple(outcomes) for outcomes in ended} > {("ok",) * 4, ("truncated", *["unsent"] * 3)}
    unsent = rows[rows["outcome"] == "unsent"]
    assert set(unsent["error"]) == {FAILED}
    assert unsent[["due_ns", "sent_ns", "lateness_s"]].isna().all().all()
    assert truth.index.tolist() == rows.loc[rows["outcome"] != "unsent", "request_id"].tolist()


@pytest.mark.parametrize("law", [lp.Poisson(200), lp.ClosedLoop(5)], ids=repr)
def test_a_run_that_is_stopped_leaves_turns_unsent(server: lp.ReferenceServer, tmp_path: Path, law: Any) -> None:
    going = lp.start_load(
        *(server.url, law, 20),
        conversation=lp.Conversation(turns=3, think_s=[0.0, 60.0]),
        output_tokens=3,
        processes=2,
        seed=1,
        out=tmp_path / "run",
        progress=False,
    )
    waited = threading.Event()
    while going.progress.done < 5:
        assert not waited.wait(0.01)
    waited.wait(0.3)
    going.stop()
    run = going.wait()
    rows = in_order(run)
    assert len(rows) == 60 and run.meta["ended"] == "stopped"
    assert set(run.meta["outcomes"]) <= {"ok", "unsent", "cancelled"} and run.meta["outcomes"]["unsent"] > 10
    assert set(rows.loc[rows["outcome"] == "unsent", "error"]) == {ENDED}


def test_a_users_thinking_holds_a_slot_of_a_closed_loop(server: lp.ReferenceServer, tmp_path: Path) -> None:
    """Two users who think for an hour begin one conversation each, and the run ends in time all the same."""
    options = {"conversation": lp.Conversation(turns=2, think_s=3600), "n": None, "duration_s": 0.4}
    run = load(server.url, tmp_path, lp.ClosedLoop(2), **options)
    rows = in_order(run)
    assert rows["outcome"].tolist() == ["ok", "unsent"] * 2
    assert set(rows["error"].dropna()) == {ENDED}
    assert run.meta["ended"] == "complete"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_closed_loop_of_conversations(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    asked = {"conversation": lp.Conversation(turns=3, think_s=0.02), "processes": 2, "client": client}
    run = load(server.url, tmp_path, lp.ClosedLoop(4), n=20, **asked)
    rows = in_order(run)
    assert run.meta["outcomes"] == {"ok": 60}
    for worker in (0, 1):
        own = rows[rows["worker"] == worker].groupby("conversation")
        begun, ended = own["begun_ns"].min().to_numpy(np.int64), own["eof_ns"].max().to_numpy(np.int64)
        assert max(np.sum(begun <= at) - np.sum(ended < at) for at in begun) == 2
    free = load(server.url, tmp_path, lp.ClosedLoop(4), n=None, duration_s=0.4, out=tmp_path / "timed", **asked)
    assert in_order(free)["conversation"].nunique() > 4
    # once the time is over nothing is begun, and what was begun has all of its rows
    assert (free.requests.groupby("conversation").size() == 3).all()
    last_s = (free.requests["due_ns"].max() - free.requests["due_ns"].min()) / 1e9
    assert last_s < 0.4


def test_turns_wait_for_a_slot_of_an_open_loop(tmp_path: Path) -> None:
    """Four conversations at once, one request in flight: by the server's record one at a time, and the wait shows."""
    with lp.ReferenceServer(ttft_s=0.05, itl_s=0.0) as slow:
        asked = {"n": 4, "output_tokens": 1, "conversation": lp.Conversation(turns=2), "max_in_flight": 1}
        run = load(slow.url, tmp_path, lp.Constant(100_000), **asked)
        truth = truth_of(slow, run).sort_values("arrive_ns")
    rows = in_order(run)
    assert run.meta["outcomes"] == {"ok": 8}
    assert (truth["arrive_ns"].to_numpy()[1:] >= truth["last_ns"].to_numpy(np.int64)[:-1]).all()
    # who is due first goes first: all the first turns, then the second ones, each later by what was before it
    assert rows.sort_values("sent_ns")["turn"].tolist() == [0] * 4 + [1] * 4
    late_s = rows.sort_values("sent_ns")["lateness_s"].to_numpy()
    assert (late_s[4:] >= 0.1).all() and late_s.max() < 0.05 * 8


def test_rates_are_those_of_conversations(server: lp.ReferenceServer, tmp_path: Path) -> None:
    thinking = law_of([0.0, 0.3])
    run = load(server.url, tmp_path, conversation=lp.Conversation(turns=3, think_s=thinking), n=60)
    first = run.requests[run.requests["turn"] == 0]
    rates = run.meta["rates"]
    for name, column in (("drawn_per_s", "due_ns"), ("achieved_per_s", "sent_ns")):
        assert rates[name] == pytest.approx(59e9 / (first[column].max() - first[column].min()), rel=1e-6)
    assert not [s for s in run.meta["verdict"]["sentences"] if "was drawn" in s]
    assert lp.window(run, 0.05, 0.05).meta["rates"]["drawn_per_s"] < 1.5 * rates["drawn_per_s"]
    # of requests that meet a limit there are three a conversation
    assert lp.goodput(run, e2e_s=100.0).rate_per_s == pytest.approx(3 * rates["achieved_per_s"])
    assert run.meta["asked"]["conversation"] == "Conversation(turns=3, think_s=[0.0, 0.3])"


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


def test_conversations_that_make_no_sense() -> None:
    bad: Any
    for bad in (0, -1, 1.5, True, None, "3"):
        with pytest.raises(lp.UsageError, match="turns must be"):
            lp.Conversation(bad)
    for bad in (-1, float("nan"), float("inf"), None, "3", [], [1, -1]):
        with pytest.raises(lp.UsageError, match="think_s must"):
            lp.Conversation(2, think_s=bad)
