"""The work of one chunk: its records become episodes in a part folder, published whole, its receipt last."""

from __future__ import annotations

import gc
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.build.faults import fault_point
from chatmill.build.inputs import Chunk, ChunkKind, chunk_lines, chunk_records
from chatmill.build.ledger import Ledger
from chatmill.build.pipeline import Compiled, Pipeline, copies_of, hashes_below, record_key
from chatmill.build.publish import (
    canonical_json,
    publish_folder,
    storing,
    temporary_folder,
    verified_hash,
    write_atomic,
)
from chatmill.build.recipe import OnError, recipe_of
from chatmill.core.conversation import Conversation
from chatmill.errors import RecordError
from chatmill.read.files import Raw, decode_line
from chatmill.read.shapes import Shape, conversation_of, find_shape
from chatmill.read.typed import typed_conversation
from chatmill.store.episode_writer import EpisodeWriter

SPLITS = ("train", "val")
BATCH_RECORDS = 1024
"""Records that are rendered together; bounds the memory of a worker."""
BATCH_CHARACTERS = 8 << 20
AVERAGE_ROW = 2048
"""Characters that a row of Parquet is taken to have when batches are made."""
TYPED_SHAPES = ("openai", "harmony")
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


@lru_cache(maxsize=1)
def pipeline_of(recipe: str) -> Pipeline:
    """The pipeline of a recipe; kept, so that a worker loads its tokenizer once."""
    return Pipeline(recipe_of(json.loads(recipe)))


def compile_chunk(job: ChunkJob) -> dict[str, Any]:
    """Do the work of one chunk and publish it; gives its receipt.

    The folder is written under a temporary name, re-read and hashed, and renamed; the receipt inside it was written
    last, so a folder with its final name is always whole.
    """
    pipeline = pipeline_of(job.recipe)
    temporary = temporary_folder(job.folder)
    try:
        with storing(job.folder):
            receipt = _write_part(job, pipeline, temporary)
            fault_point("before_part_rename")
            publish_folder(temporary, job.folder, replace=True, step="part_folder")
            fault_point("after_part_rename")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk this may be what lets the others finish
        raise
    return receipt


def _write_part(job: ChunkJob, pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """Write everything that a part holds into a folder, the receipt last."""
    part = _Part(folder, pipeline)
    with _without_collector():
        for batch in _batches(_conversations(job, part)):
            part.add(batch)
    counts = part.finish()
    fault_point("after_part_write")
    receipt = {
        "number": job.number,
        "chunk": job.identity,
        "splits": counts,
        "ledger": part.ledger.as_json(),
        "files": {path.relative_to(folder).as_posix(): _file_record(path) for path in _files(folder)},
    }
    fault_point("before_receipt")
    write_atomic(folder / RECEIPT, canonical_json(receipt), step="receipt")
    return receipt


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cycle collector off: messages hold no cycles, and looking for some costs a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _file_record(path: Path) -> dict[str, Any]:
    """Size and hash of a file, read back from disk."""
    size = path.stat().st_size
    return {"bytes": size, "sha256": verified_hash(path, size)}


Sized = tuple[Conversation, int]
"""A conversation and about how many characters it has."""


def _conversations(job: ChunkJob, part: _Part) -> Iterator[Sized]:
    """The conversations of a chunk, as often as their weight says; what is left out is entered in the ledger."""
    read, records = part.read, part.ledger.records
    for found in itertools.islice(_records(job.chunk), job.max_records):
        if found is None:
            continue
        if isinstance(found, RecordError):
            read[job.chunk.source] += 1
            part.reject(found, job.chunk.source)
            continue
        source = found[0].source
        read[source] += 1
        copies = 1 if job.weight == 1 else copies_of(record_key(found[0]), job.weight)
        if copies == 1:
            yield found
            continue
        if not copies:
            records[source, "skipped", "weight"] += 1
        for copy in range(copies):
            records[source, "read", "repeated"] += copy > 0
            yield found


def _records(chunk: Chunk) -> Iterator[Sized | RecordError | None]:
    """Every line or row of a chunk: a conversation with its size, an error, or None for a blank line."""
    shape = find_shape(chunk.shape)
    if chunk.kind is ChunkKind.LINES:
        lines, first = chunk_lines(chunk)
        typed = shape.name in TYPED_SHAPES
        for number, line in enumerate(lines, first):
            where = f"{chunk.path}:{number}"
            quick = typed_conversation(line, where, chunk.source) if typed else None
            if quick is not None:
                yield quick, len(line)
            elif not line or line.isspace():
                yield None
            else:
                yield _slowly(decode_line(line, where), shape, chunk.source, len(line))
    else:
        for raw in chunk_records(chunk):
            yield _slowly(raw, shape, chunk.source, AVERAGE_ROW)


def _slowly(raw: Raw, shape: Shape, source: str, size: int) -> Sized | RecordError:
    try:
        if raw.error is not None:
            raise raw.error
        return conversation_of(raw.value, shape, where=raw.where, source=source), size
    except RecordError as error:
        return error


def _batches(conversations: Iterator[Sized]) -> Iterator[list[Conversation]]:
    """Conversations in groups that are bounded in number and in text."""
    batch: list[Conversation] = []
    characters = 0
    for conversation, size in conversations:
        batch.append(conversation)
        characters += size
        if len(batch) >= BATCH_RECORDS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


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

    def add(self, conversations: list[Conversation]) -> None:
        """Compile a batch and append its episodes to their splits."""
        compiled = self._pipeline.compile(conversations)
        for index, error in compiled.failed:
            self.reject(error, conversations[index].source)
        self.ledger.add(compiled.ledger)
        fraction = self._pipeline.recipe.split.val_fraction
        in_val = np.zeros(len(conversations), dtype=np.bool_)
        if fraction:
            in_val[:] = [hashes_below(record_key(conversation), fraction) for conversation in conversations]
        goes_to_val = in_val[compiled.source_index]
        for split, chosen in (("train", ~goes_to_val), ("val", goes_to_val)):
            wanted = np.flatnonzero(chosen)
            if len(wanted):
                self._append(split, compiled, wanted, conversations)

    def _append(
        self, split: str, compiled: Compiled, wanted: NDArray[np.int64], conversations: Sequence[Conversation]
    ) -> None:
        ids, offsets, weights, kinds = compiled.columns(wanted)
        origin = [conversations[i] for i in compiled.source_index[wanted].tolist()]
        if split not in self._writers:
            self._writers[split] = EpisodeWriter(self.folder, split)
        self._writers[split].append_batch(
            ids,
            offsets,
            weights,
            kinds if self._pipeline.recipe.keep_kinds else None,
            source=[conversation.source for conversation in origin],
            turns=compiled.turns[wanted],
            trained=compiled.trained[wanted],
            record_ids=[record_key(conversation) for conversation in origin],
        )

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


def _line_number(where: str) -> int:
    """The line or row that a place such as `chats.jsonl:17` or `chats.parquet:row 17` ends in."""
    digits = re.search(r"\d+$", where)
    return int(digits.group()) if digits else 0
