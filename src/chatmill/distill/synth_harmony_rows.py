"""One SYNTH-like row as a Harmony conversation: its fields by any name, and the JSON that the shards hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring as json_string
from typing import Any

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
DEFAULT_SYSTEM: Mapping[str, Any] = {
    "model_identity": "You are a large language model.",
    "reasoning_effort": "High",
    "knowledge_cutoff": "2024-06",
    "channel_config": {"valid_channels": ["analysis", "commentary", "final"], "channel_required": True},
}
DEFAULT_DEVELOPER = "Answer the user. Reason in the analysis channel first, then give the answer in the final channel."


def column_names(given: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """`COLUMNS` with the names that a user gave in the place of its own."""
    for name in given:
        if name not in COLUMNS:
            raise UnknownNameError("column", name, list(COLUMNS), "Give THIS=YOURS, as answer=response.")
    return COLUMNS | {name: (theirs,) for name, theirs in given.items()}


class HarmonyFrame:
    """The JSON around the texts of a conversation: made once, checked once by the official renderer."""

    def __init__(self, *, system: Mapping[str, Any] | None, developer: str | None) -> None:
        opening: list[dict[str, Any]] = []
        if system is not None:
            unknown = [name for name in system if name not in SYSTEM_FIELDS]
            if unknown:
                raise UnknownNameError("field of a system message", unknown[0], list(SYSTEM_FIELDS))
            fields = {name: system[name] for name in SYSTEM_FIELDS if system.get(name) is not None}
            opening.append({"role": "system", "content": [{"type": "system_content", **fields}]})
        if developer is not None:
            content = {"type": "developer_content", "instructions": checked_text(developer, "developer")}
            opening.append({"role": "developer", "content": [content]})
        _refuse_bad_opening(opening)
        written = "".join(json.dumps(message, ensure_ascii=False) + ", " for message in opening)
        self._before_query = f'{{"messages": [{written}{{"role": "user", "content": [{{"type": "text", "text": '

    def messages_json(self, query: str, reasoning: str | None, answer: str) -> str:
        """The conversation, as `json.dumps` of its messages would spell it."""
        user = f"{self._before_query}{json_string(query)}}}]}}, "
        analysis = "" if reasoning is None else f"{_assistant(reasoning, 'analysis')}, "
        return f"{user}{analysis}{_assistant(answer, 'final')}]}}"


def _assistant(text: str, channel: str) -> str:
    content = f'[{{"type": "text", "text": {json_string(text)}}}]'
    return f'{{"role": "assistant", "content": {content}, "channel": "{channel}"}}'


def _refuse_bad_opening(opening: list[dict[str, Any]]) -> None:
    """System and developer message must be ones that openai-harmony renders; it is asked once."""
    from chatmill.render.official_harmony import encoding, render_message

    encoding()
    for message in opening:
        try:
            render_message(message)
        except RecordError as error:
            raise ConfigError(f"the {message['role']} message cannot be used: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """Where the values of a row are found, and what a row must have."""

    columns: Mapping[str, tuple[str, ...]]
    metadata: tuple[str, ...] = ()
    id_prefix: str | None = None
    allow_no_reasoning: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "columns": {name: list(theirs) for name, theirs in self.columns.items()},
            "metadata": list(self.metadata),
            "id_prefix": self.id_prefix,
            "allow_no_reasoning": self.allow_no_reasoning,
        }

    def row(self, record: object, number: int, frame: HarmonyFrame) -> tuple[str, ...]:
        """The five values of one output row; raises `RecordError` with the id of the row."""
        if not isinstance(record, Mapping):
            raise RecordError(f"a row must be an object, found {json_type(record)}", code="not_an_object")
        synth_id = self.synth_id(record, number)
        query, answer = self._text(record, "query"), self._text(record, "answer")
        reasoning = self._text(record, "reasoning", optional=self.allow_no_reasoning)
        assert query is not None
        assert answer is not None
        about = {"synth_id": synth_id} | {name: record[name] for name in self.metadata if record.get(name) is not None}
        return (
            frame.messages_json(query, reasoning, answer),
            _metadata_json(about),
            synth_id,
            self._text(record, "language", optional=True) or "",
            self._text(record, "exercise", optional=True) or "",
        )

    def synth_id(self, record: Mapping[str, Any], number: int) -> str:
        """The id of a row, or one made of its number (counted from 0)."""
        if self.id_prefix is not None:
            return f"{self.id_prefix}{number:08d}"
        name, value = self._value(record, "synth_id")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise RecordError(self._missing(record, "synth_id", name, value), code="no_synth_id", path=name)
        return checked_text(value, name)

    def _value(self, record: Mapping[str, Any], name: str) -> tuple[str, Any]:
        theirs = next((column for column in self.columns[name] if column in record), self.columns[name][0])
        return theirs, record.get(theirs)

    def _text(self, record: Mapping[str, Any], name: str, *, optional: bool = False) -> str | None:
        column, value = self._value(record, name)
        if value is None or value == "":
            if optional:
                return None
            raise RecordError(self._missing(record, name, column, value), code=f"no_{name}", path=column)
        if not isinstance(value, str):
            raise RecordError(f"{column!r} must be a string, found {json_type(value)}", code="field_type", path=column)
        return checked_text(value, column)

    def _missing(self, record: Mapping[str, Any], name: str, column: str, value: object) -> str:
        if column in record:
            found = "is empty" if value == "" else f"is {json_type(value)}"
            hint = "; --allow-no-reasoning writes such rows without analysis" if name == "reasoning" else ""
            return f"{column!r} {found}; every row needs one{hint}"
        keys = ", ".join(map(str, list(record)[:12])) or "no fields"
        return f"the row has no {' or '.join(map(repr, self.columns[name]))}; it has {keys}. Use --column {name}=YOURS"


def _metadata_json(about: Mapping[str, Any]) -> str:
    try:
        return checked_text(json.dumps(about, ensure_ascii=False, allow_nan=False), "metadata")
    except (TypeError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"metadata cannot be written as JSON: {error}", code="bad_metadata") from None
