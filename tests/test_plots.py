"""The flat list of the figures, and that none of them writes over itself: texts are read where they would be drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from matplotlib.axes import Axes
from matplotlib.text import Text

from llmprofile import plots, queueplots, runplots, serverplots
from llmprofile.batches import DXG1
from llmprofile.fitting import FitResult, fit_batch, fit_mg1
from llmprofile.queueing import MG1, MM1
from test_fitting import batch_load, mg1_load, simulated_run
from test_runplots import bias_table, make_run, of_lengths


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def fits() -> dict[str, FitResult]:
    rng = np.random.default_rng(4)
    poisson = simulated_run([mg1_load(0.7, 8000, rng, 1e-4), mg1_load(0.7, 8000, rng, 1e-4)])
    bursts = simulated_run([batch_load(0.01, 40, 300, rng, wakeup_s=1e-4)])
    return {"poisson": fit_mg1(poisson), "bursts": fit_mg1(bursts), "batches": fit_batch(bursts)}


def test_every_figure_is_listed() -> None:
    drawn_here = {
        name
        for module in (runplots, queueplots, serverplots)
        for name, found in inspect.getmembers(module, inspect.isfunction)
        if found.__module__ == module.__name__ and not name.startswith("_")
    }
    assert sorted(drawn_here | {"blank_axes", "save"}) == plots.__all__
    for name in drawn_here:
        assert inspect.signature(getattr(plots, name)).parameters["ax"].default is None


RHO = np.array([0.5, 0.7, 0.8, 0.9, 0.95])
RATES = np.linspace(50, 4200, 60)
POINTS = pd.DataFrame({"rate_per_s": [200.0, 900.0], "mean_s": [0.0003, 0.008], "lo_s": 1e-4, "hi_s": [4e-4, 0.02]})
FACTORS = {"5 ms, from begun": 1 + 0.1 / (1 - RHO), "5 ms, from due": 1 + 0.101 / (1 - RHO), "50 ms": 1 + 0.01 / RHO}
TABLES = {
    rate: bias_table(0.05, 0.0001, sending_s=1e-5, waiting_s=2e-5 * rate, handling_s=1e-5)
    for rate in (50, 100, 200, 400)
}


MANY_LENGTHS = np.arange(1, 400)


def path(n: int, ax: Axes) -> Axes:
    rng = np.random.default_rng(n)
    return plots.sample_path(np.cumsum(rng.exponential(1e-3, n)), rng.exponential(8e-4, n), ax)


FIGURES: dict[str, Callable[[dict[str, FitResult], Axes], Axes]] = {
    "wait of a fit": lambda fits, ax: plots.wait_distribution(fits["poisson"], ax),
    "wait of a bad fit": lambda fits, ax: plots.wait_distribution(fits["bursts"], ax),
    "wait of batches": lambda fits, ax: plots.wait_distribution(fits["batches"], ax),
    "wait of M/M/1": lambda fits, ax: plots.wait_distribution(MM1(800, 0.001), ax),
    "wait of M/G/1": lambda fits, ax: plots.wait_distribution(MG1(300, scipy.stats.gamma(2, scale=5e-4)), ax),
    "wait of D^X/G/1": lambda fits, ax: plots.wait_distribution(DXG1(0.01, 50, 1e-4), ax),
    "wait without bound": lambda fits, ax: plots.wait_distribution(MM1(1800, 0.001), ax),
    "qq": lambda fits, ax: plots.qq(fits["poisson"], ax),
    "qq of a bad fit": lambda fits, ax: plots.qq(fits["bursts"], ax),
    "dispersion": lambda fits, ax: plots.dispersion(fits["poisson"], ax),
    "dispersion of bursts": lambda fits, ax: plots.dispersion(fits["bursts"], ax),
    "wait against rate": lambda fits, ax: plots.wait_against_rate({"M/M/1": MM1(1, 0.001)}, RATES, POINTS, ax),
    "split": lambda fits, ax: plots.wait_against_rate(
        {f"k = {k}": lambda rate, k=k: MM1(rate, 0.001).split(k) for k in (1, 2, 4)}, RATES, ax=ax
    ),
    "inflation": lambda fits, ax: plots.inflation(RHO, FACTORS, ax, against="utilisation", run_s=60),
    "inflation of one": lambda fits, ax: plots.inflation([100, 200, 400, 800], [1.0, 1.1, 3, np.inf], ax),
    "decomposition": lambda fits, ax: plots.decomposition(TABLES, ax),
    "path": lambda fits, ax: path(25, ax),
    "NTPOT by length": lambda fits, ax: plots.ntpot_by_length(of_lengths(MANY_LENGTHS, 0.05, 0.01), ax),
    "NTPOT of one length": lambda fits, ax: plots.ntpot_by_length(make_run(), ax),
    "NTPOT and TPOT": lambda fits, ax: plots.ntpot_against_tpot(of_lengths(MANY_LENGTHS, 0.05, 0.01), 0.05, 0.01, ax),
}


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_lies_on_another_and_all_are_on_the_figure(name: str, fits: dict[str, FitResult]) -> None:
    ax = FIGURES[name](fits, plots.blank_axes())
    figure: Any = ax.get_figure(root=True)
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown(ax)]
    assert [text for text, box in boxes if not figure.bbox.padded(1).contains(*box.min)] == []
    assert [text for text, box in boxes if not figure.bbox.padded(1).contains(*box.max)] == []
    overlapping = [
        (text, other)
        for k, (text, box) in enumerate(boxes)
        for other, beside in boxes[:k]
        if box.padded(-1).overlaps(beside.padded(-1))
    ]
    assert overlapping == []
    for axis in (ax.xaxis, ax.yaxis):
        assert axis.label.get_text()


def shown(ax: Axes) -> list[Text]:
    """The texts that can be seen: labels of ticks beyond the limits are not drawn."""
    found = [child for child in ax.get_children() if isinstance(child, Text)] + [ax.xaxis.label, ax.yaxis.label]
    for axis, place in ((ax.xaxis, 0), (ax.yaxis, 1)):
        low, high = sorted(axis.get_view_interval())
        found += [t for t in axis.get_ticklabels(which="both") if low <= t.get_position()[place] <= high]
    return [text for text in found if text.get_text()]


def test_a_figure_is_saved_as_vectors(tmp_path: Any) -> None:
    plots.save(path(9, plots.blank_axes()), tmp_path / "path.svg")
    assert (tmp_path / "path.svg").read_text(encoding="utf-8").startswith("<?xml")
