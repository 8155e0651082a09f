"""One SYNTH-like row as a Harmony conversation: its fields by any name, and the JSON that the shards hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chatmill.core.message_parser import checked_text, json_type
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
OPTIONAL = ("language", "exercise")
TEXTS = ("query", "answer", "reasoning", *OPTIONAL)
"""The texts of a row, in the order in which they are looked for."""
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

    _check_names("message of the opening", opening, DEFAULT_OPENING)
    contents: dict[str, dict[str, Any]] = {}
    if (system := opening.get("system")) is not None:
        _check_names("field of a system message", system, SYSTEM_FIELDS)
        fields = {name: system[name] for name in SYSTEM_FIELDS if system.get(name) is not None}
        contents["system"] = {"type": "system_content", **fields}
    if (developer := opening.get("developer")) is not None:
        contents["developer"] = {"type": "developer_content", "instructions": checked_text(developer, "developer")}
    encoding()
    messages = tuple({"role": role, "content": [content]} for role, content in contents.items())
    for message in messages:
        try:
            render_message(message)
        except RecordError as error:
            raise ConfigError(f"the {message['role']} message cannot be used: {error}") from None
    return messages


def all_columns(columns: Mapping[str, str]) -> dict[str, list[str]]:
    """`COLUMNS` with the names that a user gave in the place of those there."""
    _check_names("column", columns, COLUMNS, "Give THIS=YOURS, as answer=response.")
    return {name: [columns[name]] if name in columns else list(ours) for name, ours in COLUMNS.items()}


def _check_names(kind: str, names: Iterable[str], allowed: Iterable[str], hint: str = "") -> None:
    for name in names:
        if name not in allowed:
            raise UnknownNameError(kind, name, list(allowed), hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyRows:
    """Where the values of a row are found, what a row must have, and what it becomes."""

    opening: tuple[dict[str, Any], ...]
    """As `opening_messages` gives it."""
    columns: Mapping[str, Sequence[str]]
    allow_no_reasoning: bool = False

    def row(self, record: object) -> tuple[str, ...]:
        """The five values of one output row; a `RecordError` without a place if it cannot be used."""
        if not isinstance(record, Mapping):
            raise RecordError(f"a row must be an object, found {json_type(record)}", code="not_an_object")
        synth_id = self._id(record)
        try:
            texts = {name: self._text(record, name) for name in TEXTS}
        except RecordError as error:
            error.record_id = synth_id
            raise
        said = (("analysis", texts["reasoning"]), ("final", texts["answer"]))
        messages = [*self.opening, {"role": "user", "content": [{"type": "text", "text": texts["query"]}]}]
        for channel, text in said:
            if text:
                content = [{"type": "text", "text": text}]
                messages.append({"role": "assistant", "content": content, "channel": channel})
        written = json.dumps({"messages": messages}, ensure_ascii=False)
        about = json.dumps({"synth_id": synth_id}, ensure_ascii=False)
        return written, about, synth_id, texts["language"], texts["exercise"]

    def _id(self, record: Mapping[str, Any]) -> str:
        name, value = self._value(record, "synth_id")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise self._missing(record, "synth_id")
        return checked_text(value, name)

    def _value(self, record: Mapping[str, Any], name: str) -> tuple[str, Any]:
        theirs = next((column for column in self.columns[name] if column in record), self.columns[name][0])
        return theirs, record.get(theirs)

    def _text(self, record: Mapping[str, Any], name: str) -> str:
        column, value = self._value(record, name)
        if value is None or value == "":
            if name in OPTIONAL or (name == "reasoning" and self.allow_no_reasoning):
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
