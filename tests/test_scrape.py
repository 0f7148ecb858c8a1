"""Metrics pages: the format, the engines' names, and scrapes held to the servers' own records.

The pages below are written by hand, in the shapes of those engines, and short; none was recorded.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmprofile as lp
from certificates import TlsFiles
from conftest import free_port
from llmprofile.errors import UsageError
from llmprofile.records import Run
from llmprofile.scrape import (
    FILE,
    METRICS,
    TIMEOUT_S,
    check_page,
    fetch,
    metrics_target,
    parse_metrics,
    scraping,
    server_metrics,
    server_samples,
)
from test_metrics import make_run, seeded

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/model-8b"} 3.0
vllm:num_requests_running{engine="1",model_name="org/model-8b"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/model-8b"} 2.0
vllm:num_requests_waiting{engine="1",model_name="org/model-8b"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/model-8b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="org/model-8b"} 0.75
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="org/model-8b"} 10.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="org/model-8b"} 12.0
vllm:request_queue_time_seconds_count{engine="0",model_name="org/model-8b"} 12.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="org/model-8b"} 1.5
"""
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 162.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 2826.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.28
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_sum{model_name="m"} 30.0
sglang:queue_time_seconds_bucket{le="0.0",model_name="m"} 5.0
sglang:queue_time_seconds_bucket{le="+Inf",model_name="m"} 60.0
sglang:queue_time_seconds_count{model_name="m"} 60.0
"""
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 5

# TYPE tgi_queue_size gauge
tgi_queue_size 7
# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_bucket{le="0.00001"} 0
tgi_request_queue_duration_bucket{le="+Inf"} 40
tgi_request_queue_duration_sum 8.25e0
tgi_request_queue_duration_count 40
"""
LLAMA_CPP = """\
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 46
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds nan
"""

# the format


def test_a_page_of_everything_that_the_format_has() -> None:
    page = (
        "# HELP a Escapes: \\\\ and \\n are the comment's business {not a sample}\n"
        "#no space\n"
        "\n"
        "  \t\n"
        "plain 1\n"
        "_x:y{} 2\r\n"
        'spaced { a = "b" , c="d", } \t3 \n'
        'escaped{path="C:\\\\DIR\\\\F.TXT",said="a \\"b\\"\\nc",odd="\\t"} 4\n'
        'braces{a="}{,",b="="} 5\n'
        'marks{a="μ\u2028é"} 6 1395066363000\n'
        "past 7 -3982045\n"
        "infinite +Inf\nless -Inf\nnothing NaN\nlow nan\nscience 1.7560473e+07\nshort .5\nlong 5.\nminus -0.25\n"
    )
    found = parse_metrics(page)
    assert [s.name for s in found] == [
        *("plain", "_x:y", "spaced", "escaped", "braces", "marks", "past"),
        *("infinite", "less", "nothing", "low", "science", "short", "long", "minus"),
    ]
    values = [1, 2, 3, 4, 5, 6, 7, math.inf, -math.inf, math.nan, math.nan, 17560473, 0.5, 5, -0.25]
    assert [s.value for s in found] == pytest.approx(values, nan_ok=True)
    labels = [json.loads(s.labels) for s in found]
    assert labels[:2] == [{}, {}]
    assert labels[2:6] == [
        {"a": "b", "c": "d"},
        {"path": "C:\\DIR\\F.TXT", "said": 'a "b"\nc', "odd": "\\t"},
        {"a": "}{,", "b": "="},
        {"a": "μ\u2028é"},
    ]


def test_a_histogram_is_its_samples() -> None:
    found = {(s.name, json.loads(s.labels).get("le")): s.value for s in parse_metrics(TGI)}
    assert found["tgi_request_queue_duration_bucket", "+Inf"] == found["tgi_request_queue_duration_count", None] == 40
    assert found["tgi_request_queue_duration_sum", None] == 8.25
    assert len(found) == 6


