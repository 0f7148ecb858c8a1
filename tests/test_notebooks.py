"""Every notebook runs as it stands, in an empty folder; its figures are held against theory and the server's record.

A notebook without a check of its own figures fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# What a notebook is asked at its end (an expression in its own names, of what JSON can hold), and what must be true.
QUICKSTART = """{
    "ok": run.meta["outcomes"],
    "words": [lp.verdict(run).word, lp.verdict(conventional).word],
    "clocks": [lp.summary(run).index.name, lp.summary(conventional).index.name],
    "means": lp.summary(run)["mean"].dropna().to_dict(),
    "exact_errors": errors.loc[run.requests["bounded"] == False, "stamped"].tolist(),
    "errors": errors.mean().to_dict(),
    "bias": float((conventional.requests["ttft_handled_s"] - conventional.requests["ttft_s"]).mean()),
    "same": again.requests.equals(run.requests),
}"""


def check_quickstart(found: dict[str, Any]) -> None:
    assert found["ok"] == {"ok": 1000}
    assert set(found["words"]) <= {"trustworthy", "biased", "invalid"}
    assert found["clocks"] == ["wire clock", "handled clock"]
    assert found["same"] is True
    # 32 tokens each: NTPOT is a 32nd of the whole latency, which is the first token's and 31 gaps
    means = found["means"]
    assert means["ntpot_s"] == pytest.approx(means["e2e_s"] / 32)
    assert means["e2e_s"] == pytest.approx(means["ttft_s"] + 31 * means["tpot_s"])
    assert means["itl"] == pytest.approx(means["tpot_s"])
    # 0.05 s to the first token on average; the standard error is 0.1 × 0.05 s / √1000, a busy server is later
    assert means["ttft_s"] > 0.05 - 4 * 0.1 * 0.05 / 1000**0.5
    # a first token that came alone was stamped after the server wrote it down, and not long after
    exact_s = found["exact_errors"]
    assert len(exact_s) > 500
    assert min(exact_s) > -5e-5
    assert sum(exact_s) / len(exact_s) < 1e-3
    # what the conventional client adds by its own stamps is what the server's record says that it is off by
    assert found["bias"] > 0
    assert found["bias"] <= found["errors"]["conventional"] + 5e-5


CHECKS: dict[str, tuple[str, int, Callable[[dict[str, Any]], None]]] = {
    "01_quickstart.ipynb": (QUICKSTART, 4, check_quickstart),  # it draws four figures
}


def test_every_notebook_has_a_check_and_every_check_a_notebook() -> None:
    assert {path.name for path in NOTEBOOKS} == set(CHECKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_holds_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert notebook.cells[0].cell_type == "markdown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_its_figures_are_right(path: Path, tmp_path: Path) -> None:
    question, figures, check = CHECKS[path.name]
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json; print(json.dumps({question}))"))
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises what a cell raises
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == figures
    check(json.loads(notebook.cells[-1].outputs[0].text))
