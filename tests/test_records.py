"""What is written is what the design says, comes back as it was, and is refused in a sentence when it is damaged."""

from __future__ import annotations

import json
import math
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.errors import UsageError
from llmprofile.metrics import describe
from llmprofile.records import (
    CYCLES,
    EVENTS,
    FORMAT,
    OUTCOMES,
    REQUESTS,
    Run,
    read_json,
    read_run,
    summary_cells,
    to_frame,
    verdict_text,
    write_json,
    write_table,
)

seeded = settings(derandomize=True, deadline=None)

# the columns of the run folder, as other programs read them

TEXT, WHOLE, FLOAT, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
IDENTITY = {"request_id": WHOLE, "worker": WHOLE, "stage": WHOLE}
STAMPS = dict.fromkeys(
    [
        *("due_ns", "begun_ns", "sent_ns", "sent_last_ns", "headers_ns", "eof_ns"),
        *("first_wire_ns", "first_wire_lo_ns", "first_seen_ns", "first_handled_ns"),
        *("last_wire_ns", "last_wire_lo_ns", "last_seen_ns", "last_handled_ns"),
    ],
    WHOLE,
)
FACTS = {
    "bounded": FLAG,
    "connect_s": FLOAT,
    "upload_s": FLOAT,
    "reused": FLAG,
    "resent": FLAG,
    "output_tokens": WHOLE,
    "token_source": TEXT,
    "prompt_tokens": WHOLE,
    "outcome": TEXT,
    "status": WHOLE,
    "error": TEXT,
}
METRICS = ("ttft", "first_content", "ttft_due", "e2e", "e2e_due", "tpot", "ntpot")
FIGURES = {f"{name}_s": FLOAT for name in (*METRICS, "lateness")}
OTHER_CLOCKS = {f"{name}_{clock}_s": FLOAT for clock in ("seen", "handled") for name in METRICS}
REASONING = {f"first_reasoning{clock}_s": FLOAT for clock in ("", "_seen", "_handled")} | {"reasoning_tokens": WHOLE}
SERVERS_OWN = {"server_ttft_s": FLOAT, "server_generation_s": FLOAT}
LATER = {"reordered": FLAG, "server": WHOLE, "conversation": WHOLE, "turn": WHOLE}


def columns(schema: pa.Schema) -> dict[str, Any]:
    return dict(zip(schema.names, schema.types, strict=True))


def test_the_tables_have_the_columns_that_other_programs_read() -> None:
    parts = IDENTITY | STAMPS | FACTS | FIGURES | OTHER_CLOCKS | REASONING | SERVERS_OWN | LATER
    assert columns(REQUESTS) == parts
    events = ["request_id", "read", "cycle", "wire_lo_ns", "wire_ns", "seen_ns", "handled_ns", "tokens", "bytes"]
    assert columns(EVENTS) == dict.fromkeys(events, WHOLE)
    cycles = ["worker", "poll_entered_ns", "poll_returned_ns", "reads", "handled", "sends"]
    assert columns(CYCLES) == dict.fromkeys(cycles, WHOLE)
    assert set(OUTCOMES) == {
        *("ok", "http_error", "stream_error", "truncated", "timeout", "connect_error"),
        *("cancelled", "unsent", "lost"),
    }


# frames

late_ns = st.integers(2**53 + 1, 2**62) | st.none()


@seeded
@given(stamps=st.lists(late_ns, max_size=10), flags=st.lists(st.booleans() | st.none(), max_size=10))
def test_integers_with_gaps_stay_integers_to_the_nanosecond(stamps: list[Any], flags: list[Any]) -> None:
    n = min(len(stamps), len(flags))
    table = pa.table({"at_ns": pa.array(stamps[:n], WHOLE), "reused": pa.array(flags[:n], FLAG)})
    frame = to_frame(table)
    assert [str(t) for t in frame.dtypes] == ["Int64", "boolean"]
    assert [None if pd.isna(v) else int(v) for v in frame["at_ns"]] == stamps[:n]
    assert [None if pd.isna(v) else bool(v) for v in frame["reused"]] == flags[:n]


def test_a_missing_float_is_nan_and_a_missing_text_is_missing() -> None:
    frame = to_frame(pa.table({"ttft_s": pa.array([0.5, None]), "error": pa.array(["reset", None])}))
    assert frame["ttft_s"].dtype == float
    assert frame["ttft_s"].isna().tolist() == frame["error"].isna().tolist() == [False, True]


# run.json

