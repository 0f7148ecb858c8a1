"""Jobs of a worker's loop: their order, services, wake-ups and vacations, on made-up stamps and on simulated queues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from llmprofile.errors import UsageError
from llmprofile.jobs import VACATION_S, Arrivals, Jobs, loop_jobs, make_jobs
from llmprofile.records import CYCLES, EVENTS, REQUESTS, Run, to_frame

US = 1000
NO_POLLS = np.zeros((0, 2), np.int64)


def jobs_of(arrival_us: Any, done_us: Any, polls_us: Any = NO_POLLS) -> Jobs:
    arrival_ns, done_ns = (np.asarray(a, np.int64) * US for a in (arrival_us, done_us))
    return make_jobs(0, arrival_ns, done_ns, np.zeros(len(done_ns), bool), np.asarray(polls_us, np.int64) * US)


def make_table(schema: pa.Schema, n: int, **columns: Any) -> pd.DataFrame:
    """A table of the schema with these columns, null elsewhere."""
    arrays = [pa.array(columns.get(f.name, [None] * n), f.type, from_pandas=True) for f in schema]
    return to_frame(pa.Table.from_arrays(arrays, schema=schema))


def make_run(requests: dict[str, Any], events: dict[str, Any], cycles: dict[str, Any], client: str) -> Run:
    tables = [
        make_table(schema, len(next(iter(columns.values()), [])), **columns)
        for schema, columns in ((REQUESTS, requests), (EVENTS, events), (CYCLES, cycles))
    ]
    return Run(None, {"asked": {"client": client}}, tables[0], {"events": tables[1], "cycles": tables[2]})


def test_services_and_waits_of_a_fifo_queue_are_what_it_was_made_of() -> None:
    rng = np.random.default_rng(1)
    gaps_ns, services_ns = rng.integers(1, 200 * US, 5000), rng.integers(1, 100 * US, 5000)
    arrival_ns, done_ns, free_ns = np.cumsum(gaps_ns), [], 0
    for arrival, service in zip(arrival_ns.tolist(), services_ns.tolist(), strict=True):
        free_ns = max(arrival, free_ns) + service
        done_ns.append(free_ns)
    mixed = rng.permutation(5000)  # the order in which they are given must not matter
    jobs = make_jobs(3, arrival_ns[mixed], np.array(done_ns)[mixed], np.zeros(5000, bool), NO_POLLS)
    assert jobs.service_s == pytest.approx(services_ns / 1e9)
    assert jobs.time_s == pytest.approx((np.array(done_ns) - arrival_ns) / 1e9)
    assert np.isnan(jobs.wakeup_s).all()
    assert (len(jobs), jobs.worker) == (5000, 3)


def test_work_is_counted_once_when_jobs_overtake_one_another() -> None:
    # the job of 0 is done last: the loop was busy from 0 on, whichever job it did first
    jobs = jobs_of([0, 5], [10, 6])
    assert (jobs.service_s * 1e6).tolist() == pytest.approx([6, 4])


def test_sleep_is_wakeup_and_not_service() -> None:
    # polls: asleep until 12, a quick one while busy, asleep until 130 where the next arrival came at 100
    jobs = jobs_of([10, 11, 100], [40, 50, 160], [[0, 12], [14, 15], [60, 130]])
    assert (jobs.service_s * 1e6).tolist() == pytest.approx([28, 10, 30])
    assert (jobs.wakeup_s * 1e6)[[0, 2]].tolist() == pytest.approx([2, 30])
    assert np.isnan(jobs.wakeup_s[1])


def test_a_job_that_comes_while_the_loop_is_awake_has_no_wakeup() -> None:
    jobs = jobs_of([30], [50], [[0, 20], [40, 42]])
    assert (jobs.service_s * 1e6).tolist() == pytest.approx([20])
    assert np.isnan(jobs.wakeup_s).all()


def test_a_poll_that_returned_after_the_job_was_done_was_not_its_wakeup() -> None:
    jobs = jobs_of([10], [20], [[5, 30]])
    assert (jobs.service_s * 1e6).tolist() == pytest.approx([10])


def test_vacations_are_marked_and_a_burst_is_none() -> None:
    arrival_us = np.arange(1000) * 100
    done_us = arrival_us + 20
    done_us[500] += 5000
    done_us[501:] = np.maximum(done_us[501:], done_us[500] + 20 * np.arange(1, 500))
    jobs = jobs_of(arrival_us, done_us)
    assert np.flatnonzero(jobs.is_vacation).tolist() == [500]
    assert jobs.service_s[500] > VACATION_S
    # a burst of 100 is read whole, at 30 µs each, before the first is handled
    burst = np.repeat(np.arange(50) * 10_000, 100)
    read_then_handled = burst + 3000 + np.tile(10 * np.arange(1, 101), 50)
    assert not jobs_of(burst, read_then_handled).is_vacation.any()


@pytest.mark.parametrize(("client", "done_us"), [("stamped", [20, 30]), ("conventional", [25, 35])])
def test_jobs_of_a_run_are_its_events_and_sends(client: str, done_us: list[int]) -> None:
    requests = {"request_id": [0, 1, 2], "worker": [0, 1, 0], "due_ns": [1 * US, 2 * US, 3 * US]}
    requests |= {"sent_ns": [5 * US, 6 * US, None], "sent_last_ns": [None, 7 * US, None]}
    events = {"request_id": [0, 0, 1, 1], "wire_ns": [10 * US, 12 * US, 13 * US, None]}
    events |= {"seen_ns": [20 * US, 30 * US, 40 * US, 50 * US], "handled_ns": [25 * US, 35 * US, 45 * US, 55 * US]}
    cycles = {"worker": [1], "poll_entered_ns": [8 * US], "poll_returned_ns": [15 * US]}
    first, second = loop_jobs(make_run(requests, events, cycles, client))
    assert (first.done_ns // US).tolist() == [5, *done_us]
    assert (first.arrival_ns // US).tolist() == [1, 10, 12]
    assert first.is_send.tolist() == [True, False, False]
    assert (first.unplaced, second.unplaced) == (0, 1)
    assert second.wakeup_s[1] == pytest.approx(2e-6)  # its own polls, not the other worker's
    assert np.isnan(first.wakeup_s).all()


def test_events_whose_packets_came_out_of_order_have_no_place() -> None:
    requests = {"request_id": [0, 1], "worker": [0, 0], "due_ns": [1, 2], "sent_ns": [5, 6], "reordered": [True, False]}
    events = {"request_id": [0, 0, 1], "wire_ns": [10, 12, 13], "seen_ns": [20, 30, 40]}
    run = make_run(requests, events, {"worker": []}, "stamped")
    [jobs] = loop_jobs(run)
    assert jobs.arrival_ns.tolist() == [1, 2, 13]
    assert jobs.unplaced == 2
    assert run.events["wire_ns"].tolist() == [10, 12, 13]  # the run itself is as it was


def test_jobs_within_a_time() -> None:
    jobs = jobs_of([0, 10, 20, 30], [1, 11, 21, 31]).between(10 * US, 30 * US)
    assert (jobs.arrival_ns // US).tolist() == [10, 20]
    assert len(jobs.service_s) == len(jobs.wakeup_s) == len(jobs.is_vacation) == 2


def test_without_stamps_there_are_no_jobs() -> None:
    requests = {"request_id": [0], "worker": [0], "due_ns": [1], "sent_ns": [2]}
    run = make_run(requests, {"request_id": [0], "seen_ns": [5]}, {"worker": []}, "stamped")
    with pytest.raises(UsageError, match="kernel stamps"):
        loop_jobs(run)


def test_batches_that_all_thin_to_nothing_leave_single_jobs() -> None:
    thinned = Arrivals(100.0, np.array([3, 2]), 1.0, 1e-4).at_rate(1e-7)
    assert thinned.sizes.tolist() == [1] and thinned.batch_rate_per_s == 1e-7
