"""Rows of Arrow and Parquet files to look at: any set with `input_ids`, as Hugging Face trainers read it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.core.trainer_columns import (
    BOUNDARIES,
    KNOWN,
    LABELS,
    SHIFT_ROWS,
    Column,
    TrainerRows,
    ids_column,
    read_columns,
    weight_columns,
)
from chatmill.errors import DataError, FormatError
from chatmill.look.items import Ints, Item
from chatmill.look.packed_rows import PackedFiles, is_list
from chatmill.look.splits import LookLayout, LookSplit, TokenBatch


class PackedSplit(LookSplit):
    """Rows of files: only what is looked at is decoded; a column costs one pass over it."""

    layout = LookLayout.PACKED

    def __init__(self, files: PackedFiles, name: str) -> None:
        self.name = name
        self.files = files
        self.features = files.column_names
        try:
            self._ids = ids_column(files.lists)
        except DataError as error:
            raise FormatError(f"{files.path}: {error}") from None
        self._weights = weight_columns(files.lists)
        self._boundaries = [name for name in BOUNDARIES if name in files.lists]
        self.has_weights = bool(self._weights)
        self.has_kinds = "kinds" in self.features
        self.has_record_ids = "record_id" in self.features

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def tokens(self) -> Ints:  # type: ignore[override]
        """Tokens of every row."""
        import pyarrow.compute as pc

        lengths = [
            pc.list_value_length(batch.column(self._ids)).fill_null(0).to_numpy(zero_copy_only=False)
            for _, batch in self.files.batches(columns=[self._ids])
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *lengths]).astype(np.int64)

    @cached_property
    def _documents(self) -> tuple[Ints, Ints]:
        """The row and the tokens of every document; a row without valid boundaries is one document."""
        if not self._boundaries:
            rows = np.flatnonzero(self.tokens)
            return rows, self.tokens[rows]
        passes = self.files.batches(columns=[self._ids, *self._boundaries])
        parts = [
            (batch.items, np.diff(batch.offsets)) for batch in (_tokens_of(rows, first, 0) for first, rows in passes)
        ]
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(rows for rows, _ in parts)]), np.concatenate([none, *(n for _, n in parts)])

    @cached_property
    def documents(self) -> Ints:  # type: ignore[override]
        """Documents of every row."""
        return np.bincount(self._documents[0], minlength=len(self))

    @cached_property
    def document_lengths(self) -> Ints:  # type: ignore[override]
        """Tokens of every document, row by row."""
        return self._documents[1]

    @cached_property
    def _source_column(self) -> tuple[NDArray[np.integer] | None, tuple[str, ...]]:
        """Codes and their names, if each row has one string."""
        import pyarrow as pa

        parts = (
            [batch.column("source") for _, batch in self.files.batches(columns=["source"])]
            if "source" in self.features
            else []
        )
        if not parts or not (pa.types.is_string(parts[0].type) or pa.types.is_large_string(parts[0].type)):
            return None, ()
        encoded = pa.chunked_array(parts).fill_null("").combine_chunks().dictionary_encode()
        return encoded.indices.to_numpy(zero_copy_only=False), tuple(encoded.dictionary.to_pylist())

    @property
    def sources(self) -> NDArray[np.integer] | None:  # type: ignore[override]
        """The source of every row, where it is one string."""
        return self._source_column[0]

    @property
    def source_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the codes."""
        return self._source_column[1]

    def item(self, number: int) -> Item:
        """Read a row."""
        return item_of_row(self.files.row(number), number, self.name, shift=self._shift)

    @cached_property
    def _shift(self) -> int:
        """How far labels are ahead of the ids, by the first rows."""
        labels = [name for name in LABELS if name in self._weights]
        if not labels:
            return 0
        wanted = [self._ids, *labels, *(["attention_mask"] if "attention_mask" in self.files.lists else [])]
        batches = []
        for first, batch in self.files.batches(columns=wanted):
            batches.append(batch)
            if first + len(batch) >= SHIFT_ROWS:
                break
        import pyarrow as pa

        return read_columns(_columns(pa.Table.from_batches(batches).combine_chunks())).shift if batches else 0

    def _batches(self) -> Iterator[TokenBatch]:
        wanted = [self._ids, *self._weights, *self._boundaries, *(["kinds"] if self.has_kinds else [])]
        for first, batch in self.files.batches(columns=list(dict.fromkeys(wanted))):
            yield _tokens_of(batch, first, self._shift)

    def record_id(self, number: int) -> str | None:
        """The record of a row, or those of its documents joined by commas."""
        return _text(self.files.row(number).column("record_id")[0].as_py()) if self.has_record_ids else None

    def find(self, record_id: str) -> list[int]:
        """Find the rows that hold a record."""
        numbers: list[int] = []
        if not self.has_record_ids:
            return numbers
        for first, batch in self.files.batches(columns=["record_id"]):
            for i, value in enumerate(batch.column("record_id").to_pylist()):
                if record_id == value or (isinstance(value, list) and record_id in value):
                    numbers.append(first + i)
        return numbers


