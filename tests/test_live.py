"""Live figures against captures whose figures are known, and against the run that comes of them."""

from __future__ import annotations

import inspect
import itertools
import re
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import llmprofile as lp
from llmprofile.capture import CaptureWriter, Exchange, capture_path, pack
from llmprofile.live import (
    AMBER_UP_TO,
    BIAS_S,
    BIAS_SHARE,
    MOST_BYTES,
    MOST_KEPT,
    MOST_ROWS,
    BiasSoFar,
    Figures,
    Live,
    as_html,
    as_line,
    busy_share,
    sparkline,
)
from llmprofile.parsing import parse_worker
from llmprofile.supervise import Progress
from llmprofile.units import NS_PER_S

MS = 1_000_000
OFFSET_NS = 1_700_000_000 * NS_PER_S
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
LAST = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
BAD = b'data: {"error": {"message": "<script>alert(1)</script>"}}\n\n'


def answered(
    request_id: int, ttft_ns: int, off_ns: int, tokens: int = 4, last: bytes = LAST, stamps: bool = True
) -> Any:
    """A request sent 1 ms late, at once begun, with 10 ms between tokens; seen `off_ns` after the wire."""
    start_ns = request_id * MS
    exchange = Exchange(request_id, start_ns - MS, start_ns, start_ns, start_ns, ended="eof")
    for k in range(tokens):
        wire_ns = start_ns + ttft_ns + k * 10 * MS
        stamp = struct.pack("qq", *divmod(wire_ns + OFFSET_NS, NS_PER_S)) if stamps else bytes(16)
        data = (HEAD if k == 0 else b"") + (last if k == tokens - 1 else TOKEN)
        exchange.reads.append((stamp, wire_ns + off_ns - 1000, wire_ns + off_ns, data))
    return exchange


@dataclass
class Recorded:
    """A load whose workers' files the test writes."""

    folder: Path
    meta: dict[str, Any]
    progress: Progress = field(default=Progress("running", 400, 200, 150, 3, 50, 2.0))
    result: None = None
    processes: int = 1

    def __post_init__(self) -> None:
        (self.folder / "capture").mkdir(parents=True)
        self.writers = [CaptureWriter(self.folder, k) for k in range(self.processes)]

    def write(self, exchanges: list[Exchange], turns: Any = ((), ()), worker: int = 0) -> None:
        cycles = (array("q", turns[0]), array("q", turns[1]))
        self.writers[worker].write([pack(e) for e in exchanges], cycles, struct.pack("qq", 0, OFFSET_NS))

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers = []

    def stop(self) -> None:
        raise NotImplementedError


Record = Callable[..., Recorded]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Record]:
    """A function that makes such a load."""
    loads: list[Recorded] = []

    def make(processes: int = 1, **asked: Any) -> Recorded:
        plain = {"client": "stamped", "n": 400, "duration_s": None, "rate_per_s": 100.0, "concurrency": None}
        meta = {"run_id": "0<1", "asked": {**plain, "processes": processes, **asked}}
        loads.append(Recorded(tmp_path / str(len(loads)), meta, processes=processes))
        return loads[-1]

    yield make
    for load in loads:
        load.close()


def updated(live: Live, times: int) -> Figures:
    for _ in range(times):
        figures = live.update()
    return figures


def test_figures_of_a_known_load(recorded: Record) -> None:
    load = recorded()
    live = Live(load)
    assert live.update().sampled == 0
    for lot in range(8):  # 25 requests each: all of them are sampled
        load.write([answered(25 * lot + k, (50 + k) * MS, 300_000) for k in range(25)])
        figures = live.update()
    assert figures.sampled == 200 and figures.outcomes == {"ok": 200} and figures.error is None
    ttft_s = np.tile((50 + np.arange(25)) / 1e3, 8)
    wanted = {"ttft_s": ttft_s, "ntpot_s": (ttft_s + 0.03) / 4, "lateness_s": np.full(200, 0.001)}
    assert figures.clock == "wire"
    for metric, values in wanted.items():
        quantiles = dict(zip(("p50", "p90", "p99"), np.quantile(values, [0.5, 0.9, 0.99]), strict=True))
        assert figures.percentiles[metric] == pytest.approx(quantiles, abs=1e-9), metric
    assert (figures.bias.metric, figures.bias.clock) == ("ttft_s", "seen")
    assert figures.bias.mean_s == pytest.approx(0.0003) and figures.bias.true_s == pytest.approx(ttft_s.mean())
    assert figures.bias.light == ("green", "on the mark")
    assert (figures.state, figures.done, figures.total, figures.share) == ("running", 150, 400, 0.375)
    assert (figures.in_flight, figures.broken_off, figures.asked_per_s) == (50, 3, 100.0)
    assert figures.rate_per_s == pytest.approx(199 / 2.0)
    assert len(figures.history["at_s"]) == 9


