"""Rows of Parquet straight into columns, by the columns that Arrow has; what is not sure is read row by row.

A text column of Arrow is a buffer of UTF-8 with offsets, which is what `Texts` is: no text is copied, and no object is
made. Rows whose meaning is not certain are left to `read.record_shape`, with its checks and its errors. For the others
both readers give the same conversation, but for the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from chatmill.core.conversation import Role, call_order
from chatmill.core.conversations import Conversations, Sources, holds
from chatmill.core.message_parser import MAX_WEIGHT, MIN_WEIGHT, REASONING_FIELDS
from chatmill.core.messages import CODES, TEXT_FIELDS, MessageColumns, Objects, sparse_objects
from chatmill.core.native.scan import MessageField, RecordField, scan_texts
from chatmill.core.part_training import speaks_of_training
from chatmill.core.sampled import NUMBER_FIELDS
from chatmill.core.texts import OptionalTexts, TextJoiner, Texts
from chatmill.core.tokens import offsets_of
from chatmill.read.columns import (
    MESSAGE_MEANINGS,
    PASSED_FIELDS,
    Read,
    completed,
    has_plain_turns,
    nested_names,
    read_one_by_one,
    record_meanings,
    with_kept_fields,
)
from chatmill.read.files import Raw, batch_records, without_nulls
from chatmill.read.pair_columns import PairPart, margins, paired
from chatmill.read.preferences import ASKED, CHOSEN, JOINED, LISTS, MARGIN_FIELDS, REJECTED, SYSTEM
from chatmill.read.record_shape import Shape, options_text, tools_text
from chatmill.read.shapes import find_shape
from chatmill.read.unknown_fields import message_fields

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class _NotSureError(Exception):
    """A column has a type that only the full reader knows."""


def read_rows(
    batch: pa.RecordBatch, *, first: int, path: str, source: str, shape: Shape, kept: Collection[str] = frozenset()
) -> Read:
    """Return the conversations of the rows of an Arrow batch; `first` is the number of the first one in its file.

    Of the fields of messages that mean nothing here, those with a name in `kept` are kept.
    """
    numbers = np.arange(first, first + batch.num_rows)
    if shape.choose is not None:
        return read_one_by_one(batch_records([batch], path, numbers.tolist()), shape, source)
    try:
        columns = _ArrowRows(batch, shape, source, [f"{path}:row {number}" for number in numbers.tolist()], kept)
        found, sure = columns.conversations()
    except (_NotSureError, pa.ArrowInvalid):  # the latter where a text is not UTF-8
        return read_one_by_one(batch_records([batch], path, numbers.tolist()), shape, source)

    def raws(rows: list[int]) -> Iterator[tuple[int, Raw]]:
        some = [batch.take(pa.array(rows))] if rows else []
        return zip(rows, batch_records(some, path, numbers[rows].tolist()), strict=True)

    return completed(found, sure, raws, columns.unused(), shape, lambda number: source)


class _ArrowRows:
    """The columns of one Arrow batch under the names of a shape; notes which rows are sure."""

    def __init__(
        self, batch: pa.RecordBatch, shape: Shape, source: str, wheres: list[str], kept: Collection[str] = frozenset()
    ) -> None:
        self._batch, self._shape, self._source, self._wheres = batch, shape, source, wheres
        self._kept = kept
        self._sure = np.ones(batch.num_rows, dtype=np.bool_)
        self._message_fields: list[tuple[str, Ints]] = []
        """Unknown fields of messages, and the rows that have something in them."""
        self._fields = _InternedFields()

    def conversations(self) -> tuple[Conversations, Flags]:
        """Return all rows, and which of them may be taken."""
        are_pairs = self._shape is find_shape("pairs")
        have_turns = has_plain_turns(self._shape)
        is_named = self._shape.is_plain and self._shape.lists and not self._shape.typed_parts
        if not (are_pairs or have_turns or is_named) and self._shape.rules is None:
            raise _NotSureError
        self._doubt_rare_fields()
        if are_pairs:
            chosen = self._said(CHOSEN, Role.ASSISTANT)
            messages = chosen.messages
            offsets = chosen.offsets
        elif have_turns:
            messages, offsets = self._turns()
        else:
            messages, offsets = self._messages()
        found = Conversations(
            messages=messages,
            offsets=offsets,
            ids=self._ids(),
            sources=self._sources(),
            tools=self._json(self._shape.tools, tools_text),
            options=self._json(self._shape.options, options_text),
            wheres=self._wheres,
            metadata=sparse_objects(self._batch.num_rows, {}),
        )
        if are_pairs:
            given, are_sure = margins(self._scores())
            rejected = self._said(REJECTED, Role.ASSISTANT)
            found, parts_at_answers = paired(replace(found, margins=given), chosen, rejected, self._prompts())
            self._sure &= are_sure & parts_at_answers
        return found, self._sure

    def _doubt_rare_fields(self) -> None:
        """Rows with functions, images and the like, or an answer that people did not like are read one by one."""
        for name, meaning in record_meanings(self._shape).items():
            is_rare = meaning is RecordField.EMPTY and name != self._shape.nested
            if is_rare and (column := self._column(name)) is not None:
                self._sure &= ~_held(column)

    def unused(self) -> Iterator[tuple[str, Ints]]:
        """Columns that mean nothing, and the rows that have something in them."""
        known = self._shape.fields
        for name, column in zip(self._batch.schema.names, self._batch.columns, strict=True):
            if name not in known:
                yield name, np.flatnonzero(_held(column))
        rows_by_name: dict[str, list[Ints]] = {}
        for name, rows in self._message_fields:
            rows_by_name.setdefault(name, []).append(rows)
        for name, parts in rows_by_name.items():
            yield f"messages[].{name}", np.unique(np.concatenate(parts))

    def _column(self, name: str) -> pa.Array | None:
        """Return a column with something in it; None if there is none."""
        places = self._batch.schema.get_all_field_indices(name) if name else []
        if len(places) > 1:
            raise _NotSureError
        column = _decoded(self._batch.column(places[0])) if places else None
        return None if column is None or column.null_count == len(column) else column

    def _said(self, name: str, role: Role) -> PairPart:
        """Return the messages of a side of each pair, or of its prompt: a list, or a text that somebody says."""
        column = self._column(name)
        if column is None:
            raise _NotSureError
        if not _is_text(column.type):
            messages, offsets, unknown = self._list(column)
            if name != REJECTED:  # whose fields are not counted
                self._count_fields(unknown, offsets)
            return PairPart(messages, offsets, self._field_ids(unknown, offsets))
        texts = texts_of(column)
        if role is Role.ASSISTANT:
            self._sure &= texts.present
        said = np.flatnonzero(texts.present if role is Role.ASSISTANT else texts.lengths > 0)
        roles = np.full(len(said), CODES[role], dtype=np.uint8)
        held = np.bincount(said, minlength=len(texts)).astype(np.int64)
        return PairPart(MessageColumns.plain(roles, texts.texts.take(said)), offsets_of(held), np.zeros_like(said))

    def _prompts(self) -> PairPart:
        """Return what pairs answer, after their system texts."""
        for name in (*LISTS, *JOINED):
            if (column := self._column(name)) is not None and not (name in LISTS and self._repeats_chosen(column)):
                self._sure &= ~_flags(column.is_valid())
        given = [name for name in ASKED if self._column(name) is not None]
        if len(given) > 1:
            raise _NotSureError
        none = MessageColumns.plain(np.empty(0, dtype=np.uint8), OptionalTexts.none(0).texts)
        nothing = np.zeros(self._batch.num_rows + 1, dtype=np.int64)
        found = self._said(given[0], Role.USER) if given else PairPart(none, nothing, nothing[:0])
        system = self._column(SYSTEM)
        if system is None:
            return found
        texts = texts_of(system).texts
        messages, offsets = _after_systems(texts, found.messages, found.offsets)
        of_system = np.repeat(found.offsets[:-1], texts.lengths > 0)
        return PairPart(messages, offsets, np.insert(found.fields, of_system, 0))

    def _field_ids(self, unknown: Mapping[str, pa.Array], offsets: Ints) -> Ints:
        """Intern the unknown fields of messages; rows with lists or objects in them are not sure."""
        ids, doubtful = self._fields.ids(unknown, int(offsets[-1]))
        owners = np.searchsorted(offsets, np.flatnonzero(doubtful), side="right") - 1
        self._sure[owners] = False
        return ids

    def _repeats_chosen(self, column: pa.Array) -> bool:
        """Return whether a column of lists is the column of the chosen conversations once more."""
        chosen = self._column(CHOSEN)
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        return is_list and chosen is not None and bool(column.equals(chosen))

    def _scores(self) -> NDArray[np.float64]:
        """Read the scores of pairs: a column for each of `MARGIN_FIELDS`, NaN for none."""
        scores = np.full((self._batch.num_rows, len(MARGIN_FIELDS)), np.nan)
        for number, name in enumerate(MARGIN_FIELDS):
            column = self._column(name)
            if column is not None:
                scores[:, number] = _numbers(column)
                self._sure &= ~(np.isnan(scores[:, number]) & _flags(column.is_valid()))
        return scores

    def _turns(self) -> tuple[MessageColumns, Ints]:
        """Return messages that are columns of texts."""
        shape = self._shape
        turns: list[MessageColumns] = []
        for role, fields in shape.turns:
            texts = self._joined(fields)
            self._sure &= texts.present
            roles = np.full(len(texts), CODES[role], dtype=np.uint8)
            turns.append(MessageColumns.plain(roles, texts.texts))
        for name in shape.reasoning:
            if (column := self._column(name)) is not None:
                self._sure &= ~_flags(column.is_valid())

        rows = self._batch.num_rows
        messages = MessageColumns.joined(turns, TextJoiner(text for turn in turns for text in turn.text_columns()))
        messages = messages.take(np.arange(rows * len(turns)).reshape(-1, rows).T.ravel())
        offsets = np.arange(rows + 1) * len(turns)
        system = self._column(shape.system[0]) if shape.system else None
        return (messages, offsets) if system is None else _after_systems(texts_of(system).texts, messages, offsets)

    def _joined(self, fields: Sequence[str]) -> OptionalTexts:
        """Return a column of texts, and the others after it where they are not empty, with line feeds between them."""
        first, *others = [self._column(name) for name in fields]
        if first is None:
            raise _NotSureError
        texts = texts_of(first)
        filled = []
        for column in others:
            if column is not None:
                texts_of(column)  # which refuses what is no text
                filled.append(pc.if_else(pa.array(_held(column)), column, None))
        if not filled:
            return texts
        if any(column.type != first.type for column in filled):
            raise _NotSureError
        joined = pc.binary_join_element_wise(first, *filled, "\n", null_handling="skip")
        return texts_of(pc.if_else(first.is_valid(), joined, None), check=False)

    def _messages(self) -> tuple[MessageColumns, Ints]:
        shape = self._shape
        nested = self._column(shape.nested)
        if nested is not None:
            if any(self._column(key) is not None for key in shape.lists):
                raise _NotSureError  # a second list, which counts as not used
            return self._nested(nested)
        lists = [column for key in shape.lists if (column := self._column(key)) is not None]
        if len(lists) != 1:
            raise _NotSureError
        listed, offsets, unknown = self._list(lists[0])
        self._count_fields(unknown, offsets)
        column = self._column(shape.system[0]) if shape.system else None
        return (listed, offsets) if column is None else _after_systems(texts_of(column).texts, listed, offsets)

    def _nested(self, column: pa.Array) -> tuple[MessageColumns, Ints]:
        """Messages in texts of JSON."""
        texts = texts_of(column, check=False)  # the scanner looks at every byte
        offsets = np.append(texts.starts, texts.starts[-1:] + np.maximum(texts.lengths[-1:], 0))
        if (np.diff(offsets) != np.maximum(texts.lengths, 0)).any():
            raise _NotSureError
        rules = self._shape.rules
        scanned = scan_texts(texts.data, offsets, nested_names() if rules is None else rules.names())
        self._sure &= scanned.read & texts.present
        if rules is None:
            self._message_fields += message_fields([scanned], texts.data, "content")
        else:
            self._sure &= rules.keep(scanned.messages, scanned.offsets) & (self._ids().lengths > 0)
        return with_kept_fields(scanned, texts.data, self._kept), scanned.offsets

    def _list(self, column: pa.Array) -> tuple[MessageColumns, Ints, dict[str, pa.Array]]:
        """Return a list of structs for each row, and the unknown fields of these."""
        self._sure &= _flags(column.is_valid())
        column.validate(full=True)
        items, offsets = _items(column)
        self._sure &= np.diff(offsets) > 0
        messages, doubtful, unknown = _struct_messages(items, self._shape)
        owners = np.searchsorted(offsets, np.flatnonzero(doubtful), side="right") - 1
        self._sure[owners] = False
        kept = {name: field for name, field in unknown.items() if name in self._kept}
        return replace(messages, extra=_extras(kept, len(messages))), offsets, unknown

    def _count_fields(self, unknown: Mapping[str, pa.Array], offsets: Ints) -> None:
        """Note which rows have something in the unknown fields of their messages."""
        for name, field in unknown.items():
            owners = np.searchsorted(offsets, np.flatnonzero(_held(field)), side="right") - 1
            self._message_fields.append((name, np.unique(owners)))

    def _ids(self) -> Texts:
        column = self._column(self._shape.id)
        if column is None:
            return OptionalTexts.none(self._batch.num_rows).texts
        if pa.types.is_integer(column.type):
            return Texts.of(["" if number is None else str(number) for number in column.to_pylist()])
        return texts_of(column).texts

    def _sources(self) -> Sources:
        column = self._column(self._shape.source)
        if column is None:
            return Sources((self._source,), np.zeros(self._batch.num_rows, dtype=np.int64))
        names, which = _distinct(column)
        return Sources.of([*(name or self._source for name in names), self._source], which)  # -1 is a null

    def _json(self, key: str, written: Callable[[Any], str | None]) -> Texts:
        """Return a column of values as JSON texts; rows whose value is refused are not sure."""
        column, count = self._column(key), self._batch.num_rows
        if column is None:
            return OptionalTexts.none(count).texts
        if _is_text(column.type):
            names, which = _distinct(column)
            texts = list(map(written, names))
        else:
            rows = np.flatnonzero(_flags(column.is_valid()))
            texts = [written(without_nulls(value)) for value in column.take(pa.array(rows)).to_pylist()]
            which = np.full(count, -1, dtype=np.int64)
            which[rows] = np.arange(len(rows))
        refused = np.array([text is None for text in [*texts, ""]])
        self._sure &= ~refused[which]  # -1 is the last one, which is empty
        return Texts.of([*(text or "" for text in texts), ""]).take(which % (len(texts) + 1))


class _InternedFields:
    """Ids of the unknown fields of messages, over all lists of a batch: equal ids mean equal fields."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def ids(self, unknown: Mapping[str, pa.Array], count: int) -> tuple[Ints, Flags]:
        """Return an id for each of `count` messages, 0 for none, and which ones cannot be compared here."""
        ids = np.zeros(count, dtype=np.int64)
        doubtful = np.zeros(count, dtype=np.bool_)
        for name, column in sorted(unknown.items()):
            if pa.types.is_nested(column.type):
                doubtful |= _flags(column.is_valid())
                continue
            encoded = column.dictionary_encode()
            codes = [self._code(name, str(column.type), value) for value in encoded.dictionary.to_pylist()]
            which = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
            field = np.array([*codes, 0], dtype=np.int64)[which]  # -1, a null, is the last one
            both, inverse = np.unique(np.stack([ids, field]), axis=1, return_inverse=True)
            joined = [self._joined(*pair) for pair in both.T.tolist()]
            ids = np.array(joined, dtype=np.int64)[inverse.ravel()]
        return ids, doubtful

    def _code(self, *value: Any) -> int:
        """Intern a value."""
        return self._known.setdefault(value, len(self._known) + 1)

    def _joined(self, fields: int, field: int) -> int:
        """Intern the fields of a message with one more."""
        if not field:
            return fields
        return self._code(fields, field)


