"""Where texts are put, and what ticks say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.ticker import NullFormatter

from llmprofile.style import INK, LINE_PT, _apart, blank_axes, key, log_ticks, milliseconds, plain

CURVES = {
    "falling": lambda x: 1 - x,
    "rising": lambda x: x,
    "along the top": lambda x: 1 - 0.4 * x**8,
    "along the bottom": lambda x: 0.02 + 0 * x,
}


@pytest.mark.parametrize("shape", CURVES)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_key_is_where_no_curve_is(shape: str, scale: str) -> None:
    curve = CURVES[shape]
    ax, x = blank_axes(), np.linspace(0, 1, 50)
    y = curve(x) if scale == "linear" else 10.0 ** (4 * curve(x))
    ax.plot(x, y)
    ax.set(yscale=scale, xlim=(0, 1), ylim=(0, 1) if scale == "linear" else (1, 1e4))
    key(ax, [("a curve of some kind: mean 12.3 ms", INK), ("and another line", INK)])
    figure = ax.get_figure(root=True)
    figure.draw_without_rendering()  # type: ignore[union-attr]
    steps = np.linspace(0, 1, 2000)
    at = ax.transData.transform(np.column_stack([steps, np.interp(steps, x, y)]))
    for text in ax.texts:
        box = text.get_window_extent()
        assert not any(box.contains(*point) for point in at)
        assert ax.bbox.contains(*box.min)
        assert ax.bbox.contains(*box.max)


def test_names_are_a_line_apart_and_below_the_top() -> None:
    assert _apart([10.0, 50.0, 90.0], 100.0) == [10.0, 50.0, 90.0]
    assert _apart([10.0, 12.0, 13.0], 100.0) == [10.0, 10 + LINE_PT, 10 + 2 * LINE_PT]
    assert _apart([97.0, 98.0, 99.0], 100.0) == [100 - 2 * LINE_PT, 100 - LINE_PT, 100.0]
    assert _apart([], 100.0) == []


def test_labels_of_a_logarithmic_axis_have_twos_and_fives_where_decades_are_few() -> None:
    ax = blank_axes()
    log_ticks(ax.xaxis, 1e-4, 1e-2)
    assert [ax.xaxis.get_major_formatter()(s) for s in (1e-4, 1.0)] == ["0.1", "1000"]
    assert [ax.xaxis.get_minor_formatter()(s) for s in (2e-4, 0.003, 0.005)] == ["0.2", "", "5"]
    log_ticks(ax.yaxis, 1.0, 1e6, plain)
    assert ax.yaxis.get_major_formatter()(100.0) == "100"
    assert isinstance(ax.yaxis.get_minor_formatter(), NullFormatter)
    assert milliseconds(12.5e-6) == "0.0125"
