"""The server's side over the client's: read from the artists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from llmprofile.errors import UsageError
from llmprofile.records import Run
from llmprofile.serverplots import server_side
from llmprofile.style import blank_axes
from test_metrics import make_run
from test_scrape import LLAMA_CPP, VLLM, run_with


@pytest.fixture(autouse=True)
def no_windows() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_requests_in_the_server_over_client_latencies(tmp_path: Path) -> None:
    later = VLLM.replace('_count{engine="0",model_name="org/model-8b"} 12.0', '_count{engine="0"} 14.0')
    later = later.replace('_sum{engine="0",model_name="org/model-8b"} 1.5', '_sum{engine="0"} 1.55')
    run = run_with(tmp_path, VLLM, later)
    ax = server_side(run, ax=blank_axes())
    figure = ax.get_figure()
    assert figure is not None
    (right,) = (other for other in figure.axes if other is not ax)
    left_lines = {line.get_label(): line.get_xydata() for line in ax.lines}
    right_lines = {line.get_label(): line.get_xydata() for line in right.lines}
    assert set(left_lines) == {"ttft_s", "queue_s"} and set(right_lines) == {"running", "waiting"}
    np.testing.assert_allclose(left_lines["ttft_s"], [[0.1 * k, 0.02] for k in range(12)])
    np.testing.assert_allclose(left_lines["queue_s"], [[0, math.nan], [1, 0.025]])
    np.testing.assert_allclose(right_lines["running"], [[0, 7], [1, 7]])
    np.testing.assert_allclose(right_lines["waiting"], [[0, 2], [1, 2]])
    (band,) = ax.collections
    assert band.get_paths()[0].get_extents().ymax == 0.5
    assert ax.get_ylabel() == "TTFT (ms)" and "vLLM" in ax.get_title(loc="left")
    figure.canvas.draw()


def test_what_a_server_lacks_is_not_drawn_and_failures_are_said(tmp_path: Path) -> None:
    run = run_with(tmp_path, LLAMA_CPP)
    run.meta["scrape"] |= {"failed": 2, "reasons": {"status 503": 2}}
    ax = server_side(run, "e2e_s")
    assert [line.get_label() for line in ax.lines] == ["e2e_s"]
    assert not ax.collections
    assert "2 of 3 scrapes failed: status 503" in [text.get_text() for text in ax.texts]


def test_latencies_that_span_much_have_a_logarithmic_axis(tmp_path: Path) -> None:
    run = run_with(tmp_path, LLAMA_CPP)
    run.requests["ttft_s"] = np.geomspace(0.01, 10, 12)
    assert server_side(run).get_yscale() == "log"


def test_what_can_not_be_drawn_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path, LLAMA_CPP)
    with pytest.raises(UsageError, match="metric must be one of"):
        server_side(run, "itl")
    with pytest.raises(UsageError, match="no server metrics"):
        server_side(make_run())
    failed = make_run(failed=tuple(range(12)))
    with pytest.raises(UsageError, match="no ok request of this run has TTFT on the wire clock"):
        server_side(Run(tmp_path, run.meta, failed.requests))