def _after_systems(systems: Texts, listed: MessageColumns, offsets: Ints) -> tuple[MessageColumns, Ints]:
    """Messages of rows after the system texts of their rows; an empty text is no message."""
    told = np.flatnonzero(systems.lengths > 0)
    first = MessageColumns.plain(np.full(len(told), CODES[Role.SYSTEM], dtype=np.uint8), systems.take(told))
    both = TextJoiner(column for part in (first, listed) for column in part.text_columns())
    order = np.insert(np.arange(len(listed)) + len(told), offsets[told], np.arange(len(told)))
    return MessageColumns.joined([first, listed], both).take(order), offsets + offsets_of(systems.lengths > 0)


def _held(column: pa.Array) -> Flags:
    """Return which rows have something in them: no null, and no empty text or list."""
    column = _decoded(column)
    held = _flags(column.is_valid())
    if pa.types.is_primitive(column.type) or pa.types.is_null(column.type):
        return held
    if _is_text(column.type):
        return held & _flags(pc.fill_null(pc.not_equal(pc.binary_length(column), 0), False))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return held & _flags(pc.fill_null(pc.not_equal(pc.list_value_length(column), 0), False))
    if pa.types.is_struct(column.type):  # null fields are absent
        fields = [_flags(column.field(number).is_valid()) for number in range(column.type.num_fields)]
        has_field: Flags = np.any([np.zeros_like(held), *fields], axis=0)
        return held & has_field
    return np.array([holds(without_nulls(value)) for value in column.to_pylist()], dtype=np.bool_)


