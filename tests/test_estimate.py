"""What the model says without stamps, against stamps; and processes, against what simulated queues need."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile.clock import SLEEP_NS
from llmprofile.estimate import timer_wakeup_s
from llmprofile.records import Run
from test_fitting import mg1_load, simulated_run

TURN_NS, WAKEUP_NS = 1_000_000, 70_000


def looped(slept: bool, n: int = 400) -> Run:
    """Requests of one token whose arrival is known: amid turns of 1 ms that never sleep, or after sleeps.

    In a busy loop arrivals fall into a turn anywhere, in order of (k + ½)/n; a sleeping one wakes 70 µs after them.
    """
    at_ns = np.arange(n) * 10 * TURN_NS
    phase_ns = (np.arange(n) * 7919 % n + 0.5) / n * TURN_NS
    if slept:  # a poll a request, entered long before; the arrival wakes it
        entered, returned = at_ns + 10_000, at_ns + 5 * TURN_NS
        arrived = returned - WAKEUP_NS
    else:  # the poll of the turn before its own just missed it
        entered = np.arange(10 * n) * TURN_NS
        returned, arrived = entered + 3_000, entered[::10] - TURN_NS + phase_ns.astype(np.int64)
        at_ns = entered[::10]
    seen = (returned if slept else returned[::10]) + 20_000
    reads = np.ones(n, int) if slept else (np.arange(10 * n) % 10 == 0).astype(int)
    cycles = {"worker": 0, "poll_entered_ns": entered, "poll_returned_ns": returned, "reads": reads}
    return _run(at_ns, arrived, seen, np.arange(n) * (1 if slept else 10), pd.DataFrame(cycles))


def _run(at_ns: np.ndarray, arrived: np.ndarray, seen: np.ndarray, cycle: np.ndarray, cycles: pd.DataFrame) -> Run:
    n, begun = len(at_ns), at_ns - 5 * TURN_NS
    events = {"request_id": np.arange(n), "read": 1, "cycle": cycle, "wire_ns": arrived, "wire_lo_ns": arrived}
    events |= {"seen_ns": seen, "handled_ns": pd.array([pd.NA] * n, "Int64"), "tokens": 1, "bytes": 100}
    stamps = {"due_ns": begun + 1000, "begun_ns": begun, "sent_ns": begun, "sent_last_ns": begun}
    rows = {"request_id": np.arange(n), "worker": 0, "outcome": "ok", "output_tokens": 1, "lateness_s": 3e-5, **stamps}
    rows |= {
        f"{token}_{name}_ns": at for token in ("first", "last") for name, at in (("wire", arrived), ("seen", seen))
    }
    requests = pd.DataFrame(rows).assign(**dict.fromkeys(("bounded", "reordered"), pd.array([False] * n, "boolean")))
    for token in ("first", "last"):
        requests[f"{token}_wire_lo_ns"] = arrived
        requests[f"{token}_handled_ns"] = pd.array([pd.NA] * n, "Int64")
    for metric in ("ttft", "first_content", "ttft_due", "e2e", "e2e_due", "tpot", "ntpot"):
        for suffix, end in (("_s", arrived), ("_seen_s", seen), ("_handled_s", seen)):
            requests[metric + suffix] = np.nan if "handled" in suffix else (end - begun) / 1e9
    as_stored = {c: "Int64" for c in requests if c.endswith("_ns")}
    meta = {"asked": {"client": "stamped"}}
    return Run(None, meta, requests.astype(as_stored), {"events": pd.DataFrame(events), "cycles": cycles})


def unstamped(run: Run) -> Run:
    """The run as a machine without kernel stamps would have it."""
    nothing = pd.array([pd.NA] * len(run.events), "Int64")
    events = run.events.assign(wire_ns=nothing, wire_lo_ns=nothing)
    wire = [c for c in run.requests if "wire" in c]
    requests = run.requests.assign(**{c: pd.array([pd.NA] * len(run.requests), "Int64") for c in wire})
    for metric in ("ttft_s", "e2e_s", "tpot_s", "ntpot_s"):
        requests[metric] = np.nan
    return dataclasses.replace(run, requests=requests, _tables={"events": events, "cycles": run.cycles})


def test_a_busy_loop_is_estimated_within_the_error_of_a_mean_of_half_turns() -> None:
    run = looped(slept=False)
    measured = lp.separate_bias(run).frame.loc["ttft_s", "waiting_s"]
    estimated = lp.estimate_bias(unstamped(run)).frame.loc["ttft_s", "waiting_s"]
    # phases are evenly spread: their mean is half a turn, to a turn over n
    assert measured == pytest.approx((TURN_NS / 2 + 23_000) / 1e9, abs=TURN_NS / 400 / 1e9)
    assert estimated == pytest.approx(measured, abs=TURN_NS / 400 / 1e9)


def test_a_sleeping_loop_was_woken_by_what_it_found() -> None:
    run = looped(slept=True)
    estimated = lp.estimate_bias(unstamped(run)).frame.loc["ttft_s", "waiting_s"]
    # nothing was due while it slept, so its wake-up is unknown, which the notes say
    assert math.isnan(timer_wakeup_s(run))
    assert estimated == pytest.approx(20e-6, abs=1e-9)
    assert "unknown, taken as 0" in lp.estimate_bias(run).notes[0]
    # with timers that took 70 µs to wake it, all of the wait is found
    due = run.cycles["poll_returned_ns"].to_numpy() - WAKEUP_NS
    timed = dataclasses.replace(run, requests=run.requests.assign(due_ns=pd.array(due, "Int64")))
    assert timer_wakeup_s(timed) == pytest.approx(WAKEUP_NS / 1e9)
    measured = lp.separate_bias(run).frame.loc["ttft_s", "waiting_s"]
    assert lp.estimate_bias(unstamped(timed)).frame.loc["ttft_s", "waiting_s"] == pytest.approx(measured, abs=1e-9)


def test_stamps_are_not_looked_at() -> None:
    run = looped(slept=False)
    with_stamps, without = lp.estimate_bias(run), lp.estimate_bias(unstamped(run))
    pd.testing.assert_frame_equal(with_stamps.frame, without.frame)
    assert with_stamps.estimated and not lp.separate_bias(run).estimated
    assert "estimate" in repr(with_stamps).splitlines()[0]


def test_it_says_that_it_cannot_tell_when_first_tokens_share_their_reads() -> None:
    run = looped(slept=False)
    doubled = pd.concat([run.events, run.events.iloc[:5]]).sort_values("request_id", kind="stable", ignore_index=True)
    shared = dataclasses.replace(run, _tables={"events": doubled, "cycles": run.cycles})
    table = lp.estimate_bias(shared)
    assert table.frame["true_s"].isna().all() and table.frame["difference_s"].isna().all()
    assert "can't be told" in table.notes[0] and table.notes[0].startswith("1.2% of the first tokens")


def test_it_needs_a_record_of_the_loop() -> None:
    run = looped(slept=False)
    for missing in ("events", "cycles"):
        tables = {"events": run.events, "cycles": run.cycles} | {missing: run._table(missing, None).iloc[:0]}  # type: ignore[arg-type]
        with pytest.raises(lp.UsageError, match="turns of the client's loop"):
            lp.estimate_bias(dataclasses.replace(run, _tables=tables))


def test_an_estimate_of_a_real_run_leaves_the_clients_own_part_alone(example_run: Run) -> None:
    measured, estimated = lp.separate_bias(example_run), lp.estimate_bias(unstamped(example_run))
    for column in ("sending_s", "seen_s"):
        assert estimated.frame.loc["ttft_s", column] == pytest.approx(measured.frame.loc["ttft_s", column])
    if estimated.frame["true_s"].isna().all():  # a busy machine has first tokens share their reads
        assert "can't be told" in estimated.notes[0]
        return
    # no event arrives after it was seen, and none waits for longer than the turns since its request was sent
    assert 0 < estimated.frame.loc["ttft_s", "waiting_s"] < measured.frame.loc["ttft_s", "seen_s"]


@pytest.mark.parametrize("rho", [0.3, 0.8])
def test_processes_needed_are_the_fewest_whose_queue_keeps_the_budget(rho: float) -> None:
    fit = lp.fit_mg1(simulated_run([mg1_load(rho, 40_000, np.random.default_rng(1))]))
    tokens, mean_s = 9, fit.parameters.loc["pooled", "estimate"]["mean_service_s"]
    rate = fit.parameters.loc["pooled", "estimate"]["rate_per_s"] / (tokens + 1)
    budget_s = 1.2 * fit.mean_time_s(rate * (tokens + 1) / 3)
    found = lp.processes_needed(fit, rate, tokens, budget_s)
    assert found.needed is not None and found.needed <= 3
    assert found.mean_time_s[-1] <= budget_s < min([math.inf, *found.mean_time_s[:-1]])
    # Pollaczek–Khinchine for one of k queues
    k = found.needed
    second_s2 = mean_s**2 * (1 + fit.parameters.loc["pooled", "estimate"]["scv"])
    alone_s = rate * (tokens + 1) / k * second_s2 / (2 * (1 - rate * (tokens + 1) * mean_s / k))
    assert found.mean_time_s[-1] == pytest.approx(alone_s + fit._costs.event_mean_s, rel=1e-6)


def test_beyond_the_machine_and_beyond_any_number_of_processes() -> None:
    fit = lp.fit_mg1(simulated_run([mg1_load(0.5, 20_000, np.random.default_rng(2))]))
    mean_s = fit.parameters.loc["pooled", "estimate"]["mean_service_s"]
    many = lp.processes_needed(fit, 25 / mean_s / 10, 9, 2 * mean_s)
    assert many.needed is not None and many.needed > 40
    assert f"This machine has {many.cores} cores: use more machines" in str(many)
    assert many.mean_time_s[0] == math.inf  # one is far beyond its means
    none = lp.processes_needed(fit, 100.0, 9, mean_s / 2)
    assert none.needed is None and len(none.mean_time_s) == 64
    assert str(none).startswith("No number of processes") and str(none) in none._repr_html_()


@pytest.mark.parametrize(
    ("rate", "tokens", "budget", "match"),
    [(0, 9, 0.1, "rate_per_s"), (10, math.nan, 0.1, "output_tokens"), (10, 9, -1, "budget_s")],
)
def test_what_is_refused(rate: float, tokens: float, budget: float, match: str) -> None:
    fit = lp.fit_mg1(simulated_run([mg1_load(0.3, 4000, np.random.default_rng(1))]))
    with pytest.raises(lp.UsageError, match=match):
        lp.processes_needed(fit, rate, tokens, budget)


def test_a_poll_that_slept_is_told_from_one_that_did_not() -> None:
    """The threshold lies between what a poll costs and what a sleep takes at the least: waking."""
    assert 10_000 < SLEEP_NS < WAKEUP_NS
