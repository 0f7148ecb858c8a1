"""A server's own word on tokens and times against the reference server's record, scripts and a real engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from cuts import CASES, EVENT_STREAM, JSON_LINES, events_of, lines_of, parse_cut, raw_response, segments
from harness import NAMES
from llmprofile.selfreport import count_tokens, timing_differences, token_mismatches
from replay import STEP_S, replayed
from test_server_llamacpp import STREAM as LLAMACPP
from test_server_ollama import STREAMS as OLLAMA_STREAMS

OLLAMA = OLLAMA_STREAMS["generate"]
CONTINUOUS = {"stream_options": {"continuous_usage_stats": True}}
LENGTHS = lp.Uniform(5, 23)


def load(server: lp.ReferenceServer, folder: Path, **asked: Any) -> lp.Run:
    asked = {"n": 40, "prompt_tokens": 6, "output_tokens": LENGTHS, "seed": 3} | asked
    return lp.run_load(server.url, lp.Poisson(rate_per_s=100), out=folder / "run", progress=False, **asked)


# --- tokens ---

_DELTAS = [{"choices": [{"index": 0, "delta": {"content": " a"}, "finish_reason": None}]}] * 3
_USAGE = {"completion_tokens": 10, "prompt_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 7}}
HIDDEN = events_of(*_DELTAS, {"choices": [], "usage": _USAGE})
"""Ten tokens, of which seven were thought and never shown."""


@pytest.mark.parametrize("client", NAMES)
def test_running_totals_give_every_event_its_tokens(client: str, tmp_path: Path) -> None:
    """Four tokens an event, as speculative decoding sends them: counts and gaps are those of the server's record."""
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.01, tokens_per_event=4) as server:
        run = load(server, tmp_path, extra_body=CONTINUOUS, client=client)
        record, tokens = server.record()
    truth, words = (record.set_index("request_id")[name] for name in ("tokens", "prompt_words"))
    assert token_mismatches(run).empty
    requests = run.requests.set_index("request_id")
    assert requests["output_tokens"].astype(int).to_dict() == truth.to_dict()
    assert requests["prompt_tokens"].astype(int).to_dict() == words.to_dict()
    # in the record a token's event is the send it left with
    sends = tokens.groupby(["request_id", "left_ns"]).size()
    held = run.events.sort_values(["request_id", "read", "wire_ns"], kind="stable")
    assert held["tokens"].astype(int).tolist() == sends.sort_index().tolist()
    gaps_s = lp.inter_token_s(run, "wire")
    assert len(gaps_s) == truth.sum() - len(truth)
    further = requests["output_tokens"].clip(upper=4).sum() - len(requests)
    assert (gaps_s["itl_s"] == 0).sum() >= further