def _extras(fields: Mapping[str, pa.Array], count: int) -> Objects:
    """Make a column of the unknown fields of messages, which people asked for by name."""
    extras: dict[int, dict[str, Any]] = {}
    for name, column in fields.items():
        messages = np.flatnonzero(_flags(column.is_valid()))
        for message, value in zip(messages.tolist(), column.take(pa.array(messages)).to_pylist(), strict=True):
            extras.setdefault(message, {})[name] = without_nulls(value)
    return sparse_objects(count, extras)


def _numbers(column: pa.Array) -> NDArray[np.float64]:
    """Return a column of numbers, NaN where there is none."""
    if not (pa.types.is_integer(column.type) or column.type in (pa.float32(), pa.float64())):
        raise _NotSureError
    numbers: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def _struct_messages(items: pa.StructArray, shape: Shape) -> tuple[MessageColumns, Flags, dict[str, pa.Array]]:
    """Structs as messages, which of them need the full reader, and their unknown fields."""
    fields, count = _fields(items), len(items)
    if shape.role not in fields:
        raise _NotSureError
    doubtful = ~_flags(items.is_valid())
    unknown: dict[str, pa.Array] = {}
    for name, column in fields.items():
        if name in (shape.role, shape.content, *PASSED_FIELDS):
            continue
        meaning = MESSAGE_MEANINGS.get(name)
        if name in NUMBER_FIELDS or meaning is MessageField.ONLY_NULL:
            doubtful |= _flags(column.is_valid())
        elif meaning is MessageField.EMPTY or (meaning is None and speaks_of_training(name)):
            doubtful |= _held(column)
            unknown[name] = column
        elif meaning is None:
            unknown[name] = column
    texts = {name: _field_texts(fields.get(name), count) for name in (*TEXT_FIELDS, *REASONING_FIELDS)}
    contents = _field_texts(fields.get(shape.content), count)
    roles = _roles(fields[shape.role], shape)
    calls, bad_calls = _calls(fields.get("tool_calls"), count)
    weights, bad_weights = _weights(fields.get("weight"), fields.get("train"), count)
    doubtful |= (roles == 0) | bad_calls | bad_weights | (~contents.present & (np.diff(calls["call_offsets"]) == 0))
    named = [name for name in REASONING_FIELDS if texts[name].present.any()]
    reasoning = texts[(named or REASONING_FIELDS)[0]]
    for other in named[1:]:
        doubtful |= texts[other].present
    rare: dict[str, Any] = {column: texts[name] for name, column in TEXT_FIELDS.items()}
    columns = replace(
        MessageColumns.plain(roles, contents.texts),
        has_content=contents.present,
        reasoning=reasoning.texts,
        has_reasoning=reasoning.present,
        **rare,
        weights=weights,
        **calls,
    )
    return columns, doubtful, unknown


