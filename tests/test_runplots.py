"""Plots of runs show their numbers, seconds under labels in milliseconds: read from the artists, not from pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

import llmprofile as lp
from llmprofile import plots
from llmprofile.bias import BiasTable
from llmprofile.errors import UsageError
from llmprofile.latency import CLOCKS, LATENCIES, SUFFIX
from llmprofile.records import Run
from test_metrics import make_run as make_stamped_run

N, FAILED, TOKENS = 250, 10, 4
GAP_S = 0.002  # what the client's own clock adds
MS = 1_000_000


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


def make_run(client: str = "conventional", n: int = N, stamped: bool = True) -> Run:
    """A run by hand: tokens every 10 ms after a lognormal TTFT; the last `FAILED` requests came to nothing."""
    rng = np.random.default_rng(1)
    ok = np.arange(n) < n - FAILED
    due_ns = 10**12 + np.arange(n) * 5 * MS
    sent_ns = due_ns + MS
    first_ns = sent_ns + (rng.lognormal(np.log(0.05), 0.4, n) * 1e9).astype(np.int64)
    last_ns = first_ns + (TOKENS - 1) * 10 * MS
    stamps = {"due_ns": due_ns, "sent_ns": sent_ns, "begun_ns": sent_ns}
    columns: dict[str, Any] = {"request_id": np.arange(n), "outcome": np.where(ok, "ok", "timeout"), **stamps}
    columns["output_tokens"] = np.where(ok, TOKENS, 0)
    columns["lateness_s"], columns["connect_s"] = (sent_ns - due_ns) / 1e9, np.nan
    columns["reordered"] = pd.array([False] * n, "boolean")
    requests, events = pd.DataFrame(columns), []
    for clock, gap_s in zip(CLOCKS, (0.0, GAP_S, GAP_S), strict=True):
        there = ok & (stamped or clock != "wire") & (client == "conventional" or clock != "handled")
        for name, token_ns in (("first", first_ns), ("last", last_ns)):
            requests[f"{name}_{clock}_ns"] = pd.array(token_ns + int(gap_s * 1e9), "Int64")
            requests.loc[~there, f"{name}_{clock}_ns"] = pd.NA
        ttft_s, e2e_s = ((t - sent_ns) / 1e9 + gap_s for t in (first_ns, last_ns))
        for name in LATENCIES:
            value_s = {"ttft": ttft_s, "e2e": e2e_s, "ntpot": e2e_s / TOKENS}.get(name, np.full(n, np.nan))
            requests[f"{name}{SUFFIX[clock]}"] = np.where(there, value_s, np.nan)
        at_ns = (first_ns[:, None] + np.arange(TOKENS) * 10 * MS + int(gap_s * 1e9))[ok].ravel()
        events.append(pd.Series(pd.array(at_ns, "Int64"), name=f"{clock}_ns"))
        if not there.any():
            events[-1][:] = pd.NA
    frame = pd.concat([*events, pd.Series(np.repeat(np.arange(n)[ok], TOKENS), name="request_id")], axis=1)
    return Run(None, {"asked": {"client": client}}, requests, {"events": frame.assign(tokens=1)})


def lines(ax: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {str(line.get_label()): line.get_data() for line in ax.lines}  # type: ignore[misc]


def texts(ax: Axes) -> str:
    return "\n".join(text.get_text() for text in ax.texts)


def ok_values(run: Run, column: str) -> np.ndarray:
    return np.sort(run.requests.loc[run.requests["outcome"] == "ok", column].to_numpy(float))


@pytest.mark.parametrize(("client", "own"), [("conventional", "handled"), ("stamped", "seen")])
def test_clocks_draws_both_distributions_of_the_ok_requests(client: str, own: str) -> None:
    run = make_run(client)
    drawn = lines(plots.clocks(run, "ttft_s", plots.blank_axes()))
    assert list(drawn) == [own, "wire"]
    for clock, (x_s, share) in drawn.items():
        assert x_s[1:] == pytest.approx(ok_values(run, f"ttft{SUFFIX[clock]}"))
        assert share[1:] == pytest.approx(np.arange(1, N - FAILED + 1) / (N - FAILED))


def test_clocks_shades_and_names_the_gap_between_the_means() -> None:
    run = make_run()
    ax = plots.clocks(run, "ttft_s", plots.blank_axes())
    wire_s = ok_values(run, "ttft_s")
    edges = np.concatenate([p.vertices for p in ax.collections[0].get_paths()])[:, 0]
    assert (edges.min(), edges.max()) == pytest.approx((wire_s.min(), wire_s.max() + GAP_S))
    assert f"off by +2.00 ms (+{GAP_S / wire_s.mean():.1%}) in the mean" in texts(ax)


def test_clocks_compares_requests_that_have_both_clocks() -> None:
    run = make_run()
    run.requests.loc[:99, "ttft_s"] = np.nan
    ax = plots.clocks(run, "ttft_s", plots.blank_axes())
    assert {len(x_s) for x_s, _ in lines(ax).values()} == {N - FAILED - 100 + 1}
    assert "+2.00 ms" in texts(ax)


def test_clocks_takes_inter_token_latency() -> None:
    ax = plots.clocks(make_run(), "itl", plots.blank_axes())
    x_s, _ = lines(ax)["wire"]
    assert len(x_s) - 1 == (N - FAILED) * (TOKENS - 1)
    assert x_s == pytest.approx(0.01)
    assert "tokens of the 240 ok of 250 requests" in ax.get_ylabel()


@pytest.mark.parametrize("metric", ["ttft_s", "ntpot_s", "lateness_s"])
def test_latency_marks_the_percentiles(metric: str) -> None:
    run = make_run("stamped")
    ax = plots.latency(run, metric, ax=plots.blank_axes())
    values_s = ok_values(run, metric)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        (x_s,), (share,) = lines(ax)[name]
        assert (x_s, share) == pytest.approx((np.quantile(values_s, q), q))


def test_latency_leaves_out_a_percentile_that_the_sample_cannot_support() -> None:
    assert list(lines(plots.latency(make_run(n=99 + FAILED), ax=plots.blank_axes()))) == ["handled", "p50", "p90"]
    assert "p99" in lines(plots.latency(make_run(n=100 + FAILED), ax=plots.blank_axes()))


@pytest.mark.parametrize(
    ("client", "stamped", "clock"),
    [("conventional", True, "handled"), ("stamped", True, "wire"), ("stamped", False, "seen")],
)
def test_ntpot_is_read_on_the_runs_own_clock(client: str, stamped: bool, clock: str) -> None:
    run = make_run(client, stamped=stamped)
    ax = plots.ntpot(run, plots.blank_axes())
    assert lines(ax)[clock][0][1:] == pytest.approx(ok_values(run, f"ntpot{SUFFIX[clock]}"))
    assert f"NTPOT on the {clock} clock" in ax.get_title(loc="left")


def of_lengths(tokens: np.ndarray, ttft_s: float, tpot_s: float) -> Run:
    """Requests of these lengths, whose latency is (TTFT + (n − 1) TPOT)."""
    run, ok = make_run(n=len(tokens) + FAILED), np.arange(len(tokens) + FAILED) < len(tokens)
    run.requests.loc[ok, "output_tokens"] = tokens
    run.requests.loc[ok, "ntpot_handled_s"] = (ttft_s + (tokens - 1) * tpot_s) / tokens
    run.requests.loc[ok, "tpot_handled_s"] = np.where(tokens > 1, tpot_s, np.nan)
    return run


def bars(ax: Axes, label: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle, low and high ends of the error bars of this name."""
    (found,) = (c for c in ax.containers if c.get_label() == label)
    segments = np.array(found[2][0].get_segments())  # type: ignore[index]
    return found[0].get_xydata(), segments[:, 0], segments[:, 1]  # type: ignore[index]


