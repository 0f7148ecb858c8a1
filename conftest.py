"""What tests and the examples in docstrings may take for granted, and skips that count as failures."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmprofile as lp
from certificates import TlsFiles, make_tls_files
from engine import running_dasllama

SKIPS_FAIL = os.environ.get("LLMPROFILE_NO_SKIPS") == "1" and sys.platform == "linux"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which something was skipped, where LLMPROFILE_NO_SKIPS=1 says that nothing is missing."""
    if SKIPS_FAIL and _skipped(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why such a run failed."""
    if SKIPS_FAIL and _skipped(config):
        terminalreporter.write_line("LLMPROFILE_NO_SKIPS=1, so what was skipped counts as failed", red=True)


def _skipped(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter is not None and bool(reporter.stats.get("skipped"))


def free_port() -> int:
    """Return a loopback port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """An authority's certificate (`ca_file`), a server's certificate (`certfile`) and its key (`keyfile`)."""
    return make_tls_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def dasllama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real engine that serves the tiny model `tiny.gguf` on eight streams."""
    program = shutil.which("dasllama-server", path=Path(sys.executable).parent) or shutil.which("dasllama-server")
    if program is None:
        pytest.skip("dasllama is not installed here (it comes with the extra `test` on Linux, x86-64)")
    with running_dasllama(Path(program), free_port(), tmp_path_factory.mktemp("dasllama")) as url:
        yield url


@pytest.fixture(scope="session")
def example_server() -> Iterator[lp.ReferenceServer]:
    """A reference server, quick enough for an example."""
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001, seed=1) as server:
        yield server


@pytest.fixture(scope="session")
def example_run(example_server: lp.ReferenceServer, tmp_path_factory: pytest.TempPathFactory) -> lp.Run:
    """A small run against that server."""
    out = tmp_path_factory.mktemp("runs") / "example"
    arrivals = lp.Poisson(rate_per_s=200)
    return lp.run_load(example_server.url, arrivals, n=200, output_tokens=10, seed=1, out=out, progress=False)


@pytest.fixture(autouse=True)
def examples(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Let an example use `lp`, `np`, and `server` and `run` where it doesn't make them; in an empty folder."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
    doctest_namespace.update(lp=lp, np=np)
    nodes = [node for example in request.node.dtest.examples for node in ast.walk(ast.parse(example.source))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for name in {"server", "run"} & {node.id for node in names} - made:
        doctest_namespace[name] = request.getfixturevalue(f"example_{name}")
