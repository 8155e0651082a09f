"""Rows of Arrow and Parquet files to look at: any set with `input_ids`, as Hugging Face trainers read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import Boundaries, boundaries_from_starts, starts_of_lengths
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of
from chatmill.errors import DataError, FormatError
from chatmill.look.items import Ints, Item, LookLayout, LookSplit, TokenBatch
from chatmill.look.packed_rows import PackedFiles

WEIGHT_COLUMNS = ("weights", "loss_weights", "labels", "loss_mask", "completion_mask", "assistant_masks")
"""Columns that say what is trained; the first that is there counts."""
BOUNDARY_COLUMNS = ("document_starts", "seq_lengths")


class PackedSplit(LookSplit):
    """Rows of files: only what is looked at is decoded; a column costs one pass over it."""

    layout = LookLayout.PACKED

    def __init__(self, files: PackedFiles, name: str) -> None:
        self.name = name
        self.files = files
        self.features = files.column_names
        if "input_ids" not in self.features:
            raise FormatError(f"{files.path}: the dataset has no column input_ids, only: {', '.join(self.features)}")
        self._weights = _column(self.features, WEIGHT_COLUMNS)
        self._boundaries = _column(self.features, BOUNDARY_COLUMNS)
        self.has_weights = self._weights is not None
        self.has_kinds = "kinds" in self.features
        self.has_record_ids = "record_id" in self.features

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of every row."""
        import pyarrow.compute as pc

        lengths = [
            pc.list_value_length(batch.column("input_ids")).fill_null(0).to_numpy(zero_copy_only=False)
            for _, batch in self.files.batches(columns=["input_ids"])
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *lengths]).astype(np.int64)

    @cached_property
    def _documents(self) -> tuple[Ints, Ints]:
        """The row and the tokens of every document; a row is one where the files do not say, or cannot be right."""
        if self._boundaries is None:
            rows = np.flatnonzero(self.tokens)
            return rows, self.tokens[rows]
        passes = self.files.batches(columns=["input_ids", self._boundaries])
        found = [(batch.items, np.diff(batch.offsets)) for batch in (_tokens_of(rows, first) for first, rows in passes)]
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(rows for rows, _ in found)]), np.concatenate([none, *(n for _, n in found)])

    @cached_property
    def documents(self) -> Ints:
        """Documents of every row."""
        return np.bincount(self._documents[0], minlength=len(self))

    @cached_property
    def document_lengths(self) -> Ints:
        """Tokens of every document, row by row."""
        return self._documents[1]

    @cached_property
    def _source_column(self) -> tuple[NDArray[np.integer], tuple[str, ...]] | None:
        import pyarrow as pa

        if "source" not in self.features:
            return None
        codes: list[NDArray[np.integer]] = []
        names: dict[str, int] = {}
        for _, batch in self.files.batches(columns=["source"]):
            column = batch.column("source")
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                return None
            encoded = column.dictionary_encode()
            mine = np.array([names.setdefault(str(name), len(names)) for name in encoded.dictionary.to_pylist()])
            codes.append(mine[encoded.indices.to_numpy(zero_copy_only=False)])
        return (np.concatenate(codes) if codes else np.empty(0, dtype=np.int64)), tuple(names)

    @property
    def sources(self) -> NDArray[np.integer] | None:
        """The source of every row, where it is one string."""
        return self._source_column[0] if self._source_column else None

    @property
    def source_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the codes."""
        return self._source_column[1] if self._source_column else ()

    def item(self, number: int) -> Item:
        """One row."""
        return item_of_row(self.files.row(number), number, self.name)

    def _batches(self) -> Iterator[TokenBatch]:
        wanted = ["input_ids", self._weights, self._boundaries, "kinds" if self.has_kinds else None]
        for first, batch in self.files.batches(columns=[name for name in wanted if name]):
            yield _tokens_of(batch, first)

    def record_ids(self, numbers: Ints) -> list[str] | None:
        """Record ids of some rows; those of a packed row are joined by commas."""
        if not self.has_record_ids:
            return None
        rows = (self.files.row(number).column("record_id")[0].as_py() for number in numbers.tolist())
        return [", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in rows]

    def find(self, record_id: str) -> list[int]:
        """The rows that hold a record."""
        found: list[int] = []
        if not self.has_record_ids:
            return found
        for first, batch in self.files.batches(columns=["record_id"]):
            for i, value in enumerate(batch.column("record_id").to_pylist()):
                if record_id == value or (isinstance(value, list) and record_id in value):
                    found.append(first + i)
        return found


def _column(names: Sequence[str], known: Sequence[str]) -> str | None:
    """The first of the known columns that is there."""
    return next((name for name in known if name in names), None)


def _tokens_of(batch: Any, first: int) -> TokenBatch:
    """The rows of a record batch; `first` is the number of its first. Wrong boundaries: the row is one document."""
    names = batch.schema.names
    ids, offsets = _flat(batch.column("input_ids"))

    def aligned(name: str) -> NDArray[Any]:
        values, own = _flat(batch.column(name))
        if not np.array_equal(own, offsets):
            row = int(np.argmax(np.diff(own) != np.diff(offsets)))
            raise FormatError(f"row {first + row}: {name} and input_ids have different lengths")
        return values

    counts = np.minimum(np.diff(offsets), 1)
    starts = np.zeros(int(counts.sum()), dtype=np.int64)
    weights, boundaries = _column(names, WEIGHT_COLUMNS), _column(names, BOUNDARY_COLUMNS)
    if boundaries is not None:
        starts, counts = document_starts(*_flat(batch.column(boundaries)), np.diff(offsets), boundaries)
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return TokenBatch(
        items=first + rows,
        offsets=np.append(offsets[rows] + starts, offsets[-1]),
        ids=ids,
        weights=None if weights is None else _weights(weights, aligned(weights)),
        kinds=aligned("kinds").astype(np.uint8) if "kinds" in names else None,
    )


def item_of_row(row: Any, number: int, split: str = "") -> Item:
    """A record batch of one row as an item; `problem` says why its boundaries cannot be right."""
    names = row.schema.names
    tokens = _tokens_of(row, number)
    boundaries = _column(names, BOUNDARY_COLUMNS)
    stored = {name for name in ("documents", "record_id", "source", "turns") if name in names}
    facts = {name: row.column(name)[0].as_py() for name in stored}
    return Item(
        split=split,
        number=number,
        ids=tokens.ids,
        weights=tokens.weights,
        kinds=tokens.kinds,
        starts=tokens.offsets[:-1],
        has_starts=boundaries is not None,
        documents=None if facts.get("documents") is None else np.asarray(facts["documents"], dtype=np.int64),
        record_id=_text(facts.get("record_id")),
        source=_text(facts.get("source")),
        turns=facts["turns"] if isinstance(facts.get("turns"), int) else None,
        features=tuple(names),
        problem=None
        if boundaries is None
        else _problem(row.column(boundaries)[0].as_py(), len(tokens.ids), boundaries, number),
    )


def _text(value: Any) -> str | None:
    """A fact of a row; those of its documents are joined."""
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value)))
    return None if value is None else str(value)


def _problem(values: list[int] | None, tokens: int, name: str, number: int) -> str | None:
    """Why the boundaries of a row cannot be right; None where they can, or where the row has none."""
    if values is None:
        return None
    row, length = np.array(values, dtype=np.int64), np.array([tokens], dtype=np.int64)
    try:
        boundaries_from_starts(starts_of_lengths([row], length) if name == "seq_lengths" else [row], length)
    except DataError as error:
        return str(error).replace("of row 0", f"of block {number}", 1)
    return None


def document_starts(values: NDArray[Any], offsets: Ints, tokens: Ints, name: str) -> tuple[Ints, Ints]:
    """Document starts of many rows and their number in each; a row whose boundaries cannot be right has one document.

    `values` are those of the column `name`, cut into rows by `offsets`; `tokens` are those of each row.
    """
    starts, counts = values.astype(np.int64), np.diff(offsets)
    bad = np.zeros(len(counts), dtype=np.bool_)
    if name == "seq_lengths":
        before = offsets_of(starts)
        bad |= np.diff(before[offsets]) != tokens
        starts = before[:-1] - np.repeat(before[offsets[:-1]], counts)
    found = Boundaries(starts=starts, counts=counts, lengths=tokens)
    bad |= found.without_start
    for broken, _ in found.broken():
        bad[found.rows[broken]] = True
    if not bad.any():
        return starts, counts
    fixed = np.where(bad, np.minimum(tokens, 1), counts)
    out = np.zeros(int(fixed.sum()), dtype=np.int64)
    out[np.repeat(~bad, fixed)] = starts[~bad[found.rows]]
    return out, fixed


def _weights(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Token-aligned weights: labels are trained where they are not -100."""
    if name == "labels":
        values = np.asarray(values != IGNORE_INDEX)
    return values.astype(np.uint8 if values.dtype in (np.bool_, np.uint8) else np.float32)


def _flat(column: Any) -> tuple[NDArray[Any], Ints]:
    """The values of a list column one after the other, and the offsets of its rows."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), offsets_of(lengths)
