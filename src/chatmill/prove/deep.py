"""Derives every record of a dataset again from its source, a chunk at a time, and compares it with what is stored."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chatmill.compiler.chunk_job import recipe_json
from chatmill.compiler.chunk_shards import CHUNKS
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.recipe import Recipe, stored_recipe
from chatmill.core.conversations import UNUSED
from chatmill.core.ledger import SAVED_BY_TREES, Ledger
from chatmill.errors import FormatError
from chatmill.prove.chunk_check import ChunkCheck
from chatmill.prove.inputs import StatedChunk, picked, read_piece, stated_chunks
from chatmill.prove.reference import Reference, reference_tokenizer
from chatmill.prove.report import VerifyReport
from chatmill.read.shapes import find_shape
from chatmill.store.episode_layout import MANIFEST
from chatmill.store.episodes import EpisodeDataset

WORTH_WORKERS = 1 << 18
"""Bytes of input from which on worker processes, which take a second or two to start, save time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofJob:
    """The order to derive one chunk and to compare it with its shards; small and picklable."""

    chunk: StatedChunk
    directory: Path
    recipe: str
    """The recipe as JSON."""
    splits: tuple[str, ...]
    run: str
    """Names the check: what a process has opened serves for one."""

    @property
    def label(self) -> str:
        """The job in words."""
        return f"chunk {self.chunk.number} ({self.chunk.pieces[0].range.describe()})"


@lru_cache(maxsize=1)
def _reference(recipe: str, run: str) -> Reference:
    checked = stored_recipe(recipe)
    return Reference(checked, reference_tokenizer(checked))


@lru_cache(maxsize=4)
def _split(directory: Path, name: str, run: str) -> EpisodeDataset:
    return EpisodeDataset(directory, name)


def _load(arguments: tuple[str, str]) -> None:
    """Make a worker ready."""
    _reference(*arguments)


def prove_chunk(job: ProofJob) -> tuple[VerifyReport, Ledger, set[str]]:
    """Derive a chunk and compare it; what was found, the ledger of its records, and their groups."""
    splits = {name: _split(job.directory, name, job.run) for name in job.splits}
    check = ChunkCheck(job.directory, job.chunk, _reference(job.recipe, job.run), splits)
    group = check.recipe.tree.group if check.recipe.tree else None
    groups, losers = picked(job.chunk.pieces)
    for piece in job.chunk.pieces:
        came_of_arrow = find_shape(piece.range.shape).nulls_are_absent
        for record in read_piece(piece, group, losers):
            groups |= set() if record.group is None else {record.group}
            check.take(record, came_of_arrow=came_of_arrow)
    check.finish()
    return check.book, check.ledger, groups


def check_records(
    folder: Path,
    manifest: Mapping[str, Any],
    recipe: Recipe,
    engine: str,
    splits: Mapping[str, EpisodeDataset],
    sample: int | None,
    workers: int | None,
    book: VerifyReport,
) -> None:
    """Derive and compare all chunks, or `sample` of them, evenly spread; `engine` names the tokenizer of the slow path.

    The ledger of a chunk that is not derived is taken as it is stated.
    """
    text, run = recipe_json(recipe), secrets.token_hex(8)
    if workers is None and sum(file["bytes"] for file in manifest["inputs"]) < WORTH_WORKERS:
        workers = 0
    with TemporaryDirectory(prefix="chatmill-verify-") as spool, LocalExecutor(workers) as executor:
        executor.prepare(_load, (text, run))  # while this process cuts the inputs
        chunks, beyond = stated_chunks(folder, manifest, recipe, Path(spool), book, executor)
        for name, split in splits.items():
            if len(split.shards) != len(chunks):
                raise FormatError(f"{name} has {len(split.shards)} shards, and the dataset has {len(chunks)} chunks")
        wanted = len(chunks) if sample is None else min(sample, len(chunks))
        numbers = [number * len(chunks) // wanted for number in range(wanted)]
        jobs = [
            ProofJob(chunk=chunks[number], directory=folder, recipe=text, splits=tuple(splits), run=run)
            for number in numbers
        ]
        reports: dict[int, tuple[VerifyReport, Ledger, set[str]]] = {}
        book.progress("chunks", 0, wanted)
        for index, report in executor.map(prove_chunk, jobs):
            reports[numbers[index]] = report
            book.progress("chunks", len(reports), wanted)
    total, owners = Ledger(), dict[str, int]()
    for number, chunk in enumerate(chunks):
        part, ledger, groups = reports.get(number, (None, chunk.ledger, set[str]()))
        if part is not None:
            book.add(part)
        total.add(ledger)
        for other in sorted({owners.setdefault(group, number) for group in groups} - {number}):
            book.wrong(CHUNKS, f"chunks {other} and {number} share a group of records")
    for source, count in beyond.items():
        total.notes[source, "records_beyond_max_records"] += count
    book.counts["chunks_derived"] += wanted
    _check_ledger(Ledger.from_json(manifest["ledger"]), total, book)
    _describe(engine, len(chunks), book)


def _check_ledger(stated: Ledger, derived: Ledger, book: VerifyReport) -> None:
    """Check that the ledger of the manifest is the one that the records give."""
    said, derived_counts = _flat(stated), _flat(derived)
    for key in sorted(set(said) | set(derived_counts)):
        if said[key] != derived_counts[key]:
            fate = "/".join(filter(None, key[1:]))
            book.wrong(
                MANIFEST, f"its ledger says {said[key]:,} {key[0]} {fate}; the inputs give {derived_counts[key]:,}"
            )


def _flat(ledger: Ledger) -> Counter[tuple[str, ...]]:
    """Return all counts of a ledger that are derived again, under one kind of key."""
    flat: Counter[tuple[str, ...]] = Counter()
    flat.update({("tokens", *key): count for key, count in ledger.tokens.items()})
    flat.update({("records", *key): count for key, count in ledger.records.items()})
    for (source, name), count in ledger.notes.items():
        if name != SAVED_BY_TREES and not name.startswith(UNUSED):
            flat["notes", source, name] += count
    return flat


def _describe(engine: str, chunks: int, book: VerifyReport) -> None:
    """Say what was compared, and what was not."""
    counts, say = book.counts, book.compared.append
    share = f", of {counts['chunks_derived']} of {chunks} chunks" if counts["chunks_derived"] < chunks else ""
    say(f"{counts['records_derived']:,} records derived from their source by the slow path ({engine}){share}")
    say(f"{counts['episodes_compared']:,} episodes in ids, weights, kinds and columns; the ledger as a whole")
    if counts["pictures_processed"]:
        say(f"{counts['pictures_processed']:,} pictures with what the model's own image processor makes of them")
    if counts["rows_of_trees"]:
        say(f"{counts['rows_of_trees']:,} rows of trees, each against the row of its turn")
    if counts["answers_proved"]:
        say(
            f"{counts['answers_proved']:,} of {counts['trained_messages']:,} trained answers by plain Jinja: what "
            "comes before is the prompt a model would get, the trained ids are the answer through its one stop"
        )
    for name, sentence in (
        (
            "answers_trained_as_changed",
            "{:,} answers against their prompts: later messages change them, and `expand: none` trains them so",
        ),
        (
            "answers_not_checked",
            "{:,} answers of records whose texts spell special tokens that the template looks for",
        ),
        (
            "answers_proved_but_for_parts",
            "which tokens of {:,} answers are trained: the policy has weights for parts of an answer, and what "
            "part a token is comes from the labels of the build; that nothing else is trained was compared",
        ),
        ("pictures_not_processed", "pictures of {:,} chunks against the model's own processor, which is not there"),
        ("answers_left_untrained", "{:,} answers that have no proof and are context"),
    ):
        if counts[name]:
            book.unchecked.append(sentence.format(counts[name]))
