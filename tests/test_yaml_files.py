"""YAML files: aliases are fine in small numbers, a bomb of them is one error, before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.errors import ConfigError
from chatmill.load.config import load_training_config
from chatmill.yaml_files import ALIAS_BUDGET, read_yaml

LETTERS = "abcdefghi"
DEEP = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}' if before else 'x'] * 9)}]"
    for before, name in zip(["", *LETTERS], LETTERS, strict=False)
)
WIDE = f"a: &a [{', '.join(['x'] * 1000)}]\nb: [{', '.join(['*a'] * 1000)}]\n"
MERGED = "a0: &a0 {k: v}\n" + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 30))
SELF = "a: &a\n  b: [1, *a]\n"
READERS: dict[str, Callable[[Path], object]] = {
    "recipe": recipe_of,
    "config": load_training_config,
    "plain": read_yaml,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", [DEEP, WIDE, MERGED, SELF], ids=["deep", "wide", "merged", "self"])
def test_a_bomb_of_aliases_is_one_short_error(tmp_path: Path, text: str, reader: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.yaml:\d+: .*alias") as caught:
        READERS[reader](path)
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.mark.parametrize("reader", READERS)
def test_deep_nesting_is_one_short_error(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: " + "[\n" * 3000 + "]\n" * 3000)
    with pytest.raises(ConfigError, match=r"r\.yaml.*nested too deeply"):
        READERS[reader](path)


def test_aliases_within_the_budget_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("base: &base {a: 1, b: [2, 3]}\nmore:\n  <<: *base\n  b: 4\nsame: *base\n")
    assert read_yaml(path) == {"base": {"a": 1, "b": [2, 3]}, "more": {"a": 1, "b": 4}, "same": {"a": 1, "b": [2, 3]}}
    for repeats, fits in ((ALIAS_BUDGET, True), (ALIAS_BUDGET + 1, False)):
        path.write_text(f"a: &a x\nb: [{', '.join(['*a'] * repeats)}]\n")
        if fits:
            assert len(read_yaml(path)["b"]) == repeats
        else:
            with pytest.raises(ConfigError, match=f"more than {ALIAS_BUDGET} values"):
                read_yaml(path)


def test_an_empty_file_is_no_value(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("")
    assert read_yaml(tmp_path / "r.yaml") is None
