"""Latencies from stamps, on any clock. Pure: arrays in, arrays out.

A latency runs from a start to a token. On the wire clock the start is when the request's first byte was sent and a
token is when the kernel received it; on the seen and handled clocks both are the client's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from llmprofile.units import MISSING_NS, elapsed_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CLOCKS = ("wire", "seen", "handled")
SUFFIX = {"wire": "_s", "seen": "_seen_s", "handled": "_handled_s"}
LATENCIES = ("ttft", "first_content", "ttft_due", "e2e", "e2e_due", "tpot", "ntpot")
LABELS = {
    "ttft_s": "TTFT",
    "first_content_s": "first content",
    "ttft_due_s": "TTFT from due",
    "e2e_s": "E2E",
    "e2e_due_s": "E2E from due",
    "tpot_s": "TPOT",
    "ntpot_s": "NTPOT",
    "itl": "ITL",
    "lateness_s": "lateness",
    "connect_s": "connection set-up",
}
"""Every metric, by the name it has in code, and as people read it."""
CLOCKLESS = ("lateness_s", "connect_s")


def column_of(metric: str, clock: str) -> str:
    """The column of the request table that holds a metric as a clock has it.

    Examples
    --------
    >>> column_of("ttft_s", "seen"), column_of("lateness_s", "seen")
    ('ttft_seen_s', 'lateness_s')
    """
    return metric if metric in CLOCKLESS else metric.removesuffix("_s") + SUFFIX[clock]


BRACKET_S, BRACKET_SHARE = 1e-4, 0.01
"""A latency is bounded, not measured, when its bracket is wider than 0.1 ms and than 1 % of it."""


def derive_latencies(stamps: Mapping[str, Ints], streamed: Ints, output_tokens: Ints) -> dict[str, Floats]:
    """Every latency of every request, on all three clocks.

    Parameters
    ----------
    stamps : mapping of name to (n,) int64
        The `_ns` columns of the request table, `content_<clock>_ns`, of the first content token, and, where
        there may be reasoning, `reasoning_<clock>_ns`, of its first. `MISSING_NS` where missing.
    streamed : (n,) int64
        Tokens that the stream showed: N less the reasoning tokens that only the usage counts.
    output_tokens : (n,) int64
        N; negative where it is not known.

    Returns
    -------
    dict of name to (n,) float
        The derived columns of the request table, seconds, NaN where there is nothing to say.

    Examples
    --------
    >>> from llmprofile.units import MISSING_NS
    >>> names = ["due", "begun", "sent", "sent_last"] + [
    ...     f"{t}_{c}" for t in ("first", "content", "last") for c in ("wire", "seen", "handled")]
    >>> stamps = {f"{name}_ns": np.array([MISSING_NS]) for name in names}
    >>> stamps |= {"sent_ns": np.array([0]), "first_wire_ns": np.array([50_000_000]),
    ...            "last_wire_ns": np.array([150_000_000])}
    >>> latencies = derive_latencies(stamps, np.array([11]), np.array([11]))
    >>> latencies["ttft_s"].tolist(), latencies["tpot_s"].tolist(), latencies["ttft_seen_s"].tolist()
    ([0.05], [0.01], [nan])
    """
    out: dict[str, Floats] = {}
    never_ns = np.full(len(streamed), MISSING_NS)
    for clock in CLOCKS:
        start_ns = stamps["sent_ns" if clock == "wire" else "begun_ns"]
        first_ns, last_ns = stamps[f"first_{clock}_ns"], stamps[f"last_{clock}_ns"]
        e2e_s = elapsed_s(last_ns, start_ns)
        latencies = {
            "ttft": elapsed_s(first_ns, start_ns),
            "first_content": elapsed_s(stamps[f"content_{clock}_ns"], start_ns),
            "first_reasoning": elapsed_s(stamps.get(f"reasoning_{clock}_ns", never_ns), start_ns),
            "ttft_due": elapsed_s(first_ns, stamps["due_ns"]),
            "e2e": e2e_s,
            "e2e_due": elapsed_s(last_ns, stamps["due_ns"]),
            "tpot": _per(elapsed_s(last_ns, first_ns), streamed - 1),
            "ntpot": _per(e2e_s, output_tokens),
        }
        out |= {f"{name}{SUFFIX[clock]}": value for name, value in latencies.items()}
    out["lateness_s"] = elapsed_s(stamps["sent_ns"], stamps["due_ns"])
    out["upload_s"] = elapsed_s(stamps["sent_last_ns"], stamps["sent_ns"])
    return out


def _per(total_s: Floats, count: Ints) -> Floats:
    return np.where(count > 0, total_s / np.maximum(count, 1), np.nan)


def is_bounded(wire_ns: Ints, wire_lo_ns: Ints, exact: npt.NDArray[np.bool_], latency_s: Floats) -> npt.NDArray[Any]:
    """Whether a latency is only known to lie in a bracket that is wider than 0.1 ms and than 1 % of it.

    Examples
    --------
    >>> wire_ns, lo_ns = np.array([10_000_000, 10_000_000]), np.array([9_000_000, 9_000_000])
    >>> is_bounded(wire_ns, lo_ns, np.array([True, False]), np.array([0.05, 0.05])).tolist()
    [False, True]
    """
    width_s = elapsed_s(wire_ns, wire_lo_ns)
    return ~exact & (width_s > np.maximum(BRACKET_S, BRACKET_SHARE * latency_s))


def token_gaps(ids: Ints, at_ns: Ints, tokens: Ints) -> tuple[Floats, Ints]:
    """One gap a token, NaN for each request's first; and how often each event was repeated for it.

    Examples
    --------
    >>> gaps_s, _ = token_gaps(np.array([0, 0]), np.array([0, 100_000_000]), np.array([2, 4]))
    >>> gaps_s.tolist()
    [nan, 0.0, 0.025, 0.025, 0.025, 0.025]
    """
    first = np.concatenate([[True], ids[1:] != ids[:-1]])[: len(ids)]
    gap_s = elapsed_s(at_ns, np.concatenate([at_ns[:1], at_ns[:-1]])) / np.maximum(tokens, 1)
    per_token_s = np.repeat(np.where(first, 0.0, gap_s), tokens)
    starts = np.cumsum(tokens) - tokens
    per_token_s[starts[first & (tokens > 0)]] = np.nan
    return per_token_s, tokens
