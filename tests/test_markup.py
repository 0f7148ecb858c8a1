"""HTML of results: what comes from outside stays text, what is missing is a dash."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from llmprofile.markup import MARKS, card, lines, table
from llmprofile.trust import WORDS


def test_a_table_escapes_heads_labels_and_cells() -> None:
    html = table(pd.DataFrame({"<i>": ["<td>"]}, index=pd.Index(["<th>"], name="<b>")))
    assert html.count("&lt;") == 4
    assert not any(tag in html for tag in ("<i>", "<b>", "<td><td>", "<th><th>"))


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, pd.NaT, np.float64("nan")])
def test_what_is_missing_is_a_dash(missing: object) -> None:
    assert "<td>–</td>" in table(pd.DataFrame({"x": pd.Series([missing], dtype=object)}))


def test_an_index_that_only_counts_is_not_shown() -> None:
    frame = pd.DataFrame({"x": ["1"]})
    assert table(frame) == "<table><thead><tr><th>x</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"
    assert "<tr><th>7</th><td>1</td></tr>" in table(frame.set_index(pd.Index([7])))


def test_an_interval_has_a_line_of_its_own() -> None:
    html = table(pd.DataFrame({"x": ["2 ms [1 ms, 3 ms]", "[1 ms, 3 ms]", "error [Errno 1]"]}))
    assert re.findall("<td>(.*?)</td>", html) == ["2 ms<br>[1&nbsp;ms, 3&nbsp;ms]", "[1 ms, 3 ms]", "error [Errno 1]"]


def test_nothing_makes_no_table() -> None:
    assert table(pd.DataFrame({"x": []})) == "" == lines(["", ""])


def test_a_card_has_its_head_first_and_the_colour_of_its_word() -> None:
    html = card("<head>", ["<said>"], [pd.DataFrame({"x": ["1"]})], ["<note>"], "biased")
    order = [html.index(text) for text in ("&lt;head&gt;", "&lt;said&gt;", "<table", "&lt;note&gt;")]
    assert order == sorted(order)
    assert MARKS["biased"] in html
    assert not any(mark in card("head", word="<word>") for mark in MARKS.values())


def test_every_word_of_a_verdict_has_a_colour() -> None:
    assert set(MARKS) == set(WORDS)
