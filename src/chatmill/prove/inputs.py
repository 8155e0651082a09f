"""The inputs of a build, cut again into its chunks, and a count of their lines that knows nothing of the cutter."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.compiler.chunk_job import ChunkPiece, pieces_json
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.chunk_shards import CHUNKS
from chatmill.compiler.inputs import InputScan, ScannedInput, fetched
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe, Source
from chatmill.compiler.sources import group_field, scan_all
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import record_key
from chatmill.core.ledger import Ledger
from chatmill.core.words import counted
from chatmill.errors import ChatmillError, DataError, FormatError, RecordError
from chatmill.prove.reference import hash_share
from chatmill.prove.report import VerifyReport
from chatmill.read.file_format import FileFormat, file_format
from chatmill.read.files import Raw, read_records
from chatmill.read.groups import group_of, no_group
from chatmill.read.lines import open_bytes
from chatmill.read.picks import PICK
from chatmill.read.places import STDIN, place, size_of, xxh128_of
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


def check_inputs(inputs: Sequence[Mapping[str, Any]], book: VerifyReport) -> str:
    """Compare sizes and hashes with the manifest; a changed file is a finding. Gives why records cannot be read."""
    total, done = sum(file["bytes"] for file in inputs), 0
    missing = [file["path"] for file in inputs if not _is_there(file["path"])]
    if missing:
        relative = "" if os.path.isabs(missing[0]) else f" (relative names start from {Path.cwd()})"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"the records were not derived again: the input {missing[0]} is not here{more}{relative}"
    changed = 0
    for file in inputs:
        book.progress("inputs", done, total)
        path = place(file["path"])
        size, done = size_of(path), done + file["bytes"]
        if size != file["bytes"]:
            book.wrong(file["path"], f"the input has changed: {size:,} bytes, the manifest says {file['bytes']:,}")
            changed += 1
        elif (digest := xxh128_of(path)) != file["xxh128"]:
            book.wrong(file["path"], f"the input has changed: xxh128 {digest}, the manifest says {file['xxh128']}")
            changed += 1
    if changed:
        return f"the records were not derived again: {changed} of {len(inputs)} inputs have changed since the build"
    book.compared.append(f"{counted(len(inputs), 'input')} with the hashes of the manifest")
    return ""


def _is_there(path: str) -> bool:
    """Whether an input can be read again; standard input cannot, nor can a store that is out of reach."""
    try:
        return path != STDIN and place(path).is_file()
    except ChatmillError:
        return False


def sources_of(recipe: Recipe, inputs: Sequence[Mapping[str, Any]]) -> list[Source]:
    """The source of the recipe that each input belongs to; files that a glob matches only now are left alone."""
    if len(recipe.sources) == 1:
        return [recipe.sources[0]] * len(inputs)
    recorded = [file["path"] for file in inputs]
    pairs = [
        (str(path), source)
        for source in recipe.sources
        for path in resolve_paths(source.patterns)
        if str(path) in set(recorded)
    ]
    if [path for path, _ in pairs] != recorded:
        raise DataError(
            f"the sources of the recipe now give {len(pairs)} of the {len(recorded)} inputs of the manifest, or give "
            "them in another order: restore the files to where they were"
        )
    return [source for _, source in pairs]


def stated_chunks(
    folder: Path, manifest: Mapping[str, Any], recipe: Recipe, spool: Path
) -> tuple[list[StatedChunk], Counter[str]]:
    """The chunks of a dataset with their input; and the lines or rows of each source that `max_records` leaves out.

    Every line or row of the inputs is in exactly one chunk, in order, or beyond `max_records`; and chunks.jsonl says
    the same. A `FormatError` where that is not so.
    """
    inputs = manifest["inputs"]
    scans = [
        fetched(
            InputScan(
                path=file["path"],
                spool=str(spool),
                source=file["source"],
                shape=file["shape"],
                chunk_bytes=seen["chunk_bytes"],
            )
        )
        for file, seen in zip(inputs, manifest["scanned"], strict=True)
    ]
    left = {id(source): source.max_records for source in recipe.sources}
    pieces: list[ChunkPiece] = []
    beyond: Counter[str] = Counter()
    for source, scanned in zip(sources_of(recipe, inputs), scan_all(scans), strict=True):
        lines, limit = _lines(scanned), left[id(source)]
        count = lines if limit is None else min(lines, limit)
        if limit is not None:
            left[id(source)] = limit - count
        beyond[scanned.file.source] += lines - count
        pieces += _tiles(scanned, source, lines, count)
    chunks = _as_stated(folder, pieces)
    _check_groups(chunks, recipe)
    return chunks, +beyond


def _lines(scanned: ScannedInput) -> int:
    """Lines or rows of a file, counted in the plainest way."""
    path = Path(scanned.file.data) if scanned.file.data else place(scanned.file.path)
    match file_format(path):
        case FileFormat.JSONL:
            with open_bytes(path) as file:
                return sum(1 for _ in file)
        case FileFormat.PARQUET:
            import pyarrow.parquet

            with path.open("rb") as file:
                return int(pyarrow.parquet.read_metadata(file).num_rows)
        case _:
            return sum(1 for _ in read_records(path))


def _tiles(scanned: ScannedInput, rules: Source, lines: int, count: int) -> Iterator[ChunkPiece]:
    """The pieces of a file up to the line or row `count`; together they are all of its `lines`."""
    done = 0
    for chunk in scanned.chunks:
        if chunk.first != done + 1:
            raise FormatError(f"{chunk.path} was cut wrongly: line or row {chunk.first} follows {done}")
        if done < count:
            yield ChunkPiece(chunk, rules, count - done if count - done < chunk.count else None)
        done += chunk.count
    if done != lines:
        raise FormatError(f"{scanned.file.path} was cut wrongly: its chunks have {done} of {lines} lines or rows")


def _as_stated(folder: Path, pieces: Sequence[ChunkPiece]) -> list[StatedChunk]:
    """The pieces in the chunks that chunks.jsonl has; each must be what is written there."""
    chunks: list[StatedChunk] = []
    rest, rejected = deque(pieces), 0
    try:
        for line in (folder / CHUNKS).read_bytes().splitlines():
            stated = json.loads(line)
            chunk_pieces = tuple(_next_piece(rest, piece.get("max_records")) for piece in stated["pieces"])
            if pieces_json(chunk_pieces) != stated["pieces"]:
                raise FormatError(f"chunk {len(chunks)} is of other input than the manifest says")
            end = rejected + (stated["rejected"]["bytes"] if stated["rejected"] else 0)
            ledger = Ledger.from_json(stated["ledger"])
            chunks.append(StatedChunk(number=len(chunks), pieces=chunk_pieces, ledger=ledger, rejected=(rejected, end)))
            rejected = end
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"it cannot be read: {error!r}") from None
    if rest:
        raise FormatError(f"it ends before the inputs do: {len(rest)} of {len(pieces)} pieces are in no chunk")
    there = (folder / REJECTED).stat().st_size if (folder / REJECTED).is_file() else 0
    if there != rejected:
        raise FormatError(f"{REJECTED} has {there:,} bytes; {CHUNKS} says {rejected:,}")
    return chunks


def _next_piece(rest: deque[ChunkPiece], end: int | None) -> ChunkPiece:
    """The next piece, or what it has before the line or row `end`; then the others stay for the next chunk."""
    if not rest:
        raise FormatError("it has more pieces than the inputs")
    piece = rest.popleft()
    if end is None or not piece.skip < end < (piece.max_records or piece.range.count):
        return piece
    rest.appendleft(piece._replace(skip=end))
    return piece._replace(max_records=end)


def _check_groups(chunks: Sequence[StatedChunk], recipe: Recipe) -> None:
    """Every group is in one chunk of its source."""
    seen: dict[tuple[str, str], int] = {}
    for number, chunk in enumerate(chunks):
        for piece in chunk.pieces:
            field = group_field(piece.rules, recipe)
            if field is None:
                continue
            for record in read_piece(piece, field):
                if record.group is not None and seen.setdefault((record.source, record.group), number) != number:
                    raise FormatError(
                        f"chunks {seen[record.source, record.group]} and {number} share a group of records"
                    )


def losers_of(pieces: Sequence[ChunkPiece]) -> set[str]:
    """Return the places of records of a chunk whose group has a better one, or an earlier one that is as good."""
    members: dict[str, list[tuple[str, float]]] = {}
    for piece in pieces:
        pick = piece.rules.pick
        for raw in _raws(piece) if pick is not None else ():
            if pick is None or raw.error is not None or not _is_wanted(piece, raw):
                continue
            if (group := group_of(raw.value, pick.group, piece.range)) is not None:
                members.setdefault(group, []).append((raw.where, pick.score(raw.value)))
    lost: set[str] = set()
    for scored in members.values():
        most = max(score for _, score in scored)
        best = next(place for place, score in scored if score == most)
        lost |= {place for place, _ in scored} - {best}
    return lost


def _is_wanted(piece: ChunkPiece, raw: Raw) -> bool:
    """Whether the source asks for a record by its fields."""
    return piece.rules.where is None or parse_where(piece.rules.where).accepts(raw.value)


def _raws(piece: ChunkPiece) -> Iterator[Raw]:
    """The records of a piece as they were read."""
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
    """The records of a piece, one at a time; `group` is the field that says which of them share a tree."""
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