def test_totals_that_do_not_run_are_listed(tmp_path: Path) -> None:
    """Without them nobody can tell how many tokens an event holds: usage and events differ, and every one is listed."""
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.01, tokens_per_event=4) as server:
        run = load(server, tmp_path)
        truth = server.truth().set_index("request_id")["tokens"]
    found = token_mismatches(run).set_index("request_id")
    events = -(-truth // 4)
    unlike = truth[truth != events]
    assert found["tokens_said"].to_dict() == unlike.to_dict()
    assert found["events"].to_dict() == found["tokens_in_events"].to_dict() == events[unlike.index].to_dict()
    assert found["difference"].to_dict() == (unlike - events[unlike.index]).to_dict()
    assert found["hidden"].eq(0).all()


@pytest.mark.parametrize("asked", [{"usage": False}, {"stream": False}, {}], ids=["no usage", "body", "one each"])
def test_what_is_no_mismatch(asked: dict[str, Any], tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001) as server:
        run = load(server, tmp_path, **asked)
    assert run.meta["outcomes"] == {"ok": 40}
    assert token_mismatches(run).empty


def test_hidden_reasoning_is_no_mismatch_and_shown_reasoning_has_its_own_first_time(tmp_path: Path) -> None:
    shown = CASES["reasoning_then_content"]
    run = replayed("/v1/chat/completions", HIDDEN, EVENT_STREAM, "stamped", tmp_path / "hidden")
    assert run.requests["first_reasoning_s"].isna().all()
    assert run.requests[["output_tokens", "reasoning_tokens"]].to_numpy().tolist() == [[10, 7]] * 3
    assert token_mismatches(run).empty
    old = run.requests.drop(columns=["reasoning_tokens", "first_reasoning_s", "first_reasoning_seen_s"])
    before = token_mismatches(dataclasses.replace(run, requests=old))
    assert before["difference"].tolist() == [7] * 3
    for client in NAMES:
        pieces = segments(shown)[1]
        run = replayed("/v1/chat/completions", pieces, shown["headers"], client, tmp_path / client)
        rows = run.requests
        assert (rows["first_reasoning_s"] == rows["ttft_s"]).all()
        assert (rows["first_content_s"] - rows["first_reasoning_s"]).min() > STEP_S / 2
        assert rows["first_reasoning_seen_s"].notna().all()
        assert rows["first_reasoning_handled_s"].notna().all() == (client == "conventional")


# --- times ---


def test_a_server_that_says_no_times(tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001) as server:
        run = load(server, tmp_path)
    assert run.requests[["server_ttft_s", "server_generation_s"]].isna().all().all()
    with pytest.raises(lp.UsageError, match="no answer of this run holds timings"):
        timing_differences(run)


STREAMS = {
    "llama.cpp": ("/v1/chat/completions", events_of(*LLAMACPP), EVENT_STREAM, 0.015, 0.04),
    "ollama": ("/api/generate", lines_of(*OLLAMA), JSON_LINES, 0.023, 0.04),
}


@pytest.mark.parametrize("name", STREAMS)
def test_the_servers_own_times_never_depend_on_the_cuts(name: str, tmp_path: Path) -> None:
    _, pieces, headers, ttft_s, generation_s = STREAMS[name]
    raw = raw_response(pieces, headers)
    requests, _ = parse_cut(raw, range(1, len(raw.data)), tmp_path)
    assert requests["server_ttft_s"].eq(ttft_s).all() and requests["server_generation_s"].eq(generation_s).all()


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("name", STREAMS)
def test_a_run_beside_the_servers_own_times(name: str, client: str, tmp_path: Path) -> None:
    """Tokens are 20 ms apart, so that from first to last they take the 40 ms that the script says."""
    path, pieces, headers, ttft_s, _ = STREAMS[name]
    run = replayed(path, pieces, headers, client, tmp_path)
    table = timing_differences(run)
    assert table["request_id"].tolist() == [0, 1, 2]
    assert table["server_ttft_s"].tolist() == [ttft_s] * 3
    first = 2 if name == "llama.cpp" else 1  # the first token is in the second piece
    assert table["outside_s"].min() >= first * STEP_S - ttft_s
    assert table["outside_s"].median() == pytest.approx(first * STEP_S - ttft_s, abs=0.01)
    assert table["generation_difference_s"].median() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("client", NAMES)
def test_a_real_engines_word(dasllama: str, client: str, tmp_path: Path) -> None:
    """Its clock starts after its HTTP and stops before its send: the wire is never earlier, and little later."""
    run = lp.run_load(
        f"{dasllama}/v1/completions",
        lp.ClosedLoop(1),
        n=30,
        prompt_tokens=20,
        output_tokens=lp.Uniform(10, 30),
        client=client,
        fresh=True,
        out=tmp_path / "run",
        progress=False,
    )
    assert token_mismatches(run).empty
    table = timing_differences(run)
    assert len(table) == 30
    assert table["outside_s"].min() > -0.001
    assert table["outside_s"].median() < 0.02
    assert abs(table["generation_difference_s"].median()) < 0.005
    assert (table["server_generation_s"] > 0).all()


# --- a tokenizer of one's own ---


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> lp.Run:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001) as server:
        return load(server, tmp_path_factory.mktemp("texts"), keep_text=True)


def test_a_tokenizer_that_cuts_at_spaces_counts_words(texts: lp.Run, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"tok": 0, "?": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = count_tokens(texts, tmp_path / "tokenizer.json")
    assert found["request_id"].tolist() == list(range(40))
    # the reference server's token is a word, and it counts a prompt's words
    assert found["answer_counted"].tolist() == found["answer_said"].tolist()
    assert found["answer_said"].tolist() == texts.requests["output_tokens"].tolist()
    assert found["prompt_counted"].tolist() == found["prompt_said"].tolist()


def test_what_can_not_be_counted(texts: lp.Run, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(lp.UsageError, match="no tokenizer file"):
        count_tokens(texts, tmp_path / "none.json")
    with pytest.raises(lp.UsageError, match="is no tokenizer.json"):
        count_tokens(texts, tmp_path / "tokenizer.json")


def test_a_run_without_text(texts: lp.Run, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "t.json"))
    for run in (dataclasses.replace(texts, folder=None), dataclasses.replace(texts, folder=tmp_path)):
        with pytest.raises(lp.UsageError, match="keep_text=True"):
            count_tokens(run, tmp_path / "t.json")
