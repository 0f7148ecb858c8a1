"""What surrounds the package: the README's commands, the rule about skips, what conftest makes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from certificates import TlsFiles
from conftest import free_port

ROOT = Path(__file__).resolve().parent.parent


def readme_commands() -> list[str]:
    """Return the README's code lines."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


def test_readme_begins_with_the_demo_and_the_tests() -> None:
    demo, tests = readme_commands()[:2]
    assert demo.startswith("python ")
    assert demo.endswith("llmprofile demo")
    assert tests.startswith("python ")
    assert tests.endswith("pytest")


def test_ci_runs_the_command_of_the_readme() -> None:
    assert readme_commands()[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def run_pytest(folder: Path, tests: str, no_skips: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with our conftest in a folder of its own."""
    for helper in ("conftest.py", "tests/certificates.py", "tests/engine.py"):
        shutil.copy(ROOT / helper, folder)
    (folder / "test_passing.py").write_text("def test_it(): pass\n")
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLMPROFILE_NO_SKIPS": no_skips}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


SKIPS = {
    "in a test": "import pytest\ndef test_it(): pytest.skip('not here')\n",
    "by a mark": "import pytest\n@pytest.mark.skip('not here')\ndef test_it(): pass\n",
    "of a file": "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n",
}


@pytest.mark.skipif(sys.platform != "linux", reason="skips are forbidden on Linux only")
@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS)
def test_a_skip_fails_the_run_where_nothing_may_be_missing(tmp_path: Path, skip: str) -> None:
    assert run_pytest(tmp_path, skip, no_skips="1").returncode == pytest.ExitCode.TESTS_FAILED


def test_without_a_skip_or_elsewhere_it_passes(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "def test_other(): pass\n", no_skips="1").returncode == pytest.ExitCode.OK
    assert run_pytest(tmp_path, SKIPS["in a test"], no_skips="").returncode == pytest.ExitCode.OK


def test_certificates_are_accepted_for_this_machine_only(tls_files: TlsFiles) -> None:
    assert handshake(tls_files, "127.0.0.1") == "ok"
    assert handshake(tls_files, "localhost") == "ok"
    assert "mismatch" in handshake(tls_files, "example.org")


def handshake(files: TlsFiles, name: str) -> str:
    """Return "ok", or why a client that trusts our authority refuses our server under this name."""
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(files.certfile, files.keyfile)
    theirs = ssl.create_default_context(cafile=files.ca_file)
    near, far = socket.socketpair()
    with near, far:
        server = threading.Thread(target=serve_handshake, args=(ours, far))
        server.start()
        try:
            theirs.wrap_socket(near, server_hostname=name).close()
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        finally:
            server.join(10)
    return "ok"


def serve_handshake(context: ssl.SSLContext, connection: socket.socket) -> None:
    """Do the server's part, whatever the client makes of it."""
    with contextlib.suppress(OSError):
        context.wrap_socket(connection, server_side=True).close()


def test_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0