NO_VALUES = describe(pd.Series([], dtype=float).to_numpy(), pd.Series([], dtype=float).to_numpy(), 1.0)
META: dict[str, Any] = {
    "format": FORMAT,
    "run_id": "0a1b2c3d",
    "ended": "complete",
    "asked": {"client": "stamped"},
    "outcomes": {"ok": 98, "timeout": 2},
    "rates": {"asked_per_s": 400.0, "drawn_per_s": 398.2, "achieved_per_s": None, "tokens_per_s": 20_000.0},
    "summary": [
        {"metric": "ttft_s", "clock": "wire", **NO_VALUES, "n": 98, "mean": 0.05, "note": "p99 needs 100 values"}
        | {"mean_lo": 0.049, "mean_hi": 0.0512, "p50": 0.045},
        {"metric": "connect", "clock": "wire", **NO_VALUES},
    ],
    "verdict": {"word": "biased", "clock": "wire", "sentences": ["One thing.", "Another."]},
}


def test_run_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_json(tmp_path, META)
    assert read_json(tmp_path) == META
    write_json(tmp_path, META | {"ended": "stopped", "name": "µs · 日本"})
    assert read_json(tmp_path)["name"] == "µs · 日本"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, {"deep": [-math.inf]}])
def test_a_number_that_json_does_not_have_is_refused_and_the_old_file_stays(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path, META)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path, META | {"rates": value})
    assert read_json(tmp_path) == META
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_reader_never_sees_half_of_a_run_json(tmp_path: Path) -> None:
    write_json(tmp_path, META | {"padding": ["x"] * 5000, "version": 0})
    done = threading.Event()

    def write() -> None:
        for version in range(1, 60):
            write_json(tmp_path, META | {"padding": ["x"] * 5000, "version": version})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [0]
    while not done.is_set():
        meta = read_json(tmp_path)
        assert len(meta["padding"]) == 5000
        seen.append(meta["version"])
    writer.join()
    assert seen == sorted(seen)


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(UsageError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_run_folder_is_said_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert refused(read_run, folder) == f"{folder} is not a run folder: it holds no run.json"
    (tmp_path / "run.json").mkdir()
    assert "is not a run folder" in refused(read_run, str(tmp_path))


@pytest.mark.parametrize("text", [b"", b"{", b"{'a': 1}", b"\xff\xfe{}", json.dumps(META).encode()[:-30]])
def test_a_damaged_run_json_is_said_so(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "run.json").write_bytes(text)
    assert refused(read_json, tmp_path).startswith(f"{tmp_path / 'run.json'} is damaged: ")


@pytest.mark.parametrize("meta", [{"format": FORMAT + 1}, {"format": "1"}, {}, [], 7, None])
def test_another_format_is_said_so(tmp_path: Path, meta: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps(meta))
    assert f"is not of format {FORMAT}, the one that this version" in refused(read_json, tmp_path)


# tables


def rows(schema: pa.Schema, n: int, **columns: Any) -> pa.Table:
    """`n` rows of a table, null but for the columns given."""
    return pa.table(
        [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(n, f.type) for f in schema], schema
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path, META)
    parts = [rows(REQUESTS, 2, request_id=[0, 1], due_ns=[2**60 + 1, None]), rows(REQUESTS, 1, request_id=[2])]
    assert write_table(tmp_path / "requests.parquet", parts, REQUESTS) == 3
    assert write_table(tmp_path / "events.parquet", [rows(EVENTS, 1, request_id=[1], tokens=[4])], EVENTS) == 1
    return tmp_path


def test_a_run_reads_its_tables_and_its_events_when_they_are_asked_for(folder: Path) -> None:
    run = read_run(str(folder))
    assert (run.folder, run.client) == (folder, "stamped")
    assert run.requests["request_id"].tolist() == [0, 1, 2]
    assert run.requests["due_ns"].tolist() == [2**60 + 1, pd.NA, pd.NA]
    (folder / "events.parquet").rename(folder / "moved")
    assert len(run.events) == 0
    (folder / "moved").rename(folder / "events.parquet")
    assert len(run.events) == 0  # what was read once is kept
    assert read_run(folder).events["tokens"].tolist() == [4]
    assert list(run.cycles.columns) == CYCLES.names
    assert len(run.cycles) == 0


def test_an_older_run_has_missing_values_in_the_columns_that_it_lacks(folder: Path) -> None:
    kept = [name for name in REQUESTS.names if name not in LATER]
    pq.write_table(pq.read_table(folder / "requests.parquet", columns=kept), folder / "requests.parquet")
    requests = read_run(folder).requests
    assert list(requests.columns) == REQUESTS.names
    assert requests[list(LATER)].isna().all(axis=None)
    assert requests.dtypes["reordered"] == pd.BooleanDtype()


def test_a_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    assert write_table(tmp_path / "t.parquet", [], EVENTS) == 0
    assert pa.parquet.read_schema(tmp_path / "t.parquet").names == EVENTS.names


def test_a_run_that_was_not_merged_is_said_so(tmp_path: Path) -> None:
    write_json(tmp_path, META)
    assert "holds no requests.parquet: its captures were not merged" in refused(read_run, tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_damaged_table_is_said_so(folder: Path, share: float) -> None:
    for name in ("requests", "events"):
        path = folder / f"{name}.parquet"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        run = Run(folder, META, pd.DataFrame())
        said = refused(read_run, folder) if name == "requests" else refused(lambda run=run: run.events)
        assert said.startswith(f"{path} is damaged: ")


# how a run shows itself


def test_what_was_sent_again_is_said_and_first_content_only_where_it_is_not_the_first_token() -> None:
    first = META["summary"][0]
    meta = META | {"resent": 3, "summary": [first, first | {"metric": "first_content_s"}]}
    text = repr(Run(None, meta, pd.DataFrame()))
    assert "2 timeout (3 of them resent on a new connection)" in text
    assert "first content" not in text
    meta["summary"][1] |= {"mean": 0.07}
    assert "first content" in repr(Run(None, meta, pd.DataFrame()))
    assert "resent" not in repr(Run(None, META | {"resent": 0}, pd.DataFrame()))


def test_a_run_shows_what_it_is() -> None:
    text = repr(Run(None, META, pd.DataFrame()))
    for part in ("biased: One thing. Another.", "0a1b2c3d", "98 ok", "2 timeout", "400/s asked", "wire clock"):
        assert part in text
    assert "50.0 ms [49.0 ms, 51.2 ms]" in text
    assert "p99 needs 100 values" in text
    assert "connect" not in text  # what has no values takes no row
    assert "nan" not in text.lower()


def test_a_run_that_was_cut_short_shows_itself_too() -> None:
    meta = META | {"ended": None, "outcomes": {}, "summary": [], "verdict": None, "rates": {"asked_per_s": None}}
    for text in (repr(Run(None, meta, pd.DataFrame())), Run(None, meta, pd.DataFrame())._repr_html_()):
        assert "no verdict: the run has not been collected" in text
        assert "not collected" in text
    assert verdict_text({}) == verdict_text(None)


def test_scrapes_that_failed_are_said_in_both_and_whole_ones_are_not() -> None:
    scrape = {"read": 7, "failed": 2, "missed": 1, "reasons": {"status 503": 2}, "broken": None}
    run = Run(None, META | {"scrape": scrape}, pd.DataFrame())
    said = "server metrics: 3 of 10 scrapes failed: 2 x status 503, 1 x the page before took up the turn"
    assert said in repr(run) and said in run._repr_html_()
    scrape |= {"broken": "disk full"}
    assert "no server metrics: disk full" in repr(run)
    scrape |= {"broken": None, "missed": 0, "reasons": {}}
    assert "server metrics" not in repr(run)


def test_cells_have_a_dash_for_what_is_missing_and_notes_name_their_metrics() -> None:
    cells, notes = summary_cells(META["summary"])
    assert cells == [["TTFT", "98", "50.0 ms [49.0 ms, 51.2 ms]", "45.0 ms", "–", "–"]]
    assert notes == ["p99 needs 100 values"]
    two = [META["summary"][0], META["summary"][0] | {"metric": "e2e_s", "note": "too short"}]
    assert summary_cells(two)[1] == ["TTFT: p99 needs 100 values", "E2E: too short"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not attrs or {name for name, _ in attrs} <= {"style"}
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>&\"'"


def hostile(value: Any) -> Any:
    """The same with every text, keys of outcomes included, made hostile."""
    if isinstance(value, dict):
        return {k: hostile(v) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v) for v in value]
    return HOSTILE if isinstance(value, str) else value


def test_no_text_of_a_run_becomes_html() -> None:
    meta = hostile(META) | {"outcomes": {HOSTILE: 3}}
    page = Tags()
    page.feed(Run(None, meta, pd.DataFrame())._repr_html_())
    assert set(page.tags) <= {"div", "b", "br", "table", "thead", "tbody", "tr", "th", "td", "small"}
    # verdict's word and two sentences, outcome, run id, ending, the clock, a metric, and a note without its name
    assert page.text.count(HOSTILE) >= 9
