"""Long prompts at once: what the server's record says of each, from the stamp of its first byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmprofile as lp
from harness import NAMES
from llmprofile.traces import Trace

LENGTHS = {"prompt_tokens": 100_000, "output_tokens": 4}
AT_ONCE = Trace({"due_s": np.zeros(64), **{name: np.full(64, tokens) for name, tokens in LENGTHS.items()}})


@pytest.mark.parametrize(
    ("ttft_s", "load"),
    [
        (0.05, {"arrivals": AT_ONCE}),
        (0.5, {"arrivals": AT_ONCE}),
        (0.05, {"arrivals": lp.ClosedLoop(64), "n": 64, **LENGTHS}),
    ],
    ids=["open, 50 ms", "open, 500 ms", "closed, 50 ms"],
)
@pytest.mark.parametrize("client", NAMES)
def test_64_prompts_of_400_kb_at_once(client: str, ttft_s: float, load: dict[str, Any], tmp_path: Path) -> None:
    """They take the server hundreds of milliseconds to read: each request's latency counts from its own first byte."""
    with lp.ReferenceServer(ttft_s=ttft_s, itl_s=0.002) as server:
        made = lp.run_load(server.url, **load, client=client, seed=1, out=tmp_path / "run", progress=False)
        truth = server.truth()
    assert made.meta["outcomes"] == {"ok": 64}
    requests = made.requests.set_index("request_id").sort_index()
    truth = truth[truth["id"].str.startswith(made.meta["run_id"])].set_index("request_id").sort_index()
    assert len(truth) == 64 and truth["stamped"].all()
    first_ns, left_ns, sent_ns = (
        truth[name].to_numpy(np.int64) for name in ("arrive_first_ns", "first_ns", "first_sent_ns")
    )
    assert (truth["arrive_ns"] - first_ns).median() > 0.05e9
    # the first token was on its way between two of the server's clock readings
    found_s = requests["ttft_s"].to_numpy()
    assert (found_s >= 0.9 * (left_ns - first_ns) / 1e9).all()
    assert (found_s <= 1.1 * (sent_ns - first_ns) / 1e9).all()
    # beside it: how long giving the prompt to the kernel took, which has room for most of one
    assert (requests["upload_s"] > 0).all() and (requests["upload_s"] < requests["ttft_s"]).all()
    assert (requests["sent_ns"].to_numpy(np.int64) <= first_ns).all()
