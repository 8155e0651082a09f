"""The shapes of records: the table of the known ones, looking one up, and finding the shape of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from chatmill.core.conversation import Role
from chatmill.core.message_parser import HARMONY_PARTS, REASONING_FIELDS, ROLE_ALIASES
from chatmill.errors import RecordError, UnknownNameError
from chatmill.read.agents.branches import AGENT_FORMAT, RECORD_FIELDS
from chatmill.read.agents.registry import AGENT_FORMATS
from chatmill.read.arrow_nulls import has_arrow_nulls
from chatmill.read.atif import ATIF_FIELDS, is_trajectory, trajectory_messages, with_subagents
from chatmill.read.calls import CALL_FIELDS, call_messages, is_call
from chatmill.read.field_maps import FieldMap, map_of, map_text, mapped_shape, suggestion
from chatmill.read.files import Raw, decode_line
from chatmill.read.part_shapes import has_typed_parts
from chatmill.read.preferences import PAIR_FIELDS, chosen_messages, pair_messages, refuse_pairs
from chatmill.read.record_shape import Record, RowRules, Shape
from chatmill.read.synth_rows import ID, TEXT, keep_rules, row_messages, scanned_names


def _listed(record: Record, key: str) -> list[Any]:
    """Return the list in a field, also one that is a text of JSON; empty if there is none."""
    value = record.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = decode_line(value.encode(errors="surrogatepass"), "").value
    return value if isinstance(value, list) else []


def _first_has(record: Record, field: str) -> bool:
    """Return whether the first message of a list has a field."""
    first = [message for key in ("messages", "conversations") for message in _listed(record, key)[:1]]
    return any(isinstance(message, Mapping) and field in message for message in first)


def _is_harmony(record: Record) -> bool:
    """Messages with channels or Harmony contents."""
    return isinstance(record.get("messages_json"), str) or any(
        isinstance(m, Mapping) and ("channel" in m or _has_harmony_part(m.get("content")))
        for m in _listed(record, "messages")
    )


def _has_harmony_part(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") in list(HARMONY_PARTS) for part in content
    )


_SYSTEM = ("system",)


def _turned(name: str, asked: tuple[str, ...], answer: str, *, of_texts: bool = False, history: str = "") -> Shape:
    """Make the shape of a question and an answer that are fields of the record; `of_texts`: never lists of messages."""
    types = str if of_texts else object
    return Shape(
        name=name,
        system=_SYSTEM,
        turns=((Role.USER, asked), (Role.ASSISTANT, (answer,))),
        history=history,
        reasoning=REASONING_FIELDS,
        fits=lambda r: all(key in r and isinstance(r[key], types) for key in (asked[0], answer)),
    )


def _other_format(record: Record, field: str) -> str:
    """Name the format that a record has, for the error about a field of another one that it lacks."""
    found = record_format(record)
    if not found:
        return ""
    return f". This looks like {found}: --shape {found} reads such files, --shape {EACH} those that mix formats"


SHAPES: Mapping[str, Shape] = {
    shape.name: replace(shape, hint=_other_format)
    for shape in (
        Shape(
            name="atif",
            reader=trajectory_messages,
            embedded=with_subagents,
            more_fields=ATIF_FIELDS,
            id="trajectory_id",
            tools="tool_definitions",
            tools_in="agent",
            fits=is_trajectory,
        ),
        Shape(name="calls", reader=call_messages, more_fields=CALL_FIELDS, fits=is_call),
        Shape(name="harmony", lists=("messages",), nested="messages_json", fits=_is_harmony),
        Shape(
            name="sharegpt",
            lists=("conversations", "messages"),
            role="from",
            content="value",
            roles={**ROLE_ALIASES, "function_call": Role.ASSISTANT},
            calls_role="function_call",
            system=_SYSTEM,
            fits=lambda r: _first_has(r, "from"),
        ),
        Shape(
            name="anthropic",
            lists=("messages",),
            system=_SYSTEM,
            typed_parts=True,
            covers="openai",
            fits=lambda r: has_typed_parts(_listed(r, "messages")),
        ),
        Shape(
            name="openai",
            lists=("messages", "conversations"),
            system=_SYSTEM,
            fits=lambda r: isinstance(r.get("messages"), list) or _first_has(r, "role"),
        ),
        _turned("alpaca", ("instruction", "input"), "output", history="history"),
        _turned("prompt_completion", ("prompt",), "completion"),
        _turned("instruction_response", ("instruction", "input", "context"), "response"),
        _turned("question_answer", ("question",), "answer", of_texts=True),
    )
}
"""Known shapes, in the order in which detection tries them."""
PAIRS: Mapping[str, Shape] = {
    "preferences": Shape(
        name="preferences",
        reader=refuse_pairs,
        more_fields=PAIR_FIELDS,
        fits=lambda r: "chosen" in r and "rejected" in r,
    ),
    "chosen": Shape(name="chosen", reader=chosen_messages, more_fields=PAIR_FIELDS),
    "pairs": Shape(name="pairs", pair_reader=pair_messages, more_fields=PAIR_FIELDS),
}
"""Records with two answers: as they are found, and as they are read where the chosen ones, or both, are asked for."""
PREFERENCES = ("chosen", "pairs")
LABELLED = "labelled "
"""What the names of shapes begin with whose records have a label."""
ARROW = "arrow "
"""What the names of shapes begin with whose records came out of Arrow: a field that is null is absent."""
EACH = "each"
"""The name of the format of files whose records have formats of their own."""


def record_format(record: object) -> str:
    """Find the format of one record, whatever its neighbours look like; empty if none fits.

    A field that is null counts as absent, as tables of mixed records have it.
    """
    if not isinstance(record, Mapping):
        return ""
    filled = {key: value for key, value in record.items() if value is not None}
    for name, shape in {**PAIRS, **SHAPES}.items():
        if shape.fits(filled):
            return name
    return ""


def _mixed(name: str, preferences: str | None = None) -> Shape:
    """Make the format in which every record is read in its own one."""

    def choose(record: Record) -> Shape:
        found = record_format(record)
        if not found:
            keys = ", ".join(map(str, list(record)[:12])) or "nothing"
            raise RecordError(f"no known format fits the record; it has: {keys}", code="unknown_shape")
        return find_shape(preferred(found, preferences))

    def embedded(raw: Raw) -> Iterable[Raw]:
        found = record_format(raw.value)
        return find_shape(found).embedded(raw) if found else (raw,)

    return Shape(name=name, choose=choose, embedded=embedded)


MIXED: Mapping[str, Shape] = {
    shape.name: shape for shape in (_mixed(EACH), _mixed(f"{EACH}+chosen", "chosen"), _mixed(f"{EACH}+pairs", "pairs"))
}
"""Files that mix formats: as they are named, and as they are read where chosen answers, or pairs, are asked for."""
SYNTH_KD = Shape(
    name="synth_kd",
    nested=TEXT,
    reader=row_messages,
    id=ID,
    source="",
    tools="",
    functions="",
    options="",
    rules=RowRules(scanned_names, keep_rules),
)
"""Rows of the Harmony distillation dataset; no other file has them, so it is never detected."""

AGENTS: Mapping[str, Shape] = {
    name: Shape(
        name=name,
        lists=("messages",),
        more_fields=RECORD_FIELDS,
        fits=lambda r, name=name: r.get(AGENT_FORMAT) == name,  # type: ignore[misc]
    )
    for name in AGENT_FORMATS
}
"""Files of agents: what is read are the records made of them."""

HINT = "A field map says what other fields are: --shape user=FIELD --shape assistant=FIELD."


def find_shape(name: str | FieldMap) -> Shape:
    """Return a shape by name, or that of a field map, also of one that is written as JSON."""
    return _shape(map_text(name) if isinstance(name, Mapping) else name)


@cache
def _shape(name: str) -> Shape:
    changes: Mapping[str, Mapping[str, Any]] = {ARROW: {"nulls_are_absent": True}, LABELLED: {"labelled": True}}
    for prefix, change in changes.items():
        if name.startswith(prefix):
            shape = _shape(name.removeprefix(prefix))
            return replace(shape, name=prefix + shape.name, definition=prefix + shape.key, **change)
    if name.startswith("{"):
        return mapped_shape(map_text(map_of(name)))
    shapes = {**SHAPES, **PAIRS, **AGENTS, **MIXED, SYNTH_KD.name: SYNTH_KD}
    if name not in shapes:
        raise UnknownNameError("shape", name, [*SHAPES, EACH, *AGENTS], HINT)
    return shapes[name]


def preferred(name: str, preferences: str | None) -> str:
    """Return the shape that records of a shape are read in.

    With `preferences: chosen` pairs give their chosen answer; with `preferences: pairs` they give both, and other
    records have a label.
    """
    if name.startswith(ARROW):
        return ARROW + preferred(name.removeprefix(ARROW), preferences)
    if name == EACH and preferences is not None:
        return f"{EACH}+{preferences}"
    if preferences == "pairs" and name not in PAIRS and name not in MIXED:
        return LABELLED + name
    return preferences if preferences is not None and name == "preferences" else name


def named_format(name: str) -> str:
    """Return the format whose records `preferred` reads in this one."""
    if name.startswith(ARROW):
        return ARROW + named_format(name.removeprefix(ARROW))
    if name in MIXED:
        return EACH
    return "preferences" if name in PREFERENCES else name.removeprefix(LABELLED)


def detect_shape(records: Sequence[object], where: str) -> Shape:
    """Return the shape that most of these first records fit, earlier shapes winning ties; none fits: an error.

    Records that came out of Arrow have it without nulls.
    """
    objects = [record for record in records if isinstance(record, Mapping)]
    shapes = {**AGENTS, **PAIRS, **SHAPES}
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
    return find_shape(ARROW + best) if has_arrow_nulls(objects) else shapes[best]
