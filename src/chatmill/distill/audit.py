"""Rows rendered again by the official renderer, and compared with the documents that were made of them.

The audit of a build compares a sample of rows; `verify --deep` compares all of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.chunk_shards import Receipt
from chatmill.core.hash_shares import hashes_below
from chatmill.core.publish import write_whole
from chatmill.core.shift import shift_left
from chatmill.core.tokens import first_difference
from chatmill.distill.input_shards import COLUMNS
from chatmill.errors import ChatmillError, RecordError
from chatmill.prove.report import Finding
from chatmill.read.files import Raw, parquet_batches
from chatmill.read.record_shape import conversation_or_error
from chatmill.read.shapes import SYNTH_KD
from chatmill.read.synth_rows import ID, TEXT
from chatmill.render.official_harmony import encoding
from chatmill.store.kd_shard import LOSSMASK, SPAN, TOKENS, KDShard
from chatmill.store.megatron import idx_path
from chatmill.systems.synth_kd import KDSplit, OfficialRows

AUDIT_RATE = 1 / 200
QUARANTINE = "quarantine.jsonl"
"""In the dataset: the rows of all shards that could not be used."""
FIRST_ROWS = 64
"""Rows at the beginning of every shard that are always compared."""
CONTEXT = 8
"""Tokens that are shown on both sides of the first difference."""


class AuditError(ChatmillError, RuntimeError):
    """The build and the official renderer differ: nothing of the build can be trusted."""


def audited(first: int, count: int, rate: float) -> NDArray[np.bool_]:
    """Which of the rows `first`, `first + 1`, ... of a shard are compared; depends on nothing but the row's number.

    One row in each `1 / rate`, at a place that differs from one such stretch to the next; and the first rows.
    """
    if rate == 0:
        return np.zeros(count, dtype=np.bool_)
    rows = np.arange(first, first + count, dtype=np.uint64)
    period = np.uint64(max(1, round(1 / rate)))
    stretch = rows // period
    place = ((stretch * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) % period
    chosen: NDArray[np.bool_] = (rows % period == place) | (rows < FIRST_ROWS)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Some rows of an input shard that follow each other, and where their documents begin; small and picklable."""

    root: str
    """The folder of the dataset."""
    name: str
    """`shard_NN`."""
    path: str
    """The input file."""
    start: int
    stop: int
    """Rows, counted from 0."""
    documents: Mapping[KDSplit, int]
    """In each split, the number of the first document that is made of these rows."""
    refused: frozenset[int]
    """Rows that were put aside."""
    threshold: int
    """That of the split rule."""
    vocabulary: str
    """A checked o200k file."""
    rate: float = 1.0
    """The share of rows that the audit compares."""
    kept: str | None = None
    """The file in which the texts of these rows were kept when their chunk was compiled; None: they are read again."""

    @property
    def label(self) -> str:
        """The job in words."""
        return f"comparing {self.path}, rows {self.start + 1:,} to {self.stop:,}"


def compile_and_keep(rate: float, job: ChunkJob) -> Receipt:
    """Do the work of a chunk, in a worker, and keep the texts of the rows that the audit compares later."""
    from chatmill.read.rows import texts_of  # pyarrow takes its time

    kept: dict[int, str | None] = {}

    def keep(rows: Any, first: int) -> None:
        texts = texts_of(rows.column(TEXT), check=False)
        for place in np.flatnonzero(audited(first - 1, len(texts), rate)).tolist():
            kept[first - 1 + place] = _shown(texts.raw(place))

    receipt = compile_chunk(job, keep)
    write_whole(kept_rows(job.place.directory, job.number, rate), json.dumps(kept).encode())
    return receipt


def kept_rows(dataset: Path, number: int, rate: float) -> Path:
    """Return the file next to the dataset of the recipe in which the texts of a chunk's rows are kept: JSON."""
    return dataset.parent / f"rows_{number:06d}_{rate}.json"


def audit_rows(job: RowRange) -> int:
    """Compare a sample of rows, in a worker, and return its size; the first difference is an `AuditError`."""
    chosen = audited(job.start, job.stop - job.start, job.rate)
    for finding in differences(job, chosen):
        raise AuditError(f"{finding}. The build is wrong here: report the row")
    return int(np.count_nonzero(chosen))


