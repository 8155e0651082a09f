"""Rows of Arrow and Parquet files to look at: any set with `input_ids`, as Hugging Face trainers read it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.core.trainer_columns import (
    BOUNDARIES,
    IDS,
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
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.look.items import Ints, Item
from chatmill.look.packed_rows import arrow_batches, is_list, schema_of
from chatmill.look.preference_rows import document_rows, document_schema, preference_columns
from chatmill.look.splits import LookLayout, LookSplit, TokenBatch
from chatmill.read.files import parquet_batches, parquet_groups


class PackedSplit(LookSplit):
    """Rows of files, in order: only what is looked at is decoded; a column costs one pass over it."""

    layout = LookLayout.PACKED
    _plan = None

    def __init__(self, files: Sequence[Path], name: str = "", *, mask_shift: int = 0) -> None:
        """Open files whose masks speak of the token `mask_shift` places on."""
        self.files, self.name = files, name
        self._mask_shift = mask_shift
        schema = schema_of(files[0])
        self._preferences = None
        if not any(field.name in IDS for field in schema):
            self._preferences = preference_columns(schema.names)
        if self._preferences is not None:
            self.layout = LookLayout.PREFERENCES
            schema = document_schema(self._preferences)
        lists = [field.name for field in schema if is_list(field.type)]
        try:
            self._ids = ids_column(lists)
        except DataError as error:
            raise FormatError(f"{files[0]}: {error}") from None
        self.features = tuple(schema.names)
        self._weights = weight_columns(lists)
        self._boundaries = [name for name in BOUNDARIES if name in lists]
        self._masks = [name for name in ("attention_mask",) if name in lists]
        self.has_weights = bool(self._weights)
        self.has_kinds = "kinds" in self.features
        self.has_record_ids = "record_id" in self.features

    @cached_property
    def _pieces(self) -> list[tuple[int, Path, Any]]:
        """Parts that can be read alone: the number of the row after the last one, the file, and the part.

        Of Parquet it is the file, without a part. A batch of Arrow is mapped, so it costs no memory.
        """
        pieces: list[tuple[int, Path, Any]] = []
        end = 0
        for file in self.files:
            is_parquet = file.suffix == ".parquet"
            for part in [None] if is_parquet else arrow_batches(file):
                rows = sum(rows for rows, _ in parquet_groups(file)) if part is None else len(part)
                end += rows * self._documents_a_row
                pieces.append((end, file, part))
        return pieces

    @property
    def _documents_a_row(self) -> int:
        """Items that one row of a file becomes: two where it holds a pair of answers."""
        return 1 if self._preferences is None else len(self._preferences.answers)

    def __len__(self) -> int:
        return self._pieces[-1][0] if self._pieces else 0

    def row(self, number: int) -> Any:
        """Read one row, as a record batch."""
        piece = bisect_right(self._pieces, number, key=lambda entry: entry[0])
        _, file, part = self._pieces[piece]
        place = number - (self._pieces[piece - 1][0] if piece else 0)
        stored, answer = divmod(place, self._documents_a_row)
        row = next(parquet_batches(file, stored, stored + 1)) if part is None else part.slice(stored, 1)
        if self._preferences is None:
            return row
        return document_rows(row, self._preferences).slice(answer, 1)

    def stored_batches(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
        """(number of its first row, record batch) of all rows; `columns` chooses some."""
        first = 0
        stored = columns if self._preferences is None else self._preferences.names
        for file in self.files:
            is_parquet = file.suffix == ".parquet"
            for batch in parquet_batches(file, columns=stored) if is_parquet else arrow_batches(file):
                rows = batch if self._preferences is None else document_rows(batch, self._preferences)
                yield first, rows if columns is None else rows.select(list(columns))
                first += len(rows)

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of every row."""
        import pyarrow.compute as pc

        lengths = [
            pc.list_value_length(batch.column(self._ids)).fill_null(0).to_numpy(zero_copy_only=False)
            for _, batch in self.stored_batches(columns=[self._ids])
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *lengths]).astype(np.int64)

    @cached_property
    def _documents(self) -> tuple[Ints, Ints]:
        """The row and the tokens of every document; a row without valid boundaries is one document."""
        if not self._boundaries:
            rows = np.flatnonzero(self.tokens)
            return rows, self.tokens[rows]
        passes = self.stored_batches(columns=[self._ids, *self._boundaries])
        parts = [_read(rows, first, 0)[0] for first, rows in passes]
        none = np.empty(0, dtype=np.int64)
        lengths = [np.diff(part.offsets) for part in parts]
        return np.concatenate([none, *(part.items for part in parts)]), np.concatenate([none, *lengths])

    @cached_property
    def documents(self) -> Ints:
        """Documents of every row."""
        return np.bincount(self._documents[0], minlength=len(self))

    @cached_property
    def document_lengths(self) -> Ints:
        """Tokens of every document, row by row."""
        return self._documents[1]

    @cached_property
    def _source_column(self) -> tuple[NDArray[np.integer] | None, tuple[str, ...]]:
        """Codes and their names, if each row has one string."""
        import pyarrow as pa

        parts = (
            [batch.column("source") for _, batch in self.stored_batches(columns=["source"])]
            if "source" in self.features
            else []
        )
        if not parts or not (pa.types.is_string(parts[0].type) or pa.types.is_large_string(parts[0].type)):
            return None, ()
        encoded = pa.chunked_array(parts).fill_null("").combine_chunks().dictionary_encode()
        return encoded.indices.to_numpy(zero_copy_only=False), tuple(encoded.dictionary.to_pylist())

    @cached_property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every row, where it is one string."""
        return self._source_column[0]

    @property
    def source_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the codes."""
        return self._source_column[1]

    def release(self) -> None:
        """Do nothing: passes read files, and what is mapped is a row."""

    def item(self, number: int) -> Item:
        """Read a row."""
        return item_of_row(self.row(number), number, self.name, shift=self._shift, mask_shift=self._mask_shift)

    def picture_bytes(self, item: Item, picture: StoredPicture) -> bytes | None:
        """Read the bytes of a picture of a row; None where they are not stored."""
        if picture.data is None:
            return None
        stored: bytes = self.row(item.number).column("image_bytes")[0].as_py() or b""
        return stored[picture.data[0] : sum(picture.data)]

    @cached_property
    def _shift(self) -> int:
        """How far labels are ahead of the ids, by the first rows."""
        labels = [name for name in LABELS if name in self._weights]
        if not labels:
            return 0
        wanted = [self._ids, *labels, *self._masks]
        batches = []
        for first, batch in self.stored_batches(columns=wanted):
            batches.append(batch)
            if first + len(batch) >= SHIFT_ROWS:
                break
        import pyarrow as pa

        return read_columns(_columns(pa.Table.from_batches(batches).combine_chunks())).shift if batches else 0

    def _batches(self) -> Iterator[TokenBatch]:
        wanted = [self._ids, *self._weights, *self._boundaries, *(["kinds"] if self.has_kinds else [])]
        for first, batch in self.stored_batches(columns=list(dict.fromkeys(wanted))):
            yield _read(batch, first, self._shift, self._mask_shift)[0]

    def record_id(self, number: int) -> str | None:
        """Return the record of a row, or those of its documents joined by commas."""
        return _text(self.row(number).column("record_id")[0].as_py()) if self.has_record_ids else None

    def find(self, record_id: str) -> list[int]:
        """Find the rows that hold a record."""
        numbers: list[int] = []
        if not self.has_record_ids:
            return numbers
        for first, batch in self.stored_batches(columns=["record_id"]):
            for i, value in enumerate(batch.column("record_id").to_pylist()):
                if record_id == value or (isinstance(value, list) and record_id in value):
                    numbers.append(first + i)
        return numbers


