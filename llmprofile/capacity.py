"""The same load at several rates, or by several numbers of users: each run in its folder, and a table of all."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from llmprofile.errors import UsageError, positive
from llmprofile.launch import run_load
from llmprofile.live import in_notebook
from llmprofile.markup import card
from llmprofile.preflight import check_folder
from llmprofile.records import OUTCOMES, Run
from llmprofile.units import show_rate, show_time
from llmprofile.workload import Arrivals, ClosedLoop, Poisson

METRICS = ("ttft_s", "tpot_s", "ntpot_s")
NOT_OPTIONS = ("arrivals", "out", "progress", "seed")


@dataclass(frozen=True, eq=False)
class Sweep:
    """Runs of one load at several rates or numbers of users; it shows itself.

    Attributes
    ----------
    runs : tuple of Run
        In the order asked; fewer than asked when one was interrupted. `Sweep(tuple(map(lp.load, folders)))` is the
        sweep of folders.
    """

    runs: tuple[Run, ...]

    @property
    def table(self) -> pd.DataFrame:
        """One row a run.

        `asked_per_s` and `achieved_per_s`; `concurrency`, of a closed loop or a cap; `tokens_per_s`; mean and p99 of
        TTFT, TPOT and NTPOT on the run's own clock in seconds (`ttft_s`, `ttft_p99_s`, …), NaN where a run can't
        support them; the share of each outcome; the verdict's word. Columns that no run fills are left out.
        """
        frame = pd.DataFrame([_row(run) for run in self.runs])
        ended = [outcome for outcome in OUTCOMES if outcome in frame]
        frame[ended] = frame[ended].fillna(0.0)
        return frame[[*_columns(), *ended, "verdict"]].dropna(axis="columns", how="all")

    def __repr__(self) -> str:
        return "\n".join([self._head(), self._cells().to_string(index=False)])

    def _repr_html_(self) -> str:
        return card(self._head(), tables=[self._cells()])

    def _head(self) -> str:
        folders = {str(run.folder.parent) for run in self.runs if run.folder is not None}
        return f"{len(self.runs)} runs" + (f" in {', '.join(sorted(folders))}" if folders else "")

    def _cells(self) -> pd.DataFrame:
        return pd.DataFrame({_label(name): _shown(str(name), column) for name, column in self.table.items()})


def _columns() -> list[str]:
    figures = [f"{metric.removesuffix('_s')}{of}_s" for metric in METRICS for of in ("", "_p99")]
    return ["asked_per_s", "concurrency", "achieved_per_s", "tokens_per_s", *figures]


def _row(run: Run) -> dict[str, Any]:
    rates, asked, total = run.meta["rates"], run.meta["asked"], max(1, len(run.requests))
    row = {name: rates.get(name) for name in ("asked_per_s", "achieved_per_s", "tokens_per_s")}
    row["concurrency"] = asked.get("concurrency")
    stored = {figures["metric"]: figures for figures in run.meta["summary"]}
    for metric in METRICS:
        name, figures = metric.removesuffix("_s"), stored.get(metric, {})
        row |= {f"{name}_s": figures.get("mean"), f"{name}_p99_s": figures.get("p99")}
    plain = {name: math.nan if value is None else float(value) for name, value in row.items()}
    shares = {outcome: n / total for outcome, n in run.meta["outcomes"].items()}
    return plain | shares | {"verdict": (run.meta["verdict"] or {}).get("word")}


def _label(name: Any) -> str:
    """A column's name as people read it."""
    words = {"asked_per_s": "asked", "achieved_per_s": "achieved", "tokens_per_s": "tokens"}
    metric, _, of = str(name).removesuffix("_s").partition("_")
    return words.get(name) or (f"{metric.upper()} {of or 'mean'}" if f"{metric}_s" in METRICS else str(name))


