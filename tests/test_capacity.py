"""Sweeps against the reference server: what was asked is in the table, as the runs have it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import llmprofile as lp
from llmprofile.capacity import Sweep, run_sweep
from test_launch import gone, linux, workers_of

QUICK = {"output_tokens": 4, "prompt_tokens": 5, "progress": False}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, example_server: lp.ReferenceServer) -> Sweep:
    out = tmp_path_factory.mktemp("sweeps") / "rates"
    return run_sweep(example_server.url, [100, 200.0, 100], n=120, seed=5, out=out, **QUICK)


def test_a_table_of_rates(sweep: Sweep) -> None:
    table = sweep.table
    assert list(table.columns) == [
        *("asked_per_s", "achieved_per_s", "tokens_per_s", "ttft_s", "ttft_p99_s", "tpot_s", "tpot_p99_s"),
        *("ntpot_s", "ntpot_p99_s", "ok", "verdict"),
    ]
    assert table["asked_per_s"].tolist() == [100, 200, 100]
    for run, row in zip(sweep.runs, table.itertuples(), strict=True):
        assert row.achieved_per_s == run.meta["rates"]["achieved_per_s"]
        assert row.ttft_s == lp.summary(run).loc["ttft_s", "mean"]
        assert row.ntpot_p99_s == lp.summary(run).loc["ntpot_s", "p99"]
        assert (row.ok, row.verdict) == (1.0, run.meta["verdict"]["word"])


def test_each_run_has_its_folder_and_its_arrivals(sweep: Sweep) -> None:
    folders = [run.folder for run in sweep.runs]
    names = [folder.name for folder in folders if folder is not None]
    assert names == ["01-100-per-s", "02-200-per-s", "03-100-per-s"]
    assert [run.meta["asked"]["seed"] for run in sweep.runs] == [5, 6, 7]
    again = Sweep(tuple(lp.load(folder) for folder in folders if folder is not None))
    assert again.table.equals(sweep.table)


def test_a_sweep_shows_itself(sweep: Sweep) -> None:
    for text in (repr(sweep), sweep._repr_html_()):
        for part in ("3 runs in ", "asked", "200/s", "TTFT mean", "TTFT p99", "100.0%", "verdict"):
            assert part in text, part


def test_a_table_of_users(tmp_path: Path, example_server: lp.ReferenceServer) -> None:
    found = run_sweep(example_server.url, concurrencies=[1, 4], n=40, out=tmp_path / "users", **QUICK)
    table = found.table
    assert table["concurrency"].tolist() == [1, 4]
    assert "asked_per_s" not in table and "ttft_p99_s" not in table  # forty requests have no p99
    assert table["achieved_per_s"].iloc[1] > 2 * table["achieved_per_s"].iloc[0]
    assert [run.folder.name for run in found.runs if run.folder] == ["01-1-users", "02-4-users"]
    assert "concurrency" in repr(found)


def test_another_law_and_failures(tmp_path: Path) -> None:
    with lp.ReferenceServer(fault={"kind": "status", "status": 503}, fault_share=0.5) as server:
        found = run_sweep(server.url, [100], law=lp.Constant, n=60, out=tmp_path / "faults", **QUICK)
    assert "Constant" in found.runs[0].meta["asked"]["arrivals"]
    row = found.table.iloc[0]
    assert row["ok"] + row["http_error"] == pytest.approx(1)
    assert 0.2 < row["ok"] < 0.8


@linux
def test_ctrl_c_ends_a_sweep_and_a_search_with_what_was_measured(
    tmp_path: Path, example_server: lp.ReferenceServer
) -> None:
    for name, call in {
        "run_sweep": "run_sweep(URL, [300, 400], duration_s=60, **KINDS).runs",
        "find_saturation": "find_saturation(URL, 300, 400, e2e_s=1.0, duration_s=60, **KINDS).runs",
    }.items():
        folder = tmp_path / name
        code = f"""
            from llmprofile.{"capacity" if name == "run_sweep" else "saturation"} import {name}
            URL, KINDS = {example_server.url!r}, dict(out={str(folder)!r}, processes=2, progress=False)
            print([run.meta["ended"] for run in {call}])
            """
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        pids = workers_of(folder / "01-300-per-s")
        os.killpg(child.pid, signal.SIGINT)
        out, _ = child.communicate(timeout=60)
        assert out.strip() == "['interrupted']"
        assert gone(pids, 5)
        assert [path.name for path in folder.iterdir()] == ["01-300-per-s"]


def test_what_is_refused(tmp_path: Path, example_server: lp.ReferenceServer) -> None:
    url = example_server.url
    for match, options in {
        "not both": {},
        "not both and not neither": {"rates_per_s": [1], "concurrencies": [1]},
        "at least one rate": {"rates_per_s": []},
        "a rate must be a number above 0": {"rates_per_s": [10, 0]},
        "concurrency must be a whole": {"concurrencies": [1.5]},
        "arrivals is not an option": {"rates_per_s": [1], "arrivals": lp.Poisson(1)},
        "processes must be": {"rates_per_s": [1], "processes": 0, "n": 1},
    }.items():
        with pytest.raises(lp.UsageError, match=match):
            run_sweep(url, **{"out": tmp_path / "new", "progress": False, **options})  # type: ignore[arg-type]
    with pytest.raises(lp.UsageError, match="exists"):
        run_sweep(url, [1], n=1, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