def _roles(column: pa.Array, shape: Shape) -> NDArray[np.uint8]:
    """Return the code of each role; 0 where it is missing, unknown, or one that holds calls."""
    names, which = _distinct(column, check=False)  # with the whole list
    known: list[Role | None] = [shape.roles.get(name) or shape.roles.get(name.strip().lower()) for name in names]
    codes = [
        0 if role is None or (shape.calls_role and name.strip().lower() == shape.calls_role) else CODES[role]
        for name, role in zip(names, known, strict=True)
    ]
    return np.array([*codes, 0], dtype=np.uint8)[which]  # -1, a null, is the last one


def _calls(column: pa.Array | None, count: int) -> tuple[dict[str, Any], Flags]:
    """Return the columns of the calls of each message, and which messages are doubtful."""
    doubtful = np.zeros(count, dtype=np.bool_)
    if column is None or column.null_count == count:
        return {"call_offsets": np.zeros(count + 1, dtype=np.int64)}, doubtful
    calls, offsets = _items(column)
    parts = _fields(calls)
    function = parts.get("function")
    if function is None:
        raise _NotSureError
    inner = _fields(function)
    names, arguments = (_field_texts(inner.get(name), len(calls)) for name in ("name", "arguments"))
    bad = ~(_flags(calls.is_valid()) & _flags(function.is_valid()) & names.present & arguments.present)
    for name, field in (*parts.items(), *inner.items()):
        if speaks_of_training(name):
            bad |= _flags(field.is_valid())
    # A null list may lie over calls of its own, which then belong to nobody.
    hidden = ~_flags(column.is_valid()) & (np.diff(offsets) > 0)
    doubtful[np.searchsorted(offsets, np.flatnonzero(bad), side="right") - 1] = True
    ids, type_ = _field_texts(parts.get("id"), len(calls)), parts.get("type")
    typed = np.zeros(len(calls), dtype=np.bool_) if type_ is None else _flags(type_.is_valid())
    columns = {"call_offsets": offsets, "call_names": names.texts, "call_arguments": arguments.texts, "call_ids": ids}
    return columns | {"call_orders": _orders(parts, inner, ids.present, typed)}, doubtful | hidden


