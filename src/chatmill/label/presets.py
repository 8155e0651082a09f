"""The policies that come with Chatmill, and the look-up by name or file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from chatmill.core.json_files import read_object
from chatmill.core.kinds import Part, RoleCode
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.errors import ErrorRule
from chatmill.label.policy import Policy, Scope

_OWN = (Part.REASONING, Part.CONTENT, Part.TOOL_CALL, Part.TERMINATOR)
"""The parts an assistant writes itself."""

_SPEAKERS = [role for role in RoleCode if role is not RoleCode.IMAGE]
"""Roles whose tokens may be trained."""


def _assistant(*parts: Part) -> dict[tuple[RoleCode, Part], float]:
    return {(RoleCode.ASSISTANT, part): 1.0 for part in parts}


PRESETS: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        # what the assistant writes, its end-of-turn token included
        Policy(name="assistant", weights=_assistant(*_OWN)),
        # post-training streams: assistant spans with their opening marker
        Policy(name="post_training", weights=_assistant(Part.HEADER, *_OWN)),
        # distillation sets: assistant messages with all their wrappers
        Policy(name="synth_kd", weights=_assistant(Part.HEADER, *_OWN)),
        # what TRL trains: also the newline after the end of a turn
        Policy(name="trl", weights=_assistant(*_OWN, Part.SEPARATOR)),
        # agents: calls that failed are context
        Policy(name="no_errors", weights=_assistant(*_OWN), errors=ErrorRule(fields={"is_error": True})),
        Policy(name="last_turn", weights=_assistant(*_OWN), scope=Scope.LAST_TURN),
        Policy(name="final_only", weights=_assistant(Part.CONTENT, Part.TERMINATOR)),
        Policy(
            name="all",
            weights={(role, part): 1.0 for role in _SPEAKERS for part in Part if part is not Part.PAD},
        ),
        Policy(
            name="per_message",
            weights={(role, part): 1.0 for role in _SPEAKERS if role is not RoleCode.NONE for part in _OWN},
            only_weighted_messages=True,
        ),
    )
}


def find_policy(name: str | os.PathLike[str] | Policy) -> Policy:
    """A policy by preset name, from a .json file (see docs/policies.md), or the policy itself."""
    if isinstance(name, Policy):
        return name
    text = os.fspath(name)
    if text in PRESETS:
        return PRESETS[text]
    if text.endswith(".json"):
        return _from_file(Path(text))
    raise UnknownNameError(
        "policy", text, list(PRESETS), "A policy of your own is a Policy object or the path of a .json file."
    )


def _from_file(path: Path) -> Policy:
    """A policy from `{"weights": {"assistant.content": 1.0, ...}, "scope": "every_turn"}`."""
    if not path.is_file():
        raise ConfigError(f"no policy file {path}")
    data = read_object(path, ConfigError)
    if not isinstance(data.get("weights"), dict):
        raise ConfigError(f'{path} must hold an object with "weights": {{"role.part": weight}}')
    unknown = set(data) - {"name", "weights", "scope", "only_weighted_messages", "errors"}
    if unknown:
        raise ConfigError(f"{path} has unknown keys: {', '.join(sorted(unknown))}")
    only_weighted = data.get("only_weighted_messages", False)
    if not isinstance(only_weighted, bool):
        raise ConfigError(f"{path}: only_weighted_messages must be true or false, found {only_weighted!r}")
    weights = {_role_and_part(key, path): _number(value, key, path) for key, value in data["weights"].items()}
    try:
        policy = Policy(
            name=str(data.get("name", path.stem)),
            weights=weights,
            scope=data.get("scope", Scope.EVERY_TURN),
            only_weighted_messages=only_weighted,
            errors=_errors(data["errors"], path) if data.get("errors") is not None else None,
        )
        policy.table()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return policy


def _errors(given: object, path: Path) -> ErrorRule:
    if isinstance(given, dict) and set(given) <= {"fields", "begins"}:
        fields, begins = given.get("fields", {}), given.get("begins", [])
        texts = [text for text in begins if isinstance(text, str) and text] if isinstance(begins, list) else None
        if isinstance(fields, dict) and texts is not None and len(texts) == len(begins):
            return ErrorRule(fields=fields, begins=tuple(texts))
    raise ConfigError(
        f'{path}: errors must be {{"fields": {{"is_error": true}}, "begins": ["Error:"]}}: fields of results with '
        f"their values, and texts that errors begin with, found {given!r}"
    )


def _number(value: object, key: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: the weight of {key!r} must be a number, found {value!r}")
    return float(value)


def _role_and_part(key: str, path: Path) -> tuple[RoleCode, Part]:
    role, _, part = key.partition(".")
    try:
        return RoleCode[role.upper()], Part[part.upper()]
    except KeyError:
        roles, parts = (", ".join(m.name.lower() for m in e) for e in (RoleCode, Part))
        raise ConfigError(f"{path}: {key!r} is not role.part; roles: {roles}; parts: {parts}") from None
