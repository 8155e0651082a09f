"""The messages of many conversations as columns: every field of a message has one, and objects are made on demand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import NOTHING, Message, Role, ToolCall
from chatmill.core.kinds import RoleCode
from chatmill.core.sampled import NUMBER_FIELDS, lists_of, numbers_column
from chatmill.core.texts import OptionalTexts, TextJoiner, Texts
from chatmill.core.tokens import offsets_of, ranges

Ints = NDArray[np.int64]
Objects = NDArray[np.object_]

CODES: Mapping[Role, int] = {role: int(RoleCode[role.name]) for role in Role}
"""The `RoleCode` of each role."""
ROLES: Mapping[int, Role] = {code: role for role, code in CODES.items()}
"""The role of each of these."""
TEXT_FIELDS: Mapping[str, str] = {
    "name": "names",
    "tool_call_id": "tool_call_ids",
    "recipient": "recipients",
    "channel": "channels",
    "content_type": "content_types",
    "finish_reason": "finish_reasons",
}
"""Fields of a message that hold a text, if anything, and their columns."""
_PLAIN = Message(Role.USER, "")[2:]
_NO_OBJECT: Objects = np.array(NOTHING, dtype=np.object_)
_EMPTY_TUPLE: Objects = np.empty((), dtype=np.object_)
_EMPTY_TUPLE[()] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageColumns:
    """M messages, those of one conversation next to each other; every column has one entry per message.

    Columns of fields that no message has take no memory.
    """

    roles: NDArray[np.uint8]
    """`RoleCode` of each message."""
    contents: Texts
    """Empty where a message has none."""
    has_content: NDArray[np.bool_]
    """Whether a message has a content, be it empty; not where it is null or missing."""
    reasoning: Texts
    """Empty where a message has none."""
    has_reasoning: NDArray[np.bool_]
    """Whether a message has reasoning of its own, be it empty."""
    names: OptionalTexts
    tool_call_ids: OptionalTexts
    recipients: OptionalTexts
    channels: OptionalTexts
    content_types: OptionalTexts
    finish_reasons: OptionalTexts
    token_ids: OptionalTexts
    """The ids that a model sampled for an answer, as bytes (`core.sampled`)."""
    prompt_token_ids: OptionalTexts
    logprobs: OptionalTexts
    weights: NDArray[np.float64]
    """Weight of the tokens as targets; NaN where a message says nothing about it."""
    structured: OptionalTexts
    """Harmony system and developer contents, as JSON."""
    parts: Objects
    """For each message, the texts and pictures of one that has pictures."""
    spans: Objects
    """For each message, the `WeightSpan`s of one whose parts have weights."""
    extra: Objects
    """For each message, a mapping of the fields without a meaning here."""
    call_offsets: Ints
    """M + 1 offsets into the calls, whose columns have one entry per call."""
    call_names: Texts
    call_arguments: Texts
    """The arguments as they are written, JSON as a rule."""
    call_ids: OptionalTexts
    call_orders: NDArray[np.uint8]
    """The order of the keys of each call (see `core.conversation.call_order`)."""

    def __len__(self) -> int:
        return len(self.roles)

    @property
    def pictured(self) -> Ints:
        """The messages that have pictures."""
        return _filled_entries(self.parts)

    @property
    def with_spans(self) -> Ints:
        """The messages whose parts have weights of their own."""
        return _filled_entries(self.spans)

    @property
    def call_counts(self) -> Ints:
        """Calls of each message."""
        return np.diff(self.call_offsets)

    @classmethod
    def of(cls, messages: Sequence[Message]) -> MessageColumns:
        """Messages as columns; `UnicodeEncodeError` where a text has no UTF-8 form."""
        count = len(messages)
        special = [(place, message) for place, message in enumerate(messages) if message[2:] != _PLAIN]
        calls = [call for _, message in special for call in message.tool_calls]
        counts = np.zeros(count, dtype=np.int64)
        counts[[place for place, _ in special]] = [len(message.tool_calls) for _, message in special]
        has_content = np.ones(count, dtype=np.bool_)
        has_content[[place for place, message in special if not message.has_content]] = False
        rare = {
            name: _sparse_texts(count, [(place, getattr(message, name)) for place, message in special])
            for name in ("reasoning", *TEXT_FIELDS)
        }
        harmony = [(place, _json(message.structured)) for place, message in special]
        return cls(
            roles=np.array([CODES[message.role] for message in messages], dtype=np.uint8),
            contents=Texts.of([message.content for message in messages]),
            has_content=has_content,
            reasoning=rare["reasoning"].texts,
            has_reasoning=rare["reasoning"].present,
            **{column: rare[name] for name, column in TEXT_FIELDS.items()},
            **{
                name: numbers_column(count, [(place, getattr(message, name)) for place, message in special], dtype)
                for name, dtype in NUMBER_FIELDS.items()
            },
            weights=sparse_weights(count, {place: m.weight for place, m in special if m.weight is not None}),
            structured=_sparse_texts(count, harmony),
            parts=sparse_objects(count, {place: m.parts for place, m in special if m.parts}, _EMPTY_TUPLE),
            spans=sparse_objects(count, {place: m.spans for place, m in special if m.spans}, _EMPTY_TUPLE),
            extra=sparse_objects(count, {place: message.extra for place, message in special if message.extra}),
            call_offsets=offsets_of(counts),
            call_names=Texts.of([call.name for call in calls]),
            call_arguments=Texts.of([call.arguments for call in calls]),
            call_ids=OptionalTexts.of([call.id for call in calls]),
            call_orders=np.array([call.order for call in calls], dtype=np.uint8),
        )

    @classmethod
    def plain(cls, roles: NDArray[np.uint8], contents: Texts) -> MessageColumns:
        """Messages that are nothing but a role and a content."""
        bare = _BARE.take(np.zeros(len(roles), dtype=np.int64))
        return replace(bare, roles=roles, contents=contents)

    def text_columns(self) -> list[Texts | OptionalTexts]:
        """Return all columns of texts."""
        columns = (getattr(self, field.name) for field in fields(self))
        return [column for column in columns if isinstance(column, Texts | OptionalTexts)]

    def objects(self, first: int, last: int) -> tuple[Message, ...]:
        """Messages `first` up to `last - 1` as objects."""
        part = slice(first, last)
        has_reasoning, weights = self.has_reasoning[part].tolist(), self.weights[part].tolist()
        reasoning = self.reasoning[part] if any(has_reasoning) else [""] * (last - first)
        rows = zip(
            [ROLES[code] for code in self.roles[part].tolist()],
            self.contents[part],
            [text if there else None for text, there in zip(reasoning, has_reasoning, strict=True)],
            self._calls(first, last),
            self.tool_call_ids[part],
            self.names[part],
            self.recipients[part],
            self.channels[part],
            self.content_types[part],
            [None if weight != weight else weight for weight in weights],
            [None if text is None else json.loads(text) for text in self.structured[part]],
            self.extra[part].tolist(),
            self.has_content[part].tolist(),
            self.finish_reasons[part],
            *(lists_of(getattr(self, name), part, dtype) for name, dtype in NUMBER_FIELDS.items()),
            self.parts[part].tolist(),
            self.spans[part].tolist(),
            strict=True,
        )
        return tuple([Message._make(row) for row in rows])

    def _calls(self, first: int, last: int) -> list[tuple[ToolCall, ...]]:
        """Return the calls of these messages."""
        offsets = self.call_offsets[first : last + 1].tolist()
        begin = offsets[0]
        if begin == offsets[-1]:
            return [()] * (last - first)
        part = slice(begin, offsets[-1])
        texts = (self.call_names[part], self.call_arguments[part], self.call_ids[part])
        calls = [ToolCall._make(row) for row in zip(*texts, self.call_orders[part].tolist(), strict=True)]
        return [tuple(calls[a - begin : b - begin]) for a, b in itertools.pairwise(offsets)]

    def take(self, places: Ints) -> MessageColumns:
        """Return the messages at these places, in that order."""
        counts = self.call_counts[places]
        calls = ranges(self.call_offsets[places], counts)
        columns: dict[str, Any] = {}
        for field in fields(self):
            column, chosen = getattr(self, field.name), calls if field.name in _OF_CALLS else places
            is_text = isinstance(column, Texts | OptionalTexts)
            columns[field.name] = column.take(chosen) if is_text else taken(column, chosen)
        columns["call_offsets"] = offsets_of(counts)
        return MessageColumns(**columns)

    @classmethod
    def joined(cls, parts: Sequence[MessageColumns], texts: TextJoiner) -> MessageColumns:
        """Return the messages of several batches, concatenated."""
        columns = {
            field.name: joined_columns([getattr(part, field.name) for part in parts], texts) for field in fields(cls)
        }
        columns["call_offsets"] = offsets_of(np.concatenate([part.call_counts for part in parts]))
        return cls(**columns)


_OF_CALLS = ("call_names", "call_arguments", "call_ids", "call_orders")


def joined_columns(parts: Sequence[Any], texts: TextJoiner) -> Any:
    """Return the columns of one field, concatenated; those that all repeat one object go on repeating it."""
    if all(isinstance(part, OptionalTexts) and part.is_none for part in parts):
        return OptionalTexts.none(sum(map(len, parts)))
    if isinstance(parts[0], Texts | OptionalTexts):
        return texts.join(parts)
    filled = [part for part in parts if len(part)]
    if not filled or any(part.strides[0] or part[0] is not filled[0][0] for part in filled):
        return np.concatenate(parts)
    return np.broadcast_to(filled[0][:1], sum(map(len, parts)))


def _filled_entries(column: Objects) -> Ints:
    """Return the messages that have something in a column of tuples."""
    if not len(column) or not column.strides[0]:  # all are the one empty tuple
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.fromiter(map(bool, column.tolist()), dtype=np.bool_, count=len(column)))


def taken(column: NDArray[Any], places: Ints) -> NDArray[Any]:
    """Return the entries at these places; a column that repeats one entry goes on repeating it."""
    repeats = len(column) and not column.strides[0]
    return np.broadcast_to(column[:1], len(places)) if repeats else column[places]


def _sparse_texts(count: int, entries: Sequence[tuple[int, str | None]]) -> OptionalTexts:
    """Make a column of texts from (place, text) entries; all others are missing."""
    there = [(place, text) for place, text in entries if text is not None]
    places = np.array([place for place, _ in there], dtype=np.int64)
    return OptionalTexts.sparse(count, places, Texts.of([text for _, text in there]))


def _json(value: object) -> str | None:
    return None if value is None else json.dumps(value)


def sparse_weights(count: int, entries: Mapping[int, float]) -> NDArray[np.float64]:
    """Make a column of weights from those of some places; all others are NaN."""
    if not entries:
        return np.broadcast_to(np.float64(np.nan), count)
    weights = np.full(count, np.nan)
    weights[list(entries)] = list(entries.values())
    return weights


def sparse_objects(count: int, entries: Mapping[int, Any], nothing: Objects = _NO_OBJECT) -> Objects:
    """Make a column of objects from those of some places; all others are `nothing`."""
    if not entries:
        return np.broadcast_to(nothing, count)
    objects = np.broadcast_to(nothing, count).copy()
    for place, value in entries.items():
        objects[place] = value
    return objects


_BARE = MessageColumns.of([Message(Role.USER, "")])
"""A message that is nothing but a role and a content."""
