"""Reads YAML files, with one clear error for what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError


def read_yaml(path: Path, form: str = "YAML") -> Any:
    """Read the value of a YAML file; `form` is what errors call it: JSON is YAML, too."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not {form}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; take out levels") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_mapping(path: Path, what: str, keys: str, form: str = "YAML") -> dict[str, Any]:
    """Read the mapping in a file; anything else is a `ConfigError`. `what` the file is, and its `keys`, in words."""
    if not path.is_file():
        raise ConfigError(f"no {what} {path}")
    found = read_yaml(path, form)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a mapping with {keys}")
    return found
