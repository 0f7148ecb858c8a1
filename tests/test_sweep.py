"""Sweeps held to latencies made by formula and by simulated queues, and to what they must not claim."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llmprofile.errors import UsageError
from llmprofile.sweep import SweepFit, client_time_s, fit_sweep

SERVICE_S, JOBS = 50e-6, 50
RATES = (100.0, 200.0, 300.0, 360.0)  # of requests; one process is at ρ = 0.25 … 0.9
Floats = Any


def growing(rates: Floats) -> Floats:
    """A server that gets slower with the rate, as one that queues by itself does."""
    return 0.05 + 1e-7 * rates**2


def points(
    rates: tuple[float, ...] = RATES, processes: tuple[int, ...] = (1, 2), scv: float = 1.0, server: Any = growing
) -> tuple[Floats, Floats, Floats]:
    rate_per_s, k = np.tile(rates, len(processes)), np.repeat(processes, len(rates)).astype(float)
    client_s = client_time_s(rate_per_s * JOBS / k, np.array(SERVICE_S), np.array(scv))
    return rate_per_s, server(rate_per_s) + client_s, k


def noisy(seed: int, noise: float, **options: Any) -> SweepFit:
    rate_per_s, latency_s, processes = points(**options)
    latency_s = latency_s * (1 + noise * np.random.default_rng(seed).standard_normal(len(latency_s)))
    return fit_sweep(rate_per_s, latency_s, processes, JOBS)


@pytest.mark.parametrize("scv", [0.0, 0.5, 1.0, 8.0])
@pytest.mark.parametrize("processes", [(1, 2), (1, 4), (1, 2, 3)])
def test_exact_latencies_give_back_client_and_server(scv: float, processes: tuple[int, ...]) -> None:
    fit = fit_sweep(*points(processes=processes, scv=scv), JOBS)
    assert fit.mean_service_s == pytest.approx(SERVICE_S, rel=1e-4)
    assert fit.scv == pytest.approx(scv, abs=2e-3, rel=1e-3)
    assert fit.parameters["estimate"].iloc[2:].tolist() == pytest.approx(growing(np.array(RATES)).tolist(), rel=1e-5)
    assert fit.points["fitted_s"].tolist() == pytest.approx(fit.points["latency_s"].tolist())
    assert fit.points["utilisation"].max() == pytest.approx(0.9, rel=1e-3)


def simulated_mean_s(job_rate_per_s: float, n: int, rng: np.random.Generator) -> float:
    """Mean time in an M/M/1 client of this run, by Lindley's recursion."""
    gaps_s, services_s = rng.exponential(1 / job_rate_per_s, n), rng.exponential(SERVICE_S, n)
    walk = np.concatenate([[0.0], np.cumsum(services_s[:-1] - gaps_s[1:])])
    return float((walk - np.minimum.accumulate(walk) + services_s).mean())


def test_service_is_recovered_from_two_numbers_of_processes_up_to_rho_09() -> None:
    rng = np.random.default_rng(12)
    rates, processes = np.tile(RATES, 2), np.repeat([1.0, 2.0], len(RATES))
    client_s = [simulated_mean_s(r * JOBS / k, 2_000_000, rng) for r, k in zip(rates, processes, strict=True)]
    # the server's own mean is known to a few µs at best
    server_s = growing(rates) * (1 + 1e-4 * rng.standard_normal(8))
    fit = fit_sweep(rates, server_s + np.array(client_s), processes, JOBS)
    low, high = fit.parameters.loc["mean_service_s", ["lo", "hi"]]
    assert low <= SERVICE_S <= high
    assert high / low < 1.25
    assert fit.mean_service_s == pytest.approx(SERVICE_S, rel=0.05)
    assert fit.parameters["estimate"].iloc[2:].tolist() == pytest.approx(growing(np.array(RATES)).tolist(), rel=0.002)


def test_intervals_cover_the_truth() -> None:
    seeds, hits = 200, np.zeros(3)
    truth = [SERVICE_S, 1.0, float(growing(np.array(RATES[0])))]
    for seed in range(seeds):
        rows = noisy(seed, 1e-4).parameters.iloc[:3]
        hits += (rows["lo"].to_numpy() <= truth) & (truth <= rows["hi"].to_numpy())
    assert (hits / seeds >= 0.90).all(), hits
    assert (hits / seeds <= 0.99).all(), hits


def test_one_number_of_processes_leaves_client_and_server_together() -> None:
    rate_per_s, latency_s, processes = points(processes=(2,))
    fit = fit_sweep(rate_per_s, latency_s, processes, JOBS)
    assert fit.parameters.isna().all(axis=None)
    assert math.isnan(fit.mean_service_s)
    assert fit.points["latency_s"].tolist() == latency_s.tolist()
    assert fit.points[["server_s", "client_s"]].isna().all(axis=None)
    assert "client and server can't be told apart" in repr(fit)


