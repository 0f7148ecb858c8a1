"""Prompts differ where they should and are alike where they should; a file's say what it says."""

from __future__ import annotations

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprofile.errors import UsageError
from llmprofile.prompts import MOST_TOKENS, TAG_TOKENS, PromptFile, Prompts, SharedPrefix, escaped

seeded = settings(derandomize=True, deadline=None)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_first_words_of_a_hundred_thousand_prompts_all_differ() -> None:
    prompts = Prompts(salt=2**31 - 1)
    first = {prompts.text(k, 5).split()[0] for k in range(100_000)}
    assert len(first) == 100_000
    assert len({len(word) for word in first}) == 1  # no one is the beginning of another


def test_first_words_differ_wherever_in_32_bits_a_request_is() -> None:
    prompts = Prompts(salt=1)
    ids = set(rng().integers(0, 2**32, 150_000).tolist())  # words of 28 bits would meet forty times
    assert len({prompts.text(k, 1) for k in ids}) == len(ids)


def test_a_salt_repeats_its_prompts_and_another_shares_none() -> None:
    first, again, other = (Prompts(salt) for salt in (12, 12, 13))
    texts = [first.text(k, 20) for k in range(200)]
    assert texts == [again.text(k, 20) for k in range(200)]
    others = [other.text(k, 20) for k in range(200)]
    assert not {t.split()[0] for t in texts} & {t.split()[0] for t in others}
    # the words after the first differ too: not even the block after it is in a cache
    assert not {t.split(" ", 1)[1] for t in texts} & {t.split(" ", 1)[1] for t in others}


@given(request_id=st.integers(0, 2**31), salt=st.integers(0, 2**31), tokens=st.integers(1, 3000))
@seeded
def test_a_prompt_has_the_words_asked_for_and_nothing_to_escape(request_id: int, salt: int, tokens: int) -> None:
    text = Prompts(salt).text(request_id, tokens)
    words = text.split(" ")
    assert len(words) - 1 == max(0, tokens - TAG_TOKENS)  # the first word stands for TAG_TOKENS tokens
    assert all(words)
    assert set(text) <= set(string.ascii_letters + " ")
    assert json.dumps(text) == f'"{text}"'


def test_a_very_long_prompt_is_as_long_as_asked_and_still_its_own() -> None:
    prompts = Prompts(salt=3)
    one, two = prompts.text(0, 100_000).split(" "), prompts.text(1, 100_000).split(" ")
    assert len(one) == len(two) == 100_000 - TAG_TOKENS + 1
    assert one[0] != two[0]
    assert one[1:] != two[1:]


def test_words_are_many_and_evenly_used() -> None:
    words = Prompts(salt=5).text(0, 8192 + TAG_TOKENS).split(" ")[1:]
    common = np.unique(words, return_counts=True)[1]
    assert len(common) > 150
    assert common.max() / common.mean() < 2


def test_a_salt_must_be_a_whole_number() -> None:
    with pytest.raises(UsageError, match="salt must be a whole number"):
        Prompts("x")  # type: ignore[arg-type]


# shared prefixes


def said(prompts: Prompts, request_id: int, tokens: int, pick: int) -> str:
    [(role, text)] = prompts.messages(request_id, tokens, pick)
    assert role == b"user"
    return text.decode()


@given(salt=st.integers(0, 2**31), tokens=st.integers(1, 300) | st.just(9000), groups=st.integers(1, 4))
@settings(seeded, max_examples=25)
def test_a_group_shares_its_words_and_no_others(salt: int, tokens: int, groups: int) -> None:
    prompts, plain = Prompts(salt, SharedPrefix(groups, tokens)), Prompts(salt)
    prefixes = []
    for group in range(groups):
        texts = [said(prompts, request_id, 9, group) for request_id in (group, 1000 + group)]
        own = [plain.text(request_id, 9) for request_id in (group, 1000 + group)]
        assert [text.split(" ")[tokens:] for text in texts] == [text.split(" ") for text in own]
        one, two = (text.split(" ")[:tokens] for text in texts)
        assert one == two
        prefixes.append(one)
    assert len({prefix[0] for prefix in prefixes}) == groups
    assert all(said(prompts, k, 9, -1) == plain.text(k, 9) for k in range(3))


def test_prefixes_begin_like_no_prompt_and_like_none_of_another_salt() -> None:
    one, two = (Prompts(salt, SharedPrefix(500, 3)) for salt in (12, 13))
    first = [{said(p, 0, 5, group).split()[0] for group in range(500)} for p in (one, two)]
    plain = Prompts(12)
    own = {plain.text(k, 5).split()[0] for k in range(10_000)}
    assert len(first[0]) == 500
    assert not first[0] & first[1]
    assert not first[0] & own


def test_shared_prefixes_that_make_no_sense() -> None:
    bad: Any
    for bad in (0, -1, 1.5, True, "3", None, MOST_TOKENS + 1):
        with pytest.raises(UsageError, match="groups"):
            SharedPrefix(bad, 10)
        with pytest.raises(UsageError, match="tokens"):
            SharedPrefix(2, bad)


# files


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_file_says_what_it_says(tmp_path: Path) -> None:
    odd = 'a "b"\\ \u2028 \U0001f600\n\t'
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": odd, "name": "x"}]
    lines = [{"prompt": odd}, " ", {"messages": talk, "output_tokens": 7, "id": 3}, {"prompt": "x", "messages": None}]
    path = written(tmp_path, *lines)
    file = PromptFile(path)
    assert file.messages[0] == ((b"user", escaped(odd)),)
    assert file.messages[1] == ((b"system", b"Be brief."), (b"user", escaped(odd)))
    assert json.loads(b'"%b"' % file.messages[1][1][1]) == odd
    assert file.output_tokens == (None, 7, None)
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert repr(file) == f"PromptFile({str(path)!r}, prompts=3, sha256={file.sha256[:12]!r})"
    assert file == PromptFile(str(path))
    prompts = Prompts(1, file)
    assert [prompts.messages(k, 0, k) for k in range(3)] == list(file.messages)


def test_characters_that_end_a_line_elsewhere_do_not_here(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'.encode())
    assert [json.loads(b'"%b"' % text) for ((_, text),) in PromptFile(path).messages] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        ("[1]", "JSON object"),
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": ["a"]}, "prompt must be a text"),
        ({"messages": []}, "at least one"),
        ({"messages": "a"}, "list of objects"),
        ({"messages": ["a"]}, "list of objects"),
        ({"messages": [{"role": "user"}]}, "content must be a text"),
        ({"messages": [{"content": "a"}]}, "role must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be a text"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens must be a whole number"),
        ({"prompt": "a", "output_tokens": 1.5}, "output_tokens must be a whole number"),
        ({"prompt": "a", "output_tokens": MOST_TOKENS + 1}, "at most 10,000,000"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, why: str) -> None:
    path = written(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(UsageError, match=why) as caught:
        PromptFile(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    (tmp_path / "empty").write_text("\n \n")
    cases = {"none": "No such file", "latin": "not UTF-8", "empty": "holds no prompt", ".": "directory"}
    for name, why in cases.items():
        with pytest.raises(UsageError, match=why):
            PromptFile(tmp_path / name)
