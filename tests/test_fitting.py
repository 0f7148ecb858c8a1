"""Fits held to simulated queues whose parameters are known, and to one short real run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmprofile as lp
from llmprofile.errors import UsageError
from llmprofile.fitting import FitResult, fit_batch, fit_mg1
from llmprofile.records import Run
from test_jobs import make_run

MS = 1e-3
E2E_S = 0.05
Floats = Any


def through_a_loop(at_s: Floats, services_s: Floats, wakeups_s: Floats) -> tuple[Floats, Floats]:
    """When each job was done, and the polls (entered, returned) of a loop that wakes late after it slept; ns."""
    done_s, polls_s, free_s = np.empty(len(at_s)), [], 0.0
    for k, (arrived_s, service_s, wakeup_s) in enumerate(zip(at_s, services_s, wakeups_s, strict=True)):
        start_s = free_s
        if arrived_s > free_s:
            start_s = arrived_s + wakeup_s
            polls_s.append((free_s, start_s))
        done_s[k] = free_s = start_s + service_s
    return (done_s * 1e9).astype(np.int64), (np.array(polls_s) * 1e9).astype(np.int64)


def simulated_run(loads: list[tuple[Floats, Floats, Floats]], client: str = "conventional") -> Run:
    """A run whose workers' loops got jobs at these times, with these services and wake-ups (seconds)."""
    requests: dict[str, list[Any]] = {name: [] for name in ("request_id", "worker", "begun_ns")}
    events: dict[str, list[Any]] = {name: [] for name in ("request_id", "wire_ns", "seen_ns", "handled_ns")}
    cycles: dict[str, list[Any]] = {name: [] for name in ("worker", "poll_entered_ns", "poll_returned_ns")}
    for worker, (at_s, services_s, wakeups_s) in enumerate(loads):
        done_ns, polls_ns = through_a_loop(at_s, services_s, wakeups_s)
        at_ns = (at_s * 1e9).astype(np.int64)
        ids = np.arange(1000) + 1000 * worker
        requests["request_id"].extend(ids)
        requests["worker"].extend([worker] * 1000)
        requests["begun_ns"].extend(np.linspace(at_ns[0], at_ns[-1], 1000).astype(np.int64))
        events["request_id"].extend(ids[np.arange(len(at_ns)) % 1000])
        for name, values in (("wire_ns", at_ns), ("seen_ns", done_ns), ("handled_ns", done_ns)):
            events[name].extend(values)
        cycles["worker"].extend([worker] * len(polls_ns))
        cycles["poll_entered_ns"].extend(polls_ns[:, 0])
        cycles["poll_returned_ns"].extend(polls_ns[:, 1])
    n = len(requests["request_id"])
    return make_run(requests | {"e2e_s": [E2E_S] * n, "tpot_s": [E2E_S / 10] * n}, events, cycles, client)


def mg1_load(rho: float, n: int, rng: np.random.Generator, wakeup_s: float = 0.0) -> tuple[Floats, Floats, Floats]:
    """Poisson jobs; services gamma of shape 2 with mean 1 ms, so that c² = 1/2; exponential wake-ups."""
    at_s = np.cumsum(rng.exponential(MS / rho, n))
    return at_s, rng.gamma(2.0, MS / 2, n), wakeup_s * rng.exponential(1.0, n)


def truth_of(rho: float, wakeup_s: float = 0.0) -> dict[str, float]:
    """Pollaczek–Khinchine, and Welch for the set-up, of that load."""
    rate_per_s, wait_s = rho / MS, rho * 1.5 * MS / (2 * (1 - rho))
    woken_s = (wakeup_s + rate_per_s * wakeup_s**2) / (1 + rate_per_s * wakeup_s)  # E[D²] = 2 E[D]²
    found = {"rate_per_s": rate_per_s, "mean_service_s": MS, "scv": 0.5, "utilisation": rho, "wakeup_s": wakeup_s}
    return found | {"mean_wait_s": wait_s, "mean_time_s": wait_s + woken_s + MS}