def test_rows_are_what_the_run_will_hold(recorded: Record) -> None:
    load = recorded(client="conventional")
    rng = np.random.default_rng(1)
    exchanges = [answered(k, int(rng.integers(20, 80)) * MS, int(rng.integers(0, 3 * MS))) for k in range(30)]
    for exchange in exchanges:
        exchange.marks = array("q", [t for _, _, seen, _ in exchange.reads for t in (seen, seen + 200_000)] + [0, 0])
    load.write(exchanges)
    figures = Live(load).update()
    load.close()
    parse_worker(load.folder, 0)
    rows = pq.read_table(load.folder / "capture" / "answers-0.parquet").to_pandas()
    assert figures.clock == "handled"
    assert figures.percentiles["ttft_s"]["p50"] == pytest.approx(rows["ttft_handled_s"].median())
    assert figures.percentiles["ntpot_s"]["p90"] == pytest.approx(rows["ntpot_handled_s"].quantile(0.9))
    assert figures.bias.mean_s == pytest.approx((rows["ttft_handled_s"] - rows["ttft_s"]).mean())


def test_a_percentile_takes_enough_requests(recorded: Record) -> None:
    load = recorded()
    load.write([answered(k, 50 * MS, 0) for k in range(9)])
    found = Live(load).update().percentiles["ttft_s"]
    assert found["p50"] == pytest.approx(0.05)
    assert np.isnan(found["p90"]) and np.isnan(found["p99"])


def test_no_byte_is_read_twice_and_half_a_batch_waits(recorded: Record) -> None:
    load = recorded()
    path = capture_path(load.folder, "requests", 0)
    sizes = []
    for lot in range(4):
        load.write([answered(5 * lot + k, 50 * MS, 0) for k in range(5)], ([lot], [lot + 1]))
        sizes.append(path.stat().st_size)
    load.close()
    whole = path.read_bytes()
    live, seen = Live(load), []
    for length in range(0, len(whole) + 300, 300):
        path.write_bytes(whole[:length])
        seen.append((length, live.update().sampled))
    path.write_bytes(whole)
    seen.append((len(whole), live.update().sampled))
    assert seen == [(length, 5 * sum(size <= length for size in sizes)) for length, _ in seen]
    assert updated(live, 3).sampled == 20


def test_a_sample_of_bounded_size_from_all_workers(recorded: Record) -> None:
    load = recorded(processes=3)
    for worker in range(3):  # each worker's requests have a time to the first token of their own
        load.write([answered(300 * worker + k, (20 + 20 * worker) * MS, 0) for k in range(300)], worker=worker)
    live = Live(load)
    assert live.update().sampled == MOST_ROWS
    assert live.update().sampled == MOST_ROWS  # what was not sampled is dropped, not queued
    for lot in range(20):
        for worker in range(3):
            load.write([answered(1000 + lot, (20 + 20 * worker) * MS, 0)] * 32, worker=worker)
        figures = live.update()
    assert figures.sampled == 21 * MOST_ROWS
    p50 = figures.percentiles["ttft_s"]
    # of a batch that was drawn at random each time: all three workers came up
    assert p50["p50"] < 0.06
    assert p50["p99"] == pytest.approx(0.06)


def test_long_answers_count_by_their_bytes(recorded: Record) -> None:
    load = recorded()
    tokens = MOST_BYTES // len(TOKEN) // 3 - 10
    load.write([answered(k, 50 * MS, 0, tokens) for k in range(20)])
    assert Live(load).update().sampled == 4  # three are a little less than the bound, the fourth passes it


def test_of_a_long_run_the_latest_count(recorded: Record) -> None:
    load = recorded()
    live = Live(load)
    rounds = MOST_KEPT // MOST_ROWS + 4
    for lot in range(rounds):
        ttft_ms = 90 if lot < 4 else 50
        load.write([answered(k, ttft_ms * MS, 0, tokens=1) for k in range(MOST_ROWS)])
        figures = live.update()
    assert figures.sampled == rounds * MOST_ROWS
    assert figures.percentiles["ttft_s"]["p99"] == pytest.approx(0.05)
    assert f"its latest {MOST_KEPT:,}" in as_html(figures)


def test_without_stamps_the_bias_is_unknown(recorded: Record) -> None:
    load = recorded()
    load.write([answered(k, 50 * MS, MS, stamps=False) for k in range(20)])
    figures = Live(load).update()
    assert figures.clock == "seen"
    assert figures.percentiles["ttft_s"]["p50"] == pytest.approx(0.051)
    assert figures.bias.light == ("grey", "unknown")
    assert "no kernel stamps" in as_html(figures) and "unknown" in as_line(figures)


