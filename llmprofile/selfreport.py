"""What a server says of its own answers, held against what came over the wire: tokens and times.

Nothing here takes part in a run: it reads one that is over.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.errors import UsageError
from llmprofile.records import Run, plain_ns, read_table
from llmprofile.units import elapsed_s

Floats = npt.NDArray[np.float64]


def token_mismatches(run: Run) -> pd.DataFrame:
    """The streams whose server said another number of tokens than their events hold.

    A server may be right and the events too: several tokens may share an event (speculative decoding, characters
    that are not complete), and a token that ends an answer has no text of its own. Per-token times of such a request
    rest on one token an event. Reasoning that the server counted and never showed is no mismatch.

    Parameters
    ----------
    run : Run

    Returns
    -------
    DataFrame
        A row a mismatch: `request_id`, `events` (token events), `tokens_in_events` (what they are known to hold, else
        one each), `tokens_said` (usage), `hidden` (reasoning tokens among these that the stream never showed), and
        `difference` = tokens_said − hidden − tokens_in_events. Requests without a usage are left out, as are answers
        in one body.

    Examples
    --------
    >>> len(lp.token_mismatches(run))
    0
    """
    held = run.events.groupby("request_id")["tokens"].agg(["size", "sum"])
    asked = run.requests[(run.requests["token_source"] == "usage") & ~_is_body(run.requests)]
    own = held.reindex(asked["request_id"], fill_value=0)
    said = asked["output_tokens"].to_numpy(np.int64)
    hidden = _hidden(asked, said)
    table = pd.DataFrame(
        {
            "request_id": asked["request_id"].to_numpy(np.int64),
            "events": own["size"].to_numpy(np.int64),
            "tokens_in_events": own["sum"].to_numpy(np.int64),
            "tokens_said": said,
            "hidden": hidden,
        }
    )
    table["difference"] = table["tokens_said"] - table["hidden"] - table["tokens_in_events"]
    return table[table["difference"] != 0].reset_index(drop=True)


def _is_body(requests: pd.DataFrame) -> pd.Series:
    """Answers in one body have an end and no first token."""
    return requests["first_seen_ns"].isna() & requests["last_seen_ns"].notna()


def _hidden(requests: pd.DataFrame, said: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    reasoning = _column(requests, "reasoning_tokens")
    shown = ~np.isnan(_column(requests, "first_reasoning_seen_s"))
    # a server that says more reasoning than completion tokens does not count the one in the other
    counted = np.where(np.isnan(reasoning) | shown | (reasoning > said), 0.0, reasoning)
    return counted.astype(np.int64)


def _column(requests: pd.DataFrame, name: str) -> Floats:
    """A column as floats; all NaN where the run was recorded before there was such a column."""
    if name not in requests:
        return np.full(len(requests), np.nan)
    return requests[name].to_numpy(float, na_value=np.nan)


def timing_differences(run: Run) -> pd.DataFrame:
    """What the wire says of each stream that the server timed as well, and what the server says.

    The server's clock starts after the request's way, its HTTP, its tokenizer and its wait for a slot, and stops
    before the send: wire minus server is all of that. It can't be negative by more than the server rounds; where it
    is, one of the clocks is wrong. The time from first to last token has no such parts, and should agree.

    Parameters
    ----------
    run : Run

    Returns
    -------
    DataFrame
        A row a request that has `server_ttft_s`: `request_id`, `ttft_s` (wire), `server_ttft_s`, `outside_s`, their
        difference; `generation_s` (wire, first to last token), `server_generation_s`, `generation_difference_s`.

    Raises
    ------
    UsageError
        No answer of the run holds timings.

    Examples
    --------
    >>> lp.timing_differences(run)
    Traceback (most recent call last):
    ...
    llmprofile.errors.UsageError: no answer of this run holds timings of its server
    """
    requests = run.requests
    server_ttft_s = _column(requests, "server_ttft_s")
    timed = ~np.isnan(server_ttft_s)
    if not timed.any():
        raise UsageError("no answer of this run holds timings of its server")
    first_ns, last_ns = (plain_ns(requests[f"{name}_wire_ns"])[timed] for name in ("first", "last"))
    ttft_s, generation_s = requests["ttft_s"].to_numpy(float)[timed], elapsed_s(last_ns, first_ns)
    server_generation_s = _column(requests, "server_generation_s")[timed]
    return pd.DataFrame(
        {
            "request_id": requests["request_id"].to_numpy(np.int64)[timed],
            "ttft_s": ttft_s,
            "server_ttft_s": server_ttft_s[timed],
            "outside_s": ttft_s - server_ttft_s[timed],
            "generation_s": generation_s,
            "server_generation_s": server_generation_s,
            "generation_difference_s": generation_s - server_generation_s,
        }
    )


def count_tokens(run: Run, tokenizer_file: str | os.PathLike[str]) -> pd.DataFrame:
    """Count the tokens of a run's prompts and answers with a local tokenizer, beside what the server said.

    A text says little more than its letters: a chat template adds tokens to a prompt, an end-of-sequence token has no
    text, and a model may cut the same text into more tokens than the tokenizer would. Reasoning and tool calls are no
    part of the text that is kept.

    Parameters
    ----------
    run : Run
        One that was made with ``keep_text=True``.
    tokenizer_file : path
        A `tokenizer.json` as Hugging Face's `tokenizers` writes it.

    Returns
    -------
    DataFrame
        A row a request with an answer: `request_id`, `prompt_counted`, `prompt_said`, `answer_counted`,
        `answer_said` (said: the server's usage, null without one).

    Raises
    ------
    UsageError
        The run kept no text, the file is no tokenizer, or the package `tokenizers` is not installed.
    """
    tokenizer = _tokenizer(Path(tokenizer_file))
    path = run.folder / "texts.parquet" if run.folder else None
    if path is None or not path.is_file():
        raise UsageError("this run kept no text to count: make it with keep_text=True")
    texts = read_table(path)
    texts = texts[texts["answer"].notna()]
    requests = run.requests.set_index("request_id").loc[texts["request_id"]]
    by_usage = requests["token_source"].eq("usage")
    return pd.DataFrame(
        {
            "request_id": texts["request_id"].to_numpy(np.int64),
            "prompt_counted": _lengths(tokenizer, texts["prompt"]),
            "prompt_said": requests["prompt_tokens"].array,
            "answer_counted": _lengths(tokenizer, texts["answer"]),
            "answer_said": requests["output_tokens"].where(by_usage).array,
        }
    )


def _lengths(tokenizer: Any, texts: pd.Series) -> list[int]:
    return [len(e.ids) for e in tokenizer.encode_batch(texts.fillna("").tolist(), add_special_tokens=False)]


def _tokenizer(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("counting tokens takes the package tokenizers: pip install 'llmprofile[tokenizer]'") from None
    if not file.is_file():
        raise UsageError(f"there is no tokenizer file {file}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises nothing narrower
        raise UsageError(f"{file} is no tokenizer.json: {error}") from None
