"""Differences between runs: intervals held to how often they cover a truth that a formula knows; the figure of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile import plots
from llmprofile.comparison import asked_differences, difference, differences, sample
from llmprofile.metrics import block_intervals, summary
from llmprofile.records import Run
from test_metrics import lindley_waits
from test_plots import shown
from test_runplots import MS, lines, make_run, texts


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


def slowed(run: Run, by_s: float) -> Run:
    """The same run with every latency longer, and all of it spread over a minute, so that it has intervals."""
    latencies = [c for c in run.requests if c.endswith("_s") and c not in ("lateness_s", "connect_s")]
    requests = run.requests.assign(**{name: run.requests[name] + by_s for name in latencies})
    begun_ns = pd.array(10**12 + np.arange(len(requests)) * 240 * MS, "Int64")
    return dataclasses.replace(run, requests=requests.assign(begun_ns=begun_ns))


def test_intervals_cover_the_difference_of_two_queues() -> None:
    """Mean waits of M/M/1 queues at ρ = 0.5 and 0.6 differ by 0.5 services; 95 % intervals from some 40 blocks."""
    truth, seeds, hits, alone = 0.6 / 0.4 - 0.5 / 0.5, 100, 0, 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        samples = [lindley_waits(rho, 2500, rng) for rho in (0.5, 0.6)]
        row = difference(*((w, at_s, np.ptp(at_s) / 40.5) for w, at_s in samples))
        hits += row["mean_lo_s"] <= truth <= row["mean_hi_s"]
        half = 1.96 * math.sqrt(sum(w.var() / len(w) for w, _ in samples))
        alone += abs(row["mean_difference_s"] - truth) <= half
    # 95 less three standard deviations of 100 draws; a few percent are lost to the blocks' number (see test_metrics)
    assert hits >= 84
    assert alone < 70


def test_two_runs_are_independent_even_when_they_are_the_same() -> None:
    """Then the variance of the difference is twice that of one; resamples in common would make it none."""
    waits, at_s = lindley_waits(0.5, 20_000, np.random.default_rng(3))
    block_s = float(np.ptp(at_s)) / 50
    row = difference((waits, at_s, block_s), (waits, at_s, block_s))
    (low, high), _ = block_intervals(waits, at_s, block_s)[0]["mean"], None
    assert low is not None and high is not None
    assert row["mean_difference_s"] == 0.0
    # from 500 resamples an end has a relative error of about 5 %
    assert row["mean_hi_s"] - row["mean_lo_s"] == pytest.approx(math.sqrt(2) * (high - low), rel=0.15)
    assert row["mean_hi_s"] == pytest.approx(-row["mean_lo_s"], rel=0.15)


def test_every_metric_differs_by_what_was_added() -> None:
    a = slowed(make_run(), 0.0)
    found = differences(a, slowed(make_run(), 0.003))
    assert {"ttft_s", "e2e_s", "ntpot_s", "itl", "lateness_s"} <= set(found.index)
    for metric in ("ttft_s", "e2e_s", "ntpot_s"):
        row = found.loc[metric]
        assert row["mean_difference_s"] == pytest.approx(0.003) == row["p99_difference_s"]
        assert row["mean_lo_s"] < 0.003 < row["mean_hi_s"]
        assert row["mean_a_s"] == pytest.approx(summary(a).loc[metric, "mean"])
        assert row["note"] == ""
    assert found.loc["lateness_s", "mean_difference_s"] == 0.0


def test_each_run_is_read_on_its_own_clock() -> None:
    found = differences(make_run("stamped"), make_run("conventional")).loc["ttft_s"]
    assert found["mean_difference_s"] == pytest.approx(0.002)  # what make_run's clients add


def test_what_is_too_short_for_an_interval_says_which_run_it_is() -> None:
    row = differences(make_run(), slowed(make_run(), 0.001)).loc["ttft_s"]
    assert row["note"].startswith("first run: too short for an interval") and "second" not in row["note"]
    assert math.isnan(row["mean_lo_s"]) and row["mean_difference_s"] == pytest.approx(0.001)
    few = differences(make_run(n=60), make_run()).loc["ttft_s"]
    assert few["note"].startswith("p99 needs 100 values; first run") and math.isnan(few["p99_difference_s"])


def test_a_sample_without_times_has_no_interval() -> None:
    run = make_run()
    run = dataclasses.replace(run, requests=run.requests.assign(begun_ns=pd.array([pd.NA] * 250, "Int64")))
    assert len(sample(run, "ttft_s")[0]) == 240
    assert "first run: too short" in differences(run, run).loc["ttft_s", "note"]


def test_what_was_asked_is_compared_but_not_the_call() -> None:
    a, b = make_run("conventional"), make_run("stamped")
    a.meta["asked"] |= {"seed": 1, "n": 5, "call": "run_load(seed=1)", "rate_per_s": 100}
    b.meta["asked"] |= {"seed": 2, "n": 5, "call": "run_load(seed=2)", "rate_per_s": 200}
    found = asked_differences(a, b)
    assert found.to_dict("index") == {"client": {"a": "conventional", "b": "stamped"}, "seed": {"a": 1, "b": 2}}


# the figure


def test_compare_draws_every_run_and_its_mean_with_its_interval() -> None:
    runs = {"quick": slowed(make_run(), 0.0), "slow": slowed(make_run(), 0.01)}
    ax = plots.compare(runs, "ttft_s", ax=plots.blank_axes())
    for name, run in runs.items():
        values_s = np.sort(run.requests.loc[run.requests["outcome"] == "ok", "ttft_handled_s"].to_numpy(float))
        assert lines(ax)[name][0][1:] == pytest.approx(values_s)
        (mean_s,), _ = lines(ax)[f"mean of {name}"]
        assert mean_s == pytest.approx(values_s.mean())
    bars = [segments[0][:, 0] for segments in (found.get_segments() for found in ax.collections)]  # type: ignore[attr-defined]
    rows = [summary(run).loc["ttft_s"] for run in runs.values()]
    assert np.ravel(bars) == pytest.approx(np.ravel([[row["mean_lo"], row["mean_hi"]] for row in rows]))
    assert "slow: mean" in texts(ax) and "]" in texts(ax)
    assert ax.get_title(loc="left").startswith("TTFT on the handled clock")


def test_compare_names_the_clocks_where_they_differ_and_takes_any_label() -> None:
    runs = {"$a_$b$": make_run("stamped"), "<b>": make_run("conventional")}
    ax = plots.compare(runs, "e2e_s", ax=plots.blank_axes())
    ax.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    assert r"\$a_\$b\$ (wire): mean" in texts(ax) and "<b> (handled): mean" in texts(ax)
    assert "each on its own clock" in ax.get_title(loc="left")
    assert "on the wire clock" in plots.compare(runs, "e2e_s", "wire", plots.blank_axes()).get_title(loc="left")


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("metric", ["ttft_s", "itl"])
def test_no_text_of_compare_lies_on_another(count: int, metric: str) -> None:
    runs = {f"a tool with a long name, run {k}": slowed(make_run(), 0.002 * k) for k in range(count)}
    ax = plots.compare(runs, metric, ax=plots.blank_axes())
    figure = ax.get_figure(root=True)
    figure.draw_without_rendering()  # type: ignore[union-attr]
    boxes = [text.get_window_extent() for text in shown(ax)]
    assert not any(a.padded(-1).overlaps(b.padded(-1)) for k, a in enumerate(boxes) for b in boxes[:k])
    assert all(figure.bbox.padded(1).contains(*corner) for box in boxes for corner in (box.min, box.max))  # type: ignore[union-attr]


def test_what_compare_refuses() -> None:
    run = make_run(stamped=False)
    with pytest.raises(lp.UsageError, match="mapping of label to Run"):
        plots.compare({})
    with pytest.raises(lp.UsageError, match="mapping of label to Run"):
        plots.compare([run])  # type: ignore[arg-type]
    with pytest.raises(lp.UsageError, match="metric must be one of"):
        plots.compare({"a": run}, "speed")
    with pytest.raises(lp.UsageError, match="clock must be one of"):
        plots.compare({"a": run}, clock="sundial")
    with pytest.raises(lp.UsageError, match="no ok request of a has TTFT on the wire clock"):
        plots.compare({"a": run}, clock="wire")
