"""The reference server's record as frames: what really happened, a row an answer or a row a token. Pure."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.units import ns_to_s

Arrays = dict[str, npt.NDArray[Any]]
"""A record: an array a column of the answers; `tokens_of_send`, `left_ns`, `sent_ns` of all their sends."""


def unpack(packed: bytes) -> Arrays:
    """A record as the server sends it (npz); nothing in it is unpickled."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


def _request_ids(ids: npt.NDArray[np.str_]) -> pd.Series:
    return pd.to_numeric(pd.Series(ids, dtype=object).str.extract(r"(?:^|-)(\d{1,18})$")[0]).astype("Int64")


def _each_token(fetched: Arrays) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each token, the row of its request and the position of its send."""
    send = np.repeat(np.arange(len(fetched["left_ns"])), fetched["tokens_of_send"])
    return np.repeat(np.arange(len(fetched["sends"])), fetched["sends"])[send], send


def truth_frame(fetched: Arrays) -> pd.DataFrame:
    """One row an answer; the columns are those of `ReferenceServer.truth`."""
    row, send = _each_token(fetched)
    tokens = np.bincount(row, minlength=len(fetched["sends"]))
    last = tokens.cumsum() - 1
    first, none = last - tokens + 1, tokens == 0

    def pick(times: npt.NDArray[np.int64], which: npt.NDArray[np.int64]) -> pd.arrays.IntegerArray:
        found = np.zeros(len(tokens), dtype=np.int64)
        found[~none] = times[send[which[~none]]]
        return pd.arrays.IntegerArray(found, none.copy())

    frame = pd.DataFrame({"id": fetched["id"].astype(object)})
    frame["request_id"] = _request_ids(fetched["id"])
    for name in ("arrive_first_ns", "arrive_ns", "stamped"):
        frame[name] = fetched[name]
    frame["first_ns"], frame["last_ns"] = pick(fetched["left_ns"], first), pick(fetched["left_ns"], last)
    frame["first_sent_ns"], frame["last_sent_ns"] = (
        pick(fetched["sent_ns"], first),
        pick(fetched["sent_ns"], last),
    )
    frame["tokens"], frame["prompt_words"] = tokens, fetched["prompt_words"]
    frame["late_ns"], frame["queue_s"] = fetched["late_ns"], ns_to_s(fetched["queue_ns"])
    frame["status"], frame["gone"] = fetched["status"], fetched["gone"]
    frame["fault"] = pd.Series(fetched["fault"].astype(object)).replace("", None)
    frame.attrs = {name: int(fetched[name]) for name in ("in_flight", "wall_minus_monotonic_ns")}
    return frame


def token_frame(fetched: Arrays) -> pd.DataFrame:
    """One row a token; the columns are those of `ReferenceServer.tokens`."""
    row, send = _each_token(fetched)
    tokens = np.bincount(row, minlength=len(fetched["sends"]))
    frame = pd.DataFrame({"id": fetched["id"].astype(object)[row]})
    frame["request_id"] = _request_ids(fetched["id"]).array[row]
    frame["index"] = np.arange(len(row)) - (tokens.cumsum() - tokens)[row]
    frame["left_ns"], frame["sent_ns"] = fetched["left_ns"][send], fetched["sent_ns"][send]
    return frame
