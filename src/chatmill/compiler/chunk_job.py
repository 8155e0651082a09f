"""The work of one chunk: its records become a shard, written once and published whole, with a receipt."""

from __future__ import annotations

import contextlib
import json
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_output import STATE, ChunkOutput
from chatmill.compiler.chunk_shards import ChunkPlace
from chatmill.compiler.grouped_records import GroupedRecords
from chatmill.compiler.pipeline import NAMED, Compiled, Pipeline, copies_of, files_of
from chatmill.compiler.recipe import OnError, Recipe, Source, stored_recipe
from chatmill.core.canonical import canonical_json
from chatmill.core.conversations import UNUSED, Conversations
from chatmill.core.gc_pause import without_collector
from chatmill.core.hash_shares import hash_limit, hashes_below
from chatmill.core.ledger import NULLS_LEFT_OUT, Ledger
from chatmill.core.tokens import ranges
from chatmill.errors import ConfigError, RecordError
from chatmill.images.column import picture_columns
from chatmill.read.columns import line_groups, read_entries, read_lines
from chatmill.read.groups import group_of, no_group, record_groups
from chatmill.read.picks import PICK
from chatmill.read.preferences import MARGIN_FIELDS
from chatmill.read.ranges import Chunk, ChunkKind, chunk_bytes, chunk_entries, chunk_records, chunk_rows
from chatmill.read.record_shape import LABEL_FALSE
from chatmill.read.shapes import find_shape
from chatmill.read.where import WHERE, parse_where
from chatmill.render.jinja.options import Expand
from chatmill.store.episode_columns import EpisodeColumns, as_bytes
from chatmill.store.episode_layout import WORK
from chatmill.store.episode_manifest import BRANCHES, COLUMNS, IMAGE_BYTES, IMAGES, KINDS, LOGPROBS, MARGIN, SIDE
from chatmill.tokenizer.backends import ENGINE_FAILURES, Engine
from chatmill.tokenizer.probe import ProbeAnswers

BATCH_BYTES = 16 << 20
"""Bytes of lines that are rendered together; bounds the memory of a worker. Every batch costs some milliseconds."""
BATCH_ROWS = 1024
"""Entries of a list that are rendered together."""


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
    files: str | None = None
    """What the files of the tokenizer and the template hold, by `Pipeline.files`; None: whatever is there."""
    answers: ProbeAnswers | None = None
    """What the worker's fast engine has to make of the probe; None: it is compared with a reference in the worker."""

    @property
    def label(self) -> str:
        """The chunk in words, for messages."""
        first = self.pieces[0].range
        more = f" and {len(self.pieces) - 1} more files" if len(self.pieces) > 1 else ""
        return f"chunk {self.number} ({first.path}, from line or row {first.first} on{more})"

    @property
    def bytes(self) -> int:
        """Bytes of its input, unpacked."""
        return sum(piece.range.bytes for piece in self.pieces)


def chunk_jobs(
    chunks: Sequence[tuple[tuple[ChunkPiece, ...], str]],
    recipe: str,
    directory: Path,
    build: str,
    pipeline: Pipeline,
) -> list[ChunkJob]:
    """The jobs of all chunks, which are given by their pieces and fingerprints."""
    home, is_only = directory.absolute(), len(chunks) == 1
    return [
        ChunkJob(
            number=number,
            pieces=pieces,
            recipe=recipe,
            place=ChunkPlace(directory=home, number=number, is_only=is_only),
            fingerprint=fingerprint,
            build=build,
            files=pipeline.files,
            answers=pipeline.answers,
        )
        for number, (pieces, fingerprint) in enumerate(chunks)
    ]


def recipe_json(recipe: Recipe) -> str:
    """A recipe as workers get it."""
    return canonical_json(recipe.as_json()).decode()


_KEPT: dict[tuple[str, str, Engine], Pipeline] = {}
"""What this process has loaded, by the recipe, the contents of the files it names and the engine."""


