"""Plots of queues and fits show the models' own values: read from the artists, not from pixels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from llmprofile import plots
from llmprofile.batches import DXG1, MXG1
from llmprofile.errors import UsageError
from llmprofile.fitting import FitResult, fit_mg1
from llmprofile.gated import GatedLoop
from llmprofile.lindley import backlog, simulate
from llmprofile.queueing import GG1, MD1, MG1, MM1
from test_fitting import mg1_load, simulated_run
from test_runplots import lines, texts


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def fit() -> FitResult:
    rng = np.random.default_rng(4)
    return fit_mg1(simulated_run([mg1_load(0.7, 6000, rng, 1e-4), mg1_load(0.6, 6000, rng, 1e-4)]))


def without_bound(fit: FitResult) -> FitResult:
    """The same, of a model that can't keep up."""
    times = fit.times.assign(predicted_s=np.inf)
    return dataclasses.replace(fit, model=MG1(1e4, 0.001), times=times, _model_s=np.full(2, np.inf))


# distributions


def test_wait_distribution_of_a_fit_is_that_of_its_quantiles(fit: FitResult) -> None:
    ax = plots.wait_distribution(fit, plots.blank_axes())
    drawn, table = lines(ax), fit.qq(999)
    assert list(drawn) == ["measured", "model"]
    for who, (time_s, longer) in drawn.items():
        assert np.interp(table["q"], 1 - longer, time_s) == pytest.approx(table[f"{who}_s"], rel=1e-6)
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == "time in the client (ms)"
    means_ms = (fit.times.loc["mean", ["measured_s", "predicted_s"]] * 1e3).tolist()
    assert f"measured: mean {means_ms[0]:.2f} ms\nM/G/1 with wake-up: mean {means_ms[1]:.2f} ms" in texts(ax)


@pytest.mark.parametrize(
    "model",
    [MM1(800, 0.001), MD1(500, 0.001), MG1(300, [0.0005, 0.002]), MXG1(50, 5, 0.001), DXG1(0.01, 5, 0.001)],
    ids=lambda model: type(model).__name__,
)
def test_wait_distribution_of_a_model_is_its_own(model: Any) -> None:
    ax = plots.wait_distribution(model, plots.blank_axes())
    ((t_s, longer),) = lines(ax).values()
    assert longer == pytest.approx(1 - model.wait_cdf(t_s))
    assert t_s[0] == 0.0
    assert longer[-1] < 2e-4
    assert f"ρ = {model.utilisation:.2f}" in ax.get_title(loc="left")
    assert ax.get_xlabel() == "wait (ms)"


def test_a_queue_that_cannot_keep_up_has_a_sentence_for_a_curve(fit: FitResult) -> None:
    ax = plots.wait_distribution(MM1(1500, 0.001), plots.blank_axes())
    assert (lines(ax), ax.get_xlabel()) == ({}, "wait (ms)")
    assert "can't keep up" in texts(ax)
    assert "no event waits" in texts(plots.wait_distribution(MM1(0, 0.0), plots.blank_axes()))
    ax = plots.wait_distribution(without_bound(fit), plots.blank_axes())
    assert list(lines(ax)) == ["measured"]
    assert "M/G/1 with wake-up: can't keep up" in texts(ax)
    ax = plots.qq(without_bound(fit), plots.blank_axes())
    assert lines(ax) == {}
    assert "can't keep up (ρ = 10.00)" in texts(ax)
    assert ax.get_ylabel().endswith("(ms)")


def test_qq_draws_quantiles_beside_the_diagonal(fit: FitResult) -> None:
    ax = plots.qq(fit, plots.blank_axes())
    drawn, table = lines(ax), fit.qq()
    assert drawn["quantiles"][0].tolist() == table["model_s"].tolist()
    assert drawn["quantiles"][1].tolist() == table["measured_s"].tolist()
    assert list(drawn["diagonal"][0]) == list(drawn["diagonal"][1])
    p90 = table.loc[np.isclose(table["q"], 0.9)].iloc[0]
    assert np.ravel(drawn["p90"]) == pytest.approx([p90["model_s"], p90["measured_s"]])
    assert ax.get_xlabel() == "time in the client by M/G/1 with wake-up (ms)"


# against rate


