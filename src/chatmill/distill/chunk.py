"""The work of one chunk of the distillation dataset: its rows become one shard a split, published whole.

The shards are those of any build. The kind of a token says which span it is in: see `kinds_of_spans`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.compiler.chunk_output import SHARDS, ChunkOutput, publish_with_receipt
from chatmill.core.gc_pause import without_collector
from chatmill.core.harmony_ids import kinds_of_spans
from chatmill.core.hash_shares import hashes_below
from chatmill.core.tokens import offsets_of
from chatmill.distill.accounts import account
from chatmill.distill.audit import Audit
from chatmill.distill.input_shards import Shard, ShardRows, shard_batches, shown
from chatmill.distill.rows import BulkRows, KDBatch
from chatmill.errors import RecordError
from chatmill.store.episode_columns import EpisodeColumns
from chatmill.systems.synth_kd import KDSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class KDChunk:
    """Everything a worker needs to know about one chunk; small and picklable."""

    number: int
    """Place of the chunk among those of all shards."""
    shard: Shard
    start: int
    stop: int
    """Rows of the shard, counted from 0."""
    valid_threshold: int
    audit_rate: float
    quarantine: bool
    record_ids: bool
    """Whether they are kept."""
    vocabulary: str
    """A checked o200k file."""
    work: str
    """The work folder of the build."""

    @property
    def label(self) -> str:
        """The chunk in words, for messages."""
        return f"{self.shard.path}, rows {self.start + 1:,} to {self.stop:,}"

    @property
    def bytes(self) -> int:
        """Bytes of its input, about."""
        return round(self.shard.row_bytes * (self.stop - self.start))

    @property
    def folder(self) -> Path:
        """Where its shards are published."""
        return Path(self.work) / SHARDS / f"{self.number:06d}"


@lru_cache(maxsize=2)
def renderer_of(vocabulary: str) -> BulkRows:
    """Kept, so that a worker loads its tokenizer once."""
    return BulkRows(Path(vocabulary))


def render_chunk(job: KDChunk) -> dict[str, Any]:
    """Do the work of one chunk and publish it; gives its receipt."""
    return publish_with_receipt(job.folder, lambda folder: _write(job, folder))


def _write(job: KDChunk, folder: Path) -> dict[str, Any]:
    renderer = renderer_of(job.vocabulary)
    audit = Audit(renderer.official, job.audit_rate)
    with ChunkOutput(folder) as output, without_collector():
        for rows in shard_batches(job.shard, job.start, job.stop):
            batch = renderer.render(rows.usable)
            _refuse(job, batch, rows, output)
            audit.add(batch, rows)
            _append(output, batch, rows, job)
            account(output.ledger, job.shard.name, batch, len(rows.ids))
        audit.compare()
        return output.receipt(job.number, audited=audit.rows)


def _append(output: ChunkOutput, batch: KDBatch, rows: ShardRows, job: KDChunk) -> None:
    """The rows of a batch to their splits, in order; runs of rows of one split are written as slices."""
    if not len(batch.rows):
        return
    offsets, kinds = offsets_of(batch.lengths), kinds_of_spans(batch.spans)
    names = rows.ids.texts.take(batch.rows).packed()
    valid = hashes_below(names, job.valid_threshold)
    borders = [0, *(np.flatnonzero(valid[1:] != valid[:-1]) + 1).tolist(), len(valid)]
    for first, last in itertools.pairwise(borders):
        tokens = slice(int(offsets[first]), int(offsets[last]))
        columns = EpisodeColumns(
            ids=batch.ids[tokens].view(np.uint32),
            lengths=batch.lengths[first:last],
            kinds=kinds[tokens],
            record_id=names.part(first, last) if job.record_ids else None,
        )
        output.append(KDSplit.VALID if valid[first] else KDSplit.TRAIN, columns)


def refusals(batch: KDBatch, rows: ShardRows) -> Iterator[tuple[int, RecordError]]:
    """The places of rows that cannot be used, and why; the errors name row and id."""
    for place, error in batch.failed:
        if not rows.ids.raw(place):
            message = "the row has no synth_id, which decides its split"
            error = RecordError(message, code="no_synth_id", path="synth_id")
        error.where, error.record_id = rows.where(place), rows.id_text(place)
        yield place, error


def _refuse(job: KDChunk, batch: KDBatch, rows: ShardRows, output: ChunkOutput) -> None:
    """The rows that failed: the first one ends the build, or all are put aside."""
    for place, error in refusals(batch, rows):
        if not job.quarantine:
            hint = "--on-error quarantine writes such rows to a file and goes on"
            raise RecordError(
                f"{error.message} ({hint})",
                code=error.code,
                path=error.path,
                where=error.where,
                record_id=error.record_id,
            )
        output.ledger.records[job.shard.name, "quarantined", error.code] += 1
        line = {
            "shard": job.shard.name, "row": rows.first + place + 1, "synth_id": shown(rows.ids.raw(place)),
            "code": error.code, "field": error.path, "reason": error.message,
            "messages_json": shown(rows.texts.raw(place)),
        }  # fmt: skip
        output.write_rejected(json.dumps(line))