def differences(job: RowRange, chosen: NDArray[np.bool_]) -> Iterator[Finding]:
    """Compare the chosen rows of a range with their documents; what differs."""
    from chatmill.read.rows import texts_of  # pyarrow takes its time

    if not chosen.any():
        return
    official, at = OfficialRows(Path(job.vocabulary)), job.start
    shards = {split: _Stored(job, split) for split in KDSplit}
    following = dict(job.documents)
    kept = {} if job.kept is None else json.loads(Path(job.kept).read_bytes())
    for batch in parquet_batches(Path(job.path), job.start, job.stop, columns=COLUMNS if job.kept is None else (ID,)):
        ids = texts_of(batch.column(ID), check=False)
        is_valid, is_used = hashes_below(ids.texts, job.threshold), np.ones(len(ids), dtype=np.bool_)
        is_used[[row - at for row in job.refused if at <= row < at + len(ids)]] = False
        numbers = np.zeros(len(ids), dtype=np.int64)
        for split, in_split in ((KDSplit.TRAIN, is_used & ~is_valid), (KDSplit.VALID, is_used & is_valid)):
            count = int(np.count_nonzero(in_split))
            numbers[in_split] = np.arange(following[split], following[split] + count)
            following[split] += count
        places = np.flatnonzero(chosen[at - job.start :][: len(ids)]).tolist()
        if job.kept is None:
            texts = texts_of(batch.column(TEXT), check=False)
            kept = {str(at + place): _shown(texts.raw(place)) for place in places}
        for place in places:
            stored = shards[KDSplit.VALID if is_valid[place] else KDSplit.TRAIN]
            row = _Row(_shown(ids.raw(place)), kept[str(at + place)], f"{job.path}:row {at + place + 1}")
            if is_used[place]:
                yield from stored.compare(row, int(numbers[place]), official)
            else:
                yield from _look_again(row, official)
        at += len(ids)


class _Row(NamedTuple):
    """A row of the input."""

    id: str | None
    text: str | None
    where: str


def _shown(value: bytes | None) -> str | None:
    """Bytes of a file as text; what is not UTF-8 becomes something that no row may have."""
    return None if value is None else value.decode(errors="surrogateescape")


def _look_again(row: _Row, official: OfficialRows) -> Iterator[Finding]:
    """Yield a row that was put aside: neither the rules nor the official renderer take it."""
    record = {SYNTH_KD.id: row.id, SYNTH_KD.nested: row.text}
    if not isinstance(conversation_or_error(Raw(row.where, record), SYNTH_KD, ""), RecordError):
        with contextlib.suppress(RecordError):
            official.render(row.text)
            yield Finding(file=QUARANTINE, message="has a row that can be used", record=row.id or "", where=row.where)


class _Stored:
    """The documents of one shard in one split."""

    def __init__(self, job: RowRange, split: KDSplit) -> None:
        prefix = Path(job.root) / split / f"{job.name}_{TOKENS}"
        self._name, self._split = f"{split}/{job.name}", split.value
        self._shard = KDShard.open(prefix, is_own=job.kept is not None) if idx_path(prefix).exists() else None

    def compare(self, row: _Row, number: int, official: OfficialRows) -> Iterator[Finding]:
        """Yield a row and its document."""
        finding = partial(Finding, split=self._split, episode=number, record=row.id or "", where=row.where)
        if self._shard is None or number >= len(self._shard):
            yield finding(file=self._name, message="must have a document of this row, and ends before it")
            return
        try:
            rendered = official.render(row.text)
        except RecordError as error:
            yield finding(file=QUARANTINE, message=f"lacks a row that cannot be used: {error.message} ({error.code})")
            return
        ids, mask, stored_span = self._shard.document(number)
        span = shift_left(rendered.spans)
        columns = (
            (TOKENS, ids, rendered.ids),
            (SPAN, stored_span, span),
            (LOSSMASK, mask, (span > 0).astype(np.uint8)),
        )
        for column, stored, values in columns:
            at = first_difference(stored, values)
            if at is not None:
                around = slice(max(0, at - CONTEXT), at + CONTEXT)
                yield finding(
                    file=f"{self._name}_{column}.bin",
                    message=_sentence(stored, values, at),
                    token=at,
                    stored=encoding().decode(ids[around].tolist()) if column == TOKENS else "",
                    derived=encoding().decode(rendered.ids[around].tolist()) if column == TOKENS else "",
                )


def _sentence(stored: NDArray[Any], expected: NDArray[Any], at: int) -> str:
    if len(stored) != len(expected):
        return f"{len(stored):,} tokens are there where {len(expected):,} must be"
    return f"{stored[at]} is there where {expected[at]} must be"
