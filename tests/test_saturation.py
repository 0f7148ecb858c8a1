"""Searches against the reference server, whose capacity a formula knows; and what their answers say."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize

import llmprofile as lp
from llmprofile.bisection import FAILS, INTERRUPTED, MEETS, OPEN, UNMEASURED, Rule, Step
from llmprofile.saturation import conclude, find_saturation, sample_of
from test_trust import even, with_column, with_meta

SERVICE_S = 0.01
QUICK = {"output_tokens": 1, "prompt_tokens": 5, "progress": False}


def test_the_rate_that_meets_a_limit_of_a_single_server(tmp_path: Path) -> None:
    """One token of 10 ms, one request at a time: M/D/1, whose TTFT is known by formula."""
    limit_s, share = 0.035, 0.7

    def met(rate_per_s: float) -> float:
        return float(lp.MD1(rate_per_s, SERVICE_S).wait_cdf(limit_s - SERVICE_S))

    truth = float(optimize.brentq(lambda rate: met(rate) - share, 20, 99.9))
    with lp.ReferenceServer(ttft_s=SERVICE_S, itl_s=0.0, max_batch=1) as server:
        found = find_saturation(
            *(server.url, 50, 200),
            ttft_s=limit_s,
            share=share,
            within=1.0,
            duration_s=2.0,
            seed=3,
            out=tmp_path / "runs",
            **QUICK,  # type: ignore[arg-type]
        )
    assert found.rate_per_s <= truth <= found.fails_per_s, found
    assert found.rate_per_s == 50
    assert len(found.runs) == sum(step.runs for step in found.steps) == len(list((tmp_path / "runs").iterdir()))
    assert f"at {found.rate_per_s:g}/s, and not at" in found.sentences[0]


def test_the_rate_that_a_batching_server_sustains(tmp_path: Path) -> None:
    """Two at a time, 10 ms a step: 200/s."""
    with lp.ReferenceServer(ttft_s=SERVICE_S, itl_s=0.0, max_batch=2) as server:
        found = find_saturation(
            *(server.url, 60, 400),
            growth=0.2,
            within=9.0,
            most_runs=4,
            duration_s=0.8,
            seed=4,
            out=tmp_path / "runs",
            **QUICK,  # type: ignore[arg-type]
        )
    assert (found.rate_per_s, found.fails_per_s) == (60, 400), found
    # of 400/s it takes 200: TTFT grows by a second each second
    failed = found.steps[1]
    assert failed.growth == pytest.approx(1.0, abs=0.4)
    assert "growth" in repr(found)
    assert "succeed and TTFT grows by at most 20% of the time that passes" in found.sentences[0]


# what a run says


def test_a_run_as_a_sample() -> None:
    run = with_asked(even(n=200))
    rows = np.arange(200)
    slow = with_column(run, ttft_handled_s=np.where(rows % 20 == 0, 1.0, 0.02))
    found = sample_of(slow, {"ttft_s": 0.5})
    assert found.total.tolist() == [20] * 10
    assert found.met.tolist() == [19] * 10
    assert found.delivered and found.complete
    failed = with_column(run, outcome=np.where(rows < 20, "timeout", "ok"))
    assert sample_of(failed, {}).met.tolist() == [0] + [20] * 9
    assert sample_of(failed, {"ttft_s": 0.5}).met.tolist() == [0] + [20] * 9
    assert sample_of(failed, {}, warmup_s=2.0).met.sum() == 180 == sample_of(failed, {}, warmup_s=2.0).total.sum()


def with_asked(run: lp.Run, **asked: Any) -> lp.Run:
    return with_meta(run, asked=run.meta["asked"] | {"max_in_flight": None} | asked)


def test_growth_is_that_of_ttft_from_due() -> None:
    run = with_asked(even(n=200))
    at_s = np.arange(200) / 10
    growing = with_column(run, ttft_due_handled_s=0.02 + 0.3 * at_s)
    assert sample_of(growing, {}).growths == pytest.approx(0.3)
    # of those that ended ok; of E2E where nothing is streamed
    some = np.where(at_s < 10, "ok", "timeout")
    assert sample_of(with_column(growing, outcome=some, ttft_due_handled_s=0.1 * at_s), {}).growths == pytest.approx(
        0.1
    )
    whole = with_column(run, ttft_due_handled_s=np.nan, e2e_due_handled_s=0.2 * at_s)
    assert sample_of(whole, {}).growths == pytest.approx(0.2)
    assert len(sample_of(with_column(whole, e2e_due_handled_s=np.nan), {}).growths) == 0


def test_a_rate_that_was_not_kept_is_the_clients_fault_unless_it_was_capped() -> None:
    run = even(n=200)
    at_s = np.arange(200) / 10
    missed = with_asked(with_column(run, lateness_s=0.023 * at_s))  # a client that does 9.77 of 10 requests/s
    assert not sample_of(missed, {}).delivered
    hiccup_s = np.where(at_s > 19, 2.0, 0.018 * at_s)
    assert sample_of(with_column(missed, lateness_s=hiccup_s), {}).delivered
    assert sample_of(with_column(missed, lateness_s=np.nan), {}).delivered
    assert sample_of(with_asked(missed, max_in_flight=5), {}).delivered
    assert not sample_of(with_meta(missed, ended="interrupted"), {}).complete


# what an answer says


def step(rate_per_s: float, decision: str) -> Step:
    return Step(rate_per_s, 2, 0.97, 0.95, 0.99, math.nan, -math.inf, math.inf, decision)


@pytest.mark.parametrize(
    ("steps", "rates", "parts"),
    [
        (
            [(10, MEETS), (40, FAILS), (20, MEETS)],
            (20, 40),
            ["at 20/s, and not at 40/s: with 95% confidence the limit"],
        ),
        ([(10, FAILS)], (math.nan, 10), ["at no rate that was tried: not at 10/s, with 95% confidence"]),
        (
            [(10, OPEN)],
            (math.nan, math.nan),
            ["could not be shown at 10/s, the lowest", "Undecided after all runs: 10/s"],
        ),
        ([(10, MEETS), (40, MEETS)], (40, math.nan), ["up to 40/s and beyond: nothing higher was tried"]),
        ([(10, MEETS), (40, OPEN), (20, MEETS)], (20, math.nan), ["no higher rate was shown to fail", "runs: 40/s"]),
        ([(10, MEETS), (40, UNMEASURED)], (10, math.nan), ["At 40/s the client did not keep the rate"]),
        ([(10, MEETS), (40, FAILS), (20, INTERRUPTED)], (10, 40), ["Interrupted at 20/s"]),
        ([(10, MEETS), (40, FAILS), (20, OPEN)], (10, 40), ["Undecided after all runs: 20/s"]),
    ],
)
def test_answers(steps: list[tuple[float, str]], rates: tuple[float, float], parts: list[str]) -> None:
    found = conclude([step(*s) for s in steps], {"ttft_s": 0.2, "tpot_s": 0.05}, Rule(0.95), 0.95)
    assert (found.rate_per_s, found.fails_per_s) == pytest.approx(rates, nan_ok=True)
    for part in parts:
        assert part in " ".join(found.sentences)
    assert "TTFT ≤ 200.0 ms and TPOT ≤ 50.0 ms" in found.sentences[0]
    for text in (repr(found), found._repr_html_()):
        assert "97.0% [95.0%, 99.0%]" in text.replace("<br>", " ") and "growth" not in text
    assert found.table["rate_per_s"].is_monotonic_increasing
    assert dataclasses.replace(found, confidence=0.5).confidence == 0.5


def test_what_is_refused(tmp_path: Path, example_server: lp.ReferenceServer) -> None:
    for match, changes in {
        "low_per_s must be a number above 0": {"low_per_s": 0},
        "high_per_s must be above low_per_s, 10; not 10": {"high_per_s": 10},
        "share must be between 0 and 1; not 1": {"share": 1},
        "confidence must be between": {"confidence": 1.5},
        "ttft_s must be a number above 0": {"ttft_s": -1},
        "within must be": {"within": 0},
        "growth must be": {"growth": 0},
        "duration_s must be": {"duration_s": 0},
        "warmup_s must be at least 0 and below duration_s": {"warmup_s": 30.0},
        "most_runs must be a whole": {"most_runs": 0},
        "seed must be": {"seed": -1},
        "arrivals is not an option": {"arrivals": lp.Poisson(1)},
        "client must be one of": {"client": "fast"},
    }.items():
        asked: dict[str, Any] = {"low_per_s": 10, "high_per_s": 20, "out": tmp_path / "new", "progress": False}
        with pytest.raises(lp.UsageError, match=match):
            find_saturation(example_server.url, **(asked | changes))
    assert list(tmp_path.iterdir()) == []
