"""The work of one chunk: its records become episodes in a part folder, published whole, its receipt last."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.collector import without_collector
from chatmill.compiler.faults import fault_point
from chatmill.compiler.ledger import Ledger
from chatmill.compiler.pipeline import Compiled, Pipeline, copies_of, hashes_below
from chatmill.compiler.plain_recipe import OnError, plain_recipe
from chatmill.compiler.publish import (
    canonical_json,
    publish_folder,
    sha256_file,
    storing,
    temporary_folder,
    write_atomic,
)
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.read.columns import line_groups, read_entries, read_lines
from chatmill.read.ranges import Chunk, ChunkKind, chunk_bytes, chunk_entries, chunk_rows
from chatmill.read.shapes import find_shape
from chatmill.store.durable import Durability
from chatmill.store.episode_columns import EpisodeColumns
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.tokenizer.backends import ENGINE_FAILURES, Engine
from chatmill.tokenizer.probe import ProbeAnswers

SPLITS = ("train", "val")
BATCH_BYTES = 4 << 20
"""Bytes of lines that are rendered together; bounds the memory of a worker."""
BATCH_ROWS = 1024
"""Entries of a list that are rendered together."""
REJECTED = "rejected.jsonl"
RECEIPT = "receipt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkJob:
    """Everything a worker needs to know about one chunk; small and picklable."""

    number: int
    """Place of the chunk in the build's order."""
    chunk: Chunk
    weight: float
    """Weight of the chunk's source."""
    max_records: int | None
    """Take only so many lines or rows of this chunk."""
    recipe: str
    """The recipe as JSON."""
    parts: str
    """Folder of all parts."""
    answers: ProbeAnswers | None = None
    """What the worker's fast engine has to make of the probe; None: it is compared with a reference in the worker."""

    @property
    def label(self) -> str:
        """The chunk in words, for messages."""
        return f"chunk {self.number} ({self.chunk.path}, from line or row {self.chunk.first} on)"

    @property
    def identity(self) -> dict[str, Any]:
        """What the chunk is, so that a part is never taken for that of another cut of the same input."""
        chunk = self.chunk
        return {"path": chunk.path, "first": chunk.first, "count": chunk.count, "max_records": self.max_records}

    @property
    def folder(self) -> Path:
        """Where the part is published."""
        return Path(self.parts) / f"{self.number:06d}"


_KEPT: dict[tuple[str, Engine], Pipeline] = {}


def pipeline_of(recipe: str, engine: Engine = Engine.FAST) -> Pipeline:
    """The pipeline of a recipe; kept, so that a process loads each engine once (a fast one serves for every other)."""
    kept = _KEPT.get((recipe, Engine.FAST)) or _KEPT.get((recipe, engine))
    if kept is None:
        for other in [key for key in _KEPT if key[0] != recipe]:
            del _KEPT[other]
        kept = _KEPT[recipe, engine] = Pipeline(plain_recipe(recipe), engine=engine)
    return kept


def load_pipeline(recipe: str) -> None:
    """Make a worker ready for the chunks of a recipe; its engine is checked with the first of them."""
    pipeline_of(recipe, Engine.UNCHECKED)


def checked_pipeline(recipe: str, answers: ProbeAnswers | None) -> Pipeline:
    """The pipeline that chunks are compiled with: its engine is a reference or gives the answers of one.

    A fast engine that cannot be loaded, or answers otherwise, goes the whole way here: it is compared with a reference
    in this process, which replaces it.
    """
    if answers is not None and (recipe, Engine.FAST) not in _KEPT:
        with contextlib.suppress(*ENGINE_FAILURES):
            candidate = pipeline_of(recipe, Engine.UNCHECKED)
            if candidate.gives(answers):
                _KEPT[recipe, Engine.FAST] = candidate
    return pipeline_of(recipe)


def compile_chunk(job: ChunkJob) -> dict[str, Any]:
    """Do the work of one chunk and publish it; gives its receipt.

    The folder is written under a temporary name, re-read and hashed, and renamed; the receipt inside it was written
    last, so a folder with its final name is whole. It is not synced to disk: should the machine itself go down, a
    resumed build finds out by the hashes of the receipt, and makes the chunk again.
    """
    pipeline = checked_pipeline(job.recipe, job.answers)
    temporary = temporary_folder(job.folder)
    try:
        with storing(job.folder):
            receipt = _write_part(job, pipeline, temporary)
            fault_point("before_part_rename")
            publish_folder(temporary, job.folder, replace=True, step="part_folder", durability=Durability.SCRATCH)
            fault_point("after_part_rename")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this may be what lets the others finish
        raise
    return receipt


