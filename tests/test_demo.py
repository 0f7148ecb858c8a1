"""The demo says of each client what it reported, what was true, and the difference; and leaves nothing changed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import llmprofile as lp
from llmprofile.demo import Demo, _setting, errors, run_demo, table_cells

MS = 1_000_000
CHOOSES_CORES = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


def hand_made(client: str) -> tuple[lp.Run, pd.DataFrame]:
    """A run of four requests, the last without success, and what the server wrote down of it and of another run."""
    sent_ns = np.array([0, 1, 2, 3]) * 100 * MS
    requests = pd.DataFrame(
        {
            "request_id": range(4),
            "outcome": ["ok", "ok", "ok", "timeout"],
            "sent_ns": pd.array(sent_ns, "Int64"),
            "first_wire_ns": pd.array(sent_ns, "Int64"),  # read only for whether there are any
            "ttft_s": [0.0501, 0.0601, 0.0701, np.nan],
            "ttft_handled_s": [0.051, 0.062, 0.073, np.nan],
        }
    )
    own = pd.DataFrame({"request_id": [2, 0, 1], "first_ns": sent_ns[[2, 0, 1]] + np.array([70, 50, 60]) * MS})
    other = own.assign(id=[f"b-{i}" for i in own["request_id"]], first_ns=0)
    truth = pd.concat([other, own.assign(id=[f"a-{i}" for i in own["request_id"]])], ignore_index=True)
    return lp.Run(None, {"run_id": "a", "asked": {"client": client}}, requests), truth.astype({"first_ns": "Int64"})


@pytest.mark.parametrize(("client", "error_s"), [("stamped", [1e-4, 1e-4, 1e-4]), ("conventional", [1e-3, 2e-3, 3e-3])])
def test_an_error_is_what_was_reported_less_what_the_server_wrote_down(client: str, error_s: list[float]) -> None:
    found = errors(*hand_made(client))
    assert found["request_id"].tolist() == [0, 1, 2]
    assert found["true_s"].to_numpy() == pytest.approx([0.05, 0.06, 0.07])
    assert found["error_s"].to_numpy() == pytest.approx(error_s)


def test_a_request_that_the_server_knows_nothing_of_has_no_error() -> None:
    run, truth = hand_made("stamped")
    found = errors(run, truth[truth["id"] != "a-1"])
    assert found["error_s"].isna().tolist() == [False, True, False]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, str, Any]:
    """A demo at two low rates, what it said on its way, and the cores that this process had before."""
    before = os.sched_getaffinity(0) if CHOOSES_CORES else None
    folder, said = tmp_path_factory.mktemp("demo") / "out", tmp_path_factory.mktemp("said") / "stderr"
    with said.open("w") as file, contextlib.redirect_stderr(file):
        demo = run_demo(folder, rates_per_s=(25.0, 50.0), duration_s=2.0)
    return demo, said.read_text(), before


def test_demo_measures_each_client_at_each_rate(small: tuple[Demo, str, Any]) -> None:
    table = small[0].table
    cells = list(zip(table["rate_per_s"], table["client"], strict=True))
    assert cells == [(r, c) for r in (25.0, 50.0) for c in ("conventional", "stamped")]
    assert (table["ok"] == table["requests"]).all()
    assert table["requests"].tolist()[::2] == table["requests"].tolist()[1::2]  # the same schedule for both
    assert np.allclose(table["reported_mean_s"] - table["true_mean_s"], table["error_mean_s"])


def test_what_the_demo_reports_is_what_the_runs_summary_says(small: tuple[Demo, str, Any]) -> None:
    for row in small[0].table.to_dict("records"):
        run = lp.load(small[0].folder / f"{row['client']}-{row['rate_per_s']:g}")
        assert lp.summary(run).loc["ttft_s", "mean"] == pytest.approx(row["reported_mean_s"])
        assert run.meta["verdict"]["word"] == row["verdict"]


def test_demo_prints_its_table_and_how_it_was_measured(small: tuple[Demo, str, Any]) -> None:
    demo, said, _ = small
    text = str(demo)
    for column in table_cells(demo.table).to_numpy().T:
        assert all(cell in text for cell in column)
    assert re.search(r"\d+ cores of .* load average", text)
    assert "Error: reported less true" in " ".join(text.split())
    assert str(demo.folder) in text
    assert len(said.splitlines()) == len(demo.table)
    assert "<table" in demo._repr_html_()


def test_demo_leaves_a_figure_and_the_table(small: tuple[Demo, str, Any]) -> None:
    demo = small[0]
    assert (demo.folder / "error_against_rate.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (demo.folder / "error_against_rate.svg").read_text()
    pd.testing.assert_frame_equal(pd.read_csv(demo.folder / "table.csv"), demo.table, check_dtype=False)


@pytest.mark.skipif(not CHOOSES_CORES, reason="cores can't be chosen here, or there is only one")
def test_demo_gives_the_cores_back(small: tuple[Demo, str, Any]) -> None:
    demo, _, before = small
    worker = lp.load(demo.folder / "stamped-50").meta["workers"][0]
    assert f"the clients to core{'s'[: len(worker['affinity']) - 1]} {worker['affinity'][0]}" in " ".join(
        str(demo).split()
    )
    assert os.sched_getaffinity(0) == before
    with contextlib.suppress(ProcessLookupError):  # it lives on for the next run, but not for ever
        assert os.sched_getaffinity(worker["pid"]) == before


def test_demo_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(lp.UsageError, match="exists"):
        run_demo(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_an_interrupted_demo_says_so() -> None:
    nothing = Demo(Path("runs/x"), pd.DataFrame(), "2 cores.", complete=False)
    assert str(nothing).startswith("Interrupted")
    assert "no run was finished" in str(nothing)


def test_setting_says_which_cores_the_clients_had_and_that_the_machine_was_busy() -> None:
    workers: list[dict[str, Any]] = [{"affinity": [1]}, {"affinity": [1, 3]}]
    text = _setting([0, 1, 3], workers, load_1min=99.0)
    assert "The server kept to core 0, the clients to cores 1, 3." in text
    assert "load average at the start 99.0 (other work was running" in text
    assert "other work was running" not in _setting([0, 1], workers, load_1min=0.0)
    assert "shared what cores there are" in _setting([], workers, load_1min=0.0)