def batch_load(
    period_s: float,
    mean_size: float,
    steps: int,
    rng: np.random.Generator,
    periodic: bool = True,
    wakeup_s: float = 0.0,
) -> tuple[Floats, Floats, Floats]:
    """Batches of 1 + Poisson jobs 2 µs apart, exponential services of 50 µs."""
    gaps_s = np.full(steps, period_s) if periodic else rng.exponential(period_s, steps)
    sizes = 1 + rng.poisson(mean_size - 1, steps)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    at_s = np.maximum.accumulate(np.repeat(np.cumsum(gaps_s), sizes) + 2e-6 * within)
    return at_s, rng.exponential(50e-6, len(at_s)), np.full(len(at_s), wakeup_s)


def misses(fit: FitResult, truth: dict[str, float], worker: str = "pooled") -> dict[str, float]:
    """By how many standard errors each estimate misses the truth."""
    own = fit.parameters.loc[worker]
    return {n: abs(own.loc[n, "estimate"] - t) / own.loc[n, "se"] for n, t in truth.items() if own.loc[n, "se"] > 0}


@pytest.mark.parametrize("rho", [0.2, 0.5, 0.8])
def test_parameters_of_a_simulated_queue_are_found_within_three_standard_errors(rho: float) -> None:
    fit = fit_mg1(simulated_run([mg1_load(rho, 60_000, np.random.default_rng(7), 30e-6)]))
    truth = truth_of(rho, 30e-6)
    assert max(misses(fit, truth).values()) < 3
    own = fit.parameters.loc["pooled"]
    assert own.loc["mean_service_s", "se"] == pytest.approx(MS * math.sqrt(0.5 / 60_000), rel=0.5)
    assert own.loc["rate_per_s", "se"] == pytest.approx(truth["rate_per_s"] / math.sqrt(60_000), rel=0.5)
    assert own.loc["slept_share", "estimate"] == pytest.approx((1 - rho) / (1 + rho / MS * 30e-6), rel=0.03)


def test_workers_are_fitted_alone_and_pooled_as_one_queue() -> None:
    rng = np.random.default_rng(3)
    fit = fit_mg1(simulated_run([mg1_load(0.3, 20_000, rng), mg1_load(0.6, 40_000, rng)]))
    for worker, rho in (("0", 0.3), ("1", 0.6)):
        truth = {name: value for name, value in truth_of(rho).items() if name != "wakeup_s"}
        assert max(misses(fit, truth, worker).values()) < 3.5
    assert fit.parameters.loc[("pooled", "utilisation"), "estimate"] == pytest.approx(0.45, rel=0.03)
    assert fit.model.rate_per_s == pytest.approx(450, rel=0.03)
    assert list(fit.dispersion.columns) == ["window_s", "pooled", "0", "1"]


def test_predicted_times_are_the_measured_ones_where_the_model_is_true() -> None:
    rng = np.random.default_rng(5)
    fit = fit_mg1(simulated_run([mg1_load(0.6, 100_000, rng, 50e-6)]))
    assert fit.law == "M/G/1"
    assert fit.verdict.endswith("it fits.")
    assert fit.times["predicted_s"].tolist() == pytest.approx(fit.times["measured_s"].tolist(), rel=0.07)
    assert fit.model.mean_wait_s == pytest.approx(truth_of(0.6)["mean_wait_s"], rel=0.05)
    qq = fit.qq()
    assert qq["model_s"].to_numpy() == pytest.approx(qq["measured_s"].to_numpy(), rel=0.1)
    # a queue that is judged at a rate it was not fitted on
    other = simulated_run([mg1_load(0.8, 100_000, rng, 50e-6)])
    judged = fit.predict(other)
    assert judged.loc["mean", "measured_s"] == pytest.approx(truth_of(0.8, 50e-6)["mean_time_s"], rel=0.1)
    assert judged["predicted_s"].tolist() == pytest.approx(judged["measured_s"].tolist(), rel=0.15)


