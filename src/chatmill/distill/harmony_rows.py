"""One SYNTH-like row as a Harmony conversation: its fields by any name, and the JSON that the shards hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from chatmill.core.conversation import checked_text, json_type
from chatmill.errors import ConfigError, RecordError, UnknownNameError

COLUMNS: dict[str, tuple[str, ...]] = {
    "query": ("query",),
    "reasoning": ("reasoning", "synthetic_reasoning"),
    "answer": ("answer", "synthetic_answer"),
    "synth_id": ("synth_id", "id"),
    "language": ("language",),
    "exercise": ("exercise",),
}
"""What is read of a row, and the names it is looked for under; the first that a row has counts."""
SYSTEM_FIELDS = (
    "model_identity", "reasoning_effort", "conversation_start_date", "knowledge_cutoff", "channel_config", "tools",
)  # fmt: skip
"""What a Harmony system message is made of, in the order it is written."""
DEFAULT_OPENING: Mapping[str, Any] = {
    "system": {
        "model_identity": "You are a large language model.",
        "reasoning_effort": "High",
        "knowledge_cutoff": "2024-06",
        "channel_config": {"valid_channels": ["analysis", "commentary", "final"], "channel_required": True},
    },
    "developer": "Answer the user. Reason in the analysis channel first, then give the answer in the final channel.",
}


def opening_messages(opening: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The messages before the query of every conversation: the `system` and `developer` messages that are given.

    They must be ones that openai-harmony renders; it is asked once.
    """
    from chatmill.render.official_harmony import encoding, render_message

    for name in opening:
        if name not in DEFAULT_OPENING:
            raise UnknownNameError("message of the opening", name, list(DEFAULT_OPENING))
    messages: list[dict[str, Any]] = []
    if (system := opening.get("system")) is not None:
        for name in system:
            if name not in SYSTEM_FIELDS:
                raise UnknownNameError("field of a system message", name, list(SYSTEM_FIELDS))
        fields = {name: system[name] for name in SYSTEM_FIELDS if system.get(name) is not None}
        messages.append({"role": "system", "content": [{"type": "system_content", **fields}]})
    if (developer := opening.get("developer")) is not None:
        content = {"type": "developer_content", "instructions": checked_text(developer, "developer")}
        messages.append({"role": "developer", "content": [content]})
    encoding()
    for message in messages:
        try:
            render_message(message)
        except RecordError as error:
            raise ConfigError(f"the {message['role']} message cannot be used: {error}") from None
    return tuple(messages)


@dataclass(frozen=True, slots=True)
class HarmonyRows:
    """Where the values of a row are found, what a row must have, and what it becomes."""

    opening: tuple[dict[str, Any], ...]
    """As `opening_messages` gives it."""
    columns: Mapping[str, tuple[str, ...]]
    metadata: tuple[str, ...] = ()
    id_prefix: str | None = None
    allow_no_reasoning: bool = False

    @classmethod
    def of(cls, opening: Mapping[str, Any], columns: Mapping[str, str], *more: Any) -> Self:
        """`columns` are the names that a user gave in the place of those in `COLUMNS`."""
        for name in columns:
            if name not in COLUMNS:
                raise UnknownNameError("column", name, list(COLUMNS), "Give THIS=YOURS, as answer=response.")
        return cls(opening_messages(opening), COLUMNS | {name: (theirs,) for name, theirs in columns.items()}, *more)

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        columns = {name: list(theirs) for name, theirs in self.columns.items()}
        names = ("id_prefix", "allow_no_reasoning")
        return {"columns": columns, "metadata": list(self.metadata), **{name: getattr(self, name) for name in names}}

    def row(self, record: object, shard: int, number: int) -> tuple[str, ...]:
        """The five values of one output row; a `RecordError` without a place where it cannot be used."""
        if not isinstance(record, Mapping):
            raise RecordError(f"a row must be an object, found {json_type(record)}", code="not_an_object")
        synth_id = self._id(record, shard, number)
        query, answer = self._text(record, "query"), self._text(record, "answer")
        reasoning = self._text(record, "reasoning", optional=self.allow_no_reasoning)
        about = {"synth_id": synth_id} | {name: record[name] for name in self.metadata if record.get(name) is not None}
        messages = [*self.opening, {"role": "user", "content": [{"type": "text", "text": query}]}]
        for channel, text in (("analysis", reasoning), ("final", answer)):
            if text:
                content = [{"type": "text", "text": text}]
                messages.append({"role": "assistant", "content": content, "channel": channel})
        return (
            json.dumps({"messages": messages}, ensure_ascii=False),
            _metadata_json(about),
            synth_id,
            self._text(record, "language", optional=True),
            self._text(record, "exercise", optional=True),
        )

    def known_id(self, record: object, shard: int, number: int) -> str:
        """The id of a row that cannot be used, if it has one."""
        try:
            return self._id(record, shard, number) if isinstance(record, Mapping) else ""
        except RecordError:
            return ""

    def _id(self, record: Mapping[str, Any], shard: int, number: int) -> str:
        if self.id_prefix is not None:
            return f"{self.id_prefix}{shard:02d}-{number:08d}"
        name, value = self._value(record, "synth_id")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise self._missing(record, "synth_id")
        return checked_text(value, name)

    def _value(self, record: Mapping[str, Any], name: str) -> tuple[str, Any]:
        theirs = next((column for column in self.columns[name] if column in record), self.columns[name][0])
        return theirs, record.get(theirs)

    def _text(self, record: Mapping[str, Any], name: str, *, optional: bool = False) -> str:
        column, value = self._value(record, name)
        if value is None or value == "":
            if optional:
                return ""
            raise self._missing(record, name)
        if not isinstance(value, str):
            raise RecordError(f"{column!r} must be a string, found {json_type(value)}", code="field_type", path=column)
        return checked_text(value, column)

    def _missing(self, record: Mapping[str, Any], name: str) -> RecordError:
        column, value = self._value(record, name)
        if column in record:
            hint = "; allow_no_reasoning=true (--set) writes such rows without analysis" if name == "reasoning" else ""
            message = f"{column!r} is {'empty' if value == '' else json_type(value)}; every row needs one{hint}"
        else:
            names, keys = " or ".join(map(repr, self.columns[name])), ", ".join(map(str, list(record)[:12]))
            message = f"the row has no {names}; it has {keys or 'no fields'}. Use --column {name}=YOURS"
        return RecordError(message, code=f"no_{name}", path=column)


def _metadata_json(about: Mapping[str, Any]) -> str:
    try:
        written = json.dumps(about, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"metadata cannot be written as JSON: {error}", code="bad_metadata") from None
    return checked_text(written, "metadata")
