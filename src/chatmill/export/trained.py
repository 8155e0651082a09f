"""Columns that the exports to trainers share: which tokens are targets, positions, padding, and what is not kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import DataError
from chatmill.export.targets import FACTS, has_other_weights, list_array

if TYPE_CHECKING:
    from chatmill.export.rows import RowBatch
    from chatmill.export.targets import Export

Ints = NDArray[np.int64]
ScalarT = TypeVar("ScalarT", bound=np.generic)


class Targets:
    """Which tokens a trainer computes a loss on; counts those that it cannot."""

    def __init__(self, export: Export, trainer: str, *, weights: bool = False) -> None:
        """`weights`: whether the trainer reads weights; where it does not, others than 0 and 1 are refused."""
        self._export, self._trainer = export, trainer
        self._first_tokens = 0
        self._dropped = 0
        for split, documents in export.source.splits.items():
            if not weights and has_other_weights(documents):
                raise DataError(
                    f"{split}: some tokens have another weight than 0 and 1, and {trainer} only reads trained or not: "
                    "export to levanter, parquet or hf, which hold weights, or build with weights of 0 and 1"
                )

    def of(self, batch: RowBatch) -> NDArray[np.bool_]:
        """Token-aligned: trained, and not the first token of a document, which no token of it predicts."""
        some = batch.documents
        trained = some.trained.copy()
        firsts = some.offsets[:-1][np.diff(some.offsets) > 0]
        self._first_tokens += int(np.count_nonzero(trained[firsts]))
        trained[firsts] = False
        return trained

    def count_rows_without(self, batch: RowBatch, trained: NDArray[np.bool_]) -> None:
        """For a trainer that drops rows in which nothing is trained."""
        before = offsets_of(trained.view(np.uint8))[batch.token_offsets]
        self._dropped += int(np.count_nonzero(np.diff(before) == 0))

    def say_what_is_lost(self) -> None:
        """Note what the trainer does not get."""
        export = self._export
        facts = [name for name in FACTS if export.holds(name)]
        stored = [*facts, *(["kinds"] if all(d.has_kinds for d in export.source.splits.values()) else [])]
        if stored:
            export.say(f"{', '.join(stored)}: {self._trainer} reads none of them")
        if self._first_tokens:
            export.say(
                f"{self._first_tokens:,} trained tokens are the first of a document and have no label: no token of "
                "their own document comes before them"
            )
        if self._dropped:
            export.say(f"{self._dropped:,} documents have nothing to train: {self._trainer} drops them when it loads")


def positions_of(batch: RowBatch) -> NDArray[np.int32]:
    """The place of every token in its document."""
    offsets = batch.documents.offsets
    return (np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.int32)


def numbers_in_row(batch: RowBatch) -> NDArray[np.int32]:
    """For every token the number of its document in the row, from 1."""
    documents = np.arange(len(batch.numbers)) - np.repeat(batch.row_offsets[:-1], np.diff(batch.row_offsets)) + 1
    return np.repeat(documents, np.diff(batch.documents.offsets)).astype(np.int32)


class PaddedRows:
    """Rows of a batch, padded at their ends to one width."""

    def __init__(self, batch: RowBatch, width: int) -> None:
        offsets = batch.token_offsets
        self.rows, self.width = len(batch), width
        self.offsets: Ints = np.arange(self.rows + 1, dtype=np.int64) * width
        self._lengths = np.diff(offsets)
        self._places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1] - offsets[:-1], self._lengths)

    def of(self, values: NDArray[ScalarT], fill: int | float | NDArray[Any]) -> NDArray[ScalarT]:
        """Flat: a column with `fill` behind the values of each row."""
        padded = np.empty(self.rows * self.width, dtype=values.dtype)
        padded[:] = fill
        padded[self._places] = values
        return padded

    @property
    def counted(self) -> NDArray[np.int32]:
        """A fill: 0, 1, 2, ... from where the padding of each row begins; a document of its own."""
        places = np.tile(np.arange(self.width, dtype=np.int32), self.rows)
        return places - np.repeat(self._lengths.astype(np.int32), self.width)


def record_batch(columns: Sequence[tuple[Any, Ints]], schema: Any) -> Any:
    """Columns, each of values and the offsets of its rows, as a record batch of lists."""
    import pyarrow as pa

    arrays = [list_array(*column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def with_ends(
    ids: NDArray[ScalarT], offsets: Ints, eod_id: int, values: NDArray[Any]
) -> tuple[NDArray[ScalarT], Ints, NDArray[Any]]:
    """Documents with this token, of the value 0, behind each that does not end in it: ids, offsets and values."""
    ends = offsets[1:]
    is_open = ids[ends - 1] != eod_id
    added = ends[is_open]
    grown = offsets + np.append(0, np.cumsum(is_open))
    return np.insert(ids, added, eod_id), grown, np.insert(values, added, 0)


def ends_in_eos(split: str, batch: RowBatch, eos_id: int) -> str:
    """What is wrong where documents should have their one eos at the end; empty where nothing is."""
    some = batch.documents
    is_eos = some.ids == eos_id
    ends = some.offsets[1:] - 1
    inside = int(np.count_nonzero(is_eos)) - int(np.count_nonzero(is_eos[ends]))
    if inside:
        return f"{split}: the end token {eos_id} occurs {inside:,} times inside documents"
    if not is_eos[ends].all():
        return f"{split}: {int(np.count_nonzero(~is_eos[ends])):,} documents do not end in the end token {eos_id}"
    return ""
