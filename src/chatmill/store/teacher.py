"""A teacher's distributions next to a split: the k most likely tokens of each trained position, and the rest mass.

`teacher/SPLIT/` has an Arrow file for each part that was added, named by the hash of its bytes: it is there whole or
not at all. Parts come in any order; each document is in one of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import Hash
from chatmill.core.publish import file_digest, storing, sync_file, sync_folder, temporary_beside
from chatmill.core.tokens import offsets_of, ranges, segment_sums
from chatmill.errors import ConfigError, FormatError
from chatmill.store.split import Documents, Ints, Split, even_ranges

FOLDER = "teacher"
SUFFIX = ".teacher"
FORMAT, VERSION = "chatmill-teacher", 1
BATCH_ENTRIES = 1 << 22
"""Entries of a record batch, about, while a part is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAnswer:
    """The distributions of one document."""

    document: int
    tokens: int
    """How many of its first tokens the teacher has read."""
    hash: int
    """`ids_hash` of these."""
    ids: NDArray[np.uint32]
    """(targets, k), the most likely first."""
    logprobs: NDArray[np.float32]
    """(targets, k)."""
    rest: NDArray[np.float32]
    """(targets,): the probability of all other tokens."""


class Distributions(NamedTuple):
    """The distributions of some documents; where the teacher's context had ended, a target has none."""

    at: Ints
    """The token that each is about, in the flat ids of the documents."""
    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    """-inf for entries beyond those of a part with fewer of them."""
    rest: NDArray[np.float32]


class _Piece(NamedTuple):
    """A record batch of a part, as views of its file."""

    path: Path
    documents: Ints
    tokens: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    offsets: Ints
    """Targets before each document."""
    ids: NDArray[Any]
    logprobs: NDArray[np.float16]
    rest: NDArray[np.float32]


def ids_hash(ids: NDArray[np.uint32]) -> int:
    """Return a hash of token ids, for comparing what a teacher has read with what is stored."""
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<u4").data)


def targets_of(documents: Documents) -> NDArray[np.bool_]:
    """Return which tokens a teacher has a distribution for: those that are trained, but the first of each document."""
    trained = documents.trained.copy()
    trained[documents.offsets[:-1][np.diff(documents.offsets) > 0]] = False
    return trained