def test_ntpot_by_length_draws_quartiles_of_each_length() -> None:
    run = of_lengths(np.repeat([5, 20, 80], 40), 0.05, 0.01)
    run.requests.loc[:119, "ntpot_handled_s"] *= np.tile(np.arange(1, 41), 3)  # quartiles 10.75, 20.5, 30.25 of each
    drawn, low, high = bars(plots.ntpot_by_length(run, plots.blank_axes()), "NTPOT")
    assert drawn[:, 0].tolist() == [5, 20, 80]
    one_s = np.array([0.09 / 5, 0.24 / 20, 0.84 / 80])
    for ends, factor in ((drawn, 20.5), (low, 10.75), (high, 30.25)):
        assert ends[:, 1] == pytest.approx(factor * one_s)


def test_ntpot_by_length_puts_many_lengths_into_groups() -> None:
    run = of_lengths(np.arange(1, 201), 0.05, 0.01)
    ax = plots.ntpot_by_length(run, plots.blank_axes())
    drawn, *_ = bars(ax, "NTPOT")
    assert drawn[:, 0] == pytest.approx(np.arange(13, 201, 25))
    assert drawn[:, 1] == pytest.approx((0.05 + (drawn[:, 0] - 1) * 0.01) / drawn[:, 0])
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "output tokens")


