"""The vectorised recursion held to the recursion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.errors import UsageError
from llmprofile.lindley import BLOCK, backlog, simulate

seeded = settings(derandomize=True, deadline=None)
Floats = Any


def waits_one_by_one(arrivals: Floats, services: Floats) -> Floats:
    waits = np.zeros(len(arrivals))
    for i in range(1, len(arrivals)):
        waits[i] = max(0.0, waits[i - 1] + services[i - 1] - (arrivals[i] - arrivals[i - 1]))
    return waits


jobs = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=60)


@given(jobs)
@seeded
def test_waits_are_those_of_the_recursion(gaps_and_services: list[tuple[int, int]]) -> None:
    gaps, services = (np.array([job[i] for job in gaps_and_services], float) for i in (0, 1))
    arrivals = np.cumsum(gaps)
    assert simulate(arrivals, services).tolist() == waits_one_by_one(arrivals, services).tolist()


@given(jobs, st.integers(0, 2**32))
@seeded
def test_more_work_never_shortens_a_wait(gaps_and_services: list[tuple[int, int]], seed: int) -> None:
    gaps, services = (np.array([job[i] for job in gaps_and_services], float) for i in (0, 1))
    more = services + np.random.default_rng(seed).integers(0, 5, len(services))
    waits = simulate(np.cumsum(gaps), services)
    assert (waits >= 0).all()
    assert (simulate(np.cumsum(gaps), more) >= waits).all()


def test_blocks_join_without_a_seam() -> None:
    rng = np.random.default_rng(0)
    n = 3 * BLOCK + 5
    arrivals, services = np.cumsum(rng.exponential(1.0, n)), rng.exponential(0.95, n)
    assert np.abs(simulate(arrivals, services) - waits_one_by_one(arrivals, services)).max() <= 1e-10
    for length in (BLOCK, BLOCK + 1, BLOCK + 2):
        assert np.abs(simulate(arrivals[:length], services[:length]) - simulate(arrivals, services)[:length]).max() == 0


def test_the_millionth_wait_is_as_exact_as_the_first() -> None:
    rng = np.random.default_rng(1)
    services = rng.exponential(0.3, 1_000)
    arrivals = np.cumsum(np.ceil(rng.exponential(1024.0, 1_000)) / 1024)  # whole 1024ths: differences are exact
    period = 4096.0
    many = (np.arange(2_000)[:, None] * period + arrivals).ravel()
    waits = simulate(many, np.tile(services, 2_000)).reshape(2_000, 1_000)
    assert arrivals[-1] + 100 < period
    assert np.abs(waits - waits[0]).max() <= 1e-11  # one sum over all loses a thousand times as much


def test_a_queue_without_work_never_waits_and_one_without_gaps_waits_for_all() -> None:
    assert simulate(np.arange(5.0), np.zeros(5)).tolist() == [0.0] * 5
    assert simulate(np.zeros(4), [1.0, 2.0, 3.0, 4.0]).tolist() == [0.0, 1.0, 3.0, 6.0]
    assert simulate([], []).tolist() == []
    assert simulate([7.0], [1.0]).tolist() == [0.0]


def test_the_arguments_are_left_as_they_were() -> None:
    arrivals, services = np.arange(4.0), np.full(4, 2.0)
    simulate(arrivals, services)
    assert arrivals.tolist() == [0, 1, 2, 3]
    assert services.tolist() == [2, 2, 2, 2]


def test_the_backlog_just_before_an_arrival_is_its_wait() -> None:
    rng = np.random.default_rng(2)
    arrivals, services = np.cumsum(rng.exponential(1.0, 5_000)), rng.exponential(0.8, 5_000)
    before = backlog(arrivals, services, np.nextafter(arrivals, 0))
    assert np.abs(before - simulate(arrivals, services)).max() <= 1e-9
    at = backlog(arrivals, services, arrivals)
    assert np.abs(at - before - services).max() <= 1e-9


def test_the_backlog_falls_by_one_a_second_and_stops_at_zero() -> None:
    shares = backlog([1.0, 1.0], [2.0, 0.5], np.array([[0.0, 1.0], [2.0, 9.0]]))
    assert shares.tolist() == [[0.0, 2.5], [1.5, 0.0]]
    assert backlog([], [], [1.0]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("arrivals", "services", "message"),
    [
        ([0.0, 1.0], [1.0], "of one length"),
        ([[0.0]], [[1.0]], "of one length"),
        ([1.0, 0.0], [1.0, 1.0], "ascending"),
        ([0.0, math.nan], [1.0, 1.0], "ascending"),
        ([0.0, math.inf], [1.0, 1.0], "ascending"),
        ([0.0, 1.0], [1.0, -1.0], "services_s must be finite"),
        ([0.0, 1.0], [1.0, math.nan], "services_s must be finite"),
    ],
)
def test_what_is_no_sequence_of_jobs_is_refused(arrivals: Any, services: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(arrivals, services)
    with pytest.raises(UsageError, match=message):
        backlog(arrivals, services, [0.0])