def _write_part(job: ChunkJob, pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """Write everything that a part holds into a folder, the receipt last."""
    part = _Part(folder, pipeline)
    with without_collector():
        for batch in _batches(job, part):
            part.add(batch)
    counts = part.finish()
    fault_point("after_part_write")
    receipt = {
        "number": job.number,
        "chunk": job.identity,
        "splits": counts,
        "ledger": part.ledger.as_json(),
        "files": part.file_records(),
    }
    fault_point("before_receipt")
    write_atomic(folder / RECEIPT, canonical_json(receipt), step="receipt", durability=Durability.SCRATCH)
    return receipt


def _batches(job: ChunkJob, part: _Part) -> Iterator[Conversations]:
    """The conversations of a chunk in groups, each as often as its weight says; what is left out is in the ledger."""
    for batch, errors in _read(job):
        part.read.update(batch.sources)
        for error in errors:
            part.read[job.chunk.source] += 1
            part.reject(error, job.chunk.source)
        weighted = batch if job.weight == 1 else _weighted(batch, job.weight, part.ledger)
        if len(weighted):
            yield weighted


def _weighted(batch: Conversations, weight: float, ledger: Ledger) -> Conversations:
    """A batch with every record as often as the weight and the hash of its key say."""
    copies = np.array([copies_of(key, weight) for key in batch.keys], dtype=np.int64)
    for source, count in zip(batch.sources, copies.tolist(), strict=True):
        if count == 0:
            ledger.records[source, "skipped", "weight"] += 1
        elif count > 1:
            ledger.records[source, "read", "repeated"] += count - 1
    chosen = np.repeat(np.arange(len(batch)), copies)
    return batch.take(chosen)


def _read(job: ChunkJob) -> Iterator[tuple[Conversations, list[RecordError]]]:
    """The records of a chunk in groups that are bounded in number or in text, with the errors among them."""
    chunk, shape, left = job.chunk, find_shape(job.chunk.shape), job.max_records
    path, source = chunk.path, chunk.source
    if chunk.kind is ChunkKind.LINES:
        data, first = chunk_bytes(chunk)
        for lines in line_groups(data, BATCH_BYTES, first, left):
            yield read_lines(data, lines, path=path, source=source, shape=shape)
    elif chunk.kind is ChunkKind.ENTRIES:
        entries = chunk_entries(chunk)[:left]
        for at in range(0, len(entries), BATCH_ROWS):
            some = entries[at : at + BATCH_ROWS]
            yield read_entries(some, first=chunk.first + at, path=path, source=source, shape=shape)
    else:
        from chatmill.read.rows import read_rows  # pyarrow takes its time

        first, left = chunk.first, chunk.count if left is None else left
        for rows in chunk_rows(chunk):
            some = rows.slice(0, left)
            yield read_rows(some, first=first, path=path, source=source, shape=shape)
            first, left = first + some.num_rows, left - some.num_rows
            if not left:
                break


class _Part:
    """The growing output of one chunk: a split of episodes each for train and val, and the rejected records."""

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        self.folder = folder
        self.ledger = Ledger()
        self.read: Counter[str] = Counter()
        """Records read, by source; entered in the ledger at the end."""
        self._pipeline = pipeline
        self._writers: dict[str, EpisodeWriter] = {}
        self._rejected: list[tuple[int, str]] = []  # line or row, and the entry

    def reject(self, error: RecordError, source: str) -> None:
        """Quarantine a record, or end the build."""
        if self._pipeline.recipe.on_error is OnError.FAIL:
            raise error
        self.ledger.records[source, "quarantined", error.code] += 1
        entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
        line = json.dumps({**entry, "message": error.message}, ensure_ascii=False)
        self._rejected.append((_line_number(error.where), line))

    def add(self, conversations: Conversations) -> None:
        """Compile a batch and append its episodes to their splits."""
        compiled = self._pipeline.compile(conversations)
        sources = conversations.sources
        for index, error in compiled.failed:
            self.reject(error, sources[index])
        self.ledger.add(compiled.ledger)
        fraction = self._pipeline.recipe.split.val_fraction
        in_val = np.zeros(len(conversations), dtype=np.bool_)
        if fraction:
            in_val[:] = [hashes_below(key, fraction) for key in conversations.keys]
        goes_to_val = in_val[compiled.source_index]
        for split, chosen in (("train", ~goes_to_val), ("val", goes_to_val)):
            wanted = np.flatnonzero(chosen)
            if len(wanted):
                self._append(split, compiled, wanted, conversations)

    def _append(self, split: str, compiled: Compiled, wanted: NDArray[np.int64], conversations: Conversations) -> None:
        ids, offsets, weights, kinds = compiled.columns(wanted)
        if split not in self._writers:
            self._writers[split] = EpisodeWriter(self.folder, split, durability=Durability.SCRATCH)
        columns = EpisodeColumns(
            ids=ids.view(np.uint32),
            lengths=np.diff(offsets),
            mask=weights,
            kinds=kinds if self._pipeline.recipe.keep_kinds else None,
            source=compiled.source_codes[wanted].astype(np.uint32),
            turns=compiled.turns[wanted].astype(np.uint32),
            trained=compiled.trained[wanted].astype(np.uint32),
            record_id=conversations.keys.take(compiled.source_index[wanted]),
        )
        self._writers[split].append_columns(columns, compiled.source_names)

    def finish(self) -> dict[str, dict[str, int]]:
        """Close all files; episodes and tokens per split."""
        for source, count in self.read.items():
            self.ledger.records[source, "read", ""] += count
        counts = {}
        for split, writer in self._writers.items():
            writer.close()
            counts[split] = {"episodes": writer.episodes, "tokens": writer.tokens}
        if self._rejected:
            in_order = sorted(self._rejected, key=itemgetter(0))  # reading and rendering refuse at different times
            (self.folder / REJECTED).write_text("".join(f"{line}\n" for _, line in in_order), encoding="utf-8")
        return counts

    def file_records(self) -> dict[str, dict[str, Any]]:
        """Size and hash of every file of the finished part, as they were read back."""
        records: dict[str, dict[str, Any]] = {}
        for split, writer in self._writers.items():
            (shard,) = writer.manifest().shards
            for name, record in shard.files.items():
                records[f"{split}/{name}"] = {"bytes": record.bytes, "sha256": record.sha256}
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            name = path.relative_to(self.folder).as_posix()
            if name not in records:
                records[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        return records


def _line_number(where: str) -> int:
    """The line or row that a place such as `chats.jsonl:17` or `chats.parquet:row 17` ends in."""
    digits = re.search(r"\d+$", where)
    return int(digits.group()) if digits else 0
