"""What many tests need: a free port, certificates, a real engine; and skips that count as failures."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
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
    program = shutil.which("dasllama-server", path=Path(sys.executable).parent) or shutil.which(
        "dasllama-server"
    )
    if program is None:
        pytest.skip("dasllama is not installed here (it comes with the extra `test` on Linux, x86-64)")
    with running_dasllama(Path(program), free_port(), tmp_path_factory.mktemp("dasllama")) as url:
        yield url
