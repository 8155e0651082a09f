"""The shapes of records: the table of the known ones, looking one up, and finding the shape of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from chatmill.core.conversation import ROLE_ALIASES, Message, Role
from chatmill.core.packages import Addition, additions
from chatmill.errors import ConfigError, RecordError, UnknownNameError
from chatmill.read.field_maps import FieldMap, mapped_shape, suggestion
from chatmill.read.looks import Record, first_message, is_harmony, is_openai, listed
from chatmill.read.nesting import json_inside
from chatmill.read.part_shapes import ANTHROPIC, LLAMAFACTORY_V1
from chatmill.read.preferences import refuse_pairs
from chatmill.read.record_shape import Shape, TurnField
from chatmill.read.shape_files import (
    SUFFIXES,
    checked_definition,
    decoded_definition,
    definition_text,
    read_definition,
)


class Preferences(Shape):
    """Pairs of answers, refused until it is said what is to be trained: see the shape `chosen`."""

    __slots__ = ()

    def messages(self, record: Record) -> tuple[Message, ...]:
        """Always a `RecordError`."""
        return refuse_pairs()


_SYSTEM = TurnField(key="system", role=Role.SYSTEM, optional=True)
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(name="harmony", lists=("messages",), nested="messages_json", fits=is_harmony),
        Shape(
            name="sharegpt",
            lists=("conversations", "messages"),
            role="from",
            content="value",
            roles={**ROLE_ALIASES, "function_call": Role.ASSISTANT},
            calls_role="function_call",
            turns=(_SYSTEM,),
            fits=lambda r: "from" in first_message(r, "conversations") or "from" in first_message(r, "messages"),
        ),
        Shape(
            name="anthropic",
            lists=("messages",),
            turns=(TurnField(key="system", role=Role.SYSTEM, optional=True, or_parts=True),),
            parts=ANTHROPIC,
            covers="openai",
            fits=lambda r: ANTHROPIC.fits(listed(r, "messages")),
        ),
        Shape(
            name="llamafactory_v1",
            lists=("messages",),
            parts=LLAMAFACTORY_V1,
            covers="openai",
            fits=lambda r: LLAMAFACTORY_V1.fits(listed(r, "messages")),
        ),
        Shape(name="openai", lists=("messages", "conversations"), turns=(_SYSTEM,), fits=is_openai),
        Shape(
            name="alpaca",
            turns=(
                _SYSTEM,
                TurnField(key="instruction", role=Role.USER),
                TurnField(key="input", role=Role.USER, joined=True),
                TurnField(key="output", role=Role.ASSISTANT),
            ),
            history="history",
            fits=lambda r: "instruction" in r and "output" in r,
        ),
        Shape(
            name="prompt_completion",
            turns=(
                TurnField(key="prompt", role=Role.USER, or_list=True),
                TurnField(key="completion", role=Role.ASSISTANT, or_list=True),
            ),
            system_beside="system",
            fits=lambda r: "prompt" in r and "completion" in r,
        ),
        Shape(
            name="instruction_response",
            turns=(
                _SYSTEM,
                TurnField(key="instruction", role=Role.USER),
                TurnField(key="input", role=Role.USER, joined=True),
                TurnField(key="context", role=Role.USER, joined=True),
                TurnField(key="response", role=Role.ASSISTANT),
            ),
            fits=lambda r: "instruction" in r and "response" in r,
        ),
        Shape(
            name="question_answer",
            turns=(_SYSTEM, TurnField(key="question", role=Role.USER), TurnField(key="answer", role=Role.ASSISTANT)),
            fits=lambda r: isinstance(r.get("question"), str) and isinstance(r.get("answer"), str),
        ),
    )
}
"""Known shapes, in the order in which detection tries them."""
PAIRS: Mapping[str, Shape] = {
    "preferences": Preferences(name="preferences", pairs=True, fits=lambda r: "chosen" in r and "rejected" in r),
    "chosen": Shape(name="chosen", pairs=True),
}
"""Records with two answers: as they are found, and as they are read where the chosen ones are asked for."""


GROUP = "chatmill.shapes"
"""The entry-point group in which a package names its shapes."""
HINT = (
    "A shape of your own is the path of a .yaml or .json file; a field map is --map user=FIELD --map assistant=FIELD."
)


def find_shape(name: str | FieldMap) -> Shape:
    """A shape by name, by the path of a shape file, what such a file says (`Shape.definition`), or a field map."""
    if isinstance(name, Mapping):
        name = mapped_shape(name)
    if name in SHAPES or name in PAIRS:
        return SHAPES.get(name) or PAIRS[name]
    if name.startswith("{"):
        return _defined(definition_text(decoded_definition(name)))
    if name.lower().endswith(SUFFIXES):
        return _defined(definition_text(read_definition(Path(name))))
    packaged = packaged_shapes()
    if name in packaged:
        return _defined(definition_text(_packaged_definition(packaged[name])))
    raise UnknownNameError("shape", name, [*SHAPES, *packaged], HINT)


def packaged_shapes() -> dict[str, Addition]:
    """The shapes of installed packages: each entry point is what a shape file says, or the path of one."""
    return additions(GROUP, "shape", {*SHAPES, *PAIRS})


def _packaged_definition(addition: Addition) -> dict[str, Any]:
    value = addition.load()
    if isinstance(value, str | os.PathLike):
        value = read_definition(Path(value))
    if not isinstance(value, Mapping):
        raise addition.refused(f"is {type(value).__name__}, not a mapping or the path of a shape file")
    try:
        return checked_definition({**value, "name": addition.name})
    except ConfigError as error:
        raise addition.refused(f"is wrong: {error}") from None


def preferred(name: str, preferences: str | None) -> str:
    """The shape that records of a shape are read in: with `preferences: chosen` pairs give their chosen answer."""
    return "chosen" if preferences == "chosen" and name == "preferences" else name


def shape_key(name: str | FieldMap) -> str:
    """What finds the same shape anywhere and later: a shape file becomes what it says."""
    shape = find_shape(name)
    return shape.definition or shape.name


@lru_cache(maxsize=64)
def _defined(definition: str) -> Shape:
    """The shape of a checked definition; equal ones give one shape."""
    found = json_inside(definition)
    system = [TurnField(key=found["system"], role=Role.SYSTEM, optional=True)] if found["system"] else []
    turns = [
        TurnField(key=turn["key"], role=Role(turn["role"]), optional=turn["optional"], joined=turn.get("joined", False))
        for turn in found["turns"]
    ]
    return Shape(
        name=found["name"],
        lists=tuple(found["messages"]),
        role=found["role"],
        content=found["content"],
        roles={**{name: Role(role) for name, role in found["roles"].items()}, **_but_for(found["roles"])},
        turns=(*system, *turns),
        id=found["id"],
        source=found["source"],
        tools=found["tools"],
        definition=definition,
    )


def _but_for(own: Mapping[str, str]) -> dict[str, Role]:
    """The known spellings of roles that a shape does not give a meaning of its own."""
    return {name: role for name, role in ROLE_ALIASES.items() if name not in own}


def detect_shape(records: Sequence[object], where: str) -> Shape:
    """The shape that most of these first records fit, earlier shapes winning ties; none fits: an error."""
    objects = [record for record in records if isinstance(record, Mapping)]
    shapes = {**PAIRS, **SHAPES}
    counts = {name: sum(shape.fits(record) for record in objects) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if counts[name] and shape.covers:
            counts[name] = max(counts[name], counts[shape.covers])
    best = max(counts, key=lambda name: counts[name])
    if not counts[best]:
        raise RecordError(
            f"cannot tell the shape of the records: {suggestion(records)}. Or name the shape: {', '.join(SHAPES)}.",
            code="unknown_shape",
            where=where,
        )
    return shapes[best]