def test_long_wakeups_add_what_welch_says() -> None:
    fit = fit_mg1(simulated_run([mg1_load(0.5, 60_000, np.random.default_rng(5), 2 * MS)]))
    truth = truth_of(0.5, 2 * MS)
    assert truth["mean_time_s"] - truth["mean_wait_s"] == pytest.approx(3 * MS)  # 2 of them for the wake-up
    for figure in (fit.parameters.loc[("pooled", "mean_time_s"), "estimate"], *fit.times.loc["mean", ["measured_s"]]):
        assert figure == pytest.approx(truth["mean_time_s"], rel=0.03)
    assert fit.qq(19)["model_s"].to_numpy() == pytest.approx(fit.qq(19)["measured_s"].to_numpy(), rel=0.05)


def test_the_index_of_dispersion_is_one_for_poisson_jobs_and_large_for_bursts() -> None:
    rng = np.random.default_rng(11)
    poisson = fit_mg1(simulated_run([mg1_load(0.5, 60_000, rng)])).dispersion
    windows = 120 / poisson["window_s"].to_numpy()
    assert (np.abs(poisson["0"].to_numpy() - 1) < 4 * np.sqrt(2 / windows)).all()
    assert {"10 gaps", "E[S]/(1−ρ)²", "ITL", "request", "1 s"} == set(poisson.index)
    bursts = fit_mg1(simulated_run([batch_load(0.005, 40, 3000, rng)]))
    assert bursts.dispersion["0"].iloc[0] > 10


def test_windows_that_are_too_long_for_the_run_are_left_out_and_named() -> None:
    fit = fit_mg1(simulated_run([mg1_load(0.5, 2000, np.random.default_rng(0))]))
    assert "1 s" not in fit.dispersion.index
    assert any("Dispersion left out" in note and "1 s (1.00 s)" in note for note in fit.notes)


@pytest.mark.parametrize(("periodic", "law"), [(True, "D^X/G/1"), (False, "M^X/G/1")])
def test_batches_are_found_where_mg1_does_not_fit(periodic: bool, law: str) -> None:
    period_s, mean_size = 0.005, 60.0
    load = batch_load(period_s, mean_size, 6000, np.random.default_rng(2), periodic, 100e-6)
    run = simulated_run([load])
    plain, fit = fit_mg1(run), fit_batch(run)
    assert "it does not fit" in plain.verdict
    assert f"{law} with wake-up fits" in plain.verdict
    assert fit.law == law
    assert fit.verdict.endswith("it fits.")
    assert fit.times["predicted_s"].tolist() == pytest.approx(fit.times["measured_s"].tolist(), rel=0.12)
    truth = {"mean_service_s": 50e-6, "scv": 1.0, "batch_mean": mean_size, "batch_scv": (mean_size - 1) / mean_size**2}
    truth |= {"batches_per_s": 1 / period_s}
    if not periodic:
        truth["gap_scv"] = 1.0
        # batches that come before the one before has ended are one: at random times some do, which shifts all three
        truth = {name: value for name, value in truth.items() if not name.startswith(("batch", "gap"))}
        assert fit.parameters.loc[("pooled", "batch_mean"), "estimate"] == pytest.approx(mean_size, rel=0.1)
        assert fit.parameters.loc[("pooled", "gap_scv"), "estimate"] == pytest.approx(1.0, rel=0.15)
    assert max(misses(fit, truth).values()) < 3.5
    assert fit.model.utilisation == pytest.approx(mean_size * 50e-6 / period_s, rel=0.03)


