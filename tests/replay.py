"""A run against the reference server that answers every request with the same recorded stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llmprofile as lp

STEP_S = 0.02
"""From a request's arrival to the first piece, and between pieces."""


def replayed(
    path: str, pieces: list[bytes], headers: dict[str, str], client: str, folder: Path, **script: Any
) -> lp.Run:
    """Three requests, one after another; each piece of the answer comes 20 ms after the one before."""
    played = {"segments": [((i + 1) * STEP_S, piece) for i, piece in enumerate(pieces)], "headers": headers, **script}
    with lp.ReferenceServer(script=played) as server:
        return lp.run_load(
            server.base_url + path,
            lp.ClosedLoop(1),
            n=3,
            prompt_tokens=5,
            output_tokens=4,
            client=client,
            keep_text=True,
            model="recorded",
            out=folder / "run",
            progress=False,
        )
