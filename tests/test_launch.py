"""Whole runs against the reference server's own record, and what is refused before anything is sent."""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import llmprofile as lp
from certificates import TlsFiles
from conftest import free_port
from joined import outside_bracket, tokens_beside_truth
from llmprofile.records import CYCLES, EVENTS, REQUESTS, Run
from llmprofile.stages import Ramp, Stages
from llmprofile.traces import Trace
from llmprofile.workload import draw_schedule

TTFT_S, ITL_S = 0.03, 0.005
CLIENTS = ["stamped", "conventional"]


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=TTFT_S, itl_s=ITL_S, cv=0.3, seed=3) as server:
        yield server


def load(server: lp.ReferenceServer, folder: Path, **options: Any) -> Run:
    """A small run; options override it."""
    asked = {"n": 60, "output_tokens": 8, "prompt_tokens": 20, "seed": 5, "out": folder / "run", "progress": False}
    return lp.run_load(server.url, lp.Poisson(60), **(asked | options))


@pytest.mark.parametrize("client", CLIENTS)
def test_every_token_beside_the_servers_record(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    run = load(server, tmp_path, client=client)
    assert run.meta["outcomes"] == {"ok": 60}
    both = tokens_beside_truth(run, server)
    assert len(both) == 60 * 8
    assert outside_bracket(both).empty
    assert (both["wire_ns"] >= both["left_ns"]).all()
    assert (both["seen_ns"] >= both["wire_ns"]).all()
    # the kernel stamps inside the server's send: what lies between its two clock readings is its own lateness
    early = both["wire_ns"] <= both["sent_ns"] + 1_000_000
    assert early.mean() > 0.5
    assert run.events["handled_ns"].notna().all() == (client == "conventional")


def test_tables_are_as_documented(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = load(server, tmp_path, processes=2)
    assert run.folder is not None
    assert sorted(p.name for p in run.folder.iterdir()) == [
        *("cycles.parquet", "events.parquet", "requests.parquet", "run.json"),
    ]
    for frame, schema in ((run.requests, REQUESTS), (run.events, EVENTS), (run.cycles, CYCLES)):
        assert list(frame.columns) == schema.names
    again = lp.load(run.folder)
    pd.testing.assert_frame_equal(again.requests, run.requests)
    assert again.meta == json.loads((run.folder / "run.json").read_text()) == run.meta
    assert run.requests["request_id"].tolist() == list(range(60))
    assert set(run.requests["worker"]) == {0, 1}
    if sys.platform == "linux":
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert {w["most_open_files"] for w in run.meta["workers"]} == {most}
    # what was sent, read and handled in each turn of the loops is the whole of it
    assert run.cycles["sends"].sum() == 60
    assert run.cycles["reads"].sum() == run.meta["reads"]
    text = (run.folder / "run.json").read_text()
    assert "prompt" in text and " the " not in json.loads(text)["asked"]["call"]


def test_stamps_come_in_order(server: lp.ReferenceServer, tmp_path: Path) -> None:
    rows = load(server, tmp_path, client="conventional").requests
    order = ["due_ns", "begun_ns", "sent_ns", "sent_last_ns", "headers_ns", "first_wire_ns", "last_wire_ns", "eof_ns"]
    for earlier, later in itertools.pairwise(order):
        assert (rows[earlier] <= rows[later]).all(), (earlier, later)
    for token in ("first", "last"):
        clocks = rows[[f"{token}_{c}_ns" for c in ("wire_lo", "wire", "seen", "handled")]].to_numpy(np.int64)
        assert (np.diff(clocks, axis=1) >= 0).all()


def test_the_parts_of_the_bias_sum_to_it(server: lp.ReferenceServer, tmp_path: Path) -> None:
    rows = load(server, tmp_path, client="conventional").requests
    sending = (rows["sent_ns"] - rows["begun_ns"]).astype(float) / 1e9
    waiting = (rows["first_seen_ns"] - rows["first_wire_ns"]).astype(float) / 1e9
    handling = (rows["first_handled_ns"] - rows["first_seen_ns"]).astype(float) / 1e9
    bias_s = rows["ttft_handled_s"] - rows["ttft_s"]
    np.testing.assert_allclose(bias_s, sending + waiting + handling, atol=1e-9)


def test_same_schedule_for_any_number_of_processes(server: lp.ReferenceServer, tmp_path: Path) -> None:
    runs = [load(server, tmp_path, processes=k, out=tmp_path / str(k), salt=7, n=40) for k in (1, 2, 5)]
    due = [r.requests["due_ns"] - r.requests["due_ns"].iloc[0] for r in runs]
    for other, times in zip(runs[1:], due[1:], strict=True):
        assert (times == due[0]).all()
        columns = ["request_id", "output_tokens", "prompt_tokens"]
        pd.testing.assert_frame_equal(other.requests[columns], runs[0].requests[columns])
    truth = server.truth()
    asked = [truth[truth["id"].str.startswith(r.meta["run_id"])].set_index("request_id") for r in runs]
    assert asked[0]["prompt_words"].sort_index().equals(asked[2]["prompt_words"].sort_index())


@pytest.mark.parametrize("processes", [1, 4])
def test_poisson_arrivals_are_poisson_at_the_send(server: lp.ReferenceServer, tmp_path: Path, processes: int) -> None:
    """Dispersion of the counts at three windows, and a KS test of the gaps, on the times that were really sent."""
    run = lp.run_load(
        *(server.url, lp.Poisson(400), 2400),
        output_tokens=1,
        prompt_tokens=5,
        processes=processes,
        seed=8,
        out=tmp_path / "run",
        progress=False,
    )
    sent_s = run.requests.set_index("worker")["sent_ns"].astype(float) / 1e9
    pooled = np.sort(sent_s.to_numpy())
    parts = [np.sort(sent_s[[w]].to_numpy()) for w in range(processes)]
    # a late send is no fault of the law: gaps shorter than the lateness can't be told from each other
    late_s = run.requests["lateness_s"].quantile(0.9)
    for times in (pooled, *parts):
        gaps_s = np.diff(times)
        distance = stats.kstest(gaps_s, stats.expon(scale=gaps_s.mean()).cdf).statistic
        assert distance < stats.kstwo.ppf(0.999, len(gaps_s)) + late_s / gaps_s.mean()
        for window in (10, 100, 1000):
            low, high, index = dispersion(times, window)
            assert low <= index <= high, (window, low, index, high)


def dispersion(times_s: np.ndarray, window: int) -> tuple[float, float, float]:
    """Index of dispersion of the counts in windows of so many mean gaps, after its 99.9 % band if Poisson."""
    edges = np.arange(times_s[0], times_s[-1], window * np.diff(times_s).mean())
    counts = np.histogram(times_s, edges)[0]
    if len(counts) < 2:
        return -np.inf, np.inf, 0.0
    freedom = len(counts) - 1
    low, high = stats.chi2(freedom).ppf([0.0005, 0.9995]) / freedom
    return low, high, counts.var(ddof=1) / counts.mean()


@pytest.mark.parametrize("processes", [1, 4])
def test_gamma_arrivals_keep_their_law_at_the_send(server: lp.ReferenceServer, tmp_path: Path, processes: int) -> None:
    options = {"output_tokens": 1, "prompt_tokens": 5, "processes": processes, "seed": 8, "progress": False}
    run = lp.run_load(server.url, lp.Gamma(400, 0.25), 2400, out=tmp_path / "run", **options)
    gaps_s, late_s = np.diff(np.sort(run.requests["sent_ns"].astype(float))) / 1e9, lateness_s(run)
    # a gap within the lateness of another can't be told from it: so far may the law be shifted either way
    law = stats.gamma(0.25, scale=1 / 400 / 0.25).cdf
    free = stats.kstwo.ppf(0.999, len(gaps_s)) + LATER
    ranks = np.arange(1, len(gaps_s) + 1) / len(gaps_s)
    at_s = np.sort(gaps_s)
    assert (ranks <= law(at_s + 2 * late_s) + free).all()
    assert (ranks >= law(at_s - 2 * late_s) - free).all()
    moved = 2 * run.requests["lateness_s"].std() / gaps_s.mean()
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(2.0, abs=2 * 4 * np.sqrt((0.5 + 0.5 / 0.25) / 2400) + moved)


LATER = 0.02
"""Of two requests, and so of a gap, one may be later than the lateness that all but a hundredth keep."""


def lateness_s(run: Run) -> float:
    """The lateness that all but a hundredth of the requests keep."""
    return float(run.requests["lateness_s"].quantile(0.99))


def test_connections_are_warm_for_the_busiest_second(server: lp.ReferenceServer, tmp_path: Path) -> None:
    due_s = np.concatenate([[0.0, 1.0], np.full(60, 1.5)])  # 40 a second on average
    burst = Trace({"due_s": due_s, "prompt_tokens": np.full(62, 5), "output_tokens": np.full(62, 2)})
    rows = lp.run_load(server.url, burst, out=tmp_path / "run", progress=False).requests
    assert rows["connect_s"].isna().all()


@pytest.mark.parametrize("processes", [1, 4])
def test_a_trace_keeps_its_law_at_the_send(server: lp.ReferenceServer, tmp_path: Path, processes: int) -> None:
    """Four minutes of Azure's trace in three seconds: gaps and bursts as recorded, lengths too."""
    path = Path(__file__).parent.parent / "data" / "AzureLLMInferenceTrace_code.csv.gz"
    trace = short(Trace(path, speed=80), 240 / 80)
    run = lp.run_load(server.url, trace, processes=processes, seed=8, out=tmp_path / "run", progress=False)
    rows = run.requests.sort_values("request_id")
    assert run.meta["outcomes"] == {"ok": len(trace)}
    assert (rows["output_tokens"].to_numpy() == trace.output_tokens).all()
    truth = server.truth()
    truth = truth[truth["id"].str.startswith(run.meta["run_id"])].set_index("request_id")["prompt_words"].sort_index()
    # the first word of a prompt stands for four tokens
    assert (truth.to_numpy() == np.maximum(trace.prompt_tokens - 4, 0) + 1).all()
    sent_s = np.sort(rows["sent_ns"].to_numpy(float)) / 1e9
    gaps_s, asked_s, late_s = np.diff(sent_s), np.diff(trace.due_s), lateness_s(run)
    assert law_distance(gaps_s, asked_s, late_s) < LATER + 0.005
    # a Poisson stream of that rate would be seen
    poisson_s = np.random.default_rng(1).exponential(asked_s.mean(), len(asked_s))
    assert law_distance(poisson_s, asked_s, 0.001) > 0.1
    for window in (10, 30):
        (*_, sent), (*_, asked) = (dispersion(times_s, window) for times_s in (sent_s, trace.due_s))
        assert asked > 1.5  # a trace of real users is no Poisson stream
        assert sent == pytest.approx(asked, rel=0.2 + late_s / (window / trace.rate_per_s))


def law_distance(gaps_s: np.ndarray, asked_s: np.ndarray, late_s: float) -> float:
    """How far two laws of gaps are apart (Kolmogorov and Smirnov) beyond what lateness may shift them."""
    sides = ((-late_s, "greater"), (late_s, "less"))
    return max(
        stats.ks_2samp(gaps_s, asked_s + shift_s, alternative=side, method="asymp").statistic for shift_s, side in sides
    )


def short(trace: Trace, duration_s: float) -> Trace:
    """Its beginning, its lengths cut to what is quick."""
    keep = trace.due_s < duration_s
    lengths = {
        "prompt_tokens": np.minimum(trace.prompt_tokens, 200),
        "output_tokens": np.minimum(trace.output_tokens, 4),
    }
    return Trace({"due_s": trace.due_s[keep]} | {name: tokens[keep] for name, tokens in lengths.items()})


@pytest.mark.parametrize("processes", [1, 4])
def test_stages_and_ramps_keep_their_law_at_the_send(
    server: lp.ReferenceServer, tmp_path: Path, processes: int
) -> None:
    stages = Stages([(lp.Poisson(300), 1.5), (lp.Constant(100), 0.5), (Ramp(0, 600, 1.5), 1.5)])
    options = {"output_tokens": 1, "prompt_tokens": 5, "processes": processes, "seed": 8, "progress": False}
    run = lp.run_load(server.url, stages, out=tmp_path / "run", **options)
    rows = run.requests
    start_s, late_s = rows["due_ns"].min() / 1e9, lateness_s(run)
    due_s = (rows["due_ns"] - rows["due_ns"].min()).to_numpy(float) / 1e9
    first_s = float(draw_schedule(stages, seed=8).due_s[0])
    assert (rows["stage"].to_numpy() == stages.stage_of(due_s + first_s + 1e-9)).all()
    assert rows["stage"].value_counts()[1] == 50
    sent_s = rows.groupby("stage")["sent_ns"].apply(lambda ns: np.sort(ns.to_numpy(float)) / 1e9 - start_s + first_s)
    gaps_s = np.diff(sent_s[0])
    distance = stats.kstest(gaps_s, stats.expon(scale=1 / 300).cdf).statistic
    assert distance < stats.kstwo.ppf(0.999, len(gaps_s)) + LATER + 2 * late_s * 300
    np.testing.assert_allclose(np.diff(sent_s[1]).mean(), 0.01, atol=1e-6 + rows["lateness_s"].max() / 49)
    # a ramp from 0: a request's time, squared, is uniform
    on_ramp = np.clip((sent_s[2] - 2.0) / 1.5, 0, 1)
    distance = stats.kstest(on_ramp**2, "uniform").statistic
    assert distance < stats.kstwo.ppf(0.999, len(on_ramp)) + LATER + 2 * late_s / 1.5
    again = lp.load(tmp_path / "run").requests
    assert again["stage"].tolist() == rows["stage"].tolist()
    assert "Ramp(from_per_s=0, to_per_s=600" in run.meta["asked"]["arrivals"]


@pytest.mark.parametrize("client", CLIENTS)
def test_closed_loop_keeps_its_concurrency(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    options = {"seed": 1, "out": tmp_path / "run", "progress": False, "client": client}
    run = lp.run_load(server.url, lp.ClosedLoop(6), n=40, output_tokens=4, processes=2, **options)
    assert run.meta["outcomes"] == {"ok": 40}
    rows = run.requests
    for worker in (0, 1):
        own = rows[rows["worker"] == worker]
        starts, ends = np.sort(own["begun_ns"].to_numpy(np.int64)), np.sort(own["eof_ns"].to_numpy(np.int64))
        in_flight = [np.sum(starts <= t) - np.sum(ends < t) for t in starts]
        assert max(in_flight) == 3
    assert (rows["due_ns"] <= rows["begun_ns"]).all()


def test_closed_loop_for_a_time(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = lp.run_load(
        server.url, lp.ClosedLoop(4), duration_s=0.6, output_tokens=4, out=tmp_path / "run", progress=False
    )
    assert set(run.meta["outcomes"]) == {"ok"}
    span_s = (run.requests["begun_ns"].max() - run.requests["due_ns"].min()) / 1e9
    assert span_s < 0.6
    # a request takes at least its schedule: no more than so many fit
    assert 4 <= len(run.requests) <= 4 * (0.6 / 0.01 + 1)


def test_a_stall_with_a_known_answer(tmp_path: Path) -> None:
    """Arrivals k/10 s for k = 0…7, service 0.5 s, one at a time: by Lindley mean wait 1.40 s, last 2.8 s."""
    eight = Trace({"due_s": np.arange(8) / 10, "prompt_tokens": np.full(8, 5), "output_tokens": np.ones(8)})
    with lp.ReferenceServer(ttft_s=0.5, itl_s=0.0) as slow:
        run = lp.run_load(slow.url, eight, max_in_flight=1, out=tmp_path / "run", progress=False)
        truth = slow.truth()
    rows, late_s = run.requests, truth["late_ns"].sum() / 1e9
    tolerance_s = 0.05 + late_s
    assert rows["lateness_s"].mean() == pytest.approx(1.40, abs=tolerance_s)
    assert rows["ttft_due_s"].mean() == pytest.approx(1.90, abs=tolerance_s)
    assert rows["ttft_due_s"].max() == pytest.approx(3.30, abs=tolerance_s)
    assert rows["ttft_s"].mean() == pytest.approx(0.50, abs=tolerance_s)


def test_no_hidden_limit_on_connections(tmp_path: Path) -> None:
    """200 requests at once, 1 s each: the longest takes 1 s, not 2."""
    with lp.ReferenceServer(ttft_s=1.0, itl_s=0.0) as slow:
        for client in CLIENTS:
            run = lp.run_load(
                slow.url,
                lp.Constant(100_000),
                n=200,
                output_tokens=1,
                client=client,
                out=tmp_path / client,
                progress=False,
            )
            assert run.meta["outcomes"] == {"ok": 200}
            longest_s = run.requests[f"ttft_{'handled_' if client == 'conventional' else ''}s"].max()
            assert 1.0 <= longest_s < 1.9


@pytest.mark.parametrize("client", CLIENTS)
def test_not_a_stream(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    run = load(server, tmp_path, stream=False, client=client)
    rows = run.requests
    assert run.meta["outcomes"] == {"ok": 60}
    assert rows["ttft_s"].isna().all() and rows["tpot_s"].isna().all() and rows["first_wire_ns"].isna().all()
    assert (rows["output_tokens"] == 8).all() and (rows["token_source"] == "usage").all()
    np.testing.assert_allclose(rows["ntpot_s"], rows["e2e_s"] / 8)
    assert run.events.empty
    truth = server.truth().merge(rows, on="request_id", suffixes=("_server", ""))
    truth = truth[truth["id"].str.startswith(run.meta["run_id"])]
    assert (truth["last_wire_ns"] >= truth["last_ns_server" if "last_ns_server" in truth else "last_ns"]).all()
    seen = "handled" if client == "conventional" else "seen"
    assert (rows[f"last_{seen}_ns"] >= rows["last_wire_ns"]).all()
    table = lp.summary(run)
    assert table.loc["ttft_s", "n"] == 0 and table.loc["e2e_s", "n"] == 60


def test_stamps_switched_off(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = load(server, tmp_path, stamps=False)
    rows = run.requests
    assert rows["first_wire_ns"].isna().all() and rows["ttft_s"].isna().all()
    assert rows["ttft_seen_s"].notna().all() and rows["lateness_s"].notna().all()
    table = lp.summary(run)
    assert table.index.name == "seen clock"
    assert table.loc["ttft_s", "n"] == 60
    assert run.meta["unstamped_reads"] == run.meta["reads"] > 0
    assert lp.verdict(run).word == "biased"
    assert "unknown" in str(lp.verdict(run))
    assert lp.verdict(run, "wire").word == "invalid"


def test_chat_and_no_usage(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = lp.run_load(
        server.chat_url, lp.Poisson(100), n=20, output_tokens=5, usage=False, out=tmp_path / "run", progress=False
    )
    assert (run.requests["output_tokens"] == 5).all()
    assert (run.requests["token_source"] == "events").all()
    assert run.requests["prompt_tokens"].isna().all()


@pytest.mark.parametrize("client", CLIENTS)
def test_fresh_connections(server: lp.ReferenceServer, tmp_path: Path, client: str) -> None:
    rows = load(server, tmp_path, fresh=True, client=client, n=20).requests
    assert not rows["reused"].any()
    assert (rows["connect_s"] > 0).all()
    warm = load(server, tmp_path, client="stamped", n=20, out=tmp_path / "warm", warm_connections=20).requests
    assert warm["connect_s"].isna().all()


@pytest.mark.parametrize("client", CLIENTS)
def test_tls(tls_files: TlsFiles, tmp_path: Path, client: str) -> None:
    with lp.ReferenceServer(ttft_s=0.02, itl_s=0.003, certfile=tls_files.certfile, keyfile=tls_files.keyfile) as server:
        run = load(server, tmp_path, client=client, n=30, ca_file=str(tls_files.ca_file))
        both = tokens_beside_truth(run, server)
        assert run.meta["outcomes"] == {"ok": 30}
        assert outside_bracket(both).empty
        with pytest.raises(lp.UsageError, match="certificate"):
            load(server, tmp_path, out=tmp_path / "refused")
        careless = load(server, tmp_path, out=tmp_path / "careless", verify=False, n=5, client=client)
        assert careless.meta["outcomes"] == {"ok": 5}
    assert not (tmp_path / "refused").exists()


def test_texts_are_kept_only_when_asked(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = load(server, tmp_path, keep_text=True, n=10)
    assert run.folder is not None
    texts = pd.read_parquet(run.folder / "texts.parquet")
    assert len(texts) == 10
    assert texts["prompt"].str.split().str[0].is_unique
    assert texts["answer"].str.len().gt(0).all()


# --- a load that is going on ---


def test_a_load_is_watched_and_stopped(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load_ = lp.start_load(
        server.url, lp.Poisson(50), duration_s=60, output_tokens=4, out=tmp_path / "run", progress=False
    )
    waited = threading.Event()
    while load_.progress.done < 20:
        assert not waited.wait(0.02)
    assert load_.progress.state == "running"
    with pytest.raises(lp.UsageError, match="still going on"):
        lp.load(tmp_path / "run")
    assert (tmp_path / "run" / "capture" / "requests-0.arrows").stat().st_mode & 0o777 == stat.S_IRUSR | stat.S_IWUSR
    load_.stop()
    run = load_.wait()
    assert load_.progress.state == "done"
    assert run.meta["ended"] == "stopped"
    counts = run.meta["outcomes"]
    assert counts["ok"] >= 20 and sum(counts.values()) == len(run.requests)
    assert counts["unsent"] > 1000
    assert not (tmp_path / "run" / "capture").exists()


def test_stopped_before_the_start(server: lp.ReferenceServer, tmp_path: Path) -> None:
    load_ = lp.start_load(server.url, lp.Poisson(50), n=10, processes=2, out=tmp_path / "run", progress=False)
    load_.stop()
    with pytest.raises(lp.LlmprofileError, match="stopped before its start; nothing was sent"):
        load_.wait()
    assert not (tmp_path / "run").exists()


def test_works_in_a_thread_and_inside_a_running_loop(server: lp.ReferenceServer, tmp_path: Path) -> None:
    import asyncio

    async def cell() -> Run:
        return load(server, tmp_path, n=10)  # as in a notebook, where a loop is already running

    found: list[Run] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(cell())))
    thread.start()
    thread.join(60)
    assert found[0].meta["outcomes"] == {"ok": 10}


def test_over_dask(server: lp.ReferenceServer, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="dask is not installed here (it comes with the extra `dask`)")
    code = f"""
        import joblib
        import llmprofile as lp
        from dask.distributed import Client, LocalCluster
        if __name__ == "__main__":
            with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
                with joblib.parallel_config("dask"):
                    run = lp.run_load({server.url!r}, lp.Poisson(100), n=40, output_tokens=3, processes=2,
                                      out={str(tmp_path / "run")!r}, progress=False)
                print(run.meta["outcomes"], len({{w["pid"] for w in run.meta["workers"]}}))
        """
    script = tmp_path / "over_dask.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split("\n")[0] == "{'ok': 40} 2", done.stderr


# --- failures ---


def script(url: str, folder: Path, what: str) -> subprocess.Popen[str]:
    """A script that starts a long run of two processes, with a process group of its own."""
    code = f"""
        import llmprofile as lp
        load = lp.start_load({url!r}, lp.Poisson(100), duration_s=60, output_tokens=4, processes=2,
                             out={str(folder)!r}, progress=False)
        {what}
        """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def workers_of(folder: Path, processes: int = 2) -> list[int]:
    """Pids of the workers, once the load has gone on for a while."""
    from llmprofile.capture import Board

    waited = threading.Event()
    for _ in range(3000):
        waited.wait(0.02)
        if (folder / "capture" / "board.bin").exists():
            board = Board(folder, processes)
            if board.column("done").min() > 80:
                return [int(p) for p in board.column("pid")]
    raise AssertionError("the load did not start")


def gone(pids: list[int], within_s: float) -> bool:
    """Whether none of the processes is left before the time is up."""
    waited = threading.Event()
    for _ in range(int(within_s / 0.05)):
        if not any(_alive(pid) for pid in pids):
            return True
        waited.wait(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_worker_that_is_killed_ends_the_run_and_keeps_its_data(server: lp.ReferenceServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = script(server.url, folder, "run = load.wait(); print(run.meta['ended'])")
    pids = workers_of(folder)
    os.kill(pids[0], 9)
    out, _ = child.communicate(timeout=60)
    assert out.split() == ["worker_lost"]
    run = lp.load(folder)
    assert run.meta["lost_workers"] >= 1
    counts = run.meta["outcomes"]
    assert counts["ok"] > 50 and counts["lost"] == run.meta["lost_requests"]
    assert sum(counts.values()) == len(run.requests)
    # at most a second of requests a worker (flushed twice a second), and those in flight
    assert counts["lost"] < 2 * 100 * 1.5
    assert lp.verdict(run).word == "invalid" and "died" in str(lp.verdict(run))
    assert gone(pids, 5)


@linux
def test_ctrl_c_keeps_what_was_measured(server: lp.ReferenceServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = script(server.url, folder, "run = load.wait(); print(run.meta['ended'], len(run.requests))")
    pids = workers_of(folder)
    os.killpg(child.pid, 2)
    assert gone(pids, 5)
    out, _ = child.communicate(timeout=60)
    assert out.split()[0] == "interrupted"
    run = lp.load(folder)
    assert run.meta["outcomes"]["ok"] > 150 and run.meta["lost_requests"] == 0


@linux
def test_workers_do_not_outlive_their_parent_and_the_run_can_be_loaded(
    server: lp.ReferenceServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    child = script(server.url, folder, "load.wait()")
    pids = workers_of(folder)
    child.kill()
    child.communicate(timeout=10)
    assert gone(pids, 10)
    run = lp.load(folder)
    assert run.meta["ended"] == "interrupted"
    assert run.meta["outcomes"]["ok"] > 150
    assert "no verdict" in repr(run)
    assert not (folder / "capture").exists()


def refused(folder: Path, match: str, *args: Any, **options: Any) -> None:
    """The call is refused with a sentence and leaves nothing behind."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(lp.UsageError, match=match) as caught:
        lp.run_load(*args, **({"out": folder / "new", "progress": False} | options))
    assert "\n" not in str(caught.value)
    assert sorted(folder.rglob("*")) == before


def test_what_is_refused(server: lp.ReferenceServer, tmp_path: Path) -> None:
    url, law = server.url, lp.Poisson(10)
    (tmp_path / "old").mkdir()
    refused(tmp_path, "not both", url, law)
    refused(tmp_path, "not both", url, law, n=1, duration_s=1)
    refused(tmp_path, "processes", url, law, n=1, processes=0)
    refused(tmp_path, "client must be one of stamped, conventional; not fast", url, law, n=1, client="fast")
    refused(tmp_path, "exists", url, law, n=1, out=tmp_path / "old")
    refused(tmp_path, "no connection", f"http://127.0.0.1:{free_port()}/v1/completions", law, n=1)
    refused(tmp_path, "not known", "http://no-such-host.invalid/v1/completions", law, n=1)
    refused(tmp_path, "/v1/completions", server.base_url, law, n=1)
    refused(tmp_path, "timeout_s", url, law, n=1, timeout_s=0)
    refused(tmp_path, "event_work_s must be a number not below 0", url, law, n=1, event_work_s=-1e-6)
    refused(tmp_path, 'goes with client="conventional"', url, law, n=1, event_work_s=1e-5)
    refused(tmp_path, "X-Request-Id", url, law, n=1, headers={"X-Request-Id": "mine"})
    refused(tmp_path, "TLS", url.replace("http", "https"), law, n=1, connect_timeout_s=1.0)
    refused(tmp_path, "open files", url, lp.ClosedLoop(10**7), n=1)
    with pytest.raises(lp.UsageError, match="rate_per_s must be a number above 0"):
        lp.Poisson(-1)


def test_statuses_are_outcomes(tmp_path: Path) -> None:
    with lp.ReferenceServer(fault={"kind": "status", "status": 401}) as server:
        for client in CLIENTS:
            run = load(server, tmp_path, client=client, n=10, out=tmp_path / client)
            assert run.meta["outcomes"] == {"http_error": 10}
            assert (run.requests["status"] == 401).all()
            assert run.requests["error"].notna().all()
            assert lp.verdict(run).word == "invalid"
            assert lp.summary(run)["n"].sum() == 0


def test_a_port_that_only_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions"
        for client in CLIENTS:
            run = lp.run_load(
                *(url, lp.Constant(100), 5),
                client=client,
                timeout_s=0.4,
                model="m",
                out=tmp_path / client,
                progress=False,
            )
            assert run.meta["outcomes"] == {"timeout": 5}
            assert run.requests["error"].str.contains("0.4 s").all()