@pytest.mark.parametrize("periodic", [True, False])
def test_without_wakeups_the_prediction_is_the_closed_form_s(periodic: bool) -> None:
    fit = fit_batch(simulated_run([batch_load(0.005, 40, 4000, np.random.default_rng(3), periodic)]))
    assert fit.times.loc["mean", "predicted_s"] == pytest.approx(fit.model.mean_wait_s + 50e-6, rel=0.05)


def test_a_mean_that_the_run_does_not_know_is_no_verdict() -> None:
    # three stalls make the mean, and say nothing of the next ones
    at_s, services_s, wakeups_s = mg1_load(0.2, 20_000, np.random.default_rng(8))
    services_s[[5000, 9000, 14_000]] += 0.4
    fit = fit_mg1(simulated_run([(at_s, services_s, wakeups_s)]))
    assert fit.times.loc["mean", "measured_se_s"] > 0.3 * fit.times.loc["mean", "measured_s"]
    assert "it fits" in fit.verdict or "can't be ruled out" in fit.verdict
    assert any(note.startswith("The loop often had no processor") for note in fit.notes)


def test_late_wakeups_are_counted() -> None:
    at_s, services_s, wakeups_s = mg1_load(0.1, 5000, np.random.default_rng(8), 20e-6)
    wakeups_s[::100] = 0.002
    notes = fit_mg1(simulated_run([(at_s, services_s, wakeups_s)])).notes
    late = [int(note.split()[0]) for note in notes if "wake-ups took more than 1.00 ms" in note]
    assert late[0] == pytest.approx(50 * 0.9, abs=9)


def test_a_batch_fit_is_judged_on_another_run_with_that_run_s_batches() -> None:
    rng = np.random.default_rng(9)
    fit = fit_batch(simulated_run([batch_load(0.005, 30, 4000, rng)]))
    judged = fit.predict(simulated_run([batch_load(0.005, 80, 4000, rng)]))
    assert judged["predicted_s"].tolist() == pytest.approx(judged["measured_s"].tolist(), rel=0.1)
    assert judged.loc["mean", "predicted_s"] > 2 * fit.times.loc["mean", "predicted_s"]


def test_without_batches_a_batch_fit_is_mg1_and_says_so() -> None:
    fit = fit_batch(simulated_run([mg1_load(0.5, 30_000, np.random.default_rng(1))]))
    assert any("No batches stand out" in note for note in fit.notes)
    assert fit.parameters.loc[("pooled", "batch_mean"), "estimate"] == 1
    assert fit.model.mean_wait_s == pytest.approx(truth_of(0.5)["mean_wait_s"], rel=0.1)


def test_a_gated_loop_is_no_queue_that_serves_first_come_first_served() -> None:
    # reads of a whole burst come first, then it is handled: every job waits for all reads
    steps, size, read_s, handle_s = 1000, 60, 30e-6, 30e-6
    at_s = np.repeat(0.01 * np.arange(1, steps + 1), size) + np.tile(1e-6 * np.arange(size), steps)
    done_s = (
        np.repeat(0.01 * np.arange(1, steps + 1), size)
        + read_s * size
        + np.tile(handle_s * np.arange(1, size + 1), steps)
    )
    run = simulated_run([(at_s, np.zeros(len(at_s)), np.zeros(len(at_s)))])
    run.events["handled_ns"] = (done_s * 1e9).astype(np.int64)
    verdict = fit_batch(run).verdict
    assert "it does not fit" in verdict
    assert "gated queue; see fit_loop" in verdict


def test_a_short_run_has_standard_errors_and_no_intervals() -> None:
    fit = fit_mg1(simulated_run([mg1_load(0.5, 5000, np.random.default_rng(4))]))
    own = fit.parameters.loc["pooled"]
    assert (own["se"].drop(["wakeup_s", "slept_share", "vacation_share"]) > 0).all()
    assert own[["lo", "hi"]].isna().all(axis=None)
    assert any(note.startswith("Too short for intervals, which take 20 blocks") for note in fit.notes)


