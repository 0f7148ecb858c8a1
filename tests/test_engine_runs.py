"""Runs of real engines, recorded as tests/engines/README.md says: what was counted and timed is what the engines say.

`alone` is one request after the other, `loaded` a Poisson stream. `engine.json` holds the engine's own counters before
and after the run, and the tokens of each prompt as its tokenizer counts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp

RUNS = Path(__file__).parents[1] / "data" / "runs"
FOLDERS = [f"{engine}/{load}" for engine in ("llama-server", "vllm") for load in ("alone", "loaded")]
ALONE = [name for name in FOLDERS if name.endswith("alone")]
VLLM = [name for name in FOLDERS if name.startswith("vllm")]
LLAMA = [name for name in FOLDERS if name.startswith("llama")]
METRICS = {
    "llama-server": ("llama.cpp", {"running", "waiting"}),
    "vllm": ("vLLM", {"running", "waiting", "cache_use", "queue_s"}),
}


@pytest.fixture(scope="module")
def load() -> Callable[[str], lp.Run]:
    runs: dict[str, lp.Run] = {}
    return lambda name: runs.setdefault(name, lp.load(RUNS / name))


def said(run: lp.Run) -> dict[str, Any]:
    assert run.folder is not None
    return json.loads((run.folder / "engine.json").read_text())


def grown(run: lp.Run) -> pd.Series:
    """By how much each of the engine's counters grew over the run."""
    both = pd.DataFrame({when: said(run)[when] for when in ("before", "after")}).fillna(0.0)
    return both["after"] - both["before"]


def head_s(run: lp.Run) -> np.ndarray:
    """From the request to the head of its answer, on the wire."""
    return (run.requests["headers_ns"] - run.requests["sent_ns"]).to_numpy(float) / 1e9


@pytest.mark.parametrize("name", FOLDERS)
def test_every_request_is_ok_and_every_token_has_its_event(name: str, load: Callable[[str], lp.Run]) -> None:
    run = load(name)
    rows = run.requests
    assert len(rows) >= 60
    assert run.meta["outcomes"] == {"ok": len(rows)}
    assert run.meta["ended"] == "complete" and run.meta["unstamped_reads"] == 0
    assert (rows["token_source"] == "usage").all()
    assert rows["output_tokens"].between(1, run.meta["asked"]["output_tokens"]).all()
    held = run.events.groupby("request_id")["tokens"].sum()
    assert held.to_dict() == rows.set_index("request_id")["output_tokens"].astype(int).to_dict()
    assert lp.token_mismatches(run).empty
    assert len(lp.inter_token_s(run, "wire")) == rows["output_tokens"].sum() - len(rows)


def test_some_answers_ended_by_themselves(load: Callable[[str], lp.Run]) -> None:
    """Their last token is in the usage and has no text."""
    run = load("llama-server/loaded")
    assert (run.requests["output_tokens"] < run.meta["asked"]["output_tokens"]).sum() >= 5


@pytest.mark.parametrize("name", ALONE)
def test_prompts_have_the_tokens_that_the_engines_tokenizer_says(name: str, load: Callable[[str], lp.Run]) -> None:
    run = load(name)
    assert run.requests["prompt_tokens"].tolist() == said(run)["tokens"]


@pytest.mark.parametrize("name", FOLDERS)
def test_no_first_token_is_earlier_than_the_engine_says(name: str, load: Callable[[str], lp.Run]) -> None:
    run = load(name)
    times = lp.timing_differences(run)
    assert len(times) == len(run.requests)
    assert times["server_ttft_s"].min() > 0
    assert times["outside_s"].min() > -0.001


@pytest.mark.parametrize("name", LLAMA)
def test_llama_server_leaves_out_what_comes_before_its_answers_head(name: str, load: Callable[[str], lp.Run]) -> None:
    """It sends the head when a slot begins on the prompt: way, HTTP, JSON, tokenizer and the wait are before it."""
    run = load(name)
    rest_s = lp.timing_differences(run)["outside_s"].to_numpy() - head_s(run)
    assert abs(np.median(rest_s)) < 0.001
    if name.endswith("loaded"):  # requests waited for a slot
        assert head_s(run).max() > 1.0


@pytest.mark.parametrize("name", FOLDERS)
def test_generation_has_no_such_parts(name: str, load: Callable[[str], lp.Run]) -> None:
    times = lp.timing_differences(load(name))
    assert abs(times["generation_difference_s"].median()) < 0.001


@pytest.mark.parametrize("name", LLAMA)
def test_llama_servers_counters_are_the_runs_sums(name: str, load: Callable[[str], lp.Run]) -> None:
    """The page writes six digits."""
    run = load(name)
    counters, rows = grown(run), run.requests
    assert counters["llamacpp:tokens_predicted_total"] == rows["output_tokens"].sum()
    prompts = counters["llamacpp:prompt_tokens_total"] + counters["llamacpp:prompt_tokens_cached_total"]
    assert prompts == rows["prompt_tokens"].sum()
    digit = 10.0 ** (np.floor(np.log10(said(run)["after"]["llamacpp:tokens_predicted_seconds_total"])) - 5)
    generating_s = rows["server_generation_s"].sum()
    assert counters["llamacpp:tokens_predicted_seconds_total"] == pytest.approx(generating_s, abs=digit)


@pytest.mark.parametrize("name", VLLM)
def test_vllms_histograms_are_the_runs_means(name: str, load: Callable[[str], lp.Run]) -> None:
    """Its TTFT begins when the prompt is rendered and ends when the API server has the token: within the wire's."""
    run = load(name)
    counters, rows = grown(run), run.requests
    mean_s = {}
    for what in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert counters[f"vllm:{what}_seconds_count"] == len(rows)
        mean_s[what] = counters[f"vllm:{what}_seconds_sum"] / len(rows)
    assert counters["vllm:generation_tokens_total"] == rows["output_tokens"].sum()
    assert counters["vllm:prompt_tokens_total"] == rows["prompt_tokens"].sum()
    # what the stream says of each request is what the page says of all
    assert rows["server_ttft_s"].mean() == pytest.approx(mean_s["request_prefill_time"], abs=1e-9)
    assert rows["server_generation_s"].mean() == pytest.approx(mean_s["request_decode_time"], abs=1e-9)
    inside_s = mean_s["request_queue_time"] + mean_s["request_prefill_time"]
    assert inside_s < mean_s["time_to_first_token"]
    # it leaves out the way, HTTP and the request's checks, all before the head, and the writing of the event
    left_out_s = rows["ttft_s"].mean() - mean_s["time_to_first_token"]
    assert 0 < left_out_s < head_s(run).mean() + 0.001


@pytest.mark.parametrize("name", FOLDERS)
def test_the_metrics_page_is_known(name: str, load: Callable[[str], lp.Run]) -> None:
    run = load(name)
    metrics = lp.server_metrics(run)
    server, names = METRICS[name.split("/")[0]]
    assert set(metrics["server"]) == {server}
    assert set(metrics["metric"]) == names
    assert run.meta["scrape"]["failed"] == 0
    values = metrics.dropna().groupby("metric")["value"]
    assert values.max()["running"] >= 1
    assert (values.min() >= 0).all()


@pytest.mark.parametrize("name", FOLDERS)
def test_there_is_a_verdict(name: str, load: Callable[[str], lp.Run]) -> None:
    run = load(name)
    assert run.meta["verdict"]["word"] in ("trustworthy", "biased")
    assert lp.verdict(run).word == run.meta["verdict"]["word"]
    assert str(run).startswith(run.meta["verdict"]["word"])
