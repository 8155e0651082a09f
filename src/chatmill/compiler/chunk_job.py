"""The work of one chunk: its records become a shard, written once and published whole, with a receipt."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chatmill.compiler.chunk_output import STATE, ChunkOutput, line_number
from chatmill.compiler.chunk_shards import ChunkPlace
from chatmill.compiler.pipeline import BATCH_BYTES, Pipeline, copies_of, files_of
from chatmill.compiler.recipe import Recipe, Source, stored_recipe
from chatmill.core.canonical import canonical_json
from chatmill.core.conversations import UNUSED, Conversations
from chatmill.core.gc_pause import without_collector
from chatmill.core.ledger import NULLS_LEFT_OUT, Ledger
from chatmill.core.tokens import ranges
from chatmill.errors import ConfigError
from chatmill.files.inputs import fetch_inputs
from chatmill.read.columns import FileLines, Read, line_groups, read_files, read_lines
from chatmill.read.groups import group_of
from chatmill.read.picks import PICK
from chatmill.read.ranges import Chunk, ChunkKind, chunk_bytes, chunk_records, chunk_rows
from chatmill.read.shapes import find_shape
from chatmill.read.where import WHERE, parse_where
from chatmill.store.episode_layout import WORK
from chatmill.tokenizer.backends import ENGINE_FAILURES, Engine
from chatmill.tokenizer.probe import ProbeAnswers

JOINED_BYTES = 1 << 20
"""Small files are read together up to this size."""


class ChunkPiece(NamedTuple):
    """A range of one input file, and what its source says about it."""

    range: Chunk
    rules: Source
    max_records: int | None
    """Take only so many lines or rows of it; None: all."""
    skip: int = 0
    """Those of them, at its beginning, that are of another chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkJob:
    """Everything a worker needs to know about one chunk; small and picklable."""

    number: int
    """Place of the chunk in the build's order."""
    pieces: tuple[ChunkPiece, ...]
    """Its input, in order: a range of a large file, or several small files."""
    recipe: str
    """The recipe as JSON."""
    place: ChunkPlace
    """Where its shards and its receipt go."""
    fingerprint: str
    """Of all that decides the bytes of its shards; their receipt states it."""
    build: str
    """Fingerprint of the build, by which a worker knows that it sees the same folder as the driver."""
    files: str
    """What the files of the tokenizer, the template and the policy hold, by `Pipeline.files`."""
    answers: ProbeAnswers
    """What the worker's fast engine has to make of the probe."""

    @property
    def label(self) -> str:
        """The chunk in words, for messages."""
        first = self.pieces[0].range
        more = f" and {len(self.pieces) - 1} more files" if len(self.pieces) > 1 else ""
        return f"chunk {self.number} ({first.describe()}{more})"

    @property
    def work(self) -> Path:
        """The work folder of the build."""
        return self.place.directory / WORK

    @property
    def bytes(self) -> int:
        """Bytes of its input, unpacked."""
        return sum(piece.range.bytes for piece in self.pieces)


def recipe_json(recipe: Recipe) -> str:
    """Return a recipe as workers get it."""
    return canonical_json(recipe.as_json()).decode()


LOADED: dict[tuple[str, str, Engine], Pipeline] = {}
"""What this process has loaded, by the recipe, the contents of the files it names and the engine."""


def pipeline_of(
    recipe: str, engine: Engine = Engine.FAST, files: str | None = None, *, for_chunks: bool = False
) -> Pipeline:
    """The pipeline of a recipe; kept, so that a process loads each engine once (a fast one serves for every other).

    Files that were written anew are loaded anew; where `files` says what they must hold, that is an error.
    `for_chunks`: this engine does the work of the fast one in this process.
    """
    wanted = files or files_of(stored_recipe(recipe))
    kept = LOADED.get((recipe, wanted, Engine.FAST)) or LOADED.get((recipe, wanted, engine))
    if kept is None:
        for other in [key for key in LOADED if key[:2] != (recipe, wanted)]:
            del LOADED[other]
        kept = Pipeline(stored_recipe(recipe), engine=engine)
        if kept.files != wanted:
            raise ConfigError(
                f"the tokenizer {kept.recipe.tokenizer}, the template {kept.recipe.template} or the policy was written "
                "anew since this build began: start it again"
            )
        LOADED[recipe, wanted, engine] = kept
    if for_chunks:
        LOADED.setdefault((recipe, wanted, Engine.FAST), kept)
    return kept


def load_pipeline(recipe: str) -> None:
    """Make a worker ready for the chunks of a recipe; its engine is checked with the first of them."""
    pipeline_of(recipe, Engine.UNCHECKED)


