"""Write docs/gallery.md and its figures, from small runs against the reference server: `python docs/gallery.py`.

It takes a minute. What stands beside a figure is the very line that drew it.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import llmprofile as lp
from llmprofile.demo import errors

DOCS = Path(__file__).parent
RATES_PER_S = (100, 300)
LONG_S, SHORT_S = 21.0, 3.0  # a sample has an interval from 20 blocks of a second on

FIGURES = (
    ("clocks", "What the kernel saw, and what the client's own clock would have reported", "lp.plots.clocks(run)"),
    ("latency", "A latency and its percentiles", 'lp.plots.latency(run, "e2e_s")'),
    ("compare", "Several runs or tools, each mean with its interval", 'lp.plots.compare(clients, "ttft_s")'),
    ("timeline", "The first requests, token by token", "lp.plots.timeline(run, n=10)"),
    (
        "decomposition",
        "What a reported mean TTFT is made of",
        "lp.plots.decomposition({rate: lp.separate_bias(run) for rate, run in runs.items()})",
    ),
    ("error_against_rate", "How far off a client is, against a known truth", "lp.plots.error_against_rate(table)"),
    ("server_side", "What the server says of itself, over its clients' latencies", "lp.plots.server_side(busy)"),
    ("ntpot", "Latency per output token", "lp.plots.ntpot(run)"),
    ("ntpot_by_length", "The same, by output length", "lp.plots.ntpot_by_length(run)"),
    (
        "ntpot_against_tpot",
        "NTPOT falls towards TPOT as the first token's latency is spread over more",
        "lp.plots.ntpot_against_tpot(run, ttft_s=0.02, tpot_s=0.002)",
    ),
    ("wait_distribution", "Time in the client, measured and by a fitted queue", "lp.plots.wait_distribution(fit)"),
    ("qq", "Measured against modelled quantiles", "lp.plots.qq(fit)"),
    ("dispersion", "How bunched the arrivals are, window by window", "lp.plots.dispersion(fit)"),
    (
        "wait_against_rate",
        "A model's mean wait against rate, split over processes",
        "lp.plots.wait_against_rate({f'k = {k}': lambda rate, k=k: lp.MM1(rate, 1e-4).split(k) for k in (1, 2, 4)}, "
        "np.linspace(500, 9_500, 80))",
    ),
    (
        "inflation",
        "How many times the true mean TTFT a saturated client reports",
        'lp.plots.inflation(rho, 1 + 0.1 / (1 - rho), against="utilisation")',
    ),
    (
        "sample_path",
        "A queue's unfinished work, job by job",
        "lp.plots.sample_path(np.cumsum(rng.exponential(1e-3, 25)), rng.exponential(8e-4, 25))",
    ),
)


def measure(server: lp.ReferenceServer, folder: Path, client: str, rate_per_s: float, duration_s: float) -> lp.Run:
    """Load the server; requests are the same for both clients."""
    return lp.run_load(
        server.url,
        lp.Poisson(rate_per_s),
        duration_s=duration_s,
        output_tokens=lp.Uniform(4, 40),
        client=client,
        seed=1,
        out=folder / f"{client}-{rate_per_s}",
        progress=False,
    )


def overloaded(folder: Path) -> lp.Run:
    """A server that takes 8 requests at a time, 25 a second, asked for more for four seconds."""
    arrivals = lp.Stages([(lp.Poisson(15), 6.0), (lp.Poisson(50), 4.0), (lp.Poisson(15), 10.0)])
    with lp.ReferenceServer(ttft_s=0.0, itl_s=0.02, max_batch=8, seed=1) as server:
        page, out = server.base_url, folder / "busy"
        return lp.run_load(server.url, arrivals, output_tokens=16, seed=1, scrape_metrics=page, out=out, progress=False)


def error_table(runs: list[lp.Run], truth: pd.DataFrame) -> pd.DataFrame:
    """How far off each run's TTFT is, by the server's record."""
    rows = []
    for run in runs:
        error_s = errors(run, truth)["error_s"]
        row = {"rate_per_s": run.meta["asked"]["rate_per_s"], "client": run.client, "error_mean_s": error_s.mean()}
        rows.append(row | {"error_p99_s": error_s.quantile(0.99)})
    return pd.DataFrame(rows)


def shorten(path: Path) -> None:
    """Round the coordinates of an SVG's paths and marks to hundredths of a point."""
    svg = path.read_text(encoding="utf-8")
    rounded = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    path.write_text(rounded, encoding="utf-8")


def main() -> None:
    """Measure, draw, write the page."""
    figures = DOCS / "gallery"
    figures.mkdir(exist_ok=True)
    plt.switch_backend("agg")
    with tempfile.TemporaryDirectory() as runs_in, lp.ReferenceServer(0.02, 0.002, cv=0.4, seed=1) as server:
        folder = Path(runs_in)
        clients = {c: measure(server, folder, c, RATES_PER_S[0], LONG_S) for c in ("conventional", "stamped")}
        runs = {RATES_PER_S[0]: clients["conventional"]}
        runs |= {rate: measure(server, folder, "conventional", rate, SHORT_S) for rate in RATES_PER_S[1:]}
        others = [clients["stamped"], *(measure(server, folder, "stamped", r, SHORT_S) for r in RATES_PER_S[1:])]
        table = error_table([*runs.values(), *others], server.truth())
        run = runs[RATES_PER_S[-1]]
        names = {"lp": lp, "np": np, "runs": runs, "run": run, "clients": clients, "table": table}
        names |= {"busy": overloaded(folder)}
        names |= {"fit": lp.fit_mg1(run), "rho": np.linspace(0.3, 0.95, 14), "rng": np.random.default_rng(5)}
        for name, _, line in FIGURES:
            ax: Axes = eval(line, names)
            lp.plots.save(ax, figures / f"{name}.svg")
            shorten(figures / f"{name}.svg")
            plt.close("all")
    entries = [f"## {what}\n\n    {line}\n\n![{what}](gallery/{name}.svg)\n" for name, what, line in FIGURES]
    (DOCS / "gallery.md").write_text("\n".join([INTRODUCTION, *entries]), encoding="utf-8")


INTRODUCTION = f"""# Gallery

Every figure of `lp.plots`, as `python docs/gallery.py` draws it from small runs against the reference server (20 ms to
the first token, 2 ms from token to token, 4 to 40 tokens; {RATES_PER_S[0]} and {RATES_PER_S[1]} requests/s, one
process a client). Each function takes a result and returns a matplotlib `Axes`; `ax=` draws on one of yours, and
`lp.plots.save(ax, "figure.svg")` writes it, as vectors if the suffix says so.
"""

if __name__ == "__main__":
    main()