def test_ntpot_falls_towards_tpot_along_the_formula() -> None:
    runs = [of_lengths(np.repeat([1, 4, 16], 5), 0.05, 0.01), of_lengths(np.repeat([64], 5), 0.05, 0.01)]
    ax = plots.ntpot_against_tpot(runs, ttft_s=0.05, tpot_s=0.01, ax=plots.blank_axes())
    drawn, *_ = bars(ax, "NTPOT")
    assert drawn[:, 0].tolist() == [1, 4, 16, 64]
    lengths, curve_s = lines(ax)["formula"]
    assert np.interp(drawn[:, 0], lengths, curve_s) == pytest.approx(drawn[:, 1], rel=1e-3)
    assert drawn[[0, -1], 1] == pytest.approx([0.05, 0.68 / 64])
    assert bars(ax, "TPOT")[0] == pytest.approx(np.array([[4, 0.01], [16, 0.01], [64, 0.01]]))
    assert "with TTFT 50.0 ms, TPOT 10.0 ms" in texts(ax)
    assert "formula" not in lines(plots.ntpot_against_tpot(runs[0], ax=plots.blank_axes()))


def bias_table(server_s: float, lateness_s: float, clock: str = "handled", **parts_s: float) -> BiasTable:
    row = {"true_s": server_s, "sending_s": np.nan, "waiting_s": np.nan, "handling_s": np.nan}
    frame = pd.DataFrame([row | parts_s], index=["ttft_s"])
    return BiasTable(clock, frame, lateness_s, np.nan, 0.0, np.nan, ())


def heights(ax: Axes) -> dict[str, list[float]]:
    return {str(c.get_label()): [p.get_height() for p in c.patches] for c in ax.containers}  # type: ignore[attr-defined]


def test_decomposition_stacks_the_parts_by_rate() -> None:
    tables = {
        400: bias_table(0.06, 0.003, sending_s=0.004, waiting_s=0.02, handling_s=0.001),
        50: bias_table(0.05, 0.001, sending_s=0.0001, waiting_s=0.0002, handling_s=0.0002),
    }
    ax = plots.decomposition(tables, plots.blank_axes())
    assert [label.get_text() for label in ax.get_xticklabels()] == ["50", "400"]
    drawn = heights(ax)
    assert list(drawn) == ["server", "sending", "waiting", "handling", "lateness"]
    assert drawn["server"] == pytest.approx([0.05, 0.06])
    assert drawn["waiting"] == pytest.approx([0.0002, 0.02])
    assert drawn["lateness"] == [0.001, 0.003]
    tops = [p.get_y() + p.get_height() for p in ax.containers[3].patches]  # type: ignore[attr-defined]
    assert tops == pytest.approx([0.0505, 0.085])
    assert "+0.50 ms\n(+1.0%)" in texts(ax)
    assert "+25.0 ms\n(+41.7%)" in texts(ax)
    assert ax.get_ylabel() == "mean TTFT (ms)"


def test_decomposition_leaves_out_what_a_client_does_not_do_and_says_what_is_unknown() -> None:
    tables = {50: bias_table(0.05, 0.001, "seen", sending_s=0.0001, waiting_s=0.0), 100: bias_table(np.nan, np.nan)}
    ax = plots.decomposition(tables, plots.blank_axes())
    assert list(heights(ax)) == ["server", "sending", "waiting", "lateness"]
    assert "no kernel stamps" in texts(ax)


def test_decomposition_of_a_run_is_its_bias_table() -> None:
    # begun 1 ms before sent; seen 1 ms, handled 3 ms after the wire; 20 ms TTFT
    table = lp.separate_bias(make_stamped_run(150, "conventional"))
    drawn = heights(plots.decomposition({200: table}, plots.blank_axes()))
    parts = {"server": 0.02, "sending": 0.001, "waiting": 0.001, "handling": 0.002, "lateness": 0.003}
    assert {name: height for name, (height,) in drawn.items()} == pytest.approx(parts)


def test_timeline_marks_every_token_of_the_first_requests() -> None:
    run = make_run("stamped")
    drawn = lines(plots.timeline(run, 12, plots.blank_axes()))
    first = run.requests.head(12)
    origin_ns = first["due_ns"].min()
    assert drawn["due"][0] == pytest.approx(np.arange(12) * 0.005)
    assert drawn["sent"][0] == pytest.approx(np.arange(12) * 0.005 + 0.001)
    assert drawn["first token"][0] == pytest.approx((first["first_wire_ns"] - origin_ns).to_numpy(float) / 1e9)
    tokens_s, rows = drawn["token"]
    assert np.bincount(rows).tolist() == [TOKENS] * 12
    wire_ns = run.events.loc[run.events["request_id"] < 12, "wire_ns"]
    assert tokens_s == pytest.approx((wire_ns - origin_ns).to_numpy(float) / 1e9)


def test_timeline_names_what_became_of_a_request_that_failed() -> None:
    run = make_run(n=12)
    ax = plots.timeline(run, 12, plots.blank_axes())
    assert [(t.get_text().strip(), t.xy[1]) for t in ax.texts] == [("timeout", row) for row in range(2, 12)]  # type: ignore[attr-defined]
    first_s, rows = lines(ax)["first token"]
    assert rows[~np.isnan(first_s)].tolist() == [0, 1]


def error_table(**errors_s: list[float]) -> pd.DataFrame:
    rates = [100.0, 50.0]
    frames = [
        pd.DataFrame({"rate_per_s": rates, "client": c, "error_mean_s": e, "error_p99_s": np.multiply(e, 4)})
        for c, e in errors_s.items()
    ]
    return pd.concat(frames, ignore_index=True).assign(true_mean_s=0.05)


def test_error_against_rate_draws_mean_and_p99_of_each_client() -> None:
    table = error_table(conventional=[0.02, 0.001], stamped=[2e-5, 1e-5])
    ax = plots.error_against_rate(table, plots.blank_axes())
    drawn = lines(ax)
    assert drawn["conventional mean"][0].tolist() == [50.0, 100.0]
    assert drawn["conventional mean"][1].tolist() == [0.001, 0.02]
    assert drawn["stamped p99"][1] == pytest.approx([4e-5, 8e-5])
    assert ax.get_yscale() == "log"
    assert ax.get_xticks().tolist() == [50.0, 100.0]
    assert "the true TTFT: 50.0 ms" in texts(ax)


def test_error_against_rate_shows_an_error_below_zero() -> None:
    ax = plots.error_against_rate(error_table(other=[0.02, -1e-4]), plots.blank_axes())
    assert ax.get_yscale() == "symlog"
    assert lines(ax)["other mean"][1].tolist() == [-1e-4, 0.02]


