"""The report as a browser gets it: one file, no script, nothing to fetch, all that the run says, both themes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import llmprofile as lp
from llmprofile import plots
from llmprofile.htmlreport import report
from llmprofile.metrics import summarise
from llmprofile.records import Run
from llmprofile.units import show_time
from test_comparison import slowed

VOID = {"meta", "br"}
FORBIDDEN = {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
DOCS = Path(__file__).parent.parent / "docs"


class Page(HTMLParser):
    """Reads a page and holds it to what a report may have."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.ids, self.references = "", list[str](), set[str]()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in FORBIDDEN
        self.text += " " * (tag == "br")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "srcset", "action", "data", "xlink:href")
            assert "//" not in (value or "")
            self.references |= set(re.findall(r"url\(#([^)]*)\)", value or ""))
            if name == "href":
                assert value.startswith("#")
                self.references.add(value[1:])
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data.replace("\xa0", " ")


def read(run: Run | list[Run], folder: Path) -> tuple[str, Page]:
    html = report(run, folder / "report.html").read_text(encoding="utf-8")
    return html, Page(html)


@pytest.fixture(scope="module")
def server() -> Iterator[lp.ReferenceServer]:
    with lp.ReferenceServer(ttft_s=0.01, itl_s=0.001, cv=0.3, seed=3) as server:
        yield server


