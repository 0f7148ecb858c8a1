"""Windows of runs whose stamps are known: which rows stay, and which tokens count."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile.records import Run
from llmprofile.windows import window
from test_metrics import MS, make_run, stamp_columns
from test_trust import even, with_column, with_meta

# Requests are due and sent every 100 ms; tokens come 20, 30, 40 and 50 ms later.
# From 335 ms on: request 3 overlaps the warm-up with its last two tokens. Until 3325 ms of 3900: request 33 is the
# last, and three of its tokens come later.
CUT = {"warmup_s": 0.335, "cooldown_s": 0.575}
SPAN_S = 3.9 - 0.335 - 0.575
OWN = range(4, 34)
TOKENS = 2 + 4 * 29 + 1


def forty(**changes: Any) -> Run:
    return even(n=40, client="stamped", **changes)


def figures(run: Run) -> pd.DataFrame:
    return pd.DataFrame(run.meta["summary"]).set_index("metric")


def test_rows_are_those_of_the_requests_due_in_the_window() -> None:
    run = forty()
    cut = window(run, **CUT)
    assert cut.requests["request_id"].tolist() == list(OWN)
    pd.testing.assert_frame_equal(cut.requests, run.requests.iloc[4:34].reset_index(drop=True))
    # with all of their events, wherever these came
    assert cut.events.groupby("request_id").size().to_dict() == dict.fromkeys(OWN, 4)
    assert cut.meta["outcomes"] == {"ok": 30}
    assert figures(cut)["n"].to_dict() | {"connect_s": 0} == dict.fromkeys(LABELLED, 30) | {"itl": 90, "connect_s": 0}
    assert cut.folder is None


LABELLED = ["ttft_s", "first_content_s", "ttft_due_s", "e2e_s", "e2e_due_s", "tpot_s", "ntpot_s", "itl", "lateness_s"]


def test_later_tokens_of_a_request_that_overlaps_the_warm_up_count_for_throughput_alone() -> None:
    run = forty()
    cut = window(run, **CUT)
    assert cut.meta["rates"]["tokens_per_s"] == pytest.approx(TOKENS / SPAN_S)
    # its TTFT, and all else of it, do not: a thousand seconds would show
    slow = dict.fromkeys(("ttft_s", "e2e_s", "tpot_s", "ntpot_s", "lateness_s"), 1000.0)
    for k in (3, 34):
        others = window(
            with_column(run, **{c: run.requests[c].where(run.requests["request_id"] != k, v) for c, v in slow.items()}),
            **CUT,
        )
        assert others.meta["summary"] == cut.meta["summary"]
    # and had they come earlier, the window would have two fewer
    early_ns = run.events["wire_ns"] - 100 * MS * (run.events["request_id"] == 3)
    early = dataclasses.replace(run, _tables={"events": run.events.assign(wire_ns=early_ns)})
    assert window(early, **CUT).meta["rates"]["tokens_per_s"] == pytest.approx((TOKENS - 2) / SPAN_S)


def test_a_request_of_the_window_that_ends_after_it_counts_in_full() -> None:
    run = forty()
    late = with_column(run, e2e_s=run.requests["e2e_s"].where(run.requests["request_id"] != 33, 30.05))
    mean_s = figures(window(late, **CUT)).loc["e2e_s", "mean"]
    assert mean_s == pytest.approx((29 * 0.05 + 30.05) / 30)


def test_tokens_of_failed_requests_do_not_count() -> None:
    run = forty()
    outcome = run.requests["outcome"].where(~run.requests["request_id"].isin([3, 10]), "truncated")
    cut = window(with_column(run, outcome=outcome), **CUT)
    assert cut.meta["outcomes"] == {"ok": 29, "truncated": 1}
    assert cut.meta["rates"]["tokens_per_s"] == pytest.approx((TOKENS - 2 - 4) / SPAN_S)


def test_usage_that_counts_more_tokens_than_events_shares_them_out() -> None:
    run = forty()
    tokens = run.requests["output_tokens"].where(run.requests["request_id"] != 3, 10)
    cut = window(with_column(run, output_tokens=tokens), **CUT)
    assert cut.meta["rates"]["tokens_per_s"] == pytest.approx((TOKENS - 2 + 10 / 2) / SPAN_S)


def test_events_count_one_token_each_where_the_number_of_tokens_is_not_known() -> None:
    run = forty()
    cut = window(with_column(run, output_tokens=run.requests["output_tokens"].where(run.requests.index != 3)), **CUT)
    assert cut.meta["rates"]["tokens_per_s"] == pytest.approx(TOKENS / SPAN_S)


def test_tokens_of_an_answer_that_is_no_stream_come_with_its_end() -> None:
    run = forty()
    no_stream = dataclasses.replace(run, _tables={"events": run.events.iloc[:0]})
    # the last byte of request 3 comes at 350 ms, that of request 33 at 3350
    assert window(no_stream, **CUT).meta["rates"]["tokens_per_s"] == pytest.approx(4 * 30 / SPAN_S)


def test_tokens_without_a_stamp_come_when_they_were_seen() -> None:
    run = forty()
    seen = run.events["wire_ns"] + 7 * MS  # 340 and 350 stay inside, 330 comes in; 3320 goes out
    unstamped = run.events.assign(wire_ns=pd.array([None] * 160, "Int64"), seen_ns=seen)
    cut = window(dataclasses.replace(run, _tables={"events": unstamped}), **CUT)
    assert cut.meta["rates"]["tokens_per_s"] == pytest.approx((3 + 4 * 29) / SPAN_S)


def test_rates_are_those_of_the_windows_requests() -> None:
    due_ns = 10**12 + np.concatenate([np.arange(20) * 100, 2000 + np.arange(20) * 50]) * MS
    stamps = {f"{name}_ns": due_ns for name in ("due", "begun", "sent", "sent_last")}
    for clock in ("wire", "seen", "handled"):
        stamps |= {
            f"{t}_{clock}_ns": due_ns + after * MS for t, after in (("first", 20), ("content", 20), ("last", 50))
        }
    run = forty(**stamps)
    slow, fast = window(run, cooldown_s=0.96), window(run, warmup_s=1.99)
    for cut, n, per_s in ((slow, 20, 10), (fast, 20, 20)):
        assert len(cut.requests) == n
        assert cut.meta["rates"]["drawn_per_s"] == pytest.approx(per_s)
        assert cut.meta["rates"]["achieved_per_s"] == pytest.approx(per_s)
    assert window(with_meta(run, rates={"drawn_per_s": None}), warmup_s=1.0).meta["rates"]["drawn_per_s"] is None


def test_bounds_belong_to_the_window() -> None:
    run = forty()
    assert window(run).requests["request_id"].tolist() == list(range(40))
    assert window(run, warmup_s=0.4, cooldown_s=0.5).requests["request_id"].tolist() == list(range(4, 35))
    assert window(run, warmup_s=3.9).requests["request_id"].tolist() == [39]
    assert window(run, warmup_s=3.9).meta["rates"]["tokens_per_s"] is None


def test_every_outcome_of_a_request_due_in_the_window_is_counted() -> None:
    run = forty()
    rows = run.requests.copy()
    rows.loc[[2, 5], "outcome"] = "lost"
    rows.loc[[6, 39], "outcome"] = "unsent"
    rows.loc[[6, 39], "sent_ns"] = pd.NA
    rows.loc[[7, 8], "due_ns"] = pd.NA  # never due, as in a closed loop that was stopped
    rows.loc[[7, 8], "begun_ns"] = pd.NA
    cut = window(dataclasses.replace(run, requests=rows), **CUT)
    assert cut.meta["outcomes"] == {"ok": 26, "unsent": 1, "lost": 1}
    assert cut.meta["lost_requests"] == 1


def test_due_is_begun_where_it_is_not_known() -> None:
    run = forty()
    due = pd.array([None] * 40, "Int64")
    assert window(with_column(run, due_ns=due), **CUT).requests["request_id"].tolist() == list(OWN)


def test_verdict_and_summary_are_of_the_window() -> None:
    run = forty()
    late_s = np.where(np.arange(40) == 2, 5.0, 0.0)
    whole = with_column(run, lateness_s=late_s)
    assert lp.verdict(whole).word == "invalid"
    cut = window(whole, **CUT)
    assert cut.meta["verdict"]["word"] == "trustworthy"
    assert lp.verdict(cut).as_dict() == cut.meta["verdict"]
    assert cut.meta["window"] == {**CUT, "from_ns": 10**12 + 338 * MS, "until_ns": 10**12 + 3328 * MS}
    assert "30" in repr(with_meta(cut, run_id="r", ended="complete"))


def test_a_real_run_is_cut_and_left_as_it_was(example_run: Run) -> None:
    before = example_run.meta["rates"].copy(), len(example_run.requests)
    cut = window(example_run, warmup_s=0.3, cooldown_s=0.2)
    due_s = (example_run.requests["due_ns"] - example_run.requests["due_ns"].min()) / 1e9
    assert len(cut.requests) == int(((due_s >= 0.3) & (due_s <= due_s.max() - 0.2)).sum())
    assert (example_run.meta["rates"], len(example_run.requests)) == before
    assert "window" not in example_run.meta
    # ten tokens a request at 200/s
    assert cut.meta["rates"]["tokens_per_s"] == pytest.approx(10 * cut.meta["rates"]["drawn_per_s"], rel=0.15)
    assert repr(cut) and cut._repr_html_()


def test_what_cannot_be_cut() -> None:
    run = forty()
    for name in CUT:
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(lp.UsageError, match=f"{name} must be a finite number of at least 0"):
                window(run, **{name: bad})
    with pytest.raises(lp.UsageError, match="the load lasted 3.90 s; cut less"):
        window(run, warmup_s=2.0, cooldown_s=2.0)
    nothing = make_run(12)
    empty = dataclasses.replace(nothing, requests=nothing.requests.iloc[:0])
    with pytest.raises(lp.UsageError, match="was ever due"):
        window(empty)
    assert stamp_columns(1)["due_ns"][0] == 10**12
