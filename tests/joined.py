"""A run beside what the reference server recorded of it: one row a token."""

from __future__ import annotations

import numpy as np
import pandas as pd

from llmprofile.records import Run
from llmprofile.server import ReferenceServer


def tokens_beside_truth(run: Run, server: ReferenceServer) -> pd.DataFrame:
    """Every token of the run with the server's record of it: `left_ns` before its send, `sent_ns` after."""
    seen = run.events.assign(index=run.events.groupby("request_id").cumcount())
    truth = server.tokens()
    truth = truth[truth["id"].str.startswith(run.meta["run_id"])]
    both = seen.merge(truth.drop(columns="id"), on=["request_id", "index"], how="outer", indicator=True)
    assert (both.pop("_merge") == "both").all(), "a token is missing on one side"
    return both.astype({c: np.int64 for c in both.columns if c.endswith("_ns") and both[c].notna().all()})


def outside_bracket(both: pd.DataFrame) -> pd.DataFrame:
    """Tokens whose arrival, between before and after its send, can't lie in the bracket [wire_lo, wire]."""
    return both[(both["sent_ns"] < both["wire_lo_ns"]) | (both["left_ns"] > both["wire_ns"])]
