"""What a run is, in memory and on disk.

A run folder holds `run.json` and three Parquet tables; `Run` shows them. Stamps are int64 nanoseconds of
CLOCK_MONOTONIC on the worker's machine (columns `_ns`, null when missing), derived figures are float seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from llmprofile.errors import UsageError
from llmprofile.latency import CLOCKS, LABELS, LATENCIES, SUFFIX
from llmprofile.markup import card
from llmprofile.units import MISSING_NS, show_rate, show_time

FORMAT = 1
OUTCOMES = (
    *("ok", "http_error", "stream_error", "truncated", "timeout", "connect_error"),
    *("cancelled", "unsent", "lost"),
)

_STAMPS = (
    *("due_ns", "begun_ns", "sent_ns", "sent_last_ns", "headers_ns", "eof_ns"),
    *(f"{token}_{clock}_ns" for token in ("first", "last") for clock in ("wire", "wire_lo", "seen", "handled")),
)
REQUESTS = pa.schema(
    [("request_id", pa.int64()), ("worker", pa.int64()), ("stage", pa.int64())]
    + [(name, pa.int64()) for name in _STAMPS]
    + [("bounded", pa.bool_()), ("connect_s", pa.float64()), ("upload_s", pa.float64())]
    + [("reused", pa.bool_()), ("resent", pa.bool_()), ("output_tokens", pa.int64()), ("token_source", pa.string())]
    + [("prompt_tokens", pa.int64()), ("outcome", pa.string()), ("status", pa.int64()), ("error", pa.string())]
    + [(f"{name}_s", pa.float64()) for name in (*LATENCIES, "lateness")]
    + [(f"{name}{SUFFIX[clock]}", pa.float64()) for clock in CLOCKS[1:] for name in LATENCIES]
    + [(f"first_reasoning{SUFFIX[clock]}", pa.float64()) for clock in CLOCKS]
    + [("reasoning_tokens", pa.int64()), ("server_ttft_s", pa.float64()), ("server_generation_s", pa.float64())]
    + [("reordered", pa.bool_()), ("server", pa.int64()), ("conversation", pa.int64()), ("turn", pa.int64())]
)
EVENTS = pa.schema(
    [(n, pa.int64()) for n in ("request_id", "read", "cycle", "wire_lo_ns", "wire_ns", "seen_ns", "handled_ns")]
    + [("tokens", pa.int64()), ("bytes", pa.int64())]
)
CYCLES = pa.schema(
    [(n, pa.int64()) for n in ("worker", "poll_entered_ns", "poll_returned_ns", "reads", "handled", "sends")]
)


@dataclass(frozen=True, eq=False)
class Run:
    """A measured run; immutable, and it shows itself.

    Attributes
    ----------
    folder : Path or None
        Where it lies; None for one that was never written.
    meta : dict
        `run.json`: what was asked, machine, versions, outcomes, summary, verdict.
    requests : DataFrame
        One row a scheduled request, whatever became of it.
    events : DataFrame
        One row a token event; read when first asked for. `cycles` likewise: one row a turn of a worker's loop.
    """

    folder: Path | None
    meta: dict[str, Any]
    requests: pd.DataFrame
    _tables: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    @property
    def events(self) -> pd.DataFrame:
        return self._table("events", EVENTS)

    @property
    def cycles(self) -> pd.DataFrame:
        return self._table("cycles", CYCLES)

    def _table(self, name: str, schema: pa.Schema) -> pd.DataFrame:
        if name not in self._tables:
            path = self.folder / f"{name}.parquet" if self.folder else None
            self._tables[name] = read_table(path) if path and path.exists() else to_frame(schema.empty_table())
        return self._tables[name]

    @property
    def client(self) -> str:
        """Which client made the load: "stamped", "conventional", or the name of another tool."""
        return str(self.meta["asked"]["client"])

    def __repr__(self) -> str:
        table, notes = summary_table(self.meta["summary"])
        shown = table.reset_index().to_string(index=False)
        return "\n".join([verdict_text(self.meta["verdict"]), *_headlines(self.meta), shown, *notes])

    def _repr_html_(self) -> str:
        table, notes = summary_table(self.meta["summary"])
        verdict = self.meta["verdict"] or {"word": verdict_text(None), "sentences": []}
        said = [*verdict["sentences"], *_headlines(self.meta)]
        return card(verdict["word"], said, [table], notes, verdict["word"])


def verdict_text(verdict: dict[str, Any] | None) -> str:
    """A stored verdict as text, its word first; a run without one says so."""
    if not verdict:
        return "no verdict: the run has not been collected"
    return " ".join([f"{verdict['word']}:", *verdict["sentences"]])


def _headlines(meta: dict[str, Any]) -> list[str]:
    """What became of the requests, how fast they went, and what is missing of the server's metrics."""
    counts = ", ".join(f"{n} {outcome}" for outcome, n in meta["outcomes"].items())
    words = {"asked_per_s": "asked", "drawn_per_s": "drawn", "achieved_per_s": "achieved", "tokens_per_s": "tokens"}
    rates = [f"{show_rate(meta['rates'][k])} {word}" for k, word in words.items() if meta["rates"].get(k) is not None]
    counts += f" ({meta['resent']} of them resent on a new connection)" if meta.get("resent") else ""
    ended = "" if meta["ended"] == "complete" else f"; {meta['ended'] or 'not collected'}"
    return [f"run {meta['run_id']}: {counts or 'nothing yet'}{ended}", ", ".join(rates), *_scrapes_missing(meta)]


