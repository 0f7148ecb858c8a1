"""What a sample of latencies says: means, percentiles, rates, and how sure of them one can be.

Requests that share a queue are correlated, so intervals come from a bootstrap over blocks of time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from llmprofile.errors import one_of
from llmprofile.latency import CLOCKS, LABELS, LATENCIES, column_of, token_gaps
from llmprofile.records import Run, plain_ns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Intervals = dict[str, tuple[float | None, float | None]]

BLOCKS_AT_LEAST, MOST_BLOCKS = 20, 50
CELLS_PER_BLOCK = 10
RESAMPLES = 500
QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
STATISTICS = ("mean", *QUANTILES)


def run_clock(run: Run) -> str:
    """The clock that a run is read on: what its client's user would report.

    The wire of a stamped run, or what its client saw where the kernel can't stamp; handled of a conventional run.
    """
    if run.client == "stamped":
        return "wire" if run.requests["first_wire_ns"].notna().any() or _has_wire_ends(run) else "seen"
    return "handled"


def _has_wire_ends(run: Run) -> bool:
    return bool(run.requests["last_wire_ns"].notna().any())


def known_arrivals(run: Run) -> Run:
    """The run as far as stamps say when bytes could be read: without wire times where packets came out of order.

    Such a packet is stamped when it comes, but read when the hole before it is filled: what seen is later than wire
    is the network's repair, and no delay of the client. Only what compares the two needs this.

    Examples
    --------
    >>> known_arrivals(run) is run  # nothing was reordered here
    True
    """
    reordered = run.requests["reordered"].fillna(False).to_numpy(bool)
    if not reordered.any():
        return run
    requests, events = run.requests.copy(), run.events.copy()
    stamps = [f"{token}_{wire}_ns" for token in ("first", "last") for wire in ("wire", "wire_lo")]
    requests.loc[reordered, [*stamps, "headers_ns", "eof_ns"]] = pd.NA
    requests.loc[reordered, [f"{name}_s" for name in LATENCIES]] = math.nan
    of_them = events["request_id"].isin(requests.loc[reordered, "request_id"])
    events.loc[of_them, ["wire_ns", "wire_lo_ns"]] = pd.NA
    return replace(run, requests=requests, _tables={"events": events, "cycles": run.cycles})


def inter_token_s(run: Run, clock: str) -> pd.DataFrame:
    """The gap before every token after a request's first one (ITL).

    An event that is known to hold m tokens shares its gap over them; further tokens of the first event have 0.

    Parameters
    ----------
    run : Run
    clock : {"wire", "seen", "handled"}

    Returns
    -------
    DataFrame
        `request_id`, `itl_s`, and `at_ns`, when the token came; `ok` requests only.
    """
    ok_ids = run.requests.loc[run.requests["outcome"] == "ok", "request_id"].to_numpy(np.int64)
    events = run.events
    ids = events["request_id"].to_numpy(np.int64)
    at_ns = plain_ns(events[f"{one_of('clock', clock, CLOCKS)}_ns"])
    gap_s, tokens = token_gaps(ids, at_ns, events["tokens"].to_numpy(np.int64))
    keep = np.repeat(np.isin(ids, ok_ids), tokens) & ~np.isnan(gap_s)
    frame = {"request_id": np.repeat(ids, tokens), "itl_s": gap_s, "at_ns": np.repeat(at_ns, tokens)}
    return pd.DataFrame({name: column[keep] for name, column in frame.items()})


def summarise(run: Run, clock: str | None = None) -> list[dict[str, Any]]:
    """The rows of `summary`, plain: NaN as None, ready for JSON."""
    clock = one_of("clock", clock or run_clock(run), CLOCKS)
    ok = run.requests[run.requests["outcome"] == "ok"]
    block_s = block_length_s(ok["begun_ns"], _mean(ok[column_of("e2e_s", clock)]))
    rows = []
    for metric in LABELS:
        row = describe(*known_values(run, ok, metric, clock), block_s)
        note = "; ".join(filter(None, [row.pop("note"), _tokens_note(run, ok) if metric == "itl" else ""]))
        rows.append({"metric": metric, "clock": clock, **row, "note": note})
    return rows


def block_length_s(begun_ns: pd.Series, mean_e2e_s: float) -> float:
    """How long the bootstrap's blocks are: above a second, ten request durations, and a fiftieth of the run.

    Ten durations alone cover too little near saturation, where a queue remembers for longer than a request lasts:
    for the mean wait of an M/M/1 queue at ρ = 0.8, 68–79 % instead of 95 %; with a fiftieth of the run 89–96 %.

    Examples
    --------
    >>> block_length_s(pd.Series([0, 600_000_000_000]), mean_e2e_s=0.5)
    12.0
    """
    span_s = float(begun_ns.max() - begun_ns.min()) / 1e9 if len(begun_ns) else 0.0
    return max(1.0, 10 * mean_e2e_s, span_s / MOST_BLOCKS)


def known_values(run: Run, ok: pd.DataFrame, metric: str, clock: str) -> tuple[Floats, Floats]:
    """A metric of the `ok` requests that have it (ITL: of their tokens), and when each was taken, seconds."""
    if metric == "itl":
        gaps = inter_token_s(run, clock)
        return gaps["itl_s"].to_numpy(float), gaps["at_ns"].to_numpy(float) / 1e9
    values, at_ns = (ok[name].to_numpy(float, na_value=np.nan) for name in (column_of(metric, clock), "begun_ns"))
    known = ~np.isnan(values)
    return values[known], at_ns[known] / 1e9


def _tokens_note(run: Run, ok: pd.DataFrame) -> str:
    held = run.events.groupby("request_id")["tokens"].sum()
    said = ok.set_index("request_id")["output_tokens"]
    unlike = int((said.reindex(held.index).dropna() != held.reindex(said.dropna().index).dropna()).sum())
    have = "request has" if unlike == 1 else "requests have"
    return f"{unlike} {have} more or fewer tokens than events: counted as one token an event" if unlike else ""


def _mean(column: pd.Series) -> float:
    values = column.to_numpy(float, na_value=np.nan)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else 0.0


def describe(values: Floats, at_s: Floats, block_s: float) -> dict[str, Any]:
    """n, mean and percentiles of a sample over time, with 95 % intervals, None where it can't support them.

    Parameters
    ----------
    values : (n,) float
    at_s : (n,) float
        When each was taken; correlated neighbours must stay together.
    block_s : float
        Length of the bootstrap's blocks: well above the time over which neighbours are correlated.

    Examples
    --------
    >>> row = describe(np.ones(50), np.arange(50.0), block_s=1.0)
    >>> row["mean"], row["p99"], row["note"]
    (1.0, None, 'p99 needs 100 values')
    """
    n, notes = len(values), []
    row: dict[str, Any] = {"n": n, "mean": float(values.mean()) if n else None}
    for name, q in QUANTILES.items():
        needed = round(1 / (1 - q))
        row[name] = float(np.quantile(values, q)) if n >= needed else None
        if 0 < n < needed:
            notes.append(f"{name} needs {needed} values")
    intervals, why = block_intervals(values, at_s, block_s)
    for name in STATISTICS:
        low, high = intervals[name] if row[name] is not None else (None, None)
        row[f"{name}_lo"], row[f"{name}_hi"] = low, high
    return {**row, "note": "; ".join(filter(None, [*notes, why if n else "no values"]))}


def block_intervals(values: Floats, at_s: Floats, block_s: float, level: float = 0.95) -> tuple[Intervals, str]:
    """Percentile intervals of the mean and quantiles by a moving-block bootstrap over time.

    Returns
    -------
    dict of name to (low, high), and a sentence where fewer than 20 blocks hold values: then all are None.
    """
    draws, why = block_draws(values, at_s, block_s)
    if why:
        return dict.fromkeys(STATISTICS, (None, None)), why
    ends = {name: np.quantile(d, [(1 - level) / 2, (1 + level) / 2]) for name, d in draws.items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}, ""


def block_draws(values: Floats, at_s: Floats, block_s: float) -> tuple[dict[str, Floats], str]:
    """Mean and quantiles in each resample of a moving-block bootstrap over time (Künsch 1989).

    Values are counted into fine bins of their own quantiles (exact up to 4000 different values), in cells of a
    tenth of a block; a resample is a sum of runs of ten cells that start anywhere. Samples taken at the same times
    have the same resamples, so that draws of the two can be subtracted.

    Returns
    -------
    dict of name to (resamples,) float, and a sentence where fewer than 20 blocks hold values: then it is empty.
    """
    span_s = float(at_s.max() - at_s.min()) if len(values) > 1 else 0.0
    blocks = span_s / block_s
    if blocks < BLOCKS_AT_LEAST or len(np.unique((at_s - at_s.min()) // block_s)) < BLOCKS_AT_LEAST:
        return {}, f"too short for an interval, which takes values in {BLOCKS_AT_LEAST} blocks of {block_s:.3g} s"
    cells = math.ceil(blocks * CELLS_PER_BLOCK)
    cell = np.minimum(((at_s - at_s.min()) / span_s * cells).astype(int), cells - 1)
    levels, bins = _bin(values)
    counts = sparse.csr_matrix((np.ones(len(values)), (cell, bins)), (cells, len(levels)))
    sums = np.bincount(cell, values, cells)
    weights = _block_weights(cells, np.random.default_rng(0))
    weights = weights[weights @ np.bincount(cell, minlength=cells) > 0]  # an empty resample says nothing
    per_bin = np.asarray(weights @ counts)
    totals = per_bin.sum(axis=1)
    cumulated = np.cumsum(per_bin, axis=1)
    draws = {"mean": weights @ sums / totals}
    quantiles = {name: levels[(cumulated >= q * totals[:, None]).argmax(axis=1)] for name, q in QUANTILES.items()}
    return draws | quantiles, ""


def _bin(values: Floats, most: int = 4000) -> tuple[Floats, Ints]:
    """The values' levels, and each value's level."""
    levels = np.unique(values)
    if len(levels) > most:
        levels = np.unique(np.quantile(values, np.linspace(0, 1, most)))
    return levels, np.searchsorted((levels[1:] + levels[:-1]) / 2, values)


def _block_weights(cells: int, rng: np.random.Generator) -> Floats:
    """How often each cell is drawn in each resample, (RESAMPLES, cells); blocks wrap round the end."""
    starts = rng.integers(0, cells, (RESAMPLES, max(1, cells // CELLS_PER_BLOCK)))
    hits = np.stack([np.bincount(s, minlength=cells) for s in starts])
    wrapped = np.concatenate([hits[:, -CELLS_PER_BLOCK + 1 :], hits], axis=1)
    cumulated = np.cumsum(np.concatenate([np.zeros((RESAMPLES, 1)), wrapped], axis=1), axis=1)
    return cumulated[:, CELLS_PER_BLOCK:] - cumulated[:, :-CELLS_PER_BLOCK]


def summary(run: Run, clock: str | None = None) -> pd.DataFrame:
    """One row a metric: n, mean, p50, p90, p99 of the `ok` requests with block-bootstrap intervals.

    Parameters
    ----------
    run : Run
    clock : {"wire", "seen", "handled"}, optional
        The run's own by default: wire of a stamped run, handled of a conventional one.

    Returns
    -------
    DataFrame
        Seconds; the index is headed by the clock's name. A percentile that the sample can't support is NaN, and
        `note` says so.

    Raises
    ------
    UsageError
        An unknown clock.
    """
    rows = summarise(run, clock)
    frame = pd.DataFrame(rows).drop(columns="clock").set_index("metric")
    frame.index.name = f"{rows[0]['clock']} clock"
    figures = [c for c in frame.columns if c not in ("n", "note")]
    return frame.astype(dict.fromkeys(figures, float))


def first_turns(requests: pd.DataFrame) -> pd.DataFrame:
    """The rows that begin a conversation: all where there is none.

    Examples
    --------
    >>> len(first_turns(run.requests)) == len(run.requests)
    True
    """
    return requests[requests["turn"].fillna(0) == 0] if "turn" in requests else requests


def rates(run: Run, asked_per_s: float | None, drawn_per_s: float) -> dict[str, float | None]:
    """Rates asked, drawn and achieved, and output tokens per second; None where there is nothing to say.

    A rate is a number of gaps over the span they fill, so that a run of n requests has n − 1 of them. Of conversations
    the rate is that of their first turns, which is what is asked and drawn.
    """
    sent_ns = np.sort(first_turns(run.requests)["sent_ns"].dropna().to_numpy(np.int64))
    span_ns = np.ptp(sent_ns) if len(sent_ns) else 0
    achieved = (len(sent_ns) - 1) * 1e9 / span_ns if span_ns else math.nan
    ok = run.requests[run.requests["outcome"] == "ok"]
    ends_ns = ok[["last_wire_ns", "last_seen_ns"]].max(axis=1).dropna().to_numpy(np.int64)
    tokens = float(ok["output_tokens"].sum())
    tokens_per_s = tokens * 1e9 / (ends_ns.max() - sent_ns[0]) if len(ends_ns) and len(sent_ns) else math.nan
    found = {"drawn_per_s": drawn_per_s, "achieved_per_s": achieved, "tokens_per_s": tokens_per_s}
    known = {name: None if math.isnan(value) else float(value) for name, value in found.items()}
    return {"asked_per_s": asked_per_s, **known}
