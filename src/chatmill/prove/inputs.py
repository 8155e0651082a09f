"""The inputs of a build, cut again into its chunks, and their records one at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from chatmill.compiler.chunk_job import ChunkPiece, pieces_json
from chatmill.compiler.chunk_shards import CHUNKS
from chatmill.compiler.engines.jobs import Executor, results_of
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.sources import plan_sources
from chatmill.core.checksums import INPUT_HASH
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import record_key
from chatmill.core.ledger import Ledger
from chatmill.core.words import counted
from chatmill.errors import ChatmillError, DataError, FormatError, RecordError
from chatmill.prove.reference import hash_share
from chatmill.prove.report import VerifyReport
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.file_format import FileFormat
from chatmill.read.files import Raw, read_format, read_records
from chatmill.read.groups import group_of, no_group
from chatmill.read.lines import open_bytes
from chatmill.read.picks import PICK
from chatmill.read.places import STDIN, is_elsewhere, place
from chatmill.read.ranges import chunk_records
from chatmill.read.record_shape import conversation_or_error
from chatmill.read.shapes import find_shape
from chatmill.read.where import WHERE, parse_where


class ReadRecord(NamedTuple):
    """One record of the inputs: a conversation, or the reason why it is none."""

    source: str
    """Its own source name, or the one of its file."""
    copies: int
    """How often the record is used, by the weight of its source."""
    conversation: Conversation | None
    error: RecordError | None
    group: str | None = None
    """What the records of its tree agree in, where the recipe groups them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedChunk:
    """What chunks.jsonl says of one chunk, and its input as it was cut again."""

    number: int
    pieces: tuple[ChunkPiece, ...]
    ledger: Ledger
    rejected: tuple[int, int]
    """Where the lines of its rejected records begin and end in the file of all, in bytes."""


def missing_inputs(inputs: Sequence[Mapping[str, Any]]) -> str:
    """Say which inputs cannot be read again; empty if all can."""
    missing = [file["path"] for file in inputs if not _is_there(file["path"])]
    if not missing:
        return ""
    relative = "" if os.path.isabs(missing[0]) else f" (relative names start from {Path.cwd()})"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"the input {missing[0]} is not here{more}{relative}"


def _is_there(path: str) -> bool:
    """Return whether an input can be read again; standard input cannot, nor can a store that is out of reach."""
    try:
        return path != STDIN and place(path).is_file()
    except ChatmillError:
        return False


def stated_chunks(
    folder: Path, manifest: Mapping[str, Any], recipe: Recipe, spool: Path, book: VerifyReport, executor: Executor
) -> tuple[list[StatedChunk], Counter[str]]:
    """Cut the inputs again, on an executor: the chunks, and the lines or rows that `max_records` leaves out, by source.

    A file that has changed is a finding, and then a `DataError`. Every line or row must be in exactly one chunk, in
    order, or left out, by a count that knows nothing of the cutter; and chunks.jsonl must say the same. A `FormatError`
    where that is not so.
    """
    inputs = manifest["inputs"]
    planned = plan_sources(_as_recorded(recipe, [file["path"] for file in inputs]), spool, executor=executor)
    changed = 0
    for file, stated in zip(planned.files, inputs, strict=True):
        if (file.bytes, file.digest) != (stated["bytes"], stated[INPUT_HASH]):
            said = f"the manifest says {stated['bytes']:,} and {stated[INPUT_HASH]}"
            book.wrong(
                file.path, f"the input has changed: {file.bytes:,} bytes with {INPUT_HASH} {file.digest}, {said}"
            )
            changed += 1
    if changed:
        raise DataError(f"{changed} of {len(inputs)} inputs have changed since the build")
    book.compared.append(f"{counted(len(inputs), 'input')} with the hashes of the manifest")
    uncovered = Counter[str]()
    names = [file.path for file in planned.files]
    names = [name if is_elsewhere(name) else os.path.abspath(name) for name in names]  # workers may run elsewhere
    counts = [PlainCount(name, agent) for name, agent in zip(names, planned.agents, strict=True)]
    for file, count in zip(planned.files, results_of(executor, plain_count, counts), strict=True):
        uncovered[file.source] += count
    path, done = "", 0
    for piece in chain.from_iterable(planned.chunks):
        chunk = piece.range
        path, done = chunk.path, done if chunk.path == path else 0
        begin = chunk.first - 1 + piece.skip
        if begin not in (0, done):
            raise FormatError(f"{path} was cut wrongly: line or row {begin + 1} follows {done}")
        done = chunk.first - 1 + (piece.max_records or chunk.count)
        uncovered[chunk.source] -= done - begin
    for source, count in uncovered.items():
        if count != planned.capped[source]:
            raise FormatError(f"{source} was cut wrongly: {count:,} lines or rows are in no chunk")
    return _as_stated(folder, planned.chunks), +planned.capped


