"""Reads YAML files, with one clear error for what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"
"""What YAML calls `<<`."""


def read_yaml(path: Path, form: str = "YAML") -> Any:
    """Read the value of a YAML file; `form` is what errors call it: JSON is YAML, too."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that is given twice, of which YAML would take the last without a word."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: dict[str, int] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                    continue
                if key.value in seen:
                    raise ConfigError(f"{path}:{line}: {key.value!r} is given twice, first in line {seen[key.value]}")
                seen[key.value] = line
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not {form}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; take out levels") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_mapping(path: Path, file: str, keys: str, form: str = "YAML") -> dict[str, Any]:
    """Read the mapping in a file; anything else is a `ConfigError`. `file` and `keys` describe it in errors."""
    if not path.is_file():
        raise ConfigError(f"no {file} {path}")
    value = read_yaml(path, form)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a mapping with {keys}")
    return value