@pytest.mark.parametrize(
    "line",
    [
        *("a", "a b", "1a 1", "a{b=1} 1", 'a{b="c} 1', 'a{b="c"', 'a{b="c"} ', "a{,} 1", 'a{b="1" c="2"} 1'),
        *('a{b="1",b="2"} 1', 'a{1b="c"} 1', "a 1 2 3", "a 1 2.5", "a 1_000", "a 0x10", "a １", "a-b 1", "{} 1"),
        *("<!DOCTYPE html>", '{"detail":"Not Found"}', 'a{b="c"}1 x'),
    ],
)
def test_a_line_that_is_no_sample_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(UsageError, match="line 2 is no sample of a metrics page"):
        parse_metrics(f"fine 1\n{line}\n")


names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,20}", fullmatch=True)
label_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,10}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
samples = st.tuples(names, st.dictionaries(label_names, texts, max_size=4), st.floats())


def written(name: str, labels: dict[str, str], value: float) -> str:
    """A sample as a client library writes it."""
    escaped = {k: v.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for k, v in labels.items()}
    inside = ",".join(f'{k}="{v}"' for k, v in escaped.items())
    return f"{name}{{{inside}}} {value!r}" if labels else f"{name} {value!r}"


@given(page=st.lists(samples, max_size=5))
@seeded
def test_what_is_written_is_read(page: list[tuple[str, dict[str, str], float]]) -> None:
    found = parse_metrics("".join(f"{written(*sample)}\n" for sample in page))
    assert [(s.name, json.loads(s.labels)) for s in found] == [(name, labels) for name, labels, _ in page]
    assert [s.value for s in found] == pytest.approx([value for *_, value in page], nan_ok=True, rel=0, abs=0)


@given(text=st.text(max_size=60))
@seeded
def test_any_text_is_a_page_or_refused(text: str) -> None:
    try:
        parse_metrics(text)
    except UsageError as refused:
        assert "is no sample" in str(refused)


# names


def run_with(folder: Path, *pages: str) -> Run:
    """A run in whose folder these pages were kept, a second apart."""
    run = make_run()
    origin_ns = int(run.requests["sent_ns"].min())
    rows = [(origin_ns + k * 10**9, *sample) for k, page in enumerate(pages) for sample in parse_metrics(page)]
    columns = zip(*rows, strict=True)
    table = pa.table([pa.array(c, kind) for c, kind in zip(columns, METRICS.types, strict=True)], METRICS)
    pq.write_table(table, folder / FILE)
    return Run(folder, {**run.meta, "scrape": {"read": len(pages), "failed": 0}}, run.requests)


def first_values(folder: Path, page: str) -> dict[str, float]:
    frame = server_metrics(run_with(folder, page))
    return dict(zip(frame["metric"], frame["value"], strict=True))


@pytest.mark.parametrize(
    ("server", "page", "values"),
    [
        ("vLLM", VLLM, {"running": 7, "waiting": 2, "cache_use": 0.5, "queue_s": math.nan}),
        ("SGLang", SGLANG, {"running": 162, "waiting": 2826, "cache_use": 0.28, "queue_s": math.nan}),
        ("TGI", TGI, {"running": 5, "waiting": 7, "queue_s": math.nan}),
        ("llama.cpp", LLAMA_CPP, {"running": 4, "waiting": 46}),
    ],
)
def test_each_engines_names_are_ours(tmp_path: Path, server: str, page: str, values: dict[str, float]) -> None:
    frame = server_metrics(run_with(tmp_path, page))
    assert set(frame["server"]) == {server}
    assert list(frame.columns) == ["at_ns", "at_s", "server", "metric", "value"]
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == pytest.approx(values, nan_ok=True)


def test_an_older_name_is_known_too(tmp_path: Path) -> None:
    page = VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    assert first_values(tmp_path, page)["cache_use"] == 0.5