def _scrapes_missing(meta: dict[str, Any]) -> list[str]:
    scrape = meta.get("scrape") or {}
    if scrape.get("broken"):
        return [f"no server metrics: {scrape['broken']}"]
    reasons = scrape.get("reasons", {}) | {"the page before took up the turn": scrape.get("missed", 0)}
    missing = [f"{n} x {reason}" for reason, n in reasons.items() if n]
    total = scrape.get("read", 0) + sum(reasons.values())
    return (
        [f"server metrics: {sum(reasons.values())} of {total} scrapes failed: {', '.join(missing)}"] if missing else []
    )


def _whose(metrics: list[str], labels: list[str]) -> str:
    """Which metrics a note is about, in the fewest words; nothing where it is about all."""
    others = [label for label in labels if label not in metrics]
    if not others:
        return ""
    return f"all but {', '.join(others)}: " if len(others) < len(metrics) else f"{', '.join(metrics)}: "


def _label(row: dict[str, Any]) -> str:
    return LABELS.get(row["metric"], str(row["metric"]))


def _repeats(row: dict[str, Any], summary: list[dict[str, Any]]) -> bool:
    """Whether a row says of the first content what TTFT has said: no request began with reasoning."""
    first = next((r for r in summary if r["metric"] == "ttft_s"), None)
    same = ("n", "mean", "p50", "p99")
    return row["metric"] == "first_content_s" and first is not None and all(row[k] == first[k] for k in same)


SUMMARY_HEAD = ("n", "mean", "p50", "p90", "p99")


def summary_cells(summary: list[dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """A stored summary as table cells, a row a metric that has values; and its notes, each once.

    Times are in the unit that reads best, with their intervals in brackets.
    """
    shown = [row for row in summary if row["n"] and not _repeats(row, summary)]
    cells = [[_label(row), str(row["n"]), *(_with_interval(row, s) for s in SUMMARY_HEAD[1:])] for row in shown]
    owners: dict[str, list[str]] = {}
    for row in shown:
        for note in filter(None, row["note"].split("; ")):
            owners.setdefault(note, []).append(_label(row))
    labels = [_label(row) for row in shown]
    notes = [f"{_whose(metrics, labels)}{note}" for note, metrics in owners.items()]
    return cells, notes


def summary_table(summary: list[dict[str, Any]]) -> tuple[pd.DataFrame, list[str]]:
    """A stored summary as it is shown: a row a metric, under the name of the clock it is read on; and its notes."""
    cells, notes = summary_cells(summary)
    corner = f"{summary[0]['clock']} clock" if summary else "metric"
    return pd.DataFrame(cells, columns=[corner, *SUMMARY_HEAD]).set_index(corner), notes


def _with_interval(row: dict[str, Any], name: str) -> str:
    value, low, high = (row[key] for key in (name, f"{name}_lo", f"{name}_hi"))
    if value is None:
        return "–"
    return show_time(value) + (f" [{show_time(low)}, {show_time(high)}]" if low is not None else "")


def to_frame(table: pa.Table) -> pd.DataFrame:
    """An Arrow table as a frame whose integers stay integers when some are missing (`Int64`)."""
    kinds = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    return table.to_pandas(types_mapper=kinds.get)


def plain_ns(stamps: pd.Series) -> npt.NDArray[np.int64]:
    """A column of stamps as plain integers, (n,) ns; MISSING_NS where there is none.

    Examples
    --------
    >>> plain_ns(pd.Series([5, None], dtype="Int64")).tolist() == [5, MISSING_NS]
    True
    """
    return stamps.to_numpy(np.int64, na_value=MISSING_NS)


def write_json(folder: Path, meta: dict[str, Any]) -> None:
    """Write `run.json` whole or not at all."""
    path = folder / "run.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def read_json(folder: Path) -> dict[str, Any]:
    """The `run.json` of a run folder.

    Raises
    ------
    UsageError
        There is none, it is not JSON, or its format is newer than this package.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise UsageError(f"{folder} is not a run folder: it holds no run.json")
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UsageError(f"{path} is not of format {FORMAT}, the one that this version of llmprofile reads")
    return meta


def write_table(path: Path, parts: Iterable[pa.Table], schema: pa.Schema) -> int:
    """Write tables one after another into one Parquet file; how many rows it got."""
    rows = 0
    # stamps grow: their differences take three quarters of the space, and a fifth of the time to write
    deltas = {f.name: "DELTA_BINARY_PACKED" for f in schema if f.type == pa.int64()}
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, column_encoding=deltas) as writer:
        for part in parts:
            writer.write_table(part)
            rows += part.num_rows
    return rows


def read_table(path: Path, schema: pa.Schema | None = None) -> pd.DataFrame:
    """A table of a run folder; columns of `schema` that it lacks, since it is older than they are, are missing values.

    Raises
    ------
    UsageError
        It is no Parquet file, or was cut short.
    """
    try:
        table = pq.read_table(path)
        for column in schema or ():
            if column.name not in table.column_names:
                table = table.append_column(column, pa.nulls(len(table), column.type))
        return to_frame(table)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def read_run(folder: Path | str) -> Run:
    """The run of a folder whose captures were merged; `collect.load` also reads one that was cut short.

    Raises
    ------
    UsageError
        It is no run folder, not merged, or damaged.
    """
    folder = Path(folder)
    meta = read_json(folder)
    if not (folder / "requests.parquet").is_file():
        raise UsageError(f"{folder} holds no requests.parquet: its captures were not merged")
    return Run(folder, meta, read_table(folder / "requests.parquet", REQUESTS))