def pipeline_of(
    recipe: str, engine: Engine = Engine.FAST, files: str | None = None, *, for_chunks: bool = False
) -> Pipeline:
    """The pipeline of a recipe; kept, so that a process loads each engine once (a fast one serves for every other).

    Files that were written anew are loaded anew; where `files` says what they must hold, that is an error.
    `for_chunks`: this engine does the work of the fast one in this process.
    """
    wanted = files or files_of(stored_recipe(recipe))
    kept = _KEPT.get((recipe, wanted, Engine.FAST)) or _KEPT.get((recipe, wanted, engine))
    if kept is None:
        for other in [key for key in _KEPT if key[:2] != (recipe, wanted)]:
            del _KEPT[other]
        kept = Pipeline(stored_recipe(recipe), engine=engine)
        if kept.files != wanted:
            raise ConfigError(
                f"the tokenizer {kept.recipe.tokenizer} or the template {kept.recipe.template} was written anew since "
                "this build began: start it again"
            )
        _KEPT[recipe, wanted, engine] = kept
    if for_chunks:
        _KEPT.setdefault((recipe, wanted, Engine.FAST), kept)
    return kept


def forget_pipelines() -> None:
    """Have every recipe be loaded anew, and its template learn again."""
    _KEPT.clear()


def load_pipeline(recipe: str) -> None:
    """Make a worker ready for the chunks of a recipe; its engine is checked with the first of them."""
    pipeline_of(recipe, Engine.UNCHECKED)


def checked_pipeline(recipe: str, answers: ProbeAnswers | None, files: str | None = None) -> Pipeline:
    """The pipeline that chunks are compiled with: its engine is a reference or gives the answers of one.

    A fast engine that cannot be loaded, or answers otherwise, goes the whole way here: it is compared with a reference
    in this process, which replaces it.
    """
    wanted = files or files_of(stored_recipe(recipe))
    if answers is not None and (recipe, wanted, Engine.FAST) not in _KEPT:
        with contextlib.suppress(*ENGINE_FAILURES):
            candidate = pipeline_of(recipe, Engine.UNCHECKED, wanted)
            if candidate.gives(answers):
                _KEPT[recipe, wanted, Engine.FAST] = candidate
    return pipeline_of(recipe, files=wanted)


def compile_chunk(job: ChunkJob) -> dict[str, Any]:
    """Do the work of one chunk and publish its shards; gives the receipt. The driver syncs them."""
    _check_reach(job)
    pipeline = checked_pipeline(job.recipe, job.answers, job.files)

    def write(folder: Path) -> dict[str, Any]:
        with _Output(folder, pipeline, job.pieces[0].rules) as output, without_collector():
            unwanted = _unwanted(job.pieces)
            for piece in job.pieces:
                output.begin_piece(piece)
                for batch in _batches(piece, output, unwanted):
                    output.add(batch)
                output.end_piece()
            output.add_groups()
            return output.receipt(job.number, fingerprint=job.fingerprint, pieces=pieces_json(job.pieces))

    return job.place.publish(write)


def pieces_json(pieces: Sequence[ChunkPiece]) -> list[dict[str, Any]]:
    """What a receipt says of the input of its chunk."""
    names = ("path", "start", "stop", "first", "count", "digest")
    shared = ("max_records", "skip")
    return [
        {name: getattr(piece.range, name) for name in names}
        | {name: getattr(piece, name) for name in shared if getattr(piece, name)}
        for piece in pieces
    ]


def _check_reach(job: ChunkJob) -> None:
    """A worker on another machine must see the folder that the driver looks into."""
    work = job.place.directory / WORK
    try:
        found = json.loads((work / STATE).read_bytes())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found != job.build:
        raise ConfigError(
            f"a worker on {platform.node()} cannot reach {work}, where the driver of this build keeps its work: "
            "workers write their shards there, so the output folder must be on a file system that all machines share, "
            "under the same path"
        )


def _batches(piece: ChunkPiece, output: _Output, unwanted: Mapping[str, str]) -> Iterator[Conversations]:
    """The conversations of a piece in groups, each as often as its weight says; what is left out is in the ledger.

    `unwanted` has the places of records that are not asked for, with the reason.
    """
    came_of_arrow = find_shape(piece.range.shape).nulls_are_absent
    for batch, errors in _read(piece):
        output.read.update(batch.take(batch.heads).sources.counts())
        for (source, name), count in batch.unused.items():
            if name not in output.fields_read:
                output.ledger.notes[source, UNUSED + name] += count
        for error in errors:
            output.read[piece.range.source] += 1
            if error.where in unwanted:
                output.ledger.records[piece.range.source, "skipped", unwanted[error.where]] += 1
            else:
                output.reject(error, piece.range.source)
        if unwanted:
            wanted = np.array([where not in unwanted for where in batch.wheres[:]], dtype=np.bool_)
            for place in batch.heads[~wanted[batch.heads]].tolist():
                output.ledger.records[batch.sources[place], "skipped", unwanted[batch.wheres[place]]] += 1
            batch = batch.take(np.flatnonzero(wanted))
        for source, count in batch.take(batch.heads).sources.counts().items() if came_of_arrow else ():
            output.ledger.notes[source, NULLS_LEFT_OUT] += count
        weighted = batch if piece.rules.weight == 1 else _weighted(batch, piece.rules.weight, output.ledger)
        if len(weighted):
            yield weighted


def _unwanted(pieces: Sequence[ChunkPiece]) -> dict[str, str]:
    """The places of records that their source does not ask for, with the reason; a group is in one chunk."""
    rules, found = pieces[0].rules, dict[str, str]()
    expression, pick = parse_where(rules.where) if rules.where else None, rules.pick
    best: dict[str, tuple[float, str]] = {}
    for piece in pieces if expression or pick else ():
        first, end = piece.range.first + piece.skip, piece.range.first + (piece.max_records or piece.range.count)
        for raw in chunk_records(piece.range):
            if raw.error is not None or not first <= _line_number(raw.where) < end:
                continue
            if expression is not None and not expression.accepts(raw.value):
                found[raw.where] = WHERE
            elif pick is not None and (group := group_of(raw.value, pick.group, piece.range)) is not None:
                score = pick.score(raw.value)
                if group in best and score <= best[group][0]:
                    found[raw.where] = PICK
                else:
                    found |= {best[group][1]: PICK} if group in best else {}
                    best[group] = score, raw.where
    return found


def _weighted(batch: Conversations, weight: float, ledger: Ledger) -> Conversations:
    """A batch with every record as often as the weight and the hash of its key say."""
    copies = np.array([copies_of(key, weight) for key in batch.keys], dtype=np.int64)
    for place in batch.heads.tolist():
        source, count = batch.sources[place], int(copies[place])
        if count == 0:
            ledger.records[source, "skipped", "weight"] += 1
        elif count > 1:
            ledger.records[source, "read", "repeated"] += count - 1
    chosen = np.repeat(np.arange(len(batch)), copies)
    return batch.take(chosen[np.lexsort((chosen, ranges(np.zeros_like(copies), copies), batch.records[chosen]))])


def _read(piece: ChunkPiece) -> Iterator[tuple[Conversations, list[RecordError]]]:
    """The records of a piece in groups that are bounded in number or in text, with the errors among them."""
    chunk, shape, left = piece.range, find_shape(piece.range.shape), piece.max_records
    path, source, skip = chunk.path, chunk.source, piece.skip
    if chunk.kind is ChunkKind.LINES:
        data = chunk_bytes(chunk)
        begin = 0
        for _ in range(skip):
            begin = data.find(b"\n", begin) + 1
        data = data[begin:]
        for lines in line_groups(data, BATCH_BYTES, chunk.first + skip, None if left is None else left - skip):
            yield read_lines(data, lines, path=path, source=source, shape=shape)
    elif chunk.kind is ChunkKind.ENTRIES:
        entries = chunk_entries(chunk)[skip:left]
        for at in range(0, len(entries), BATCH_ROWS):
            some = entries[at : at + BATCH_ROWS]
            yield read_entries(some, first=chunk.first + skip + at, path=path, source=source, shape=shape)
    else:
        from chatmill.read.rows import read_rows  # pyarrow takes its time

        first, left = chunk.first, chunk.count if left is None else left
        for rows in chunk_rows(chunk, BATCH_BYTES, None if shape.rules is None else sorted(shape.fields)):
            some = rows.slice(0, left)
            passed = min(some.num_rows, chunk.first + skip - first) if first < chunk.first + skip else 0
            if passed < some.num_rows:
                yield read_rows(some.slice(passed), first=first + passed, path=path, source=source, shape=shape)
            first, left = first + some.num_rows, left - some.num_rows
            if not left:
                break


