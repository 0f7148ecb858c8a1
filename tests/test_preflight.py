"""What is checked before a run: models, folders, descriptors. Servers and hosts are in test_launch and test_cli."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import llmprofile as lp
from llmprofile.api import parse_target
from llmprofile.preflight import SPARE_DESCRIPTORS, check_descriptors, check_folder, first_model


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that gives this answer to every GET; its URL, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/api/chat", "/generate_stream"]
)
def test_the_first_model_is_asked_for_once_with_the_callers_headers(path: str) -> None:
    with answering(200, b'{"data": [{"id": "first"}, {"id": "second"}]}') as (url, asked):
        target = parse_target(f"{url}{path}", {"Authorization": "Bearer k"})
        assert first_model(target, 5.0) == "first"
    assert asked == ["/v1/models Bearer k"]


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"no"), (200, b'{"data": []}'), (200, b"[]"), (200, b"{"), (401, b'{"error": {}}')]
)
def test_no_model_is_a_sentence(status: int, body: bytes) -> None:
    with answering(status, body) as (url, _), pytest.raises(lp.UsageError, match=f"status {status}.*give model"):
        first_model(parse_target(f"{url}/v1/completions"), 5.0)


def test_folders_are_never_overwritten(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "a" / "b", "name") == tmp_path / "a" / "b"
    assert check_folder(None, "name") == Path("runs/name")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in (tmp_path, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(lp.UsageError, match="exists"):
            check_folder(taken, "name")
    with pytest.raises(lp.UsageError, match="not a folder"):
        check_folder(tmp_path / "file" / "run", "name")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_descriptors(None)
    check_descriptors((10, 9))
    if hard != resource.RLIM_INFINITY:
        check_descriptors((hard - SPARE_DESCRIPTORS,))
        with pytest.raises(lp.UsageError, match=str(hard + 1)):
            check_descriptors((hard - SPARE_DESCRIPTORS + 1,))