def test_wait_against_rate_draws_what_each_model_says() -> None:
    rates = [100.0, 500.0, 900.0]
    models = {
        "queue": MM1(1, 0.001),
        "loop": GatedLoop(1, 1e-5, 3.5e-5, 4e-5),
        "batches": lambda rate: MXG1(rate / 5, 5, 0.0005),
        "seconds": lambda rate: 0.001 + rate * 1e-6,
    }
    drawn = lines(plots.wait_against_rate(models, rates, ax=plots.blank_axes()))
    assert drawn["queue"][0].tolist() == rates
    assert drawn["queue"][1] == pytest.approx([MM1(rate, 0.001).mean_wait_s for rate in rates])
    assert drawn["loop"][1] == pytest.approx([GatedLoop(r, 1e-5, 3.5e-5, 4e-5).mean_wait_s for r in rates])
    assert drawn["batches"][1] == pytest.approx([MXG1(rate / 5, 5, 0.0005).mean_wait_s for rate in rates])
    assert drawn["seconds"][1] == pytest.approx([0.0011, 0.0015, 0.0019])
    ax = plots.wait_against_rate(models, rates, ax=plots.blank_axes(), statistic="mean_time_s")
    assert lines(ax)["queue"][1] == pytest.approx([MM1(rate, 0.001).mean_time_s for rate in rates])
    assert ax.get_ylabel() == "mean time in the client (ms)"


def test_what_a_model_cannot_keep_up_with_is_above_the_axes() -> None:
    ax = plots.wait_against_rate({"M/M/1": MM1(1, 0.001)}, [500, 900, 1000, 1500], ax=plots.blank_axes())
    _, mean_s = lines(ax)["M/M/1"]
    low_s, top_s = ax.get_ylim()
    assert (mean_s[:2] >= low_s).all()
    assert (mean_s[:2] <= top_s).all()
    assert (mean_s[2:] > 100 * top_s).all()
    assert np.isfinite(mean_s).all()  # so that the curve is seen to leave
    for model in (MM1(1, 1.0), lambda rate: math.nan):
        ax = plots.wait_against_rate({"never": model}, [10, 20], ax=plots.blank_axes())
        assert ax.get_xlabel() == "rate of one queue (events/s)"


def test_measured_points_have_their_intervals_and_their_models_colours() -> None:
    table = pd.DataFrame({"rate_per_s": [200, 900], "mean_s": [3e-4, 8e-3], "lo_s": [2e-4, math.nan], "hi_s": 9e-3})
    models = {"one": MM1(1, 0.001), "two": lambda rate: MM1(rate, 0.001).split(2)}
    ax = plots.wait_against_rate(models, [100, 900], table, plots.blank_axes())
    ((points, _, (bars,)),) = ax.containers  # type: ignore[misc]
    assert points.get_xydata().tolist() == [[200, 3e-4], [900, 8e-3]]
    assert [s[:, 1].tolist() for s in bars.get_segments()] == [pytest.approx(b) for b in ([2e-4, 9e-3], [8e-3, 9e-3])]
    assert ax.get_ylim()[1] > 9e-3
    assert texts(ax).split("\n") == ["one", "two", "measured"]
    labelled = table[["rate_per_s", "mean_s"]].assign(label=["one", "other"])
    ax = plots.wait_against_rate(models, [100, 900], labelled, plots.blank_axes())
    colours = {str(c.get_label()): c[0].get_color() for c in ax.containers}  # type: ignore[index]
    assert colours["one points"] == ax.lines[0].get_color()
    assert texts(ax).split("\n") == ["one", "two", "other"]


def test_inflation_draws_factors_and_the_papers() -> None:
    rho, factors = [0.5, 0.9, 0.95, 1.1], {"5 ms": [1.2, 2.0, np.nan, np.inf], "50 ms": [1.02, 1.1, 1.2, 4.0]}
    ax = plots.inflation(rho, factors, plots.blank_axes(), against="utilisation", run_s=60)
    drawn = lines(ax)
    assert drawn["paper"][1] == [2.3, 2.3]
    assert drawn["50 ms"][1].tolist() == factors["50 ms"]
    assert drawn["5 ms without bound"][0].tolist() == [1.1]
    assert ax.get_xlabel() == "utilisation ρ of the client"
    assert "runs of 60 s" in ax.get_title(loc="left")
    assert {"the paper's 2.3", "5 ms", "50 ms"} == set(texts(ax).split("\n"))
    low, high = ax.get_ylim()
    assert low < 1 < 4 < high


def test_inflation_of_nothing_is_an_empty_axes_with_labels() -> None:
    for load, factor in (([], []), ([1.0, 2.0], [np.nan, np.nan])):
        ax = plots.inflation(load, factor, plots.blank_axes())
        assert "the paper's 2.3" in texts(ax)
        assert ax.get_xlabel() == "rate (requests/s)"


# arrivals and paths


def test_dispersion_draws_all_and_each_worker_beside_poisson(fit: FitResult) -> None:
    ax = plots.dispersion(fit, plots.blank_axes())
    drawn = lines(ax)
    assert drawn["Poisson"][1] == [1.0, 1.0]
    for who in ("pooled", "0", "1"):
        assert drawn[who][0].tolist() == fit.dispersion["window_s"].tolist()
        assert drawn[who][1].tolist() == fit.dispersion[who].tolist()
    assert set(", ".join(texts(ax).split("\n")).split(", ")) >= {*fit.dispersion.index, "all", "worker 0", "Poisson: 1"}
    assert ax.get_xlabel() == "window (ms)"


