"""Turn after turn: what is said again, when, and what becomes of a conversation that fails or is stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile.laws import law_of
from llmprofile.prompts import Prompts
from llmprofile.records import Run
from llmprofile.workload import draw_schedule
from recorder import WORDS, Recorder, recorder
from small import CLIENTS, load, texts, truth_of

FAILED, ENDED = "an earlier turn of its conversation failed", "the run ended before it was sent"


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.002, seed=3) as server:
        yield server


@pytest.fixture
def notes() -> Iterator[Recorder]:
    with recorder() as server:
        yield server


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


def test_conversations_that_make_no_sense() -> None:
    bad: Any
    for bad in (0, -1, 1.5, True, None, "3"):
        with pytest.raises(lp.UsageError, match="turns must be"):
            lp.Conversation(bad)
    for bad in (-1, float("nan"), float("inf"), None, "3", [], [1, -1]):
        with pytest.raises(lp.UsageError, match="think_s must"):
            lp.Conversation(2, think_s=bad)
