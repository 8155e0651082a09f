"""YAML files, read without bombs: aliases may not expand a file to much more than what is written in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError

ALIAS_BUDGET = 10_000
"""Values that the aliases of one file may add, each counted as often as it is repeated."""


def read_yaml(path: Path, form: str = "YAML") -> Any:
    """The value of a YAML file; `ConfigError` for one that cannot be read, is no YAML, or is a bomb of aliases.

    `form` is what errors call it: JSON is YAML, too.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = yaml_node(loader, path)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not {form}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; take out levels") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_mapping(path: Path, what: str, keys: str, form: str = "YAML") -> dict[str, Any]:
    """The mapping in a file; anything else is a `ConfigError`. `what` the file is, and its `keys`, in words."""
    if not path.is_file():
        raise ConfigError(f"no {what} {path}")
    found = read_yaml(path, form)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a mapping with {keys}")
    return found


def yaml_node(loader: Any, path: Path) -> Any:
    """The tree of a loader's one document, before anything is made of it; None for an empty one."""
    node = loader.get_single_node()
    if node is not None:
        _Budget(path).check(node)
    return node


class _Budget:
    """Counts the values that a tree expands to; one shared by aliases is walked once and counted each time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[int, int | None] = {}
        """Values of each node by its identity; None while its children are being counted."""

    def check(self, root: Any) -> None:
        """`ConfigError` where aliases add more than the budget to what is written."""
        if self._size(root) - len(self._sizes) > ALIAS_BUDGET:
            raise self._error(root, f"aliases repeat more than {ALIAS_BUDGET} values")

    def _size(self, node: Any) -> int:
        if id(node) in self._sizes:
            size = self._sizes[id(node)]
            if size is None:
                raise self._error(node, "a value contains itself by an alias")
            return size
        self._sizes[id(node)] = None
        size = 1 + sum(map(self._size, _children(node)))
        self._sizes[id(node)] = size
        return size

    def _error(self, node: Any, fact: str) -> ConfigError:
        return ConfigError(f"{self._path}:{node.start_mark.line + 1}: {fact}; write the values out instead")


def _children(node: Any) -> list[Any]:
    if node.id == "mapping":
        return [child for pair in node.value for child in pair]
    return list(node.value) if node.id == "sequence" else []
