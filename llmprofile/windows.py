"""A run without its beginning and its end: what of a window's requests and tokens counts for what."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from llmprofile.errors import UsageError, not_negative
from llmprofile.metrics import first_turns, rates, summarise
from llmprofile.records import OUTCOMES, Run, plain_ns
from llmprofile.trust import verdict
from llmprofile.units import MISSING_NS, NS_PER_S, ns_to_s, s_to_ns, show_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def window(run: Run, warmup_s: float = 0.0, cooldown_s: float = 0.0) -> Run:
    """The run without the first `warmup_s` and the last `cooldown_s` of its load, as a run of its own.

    The load lasts from the first due time to the last: the drain after it, when the load fades, is outside the window
    in any case. Cut by event:

    - A request belongs to the window when it was due in it. Its row counts as a whole, for outcomes, lateness and every
      latency (TTFT, TPOT, NTPOT, ITL, E2E), wherever its tokens came: to leave out those that end after the window
      would leave out the slow ones. What was due earlier or later counts for none of these.
    - A token belongs to the window when it came in it, on the wire (seen, where there is no stamp), whosever it is:
      `tokens_per_s` counts the tokens of all `ok` requests of the whole run, the later tokens of a request that
      overlaps the warm-up among them, not those of the window's own requests that came after its end. Where usage
      counts more tokens than there are in a request's events, these share the rest.
    - Rates drawn and achieved are those of the window's own requests. Reads, stamps and clock steps of `run.json` stay
      those of the whole run.

    Summary and verdict are made anew. Fits leave out the edges of a run by themselves, and need the events that are
    missing here: give them the whole run.

    Parameters
    ----------
    run : Run
    warmup_s, cooldown_s : float

    Returns
    -------
    Run
        A view without a folder; `meta["window"]` says what was cut: `warmup_s`, `cooldown_s`, `from_ns`, `until_ns`.

    Raises
    ------
    UsageError
        A time below 0, or no request is due in the window.

    Examples
    --------
    >>> cut = window(run, warmup_s=0.2, cooldown_s=0.2)
    >>> len(run.requests), 60 < len(cut.requests) < 140
    (200, True)
    """
    from_ns, until_ns = bounds_ns(run, warmup_s, cooldown_s)
    own = due_between(run, from_ns, until_ns)
    requests = run.requests[own].reset_index(drop=True)
    events = run.events[run.events["request_id"].isin(requests["request_id"])].reset_index(drop=True)
    counts = requests["outcome"].value_counts()
    meta: dict[str, Any] = {
        **run.meta,
        "window": {"warmup_s": warmup_s, "cooldown_s": cooldown_s, "from_ns": from_ns, "until_ns": until_ns},
        "outcomes": {outcome: int(counts[outcome]) for outcome in OUTCOMES if outcome in counts},
        "lost_requests": int(counts.get("lost", 0)),
        "resent": int(requests["resent"].fillna(False).sum()),
    }
    view = Run(None, meta, requests, {"events": events, "cycles": run.cycles})
    asked_per_s = run.meta["rates"].get("asked_per_s")
    meta["rates"] = rates(view, asked_per_s, _drawn_per_s(run, requests))
    meta["rates"]["tokens_per_s"] = _tokens_per_s(run, from_ns, until_ns)
    meta["summary"] = summarise(view)
    meta["verdict"] = verdict(view).as_dict()
    return view


def bounds_ns(run: Run, warmup_s: float, cooldown_s: float) -> tuple[int, int]:
    """The first and the last moment of a window.

    Raises
    ------
    UsageError
        A time below 0, no request was ever due, or nothing is left.

    Examples
    --------
    >>> from_ns, until_ns = bounds_ns(run, 0.0, 0.0)
    >>> [from_ns, until_ns] == run.requests["due_ns"].iloc[[0, -1]].tolist()
    True
    """
    for name, value in (("warmup_s", warmup_s), ("cooldown_s", cooldown_s)):
        not_negative(name, value, " (seconds)")
    due_ns = _due_ns(run)
    due_ns = due_ns[due_ns != MISSING_NS]
    if not len(due_ns):
        raise UsageError("no request of this run was ever due: there is nothing to cut")
    first_ns, last_ns = int(due_ns.min()), int(due_ns.max())
    from_ns, until_ns = first_ns + s_to_ns(warmup_s), last_ns - s_to_ns(cooldown_s)
    if not ((due_ns >= from_ns) & (due_ns <= until_ns)).any():
        load = show_time(ns_to_s(last_ns - first_ns))
        raise UsageError(
            f"no request was due between {show_time(warmup_s)} after the first and {show_time(cooldown_s)} before the "
            f"last: the load lasted {load}; cut less"
        )
    return from_ns, until_ns


def due_between(run: Run, from_ns: int, until_ns: int) -> npt.NDArray[np.bool_]:
    """Which requests were due in [from_ns, until_ns], (n,) bool; one that was never due wasn't.

    Examples
    --------
    >>> bool(due_between(run, *bounds_ns(run, 0.0, 0.0)).all())
    True
    """
    due_ns = _due_ns(run)
    return (due_ns >= from_ns) & (due_ns <= until_ns)


def _due_ns(run: Run) -> Ints:
    """When each request was due, or began where nobody knows (another tool's run)."""
    return plain_ns(run.requests["due_ns"].fillna(run.requests["begun_ns"]))


def _drawn_per_s(run: Run, requests: pd.DataFrame) -> float:
    """Gaps between the window's due times over their span; NaN where due times were not drawn."""
    if run.meta["rates"].get("drawn_per_s") is None:
        return math.nan
    due_ns = first_turns(requests)["due_ns"].dropna().to_numpy(np.int64)
    span_ns = int(np.ptp(due_ns)) if len(due_ns) else 0
    return (len(due_ns) - 1) * NS_PER_S / span_ns if span_ns else math.nan


def _tokens_per_s(run: Run, from_ns: int, until_ns: int) -> float | None:
    """Output tokens of `ok` requests that came in the window, per second of it."""
    at_ns, tokens = _token_times(run)
    if until_ns <= from_ns or not len(at_ns):
        return None
    within = (at_ns >= from_ns) & (at_ns <= until_ns)
    return float(tokens[within].sum()) * NS_PER_S / (until_ns - from_ns)


def _token_times(run: Run) -> tuple[Ints, Floats]:
    """When output tokens came, and how many at each time: one entry an event, or an answer that is no stream."""
    ok = run.requests[run.requests["outcome"] == "ok"]
    events = run.events[run.events["request_id"].isin(ok["request_id"])]
    held = events.groupby("request_id")["tokens"].sum().astype(float)
    said = ok.set_index("request_id")["output_tokens"].astype(float)
    share = (said.reindex(held.index) / held).where(held > 0).fillna(1.0)
    tokens = events["tokens"].to_numpy(float) * events["request_id"].map(share).to_numpy(float)
    whole = ok[~ok["request_id"].isin(held.index)]
    at_ns = pd.concat(
        [events["wire_ns"].fillna(events["seen_ns"]), whole["last_wire_ns"].fillna(whole["last_seen_ns"])]
    )
    counted = np.concatenate([tokens, whole["output_tokens"].to_numpy(float, na_value=np.nan)])
    known = at_ns.notna().to_numpy(bool) & ~np.isnan(counted)
    return plain_ns(at_ns)[known], counted[known]