def _orders(parts: Iterable[str], inner: Iterable[str], has_id: Flags, has_type: Flags) -> NDArray[np.uint8]:
    """Return the order of keys that the schema gives each call; those of nulls are none."""
    orders = np.zeros(len(has_id), dtype=np.uint8)
    for ids, types in ((False, False), (False, True), (True, False), (True, True)):
        missing = {name for name, there in (("id", ids), ("type", types)) if not there}
        keys = [key for key in parts if key not in missing]
        orders[(has_id == ids) & (has_type == types)] = call_order(keys, inner)
    return orders


def _weights(weight: pa.Array | None, train: pa.Array | None, count: int) -> tuple[NDArray[np.float64], Flags]:
    """Weights by the rule of `weight` and `train`, and which of them need the full reader."""
    doubtful = np.zeros(count, dtype=np.bool_)
    weights = np.broadcast_to(np.float64(np.nan), count)
    if weight is not None and weight.null_count < count:
        weights = _numbers(weight)
        doubtful = _flags(weight.is_valid()) & (weights != 0) & ~((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))
    if train is not None and train.null_count < count:
        if not pa.types.is_boolean(train.type):
            raise _NotSureError
        trained, untrained = _flags(pc.fill_null(train, False)), _flags(pc.fill_null(pc.invert(train), False))
        weights = np.where(untrained, 0.0, np.where(trained & np.isnan(weights), 1.0, weights))
    return weights, doubtful


