"""The explorers show what theory says: figures read back from their SVG, sliders moved to their ends."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any
from xml.etree import ElementTree

import ipywidgets
import numpy as np
import pytest

from llmprofile.errors import UsageError
from llmprofile.explore import (
    GROUPINGS,
    UNITS,
    WIDTH,
    explore_queue,
    explore_run,
    look_at_run,
    path_svg,
    queue_html,
    run_html,
    run_svg,
    ttft_svg,
    waits_svg,
)
from llmprofile.latency import CLOCKS, LABELS
from llmprofile.metrics import summarise
from llmprofile.records import Run
from llmprofile.scenario import Scenario, look_at_queue
from test_metrics import MISSING, UNSTAMPED
from test_metrics import make_run as make_small_run
from test_runplots import make_run

MS = 1_000_000

# figures


def parsed(html: str) -> ElementTree.Element:
    """What is shown, which must be well-formed."""
    return ElementTree.fromstring(f"<root>{html.replace('<br>', '<br/>')}</root>")


def texts(html: str) -> str:
    return "\n".join(
        "".join(node.itertext()) for node in parsed(html).iter() if node.tag in ("p", "text", "td", "small")
    )


def curves(svg: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The pixels of each curve, in order."""
    drawn = [node for node in parsed(svg).iter("path") if node.get("class", "").startswith("curve")]
    corners = [np.array([p.split(",") for p in node.attrib["d"][1:].split("L")], float) for node in drawn]
    return [(at[:, 0], at[:, 1]) for at in corners]


def scale(svg: str, axis: str, unit: float, log: bool = False) -> Any:
    """From pixels to values, as an axis's own tick labels have it."""
    ticks = []
    for node in parsed(svg).iter("text"):
        label = (node.text or "").removesuffix("%")
        is_tick = node.get("text-anchor") == {"x": "middle", "y": "end"}[axis] and re.fullmatch(r"-?[\d.e+-]+", label)
        if is_tick and node.get(axis):
            shift = {"x": 0.0, "y": 4.0}[axis]  # of a label below the line that it names
            ticks.append((float(node.attrib[axis]) - shift, float(label) * unit))
    pixels, values = np.array(ticks).T
    slope, start = np.polyfit(pixels, np.log(values) if log else values, 1)
    return lambda pixel: np.exp(slope * pixel + start) if log else slope * pixel + start


def test_the_drawn_waits_are_the_exponential_tail_of_an_mm1_queue() -> None:
    svg = waits_svg(look_at_queue(Scenario(rate_per_s=800, tokens=1, service_s=1e-3)))
    ((x, y),) = curves(svg)
    wait_s, longer = scale(svg, "x", 1e-3)(x), scale(svg, "y", 0.01, log=True)(y)
    # a tenth of a pixel is 0.04 % of the width, and 1 % of ten times less over a quarter of the height
    assert longer == pytest.approx(0.8 * np.exp(-0.2 * wait_s / 1e-3), rel=0.02)
    assert longer[0] == pytest.approx(0.8, rel=0.01)
    assert longer[-1] == pytest.approx(1e-4, rel=0.15)


@pytest.mark.parametrize("scenario", [Scenario(), Scenario(burst=30, processes=2, scv=0.5), Scenario(rate_per_s=600)])
def test_the_drawn_path_is_the_simulated_one(scenario: Scenario) -> None:
    view = look_at_queue(scenario)
    svg = path_svg(view)
    x, y = curves(svg)[0]
    assert scale(svg, "x", 1e-3)(x) == pytest.approx(view.path.times_s, abs=view.path.length_s / 1000)
    assert scale(svg, "y", 1e-3)(y) == pytest.approx(view.path.work_s, abs=view.path.work_s.max() / 500)


@pytest.mark.parametrize(("rate_per_s", "ttft_s"), [(30.0, 0.001), (300.0, 0.001), (390.0, 0.001), (600.0, 0.5)])
def test_the_bars_are_as_long_as_the_ttfts(rate_per_s: float, ttft_s: float) -> None:
    view = look_at_queue(Scenario(rate_per_s=rate_per_s, ttft_s=ttft_s))
    true, base, added = (float(node.attrib["width"]) for node in parsed(ttft_svg(view)).iter("rect"))
    assert true == base
    assert (true + added) / true == pytest.approx(view.inflation, rel=0.02, abs=1.1 / true)


