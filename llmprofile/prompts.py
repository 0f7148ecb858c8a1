"""What requests say: words of a wanted length, prefixes that requests share, prompts from a file.

A tokenizer is not needed: common English words are one token each in most vocabularies, near enough.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmprofile.errors import UsageError, whole
from llmprofile.traces import MOST_TOKENS

Message = tuple[bytes, bytes]
"""(role, text), each as it stands between the quotation marks of a JSON string."""

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about "
    "out many then them these so some her would make like him into time has look two more write go see number no "
    "way could people my than first water been call who oil its now find long down day did get come made may part "
    "over new sound take only little work know place year live me back give most very after thing our just name "
    "good sentence man think say great where help through much before line right too mean old any same tell boy "
    "follow came want show also around form three small set put end does another well large must big even such "
    "because turn here why ask went men read need land different home us move try kind hand picture again change "
    "off play spell air away animal house point page letter mother answer found study still learn should world"
).split()
_TEXT_WORDS = 8192
TAG_TOKENS = 4
"""What the random first word of a prompt is taken to cost; the server's usage says what the whole really was."""


@dataclass(frozen=True, repr=False, init=False)
class PromptFile:
    r"""Prompts from a file of JSON lines: line k mod their number is what request k says.

    A line is an object with `prompt`, a text, or `messages`, a list of objects with `role` and `content` (texts); and
    `output_tokens`, if this request is to ask for another number of tokens than the rest. What else it holds is left
    alone. An API that takes one text gets messages joined by blank lines.

    Parameters
    ----------
    path : path
        Empty lines hold no prompt.

    Attributes
    ----------
    path : str
    messages : tuple of tuple of Message
        Of each line.
    output_tokens : tuple of int or None
        Of each line.
    sha256 : str
        Of the file.

    Raises
    ------
    UsageError
        No such file, no prompt in it, or a line that can't be used: with its number.

    Examples
    --------
    >>> _ = Path("prompts.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?", "output_tokens": 5}\n')
    >>> PromptFile("prompts.jsonl")
    PromptFile('prompts.jsonl', prompts=2, sha256='0d39cfc9230c')
    """

    path: str
    messages: tuple[tuple[Message, ...], ...]
    output_tokens: tuple[int | None, ...]
    sha256: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        where = os.fspath(path)
        try:
            data = Path(where).read_bytes()
            text = data.decode("utf-8-sig")
        except OSError as error:
            raise UsageError(f"the prompt file {where} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"the prompt file {where} is not UTF-8 text") from None
        # no splitlines: other characters that end a line may stand in JSON's strings
        lines = [_line(line, f"{where}, line {k}") for k, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not lines:
            raise UsageError(f"the prompt file {where} holds no prompt")
        messages, output_tokens = zip(*lines, strict=True)
        found = (where, messages, output_tokens, hashlib.sha256(data).hexdigest())
        for name, value in zip(("path", "messages", "output_tokens", "sha256"), found, strict=True):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"PromptFile({self.path!r}, prompts={len(self.messages)}, sha256={self.sha256[:12]!r})"


def _line(line: str, where: str) -> tuple[tuple[Message, ...], int | None]:
    try:
        said = json.loads(line)
        if not isinstance(said, dict):
            raise UsageError("it must be a JSON object")
        tokens = said.get("output_tokens")
        if tokens is not None and whole("output_tokens", tokens) > MOST_TOKENS:
            raise UsageError(f"output_tokens must be at most {MOST_TOKENS:,}; not {tokens}")
        return _messages(said), tokens
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: {error}") from None


def _messages(said: dict[str, Any]) -> tuple[Message, ...]:
    prompt, messages = said.get("prompt"), said.get("messages")
    if (prompt is None) == (messages is None):
        raise UsageError("it must hold either prompt or messages")
    if messages is None:
        return ((b"user", escaped(_text("prompt", prompt))),)
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise UsageError("messages must be a list of objects with role and content, at least one")
    return tuple((*(escaped(_text(name, message.get(name))) for name in ("role", "content")),) for message in messages)  # type: ignore[misc]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a text that is not empty; not {str(value)[:40]!r}")
    return value


def escaped(text: str) -> bytes:
    r"""A text as it stands between the quotation marks of a JSON string.

    Examples
    --------
    >>> escaped('a "b"')
    b'a \\"b\\"'
    """
    return json.dumps(text)[1:-1].encode()


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts that begin like others: each with one of `groups` prefixes of `tokens` words, drawn with equal chances.

    A prefix comes on top of a request's own prompt, which differs from the first word after it. In a conversation the
    first turn has it. Groups, and runs of another salt, share nothing.

    Examples
    --------
    >>> SharedPrefix(groups=4, tokens=1000)
    SharedPrefix(groups=4, tokens=1000)
    """

    groups: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("groups", "tokens"):
            if whole(name, getattr(self, name)) > MOST_TOKENS:
                raise UsageError(f"{name} of a shared prefix must be at most {MOST_TOKENS:,}")


PromptSource = PromptFile | SharedPrefix


class Prompts:
    """What each request says: words that differ from the first on, within a run and between salts, or a file's.

    Parameters
    ----------
    salt : int
        Of the words.
    source : PromptFile or SharedPrefix, optional

    Examples
    --------
    >>> prompts = Prompts(salt=1)
    >>> prompts.text(0, 8).split()[0] == prompts.text(1, 8).split()[0]
    False
    """

    def __init__(self, salt: int, source: PromptSource | None = None) -> None:
        self._salt = whole("salt", salt, 0)
        self._source = source
        words = np.random.default_rng(salt).choice(_WORDS, _TEXT_WORDS)
        self._text = " ".join(words) + " "
        self._starts = np.concatenate([[0], np.cumsum([len(w) + 1 for w in words])]).tolist()

    def messages(self, request_id: int, tokens: int, pick: int) -> tuple[Message, ...]:
        """What a request says beside what was said before.

        Parameters
        ----------
        request_id, tokens : int
            Of generated words.
        pick : int
            The line of the file, or the group whose prefix comes first; -1 for none.

        Examples
        --------
        >>> [(role, text)] = Prompts(1, SharedPrefix(groups=2, tokens=10)).messages(0, 8, pick=1)
        >>> role, len(text.split())
        (b'user', 15)
        """
        if isinstance(self._source, PromptFile):
            return self._source.messages[pick]
        text = self.text(request_id, tokens)
        if isinstance(self._source, SharedPrefix) and pick >= 0:
            # numbers that no request has, and one word where the tag stands for several
            text = f"{self.text(-1 - pick, self._source.tokens - 1 + TAG_TOKENS)} {text}"
        return ((b"user", text.encode()),)

    def text(self, request_id: int, tokens: int) -> str:
        """About `tokens` tokens of text; plain letters and spaces, nothing that JSON would escape."""
        mixed = (request_id * 0x9E3779B1 + self._salt) % (1 << 32)
        start = (mixed >> 7) % _TEXT_WORDS
        words = max(0, tokens - TAG_TOKENS)
        laps, stop = divmod(start + words, _TEXT_WORDS)
        text = self._text * laps + self._text[: self._starts[stop]]
        return f"{_letters(mixed)} {text[self._starts[start] :]}".rstrip()


def _letters(number: int) -> str:
    # seven letters hold 32 bits; odd multipliers make `mixed` one-to-one, so no two requests share a word
    return "".join(chr(97 + number // 26**k % 26) for k in range(7))
