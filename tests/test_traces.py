"""Traces of every format, read again by other means, and what is said of a line that can't be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmprofile.errors import UsageError
from llmprofile.traces import AZURE_HEADER, Trace
from llmprofile.workload import draw_schedule

DATA = Path(__file__).parent.parent / "data"
ARRAYS = {"due_s": [0.0, 0.5, 2.0, 2.0], "prompt_tokens": [10, 20, 30, 40], "output_tokens": [1, 2, 3, 4]}


@pytest.mark.parametrize(("kind", "n"), [("conv", 19_366), ("code", 8819)])
def test_azures_traces_as_pandas_reads_them(kind: str, n: int) -> None:
    path = DATA / f"AzureLLMInferenceTrace_{kind}.csv.gz"
    trace = Trace(path)
    frame = pd.read_csv(path)
    assert len(trace) == len(frame) == n
    at = pd.to_datetime(frame["TIMESTAMP"])
    np.testing.assert_allclose(trace.due_s, (at - at.iloc[0]).dt.total_seconds(), atol=2e-6)
    assert (trace.prompt_tokens == frame["ContextTokens"]).all()
    assert (trace.output_tokens == frame["GeneratedTokens"]).all()
    assert trace.rate_per_s == pytest.approx((n - 1) / trace.due_s[-1])
    assert repr(trace) == f"Trace({str(path)!r}, speed=1.0)"


def azure(folder: Path, *lines: str, name: str = "trace.csv", header: str = AZURE_HEADER) -> Path:
    path = folder / name
    text = "\n".join([header, *lines]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def mooncake(folder: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


AZURE = ["2023-11-16 18:15:46.5,10,1", "2023-11-16 18:15:47.0000000,20,2"]
AZURE += ["2023-11-16 18:15:48.5,30,3", "2023-11-16 18:15:48.5000000,40,4"]
MOONCAKE = [
    json.dumps({"timestamp": 27_000 + 1000 * t, "input_length": p, "output_length": o, "hash_ids": [1, 2]})
    for t, p, o in zip(*ARRAYS.values(), strict=True)
]


def every_source(folder: Path) -> list[Any]:
    frame = pd.DataFrame(ARRAYS)
    frame.assign(other="x").to_parquet(folder / "trace.parquet")
    return [
        azure(folder, *AZURE),
        str(azure(folder, *AZURE, "", name="trace.csv.gz")),
        azure(folder, *(line.replace(",", "+00:00,", 1) for line in AZURE), name="zoned.csv"),
        azure(folder, *(f"{line}\r" for line in AZURE), header="\ufeff" + AZURE_HEADER + "\r", name="dos.csv"),
        mooncake(folder, *MOONCAKE),
        mooncake(folder, *MOONCAKE, "  ", name="trace.jsonl.gz"),
        folder / "trace.parquet",
        ARRAYS,
        frame,
    ]


def test_the_same_trace_in_every_format(tmp_path: Path) -> None:
    for source in every_source(tmp_path):
        trace = Trace(source)
        np.testing.assert_allclose(trace.due_s, ARRAYS["due_s"], atol=1e-9)
        assert trace.prompt_tokens.tolist() == ARRAYS["prompt_tokens"], source
        assert trace.output_tokens.tolist() == ARRAYS["output_tokens"], source
        assert trace.prompt_tokens.dtype == trace.output_tokens.dtype == np.int64


def test_requests_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    shuffled = [MOONCAKE[k] for k in (2, 0, 3, 1)]
    trace = Trace(mooncake(tmp_path, *shuffled))
    assert trace.due_s.tolist() == ARRAYS["due_s"]
    assert trace.prompt_tokens.tolist() == [10, 20, 30, 40]
    # equal times keep the order of the file
    tied = Trace({"due_s": np.arange(300) // 100 % 2, "prompt_tokens": np.arange(300) + 1, "output_tokens": [1] * 300})
    assert tied.prompt_tokens.tolist() == [*range(1, 101), *range(201, 301), *range(101, 201)]


def test_times_of_several_zones_are_times(tmp_path: Path) -> None:
    trace = Trace(azure(tmp_path, "2024-05-10 01:00:00+00:00,1,1", "2024-05-10 02:00:03.5+01:00,2,2"))
    assert trace.due_s.tolist() == [0.0, 3.5]


def test_speed_divides_every_gap() -> None:
    trace = Trace(ARRAYS, speed=4)
    assert trace.due_s.tolist() == [0.0, 0.125, 0.5, 0.5]
    assert trace.rate_per_s == 6
    assert repr(trace) == "Trace(<4 requests>, speed=4)"


def test_arrays_keep_their_start_and_a_trace_all_at_once_has_a_rate() -> None:
    at_once = {"due_s": [3.0] * 200, "prompt_tokens": [1] * 200, "output_tokens": [1] * 200}
    trace = Trace(at_once)
    assert trace.due_s[0] == 3
    assert trace.rate_per_s == 200


def test_a_schedule_of_a_trace_is_the_trace() -> None:
    trace = Trace(DATA / "AzureLLMInferenceTrace_conv.csv.gz", speed=10)
    names = ("due_s", "prompt_tokens", "output_tokens")
    for asked, kept in (
        ({}, slice(None)),
        ({"n": 500}, slice(500)),
        ({"n": 10**6}, slice(None)),
        ({"duration_s": 30.0}, trace.due_s < 30.0),
    ):
        for processes in (1, 4):
            schedule = draw_schedule(trace, processes=processes, seed=6, **asked)  # type: ignore[arg-type]
            for name in names:
                np.testing.assert_array_equal(getattr(schedule, name), getattr(trace, name)[kept])
            assert set(schedule.worker.tolist()) == set(range(processes))
            assert not schedule.stage.any()


def test_a_trace_brings_its_own_lengths() -> None:
    for name in ("prompt_tokens", "output_tokens"):
        with pytest.raises(UsageError, match=f"a trace brings its own {name}"):
            draw_schedule(Trace(ARRAYS), **{name: 5})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not both"):
        draw_schedule(Trace(ARRAYS), n=2, duration_s=1.0)
    with pytest.raises(UsageError, match="no request falls due within 1.0 s"):
        draw_schedule(Trace({**ARRAYS, "due_s": [5.0, 6.0, 7.0, 8.0]}), duration_s=1.0)


# what can't be used

BAD_AZURE = {
    "2023-11-16 18:15:46,10": "there must be 3 fields; not 2",
    "2023-11-16 18:15:46,10,1,7": "there must be 3 fields; not 4",
    "yesterday,10,1": "yesterday",
    "2023-11-16 18:15:46,,1": "ContextTokens must be a whole number of at least 1; not ''",
    "2023-11-16 18:15:46,10,1.5": "GeneratedTokens must be a whole number of at least 1; not '1.5'",
    "2023-11-16 18:15:46,10,0": "GeneratedTokens must be a whole number of at least 1; not 0",
    "2023-11-16 18:15:46,-3,1": "ContextTokens must be a whole number of at least 1; not '-3'",
    "2023-11-16 18:15:46,99999999999,1": "ContextTokens must be at most 10,000,000 tokens",
}
BAD_MOONCAKE = {
    "{": "line 3: Expecting",
    "[1, 2]": "it must be a JSON object",
    '{"input_length": 5, "output_length": 5}': "timestamp must be a number .milliseconds.; not None",
    '{"timestamp": "0", "input_length": 5, "output_length": 5}': "timestamp must be a number .milliseconds.; not '0'",
    '{"timestamp": NaN, "input_length": 5, "output_length": 5}': "timestamp must be a number .milliseconds.; not nan",
    '{"timestamp": 1, "output_length": 5}': "input_length must be a whole number of at least 1; not None",
    '{"timestamp": 1, "input_length": 5, "output_length": 2.5}': "output_length must be a whole number",
    "[" * 100_000: "line 3: ",
}


@pytest.mark.parametrize("line", BAD_AZURE)
def test_a_bad_line_of_azures_is_named(tmp_path: Path, line: str) -> None:
    path = azure(tmp_path, AZURE[0], line, AZURE[1])
    refused(path, f"trace.csv, line 3: .*{BAD_AZURE[line]}")


@pytest.mark.parametrize("line", BAD_MOONCAKE, ids=lambda line: line[:60])
def test_a_bad_line_of_mooncakes_is_named(tmp_path: Path, line: str) -> None:
    path = mooncake(tmp_path, MOONCAKE[0], "", line, MOONCAKE[1])
    refused(path, BAD_MOONCAKE[line])
    refused(path, "trace.jsonl, line 3: ")


def refused(source: Any, match: str, **options: Any) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        Trace(source, **options)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    refused(tmp_path / "none.csv", "there is no trace .*none.csv")
    refused(tmp_path / "none.parquet", "there is no trace .*none.parquet")
    refused(tmp_path / "trace.txt", "a trace must be one of .csv .*; not trace.txt")
    refused(azure(tmp_path, *AZURE, header="time,a,b"), "line 1: the header must be TIMESTAMP,.*; not 'time,a,b'")
    refused(azure(tmp_path), "must hold one due_s, .* and a request")
    refused(mooncake(tmp_path), "must hold one due_s")
    whole = gzip.compress("\n".join([AZURE_HEADER, *AZURE]).encode())
    for name, data in {"cut.csv.gz": whole[:-12], "plain.csv.gz": b"TIMESTAMP", "latin.csv": b"\xff\xfe\xfa"}.items():
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, f"{name}.* can't be read: ")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    refused(tmp_path / "damaged.parquet", "damaged.parquet can't be read: ")
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path / "folder.csv", "can't be read")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"due_s": [0.0, -1.0, 2.0, 3.0]}, "the trace, row 1 .counted from 0.: due_s must be .* at least 0 .* not -1"),
        ({"due_s": [0.0, 1.0, np.nan, 3.0]}, "row 2 .*not nan"),
        ({"due_s": [0.0, 1.0, 2.0, np.inf]}, "row 3 .*not inf"),
        ({"output_tokens": [1, 2, 0, 4]}, "row 2 .*output_tokens must be a whole number from 1"),
        ({"output_tokens": [1, 2.5, 3, 4]}, "row 1 .*output_tokens must be a whole number .*not 2.5"),
        ({"prompt_tokens": [1, 2, 3, 1e9]}, "row 3 .*prompt_tokens must be a whole number"),
        ({"prompt_tokens": [1, 2, 3]}, "must hold one due_s"),
        ({"prompt_tokens": ["a", "b", "c", "d"]}, "prompt_tokens of the trace must be numbers"),
        ({"due_s": [], "prompt_tokens": [], "output_tokens": []}, "and a request"),
        ({"due_s": 1.0, "prompt_tokens": 1, "output_tokens": 1}, "must hold one due_s"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    refused(ARRAYS | changes, match)


def test_a_missing_column_and_a_bad_speed(tmp_path: Path) -> None:
    for missing in ARRAYS:
        rest = {name: values for name, values in ARRAYS.items() if name != missing}
        refused(rest, f"{missing} is missing")
        pd.DataFrame(rest).to_parquet(tmp_path / "trace.parquet")
        refused(tmp_path / "trace.parquet", f"trace.parquet must have .*; {missing} is missing")
    pd.DataFrame(ARRAYS).assign(output_tokens=[1, 2, None, 4]).to_parquet(tmp_path / "null.parquet")
    refused(tmp_path / "null.parquet", "row 2 .*output_tokens must be a whole number .* not nan")
    refused(ARRAYS, "speed must be a number above 0", speed=0)
    refused(7, "must be a path, a mapping of arrays or a DataFrame; not 7")


@settings(
    derandomize=True, deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=60), form=st.sampled_from(["csv", "jsonl"]))
def test_any_text_is_a_trace_or_a_sentence(tmp_path: Path, text: str, form: str) -> None:
    header, line = (AZURE_HEADER + "\n", AZURE[0]) if form == "csv" else ("", MOONCAKE[0])
    path = tmp_path / f"fuzz.{form}"
    path.write_bytes(f"{header}{line}\n{text}\n{line}\n".encode("utf-8", "surrogatepass"))
    try:
        assert len(Trace(path)) >= 2
    except UsageError as error:
        assert "fuzz" in str(error)
