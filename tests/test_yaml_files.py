"""YAML files: aliases are read, and what cannot be read is one error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.errors import ConfigError
from chatmill.load.config import load_training_config
from chatmill.yaml_files import read_yaml

READERS: dict[str, Callable[[Path], object]] = {
    "recipe": recipe_of,
    "config": load_training_config,
    "plain": read_yaml,
}


@pytest.mark.parametrize("reader", READERS)
def test_deep_nesting_is_one_short_error(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: " + "[\n" * 3000 + "]\n" * 3000)
    with pytest.raises(ConfigError, match=r"r\.yaml.*nested too deeply"):
        READERS[reader](path)


def test_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("base: &base {a: 1, b: [2, 3]}\nmore:\n  <<: *base\n  b: 4\nsame: *base\n")
    assert read_yaml(path) == {"base": {"a": 1, "b": [2, 3]}, "more": {"a": 1, "b": 4}, "same": {"a": 1, "b": [2, 3]}}


@pytest.mark.parametrize("reader", READERS)
def test_a_key_given_twice_is_refused(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("training:\n  seed: 1\n  block_size: 8\n  seed: 2\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:4: 'seed' is given twice, first in line 2"):
        READERS[reader](path)
