"""Client bias apart from server latency: what a client's own clock says, what is true, and the parts of the difference.

A request's stamps on the client's clock and on the wire differ by three waits: begun to sent (sending), wire to seen
(waiting) and seen to handled (handling). Every bias is made of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.latency import CLOCKS, LABELS, column_of, token_gaps
from llmprofile.markup import card
from llmprofile.metrics import QUANTILES, block_draws, block_length_s, known_arrivals
from llmprofile.records import Run, plain_ns
from llmprofile.units import MISSING_NS, elapsed_s, ns_to_s, s_to_ns, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

METRICS = ("ttft_s", "first_content_s", "e2e_s", "tpot_s", "itl", "ntpot_s")
PARTS = ("sending_s", "waiting_s", "handling_s")
LEAST_FOR_P99 = 100


def own_clock(run: Run) -> str:
    """The clock that a run's client would report without the kernel's help: seen if it is stamped, else handled."""
    return "seen" if run.client == "stamped" else "handled"


def paired_latencies(run: Run, metric: str) -> pd.DataFrame:
    """A metric of every `ok` request on all clocks, beside the parts that make them differ.

    Parameters
    ----------
    run : Run
    metric : {"ttft_s", "first_content_s", "e2e_s", "tpot_s", "itl", "ntpot_s"}

    Returns
    -------
    DataFrame
        One row a request (ITL: a token), float seconds, NaN where a stamp is missing, and of the wire where packets
        came out of order (`metrics.known_arrivals`): `wire`, `seen`, `handled`; `sending_s`, `waiting_s` (their sum
        is seen − wire), `handling_s` (handled − seen); `at_s`, when it was.

    Examples
    --------
    >>> pairs = paired_latencies(run, "ttft_s")
    >>> np.allclose(pairs["seen"] - pairs["wire"], pairs["sending_s"] + pairs["waiting_s"], atol=1e-12)
    True
    """
    run = known_arrivals(run)
    rows = run.requests[run.requests["outcome"] == "ok"]
    return _paired_gaps(run, rows) if metric == "itl" else _paired_rows(rows, metric)


def _paired_rows(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    on = {clock: rows[column_of(metric, clock)].to_numpy(float, na_value=np.nan) for clock in CLOCKS}
    at_s = ns_to_s(rows["begun_ns"].to_numpy(float, na_value=np.nan))
    if metric == "tpot_s":  # it has no start: what the first token waited is taken off what the last one did
        parts = [np.zeros(len(rows)), on["seen"] - on["wire"], on["handled"] - on["seen"]]
    else:
        sent_ns, begun_ns = plain_ns(rows["sent_ns"]), plain_ns(rows["begun_ns"])
        ends_ns = {clock: _end_ns(rows, metric, clock) for clock in CLOCKS}
        parts = [
            elapsed_s(sent_ns, begun_ns),
            elapsed_s(ends_ns["seen"], ends_ns["wire"]),
            elapsed_s(ends_ns["handled"], ends_ns["seen"]),
        ]
    if metric == "ntpot_s":
        tokens = rows["output_tokens"].to_numpy(float, na_value=np.nan)
        parts = [part / np.where(tokens > 0, tokens, np.nan) for part in parts]
    return pd.DataFrame(on | dict(zip(PARTS, parts, strict=True)) | {"at_s": at_s})


def _end_ns(rows: pd.DataFrame, metric: str, clock: str) -> Ints:
    """When a latency ended. No column holds this of the first content: it is its start and its length again."""
    if metric != "first_content_s":
        return plain_ns(rows[f"{'first' if metric == 'ttft_s' else 'last'}_{clock}_ns"])
    latency_s = rows[column_of(metric, clock)].to_numpy(float, na_value=np.nan)
    start_ns = plain_ns(rows["sent_ns" if clock == "wire" else "begun_ns"])
    known = ~np.isnan(latency_s) & (start_ns != MISSING_NS)
    # exact: a double holds the seconds of a month to the nanosecond
    length_ns = np.rint(np.where(known, latency_s, 0.0) * s_to_ns(1.0)).astype(np.int64)
    return np.where(known, start_ns + length_ns, MISSING_NS)


def _paired_gaps(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    events = run.events
    ids, tokens = events["request_id"].to_numpy(np.int64), events["tokens"].to_numpy(np.int64)
    keep = np.repeat(np.isin(ids, rows["request_id"].to_numpy(np.int64)), tokens)
    on = {clock: token_gaps(ids, plain_ns(events[f"{clock}_ns"]), tokens)[0][keep] for clock in CLOCKS}
    at_s = np.repeat(ns_to_s(events["seen_ns"].to_numpy(float, na_value=np.nan)), tokens)[keep]
    parts = [np.zeros(len(at_s)), on["seen"] - on["wire"], on["handled"] - on["seen"]]
    return pd.DataFrame(on | dict(zip(PARTS, parts, strict=True)) | {"at_s": at_s})


def metric_bias(pairs: pd.DataFrame, clock: str) -> dict[str, float]:
    """Mean and p99 as a clock has them, as they are, and the difference; no intervals, so that it is quick.

    Parameters
    ----------
    pairs : DataFrame
        Of `paired_latencies`.
    clock : {"seen", "handled"}

    Returns
    -------
    dict
        `n`, of rows that have both clocks; `true_s`, `difference_s`, and, NaN below 100 rows, `true_p99_s`,
        `difference_p99_s`.

    Examples
    --------
    >>> pairs = pd.DataFrame({"seen": [0.3, 0.5, 0.9], "wire": [0.2, 0.3, np.nan]})
    >>> found = metric_bias(pairs, "seen")
    >>> found["n"], round(found["true_s"], 9), round(found["difference_s"], 9)
    (2, 0.25, 0.15)
    """
    reported, true = (pairs[name].to_numpy(float) for name in (clock, "wire"))
    both = ~np.isnan(reported) & ~np.isnan(true)
    reported, true = reported[both], true[both]
    return {
        "n": len(true),
        "true_s": _mean(true),
        "difference_s": _mean(reported - true),
        "true_p99_s": _p99(true),
        "difference_p99_s": _p99(reported) - _p99(true),
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def _p99(values: Floats) -> float:
    return float(np.quantile(values, QUANTILES["p99"])) if len(values) >= LEAST_FOR_P99 else math.nan


@dataclass(frozen=True, eq=False)
class BiasTable:
    """What a run's client would have reported, what is true, and where the difference comes from; it shows itself.

    Attributes
    ----------
    clock : {"seen", "handled"}
        Whose difference from the wire it is: handled of a conventional client, seen of the stamped one.
    frame : DataFrame
        One row a metric, of the `ok` requests that have both clocks (`n`), in seconds, NaN where missing:
        means `handled_s`, `seen_s`, `true_s` (the wire's: the server's own latency, and the network's);
        `difference_s` with its 95 % interval `difference_lo_s`, `difference_hi_s`; its parts `sending_s`,
        `waiting_s`, `handling_s`, which sum to it; and the same of the p99 (names with `_p99`), without parts.
    lateness_mean_s, lateness_p99_s : float
        Of all that was sent. Not latency, and in no difference: sent − due.
    bounded_share, bracket_s : float
        Share of first tokens whose wire time is only known to lie in a bracket, and the bracket's mean width:
        so much more may the bias of their TTFT be.
    notes : tuple of str
    estimated : bool
        Whether `true_s` is a model's estimate (`estimate_bias`) where nothing was measured.
    """

    clock: str
    frame: pd.DataFrame
    lateness_mean_s: float
    lateness_p99_s: float
    bounded_share: float
    bracket_s: float
    notes: tuple[str, ...]
    estimated: bool = False

    def __repr__(self) -> str:
        return "\n".join([self._head(), self._cells().to_string(index=False), *self.notes])

    def _repr_html_(self) -> str:
        # a column a metric: narrower than what is printed
        return card(self._head(), tables=[self._cells().set_index("metric").T], notes=self.notes)

    def _head(self) -> str:
        true = "a model's estimate of the truth" if self.estimated else "true (wire)"
        return f"bias: {self.clock} clock less {true}, per metric; its parts sum to the difference of the means"

    def _cells(self) -> pd.DataFrame:
        clocks = [c for c in ("handled", "seen") if c in (self.clock, "seen")]
        parts = [p for p in PARTS if p != "handling_s" or self.clock == "handled"]
        columns = [*(f"{c}_s" for c in clocks), "true_s", "difference_s", *parts]
        columns += [f"{self.clock}_p99_s", "true_p99_s", "difference_p99_s"]
        shown = self.frame[self.frame[f"{self.clock}_s"].notna()]
        rows = []
        for metric, row in shown.iterrows():
            figures = [show_time(row[c]) + _interval(row, c) for c in columns]
            rows.append([LABELS[str(metric)], str(int(row["n"])), *figures])
        return pd.DataFrame(rows, columns=["metric", "n", *map(_heading, columns)])


def _interval(row: pd.Series, column: str) -> str:
    low, high = (row.get(column.removesuffix("_s") + end, math.nan) for end in ("_lo_s", "_hi_s"))
    return "" if math.isnan(low) else f" [{show_time(low)}, {show_time(high)}]"


def _heading(column: str) -> str:
    name = column.removesuffix("_s")
    return f"p99 {name.removesuffix('_p99')}" if name.endswith("_p99") else name


def separate_bias(run: Run) -> BiasTable:
    """Tell a client's bias from the server's latency, per metric, and the bias's parts from one another.

    Intervals are of the differences request by request (ITL: token by token), by a moving-block bootstrap over time;
    that of the p99 resamples the same blocks of both clocks. What reaches beyond a p99 comes in clusters: behind a
    client that is an M/M/1 queue at ρ = 0.5 its interval covered 84 % of the time with 4000 requests, 95 % with 40,000.

    Parameters
    ----------
    run : Run

    Returns
    -------
    BiasTable
        Without kernel stamps its true column is NaN and a note says so.

    Examples
    --------
    >>> table = separate_bias(run)
    >>> ttft = table.frame.loc["ttft_s"]
    >>> bool(abs(ttft["sending_s"] + ttft["waiting_s"] - ttft["difference_s"]) < 1e-9)
    True
    """
    clock, ok = own_clock(run), run.requests[run.requests["outcome"] == "ok"]
    e2e_s = _values(ok[column_of("e2e_s", clock)])
    block_s = block_length_s(ok["begun_ns"], _mean(e2e_s) if len(e2e_s) else 0.0)
    rows, whys = {}, []
    for metric in METRICS:
        rows[metric], why = _row(paired_latencies(run, metric), clock, block_s)
        whys.append(why)
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("metric").astype({"n": int})
    lateness_s = _values(run.requests["lateness_s"])
    share, bracket_s = bounded_first_tokens(run)
    notes = [
        *([] if frame["n"].any() else [_UNKNOWN]),
        *reordered_note(run),
        _beside(frame, lateness_s),
        *([_BOUNDED.format(share=share, more=show_time(bracket_s))] if share > 0 else []),
        *([_SHARED.format(share=shared)] if (shared := _shared_reads(run, ok)) > 0 else []),
        *dict.fromkeys(filter(None, whys)),
    ]
    return BiasTable(clock, frame, _mean(lateness_s), _p99(lateness_s), share, bracket_s, tuple(notes))


def reordered_note(run: Run) -> list[str]:
    """How many requests' packets came out of order, and what that leaves unknown; nothing where none did.

    Examples
    --------
    >>> reordered_note(run)
    []
    """
    n = int(run.requests["reordered"].sum())
    if not n:
        return []
    return [
        f"{n} request{'s' if n > 1 else ''} saw packets reordered or lost on the way: their stamps don't say when the "
        "bytes could be read, so that what the client added is unknown for these, and their wire times may be early."
    ]


_UNKNOWN = (
    "No token of an ok request has a kernel stamp and this clock's: the bias is unknown here; "
    "estimate_bias may help, which asks a queueing model."
)
_BOUNDED = (
    "{share:.1%} of the first tokens shared a read with what followed: for those the bias of TTFT is the least that it "
    "can have been, and up to {more} more (mean of their brackets)."
)

_SHARED = (
    "{share:.2%} of the token events shared a read with what followed: the wire's gaps at those, which are ITL's true "
    "ones, are known to a bracket only."
)


def _values(column: pd.Series) -> Floats:
    return _known(column.to_numpy(float, na_value=np.nan))


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def bounded_first_tokens(run: Run) -> tuple[float, float]:
    """Share of the `ok` requests' first tokens that are bounded, NaN without stamps; the mean width of their brackets.

    Examples
    --------
    >>> share, bracket_s = bounded_first_tokens(run)
    >>> 0 <= share <= 1
    True
    """
    ok = run.requests[run.requests["outcome"] == "ok"]
    bounded = ok["bounded"].astype("boolean")
    width_s = elapsed_s(plain_ns(ok["first_wire_ns"]), plain_ns(ok["first_wire_lo_ns"]))
    return _mean(_values(bounded.astype("Float64"))), _mean(_known(width_s[bounded.fillna(False).to_numpy(bool)]))


def _shared_reads(run: Run, ok: pd.DataFrame) -> float:
    """Share of the token events that came in one read with the next."""
    of_ok = run.events[run.events["request_id"].isin(ok["request_id"])]
    ids, reads = (plain_ns(of_ok[name]) for name in ("request_id", "read"))
    shared = (ids[1:] == ids[:-1]) & (reads[1:] == reads[:-1]) & (reads[1:] != MISSING_NS)
    return float(shared.sum() / len(ids)) if len(ids) else 0.0


def _beside(frame: pd.DataFrame, lateness_s: Floats) -> str:
    """What stands beside the bias: the server's own latency, and how late the requests left."""
    true_s = frame["true_s"].to_dict()
    server = [f"{LABELS[metric]} {show_time(true_s[metric])}" for metric in ("ttft_s", "e2e_s", "tpot_s")]
    lateness = f"mean {show_time(_mean(lateness_s))}, p99 {show_time(_p99(lateness_s))}"
    return f"Server latency (mean on the wire): {', '.join(server)}. Lateness, in none of these: {lateness}."


def _row(pairs: pd.DataFrame, clock: str, block_s: float) -> tuple[dict[str, float], str]:
    """A metric's row; and why it has no interval, if it has none."""
    both = pairs[[clock, "wire"]].notna().all(axis=1)
    # nothing to compare: what was reported is shown all the same
    known = pairs[both] if both.any() else pairs[pairs[clock].notna()]
    found = metric_bias(known, clock)
    row = {"n": found["n"]} | {f"{c}_s": _mean(_values(known[c])) for c in ("handled", "seen")}
    row |= {"true_s": found["true_s"], "difference_s": found["difference_s"]}
    ends, p99_ends, why = _intervals(known, clock, block_s)
    row |= dict(zip(("difference_lo_s", "difference_hi_s"), ends, strict=True))
    row |= {part: _mean(_values(known[part])) for part in PARTS}
    row |= {f"{c}_p99_s": _p99(_values(known[c])) for c in ("handled", "seen")}
    row |= {name: found[name] for name in ("true_p99_s", "difference_p99_s")}
    return row | dict(zip(("difference_p99_lo_s", "difference_p99_hi_s"), p99_ends, strict=True)), why


Ends = tuple[float, float]
_NO_ENDS = (math.nan, math.nan)


def _intervals(pairs: pd.DataFrame, clock: str, block_s: float) -> tuple[Ends, Ends, str]:
    """Of the mean of the paired differences, and of the difference of the p99s."""
    reported, true, at_s = (pairs[name].to_numpy(float) for name in (clock, "wire", "at_s"))
    if not len(true) or np.isnan(true).all():
        return _NO_ENDS, _NO_ENDS, ""
    (of_reported, why), (of_true, _) = (block_draws(values, at_s, block_s) for values in (reported, true))
    if why:
        return _NO_ENDS, _NO_ENDS, why
    names = ("mean", "p99") if len(true) >= LEAST_FOR_P99 else ("mean",)
    ends = [np.quantile(of_reported[name] - of_true[name], [0.025, 0.975]).tolist() for name in names]
    return tuple(ends[0]), tuple(ends[-1]) if len(ends) > 1 else _NO_ENDS, ""