def test_an_overloaded_queue_has_infinite_predictions_and_no_exception() -> None:
    load = mg1_load(0.9, 20_000, np.random.default_rng(6))
    fit = fit_mg1(simulated_run([load]))
    fast = fit.predict(simulated_run([(load[0] / 2, load[1], load[2])]))
    assert np.isinf(fast["predicted_s"]).all()
    assert np.isfinite(fast["measured_s"]).all()


def test_vacations_are_counted_and_stay_in_the_service() -> None:
    at_s, services_s, wakeups_s = mg1_load(0.3, 20_000, np.random.default_rng(8))
    services_s = services_s / 10
    services_s[5000:15_000:1000] += 0.05
    fit = fit_mg1(simulated_run([(at_s, services_s, wakeups_s)]))
    assert any(note.startswith("10 vacations (services off the processor)") for note in fit.notes)
    share = fit.parameters.loc[("pooled", "vacation_share"), "estimate"]
    assert share == pytest.approx(10 * 0.05 / (20_000 * MS / 0.3), rel=0.05)
    assert fit.parameters.loc[("pooled", "mean_service_s"), "estimate"] == pytest.approx(services_s.mean(), rel=0.01)


def test_intervals_cover_the_truth() -> None:
    # the full study, 200 seeds at several loads, is tests/benchmarks/coverage.py
    seeds, rho = 30, 0.8
    truth = {name: value for name, value in truth_of(rho).items() if name != "wakeup_s"}
    hits = dict.fromkeys(truth, 0)
    for seed in range(seeds):
        own = fit_mg1(simulated_run([mg1_load(rho, 20_000, np.random.default_rng(seed))])).parameters.loc["pooled"]
        for name, value in truth.items():
            hits[name] += own.loc[name, "lo"] <= value <= own.loc[name, "hi"]
    # 95 % of 30 seeds are 28.5; three standard deviations of that count are 3.6
    assert min(hits.values()) >= 25, hits


def test_a_fit_shows_itself_and_escapes_what_comes_from_outside() -> None:
    fit = fit_mg1(simulated_run([mg1_load(0.5, 20_000, np.random.default_rng(0))], client="<b>tool</b>"))
    text, page = repr(fit), fit._repr_html_()
    for words in ("M/G/1 fitted to a", "rate_per_s", "±", "measured", "p99", "error"):
        assert words in text
    assert "<b>tool</b>" not in page
    assert "&lt;b&gt;tool" in page


def test_a_fit_predicts_only_runs_of_its_own_client() -> None:
    load = mg1_load(0.5, 5000, np.random.default_rng(0))
    fit = fit_mg1(simulated_run([load]))
    with pytest.raises(UsageError, match="must be of a conventional client"):
        fit.predict(simulated_run([load], client="stamped"))


def test_a_run_without_events_is_refused() -> None:
    run = make_run({"request_id": [0], "worker": [0]}, {"request_id": []}, {"worker": []}, "conventional")
    with pytest.raises(UsageError, match="kernel stamps"):
        fit_mg1(run)


def test_a_real_run_has_plausible_costs(tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.005, cv=0.5, step=False) as server:
        arrivals = lp.Poisson(rate_per_s=60)
        run = lp.run_load(
            server.url,
            arrivals,
            n=90,
            output_tokens=30,
            client="conventional",
            seed=1,
            out=tmp_path / "run",
            progress=False,
        )
    fit = fit_mg1(run)
    own = fit.parameters.loc["pooled", "estimate"]
    assert own["rate_per_s"] == pytest.approx(60 * 31, rel=0.35)
    assert 5e-6 < own["mean_service_s"] < 5e-3
    assert 0 < own["slept_share"] <= 1
    assert own["wakeup_s"] > 1e-6
    assert fit.times.loc["mean", "measured_s"] > own["mean_service_s"] / 2
    assert fit_batch(run).client == "conventional"
    assert "µs" in repr(fit) or "ms" in repr(fit)