def _columns(rows: Any) -> dict[str, Column]:
    """Read the columns of a record batch, or table, that trainers know."""
    names = [field.name for field in rows.schema if field.name in KNOWN and is_list(field.type)]
    return {name: _flat(rows.column(name)) for name in names}


def _tokens_of(batch: Any, first: int, shift: int) -> TokenBatch:
    """Read the rows of a record batch, numbered from `first`; a row with wrong boundaries is one document."""
    return _with_kinds(read_columns(_columns(batch), shift=shift, first=first), batch, first)


def _with_kinds(rows: TrainerRows, batch: Any, first: int) -> TokenBatch:
    kinds = _flat(batch.column("kinds")) if "kinds" in batch.schema.names else None
    if kinds is not None and not np.array_equal(kinds[1], rows.offsets):
        raise FormatError(f"rows from {first}: kinds and ids have different lengths")
    return TokenBatch(
        items=first + np.searchsorted(rows.offsets, rows.documents[:-1], side="right") - 1,
        offsets=rows.documents,
        ids=rows.ids.astype(np.uint32),
        weights=rows.weights,
        kinds=None if kinds is None else kinds[0].astype(np.uint8),
    )


def item_of_row(row: Any, number: int, split: str = "", *, shift: int | None = None) -> Item:
    """Make an item of a record batch with one row; `problem` says why its boundaries are wrong."""
    names = row.schema.names
    rows = read_columns(_columns(row), shift=shift, first=number)
    tokens = _with_kinds(rows, row, number)
    stored = {name for name in ("documents", "record_id", "source", "turns") if name in names}
    facts = {name: row.column(name)[0].as_py() for name in stored}
    return Item(
        split=split,
        number=number,
        ids=tokens.ids,
        weights=tokens.weights,
        kinds=tokens.kinds,
        starts=tokens.offsets[:-1],
        has_starts=bool(rows.boundaries),
        documents=None if facts.get("documents") is None else np.asarray(facts["documents"], dtype=np.int64),
        record_id=_text(facts.get("record_id")),
        source=_text(facts.get("source")),
        turns=facts["turns"] if isinstance(facts.get("turns"), int) else None,
        features=tuple(names),
        problem=_problem(row.column(rows.boundaries)[0].as_py(), len(tokens.ids), rows.boundaries, number)
        if len(rows.wrong_boundaries)
        else None,
    )


def _text(value: Any) -> str | None:
    """Convert a fact of a row to text; a list of facts, one per document, is joined."""
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value)))
    return None if value is None else str(value)


def _problem(values: list[int] | None, tokens: int, name: str, number: int) -> str | None:
    """Explain why the boundaries of a row are wrong; None if it has none."""
    if values is None:
        return None
    shown = f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"
    wanted = "add up to no more than that" if name == "seq_lengths" else "rise from 0 and stay within the row"
    return f"{name} of block {number} are {shown} for {tokens} tokens: they must {wanted}"


def _flat(column: Any) -> tuple[NDArray[Any], Ints]:
    """Flatten a list column into values and the offsets of its rows."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return pc.list_flatten(column).to_numpy(zero_copy_only=False), offsets_of(lengths)
