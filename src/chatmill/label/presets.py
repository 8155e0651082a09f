"""The policies that come with Chatmill, and the look-up by name or file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from chatmill.core.json_files import read_object
from chatmill.core.kinds import Part, RoleCode
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.errors import ErrorRule
from chatmill.label.policy import Policy, Scope
from chatmill.structs import typed

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
    """Return a policy by preset name, from a .json file (see docs/policies.md), or the policy itself."""
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


def policy_files(name: str | None) -> list[Path]:
    """Return the file that a policy of this name is read from, in a list; none for a preset, or a file that is gone."""
    path = Path(name or "")
    return [path] if name not in PRESETS and path.suffix == ".json" and path.is_file() else []


class _PolicyFile(msgspec.Struct, forbid_unknown_fields=True):
    """`{"weights": {"assistant.content": 1.0, ...}, "scope": "every_turn"}`."""

    weights: dict[str, Any]
    name: str = ""
    scope: Any = Scope.EVERY_TURN
    only_weighted_messages: bool = False
    errors: ErrorRule | None = None


def _from_file(path: Path) -> Policy:
    if not path.is_file():
        raise ConfigError(f"no policy file {path}")
    data: _PolicyFile = typed(_PolicyFile, read_object(path, ConfigError), str(path))
    try:
        policy = Policy(
            name=data.name or path.stem,
            weights={_role_and_part(key): typed(float, value, f"weights.{key}") for key, value in data.weights.items()},
            scope=data.scope,
            only_weighted_messages=data.only_weighted_messages,
            errors=data.errors,
        )
        policy.table()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return policy


def _role_and_part(key: str) -> tuple[RoleCode, Part]:
    role, _, part = key.partition(".")
    try:
        return RoleCode[role.upper()], Part[part.upper()]
    except KeyError:
        roles, parts = (", ".join(m.name.lower() for m in e) for e in (RoleCode, Part))
        raise ConfigError(f"{key!r} is not role.part; roles: {roles}; parts: {parts}") from None
