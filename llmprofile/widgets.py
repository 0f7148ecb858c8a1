"""The live dashboard of a load in a notebook; a line of text where there are no widgets."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from html import escape
from typing import Any

from llmprofile.errors import UsageError
from llmprofile.live import Live, Watched, as_html, as_line, in_notebook
from llmprofile.records import Run

try:
    import ipywidgets
except ImportError:  # pragma: no cover
    ipywidgets = None

UPDATE_S = 0.3
LOWEST_PRIORITY = 19


def watch(load: Watched) -> Any:
    """Show a load while it goes on, with a Stop button; when it has ended, its run.

    The figures come from the workers' counters and from a sample of what they have finished, some tens of requests an
    update, about three times a second, in a thread of the lowest priority. Nothing is asked of the workers. The button
    is heard while no cell runs; a cell that waits for the run is interrupted instead.

    Parameters
    ----------
    load : Load
        What `start_load` returned.

    Returns
    -------
    VBox or None
        The dashboard, in a notebook: a widget, to be the last line of a cell. Elsewhere, or without ipywidgets, None:
        a line on standard error, kept up to date if that is a terminal.

    Raises
    ------
    UsageError
        It is not a load.

    Examples
    --------
    >>> load = lp.start_load(server.url, lp.Poisson(rate_per_s=50), n=10, output_tokens=4)
    >>> watch(load)
    >>> load.wait().meta["outcomes"]
    {'ok': 10}
    """
    if not all(hasattr(load, name) for name in ("progress", "result", "stop")):
        raise UsageError(f"watch takes a load, as start_load returns it; not {type(load).__name__}")
    if ipywidgets is not None and in_notebook():
        return dashboard(load)
    _in_background(_keep_line, load)
    return None


def dashboard(load: Watched) -> Any:
    """The dashboard as a widget, whose thread has begun."""
    view = ipywidgets.HTML()
    button = ipywidgets.Button(description="Stop", icon="stop", button_style="danger")

    def stop(_: Any) -> None:
        load.stop()
        button.disabled = True
        button.description = "stopping …"

    def show(html: str) -> None:
        view.value = html
        if load.result is not None:
            button.layout.display = "none"

    button.on_click(stop)
    _in_background(_keep_html, load, show)
    return ipywidgets.VBox([button, view])


def _in_background(target: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=_yielding, args=(target, *given), name="llmprofile-dashboard", daemon=True).start()


def _yielding(target: Callable[..., None], *given: Any) -> None:
    """Run at the lowest priority, so that a worker on this core doesn't wait for a dashboard."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    target(*given)


def _keep_html(load: Watched, show: Callable[[str], None]) -> None:
    # A widget takes values from any thread, as long as one thread sets them: this one the figures, the kernel's main
    # one the button. An update that took long delays the next: none are queued.
    try:
        live = Live(load)
        while load.result is None:
            show(as_html(live.update()))
            time.sleep(UPDATE_S)
    except Exception as error:  # noqa: BLE001  a load goes on without its dashboard
        show(f"<div>The dashboard ended ({escape(f'{type(error).__name__}: {error}')}); the load goes on.</div>")
    else:
        show(_ended(load.result))


def _ended(result: Run | Exception) -> str:
    """The run, or why there is none."""
    return result._repr_html_() if isinstance(result, Run) else f"<div>There is no run: {escape(str(result))}.</div>"


def _keep_line(load: Watched) -> None:
    live, out, width = Live(load), sys.stderr, 0
    while load.result is None:
        if out.isatty() or in_notebook():
            line = as_line(live.update())
            out.write("\r" + line.ljust(width))
            out.flush()
            width = len(line)
        time.sleep(UPDATE_S)
    out.write(("\r" if width else "") + as_line(live.update()).ljust(width) + "\n")