class TeacherColumn:
    """The distributions of a split: those of all its parts."""

    def __init__(self, dataset: Split, folder: Path) -> None:
        """Open what was added to the folder so far; a part that was made for other tokens or masks is refused."""
        self.dataset, self.folder = dataset, folder
        self.parts = sorted(self.folder.glob(f"*{SUFFIX}"))
        self._pieces = [piece for path in self.parts for piece in self._opened(path)]
        self.k = max((piece.ids.shape[1] for piece in self._pieces), default=0)
        """Entries of a distribution, at most."""
        self._piece, self._begins, self._counts = np.full((3, len(dataset)), -1, dtype=np.int64)
        for number, piece in enumerate(self._pieces):
            self._piece[piece.documents] = number
            self._begins[piece.documents] = piece.offsets[:-1]
            self._counts[piece.documents] = np.diff(piece.offsets)

    def _opened(self, path: Path) -> Iterator[_Piece]:
        import pyarrow as pa

        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            about = json.loads(reader.schema.metadata[b"chatmill"])
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate(full=True)
                documents = batch.column("document").to_numpy()
                if documents.min(initial=0) < 0 or documents.max(initial=0) >= len(self.dataset):
                    raise ValueError("it is about documents that are not there")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path}: cannot be read ({error}): remove it, and add its answers again") from None
        if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            raise FormatError(f"{path}: not a {FORMAT} of version {VERSION}: remove it, and add its answers again")
        if about["split"] != self.dataset.fingerprint:
            raise FormatError(
                f"{path}: was made for a split with other tokens or masks (fingerprint {about['split']}, this one has "
                f"{self.dataset.fingerprint}): remove {self.folder.parent}, and ask the teacher again"
            )
        for batch in batches:
            flat = {name: batch.column(name).values.to_numpy() for name in ("ids", "logprobs", "rest")}
            offsets = batch.column("rest").offsets.to_numpy().astype(np.int64)
            yield _Piece(
                path,
                batch.column("document").to_numpy(),
                batch.column("tokens").to_numpy(),
                batch.column("hash").to_numpy(),
                offsets,
                flat["ids"].reshape(-1, about["k"]),
                flat["logprobs"].reshape(-1, about["k"]),
                flat["rest"],
            )

    def has(self, numbers: Ints) -> NDArray[np.bool_]:
        """Return which documents the teacher has answered."""
        return self._piece[numbers] >= 0

    def unanswered(self) -> Iterator[tuple[Ints, Documents]]:
        """Documents that have targets and no distributions, some at a time."""
        open_ones = np.flatnonzero(~self.has(np.arange(len(self.dataset))))
        for first, last in even_ranges(self.dataset.lengths[open_ones]):
            numbers = open_ones[first:last]
            documents = self.dataset.gather(numbers)
            wanted = numbers[segment_sums(targets_of(documents), documents.offsets) > 0]
            if len(wanted):
                yield wanted, self.dataset.gather(wanted)

    def check_whole(self) -> None:
        """Refuse a column in which documents with targets are missing."""
        first = next(self.unanswered(), None)
        if first is not None:
            have = int(np.count_nonzero(self._piece >= 0))
            raise ConfigError(
                f"{self.folder}: the teacher has answered {have:,} of {len(self.dataset):,} documents, and not "
                f"document {first[0][0]}: chatmill teacher request writes what is missing, chatmill teacher add adds it"
            )

    def gather(self, numbers: Ints, lengths: Ints | None = None) -> Distributions:
        """Return the distributions of some documents that it has, or of the first `lengths` tokens of each."""
        documents = self.dataset.gather(numbers, lengths)
        places = np.flatnonzero(targets_of(documents))
        firsts = np.searchsorted(places, documents.offsets)
        counts = np.clip(self._counts[numbers], 0, np.diff(firsts))
        at = places[ranges(firsts[:-1], counts)]
        ids = np.zeros((len(at), self.k), dtype=np.uint32)
        logprobs = np.full((len(at), self.k), -np.inf, dtype=np.float32)
        rest = np.empty(len(at), dtype=np.float32)
        entries, pieces = ranges(self._begins[numbers], counts), np.repeat(self._piece[numbers], counts)
        for number in np.unique(pieces).tolist():
            piece, into = self._pieces[number], pieces == number
            k, rows = piece.ids.shape[1], entries[into]
            ids[into, :k], logprobs[into, :k], rest[into] = piece.ids[rows], piece.logprobs[rows], piece.rest[rows]
        return Distributions(at, ids, logprobs, rest)

    def coverage(self) -> dict[str, int]:
        """Documents and targets of the split, and how many of both have distributions; `k`, parts and bytes."""
        counts = {"documents": 0, "answered": 0, "targets": 0, "distributions": 0}
        for numbers in self.dataset.batches():
            documents, has = self.dataset.gather(numbers), self.has(numbers)
            targets = segment_sums(targets_of(documents), documents.offsets)
            counts["documents"] += int(np.count_nonzero(targets))
            counts["targets"] += int(targets.sum())
            counts["answered"] += int(np.count_nonzero(targets[has]))
        counts["distributions"] = sum(len(piece.rest) for piece in self._pieces)
        size = sum(path.stat().st_size for path in self.parts)
        return {**counts, "k": self.k, "parts": len(self.parts), "bytes": size}

    def problems(self, vocab_size: int) -> Iterator[tuple[Path, str]]:
        """Yield what is wrong with the files, the hashes of documents, their targets, and the numbers."""
        for path in self.parts:
            if file_digest(path, Hash.XXH128) != path.name.removesuffix(SUFFIX):
                yield path, "its bytes have changed since it was written: its name is their hash"
        seen = np.zeros(len(self.dataset), dtype=bool)
        for piece in self._pieces:
            for row, number in enumerate(piece.documents.tolist()):
                document = self.dataset.gather(np.array([number]))
                tokens, distributions = int(piece.tokens[row]), int(piece.offsets[row + 1] - piece.offsets[row])
                if seen[number]:
                    yield piece.path, f"document {number} is there twice"
                if tokens > len(document.ids) or ids_hash(document.ids[:tokens]) != int(piece.hashes[row]):
                    yield piece.path, f"document {number} has other ids than those that the teacher has read"
                elif distributions != int(np.count_nonzero(targets_of(document)[:tokens])):
                    yield (
                        piece.path,
                        f"document {number} has {distributions} distributions, and not one for each target",
                    )
                seen[number] = True
            if problem := wrong_numbers(piece.ids, piece.logprobs.astype(np.float64), piece.rest, vocab_size):
                yield piece.path, problem[1]