def test_failed_requests_are_counted_and_their_text_is_escaped(recorded: Record) -> None:
    load = recorded()
    load.write([answered(k, (500 if k < 5 else 50) * MS, 0, last=BAD if k < 5 else LAST) for k in range(20)])
    figures = Live(load).update()
    assert figures.percentiles["ttft_s"]["p90"] == pytest.approx(0.05)  # of those that are ok
    assert figures.outcomes == {"ok": 15, "stream_error": 5}
    html = as_html(figures)
    assert "25.0% stream_error" in html and "3 broken off" in html
    assert "&lt;script&gt;" in html and "<script" not in html
    assert "run 0&lt;1" in html


def test_what_is_asked_of_conversations_is_said_to_be_of_them(recorded: Record) -> None:
    for asked, said in (({}, "100/s asked"), ({"conversation": "Conversation(3, 1.0)"}, "100/s conversations asked")):
        figures = Live(recorded(**asked)).update()
        assert said in as_line(figures) and said in as_html(figures)


def test_closed_loops_have_no_rate_asked(recorded: Record) -> None:
    load = recorded(rate_per_s=None, concurrency=8)
    figures = Live(load).update()
    assert np.isnan(figures.asked_per_s)
    assert "closed loop of 8" in as_html(figures) and "closed loop of 8" in as_line(figures)
    by_time = recorded(rate_per_s=None, concurrency=8, n=None, duration_s=8.0)
    figures = Live(by_time).update()
    assert figures.total is None and figures.share == pytest.approx(0.25)
    assert "of 400" not in as_html(figures)
    capped = recorded(concurrency=8)
    assert "at most 8 in flight" in as_html(Live(capped).update())


def test_a_rate_is_that_of_sending_not_of_draining(recorded: Record) -> None:
    load = recorded()
    live = Live(load)
    for k in range(1, 21):
        begun = min(10 * k, 100)
        load.progress = Progress("running", 100, begun, 0, 0, begun, 0.1 * k)
        figures = live.update()
    assert figures.rate_per_s == pytest.approx(99.0)
    # the curve is of the moment: of the last updates, in which nothing was sent
    assert figures.history["rate_per_s"][8] == pytest.approx(100.0)
    assert figures.history["rate_per_s"][-1] == 0.0


def test_nothing_yet(recorded: Record) -> None:
    load = recorded()
    load.progress = Progress("starting", 400, 0, 0, 0, 0, 0.0)
    figures = Live(load).update()
    assert figures.sampled == 0 and not len(figures.history["at_s"])
    assert "nan" not in as_html(figures) + as_line(figures)
    assert "nothing parsed yet" in as_html(figures)


def test_captures_that_are_gone_are_no_error(recorded: Record) -> None:
    load = recorded()
    live = Live(load)
    load.write([answered(k, 50 * MS, 0) for k in range(5)])
    live.update()
    for path in (load.folder / "capture").iterdir():
        path.unlink()
    assert live.update().sampled == 5


# --- utilisation ---


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_utilisation_of_a_made_loop(recorded: Record, share: float) -> None:
    """Turns of 1 ms, of which the loop works a share; in lots, as a worker writes them."""
    load = recorded(processes=2)
    live = Live(load)
    at_ns = MS
    for _ in range(5):
        entered = [at_ns + k * MS for k in range(100)]
        returned = [int(e + (1 - share) * MS) for e in entered]
        load.write([], (entered, returned))
        at_ns += 100 * MS
        figures = live.update()
        assert figures.utilisation[0] == pytest.approx(share, abs=0.02)
    assert np.isnan(figures.utilisation[1])  # the other worker has written nothing
    assert figures.history["utilisation"][-1] == figures.utilisation[0]


def test_work_between_two_lots_is_work(recorded: Record) -> None:
    load = recorded()
    live = Live(load)
    load.write([], ([0], [2 * MS]))  # it sleeps for 2 ms, works for 6, sleeps for 2
    live.update()
    load.write([], ([8 * MS], [10 * MS]))
    assert live.update().utilisation[0] == pytest.approx(0.75)


def test_quick_polls_are_no_sleep() -> None:
    entered = np.arange(1, 1001) * 10_000
    turns = np.stack([entered, entered + 3_000], axis=1)  # something was ready each time
    assert busy_share(turns) == 1.0
    assert np.isnan(busy_share(np.array([[5, 5]]), 5))


# --- the light ---