def test_queue_time_is_the_mean_between_two_scrapes(tmp_path: Path) -> None:
    # four waited 0.5 s; none; a restart; two, not at all; a restart with more than before
    counters = [(10, 1.0), (14, 3.0), (14, 3.0), (2, 0.5), (4, 0.5), (9, 0.2)]
    pages = [f"tgi_request_queue_duration_sum {s}\ntgi_request_queue_duration_count {n}\n" for n, s in counters]
    frame = server_metrics(run_with(tmp_path, *pages))
    assert frame["at_s"].tolist() == [0, 1, 2, 3, 4, 5]
    assert frame["value"].tolist() == pytest.approx([math.nan, 0.5, math.nan, math.nan, 0.0, math.nan], nan_ok=True)


def test_a_page_of_unknown_names_is_kept_and_refused_by_name(tmp_path: Path) -> None:
    run = run_with(tmp_path, "process_start_time_seconds 1.7e9\n")
    with pytest.raises(UsageError, match="none of the names of vLLM, SGLang, TGI, llama.cpp"):
        server_metrics(run)
    assert server_samples(run)["name"].tolist() == ["process_start_time_seconds"]


def test_a_run_without_scrapes_says_how_to_get_some(example_run: Run) -> None:
    for run in (example_run, make_run()):
        with pytest.raises(UsageError, match="no server metrics: name the page with scrape_metrics"):
            server_metrics(run)


# scrapes


class Page(ThreadingHTTPServer):
    """Answers every request by a function that gets the handler and how many came before."""

    daemon_threads = True

    def __init__(self, act: Callable[[BaseHTTPRequestHandler, int], None]) -> None:
        self.seen_s: list[float] = []
        self.heads: list[dict[str, str]] = []
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page.seen_s.append(time.monotonic())
                page.heads.append(dict(self.headers))
                act(self, len(page.seen_s) - 1)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/metrics"

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        super().__exit__(*args)


