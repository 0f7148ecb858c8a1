"""The dashboard of a real load, without a browser: what its widget holds, its Stop button, its end; and in a kernel."""

from __future__ import annotations

import itertools
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import nbformat
import pytest
from nbclient import NotebookClient

import llmprofile as lp
from llmprofile.supervise import Load
from llmprofile.widgets import LOWEST_PRIORITY, UPDATE_S, dashboard, watch


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.03, itl_s=0.005, seed=3) as server:
        yield server


def start(server: lp.ReferenceServer, folder: Path, arrivals: Any = None, **options: Any) -> Load:
    """A load of a minute, unless the options say otherwise."""
    asked = {"duration_s": 60, "output_tokens": 4, "seed": 1, "out": folder / "run", "progress": False}
    return lp.start_load(server.url, arrivals or lp.Poisson(100), **(asked | options))


def wait_until(true: Callable[[], bool], within_s: float = 20.0) -> float:
    """Wait for something; how long it took."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < within_s, "it did not come true"
        time.sleep(0.01)
    return time.monotonic() - began_s


def parts(view: ipywidgets.VBox) -> tuple[ipywidgets.Button, ipywidgets.HTML]:
    button, html = view.children
    return button, html


def test_counters_rise_and_stop_ends_the_load(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load = start(server, tmp_path)
    button, html = parts(dashboard(load))
    shown: list[tuple[float, str]] = []
    html.observe(lambda change: shown.append((time.monotonic(), change["new"])), "value")
    wait_until(lambda: load.progress.done > 150)
    assert not button.disabled
    button.click()
    took_s = wait_until(lambda: load.progress.in_flight == 0 and load.progress.state != "running")
    assert took_s < 0.5
    assert button.disabled and button.description == "stopping …"
    run = load.wait()
    assert run.meta["ended"] == "stopped" and run.meta["outcomes"]["unsent"] > 1000
    wait_until(lambda: run._repr_html_() in html.value)
    assert button.layout.display == "none"
    texts = [text for _, text in shown]
    assert any("asked" in text and "<polyline" in text for text in texts)
    assert any("sample of 0 requests" not in text for text in texts[:-1])
    # a new value at most every UPDATE_S: updates are dropped, not queued
    gaps_s = [b - a for (a, _), (b, _) in itertools.pairwise(shown)]
    assert min(gaps_s) > 0.9 * UPDATE_S


def test_a_load_that_ends_by_itself_shows_its_run(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load = start(server, tmp_path, duration_s=None, n=20)
    button, html = parts(dashboard(load))
    run = load.wait()
    wait_until(lambda: run._repr_html_() in html.value)
    # one that has ended already is shown at once
    _, again = parts(dashboard(load))
    wait_until(lambda: run._repr_html_() in again.value)
    assert load.result is run and button.layout.display == "none"


def test_a_load_without_a_run_says_why(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load = start(server, tmp_path)
    button, html = parts(dashboard(load))
    wait_until(lambda: load.progress.begun > 0)
    (load.folder / "capture" / "schedule.parquet").unlink()
    button.click()
    with pytest.raises(FileNotFoundError, match=r"schedule\.parquet"):
        load.wait()
    wait_until(lambda: "There is no run" in html.value)
    assert "schedule.parquet" in html.value
    assert isinstance(load.result, FileNotFoundError) and button.layout.display == "none"


@pytest.mark.parametrize(
    ("arrivals", "options", "words"),
    [
        (lp.ClosedLoop(4), {}, ["closed loop of 4"]),
        (lp.Poisson(100), {"stamps": False}, ["TTFT (seen clock)", "unknown"]),
        (lp.Poisson(100), {"client": "conventional", "processes": 2}, ["TTFT (handled clock)", "busiest of 2 workers"]),
    ],
)
def test_other_loads(
    server: lp.ReferenceServer, tmp_path: Path, arrivals: Any, options: dict[str, Any], words: list[str]
) -> None:
    load = start(server, tmp_path, arrivals, **options)
    _, html = parts(dashboard(load))
    wait_until(lambda: all(word in html.value for word in words) and "sample of 0 " not in html.value)
    load.stop()
    load.wait()


def test_a_dashboard_that_fails_leaves_the_load_alone(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load = start(server, tmp_path, duration_s=1.0)
    load.meta["asked"] = dict(load.meta["asked"])
    asked = load.meta["asked"]
    processes = asked.pop("processes")
    _, html = parts(dashboard(load))
    wait_until(lambda: html.value != "")
    asked["processes"] = processes
    assert "The dashboard ended (KeyError" in html.value
    assert set(load.wait().meta["outcomes"]) == {"ok"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_the_thread_gives_way(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load = start(server, tmp_path)
    dashboard(load)
    threads = [t for t in threading.enumerate() if t.name == "llmprofile-dashboard"]
    wait_until(lambda: any(os.getpriority(os.PRIO_PROCESS, t.native_id or 0) == LOWEST_PRIORITY for t in threads))
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < LOWEST_PRIORITY
    wait_until(lambda: load.progress.begun > 0)
    load.stop()
    load.wait()


def test_outside_a_notebook_it_is_a_line(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load = start(server, tmp_path, duration_s=None, n=150)
    line = watch(load)
    wait_until(lambda: "TTFT p50 –" not in repr(line))
    assert re.match(r"running \d\.\d s: \d+ of 150 done, \d+ in flight; .*100/s asked", repr(line))
    load.wait()
    assert repr(line).startswith("done ") and "150 of 150 done, 0 in flight" in repr(line)
    assert "150 of 150 done" in load._repr_mimebundle_()["text/plain"]
    assert "\n" not in repr(line)


def test_only_a_load_is_watched(example_run: lp.Run) -> None:
    with pytest.raises(lp.UsageError, match="watch takes a load, as start_load returns it; not Run"):
        watch(example_run)  # type: ignore[arg-type]


def test_a_load_shows_itself_in_a_kernel(server: lp.ReferenceServer, tmp_path: Path) -> None:
    """In a real kernel: the widget is a cell's output, and holds figures in mid-run and the run at the end."""
    cells = [
        f"""
        import time, llmprofile as lp
        load = lp.start_load({server.url!r}, lp.Poisson(100), duration_s=60, output_tokens=4, progress=False,
                             out={str(tmp_path / "run")!r})
        load
        """,
        """
        button, html = load._dashboard.children
        while load.progress.done < 150: time.sleep(0.02)
        middle = html.value
        button.click()
        run = load.wait()
        while run._repr_html_() not in html.value: time.sleep(0.02)
        print("<polyline" in middle, run.meta["ended"])
        """,
        "load",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    first, middle, last = (cell.outputs for cell in notebook.cells)
    kind = "application/vnd.jupyter.widget-view+json"
    assert kind in first[0]["data"] and first[0]["data"][kind] == last[0]["data"][kind]
    assert middle[0]["text"].split() == ["True", "stopped"]
    state = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"].values()
    values = [widget["state"].get("value") for widget in state if widget["model_name"] == "HTMLModel"]
    assert len(values) == 1 and "stopped" in values[0]
