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
from llmprofile.live import Live, Watched, as_html, in_notebook
from llmprofile.records import Run

try:
    import ipywidgets
except ImportError:
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
    VBox or Live
        The dashboard, in a notebook: a widget, to be the last line of a cell. Elsewhere, or without ipywidgets,
        something that shows itself as a line of the figures at that moment.

    Raises
    ------
    UsageError
        It is not a load.

    Examples
    --------
    >>> load = lp.start_load(server.url, lp.Poisson(rate_per_s=50), n=10, output_tokens=4)
    >>> run = load.wait()
    >>> watch(load)
    done ... s: 10 of 10 done, 0 in flight; ...
    """
    if not all(hasattr(load, name) for name in ("progress", "result", "stop")):
        raise UsageError(f"watch takes a load, as start_load returns it; not {type(load).__name__}")
    return dashboard(load) if ipywidgets is not None and in_notebook() else Live(load)


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
    threading.Thread(target=_keep_up, args=(load, show), name="llmprofile-dashboard", daemon=True).start()
    return ipywidgets.VBox([button, view])


def _keep_up(load: Watched, show: Callable[[str], None]) -> None:
    """Show the figures of a load until it ends, then its run."""
    _give_way()
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


def _give_way() -> None:
    """Give this thread the lowest priority, so that a worker on its core doesn't wait for a dashboard."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _ended(result: Run | Exception) -> str:
    """The run, or why there is none."""
    if not isinstance(result, Run):
        return f"<div>There is no run: {escape(str(result))}.</div>"
    # the class by which JupyterLab styles the tables of other outputs; a widget's lines are as high as a button
    return f'<div class="jp-RenderedHTMLCommon" style="line-height: 1.4">{result._repr_html_()}</div>'