def _field_texts(column: pa.Array | None, count: int) -> OptionalTexts:
    """Return the texts of a field of a struct, which is checked with the whole column."""
    if column is None or column.null_count == count:
        return OptionalTexts.none(count)
    return texts_of(column, check=False)


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def texts_of(column: pa.Array, *, check: bool = True) -> OptionalTexts:
    """Return a column of texts, in the buffer that Arrow has; `ArrowInvalid` where one is not UTF-8."""
    column = _decoded(column)
    if not _is_text(column.type):
        raise _NotSureError
    if check:
        column.validate(full=True)
    _, offsets, data = column.buffers()
    width = np.dtype(np.int64 if pa.types.is_large_string(column.type) else np.int32)
    count, first = len(column), column.offset
    at = np.frombuffer(offsets, dtype=width)[first : first + count + 1].astype(np.int64) if count else np.zeros(1, int)
    lengths = np.diff(at)
    if column.null_count:
        lengths[~_flags(column.is_valid())] = -1
    buffer = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.empty(0, dtype=np.uint8)
    return OptionalTexts(buffer, at[:-1], lengths)


def _distinct(column: pa.Array, *, check: bool = True) -> tuple[list[str], Ints]:
    """Return the different texts of a column, and for each row which it is; -1 for a null."""
    column = _decoded(column)
    if not _is_text(column.type):
        raise _NotSureError
    if check:
        column.validate(full=True)
    encoded = column.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _items(column: pa.Array) -> tuple[pa.Array, Ints]:
    """Return what is in a column of lists, and the offsets of each list."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise _NotSureError
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def _fields(structs: pa.Array) -> dict[str, pa.Array]:
    """Return the fields of structs by their names."""
    if not pa.types.is_struct(structs.type):
        raise _NotSureError
    fields = {field.name: structs.field(place) for place, field in enumerate(structs.type)}
    if len(fields) != structs.type.num_fields:
        raise _NotSureError
    return fields


def _flags(array: pa.Array) -> Flags:
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags
