"""Arrivals as they were recorded elsewhere: due times and lengths from a trace."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from llmprofile.errors import UsageError, positive, whole

if TYPE_CHECKING:
    import pandas as pd  # a worker's start need not wait for it

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Row = tuple[float, int, int]
"""(seconds, prompt tokens, output tokens)"""

MOST_TOKENS = 10_000_000
"""More in one request is a slip of the pen."""
COLUMNS = ("due_s", "prompt_tokens", "output_tokens")
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FORMATS = ".csv (Azure), .jsonl (Mooncake), either of them with .gz, or .parquet (due_s, prompt_tokens, output_tokens)"


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Requests as they came to another server: when they are due and how long they are.

    Parameters
    ----------
    source : path, mapping or DataFrame
        A file: Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`), Mooncake's JSON lines (`timestamp` in
        milliseconds, `input_length`, `output_length`), either may be gzipped; or Parquet with the columns `due_s`,
        `prompt_tokens`, `output_tokens`. Or arrays of these names. Times of the first two count from their first
        request; `due_s` is taken as it is. Requests are brought into the order of their times.
    speed : float
        How many times faster than it was: 2 halves every gap.

    Attributes
    ----------
    due_s : (n,) float
        Seconds from the start, ascending, at that speed.
    prompt_tokens, output_tokens : (n,) int

    Raises
    ------
    UsageError
        No such file, another format, a line or a row that can't be used: with its number.

    Examples
    --------
    >>> trace = Trace({"due_s": [0.0, 0.5, 4.0], "prompt_tokens": [9, 9, 7], "output_tokens": [1, 2, 3]}, speed=2)
    >>> trace, trace.due_s.tolist(), trace.rate_per_s
    (Trace(<3 requests>, speed=2), [0.0, 0.25, 2.0], 1.0)
    """

    due_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    source: str
    speed: float

    def __init__(self, source: Path | str | Mapping[str, npt.ArrayLike] | pd.DataFrame, speed: float = 1.0) -> None:
        positive("speed", speed)
        is_file = isinstance(source, (str, Path))
        if not (is_file or hasattr(source, "__getitem__")):
            raise UsageError(f"a trace must be a path, a mapping of arrays or a DataFrame; not {source!r}")
        where = str(source) if is_file else "the trace"
        due_s, prompt_tokens, output_tokens = _checked(_read(Path(where)) if is_file else source, where)
        order = np.argsort(due_s, kind="stable")
        self._set("due_s", due_s[order] / speed)
        self._set("prompt_tokens", prompt_tokens[order])
        self._set("output_tokens", output_tokens[order])
        self._set("source", repr(where) if is_file else f"<{len(due_s)} requests>")
        self._set("speed", speed)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Trace({self.source}, speed={self.speed!r})"

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def rate_per_s(self) -> float:
        """Gaps over their span; of requests that are all due at once, their number, as if in a second."""
        span_s = float(self.due_s[-1] - self.due_s[0])
        return (len(self) - 1) / span_s if span_s > 0 else float(len(self))


def _read(path: Path) -> Mapping[str, npt.ArrayLike]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".csv"):
        return _from_first(_rows(path, _azure_row, AZURE_HEADER))
    if name.endswith(".jsonl"):
        return _from_first(_rows(path, _mooncake_row))
    if path.suffix != ".parquet":
        raise UsageError(f"a trace must be one of {FORMATS}; not {path.name}")
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UsageError(f"there is no trace {path}") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} can't be read: {error}") from None
    return {column: table[column].to_numpy() for column in COLUMNS if column in table.column_names}


def _rows(path: Path, parse: Callable[[str], Row], header: str | None = None) -> list[Row]:
    """The rows of a text file; empty lines hold none."""
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            if number == 1 and header is not None:
                if line.strip() != header:
                    raise UsageError(f"the header must be {header}; not {line.strip()[:80]!r}")
            elif line.strip():
                rows.append(parse(line.strip()))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    return rows


def _lines(path: Path) -> Iterator[str]:
    read = gzip.open if path.suffix == ".gz" else open
    try:
        with read(path, "rt", encoding="utf-8-sig") as file:
            yield from file
    except FileNotFoundError:
        raise UsageError(f"there is no trace {path}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from None


def _from_first(rows: list[Row]) -> Mapping[str, npt.ArrayLike]:
    times_s, *lengths = zip(*rows, strict=True) if rows else ((), (), ())
    start_s = min(times_s, default=0.0)
    return dict(zip(COLUMNS, ([time_s - start_s for time_s in times_s], *lengths), strict=True))


def _azure_row(line: str) -> Row:
    fields = line.split(",")
    if len(fields) != 3:
        raise UsageError(f"there must be 3 fields; not {len(fields)}")
    at = datetime.fromisoformat(fields[0])
    tokens = [int(field) if field.isdecimal() else field for field in fields[1:]]
    at_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
    return at_s, _tokens("ContextTokens", tokens[0]), _tokens("GeneratedTokens", tokens[1])


def _mooncake_row(line: str) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise UsageError("it must be a JSON object")
    at = row.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) < 1e300:
        raise UsageError(f"timestamp must be a number (milliseconds); not {at!r}")
    return (
        at / 1000,
        _tokens("input_length", row.get("input_length")),
        _tokens("output_length", row.get("output_length")),
    )


def _tokens(name: str, tokens: Any) -> int:
    if whole(name, tokens) > MOST_TOKENS:
        raise UsageError(f"{name} must be at most {MOST_TOKENS:,} tokens; not {tokens}")
    return int(tokens)


def _checked(columns: Any, where: str) -> tuple[Floats, Ints, Ints]:
    """The three columns as arrays of one length, every value usable."""
    arrays = [_column(columns, name, where) for name in COLUMNS]
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1 or not len(arrays[0]):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise UsageError(f"{where} must hold one {', one '.join(COLUMNS)} a request, and a request; not {shapes}")
    due_s, *lengths = arrays
    _refuse(~((due_s >= 0) & (due_s < np.inf)), due_s, "due_s must be a number of at least 0 (seconds)", where)
    for name, tokens in zip(COLUMNS[1:], lengths, strict=True):
        usable = (tokens >= 1) & (tokens <= MOST_TOKENS) & (tokens == np.rint(tokens))
        _refuse(~usable, tokens, f"{name} must be a whole number from 1 to {MOST_TOKENS:,}", where)
    return due_s, lengths[0].astype(np.int64), lengths[1].astype(np.int64)


def _column(columns: Any, name: str, where: str) -> Floats:
    try:
        return np.asarray(columns[name], float)
    except (KeyError, IndexError):
        raise UsageError(f"{where} must have {', '.join(COLUMNS)}; {name} is missing") from None
    except (TypeError, ValueError):
        raise UsageError(f"{name} of {where} must be numbers") from None


def _refuse(bad: npt.NDArray[np.bool_], values: Floats, must: str, where: str) -> None:
    if bad.any():
        row = int(bad.argmax())
        raise UsageError(f"{where}, row {row} (counted from 0): {must}; not {values[row]:g}")