def _columns(rows: Any) -> dict[str, Column]:
    """Read the columns of a record batch, or table, that trainers know."""
    names = [field.name for field in rows.schema if field.name in KNOWN and is_list(field.type)]
    return {name: _flat(rows.column(name)) for name in names}


def _read(batch: Any, first: int, shift: int | None, mask_shift: int = 0) -> tuple[TokenBatch, TrainerRows]:
    """Read the rows of a record batch, numbered from `first`; a row with wrong boundaries is one document."""
    rows = read_columns(_columns(batch), shift=shift, mask_shift=mask_shift, first=first)
    kinds = _flat(batch.column("kinds")) if "kinds" in batch.schema.names else None
    if kinds is not None and not np.array_equal(kinds[1], rows.offsets):
        raise FormatError(f"rows from {first}: kinds and ids have different lengths")
    tokens = TokenBatch(
        items=first + np.searchsorted(rows.offsets, rows.documents[:-1], side="right") - 1,
        offsets=rows.documents,
        ids=rows.ids.astype(np.uint32),
        weights=rows.weights,
        kinds=None if kinds is None else kinds[0].astype(np.uint8),
    )
    return tokens, rows


def item_of_row(row: Any, number: int, split: str = "", *, shift: int | None = None, mask_shift: int = 0) -> Item:
    """Make an item of a record batch with one row; `problem` says why its boundaries are wrong."""
    names = row.schema.names
    tokens, rows = _read(row, number, shift, mask_shift)
    stored = {name for name in ("documents", "record_id", "source", "turns", "side") if name in names}
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
        side=facts.get("side") if isinstance(facts.get("side"), str) else None,
        pictures=_pictures(row),
        features=tuple(names),
        problem=_problem(row.column(rows.boundaries)[0].as_py(), len(tokens.ids), rows.boundaries, number)
        if len(rows.wrong_boundaries)
        else None,
    )


def _pictures(row: Any) -> tuple[StoredPicture, ...]:
    """Read the pictures of a row as `export --to hf` writes them; columns of others mean something else."""
    if not {"images", "image_bytes"} <= set(row.schema.names):
        return ()
    line = row.column("images")[0].as_py()
    return tuple(stored_pictures(line)) if isinstance(line, str) else ()


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