def test_thresholds_are_the_verdicts() -> None:
    defaults = {name: p.default for name, p in inspect.signature(lp.verdict).parameters.items()}
    assert (defaults["bias_s"], defaults["bias_share"]) == (BIAS_S, BIAS_SHARE)


@pytest.mark.parametrize("true_s", [0.02, 0.2])
@pytest.mark.parametrize("sign", [1, -1])
def test_light(true_s: float, sign: int) -> None:
    allowed_s = max(0.0005, 0.01 * true_s)
    steps = [(0.99, "green"), (1.01, "amber"), (0.99 * AMBER_UP_TO, "amber"), (1.01 * AMBER_UP_TO, "red")]
    lights = [BiasSoFar("ttft_s", "seen", sign * times * allowed_s, true_s).light for times, _ in steps]
    assert [colour for colour, _ in lights] == [colour for _, colour in steps]
    assert len({words for _, words in lights}) == 3


@pytest.mark.parametrize(("off_ns", "colour"), [(200_000, "green"), (2 * MS, "amber"), (20 * MS, "red")])
def test_light_is_shown_in_colour_and_in_words(recorded: Record, off_ns: int, colour: str) -> None:
    load = recorded()
    load.write([answered(k, 50 * MS, off_ns) for k in range(20)])
    figures = Live(load).update()
    assert figures.bias.light[0] == colour
    html = as_html(figures)
    assert f'class="light {colour}"' in html and f": <span>{figures.bias.light[1]}</span>" in html
    assert f": {figures.bias.light[1]}" in as_line(figures)


# --- curves ---


def test_a_curve_is_the_last_minute_from_zero_up() -> None:
    at_s, values = np.arange(0.0, 121.0), np.r_[np.full(60, 99.0), np.linspace(0, 10, 61)]
    values[100] = np.nan
    points = re.search(r'points="([^"]*)"', sparkline(at_s, values))
    assert points is not None
    x, y = np.array([p.split(",") for p in points[1].split()], float).T
    assert len(x) == 60 and (x[0], x[-1]) == (0.0, 200.0)
    # on a straight line from the bottom to the top
    assert y == pytest.approx(30 - 27 * x / 200, abs=0.1)


def test_curves_of_nothing_and_of_zeros() -> None:
    nothing = np.array([])
    for svg in (sparkline(nothing, nothing), sparkline(np.array([1.0]), np.array([np.nan]))):
        assert 'points=""' in svg
    assert 'points="0.0,30.0 200.0,30.0"' in sparkline(np.array([0.0, 2.0]), np.zeros(2))


# --- a real load ---


def test_live_figures_beside_the_run(tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.03, itl_s=0.004, cv=0.3, seed=2) as server:
        load = lp.start_load(
            server.url, lp.Poisson(150), 300, output_tokens=6, processes=2, out=tmp_path / "run", progress=False
        )
        live, found = Live(load), []
        while load.result is None:
            found.append(live.update())
            time.sleep(0.05)
        run = load.wait()
    figures = live.update()
    assert figures.state == "done" and figures.done == 300 and figures.share == 1.0
    assert 30 < figures.sampled <= 300
    states = [f.state for f in found]
    assert states == sorted(states, key=["starting", "running", "collecting", "done"].index)
    assert all(a.sampled <= b.sampled and a.done <= b.done for a, b in itertools.pairwise(found))
    # a random part of the run's own rows: medians differ by their sampling error alone
    ttft_s = run.requests["ttft_s"].dropna().to_numpy(float)
    error_s = 4 * 1.2533 * ttft_s.std() / np.sqrt(figures.sampled) + 1e-4
    assert figures.percentiles["ttft_s"]["p50"] == pytest.approx(np.median(ttft_s), abs=error_s)
    # a stamp is put on the monotonic clock by the samples known so far: microseconds from where the run puts it
    found_s = figures.percentiles["ttft_s"]
    assert ttft_s.min() - 1e-4 < found_s["p50"] <= found_s["p90"] < ttft_s.max() + 1e-4
    bias_s = (run.requests["ttft_seen_s"] - run.requests["ttft_s"]).dropna().to_numpy(float)
    # stalls come in groups, and what was finished in the last half second is never sampled: no standard error holds
    assert bias_s.min() - 1e-4 < figures.bias.mean_s < bias_s.max() + 1e-4
    assert figures.rate_per_s == pytest.approx(run.meta["rates"]["achieved_per_s"], rel=0.2)
    turns = run.cycles.sort_values(["worker", "poll_entered_ns"])
    assert ((figures.utilisation > 0) & (figures.utilisation < 1)).all() and set(turns["worker"]) == {0, 1}