class _Output(ChunkOutput):
    """What is made of one chunk, in memory until all of it is there: every type is known when files are written."""

    def __init__(self, folder: Path, pipeline: Pipeline, rules: Source) -> None:
        """`rules` is the source of the recipe that all input of the chunk is of."""
        super().__init__(folder)
        has_val = pipeline.recipe.split.val_fraction > 0
        self._episodes: dict[str, list[EpisodeColumns]] = {"train": [], **({"val": []} if has_val else {})}
        self.read: Counter[str] = Counter()
        """Records read, by source; entered in the ledger at the end."""
        self._pipeline, self._rules = pipeline, rules
        recipe, shows = pipeline.recipe, pipeline.template.expander is not None
        present = {KINDS: recipe.keep_kinds, BRANCHES: recipe.expand is Expand.TREE, IMAGES: shows}
        present |= {IMAGE_BYTES: shows and recipe.store_images, LOGPROBS: recipe.logprobs}
        present |= dict.fromkeys((SIDE, MARGIN), recipe.preferences == "pairs")
        self._absent = {column for column, is_there in present.items() if not is_there}
        self.fields_read = {f"messages[].{name}" for name in pipeline.template.form.more_fields}
        """Fields of messages that mean something to the template alone, and the one that groups records."""
        if pipeline.recipe.tree is not None:
            self.fields_read.add(pipeline.recipe.tree.group)
        self.fields_read |= MARGIN_FIELDS if recipe.preferences == "pairs" else set()
        if pipeline.policy.errors is not None:
            self.fields_read |= {f"messages[].{name}" for name in pipeline.policy.errors.fields}
        self.fields_read |= rules.pick.fields if rules.pick else set()
        self.fields_read |= parse_where(rules.where).fields if rules.where else set()
        self._rejected_here: list[tuple[int, str]] = []
        """Line or row, and the entry, of rejected records of the piece that is being read."""
        self._named: dict[str, list[str]] = {}
        """The first records that each gate is about, in words."""
        self._groups: list[str | None] = []
        """The group of every line or row of the piece that is being read, where records share trees."""
        self._grouped = GroupedRecords()
        self._left_out: dict[str, str] = {}
        """The first record that was left out for each reason, in words."""

    def reject(self, error: RecordError, source: str) -> None:
        """Quarantine a record, or end the build; answers that people did not like may be left out on request."""
        if error.code == LABEL_FALSE and self._pipeline.recipe.preferences is not None:
            self.ledger.records[source, "skipped", LABEL_FALSE] += 1
            return
        if self._pipeline.recipe.on_error is OnError.FAIL:
            raise error
        self.ledger.records[source, "quarantined", error.code] += 1
        entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
        line = json.dumps({**entry, "message": error.message}, ensure_ascii=False)
        self._rejected_here.append((_line_number(error.where), line))
        self._left_out.setdefault(error.code, f"{_named(error.record_id, error.where)}: {error.message}")

    def add(self, conversations: Conversations) -> None:
        """Compile a batch and append its episodes to their splits; records that share trees wait for the others."""
        if self._pipeline.recipe.tree is None:
            self._compile(conversations)
            return
        field, first = self._pipeline.recipe.tree.group, self._first
        groups = [self._groups[_line_number(where) - first] for where in conversations.wheres[:]]
        for place, group in enumerate(groups):
            if group is None:
                error = no_group(field, conversations.wheres[place], conversations.ids[place])
                self.reject(error, conversations.sources[place])
        known = [group for group in groups if group is not None]
        if known:
            chosen = np.flatnonzero(np.array([group is not None for group in groups]))
            self._grouped.add(conversations.take(chosen), known)

    def add_groups(self) -> None:
        """Compile the records that share trees, when all of them were read."""
        for batch, groups in self._grouped.batches(BATCH_BYTES):
            self._compile(batch, groups)
        self.end_piece()

    def _compile(self, conversations: Conversations, groups: NDArray[np.int64] | None = None) -> None:
        compiled = self._pipeline.compile(conversations, groups, self._rules.history)
        sources = conversations.sources
        for index, error in compiled.failed:
            self.reject(error, sources[index])
        self.ledger.add(compiled.ledger)
        for gate, places in compiled.stopped_by.items():
            named = self._named.setdefault(gate, [])
            for place in places[: NAMED - len(named)].tolist():
                named.append(_named(conversations.ids[place], conversations.wheres[place]))
        for reason, place in compiled.left_out.items():
            self._left_out.setdefault(reason, _named(conversations.ids[place], conversations.wheres[place]))
        if limit := hash_limit(self._pipeline.recipe.split.val_fraction):
            goes_to_val = hashes_below(conversations.keys, limit)[compiled.source_index]
        else:
            goes_to_val = np.zeros(len(compiled.source_index), dtype=np.bool_)
        for split, chosen in (("train", ~goes_to_val), ("val", goes_to_val)):
            wanted = np.flatnonzero(chosen)
            if len(wanted):
                self._append_compiled(split, compiled, wanted, conversations)

    def _append_compiled(
        self, split: str, compiled: Compiled, wanted: NDArray[np.int64], conversations: Conversations
    ) -> None:
        tokens, recipe = compiled.tokens, self._pipeline.recipe
        images = picture_columns(compiled.tokens, compiled.pictures) if IMAGES not in self._absent else None
        sources = self.sources(split)
        columns = EpisodeColumns(
            ids=compiled.picked(tokens.ids, wanted).view(np.uint32),
            lengths=tokens.lengths[wanted],
            mask=as_bytes(compiled.picked(compiled.weights, wanted)),
            kinds=compiled.picked(tokens.kinds, wanted) if recipe.keep_kinds else None,
            source=sources.translate(compiled.source_codes[wanted].astype(np.uint32), compiled.source_names),
            turns=compiled.turns[wanted].astype(np.uint32),
            trained=compiled.trained[wanted].astype(np.uint32),
            record_id=conversations.keys.take(compiled.source_index[wanted]),
            branches=None if compiled.branches is None else compiled.branches.take(wanted),
            logprobs=compiled.picked(compiled.logprobs, wanted) if recipe.logprobs else None,
            side=None if compiled.sides is None else compiled.sides[wanted],
            margin=None if compiled.margins is None else compiled.margins[wanted],
            images=None if images is None else images[0].take(wanted),
            image_bytes=None if images is None or IMAGE_BYTES in self._absent else images[1].take(wanted),
        )
        self._episodes[split].append(columns)

    def begin_piece(self, piece: ChunkPiece) -> None:
        """A piece is about to be read."""
        if self._pipeline.recipe.tree is not None:
            self._groups, self._first = (
                list(record_groups(piece.range, self._pipeline.recipe.tree.group)),
                piece.range.first,
            )

    def end_piece(self) -> None:
        """All of a piece was read; its rejected records are put in order: reading and rendering refuse separately."""
        for _, line in sorted(self._rejected_here, key=itemgetter(0)):
            self.write_rejected(line)
        self._rejected_here = []

    def receipt(self, number: int, **more: Any) -> dict[str, Any]:
        """Enter what was read, and write all files."""
        columns = [column for column in COLUMNS if column not in self._absent]
        for split, parts in self._episodes.items():
            self.begin(split, columns, masks=True)  # also where it stays empty: a shard has the number of its chunk
            is_wide = any(part.mask is not None and part.mask.dtype != np.uint8 for part in parts)
            for part in parts:
                mask = part.mask.astype(np.float32, copy=False) if is_wide and part.mask is not None else part.mask
                self.append(split, replace(part, mask=mask))
        for source, count in self.read.items():
            self.ledger.records[source, "read", ""] += count
        named = {gate: names for gate, names in sorted(self._named.items()) if names}
        return super().receipt(number, named=named, left_out=dict(sorted(self._left_out.items())), **more)


def _named(record_id: str, where: str) -> str:
    """A record in the words of a message."""
    return f"{where} ({record_id})" if record_id and where else where or record_id


def _line_number(where: str) -> int:
    """The line or row that a place such as `chats.jsonl:17` or `chats.parquet:row 17` ends in."""
    digits = re.search(r"\d+$", where)
    return int(digits.group()) if digits else 0