def test_nothing_is_drawn_beside_the_figure() -> None:
    for scenario in (Scenario(), Scenario(burst=200), Scenario(rate_per_s=1, tokens=1), Scenario(1e4, 2000, 1e-3)):
        view = look_at_queue(scenario)
        for svg in (waits_svg(view), path_svg(view), ttft_svg(view)):
            for x, _ in curves(svg):
                assert 0 <= x.min() <= x.max() <= WIDTH
            for node in parsed(svg).iter("text"):
                if node.get("x"):
                    # 11 px letters are 5.5 px wide on average, those of the bold head 7
                    wide = len(node.text or "") * (7 if node.get("class") == "head" else 5.5)
                    left = float(node.attrib["x"]) - wide * {"end": 1, "middle": 0.5}.get(
                        node.get("text-anchor", ""), 0
                    )
                    assert left >= 0
                    assert left + wide <= WIDTH, node.text


# the queue explorer


def sliders_of(explorer: Any) -> dict[str, Any]:
    return {slider.description: slider for slider in explorer.children[0].children}


def stops_of(slider: Any) -> list[float]:
    """Its lower end, what comes after where it stands, its upper end."""
    if isinstance(slider, ipywidgets.SelectionSlider):
        values = [value for _, value in slider.options]
        return [values[0], values[values.index(slider.value) + 1], values[-1]]
    return [slider.min, slider.value + slider.step, slider.max]


def test_every_slider_changes_what_is_shown() -> None:
    explorer = explore_queue()
    shown = explorer.children[1]
    at_start = texts(shown.value), curves(shown.value)
    for name, slider in sliders_of(explorer).items():
        before = slider.value
        slider.value = stops_of(slider)[1]
        assert texts(shown.value) != at_start[0], name
        moved = [not np.array_equal(a, b) for a, b in zip(curves(shown.value), at_start[1], strict=True)]
        assert all(moved) or name == "true mean TTFT (ms)", name
        slider.value = before
    assert texts(shown.value) == at_start[0]


def test_every_corner_of_the_sliders_is_shown() -> None:
    explorer = explore_queue()
    sliders, shown = sliders_of(explorer), explorer.children[1]
    for name in ("true mean TTFT (ms)", "tokens per request"):  # the one is added, the other as good as the rate
        slider = sliders.pop(name)
        for end in stops_of(slider)[::2]:
            slider.value = end
            assert not re.search(r"\b(nan|inf)\b", shown.value)
    ends = [(stops_of(slider)[0], stops_of(slider)[-1]) for slider in sliders.values()]
    ways = set()
    for corner in itertools.product(*ends):
        for slider, value in zip(sliders.values(), corner, strict=True):
            slider.value = value
        said = texts(shown.value)
        assert not re.search(r"\b(nan|inf)\b", shown.value)
        load = corner[0] * 2000 * corner[1] * 1e-6 / corner[4]
        ways.add(("can't keep up" in said, load >= 1))
    assert ways == {(True, True), (False, False)}


def test_the_sliders_start_where_a_scenario_does() -> None:
    values = [slider.value for slider in sliders_of(explore_queue()).values()]
    start = {name: getattr(Scenario(), name) / UNITS.get(name, 1) for name in Scenario.__dataclass_fields__}
    assert values == pytest.approx(list(start.values()))


def test_logarithmic_sliders_hold_round_numbers() -> None:
    rate = sliders_of(explore_queue())["requests per second"]
    labels, values = zip(*rate.options, strict=True)
    assert [float(label) for label in labels] == list(values)
    assert (values[0], values[-1]) == (1, 10_000)
    assert max(b / a for a, b in itertools.pairwise(values)) == pytest.approx(1.1)


