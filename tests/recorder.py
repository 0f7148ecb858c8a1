"""A server that remembers each request's words and answers all of them alike: what was asked, to the letter."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = "one two"
_STREAM = (
    b'data: {"choices": [{"text": "one", "index": 0}]}\n\ndata: {"choices": [{"text": " two", "index": 0}]}\n\n'
    b"data: [DONE]\n\n"
)


class Recorder(ThreadingHTTPServer):
    """Bodies by number of request, in the order of their arrival."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[int, dict[str, Any]] = {}

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.base_url}/v1/completions"

    @property
    def chat_url(self) -> str:
        return f"{self.base_url}/v1/chat/completions"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that the client leaves are none of our business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies[int(self.headers["X-Request-Id"].rpartition("-")[2])] = body
        self._answer("text/event-stream", _STREAM)

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "m"}]}).encode())

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


@contextmanager
def recorder() -> Iterator[Recorder]:
    """Serve until the block ends."""
    with Recorder() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