def checked_pipeline(recipe: str, answers: ProbeAnswers, files: str) -> Pipeline:
    """Return the pipeline that chunks are compiled with: its engine is a reference or gives the answers of one.

    A fast engine that cannot be loaded, or answers otherwise, goes the whole way here: it is compared with a reference
    in this process, which replaces it.
    """
    if (recipe, files, Engine.FAST) not in LOADED:
        with contextlib.suppress(*ENGINE_FAILURES):
            candidate = pipeline_of(recipe, Engine.UNCHECKED, files)
            if answers.given_by(candidate.template.tokenizer):
                LOADED[recipe, files, Engine.FAST] = candidate
    return pipeline_of(recipe, files=files)


OnRows = Callable[[Any, int], None]
"""Is shown every Arrow batch that is read, and the number of its first row in the file, counted from 1."""


def compile_chunk(job: ChunkJob, on_rows: OnRows = lambda rows, first: None) -> dict[str, Any]:
    """Do the work of one chunk and publish its shards; gives the receipt. The driver syncs them."""
    _check_reach(job)
    pipeline = checked_pipeline(job.recipe, job.answers, job.files)
    fetch_inputs(piece.range.far for piece in job.pieces)

    def write(folder: Path) -> dict[str, Any]:
        with ChunkOutput(folder, pipeline, job.pieces[0].rules) as output, without_collector():
            unwanted = _unwanted(job.pieces)
            for pieces in _read_together(job.pieces, 0 if pipeline.recipe.tree is not None else JOINED_BYTES):
                output.begin_pieces([piece.range for piece in pieces])
                for batch in _batches(pieces, output, unwanted, pipeline.batch_sizes, on_rows):
                    output.add(batch)
                output.end_pieces()
            output.add_groups()
            return output.receipt(job.number, fingerprint=job.fingerprint, pieces=pieces_json(job.pieces))

    return job.place.publish(write)


def pieces_json(pieces: Sequence[ChunkPiece]) -> list[dict[str, Any]]:
    """Return what a receipt says of the input of its chunk."""
    names = ("path", "start", "stop", "first", "count", "digest")
    shared = ("max_records", "skip")
    return [
        {name: getattr(piece.range, name) for name in names}
        | {name: getattr(piece, name) for name in shared if getattr(piece, name)}
        for piece in pieces
    ]


def _check_reach(job: ChunkJob) -> None:
    """Refuse a worker on another machine that does not see the driver's work folder."""
    if job.place.store is not None:
        job.place.store.check_reach(job.build)
        return
    work = job.work
    try:
        fingerprint = json.loads((work / STATE).read_bytes())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        fingerprint = None
    if fingerprint != job.build:
        raise ConfigError(
            f"a worker on {platform.node()} cannot reach {work}, where the driver of this build keeps its work: "
            "workers write their shards there, so the output folder must be on a file system that all machines share, "
            "under the same path"
        )


def _read_together(pieces: Sequence[ChunkPiece], most: int) -> Iterator[list[ChunkPiece]]:
    """Put neighbours together that are read as one: small files of lines of one shape, up to `most` bytes of them.

    A batch takes some milliseconds, however few records it has.
    """
    together: list[ChunkPiece] = []
    names: set[str] = set()
    room = 0
    for piece in pieces:
        chunk = piece.range
        fits = _is_whole_lines(piece) and chunk.bytes <= room and chunk.before not in names
        if together and not (fits and chunk.shape == together[0].range.shape):
            yield together
            together = []
        if not together:
            names.clear()
            room = most if _is_whole_lines(piece) else 0
        together.append(piece)
        names.add(chunk.before)
        room -= chunk.bytes
    yield together


def _is_whole_lines(piece: ChunkPiece) -> bool:
    """Return whether a piece is all lines of its range."""
    return piece.range.kind is ChunkKind.LINES and piece.max_records is None and not piece.skip


def _batches(
    pieces: Sequence[ChunkPiece],
    output: ChunkOutput,
    unwanted: Mapping[str, str],
    sizes: Iterator[int],
    on_rows: OnRows,
) -> Iterator[Conversations]:
    """The conversations of pieces in groups, each as often as its weight says; what is left out is in the ledger.

    `unwanted` has the places of records that are not asked for, with the reason.
    """
    piece = pieces[0]
    came_of_arrow = find_shape(piece.range.shape).nulls_are_absent
    for batch, errors in _read_pieces(pieces, output, sizes, on_rows):
        output.read.update(batch.sources.take(batch.heads).counts())
        for (source, name), count in batch.unused.items():
            if name not in output.fields_read:
                output.ledger.notes[source, UNUSED + name] += count
        for error in errors:
            source = output.source_of(error.where)
            output.read[source] += 1
            if error.where in unwanted:
                output.ledger.records[source, "skipped", unwanted[error.where]] += 1
            else:
                output.reject(error, source)
        if unwanted:
            wanted = np.array([where not in unwanted for where in batch.wheres[:]], dtype=np.bool_)
            for place in batch.heads[~wanted[batch.heads]].tolist():
                output.ledger.records[batch.sources[place], "skipped", unwanted[batch.wheres[place]]] += 1
            batch = batch.take(np.flatnonzero(wanted))
        for source, count in batch.sources.take(batch.heads).counts().items() if came_of_arrow else ():
            output.ledger.notes[source, NULLS_LEFT_OUT] += count
        weighted = batch if piece.rules.weight == 1 else _weighted(batch, piece.rules.weight, output.ledger)
        if len(weighted):
            yield weighted


