"""Values checked by their types, and YAML files: what is wrong is one sentence with the path or the line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.errors import ConfigError, FormatError
from chatmill.load.config import load_training_config
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
from chatmill.yaml_files import read_yaml


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 7, 2**63 - 1], [-1, True, 1.0, 2**63, "1", None]),
        (Sha256, ["0" * 64], ["0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", 1]),
        (Xxh128, ["0" * 32, "0123456789abcdef" * 2], ["0" * 31, "0" * 64, "G" * 32, "0" * 32 + "\n", 1]),
        (PlainName, ["a", ".a", "...", "a\nb"], ["", ".", "..", "a/b", "a\\b", "a\0b", "a\n/", 1, None]),
        (NameOrEmpty, ["a", ""], ["..", "/", 1]),
        (SplitName, ["train"], ["", "../x", ".x", "a/b", 1]),
        (InnerPath, ["a", "a/b", ".a/b"], ["", "/a", "a/", "a//b", "a/../b", "./a", "a\\b", 1]),
    ],
)
def test_a_kind_takes_its_own_and_refuses_others(kind: Any, good: list[Any], bad: list[Any]) -> None:
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


@pytest.mark.parametrize("read", [recipe_of, load_training_config, read_yaml])
def test_a_yaml_file_that_cannot_be_read_is_one_short_error(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: " + "[\n" * 3000 + "]\n" * 3000)
    with pytest.raises(ConfigError, match=r"r\.yaml.*nested too deeply"):
        read(path)
    path.write_text("training:\n  seed: 1\n  block_size: 8\n  seed: 2\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:4: 'seed' is given twice, first in line 2"):
        read(path)


def test_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("base: &base {a: 1, b: [2, 3]}\nmore:\n  <<: *base\n  b: 4\nsame: *base\n")
    assert read_yaml(path) == {"base": {"a": 1, "b": [2, 3]}, "more": {"a": 1, "b": 4}, "same": {"a": 1, "b": [2, 3]}}
