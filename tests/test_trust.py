"""Verdicts of runs whose faults are known, because they were made."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile import trust
from llmprofile.latency import CLOCKS
from llmprofile.records import Run
from test_metrics import MS, UNSTAMPED, make_run, stamp_columns


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


def even(n: int = 200, client: str = "conventional", **changes: Any) -> Run:
    """A run on whose clocks everything happens at once, 10 ms a token: it is off by nothing."""
    stamps = stamp_columns(n)
    wire = {f"{t}_{c}_ns": stamps[f"{t}_wire_ns"] for t in ("first", "content", "last") for c in CLOCKS}
    sent = dict.fromkeys(("due_ns", "begun_ns"), stamps["sent_ns"])
    run = make_run(n, client, **({"bounded": np.zeros(n, bool), **sent, **wire} | changes))
    asked = {"client": client, "rate_per_s": 10.0, "processes": 1}
    meta = {"lost_workers": 0, "lost_requests": 0, "reads": 4 * n, "unstamped_reads": 0, "clock_steps": 0}
    return with_meta(run, asked=asked, ended="complete", rates={"drawn_per_s": 10.0, "achieved_per_s": 10.0}, **meta)


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


@pytest.mark.parametrize(
    ("factor", "word"), [(0.981, "trustworthy"), (0.979, "invalid"), (1.019, "trustworthy"), (1.021, "invalid")]
)
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


def columns_of(metric: str, true_s: Any, bias_s: Any, clock: str = "handled") -> dict[str, Any]:
    return {f"{metric}_s": true_s, f"{metric}_{clock}_s": true_s + bias_s}


# half a millisecond or 1 %, and a twentieth of one or 1 %, whichever is larger
LIMITS = [
    *((metric, 0.02, 0.0005) for metric in ("ttft", "e2e")),
    *((metric, 0.2, 0.002) for metric in ("ttft", "e2e")),
    *((metric, 0.002, 0.00005) for metric in ("tpot", "ntpot")),
    *((metric, 0.02, 0.0002) for metric in ("tpot", "ntpot")),
]


@pytest.mark.parametrize(("metric", "true_s", "limit_s"), LIMITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_bias_of_the_mean(metric: str, true_s: float, limit_s: float, sign: int) -> None:
    within = with_column(even(), **columns_of(metric, true_s, sign * 0.98 * limit_s))
    assert lp.verdict(within).word == "trustworthy"
    verdict = lp.verdict(with_column(even(), **columns_of(metric, true_s, sign * 1.02 * limit_s)))
    assert (verdict.word, verdict.clock) == ("biased", "handled")
    assert verdict.sentences[0].startswith(f"Mean {metric.upper()} on the handled clock is off by ")
    assert len(verdict.sentences) == 1


@pytest.mark.parametrize(("metric", "true_s", "limit_s"), LIMITS)
def test_bias_of_the_p99_alone(metric: str, true_s: float, limit_s: float) -> None:
    few = np.arange(200) < 4  # 2 % of the requests: the mean is off by a fiftieth of it
    within = with_column(even(), **columns_of(metric, true_s, few * 0.98 * limit_s))
    assert lp.verdict(within).word == "trustworthy"
    verdict = lp.verdict(with_column(even(), **columns_of(metric, true_s, few * 1.02 * limit_s)))
    assert verdict.word == "biased"
    assert verdict.sentences[0].startswith(f"p99 of {metric.upper()} on the handled clock is off by ")


@pytest.mark.parametrize(("late_ns", "word"), [(98_000, "trustworthy"), (102_000, "biased")])
def test_bias_of_the_p99_of_itl(late_ns: int, word: str) -> None:
    # a second token that is handled late makes a gap longer and the next shorter: the mean stays. 1 % of 10 ms
    run = even()
    run.events["handled_ns"] += np.tile([0, late_ns, 0, 0], 200)
    verdict = lp.verdict(run)
    assert verdict.word == word
    assert word == "trustworthy" or verdict.sentences[0].startswith("p99 of ITL on the handled clock is off by 0.10 ms")


@pytest.mark.parametrize(("late_ns", "word"), [(290_000, "trustworthy"), (310_000, "biased")])
def test_bias_of_the_mean_of_itl(late_ns: int, word: str) -> None:
    run = even(n=33)  # 99 gaps have no p99; the last token of three gaps is late: a third of it in the mean
    run.events["handled_ns"] += np.tile([0, 0, 0, late_ns], 33)
    assert lp.verdict(run).word == word


def test_thresholds_are_arguments() -> None:
    run = with_column(even(), **columns_of("ttft", 0.02, 0.001), **columns_of("tpot", 0.002, 0.0001))
    assert lp.verdict(run).word == "biased"
    assert lp.verdict(run, bias_s=0.002).sentences[0].startswith("Mean TPOT")
    assert lp.verdict(run, bias_token_s=0.002).sentences[0].startswith("Mean TTFT")
    assert lp.verdict(run, bias_s=0.002, bias_token_s=0.002).word == "trustworthy"
    assert lp.verdict(run, bias_share=0.06).word == "trustworthy"
    late = with_column(even(), lateness_s=0.01)
    assert lp.verdict(late).word == "invalid"
    assert lp.verdict(late, lateness_share=0.25).word == "trustworthy"  # of 50 ms


def test_a_bias_is_said_with_its_size_and_a_remedy() -> None:
    run = with_column(even(), **columns_of("ttft", 0.0625, 0.03125))
    assert lp.verdict(run).sentences == (
        "Mean TTFT on the handled clock is off by 31.2 ms (+50.0% of the true 62.5 ms), its p99 by 31.2 ms (+50.0% of "
        "the true 62.5 ms); read the wire clock, or use the stamped client or more processes.",
    )
    stamped = with_column(even(client="stamped"), **columns_of("ttft", 0.0625, 0.03125, "seen"))
    assert "read the wire clock, or use more processes." in str(lp.verdict(stamped, "seen"))


def test_the_worst_metric_comes_first_and_after_three_they_are_counted() -> None:
    off = {"ttft": 0.002, "e2e": 0.003, "tpot": 0.0005, "ntpot": 0.001}  # 4, 6, 10, 20 times what is allowed
    columns: dict[str, Any] = {}
    for metric, bias_s in off.items():
        columns |= columns_of(metric, 0.001, bias_s)
    sentences = lp.verdict(with_column(even(), **columns)).sentences
    assert [s.split(" on ")[0] for s in sentences[:3]] == ["Mean NTPOT", "Mean TPOT", "Mean E2E"]
    assert sentences[3:] == ("And 1 more: TTFT.",)
    assert [s.count("more processes") for s in sentences] == [1, 0, 0, 0]


def test_what_the_clients_own_clock_would_have_said_is_a_note() -> None:
    run = even(client="stamped")
    assert len(lp.verdict(run).sentences) == 1
    verdict = lp.verdict(with_column(run, **columns_of("ttft", 0.01, 0.002, "seen")))
    assert verdict.word == "trustworthy"
    assert verdict.sentences[1:] == ("Note: this client's own clock would have put mean TTFT off by 2.00 ms.",)
    few = np.arange(200) < 4
    both = columns_of("ttft", 0.01, few * 0.002, "seen") | columns_of("tpot", 0.001, 0.0001, "seen")
    assert lp.verdict(with_column(run, **both)).sentences[1:] == (
        "Note: this client's own clock would have put p99 of TTFT off by 2.00 ms, and 1 more metric.",
    )
    # a conventional run that is read on the wire: its own clock is the handled one
    conventional = with_column(even(), **columns_of("ttft", 0.01, 0.002))
    assert "mean TTFT off by 2.00 ms" in lp.verdict(conventional, "wire").sentences[1]


def test_a_bias_that_is_not_known_is_not_taken_for_none() -> None:
    unstamped = {name: np.full(200, at_ns[0]) for name, at_ns in UNSTAMPED.items()}
    for client in ("conventional", "stamped"):
        verdict = lp.verdict(even(client=client, **unstamped))
        assert verdict.word == "biased"
        assert verdict.sentences == ("The kernel's stamps are missing, so the client's bias is unknown.",)
    handled = {f"{token}_handled_ns": unstamped[f"{token}_wire_ns"] for token in ("first", "content", "last")}
    assert "has no handled clock" in str(lp.verdict(even(client="stamped", **handled), "handled"))
    assert lp.verdict(even(n=99)).sentences[-1] == "Note: a p99 is judged from 100 requests on."
    assert "Note" not in str(lp.verdict(even(n=100)))


@pytest.mark.parametrize(("unstamped", "word"), [(8, "trustworthy"), (9, "biased")])
def test_a_bias_that_is_known_of_too_few_reads(unstamped: int, word: str) -> None:
    assert lp.verdict(with_meta(even(), unstamped_reads=unstamped)).word == word


@pytest.mark.parametrize(
    ("bounded", "word", "wire"),
    [(2, "trustworthy", "trustworthy"), (3, "biased", "biased"), (20, "biased", "biased"), (21, "biased", "invalid")],
)
def test_bounded_first_tokens_on_either_clock(bounded: int, word: str, wire: str) -> None:
    few = np.arange(200) < bounded
    run = even(bounded=few, first_wire_lo_ns=stamp_columns(200)["first_wire_ns"] - 5 * MS)
    verdict = lp.verdict(run)
    assert verdict.word == word
    assert word == "trustworthy" or "the bias of their TTFT may be up to 5.00 ms more" in str(verdict)
    assert lp.verdict(run, "wire").word == wire
    # for whatever else a run is invalid, this is said too
    invalid = lp.verdict(with_meta(run, lost_workers=1), "wire")
    assert invalid.word == "invalid"
    assert ("bracket" in str(invalid)) == (wire != "trustworthy")


@pytest.mark.parametrize(
    ("p99_s", "e2e_s", "kept"), [(0.0049, 0.2, True), (0.0051, 0.2, False), (0.0099, 1.0, True), (0.0101, 1.0, False)]
)
def test_lateness_from_both_sides(p99_s: float, e2e_s: float, kept: bool) -> None:
    late_s = np.where(np.arange(200) < 4, p99_s, 0.0)
    run = with_column(even(), lateness_s=late_s, e2e_s=e2e_s, e2e_seen_s=e2e_s, e2e_handled_s=e2e_s)
    assert (lp.verdict(run).word == "trustworthy") == kept


def test_no_request_succeeded_and_html_is_escaped(good: Run) -> None:
    verdict = lp.verdict(with_column(good, outcome="http_error"))
    assert verdict.word == "invalid" and "No request succeeded" in str(verdict)
    html = dataclasses.replace(verdict, sentences=("<script>",))._repr_html_()
    assert "<script>" not in html
    with pytest.raises(lp.UsageError, match="clock must be one of"):
        lp.verdict(good, "sundial")


def queueing(growth: float, n: int = 1200, **asked: Any) -> Run:
    """Ten a second for two minutes, read on the wire; each waits this share of its time for those before it."""
    run = even(n, "stamped")
    waited_ns = np.rint(growth * np.arange(n) * 100 * MS).astype(np.int64)
    later = [name for name in run.requests if name.startswith(("first_", "last_", "eof"))]
    shifted = {c: run.requests[c] + waited_ns for c in later if str(run.requests[c].dtype) == "Int64"}
    shifted |= {c: run.requests[c] + waited_ns / 1e9 for c in ("ttft_s", "ttft_seen_s", "e2e_s", "e2e_seen_s")}
    return with_meta(with_column(run, **shifted), asked={**run.meta["asked"], **asked})


def test_a_queue_that_grows_is_said_and_no_fault_of_the_measurement() -> None:
    assert len(lp.verdict(queueing(0.0)).sentences) == 1
    verdict = lp.verdict(queueing(0.2))  # at the end of two minutes a wait of 24 s
    assert verdict.word == "trustworthy"
    (note,) = verdict.sentences[1:]
    assert note.startswith("Note: its means depend on how long it lasted. Never stationary: TTFT went from ")
    # what was asked to change is no finding
    for arrivals in ("Ramp(1, 20, 120.0)", "Stages(stages=...)", "Trace('a.csv', speed=1)"):
        assert len(lp.verdict(queueing(0.2, arrivals=arrivals)).sentences) == 1
    assert len(lp.verdict(queueing(0.2, arrivals="Poisson(rate_per_s=10.0)")).sentences) == 2


@pytest.mark.parametrize(("cpu_s", "starved"), [(0.13, True), (0.15, False)])
def test_a_client_without_a_processor_says_so(cpu_s: float, starved: bool) -> None:
    run = with_meta(even(client="stamped"), workers=[{"worker": 0, "cpu_s": cpu_s}])
    # 100 turns of 2 ms of work, 8 ms of sleep between them: 0.2 s at work; before the load it took 0.5 s to get ready
    returned_ns = int(run.requests["begun_ns"].min()) + np.array([-600, -20, *range(10, 1020, 10)]) * MS
    entered_ns = returned_ns - np.array([1, 80, *[8] * 101]) * MS
    cycles = pd.DataFrame({"worker": 0, "poll_entered_ns": entered_ns, "poll_returned_ns": returned_ns})
    run = dataclasses.replace(run, _tables={"events": run.events, "cycles": cycles})
    said = [s for s in lp.verdict(run).sentences if "at work for 200.0 ms and had a processor for 130.0 ms" in s]
    assert len(said) == starved


def test_reordered_packets_are_a_note() -> None:
    reordered = np.arange(200) == 7
    sentences = lp.verdict(with_column(even(client="stamped"), reordered=reordered)).sentences
    assert sum(s.startswith("Note: 1 request saw packets reordered") for s in sentences) == 1


def test_the_remedy_is_worked_out_from_the_beginning_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = even()
    assert trust._beginning(run) is run
    monkeypatch.setattr(trust, "MOST_FITTED", 301)
    part = trust._beginning(run)
    assert len(part.events) in range(298, 302)  # two of different requests may come at the same time
    until_ns = part.events["wire_ns"].max()
    assert len(part.events) == (run.events["wire_ns"] <= until_ns).sum()
    assert part.requests["sent_ns"].max() <= until_ns < run.requests["sent_ns"][len(part.requests)]
