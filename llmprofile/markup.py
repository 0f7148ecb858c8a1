"""Results as HTML: one table and one card for all of them, on light pages and on dark ones.

Colours of text and background are inherited; a mark takes its colour from JupyterLab's theme, or another where there
is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

import pandas as pd

MARKS = {
    "trustworthy": "var(--jp-success-color1, #2e7d32)",
    "biased": "var(--jp-warn-color1, #b26a00)",
    "invalid": "var(--jp-error-color1, #c62828)",
}
"""What stands beside a verdict, by its word. The word itself is always there too."""
_NO_MARK = "var(--jp-border-color1, #888888)"


def table(frame: pd.DataFrame) -> str:
    """A frame as an HTML table, its cells as they are; its index heads the rows, unless it only counts them.

    Examples
    --------
    >>> table(pd.DataFrame({"mean": ["2 ms"]}, index=["<TTFT>"])).partition("<tbody>")[2]
    '<tr><th>&lt;TTFT&gt;</th><td>2 ms</td></tr></tbody></table>'
    """
    if frame.empty:
        return ""
    headed = not isinstance(frame.index, pd.RangeIndex)
    corner = [frame.index.name or ""] if headed else []
    labels = frame.index if headed else [None] * len(frame)
    rows = "".join(_row(label, cells) for label, cells in zip(labels, frame.to_numpy(object), strict=True))
    head = "".join(_cell("th", name) for name in (*corner, *frame.columns))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(label: Any, cells: Iterable[Any]) -> str:
    first = "" if label is None else _cell("th", label)
    return f"<tr>{first}{''.join(_cell('td', cell) for cell in cells)}</tr>"


def _cell(tag: str, value: Any) -> str:
    text = escape("–" if value is None or value is pd.NA or value != value else str(value))
    return f"<{tag}>{_INTERVAL.sub(_below, text)}</{tag}>"


_INTERVAL = re.compile(r" (\[[^][]+, [^][]+\])$")
"""An interval behind its value."""


def _below(interval: re.Match[str]) -> str:
    """An interval on a line of its own, so that columns are narrow; a longer one breaks between its ends."""
    return "<br>" + ", ".join(end.replace(" ", "&nbsp;") for end in interval[1].split(", "))


def lines(texts: Iterable[str]) -> str:
    """Texts, a line each.

    Examples
    --------
    >>> lines(["1 < 2", "", "so"])
    '1 &lt; 2<br>so'
    """
    return "<br>".join(escape(text) for text in texts if text)


def card(
    head: str, said: Iterable[str] = (), tables: Iterable[pd.DataFrame] = (), notes: Iterable[str] = (), word: str = ""
) -> str:
    """A result: what matters most in bold beside its mark, what else is to be said, tables, notes.

    Parameters
    ----------
    head : str
    said, notes : texts
    tables : frames
    word : str
        A verdict's word, which gives the mark its colour.

    Examples
    --------
    >>> card("all <is> well").partition("<b>")[2]
    'all &lt;is&gt; well</b></div></div>'
    """
    said, notes = lines(said), lines(notes)
    mark = f"border-left: 4px solid {MARKS.get(word, _NO_MARK)}; padding-left: 8px"
    first = f'<div style="{mark}"><b>{escape(head)}</b>{"<br>" * bool(said)}{said}</div>'
    wide = "".join(f'<div style="overflow-x: auto">{table(frame)}</div>' for frame in tables)
    return f"<div>{first}{wide}{f'<small>{notes}</small>' if notes else ''}</div>"