def test_figures_in_words_are_those_of_the_closed_form() -> None:
    said = texts(queue_html(look_at_queue(Scenario(rate_per_s=92, tokens=100, service_s=1e-4))))
    # M/M/1: ρ / (1 − ρ) services, of which 1 % are beyond ln(92) / 0.08
    assert "ρ = 0.92: a token waits 1.15 ms on average (p99: 5.65 ms), and takes 0.10 ms." in said
    assert "A mean TTFT of 50.0 ms is reported as 51.2" in said or "as 51.3 ms" in said  # 51.25
    assert ": 1.025 times the truth." in said
    assert "9,200/s" in said


def test_a_queue_that_grows_says_how_fast() -> None:
    said = texts(queue_html(look_at_queue(Scenario(rate_per_s=240, tokens=100, service_s=1e-4, processes=2))))
    # 24,000 tokens come, 20,000 are handled
    assert (
        "ρ = 1.20: the client can't keep up. The queue grows by 4,000 tokens per second (in 2 processes together)"
        in said
    )
    assert "a token's wait by 200.0 ms per second" in said
    assert "a TTFT of 50.0 ms is on average reported as 6.0" in said
    assert "3 processes or more would keep up" in said


# the run explorer


def varied_run() -> Run:
    """250 requests over 1.25 s, ten of them timeouts; three workers, seven lengths."""
    run = make_run()
    n = len(run.requests)
    run.requests["worker"] = np.arange(n) % 3
    run.requests["output_tokens"] = 1 + np.arange(n) % 7
    return run


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("metric", LABELS)
def test_ungrouped_figures_are_those_of_the_summary(metric: str, clock: str) -> None:
    run = make_run()
    (row,) = look_at_run(run, metric, clock).rows
    (own,) = [r for r in summarise(run, clock) if r["metric"] == metric]
    assert {k: v for k, v in row.items() if k not in ("metric", "note")} == {
        k: v for k, v in own.items() if k not in ("metric", "note")
    }


def test_warm_up_is_cut_by_when_requests_began() -> None:
    run = varied_run()
    begun_s = (run.requests["begun_ns"] - run.requests["begun_ns"].min()) / 1e9
    view = look_at_run(run, "ttft_s", "wire", trim_s=0.5)
    kept = run.requests[(begun_s >= 0.5) & (run.requests["outcome"] == "ok")]["ttft_s"].to_numpy()
    assert len(kept) == 140
    assert np.sort(view.values_s["all"]) == pytest.approx(np.sort(kept))
    assert view.rows[0]["mean"] == pytest.approx(kept.mean())
    assert view.sentence.startswith(
        "150 of 250 requests (140 ok, 10 timeout); 100 that began in the first 500.0 ms are"
    )


@pytest.mark.parametrize("grouping", [g for g in GROUPINGS if g != "none"])
@pytest.mark.parametrize("metric", ["ttft_s", "itl", "lateness_s"])
def test_groups_share_the_values_out(metric: str, grouping: str) -> None:
    run = varied_run()
    whole, grouped = (look_at_run(run, metric, "wire", g) for g in ("none", grouping))
    apart = {"worker": 3, "output length": 4, "outcome": 2}[grouping]
    assert len(grouped.rows) == apart
    ok = {name: v for name, v in grouped.values_s.items() if name != "timeout"}
    assert np.sort(np.concatenate(list(ok.values()))) == pytest.approx(np.sort(whole.values_s["all"]))
    assert [row["n"] for row in grouped.rows] == [len(v) for v in grouped.values_s.values()]


def test_groups_hold_their_own() -> None:
    run = varied_run()
    ok = run.requests[run.requests["outcome"] == "ok"]
    for name, values_s in look_at_run(run, "ttft_s", "wire", "worker").values_s.items():
        own = ok.loc[ok["worker"] == int(name.removeprefix("worker ")), "ttft_s"]
        assert values_s == pytest.approx(own.to_numpy())
    lengths = look_at_run(run, "ttft_s", "wire", "output length").values_s
    assert list(lengths) == ["1–2 tokens", "3–4 tokens", "5–6 tokens", "7 tokens"]
    assert lengths["7 tokens"] == pytest.approx(ok.loc[ok["output_tokens"] == 7, "ttft_s"].to_numpy())
    run.requests["output_tokens"] = 1 + np.arange(len(run.requests)) % 3
    assert list(look_at_run(run, grouping="output length").values_s) == ["1 tokens", "2 tokens", "3 tokens"]


