"""Values checked by their types: each kind takes its own and refuses others, with the path in one sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chatmill.errors import ConfigError, FormatError
from chatmill.structs import (
    Count,
    InnerPath,
    NameOrEmpty,
    PlainName,
    Sha256,
    SplitName,
    Xxh128,
    fits,
    misspelt,
    typed,
    unknown_key,
)

FITTING: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "count": (Count, [0, 7, 2**63 - 1], [-1, True, 1.0, 2**63, "1", None]),
    "sha256": (Sha256, ["0" * 64], ["0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", 1]),
    "xxh128": (Xxh128, ["0" * 32, "0123456789abcdef" * 2], ["0" * 31, "0" * 64, "G" * 32, "0" * 32 + "\n", 1]),
    "name": (PlainName, ["a", ".a", "...", "a\nb"], ["", ".", "..", "a/b", "a\\b", "a\0b", "a\n/", 1, None]),
    "name or empty": (NameOrEmpty, ["a", ""], ["..", "/", 1]),
    "split": (SplitName, ["train"], ["", "../x", ".x", "a/b", 1]),
    "path": (InnerPath, ["a", "a/b", ".a/b"], ["", "/a", "a/", "a//b", "a/../b", "./a", "a\\b", 1]),
}


@pytest.mark.parametrize("name", FITTING)
def test_types(name: str) -> None:
    kind, good, bad = FITTING[name]
    for value in good:
        assert fits(kind, value), value
        assert typed(kind, value, "file") == value
    for value in bad:
        assert not fits(kind, value), value
        with pytest.raises(FormatError, match=r"^file: key: should be .* \(found .*\)$"):
            typed(kind, value, "file: key", error=FormatError)


class Inner(msgspec.Struct):
    b: Count


class Outer(msgspec.Struct):
    a: list[Inner]
    c: dict[SplitName, Count] = {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "^file: 'a' is missing$"),
        ({"a": {}}, r"^file: a: should be a list \(found \{\}\)$"),
        ({"a": [{"b": 1}, {}]}, r"^file: 'a\[1\].b' is missing$"),
        ({"a": [{"b": "x"}]}, r"^file: a\[0\].b: should be a whole number \(found 'x'\)$"),
        ({"a": [{"b": -1}]}, r"^file: a\[0\].b: should be a whole number of at least 0 \(found -1\)$"),
        ({"a": [], "c": {"k": -1}}, r"^file: c\[...\]: should be a whole number of at least 0$"),
        ({"a": [], "c": {"../k": 1}}, "^file: key in c: should be the plain name of a split$"),
        ([], r"^file: should be a mapping \(found \[\]\)$"),
        (list(range(1000)), r"\.\.\.\)$"),
    ],
)
def test_errors_name_the_path_and_what_is_wanted(value: Any, words: str) -> None:
    typed(Outer, {"a": [{"b": 1, "more": 2}], "other": 3}, "file")
    with pytest.raises(ConfigError, match=words):
        typed(Outer, value, "file")


def test_text_is_converted_only_where_that_is_asked_for() -> None:
    assert typed(Count, "7", "option", text=True) == 7
    assert typed(bool, "False", "option", text=True) is False
    for kind, value in ((Count, "7"), (bool, "true"), (bool, 1)):
        with pytest.raises(ConfigError):
            typed(kind, value, "option")


def test_names_that_are_close() -> None:
    known = ["batch_size", "pad_token_id"]
    assert misspelt("bath_size", known) == misspelt("Batch-Size", known) == "batch_size"
    assert misspelt("patch_size", known) is misspelt("pad_token", known) is None
    assert unknown_key("a.bath", "bath_size", known) == "unknown key 'a.bath', did you mean 'batch_size'?"
    assert unknown_key("x", "x", known) == "unknown key 'x', known: batch_size, pad_token_id"