def _as_recorded(recipe: Recipe, paths: Sequence[str]) -> Recipe:
    """Return the recipe with the files of the build alone; files that a glob matches only now are left out."""
    if len(recipe.sources) == 1:
        return replace(recipe, sources=[replace(recipe.sources[0], path=list(paths))])
    found = [[str(path) for path in resolve_paths(source.patterns)] for source in recipe.sources]
    recorded = set(paths)
    kept = [[path for path in named if path in recorded] for named in found]
    if list(chain.from_iterable(kept)) != list(paths):
        raise DataError(
            "the sources of the recipe do not give the inputs of the manifest any more, or give them in another order: "
            "restore the files to where they were"
        )
    sources = [replace(source, path=named) for source, named in zip(recipe.sources, kept, strict=True) if named]
    return replace(recipe, sources=sources)


class PlainCount(NamedTuple):
    """The order to count the records of a file."""

    name: str
    agent: AgentOptions
    """What its source says of files that agents left."""

    @property
    def label(self) -> str:
        """The job in words, for messages."""
        return f"the count of {self.name}"


def plain_count(order: PlainCount) -> int:
    """Return the lines or rows of a file, counted in the plainest way."""
    path = place(order.name)
    match read_format(path, order.agent.format):
        case FileFormat.AGENT:
            return sum(1 for _ in read_records(path, order.agent, order.agent.format))
        case FileFormat.JSONL:
            with open_bytes(path) as lines:
                return sum(1 for _ in lines)
        case FileFormat.PARQUET:
            import pyarrow.parquet

            with path.open("rb") as rows:
                return int(pyarrow.parquet.read_metadata(rows).num_rows)
        case _:
            return sum(1 for _ in read_records(path))


def _as_stated(folder: Path, chunks: Sequence[tuple[ChunkPiece, ...]]) -> list[StatedChunk]:
    """Return the chunks, each of which must be what chunks.jsonl says of it."""
    found: list[StatedChunk] = []
    rejected = 0
    try:
        lines = (folder / CHUNKS).read_bytes().splitlines()
        if len(lines) != len(chunks):
            raise FormatError(f"it has {len(lines):,} chunks; the inputs give {len(chunks):,}")
        for number, (line, pieces) in enumerate(zip(lines, chunks, strict=True)):
            stated = json.loads(line)
            if pieces_json(pieces) != stated["pieces"]:
                raise FormatError(f"chunk {number} is of other input than the manifest says")
            end = rejected + (stated["rejected"]["bytes"] if stated["rejected"] else 0)
            ledger = Ledger.from_json(stated["ledger"])
            found.append(StatedChunk(number=number, pieces=pieces, ledger=ledger, rejected=(rejected, end)))
            rejected = end
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"it cannot be read: {error!r}") from None
    return found


def picked(pieces: Sequence[ChunkPiece]) -> tuple[set[str], set[str]]:
    """Return the groups of records of which one is used, and the places of the records that are not.

    Used is the best of its group, the first of several that are as good.
    """
    best: dict[str, tuple[float, str]] = {}
    losers: set[str] = set()
    for piece in pieces:
        pick = piece.rules.pick
        for raw in _raws(piece) if pick is not None else ():
            if pick is None or raw.error is not None or not _is_wanted(piece, raw):
                continue
            if (group := group_of(raw.value, pick.group, piece.range)) is not None:
                score = pick.score(raw.value)
                if group in best and score <= best[group][0]:
                    losers.add(raw.where)
                    continue
                losers |= {best[group][1]} if group in best else set()
                best[group] = score, raw.where
    return set(best), losers


def _is_wanted(piece: ChunkPiece, raw: Raw) -> bool:
    """Return whether the source asks for a record by its fields."""
    return piece.rules.where is None or parse_where(piece.rules.where).accepts(raw.value)


def _raws(piece: ChunkPiece) -> Iterator[Raw]:
    """Yield the records of a piece as they were read."""
    chunk = piece.range
    for raw in chunk_records(chunk):
        number = int(raw.where.rpartition(":")[2].removeprefix("row "))
        if piece.max_records is not None and number >= chunk.first + piece.max_records:
            return
        if number >= chunk.first + piece.skip:
            yield raw


def read_piece(
    piece: ChunkPiece, group: str | None = None, losers: Collection[str] = frozenset()
) -> Iterator[ReadRecord]:
    """Yield the records of a piece, one at a time; `group` is the field that says which of them share a tree."""
    chunk, rules = piece.range, piece.rules
    shape, name = find_shape(chunk.shape), chunk.source
    for raw in _raws(piece):
        is_unwanted = not _is_wanted(piece, raw)
        for record in shape.embedded(raw):
            conversation = conversation_or_error(record, shape, name)
            if raw.error is None and (is_unwanted or raw.where in losers):
                source = name if isinstance(conversation, RecordError) else conversation.source
                yield ReadRecord(source, 1, None, RecordError("is not asked for", code=WHERE if is_unwanted else PICK))
            elif isinstance(conversation, RecordError):
                yield ReadRecord(name, 1, None, conversation)
            elif group is not None and (key := group_of(raw.value, group, chunk)) is None:
                yield ReadRecord(conversation.source, 1, None, no_group(group, conversation.where, conversation.id))
            else:
                whole, rest = divmod(Fraction(str(rules.weight)), 1)
                copies = int(whole) + (hash_share(f"weight\0{record_key(conversation)}") < rest)
                yield ReadRecord(conversation.source, copies, conversation, None, None if group is None else key)