def say(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def scraped(folder: Path, url: str, for_s: float) -> tuple[dict[str, Any], pd.DataFrame]:
    """Scrape for a while; what became of it, and the samples."""
    meta: dict[str, Any] = {"asked": {"scrape_metrics": url}}
    with scraping(folder, meta):
        time.sleep(for_s)
    return meta["scrape"], server_samples(Run(folder, meta, pd.DataFrame()))


def test_a_page_is_read_once_a_second_and_kept(tmp_path: Path) -> None:
    with Page(lambda handler, k: say(handler, b'up %d\nlabelled{a="b"} 0.5\n' % k)) as page:
        begun_s = time.monotonic()
        facts, frame = scraped(tmp_path, page.url, 2.5)
        assert len(page.seen_s) == 3
        assert all(b - a > 0.9 for a, b in zip(page.seen_s, page.seen_s[1:], strict=False))
    assert {k: facts[k] for k in ("read", "failed", "missed", "reasons", "broken")} == {
        "read": 3,
        "failed": 0,
        "missed": 0,
        "reasons": {},
        "broken": None,
    }
    assert frame["name"].tolist() == ["up", "labelled"] * 3
    assert frame.loc[frame["name"] == "up", "value"].tolist() == [0, 1, 2]
    assert set(frame.loc[frame["name"] == "labelled", "labels"]) == {'{"a": "b"}'}
    at_s = frame["at_ns"].drop_duplicates().to_numpy(float) / 1e9
    # each stamp lies between asking and answer, as the server's own clock reading does
    assert np.abs(at_s - page.seen_s).max() <= facts["longest_s"]
    assert at_s[0] >= begun_s
    assert not list(tmp_path.glob("*.tmp"))


def no_answer(handler: BaseHTTPRequestHandler, _: int) -> None:
    handler.close_connection = True


def too_slow(handler: BaseHTTPRequestHandler, _: int) -> None:
    time.sleep(TIMEOUT_S + 0.5)


def drip(handler: BaseHTTPRequestHandler, _: int) -> None:
    """A byte every tenth of a second: no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(60):
        try:
            handler.wfile.write(b"a")
        except OSError:
            return
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda h, k: say(h, b"up 1\n", 503), "status 503"),
        (lambda h, k: say(h, b"", 302), "status 302"),
        (lambda h, k: say(h, b"<html>\n"), "line 1 is no sample of a metrics page: '<html>'"),
        (lambda h, k: say(h, b"up 1\n", length=100), "the page was cut short"),
        (lambda h, k: say(h, b'up{a="\xff"} 1\n'), "it is not UTF-8"),
        (no_answer, "Remote end closed connection without response"),
        (too_slow, "not there within 2 s"),
    ],
    ids=["503", "302", "html", "cut", "latin", "closed", "slow"],
)
def test_a_scrape_that_fails_is_counted_with_its_reason_and_not_tried_again(
    tmp_path: Path, act: Callable[[BaseHTTPRequestHandler, int], None], reason: str
) -> None:
    with Page(act) as page:
        facts, frame = scraped(tmp_path, page.url, 0.4)
        assert (facts["read"], facts["failed"], facts["reasons"]) == (0, 1, {reason: 1})
        assert len(page.seen_s) == 1
        with pytest.raises(UsageError, match="no metrics at http") as refused:
            check_page(metrics_target(page.url))
    assert reason in str(refused.value)
    assert frame.empty


@pytest.mark.parametrize("act", [too_slow, drip])
def test_a_page_has_so_long_in_all(act: Callable[[BaseHTTPRequestHandler, int], None]) -> None:
    with Page(act) as page, pytest.raises(TimeoutError):
        begun_s = time.monotonic()
        try:
            fetch(metrics_target(page.url), timeout_s=0.4)
        finally:
            assert 0.4 <= time.monotonic() - begun_s < TIMEOUT_S


def test_a_failure_leaves_the_next_turns_as_they_are(tmp_path: Path) -> None:
    def act(handler: BaseHTTPRequestHandler, k: int) -> None:
        if k == 0:
            time.sleep(1.3)
        say(handler, b"up 1\n", 500 if k == 1 else 200)

    with Page(act) as page:
        facts, frame = scraped(tmp_path, page.url, 3.5)
    # the first took up the second's turn
    assert (facts["read"], facts["failed"], facts["missed"]) == (2, 1, 1)
    assert len(page.seen_s) == 3
    assert facts["reasons"] == {"status 500": 1}
    assert 1.3 <= facts["longest_s"] < TIMEOUT_S
    assert len(frame) == 2


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    facts, frame = scraped(tmp_path, f"http://127.0.0.1:{free_port()}/metrics", 0.3)
    assert (facts["read"], facts["failed"]) == (0, 1)
    assert "refused" in next(iter(facts["reasons"]))
    assert frame.empty


def test_a_folder_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    meta: dict[str, Any] = {"asked": {"scrape_metrics": f"http://127.0.0.1:{free_port()}"}}
    with scraping(tmp_path / "gone", meta):
        pass
    assert "gone" in meta["scrape"]["broken"]
    with pytest.raises(UsageError, match="no server metrics: .*gone"):
        server_samples(Run(tmp_path / "gone", meta, pd.DataFrame()))


def test_nothing_is_scraped_unless_asked(tmp_path: Path) -> None:
    meta: dict[str, Any] = {"asked": {"url": "http://127.0.0.1:1/v1/completions"}}
    with scraping(tmp_path, meta):
        pass
    assert meta == {"asked": {"url": "http://127.0.0.1:1/v1/completions"}}
    assert not list(tmp_path.iterdir())


def test_no_key_is_sent_and_no_proxy_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with Page(lambda handler, k: say(handler, b"up 1\n")) as page:
        fetch(metrics_target(page.url))
        assert {name.lower() for name in page.heads[0]} == {"host", "accept", "accept-encoding"}


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000/metrics", "ftp://h/metrics", "http://", "http://me:secret@h/metrics"),
        *("http://h/metrics?key=secret", "http://h:port/metrics", "http://[::1/metrics"),
    ],
)
def test_a_url_that_will_not_do_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(UsageError, match="scrape_metrics must be the URL of a metrics page") as refused:
        metrics_target(url)
    assert "secret" not in str(refused.value)


def test_https_with_the_certificate_that_was_named(tls_files: TlsFiles) -> None:
    with lp.ReferenceServer(certfile=tls_files.certfile, keyfile=tls_files.keyfile) as server:
        url = server.base_url + "/metrics"
        check_page(metrics_target(url, str(tls_files.ca_file)))
        check_page(metrics_target(url, verify=False))
        with pytest.raises(UsageError, match="certificate verify failed"):
            check_page(metrics_target(url))


# the reference server's page, beside its record


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, pd.DataFrame]]:
    """A run on a server of four places at a load above what it sustains, scraped, and the server's record."""
    folder = tmp_path_factory.mktemp("busy")
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.02, max_batch=4, seed=5) as server:
        meta: dict[str, Any] = {"asked": {"scrape_metrics": server.base_url}}
        with scraping(folder, meta):
            run = lp.run_load(
                *(server.url, lp.Poisson(25), 75),
                output_tokens=10,
                seed=7,
                out=folder / "run",
                progress=False,
            )
        assert run.folder is not None
        (folder / FILE).rename(run.folder / FILE)
        run.meta["scrape"] = meta["scrape"]
        yield run, server.truth()


