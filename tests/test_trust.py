"""Verdicts of runs whose faults are known, because they were made."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

import llmprofile as lp
from llmprofile.records import Run


@pytest.fixture
def good(example_run: Run) -> Run:
    """A run without a fault: the example's, its disturbances by this machine taken out."""
    rows = example_run.requests.copy()
    rows["bounded"] = False
    rows["lateness_s"] = 1e-4
    meta = copy.deepcopy(example_run.meta)
    meta["rates"] |= {"achieved_per_s": meta["rates"]["drawn_per_s"]}
    meta |= {"unstamped_reads": 0, "clock_steps": 0}
    return dataclasses.replace(example_run, meta=meta, requests=rows)


def with_meta(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, meta={**run.meta, **changes})


def with_column(run: Run, **columns: Any) -> Run:
    return dataclasses.replace(run, requests=run.requests.assign(**columns))


def test_a_good_run(good: Run) -> None:
    verdict = lp.verdict(good)
    assert (verdict.word, verdict.clock) == ("trustworthy", "wire")
    assert str(verdict).startswith("trustworthy: ")
    assert verdict.as_dict()["sentences"] == list(verdict.sentences)


def test_stored_and_given_are_the_same(example_run: Run) -> None:
    assert lp.verdict(example_run).as_dict() == example_run.meta["verdict"]


@pytest.mark.parametrize("share", [0.0, 0.009, 0.011, 1.0])
def test_stamps(good: Run, share: float) -> None:
    reads = 100_000
    verdict = lp.verdict(with_meta(good, reads=reads, unstamped_reads=round(share * reads)))
    assert (verdict.word == "invalid") == (share > 0.01)


@pytest.mark.parametrize(("factor", "word"), [(0.985, "trustworthy"), (0.97, "invalid"), (1.03, "invalid")])
def test_rate(good: Run, factor: float, word: str) -> None:
    rates = {**good.meta["rates"], "achieved_per_s": good.meta["rates"]["drawn_per_s"] * factor}
    assert lp.verdict(with_meta(good, rates=rates)).word == word
    # what was stopped on purpose did not keep its rate, and that is no fault
    assert lp.verdict(with_meta(good, rates=rates, ended="stopped")).word == "trustworthy"


def test_lateness_and_lost_workers(good: Run) -> None:
    late_s = np.where(np.arange(len(good.requests)) % 20 == 0, 0.02, 1e-4)
    verdict = lp.verdict(with_column(good, lateness_s=late_s))
    assert verdict.word == "invalid" and "20.0 ms" in str(verdict) and "processes" in str(verdict)
    assert lp.verdict(with_column(good, lateness_s=late_s), lateness_p99_s=0.03).word == "trustworthy"
    assert "2 worker(s)" in str(lp.verdict(with_meta(good, lost_workers=2)))


@pytest.mark.parametrize(("share", "word"), [(0.005, "trustworthy"), (0.05, "biased"), (0.2, "invalid")])
def test_bounded_first_tokens(good: Run, share: float, word: str) -> None:
    n = len(good.requests)
    bounded = np.arange(n) < round(share * n)
    assert lp.verdict(with_column(good, bounded=bounded)).word == word


@pytest.mark.parametrize(("bias_s", "word"), [(0.0004, "trustworthy"), (0.0006, "biased")])
def test_bias_of_the_mean_on_another_clock(good: Run, bias_s: float, word: str) -> None:
    rows = with_column(good, ttft_s=0.01, ttft_handled_s=0.01 + bias_s, ttft_seen_s=0.01)
    verdict = lp.verdict(rows, "handled")
    assert verdict.word == word
    if word == "biased":
        assert "off by 0.60 ms (+6.0%" in str(verdict) and "stamped client" in str(verdict)


def test_what_an_ordinary_clock_would_have_said_is_a_note(good: Run) -> None:
    verdict = lp.verdict(with_column(good, ttft_s=0.01, ttft_seen_s=0.012))
    assert verdict.word == "trustworthy"
    assert verdict.sentences[-1] == "Note: this client's own clock would have put mean TTFT off by 2.00 ms."


def test_no_request_succeeded_and_html_is_escaped(good: Run) -> None:
    verdict = lp.verdict(with_column(good, outcome="http_error"))
    assert verdict.word == "invalid" and "No request succeeded" in str(verdict)
    html = dataclasses.replace(verdict, sentences=("<script>",))._repr_html_()
    assert "<script>" not in html
    with pytest.raises(lp.UsageError, match="clock must be one of"):
        lp.verdict(good, "sundial")