TOLERANCE = 0.01
"""How far the sum of a distribution may be from 1: servers round, and so do 16 bits."""


def wrong_numbers(
    ids: NDArray[Any], logprobs: NDArray[np.float64], rest: NDArray[Any], vocab_size: int
) -> tuple[int, str] | None:
    """Return the first row that is no distribution over the vocabulary, and why; None where all are."""
    ordered = np.sort(ids, axis=1)
    total = np.exp(logprobs).sum(axis=1) + rest
    for wrong, words in (
        (((ids < 0) | (ids >= vocab_size)).any(axis=1), f"an id that is not in the vocabulary of {vocab_size:,}"),
        ((ordered[:, 1:] == ordered[:, :-1]).any(axis=1), "an id twice in one distribution"),
        (np.isnan(logprobs).any(axis=1) | (logprobs > TOLERANCE).any(axis=1), "a log-probability that is above 0"),
        ((np.abs(total - 1) > TOLERANCE) | (rest < 0), "probabilities that do not add up to 1"),
    ):
        if wrong.any():
            return int(np.argmax(wrong)), words
    return None


class PartWriter:
    """Writes a part under a temporary name; `publish` gives it its own, when everything is in it."""

    def __init__(self, dataset: Split, folder: Path, k: int, vocab_size: int) -> None:
        """`k` entries each; ids take 16 bits where the vocabulary allows it."""
        import pyarrow as pa

        self.folder, self.k = folder, k
        self._id_type = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        about = {"format": FORMAT, "version": VERSION, "split": dataset.fingerprint, "k": k}
        types = {"ids": pa.from_numpy_dtype(self._id_type), "logprobs": pa.float16(), "rest": pa.float32()}
        self._schema = pa.schema(
            [
                ("document", pa.int64()),
                ("tokens", pa.int32()),
                ("hash", pa.uint64()),
                *((name, pa.list_(kind)) for name, kind in types.items()),
            ],
            metadata={"chatmill": json.dumps(about)},
        )
        with storing(self.folder, "create the folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_beside(self.folder / "part")
        self._sink = pa.OSFile(str(self._temporary), "wb")
        self._file = pa.ipc.new_file(self._sink, self._schema)
        self._held: list[TeacherAnswer] = []
        self._entries = 0

    def add(self, answer: TeacherAnswer) -> None:
        """Append the distributions of a document."""
        self._held.append(answer)
        self._entries += answer.ids.size
        if self._entries >= BATCH_ENTRIES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        answers, self._held, self._entries = self._held, [], 0
        if not answers:
            return
        offsets = offsets_of(np.array([len(answer.rest) for answer in answers]))
        logprobs = np.concatenate([answer.logprobs.ravel() for answer in answers])
        flat = {
            "ids": (np.concatenate([answer.ids.ravel() for answer in answers]).astype(self._id_type), offsets * self.k),
            "logprobs": (np.maximum(logprobs, np.finfo(np.float16).min).astype(np.float16), offsets * self.k),
            "rest": (np.concatenate([answer.rest for answer in answers]).astype(np.float32), offsets),
        }
        columns = [
            pa.array([getattr(answer, field.name) for answer in answers], field.type)
            for field in list(self._schema)[:3]
        ]
        columns += [
            pa.ListArray.from_arrays(pa.array(its_offsets.astype(np.int32)), pa.array(values))
            for values, its_offsets in flat.values()
        ]
        with storing(self._temporary):
            self._file.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def publish(self) -> Path:
        """Name the part."""
        self._flush()
        with storing(self.folder):
            self._file.close()
            self._sink.close()
            sync_file(self._temporary)
            final = self.folder / f"{file_digest(self._temporary, Hash.XXH128)}{SUFFIX}"
            os.replace(self._temporary, final)
            sync_folder(self.folder)
        return final

    def discard(self) -> None:
        """Leave nothing after; a part that is published stays."""
        self._sink.close()
        self._temporary.unlink(missing_ok=True)