def test_running_and_waiting_are_what_the_servers_record_says(busy: tuple[Run, pd.DataFrame]) -> None:
    run, truth = busy
    said = server_metrics(run).pivot_table(index="at_ns", columns="metric", values="value")
    assert len(said) >= 3
    assert said["running"].max() == 4 and said["waiting"].max() > 4
    admitted_ns = truth["arrive_ns"] + np.rint(truth["queue_s"] * 1e9)
    slack_ns = (
        run.meta["scrape"]["longest_s"] * 1e9 + 50e6
    )  # a page's own time; a step, before whose start none is let in
    for at_ns, row in said.iterrows():
        early, late = at_ns - slack_ns, at_ns + slack_ns
        inside = [
            (truth["arrive_ns"] <= a).sum() - (truth["last_ns"] <= b).sum() for a, b in ((early, late), (late, early))
        ]
        waits = [(truth["arrive_ns"] <= a).sum() - (admitted_ns <= b).sum() for a, b in ((early, late), (late, early))]
        assert inside[0] <= row["running"] + row["waiting"] <= inside[1]
        assert waits[0] <= row["waiting"] <= waits[1]
    assert inside[0] < 75  # the bounds say something


def test_the_run_and_its_metrics_share_a_time_axis(busy: tuple[Run, pd.DataFrame]) -> None:
    run, _ = busy
    frame = server_metrics(run)
    span_s = float((run.requests["last_seen_ns"].max() - run.requests["sent_ns"].min()) / 1e9)
    during = frame[frame["at_s"].between(0, span_s)]
    assert during["value"].max() > 0
    assert (frame.loc[frame["at_s"] < -0.1, "value"] == 0).all()
    assert frame.attrs["read"] == frame["at_ns"].nunique()
    assert frame.attrs["failed"] == 0


def test_a_load_reads_the_servers_page_while_it_goes_on(tmp_path: Path) -> None:
    with lp.ReferenceServer(ttft_s=0.2, itl_s=0.02) as server:

        def load(page: str, name: str) -> Run:
            asked = {"output_tokens": 20, "seed": 1, "progress": False, "out": tmp_path / name}
            return lp.run_load(server.url, lp.Poisson(20), 60, scrape_metrics=page, **asked)

        run = load(server.base_url, "run")
        with pytest.raises(UsageError, match="metrics"):
            load(f"{server.base_url}/v1/models", "no")
    assert not (tmp_path / "no").exists()
    assert len(server_metrics(lp.load(tmp_path / "run"))) >= 2
    assert run.meta["scrape"]["failed"] == 0
