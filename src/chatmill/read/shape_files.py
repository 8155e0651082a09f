"""Shapes of a user's own: a small YAML or JSON file that says what the fields of the records are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill.core.conversation import MESSAGE_FIELDS, ROLE_ALIASES, Role
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.yaml_files import read_mapping

SUFFIXES = (".yaml", ".yml", ".json")
KEYS = ("name", "messages", "role", "content", "roles", "system", "turns", "reasoning", "id", "source", "tools")
OPTIONS = "chat_template_kwargs"
TURN_KEYS = ("key", "role", "optional", "joined")


def read_definition(path: Path) -> dict[str, Any]:
    """What a shape file says, checked and with its name; a `ConfigError` says what is wrong with it."""
    found = read_mapping(path, "shape file", f"some of: {', '.join(KEYS)}", "YAML or JSON")
    try:
        return checked_definition({"name": path.stem, **found})
    except ConfigError as error:
        raise ConfigError(f"shape file {path}: {error}") from None


def decoded_definition(text: str) -> dict[str, Any]:
    """What `definition_text` has written, checked again."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"a shape that begins with a brace must be JSON: {error}") from None
    return checked_definition(found)


def checked_definition(found: Mapping[str, Any]) -> dict[str, Any]:
    """A definition with its defaults, every part of which is of the right type."""
    for key in found:
        if key not in KEYS:
            raise UnknownNameError("key", key, list(KEYS))
    lists = found.get("messages") or []
    lists = [lists] if isinstance(lists, str) else lists
    if not isinstance(lists, list) or not all(isinstance(key, str) and key for key in lists):
        raise ConfigError("'messages' must be the name of a field, or a list of such names")
    turns = [{**turn, "optional": turn.get("optional", False)} for turn in _turns(found.get("turns") or [])]
    if bool(lists) == bool(turns):
        raise ConfigError("name either 'messages', the field with the list of messages, or 'turns', one field for each")
    if turns and all(turn["optional"] or turn.get("joined") for turn in turns):
        raise ConfigError("all 'turns' are optional; a record needs one that is always there")
    if lists and found.get("reasoning"):
        raise ConfigError("'reasoning' is a field beside 'turns'; messages of a list have theirs inside")
    roles = found.get("roles") or {}
    if not isinstance(roles, dict) or not all(isinstance(name, str) for name in roles):
        raise ConfigError("'roles' must be a mapping from your names of roles to these: " + ", ".join(Role))
    defaults = {"role": "role", "content": "content", "system": "", "id": "id", "source": "source", "tools": "tools"}
    defaults["reasoning"] = ""
    names = {key: found.get(key, default) for key, default in defaults.items()}
    for key, name in {**names, "name": found.get("name", "")}.items():
        if not isinstance(name, str) or (not name and key not in ("system", "reasoning")):
            raise ConfigError(f"{key!r} must be the name of a field, found {name!r}")
    _check_apart(
        [
            *lists,
            *(turn["key"] for turn in turns),
            *(names[k] for k in ("system", "reasoning", "id", "source", "tools")),
            OPTIONS,
        ]
    )
    for key in ("role", "content"):
        if names[key] in MESSAGE_FIELDS - {key}:
            raise ConfigError(f"{key!r} cannot be {names[key]!r}, which means something else in a message")
    _check_apart([names["role"], names["content"]])
    spelled = {name.strip().lower(): _role(role).value for name, role in roles.items()}
    return {**names, "name": str(found.get("name", "")), "messages": lists, "turns": turns, "roles": spelled}


def definition_text(definition: Mapping[str, Any]) -> str:
    """A definition as one line of JSON, always the same for the same shape."""
    return json.dumps(definition, ensure_ascii=False, sort_keys=True)


def _turns(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError("'turns' must be a list of mappings with 'key' and 'role'")
    for turn in turns:
        for key in turn:
            if key not in TURN_KEYS:
                raise UnknownNameError("key of a turn", key, list(TURN_KEYS))
        if not isinstance(turn.get("key"), str) or not turn["key"]:
            raise ConfigError("each of 'turns' needs a 'key', the name of its field")
        for key in ("optional", "joined"):
            if not isinstance(turn.get(key, False), bool):
                raise ConfigError(f"{key!r} of the turn {turn['key']!r} must be true or false")
    if turns and turns[0].get("joined"):
        raise ConfigError(
            f"the turn {turns[0]['key']!r} is the first one, and there is none that it could be joined to"
        )
    return [{**turn, "role": _role(turn.get("role")).value} for turn in turns]


def _role(name: object) -> Role:
    role = ROLE_ALIASES.get(name) if isinstance(name, str) else None
    if role is None:
        raise UnknownNameError("role", name, [role.value for role in Role])
    return role


def _check_apart(keys: list[str]) -> None:
    given = [key for key in keys if key]
    for key in given:
        if given.count(key) > 1:
            raise ConfigError(f"the field {key!r} has two meanings")
