"""Scenarios against closed forms and against simulations that share no code with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llmprofile.errors import UsageError
from llmprofile.lindley import backlog
from llmprofile.lindley import simulate as lindley_waits
from llmprofile.scenario import RUN_S, Scenario, look_at_queue, sample

Floats = Any

# values


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 0.99])
def test_exponential_services_make_an_mm1_queue(rho: float) -> None:
    view = look_at_queue(Scenario(rate_per_s=rho * 100, tokens=10, service_s=1e-3))
    assert view.mean_wait_s == pytest.approx(rho / (1 - rho) * 1e-3)
    assert view.longer == pytest.approx(rho * np.exp(-(1 - rho) * view.times_s / 1e-3), abs=1e-7)
    # read off 600 points, straight between them on a logarithmic scale
    assert view.p99_wait_s == pytest.approx(math.log(rho / 0.01) / (1 - rho) * 1e-3, rel=1e-4)
    assert view.reported_ttft_s == pytest.approx(0.05 + 1e-3 / (1 - rho))
    assert view.inflation == pytest.approx(1 + 0.02 / (1 - rho))
    assert view.grows_per_s == 0


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("scv", [0.0, 0.25, 3.0, 8.0])
def test_other_services_wait_as_pollaczek_and_khinchine_say(scv: float, processes: int) -> None:
    view = look_at_queue(Scenario(rate_per_s=80 * processes, tokens=10, service_s=1e-3, scv=scv, processes=processes))
    assert view.mean_wait_s == pytest.approx(0.8 * 1e-3 * (1 + scv) / 2 / 0.2)
    # the mean is the area under the curve, of which a tail is beyond it; 600 points, straight between them
    assert np.diff(view.times_s) @ (view.longer[1:] + view.longer[:-1]) / 2 == pytest.approx(view.mean_wait_s, rel=5e-3)
    assert view.scenario.utilisation == pytest.approx(0.8)


def test_bursts_of_constant_services_wait_for_one_another() -> None:
    view = look_at_queue(Scenario(rate_per_s=100, tokens=10, service_s=5e-4, scv=0.0, burst=20))
    assert view.mean_wait_s == pytest.approx(19 / 2 * 5e-4)
    assert view.mean_wait_s == pytest.approx(view.scenario.behind_s)
    # 0, 1, … 19 services, equally likely
    expected = 1 - (np.floor(view.times_s / 5e-4 + 1e-6) + 1).clip(max=20) / 20
    assert view.longer == pytest.approx(expected, abs=1e-6)
    assert view.p99_wait_s == pytest.approx(19 * 5e-4, abs=view.times_s[1])


@pytest.mark.parametrize(("burst", "scv", "processes"), [(1, 0.0, 1), (1, 4.0, 3), (8, 1.0, 1), (40, 2.0, 3)])
def test_the_closed_form_is_that_of_a_plain_simulation(burst: int, scv: float, processes: int) -> None:
    scenario = Scenario(rate_per_s=70 * processes, tokens=10, service_s=1e-3, scv=scv, burst=burst, processes=processes)
    view, rng = look_at_queue(scenario), np.random.default_rng(5)
    means = [simulated_waits(scenario, 200.0, rng)[1000:].mean() for _ in range(10)]
    error_s = np.std(means, ddof=1) / math.sqrt(10)
    assert abs(np.mean(means) - view.mean_wait_s) < 4 * error_s + 1e-3 * view.mean_wait_s


def simulated_waits(scenario: Scenario, seconds: float, rng: np.random.Generator) -> Floats:
    """Waits in one process, from an empty queue on, job by job."""
    if scenario.burst == 1:
        gaps = rng.exponential(scenario.processes / scenario.tokens_per_s, round(3 * seconds * scenario.tokens_per_s))
        arrivals = np.cumsum(gaps)
        arrivals = arrivals[arrivals < seconds]
    else:
        times = np.arange(0.0, seconds, scenario.period_s)
        streams = rng.integers(0, scenario.processes, (len(times), scenario.burst)) == 0
        arrivals = np.repeat(times, streams.sum(axis=1))
    n, scv = len(arrivals), scenario.scv
    services = rng.gamma(1 / scv, scenario.service_s * scv, n) if scv else np.full(n, scenario.service_s)
    return lindley_waits(arrivals, services)


# queues that grow


@pytest.mark.parametrize(
    ("rho", "burst", "scv", "processes"),
    [(1.5, 1, 1.0, 1), (1.02, 1, 4.0, 1), (1.0, 1, 1.0, 2), (1.02, 10, 1.0, 2), (1.0, 10, 1.0, 1), (1.2, 30, 0.0, 3)],
)
def test_a_growing_queue_reports_what_a_simulated_run_does(rho: float, burst: int, scv: float, processes: int) -> None:
    scenario = Scenario(
        rate_per_s=rho * 20 * processes, tokens=10, service_s=5e-3, scv=scv, burst=burst, processes=processes
    )
    view, rng = look_at_queue(scenario), np.random.default_rng(6)
    assert not scenario.keeps_up
    assert view.mean_wait_s == view.p99_wait_s == math.inf
    assert view.grows_per_s == pytest.approx((rho - 1) * 200 * processes, abs=1e-9)
    means = [simulated_waits(scenario, RUN_S, rng).mean() for _ in range(60)]
    error_s = np.std(means, ddof=1) / math.sqrt(60)
    # a walk in steps lies below a Brownian motion by about half a service
    assert abs(np.mean(means) - (view.reported_ttft_s - 0.05 - 5e-3)) < 4 * error_s + 5e-3


def test_bursts_that_fit_exactly_never_pile_up() -> None:
    view = look_at_queue(Scenario(rate_per_s=100, tokens=10, service_s=1e-3, scv=0.0, burst=10))
    assert view.grows_per_s == 0
    assert view.reported_ttft_s == pytest.approx(0.05 + 1e-3 + 4.5e-3)
    assert "yet without bound" in view.sentences[0]


def test_rho_is_never_said_to_be_1_below_it() -> None:
    view = look_at_queue(Scenario(rate_per_s=999.999, tokens=10, service_s=1e-4))
    assert view.sentences[0].startswith("ρ = 0.9999: a token waits")


def test_the_processes_that_would_do_keep_up() -> None:
    for rate_per_s in (199.0, 200.0, 201.0, 1000.0):
        view = look_at_queue(Scenario(rate_per_s=rate_per_s, tokens=10, service_s=1e-3))
        needed = int(view.sentences[-1].split()[0])
        assert Scenario(rate_per_s=rate_per_s, tokens=10, service_s=1e-3, processes=needed).keeps_up
        assert not Scenario(rate_per_s=rate_per_s, tokens=10, service_s=1e-3, processes=needed - 1).keeps_up


# the sample path

PATHS = [
    Scenario(),
    Scenario(scv=0.0),
    Scenario(burst=32),
    Scenario(burst=32, processes=3, scv=4.0),
    Scenario(rate_per_s=500),
    Scenario(rate_per_s=500, burst=64),
]


@pytest.mark.parametrize("scenario", PATHS)
def test_a_path_is_a_queue(scenario: Scenario) -> None:
    path = sample(scenario)
    assert np.all(np.diff(path.arrivals_s) >= 0)
    assert 0 <= path.arrivals_s[0] <= path.arrivals_s[-1] <= path.length_s
    assert len(path.arrivals_s) > 15
    # one service at a time, in order, and none pauses while another could go on
    assert np.all(path.starts_s[1:] >= path.ends_s[:-1] - 1e-12)
    assert np.all(np.diff(path.times_s) >= -1e-12)
    assert path.times_s[-1] == pytest.approx(path.length_s)
    # what an arrival finds unfinished is what it waits
    served = {round(s, 9) for s in path.starts_s}
    for at_s in np.unique(path.arrivals_s):
        found_s = path.work_s[np.flatnonzero(path.times_s >= at_s - 1e-12)[0]]
        if at_s + found_s < path.length_s:
            assert round(at_s + found_s, 9) in served or min(abs(path.starts_s - at_s - found_s)) < 1e-8


def test_the_work_between_corners_is_that_of_the_backlog() -> None:
    path = sample(Scenario(rate_per_s=500))  # from its first token on: all that were served are known
    services_s = path.ends_s - path.starts_s
    arrivals_s = path.arrivals_s[: len(services_s)]
    at_s = np.linspace(0.0, arrivals_s[-1], 997, endpoint=False)
    expected_s = backlog(arrivals_s, services_s, at_s)
    assert np.interp(at_s, path.times_s, path.work_s) == pytest.approx(expected_s, abs=1e-9)


def test_a_move_shows_what_it_changes_and_no_other_luck() -> None:
    one, other = sample(Scenario(rate_per_s=100)), sample(Scenario(rate_per_s=200))
    assert other.arrivals_s == pytest.approx(one.arrivals_s / 2)
    slow, quick = sample(Scenario(service_s=4e-5)), sample(Scenario(service_s=2e-5))
    assert slow.arrivals_s.tolist() == quick.arrivals_s.tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_per_s": 0},
        {"tokens": 1.5},
        {"service_s": math.nan},
        {"scv": -1},
        {"burst": 0},
        {"processes": 0},
        {"ttft_s": -1},
    ],
)
def test_what_is_no_scenario(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))} must be"):
        Scenario(**wrong)