def test_rates_that_do_not_bend_the_curve_tell_nothing_apart() -> None:
    fit = noisy(1, 0.002, rates=(10.0, 20.0, 30.0, 40.0))
    assert fit.parameters.isna().all(axis=None)
    assert fit.points["client_s"].isna().all()
    assert "don't bend the curve" in fit.sentences[0]


def test_a_client_that_does_not_queue_gets_no_service_time_from_noise() -> None:
    rates, processes = np.tile(RATES, 3), np.repeat([1.0, 2.0, 4.0], 4)
    named = 0
    for seed in range(50):
        latency_s = growing(rates) * (1 + 0.001 * np.random.default_rng(seed).standard_normal(12))
        fit = fit_sweep(rates, latency_s, processes, JOBS)
        named += not math.isnan(fit.mean_service_s)
    # a test at the level of 5 % errs in 2.5 of 50
    assert named <= 8


def test_scv_that_the_noise_hides_is_missing_while_service_is_not() -> None:
    fit = noisy(2, 0.0005)
    assert math.isnan(fit.scv)
    assert fit.parameters.loc["mean_service_s", "lo"] < SERVICE_S < fit.parameters.loc["mean_service_s", "hi"]
    assert any(sentence.startswith("c² can't be told") for sentence in fit.sentences)


def test_without_a_shared_rate_the_server_is_taken_as_constant_and_it_is_said() -> None:
    rates, processes = np.array([100.0, 200, 300, 360, 150, 400, 600, 700]), np.repeat([1.0, 2.0], 4)
    client_s = client_time_s(rates * JOBS / processes, np.array(SERVICE_S), np.array(1.0))
    fit = fit_sweep(rates, 0.05 + client_s, processes, JOBS)
    assert fit.mean_service_s == pytest.approx(SERVICE_S, rel=1e-3)
    assert fit.parameters.index.tolist() == ["mean_service_s", "scv", "server_s"]
    assert "taken to be the same at all rates" in fit.sentences[0]
    # and what that costs: a server that grows is taken for a client
    wrong = fit_sweep(rates, growing(rates) + client_s, processes, JOBS)
    assert wrong.mean_service_s != pytest.approx(SERVICE_S, rel=0.05)


def test_rates_that_are_nearly_equal_share_the_server() -> None:
    rate_per_s, latency_s, processes = points()
    measured = rate_per_s * np.repeat([1.0, 1.004], len(RATES))
    assert len(fit_sweep(measured, latency_s, processes, JOBS).parameters) == 2 + len(RATES)


def test_as_many_unknowns_as_points_leave_no_interval() -> None:
    fit = fit_sweep(*points(rates=(300.0, 360.0)), JOBS)
    assert fit.mean_service_s == pytest.approx(SERVICE_S, rel=1e-3)
    assert fit.parameters[["lo", "hi"]].isna().all(axis=None)
    assert "no intervals" in fit.sentences[0]


def test_more_points_narrow_the_intervals() -> None:
    few, many = noisy(3, 5e-5), noisy(3, 5e-5, processes=(1, 2, 3, 4, 6, 8))
    width = [f.parameters.loc["mean_service_s", "hi"] - f.parameters.loc["mean_service_s", "lo"] for f in (few, many)]
    assert width[1] < width[0]


def test_a_sweep_shows_itself() -> None:
    fit = fit_sweep(*points(), JOBS)
    for words in ("mean_service_s", "50.0 µs", "server_s at 360/s", "0.90", "profile likelihood"):
        assert words in repr(fit)
        assert words in fit._repr_html_()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latency_s": [0.05] * 7}, "arrays of one length"),
        ({"latency_s": [0.05] * 7 + [math.nan]}, "latency_s must hold finite numbers above 0"),
        ({"rate_per_s": [0.0] * 8}, "rate_per_s must hold finite numbers above 0"),
        ({"processes": [1.5] * 8}, "whole numbers"),
        ({"rate_per_s": ["fast"] * 8}, "arrays of numbers"),
        ({"jobs_per_request": 0}, "jobs_per_request must be a number above 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(change: dict[str, Any], words: str) -> None:
    rate_per_s, latency_s, processes = points()
    given: dict[str, Any] = {"rate_per_s": rate_per_s, "latency_s": latency_s, "processes": processes}
    with pytest.raises(UsageError, match=words):
        fit_sweep(**{**given, **change})


def test_too_few_points_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 4 runs; not 3"):
        fit_sweep([1, 2, 3], [1, 2, 3], [1, 2, 1])
    with pytest.raises(UsageError, match="5 points can't tell 4 server latencies"):
        fit_sweep([100, 200, 300, 360, 360], [0.05] * 5, [1, 1, 1, 1, 2])
