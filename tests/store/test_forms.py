"""The form of JSON files: each kind of value takes its own and refuses others, with the place in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from chatmill.errors import FormatError
from chatmill.store.forms import (
    COUNT,
    FILE,
    FLAG,
    NUMBER,
    PATH,
    SHA256,
    SPLIT,
    TEXT,
    TEXTS,
    XXH128,
    Leaf,
    Maybe,
    check_form,
)
from tests.hashes import file_entry

FITTING: dict[str, tuple[Leaf, list[Any], list[Any]]] = {
    "count": (COUNT, [0, 7, 2**63 - 1], [-1, True, 1.0, 2**63, "1", None]),
    "number": (NUMBER, [0, -1, 0.5], [True, "0", None]),
    "flag": (FLAG, [True, False], [0, 1, None]),
    "text": (TEXT, ["", "a"], [1, None]),
    "texts": (TEXTS, [[], ["a"]], ["a", [1], None]),
    "sha256": (SHA256, ["0" * 64], ["0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", 1]),
    "xxh128": (XXH128, ["0" * 32, "0123456789abcdef" * 2], ["0" * 31, "0" * 64, "G" * 32, "0" * 32 + "\n", 1]),
    "split": (SPLIT, ["train"], ["", "../x", ".x", 1]),
    "path": (PATH, ["a", "a/b"], ["", "/a", "a/../b", 1]),
}


@pytest.mark.parametrize("name", FITTING)
def test_leaves(name: str) -> None:
    form, good, bad = FITTING[name]
    for value in good:
        check_form({"key": value}, {"key": form}, "file")
        check_form({"key": None}, {"key": Maybe(form)}, "file")
    for value in bad:
        with pytest.raises(FormatError, match=r"^file: key is .* is needed: the file was edited or damaged$"):
            check_form({"key": value}, {"key": form}, "file")


def test_the_record_of_a_file() -> None:
    check_form({"a": file_entry(b"x")}, {TEXT: FILE}, "file")
    for record, words in (
        ({"bytes": 1}, r"file lacks \['a'\]\.xxh128"),
        ({"bytes": 1, "sha256": "0" * 64}, r"file lacks \['a'\]\.xxh128"),
        ({"bytes": 1, "xxh128": "0" * 64}, r"\['a'\]\.xxh128 is '0+'; an xxh128 of 32 hex digits is needed"),
        (["x"], "an object is needed"),
    ):
        with pytest.raises(FormatError, match=words):
            check_form({"a": record}, {TEXT: FILE}, "file")


def test_places_and_missing_keys() -> None:
    form = {"a": [{"b": COUNT}], "c?": {TEXT: COUNT}}
    check_form({"a": [{"b": 1, "more": 2}], "other": 3}, form, "file")
    for value, words in (
        ({}, "file lacks a:"),
        ({"a": {}}, "file: a is {}; a list is needed"),
        ({"a": [{"b": 1}, {}]}, r"file lacks a\[1\]\.b:"),
        ({"a": [{"b": "x"}]}, r"file: a\[0\]\.b is 'x'"),
        ({"a": [], "c": []}, r"file: c is \[\]; an object is needed"),
        ({"a": [], "c": {"k": -1}}, r"file: c\['k'\] is -1"),
        ([], r"file: the whole is \[\]; an object is needed"),
    ):
        with pytest.raises(FormatError, match=words):
            check_form(value, form, "file")
    with pytest.raises(FormatError, match=r"\.\.\.; a text is needed"):
        check_form(list(range(1000)), TEXT, "file")
