"""The work of one chunk of the distillation dataset: its rows become a part, published whole, its receipt last."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.compiler.collector import without_collector
from chatmill.compiler.faults import fault_point
from chatmill.compiler.publish import (
    canonical_json,
    publish_folder,
    storing,
    temporary_folder,
    write_atomic,
)
from chatmill.core.shift import shift_left_ragged
from chatmill.core.tokens import offsets_of
from chatmill.distill.audit import Audit
from chatmill.distill.bulk import BulkRows, OfficialBatches
from chatmill.distill.draft import KDBatch
from chatmill.distill.parts import QUARANTINE, RECEIPT, PartSplit, check_part, part_receipt
from chatmill.distill.shards import RowBatch, Shard, shard_batches, shown
from chatmill.errors import FormatError, RecordError
from chatmill.store.durable import Durability
from chatmill.systems.synth_kd import Renderer, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class KDChunk:
    """Everything a worker needs to know about one chunk; small and picklable."""

    shard: Shard
    start: int
    stop: int
    """Rows of the shard, counted from 0."""
    valid_threshold: int
    renderer: Renderer
    audit_rate: float
    quarantine: bool
    vocabulary: str
    """A checked o200k file."""
    folder: str
    """Where the part is published."""

    @property
    def label(self) -> str:
        """The chunk in words, for messages."""
        return f"{self.shard.path}, rows {self.start + 1:,} to {self.stop:,}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the chunk is, so that a part is never taken for that of another cut."""
        return {"shard": self.shard.name, "start": self.start, "stop": self.stop}


@lru_cache(maxsize=2)
def renderer_of(renderer: Renderer, vocabulary: str) -> BulkRows | OfficialBatches:
    """Kept, so that a worker loads its tokenizer once."""
    return (BulkRows if renderer is Renderer.BULK else OfficialBatches)(Path(vocabulary))


def render_chunk(job: KDChunk) -> dict[str, Any]:
    """Do the work of one chunk and publish it, unless an earlier run did; gives its receipt."""
    found = _whole_part(job)
    if found is not None:
        return found
    temporary = temporary_folder(job.folder)
    try:
        with storing(job.folder):
            receipt = _write_part(job, temporary)
            fault_point("before_part_rename")
            publish_folder(temporary, job.folder, replace=True, step="part_folder", durability=Durability.SCRATCH)
            fault_point("after_part_rename")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this may be what lets the others finish
        raise
    return receipt


def _whole_part(job: KDChunk) -> dict[str, Any] | None:
    """The receipt of a part that an earlier run made; None where there is none that can be used as it is.

    Parts are not synced to disk, so after a crash of the machine one may be damaged: everything in it is read again.
    """
    folder = Path(job.folder)
    try:
        receipt = part_receipt(folder)
        for split, counts in receipt["splits"].items():
            check_part(folder, split, counts)
    except (FormatError, OSError, KeyError, TypeError):
        return None
    failed_unseen = receipt.get("reasons") and not job.quarantine
    return receipt if receipt.get("chunk") == job.identity and not failed_unseen else None


def _write_part(job: KDChunk, folder: Path) -> dict[str, Any]:
    renderer = renderer_of(job.renderer, job.vocabulary)
    reasons: Counter[str] = Counter()
    audit = Audit(renderer.official, job.audit_rate)
    with ExitStack() as stack, without_collector():
        part = {split: stack.enter_context(PartSplit(folder, split)) for split in Split}
        for rows in shard_batches(job.shard, job.start, job.stop):
            batch = renderer.render(rows.usable)
            _refuse(job, batch, rows, folder, reasons)
            audit.add(batch, rows)
            _append(part, batch, rows, job.valid_threshold)
        audit.compare()
        fault_point("after_part_write")
        splits = {split.value: written.finish() for split, written in part.items()}
    receipt = {
        "chunk": job.identity,
        "splits": {split: counts for split, counts in splits.items() if counts["rows"]},
        "audited": audit.rows,
        "reasons": dict(sorted(reasons.items())),
    }
    fault_point("before_receipt")
    write_atomic(folder / RECEIPT, canonical_json(receipt), step="receipt", durability=Durability.SCRATCH)
    return receipt


def _append(part: dict[Split, PartSplit], batch: KDBatch, rows: RowBatch, valid_threshold: int) -> None:
    """The rows of a batch to their splits, in order; runs of rows of one split are written as slices."""
    if not len(batch.rows):
        return
    offsets = offsets_of(batch.lengths)
    spans = shift_left_ragged(batch.spans, offsets)
    digests = b"".join([blake2b(rows.ids[row] or b"", digest_size=8).digest() for row in batch.rows.tolist()])
    if valid_threshold < 2**64:
        valid = np.frombuffer(digests, dtype=">u8").astype(np.uint64) < np.uint64(valid_threshold)
    else:
        valid = np.ones(len(batch.rows), dtype=np.bool_)
    borders = [0, *(np.flatnonzero(valid[1:] != valid[:-1]) + 1).tolist(), len(valid)]
    for first, last in itertools.pairwise(borders):
        tokens = slice(int(offsets[first]), int(offsets[last]))
        split = Split.VALID if valid[first] else Split.TRAIN
        part[split].append(batch.ids[tokens], spans[tokens], batch.lengths[first:last])


def _refuse(job: KDChunk, batch: KDBatch, rows: RowBatch, folder: Path, reasons: Counter[str]) -> None:
    """The rows that failed: the first one ends the build, or all are written to the quarantine file of the part."""
    for place, error in batch.failed:
        if not rows.ids[place]:
            message = "the row has no synth_id, which decides its split"
            error = RecordError(message, code="no_synth_id", path="synth_id")
        error.where, error.record_id = rows.where(place), rows.id_text(place)
        if not job.quarantine:
            hint = "--on-error quarantine writes such rows to a file and goes on"
            raise RecordError(
                f"{error.message} ({hint})",
                code=error.code,
                path=error.path,
                where=error.where,
                record_id=error.record_id,
            )
        reasons[error.code] += 1
        line = {
            "shard": job.shard.name, "row": rows.first + place + 1, "synth_id": shown(rows.ids[place]),
            "code": error.code, "field": error.path, "reason": error.message, "messages_json": shown(rows.texts[place]),
        }  # fmt: skip
        with (folder / QUARANTINE).open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())  # rare, and unlike the columns it is not checked when it is read again