def test_error_against_rate_keeps_names_apart_where_curves_meet() -> None:
    for ends_s in (0.02, 0.0201), (0.02, 0.023), (1e-5, 1.2e-5):
        errors_s = {name: [end_s, 0.5] for name, end_s in zip(("conventional", "stamped"), ends_s, strict=True)}
        ax = plots.error_against_rate(error_table(**errors_s), plots.blank_axes())
        figure = ax.get_figure(root=True)
        figure.draw_without_rendering()
        names = [t for t in ax.texts if t.get_text().endswith(("mean", "p99"))]
        heights_pt = sorted(t.get_window_extent().y0 * 72 / figure.dpi for t in names)
        assert len(names) == 4
        assert min(np.diff(heights_pt)) > 8


@pytest.mark.parametrize(
    "draw",
    [plots.clocks, plots.latency, plots.ntpot, plots.ntpot_by_length, plots.timeline],
    ids=lambda draw: draw.__name__,
)
def test_every_plot_takes_axes_or_makes_its_own_and_leaves_the_settings_alone(draw: Any) -> None:
    settings, given = dict(mpl.rcParams), plots.blank_axes()
    assert draw(make_run(), ax=given) is given
    assert not plt.get_fignums()
    own = draw(make_run())
    assert plt.gcf() is own.get_figure()
    assert own.get_figure().get_figwidth() == 7.0
    assert dict(mpl.rcParams) == settings


def test_seconds_are_shown_as_milliseconds() -> None:
    for metric in ("ttft_s", "ntpot_s"):  # a logarithmic axis and a linear one
        ax = plots.latency(make_run(), metric, ax=plots.blank_axes())
        assert ax.get_xlabel().endswith("(ms)")
        assert [ax.xaxis.get_major_formatter()(t) for t in (0.05, 0.0005)] == ["50", "0.5"]


def test_a_wide_latency_gets_a_logarithmic_axis() -> None:
    run = make_run()
    assert plots.latency(run, "ntpot_s", ax=plots.blank_axes()).get_xscale() == "linear"
    run.requests["ntpot_handled_s"] **= 5
    assert plots.latency(run, "ntpot_s", ax=plots.blank_axes()).get_xscale() == "log"


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda run: plots.clocks(run, "lateness_s"), "metric must be one of ttft_s, .*; not lateness_s"),
        (lambda run: plots.latency(run, "speed"), "metric must be one of .*; not speed"),
        (lambda run: plots.latency(run, clock="wall"), "clock must be one of wire, seen, handled; not wall"),
        (lambda run: plots.latency(run, "tpot_s"), "no ok request of this run has TPOT on the seen clock"),
        (lambda run: plots.clocks(run), "no ok request of this run has TTFT on the wire and the seen clock"),
        (lambda run: plots.timeline(run, 0), "n must be a whole number of at least 1; not 0"),
        (lambda run: plots.error_against_rate(pd.DataFrame()), "the table holds no run"),
        (lambda run: plots.ntpot_against_tpot(run), "no ok request has TPOT and its number of output tokens"),
        (lambda run: plots.ntpot_against_tpot([]), "no ok request has NTPOT and its number of output tokens"),
        (lambda run: plots.decomposition({}), "none of these tables has a TTFT on the wire"),
        (lambda run: plots.decomposition({50: bias_table(np.nan, 0.0)}), "none of these tables has a TTFT on the wire"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(draw: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        draw(make_run("stamped", stamped=False))
    assert not plt.get_fignums()


def test_every_label_of_the_error_axis_is_in_milliseconds() -> None:
    for errors_s in ([0.004, 0.003], [0.02, 1e-5]):  # within a decade, over several
        ax = plots.error_against_rate(error_table(conventional=errors_s), plots.blank_axes())
        ax.get_figure(root=True).draw_without_rendering()
        low_s, high_s = ax.get_ylim()
        shown = [(t.get_position()[1], t.get_text()) for t in ax.get_yticklabels(which="both") if t.get_text()]
        assert any(low_s <= at_s <= high_s for at_s, _ in shown)
        assert [float(text) for _, text in shown] == pytest.approx([at_s * 1e3 for at_s, _ in shown])
