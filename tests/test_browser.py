"""The notebooks in a real JupyterLab, in headless Chromium, as a person meets them: run, moved, watched, stopped.

Skipped where Chromium or playwright is missing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

import llmprofile as lp
from conftest import free_port
from llmprofile.trust import WORDS
from test_notebooks import CHECKS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing; the extra test brings it")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no chromium or google-chrome on PATH", allow_module_level=True)

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
LIVE = """
import llmprofile as lp
server = lp.ReferenceServer(ttft_s=0.02, itl_s=0.005)
load = lp.start_load(
    server.url, lp.Poisson(rate_per_s=50), duration_s=60, output_tokens=8, seed=1, out="stopped", progress=False
)
lp.watch(load)
"""
LESSON, BEFORE_LOADS = "04_teaching_queueing_bias.ipynb", 25
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # else the page asks which one
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are not in the page otherwise
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].map(e => e.textContent)"
OUTPUT = '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.{}"]'
STDERR, ERROR = OUTPUT.format("stderr"), OUTPUT.format("error")


def until(what: str, found: Callable[[], Any], seconds: float) -> Any:
    """What `found` returns, once it is true; asked five times a second."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Lab:
    """A JupyterLab of its own, on copies of the notebooks, with settings and files of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.token = folder / "notebooks", secrets.token_hex(8)
        shutil.copytree(NOTEBOOKS, self.root, ignore=shutil.ignore_patterns("runs", ".*"))
        live = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LIVE.strip())], metadata=KERNEL)
        nbformat.write(live, self.root / "live.ipynb")
        lesson = nbformat.read(self.root / LESSON, 4)
        lesson.cells = lesson.cells[:BEFORE_LOADS]  # what it measures is executed elsewhere
        nbformat.write(lesson, self.root / LESSON)
        for plugin, said in SETTINGS.items():
            path = folder / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(said))
        places = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
        environment = {
            **os.environ,
            **{f"JUPYTER_{name}_DIR": str(folder / place) for name, place in places.items()},
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "JUPYTER_PLATFORM_DIRS": "1",
        }
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
        options += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}"]
        self.log = folder / "lab.log"
        with self.log.open("wb") as out:
            command = [sys.executable, "-m", "jupyterlab", *options]
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the server's API answers; None while it doesn't."""
        head = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=head)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.loads(answer.read() or b"null")
        except OSError:
            return None

    def kernel_is_idle(self, name: str) -> bool:
        """Whether the notebook's kernel is connected and has nothing to do."""
        kernels = [session["kernel"] for session in self.ask("sessions") or [] if session["path"] == name]
        return any(k["execution_state"] == "idle" and k["connections"] > 0 for k in kernels)

    def end(self) -> None:
        """End the server; its API ends the kernels too, which a signal alone may leave behind."""
        self.ask("shutdown", "POST")
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running JupyterLab; none of its processes may outlive it."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    family: list[psutil.Process] = []
    try:
        until("JupyterLab answers", lambda: lab.ask("status"), 60)
        yield lab
    finally:
        family = psutil.Process(lab.process.pid).children(recursive=True) if lab.process.poll() is None else []
        lab.end()
        _, left = psutil.wait_procs(family, timeout=15)
        for process in left:
            process.kill()
    assert [process.name() for process in left] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; it and its driver are gone afterwards."""
    before = set(psutil.Process().children(recursive=True))
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        family = set(psutil.Process().children(recursive=True)) - before
        yield chromium
        chromium.close()
    _, left = psutil.wait_procs(family, timeout=15)
    for process in left:
        process.kill()
    assert left == []


class Page:
    """A notebook in the browser, whose kernel is there."""

    def __init__(self, lab: Lab, browser: Any, name: str) -> None:
        self.lab, self.name, self.errors = lab, name, list[str]()
        self.page = browser.new_page(viewport={"width": 1200, "height": 1100})
        self.page.set_default_timeout(10_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{lab.url}/lab/tree/{name}?reset&token={lab.token}")
        # the page's own dot says idle before the kernel is connected, and what is run then is dropped without a word
        until(f"the kernel of {name} is idle", lambda: lab.kernel_is_idle(name), 60)

    def run_all(self, seconds: float) -> None:
        """Run All, as a person would; returns when every code cell has run, or one has failed."""
        until("Run All is heard", self._run_all_heard, 20)
        script = f"() => {PROMPTS}.every(e => /\\[\\d+\\]/.test(e)) || document.querySelector('{ERROR}')"
        self.page.wait_for_function(script, timeout=seconds * 1000)

    def _run_all_heard(self) -> bool:
        self.page.click('li.lm-MenuBar-item:has-text("Run")')
        self.page.click('li[data-command="runmenu:run-all"]')
        try:
            self.page.wait_for_function(f"() => {PROMPTS}.some(e => /\\[(\\*|\\d+)\\]/.test(e))", timeout=3000)
        except sync_api.TimeoutError:
            return False
        return True

    def text(self) -> str:
        """All that the outputs say."""
        return "\n".join(self.page.locator(".jp-OutputArea-output").all_inner_texts())

    def figures(self) -> int:
        """How many pictures the outputs hold."""
        return int(self.page.locator(".jp-OutputArea-output img").count())

    def check_clean(self) -> None:
        """No error on the page, none in an output, nothing on standard error."""
        assert self.errors == []
        assert self.page.locator(f"{STDERR}, {ERROR}").all_inner_texts() == []


@pytest.fixture
def open_notebook(lab: Lab, browser: Any) -> Iterator[Callable[[str], Page]]:
    """Opens a notebook; at the end the page must be clean and is closed, and the kernel ended."""
    opened: list[Page] = []

    def show(name: str) -> Page:
        opened.append(Page(lab, browser, name))
        return opened[-1]

    yield show
    for page in opened:
        page.page.close()
        for session in lab.ask("sessions") or []:
            lab.ask(f"sessions/{session['id']}", "DELETE")


@pytest.mark.timeout(120)
def test_the_quickstart_runs(open_notebook: Callable[[str], Page]) -> None:
    notebook = open_notebook("01_quickstart.ipynb")
    notebook.run_all(90)
    notebook.check_clean()
    assert any(word in notebook.text() for word in WORDS)
    assert notebook.figures() == CHECKS[notebook.name][1]


@pytest.mark.timeout(150)
def test_the_lessons_explorer_follows_the_sliders(open_notebook: Callable[[str], Page]) -> None:
    notebook = open_notebook(LESSON)
    notebook.run_all(60)
    notebook.check_clean()
    assert notebook.figures() == 4
    assert notebook.text().count("Not answered yet") == 2
    explorer = notebook.page.locator(".jp-OutputArea-output:has(.lpx):has(.widget-slider)").first
    before = explored(explorer)
    # requests per second, 50 tokens each, 50 µs a token
    assert before["rho"] == pytest.approx(before["rate"] * 50 * 50e-6, abs=0.006)
    handle = explorer.locator(".widget-slider .noUi-handle").first
    handle.focus()
    for _ in range(4):
        notebook.page.keyboard.press("ArrowRight")

    def followed() -> bool:
        now = explored(explorer)
        return now["rho"] > before["rho"] and now["rho"] == pytest.approx(now["rate"] * 50 * 50e-6, abs=0.006)

    until("the explorer's number follows its slider", followed, 10)
    after = explored(explorer)
    assert after["rate"] > before["rate"]
    assert after["curve"] != before["curve"]
    notebook.check_clean()


def explored(explorer: Any) -> dict[str, Any]:
    """The first slider's readout, the number that the explorer says first, and its first curve."""
    said = explorer.locator(".lpx").inner_text()
    return {
        "rate": float(explorer.locator(".widget-readout").first.inner_text()),
        "rho": float(re.search(r"ρ = (\d+\.\d+)", said)[1]),  # type: ignore[index]
        "curve": explorer.locator(".lpx svg path.curve").first.get_attribute("d"),
    }


@pytest.mark.timeout(120)
def test_a_live_run_is_watched_and_stopped(lab: Lab, open_notebook: Callable[[str], Page]) -> None:
    notebook = open_notebook("live.ipynb")
    notebook.run_all(30)
    page = notebook.page
    dashboard = page.locator(".llmprofile-live")

    def done() -> int:
        found = re.search(r"([\d,]+) of [\d,]+ done", dashboard.inner_text())
        return int(found[1].replace(",", "")) if found else 0

    first = until("the dashboard counts", done, 30)
    until("its counters rise", lambda: done() > first + 20, 10)
    page.get_by_role("button", name="Stop").click()
    pressed_s = time.monotonic()
    dashboard.wait_for(state="detached", timeout=20_000)  # the run has taken its place
    assert time.monotonic() - pressed_s < 20
    assert "stopped" in notebook.text()
    run = lp.load(lab.root / "stopped")
    assert run.meta["ended"] == "stopped"
    ok = int((run.requests["outcome"] == "ok").sum())
    assert first < ok < len(run.requests) / 2
    notebook.check_clean()