def _unwanted(pieces: Sequence[ChunkPiece]) -> dict[str, str]:
    """Find records that `where` or `pick` of their source leave out: place -> reason. A group is in one chunk."""
    rules, reasons = pieces[0].rules, dict[str, str]()
    expression, pick = parse_where(rules.where) if rules.where else None, rules.pick
    best: dict[str, tuple[float, str]] = {}
    for piece in pieces if expression or pick else ():
        first, end = piece.range.first + piece.skip, piece.range.first + (piece.max_records or piece.range.count)
        for raw in chunk_records(piece.range):
            if raw.error is not None or not first <= line_number(raw.where) < end:
                continue
            if expression is not None and not expression.accepts(raw.value):
                reasons[raw.where] = WHERE
            elif pick is not None and (group := group_of(raw.value, pick.group, piece.range)) is not None:
                score = pick.score(raw.value)
                if group in best and score <= best[group][0]:
                    reasons[raw.where] = PICK
                else:
                    reasons |= {best[group][1]: PICK} if group in best else {}
                    best[group] = score, raw.where
    return reasons


def _weighted(batch: Conversations, weight: float, ledger: Ledger) -> Conversations:
    """Return a batch with every record as often as the weight and the hash of its key say."""
    copies = np.array([copies_of(key, weight) for key in batch.keys], dtype=np.int64)
    for place in batch.heads.tolist():
        source, count = batch.sources[place], int(copies[place])
        if count == 0:
            ledger.records[source, "skipped", "weight"] += 1
        elif count > 1:
            ledger.records[source, "read", "repeated"] += count - 1
    chosen = np.repeat(np.arange(len(batch)), copies)
    return batch.take(chosen[np.lexsort((chosen, ranges(np.zeros_like(copies), copies), batch.records[chosen]))])


def _read_pieces(
    pieces: Sequence[ChunkPiece], output: ChunkOutput, sizes: Iterator[int], on_rows: OnRows
) -> Iterator[Read]:
    """Read the records of pieces in batches of bounded size, with the errors of each."""
    if len(pieces) == 1:
        return _read(pieces[0], output.message_fields, sizes, on_rows)
    return _read_joined(pieces, output.message_fields, sizes)


def _read(piece: ChunkPiece, kept: Collection[str], sizes: Iterator[int], on_rows: OnRows) -> Iterator[Read]:
    """Read one piece, with the unknown fields of messages that have one of these names."""
    chunk, shape, left = piece.range, find_shape(piece.range.shape), piece.max_records
    source, skip = chunk.source, piece.skip
    if chunk.kind is ChunkKind.LINES:
        data = chunk_bytes(chunk)
        begin = 0
        for _ in range(skip):
            begin = data.find(b"\n", begin) + 1
        data = data[begin:]
        for lines in line_groups(data, sizes, chunk.first + skip, None if left is None else left - skip):
            yield read_lines(data, lines, before=chunk.before, source=source, shape=shape, kept=kept)
    else:
        from chatmill.read.rows import read_rows  # pyarrow takes its time

        first, left = chunk.first, chunk.count if left is None else left
        for rows in chunk_rows(chunk, BATCH_BYTES, None if shape.rules is None else sorted(shape.fields)):
            table = rows.slice(0, left)
            on_rows(table, first)
            passed = min(table.num_rows, chunk.first + skip - first) if first < chunk.first + skip else 0
            if passed < table.num_rows:
                yield read_rows(
                    table.slice(passed),
                    first=first + passed,
                    path=chunk.path,
                    source=source,
                    shape=shape,
                    kept=kept,
                )
            first, left = first + table.num_rows, left - table.num_rows
            if not left:
                break


def _read_joined(pieces: Sequence[ChunkPiece], kept: Collection[str], sizes: Iterator[int]) -> Iterator[Read]:
    """Read several whole files of lines of one shape, likewise."""
    files: list[FileLines] = []
    texts: list[bytes] = []
    number = 1
    for chunk in (piece.range for piece in pieces):
        files.append(FileLines(number, chunk.first, chunk.before, chunk.source))
        text = chunk_bytes(chunk)
        texts += [text] if text.endswith(b"\n") else [text, b"\n"]
        number += chunk.count
    data = b"".join(texts)
    shape = find_shape(pieces[0].range.shape)
    for lines in line_groups(data, sizes):
        yield read_files(data, lines, files, shape, kept)