def test_windows_as_good_as_one_are_named_together(fit: FitResult) -> None:
    near = fit.dispersion.assign(window_s=[0.01, 0.0105, 0.011, 0.1, 1.0][: len(fit.dispersion)])
    ax = plots.dispersion(dataclasses.replace(fit, dispersion=near), plots.blank_axes())
    assert ", ".join(near.index[:3]) in texts(ax)
    ax = plots.dispersion(dataclasses.replace(fit, dispersion=near.iloc[:0]), plots.blank_axes())
    assert "no window" in texts(ax)
    assert ax.get_ylabel() == "index of dispersion"


def test_sample_path_is_the_backlog_and_marks_arrivals_and_waits() -> None:
    rng = np.random.default_rng(2)
    arrivals_s, services_s = np.cumsum(rng.exponential(1e-3, 40)), rng.exponential(8e-4, 40)
    ax = plots.sample_path(arrivals_s, services_s, plots.blank_axes())
    time_s, work_s = lines(ax)["work"]
    at_s = np.setdiff1d(np.linspace(arrivals_s[0], time_s[-1], 1001), arrivals_s)
    assert np.interp(at_s, time_s, work_s) == pytest.approx(backlog(arrivals_s, services_s, at_s), abs=1e-12)
    assert lines(ax)["arrivals"][0].tolist() == arrivals_s.tolist()
    waits = next(c for c in ax.collections if c.get_label() == "waits")
    assert [s[1, 1] for s in waits.get_segments()] == simulate(arrivals_s, services_s).tolist()  # type: ignore[attr-defined]
    assert ax.get_xlabel() == "time (ms)"


def test_sample_path_of_no_job_is_an_empty_axes_with_labels() -> None:
    ax = plots.sample_path([], [], plots.blank_axes())
    assert "no job arrives" in texts(ax)
    assert ax.get_ylabel() == "unfinished work (ms)"


# all of them


DRAWS = {
    "wait_distribution": lambda fit, **ax: plots.wait_distribution(fit, **ax),
    "qq": lambda fit, **ax: plots.qq(fit, **ax),
    "wait_against_rate": lambda fit, **ax: plots.wait_against_rate({"a": MM1(1, 0.001)}, [10, 20], **ax),
    "inflation": lambda fit, **ax: plots.inflation([1, 2], [1, 2], **ax),
    "dispersion": lambda fit, **ax: plots.dispersion(fit, **ax),
    "sample_path": lambda fit, **ax: plots.sample_path([0, 1], [2, 1], **ax),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_plot_takes_axes_or_makes_its_own_and_leaves_the_settings_alone(draw: Any, fit: FitResult) -> None:
    settings, given = dict(mpl.rcParams), plots.blank_axes()
    assert draw(fit, ax=given) is given
    assert not plt.get_fignums()
    own = draw(fit)
    assert plt.gcf() is own.get_figure()
    assert own.get_figure().get_figwidth() == 7.0
    assert dict(mpl.rcParams) == settings


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda: plots.wait_distribution(GatedLoop(1, 0, 1e-5, 0)), "the gated loop offers means only"),
        (lambda: plots.wait_distribution(GG1(500, 0.001, 4)), "knows no quantiles"),
        (lambda: plots.wait_distribution(MG1.from_moments(500, 0.001, 1)), "needs the service's law"),
        (lambda: plots.wait_distribution("M/M/1"), "fit_or_model must be a FitResult or a queue; not 'M/M/1'"),
        (lambda: plots.wait_against_rate({"a": DXG1(1, 2, 0.1)}, [1]), "a must be a queue with a rate_per_s to set"),
        (
            lambda: plots.wait_against_rate({}, [1], statistic="p99"),
            "statistic must be one of mean_wait_s, mean_time_s",
        ),
        (lambda: plots.wait_against_rate({}, [1], pd.DataFrame({"mean_s": [1]})), "rate_per_s is missing"),
        (lambda: plots.wait_against_rate({"a": MM1(1, 1)}, [-1]), "rate_per_s must be"),
        (lambda: plots.inflation([1, 2], {"a": [1]}), "a must have a value for each load, 2"),
        (lambda: plots.inflation([1], [1], against="time"), "against must be one of rate, utilisation; not time"),
        (lambda: plots.sample_path([1, 0], [1, 1]), "arrivals_s must be finite and ascending"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(draw: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        draw()
    assert not plt.get_fignums()