@pytest.fixture(scope="module")
def conventional(server: lp.ReferenceServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "ordinary"
    arrivals = lp.Poisson(rate_per_s=150)
    return lp.run_load(
        server.url, arrivals, n=300, output_tokens=8, client="conventional", seed=1, out=out, progress=False
    )


@pytest.fixture(scope="module")
def page(conventional: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    return read(conventional, tmp_path_factory.mktemp("page"))


def test_it_fetches_nothing_runs_nothing_and_is_well_formed(page: tuple[str, Page]) -> None:
    html, read_page = page  # Page itself asserts the most of it
    assert "default-src 'none'" in html and "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert html.count("<svg") == 7
    assert read_page.references <= set(read_page.ids)
    assert len(read_page.ids) == len(set(read_page.ids)) > 50


def test_it_begins_with_the_verdict_and_holds_what_the_run_says(conventional: Run, page: tuple[str, Page]) -> None:
    text, meta = page[1].text, conventional.meta
    for sentence in meta["verdict"]["sentences"]:
        assert text.index(sentence) < text.index("What was asked")
    assert meta["verdict"]["word"] in text and meta["asked"]["call"] in text
    for name in ("seed", "salt", "model", "url", "arrivals", "client"):
        assert str(meta["asked"][name]) in text
    assert meta["machine"]["system"] in text and all(v in text for v in meta["versions"].values())
    assert "300" in text and "100.0%" in text
    for words in ("handled clock less true (wire)", "M/G/1", "normalised time per output token"):
        assert words in text


def test_it_holds_every_figure_of_the_summary(conventional: Run, page: tuple[str, Page]) -> None:
    shown = [row for row in conventional.meta["summary"] if row["n"]]
    assert len(shown) >= 8
    for row in shown:
        for name in ("mean", "p50", "p90", "p99"):
            if row[name] is not None:
                assert show_time(row[name]) in page[1].text
    bias = lp.separate_bias(conventional).frame.loc["ttft_s"]
    for part in ("true_s", "difference_s", "sending_s", "waiting_s", "handling_s"):
        assert show_time(bias[part]) in page[1].text


def long(run: Run, by_s: float) -> Run:
    """The same run, spread over more than a minute and with latencies that are longer by so much."""
    run = slowed(run, by_s)
    return dataclasses.replace(run, meta=run.meta | {"summary": summarise(run)})


def test_intervals_are_shown_where_the_run_is_long_enough(conventional: Run, tmp_path: Path) -> None:
    run = long(conventional, 0.0)
    row = next(row for row in run.meta["summary"] if row["metric"] == "ttft_s")
    _, read_page = read(run, tmp_path)
    assert f"{show_time(row['mean'])} [{show_time(row['mean_lo'])}, {show_time(row['mean_hi'])}]" in read_page.text


def test_both_themes_have_all_colours_and_figures_use_no_other(page: tuple[str, Page]) -> None:
    html = page[0]
    style, _, body = html.partition("</style>")
    light, _, dark = style.partition("prefers-color-scheme: dark")
    of_light, of_dark = ({*re.findall(r"(--[\w-]+): #[0-9a-f]{6}", part)} for part in (light, dark))
    assert of_light - of_dark == {"--jp-border-color1"} and of_dark <= of_light
    assert {f"--{name}" for name in re.findall(r"var\(--(\w+)\)", body)} <= of_light
    assert re.findall(r": (#[0-9a-f]{6})", body.replace("var(--jp-", "")) == []
    assert "@media print" in style


HOSTILE = "<script>alert(1)</script>&\"'<img src=x onerror=alert(2)>$x_$--><!--"


def test_nothing_from_outside_becomes_html(conventional: Run, tmp_path: Path) -> None:
    requests = conventional.requests.copy()
    requests.loc[:4, ["outcome", "error"]] = ["http_error", HOSTILE]
    meta = conventional.meta
    meta = meta | {
        "asked": meta["asked"] | {"model": HOSTILE, "url": HOSTILE, "call": HOSTILE, "arrivals": HOSTILE},
        "machine": meta["machine"] | {"processor": HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "outcomes": {"ok": 295, HOSTILE: 5},
        "verdict": meta["verdict"] | {"sentences": [HOSTILE]},
    }
    run = dataclasses.replace(conventional, meta=meta, requests=requests)
    html, read_page = read(run, tmp_path)
    assert read_page.text.count(HOSTILE) >= 8
    assert "<script" not in html and "<img" not in html
    other = dataclasses.replace(run, folder=tmp_path / HOSTILE.replace("/", ""))
    (tmp_path / "two").mkdir()
    assert "<script" not in read([run, other], tmp_path / "two")[0]


def test_text_that_is_no_unicode_is_written_all_the_same(conventional: Run, tmp_path: Path) -> None:
    meta = conventional.meta | {"machine": {"host": "\udcff"}}
    assert "\\udcff" in read(dataclasses.replace(conventional, meta=meta), tmp_path)[1].text


def test_a_run_without_an_answer_says_so_section_by_section(tmp_path: Path) -> None:
    with lp.ReferenceServer(fault={"kind": "status", "status": 503}) as server:
        run = lp.run_load(
            server.url, lp.Poisson(200), n=20, output_tokens=4, seed=1, out=tmp_path / "r", progress=False
        )
    html, read_page = read(run, tmp_path)
    for words in (
        "No request succeeded",
        "No request has any",
        "No queue is fitted",
        "No figure of TTFT on both clocks",
    ):
        assert words in read_page.text
    assert "http_error" in read_page.text and "503" in read_page.text
    assert "nan" not in read_page.text.lower().replace("finance", "")
    assert html.count("<svg") == 1  # the timeline


def test_a_run_without_stamps_is_reported_too(server: lp.ReferenceServer, tmp_path: Path) -> None:
    run = lp.run_load(
        server.url, lp.Poisson(200), n=150, output_tokens=4, seed=1, stamps=False, out=tmp_path / "r", progress=False
    )
    _, read_page = read(run, tmp_path)
    assert "seen clock" in read_page.text and "The kernel's stamps are missing" in read_page.text
    assert "No figure of TTFT on both clocks" in read_page.text


# two runs


def test_two_runs_are_compared(conventional: Run, example_run: Run, tmp_path: Path) -> None:
    html, read_page = read([conventional, example_run], tmp_path)
    text = read_page.text
    for run in (conventional, example_run):
        assert run.meta["run_id"] in html or run.folder.name in text  # type: ignore[union-attr]
        assert all(sentence in text for sentence in run.meta["verdict"]["sentences"])
        for row in run.meta["summary"]:
            assert not row["n"] or show_time(row["mean"]) in text
    assert text.count("first run: too short for an interval") == 1
    assert "A is read on its handled clock, B on its wire clock." in text
    assert html.count("<svg") == 4
    assert read_page.references <= set(read_page.ids) and len(read_page.ids) == len(set(read_page.ids))
    assert "Poisson(rate_per_s=150)" in text and "output_tokens" in text


def test_differences_have_signs_shares_and_intervals(conventional: Run, tmp_path: Path) -> None:
    runs = [long(conventional, by_s) for by_s in (0.003, 0.0)]
    _, read_page = read(runs, tmp_path)
    mean_s = runs[0].requests.loc[runs[0].requests["outcome"] == "ok", "ttft_handled_s"].mean()
    assert f"−3.00 ms (−{0.003 / mean_s:.1%}) [" in read_page.text


# what is refused


def test_a_report_overwrites_nothing_and_writes_nothing_where_it_is_refused(example_run: Run, tmp_path: Path) -> None:
    (tmp_path / "kept.html").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    for name, words in (
        ("kept.html", "exists; a report overwrites nothing"),
        ("dangling", "exists"),
        (".", "exists"),
        ("no/report.html", "is not a folder"),
        ("kept.html/report.html", "is not a folder"),
        ("n" * 300, "can't be written"),
    ):
        with pytest.raises(lp.UsageError, match=words):
            report(example_run, tmp_path / name)
    for runs in ([], [example_run] * 3, ["runs/a"], [None, example_run]):
        with pytest.raises(lp.UsageError, match="of one Run, or of a sequence of two"):
            report(runs, tmp_path / "report.html")  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "kept.html").read_text() == "mine"


# the gallery


def test_the_gallery_shows_every_figure_and_is_small() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    figures = [DOCS / name for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)]
    assert sorted(figures) == sorted((DOCS / "gallery").iterdir())
    for name in set(plots.__all__) - {"blank_axes", "save"}:
        assert f"lp.plots.{name}(" in text
    assert sum(path.stat().st_size for path in figures) < 1_000_000
    assert "docs/gallery.md" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