def _shown(name: str, column: pd.Series) -> list[str]:
    if name == "verdict":
        return ["–" if word is None else str(word) for word in column]
    if name in OUTCOMES:
        return [f"{share:.1%}" for share in column]
    if name == "concurrency":
        return ["–" if math.isnan(users) else f"{users:.0f}" for users in column]
    return list(map(show_rate if name.endswith("_per_s") else show_time, column))


def run_sweep(
    url: str | Sequence[str],
    rates_per_s: Sequence[float] | None = None,
    concurrencies: Sequence[int] | None = None,
    *,
    law: Callable[[float], Arrivals] = Poisson,
    seed: int | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Run a load at each of several rates, or with each of several numbers of users, one after the other.

    Parameters
    ----------
    url : str, or a list of them
        As for `run_load`.
    rates_per_s : sequence of float, optional
        Of open loops.
    concurrencies : sequence of int, optional
        Of closed loops. Exactly one of the two.
    law : callable
        Makes a rate's arrival law: `Poisson`, `Constant`, or `lambda rate: Gamma(rate, 0.5)`.
    seed : int, optional
        The k-th run has `seed` + k, so that no two share their arrivals; drawn by default.
    out : path, optional
        The folder for the runs' folders; `runs/<UTC time>-sweep` by default.
    progress : bool
    **options
        Of `run_load`, the same for all runs: `n` or `duration_s`, lengths, …

    Returns
    -------
    Sweep
        Of the runs so far when one is interrupted.

    Raises
    ------
    UsageError
        Neither or both of rates and concurrencies, an option that a sweep sets itself, or what `run_load` refuses.

    Examples
    --------
    >>> found = run_sweep(server.url, [50, 100], n=20, output_tokens=4, seed=1, out="sweep", progress=False)
    >>> found.table["asked_per_s"].tolist(), found.table["ok"].tolist()
    ([50.0, 100.0], [1.0, 1.0])
    """
    if (rates_per_s is None) == (concurrencies is None):
        raise UsageError("give either rates_per_s or concurrencies, not both and not neither")
    arrivals: list[Arrivals] = [law(positive("a rate", rate)) for rate in rates_per_s or ()]
    arrivals += [ClosedLoop(users) for users in concurrencies or ()]
    values = [*(rates_per_s or concurrencies or ())]
    if not arrivals:
        raise UsageError("a sweep needs at least one rate or concurrency")
    folder = sweep_folder(out, "sweep", options)
    unit = "per-s" if rates_per_s is not None else "users"
    runs: list[Run] = []
    with progress_bar(len(arrivals), "sweep", progress) as bar:
        for k, (law_, value) in enumerate(zip(arrivals, values, strict=True)):
            own: dict[str, Any] = {
                "out": folder / f"{k + 1:02}-{value:g}-{unit}",
                "seed": None if seed is None else seed + k,
            }
            runs.append(run_load(url, law_, **options, **own, progress=progress))
            bar.update()
            if runs[-1].meta["ended"] != "complete":
                break
    return Sweep(tuple(runs))


def sweep_folder(out: Path | str | None, name: str, options: dict[str, Any]) -> Path:
    """The folder for several runs, which does not exist yet; and a look at their options.

    Raises
    ------
    UsageError
        It exists, or an option is one that differs from run to run.

    Examples
    --------
    >>> sweep_folder("here", "sweep", {"n": 10})
    PosixPath('here')
    """
    for option in NOT_OPTIONS:
        if option in options:
            raise UsageError(f"{option} is not an option of several runs at once: it is set for each")
    return check_folder(out, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}")


@contextmanager
def progress_bar(total: int, what: str, show: bool) -> Iterator[Any]:
    """A bar over runs, above each run's own; where somebody can see it.

    Examples
    --------
    >>> with progress_bar(2, "sweep", show=False) as bar:
    ...     bar.update()
    """
    disable = not show or not (in_notebook() or sys.stderr.isatty())
    with tqdm(total=total, unit="run", desc=what, disable=disable, leave=False) as bar:
        yield bar