def test_other_outcomes_are_there_by_outcome_only() -> None:
    run = varied_run()
    assert look_at_run(run, "lateness_s").rows[0]["n"] == 240
    rows = look_at_run(run, "lateness_s", grouping="outcome").rows
    assert {row["metric"]: row["n"] for row in rows} == {"ok": 240, "timeout": 10}


def test_what_has_no_length_or_worker_is_a_group_of_its_own() -> None:
    run = varied_run()
    run.requests["output_tokens"] = run.requests["output_tokens"].astype("Int64")
    run.requests.loc[:9, "output_tokens"] = None
    assert len(look_at_run(run, grouping="output length").values_s["length unknown"]) == 10


def test_the_drawn_distribution_is_that_of_the_values() -> None:
    view = look_at_run(make_run(), "ttft_s", "wire")
    svg = run_svg(view)
    ((x, y),) = curves(svg)
    log = "curve" in svg and np.ptp(np.log(np.quantile(view.values_s["all"], [0.005, 0.995]))) > math.log(8)
    ttft_s, share = scale(svg, "x", 1e-3, log=bool(log))(x), scale(svg, "y", 0.01)(y)
    expected_s = np.quantile(view.values_s["all"], share.clip(0, 1))
    inside = (share > 0.01) & (share < 0.99)
    assert ttft_s[inside] == pytest.approx(expected_s[inside], rel=0.02)
    for name in ("p50", "p90", "p99"):
        assert f"{name} {view.rows[0][name] * 1e3:.1f} ms" in texts(svg)


def test_every_choice_is_shown() -> None:
    explorer = explore_run(varied_run())
    metric, clock, grouping, trim = explorer.children[0].children
    shown = explorer.children[1]
    for chosen in itertools.product(LABELS, CLOCKS, GROUPINGS, (0.0, trim.max)):
        metric.value, clock.value, grouping.value, trim.value = chosen
        assert LABELS[metric.value] in texts(shown.value)
        assert not re.search(r"\b(nan|inf|None)\b", texts(shown.value))
    assert trim.max == pytest.approx(249 * 0.005)


def test_every_control_changes_what_is_shown() -> None:
    explorer = explore_run(varied_run())
    shown = explorer.children[1]
    for control, value in zip(explorer.children[0].children, ("e2e_s", "seen", "worker", 0.3), strict=True):
        before = texts(shown.value)
        control.value = value
        assert texts(shown.value) != before


def test_runs_with_little_to_show() -> None:
    for run in (make_small_run(n=1), make_small_run(n=3, failed=(0, 1, 2)), make_small_run(**UNSTAMPED)):
        for grouping in GROUPINGS:
            assert "requests" in texts(run_html(look_at_run(run, "ttft_s", "wire", grouping)))
    unstamped = look_at_run(make_small_run(**UNSTAMPED), "ttft_s", "wire")
    assert "none of these requests has TTFT" in texts(run_svg(unstamped))
    never = make_small_run(failed=tuple(range(12)), begun_ns=MISSING, due_ns=MISSING)
    assert explore_run(never).children[0].children[3].max == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metric": "speed"}, "metric must be one of ttft_s"),
        ({"clock": "sun"}, "clock must be one of wire, seen, handled; not sun"),
        ({"grouping": "colour"}, "grouping must be one of none, output length, worker, outcome; not colour"),
        ({"trim_s": -1.0}, "trim_s must be a finite number of at least 0; not -1.0"),
    ],
)
def test_what_cannot_be_chosen(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        look_at_run(make_small_run(), **wrong)


def test_what_is_no_run() -> None:
    with pytest.raises(UsageError, match="run must be a Run, as of run_load or load; not str"):
        explore_run("runs/one")  # type: ignore[arg-type]
