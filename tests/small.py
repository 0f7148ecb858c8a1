"""Small runs, with what was said and what the server recorded of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

import llmprofile as lp
from llmprofile.records import Run

CLIENTS = ["stamped", "conventional"]


def load(url: Any, folder: Path, law: Any = None, **options: Any) -> Run:
    """A small run; options override it."""
    asked = {"n": 30, "output_tokens": 4, "seed": 5, "salt": 7, "out": folder / "run", "progress": False}
    return lp.run_load(url, law or lp.Poisson(150), **(asked | options))


def texts(run: Run) -> pd.DataFrame:
    """Prompts and answers by number of request."""
    assert run.folder is not None
    return pd.read_parquet(run.folder / "texts.parquet").set_index("request_id")


def truth_of(server: lp.ReferenceServer, run: Run) -> pd.DataFrame:
    """The server's record of a run by number of request."""
    truth = server.truth()
    return truth[truth["id"].str.startswith(run.meta["run_id"])].set_index("request_id").sort_index()
