"""A real engine to measure: dasllama with the tiny model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TINY_MODEL = Path(__file__).parent / "data" / "tiny.gguf"
MODEL = TINY_MODEL.name
STREAMS = 8
START_TIMEOUT_S = 60


@contextmanager
def running_dasllama(program: Path, port: int, folder: Path) -> Iterator[str]:
    """Start the engine, wait until it answers, yield its base URL, end it."""
    # It writes its own form of a model beside the file, and its tuning into the home folder.
    model = shutil.copy(TINY_MODEL, folder)
    command = [program, "-m", model, "-p", str(port), "--streams", str(STREAMS), "-t", "2", "--gpu", "off"]
    environment = {**os.environ, "HOME": str(folder)}
    log = folder / "log.txt"
    with log.open("wb") as out:
        engine = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_answer(url, engine, log)
        yield url
    finally:
        end(engine)


def wait_for_answer(url: str, engine: subprocess.Popen[bytes], log: Path) -> None:
    """Return once a completion of one token is answered."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and engine.poll() is None:
        try:
            post(f"{url}/v1/completions", {"model": MODEL, "prompt": "the", "max_tokens": 1})
        except OSError:  # refused, reset, or a status: not up yet
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"dasllama did not answer (status {engine.poll()}): {log.read_text(errors='replace')}")


def end(engine: subprocess.Popen[bytes]) -> None:
    """End the engine, by force when it doesn't hear."""
    engine.terminate()
    try:
        engine.wait(10)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait(10)


def post(url: str, body: dict[str, Any], timeout_s: float = 30) -> bytes:
    """Return the whole body of the answer. A connection of its own, read to its end: see `test_engine.py`."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read()
