"""Derives every record of a dataset again from its source, a chunk at a time, and compares it with what is stored."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ne
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_job import ChunkPiece, recipe_json
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.recipe import Recipe, Repair, stored_recipe
from chatmill.compiler.repairs import derived_repaired, useful_repairs
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import record_key
from chatmill.core.ledger import (
    CALLS_FAILED,
    EMPTY_ANSWERS,
    HISTORY_CHANGED,
    HISTORY_ROWS,
    LOGPROBS_LEFT,
    LOST_CALLS,
    LOST_CONTENT,
    LOST_REASONING,
    LOST_TOOLS,
    NULLS_LEFT_OUT,
    REASONING,
    REPAIRED,
    TRIMMED,
    Ledger,
)
from chatmill.core.sides import SIDE_NAMES, Side
from chatmill.core.tokens import first_difference
from chatmill.errors import DataError, FormatError, RecordError, TokenizerError
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.prove.answer_check import AnswerCheck
from chatmill.prove.inputs import ReadRecord, losers_of, read_piece, stated_chunks
from chatmill.prove.pairs import joined, refuse_unfit
from chatmill.prove.pictures import ProcessorSample
from chatmill.prove.plain_account import account
from chatmill.prove.plain_errors import without_failed
from chatmill.prove.plain_histories import derive_after
from chatmill.prove.plain_trees import PlainTrees
from chatmill.prove.reference import (
    Derived,
    DerivedEpisode,
    DerivedRecord,
    Reference,
    reference_tokenizer,
    split_of,
)
from chatmill.prove.report import Finding, VerifyReport
from chatmill.prove.stored import place_of
from chatmill.read.picks import PICK
from chatmill.read.preferences import margin_of
from chatmill.read.record_shape import LABEL_FALSE
from chatmill.read.shapes import find_shape
from chatmill.read.where import WHERE
from chatmill.render.jinja.options import Expand
from chatmill.render.sampled import NOTES as SAMPLED
from chatmill.store.episodes import Episode, EpisodeDataset
from chatmill.store.receipts import MANIFEST

CONTEXT = 8
"""Tokens that are shown on both sides of the first difference."""
WORTH_WORKERS = 1 << 18
"""Bytes of input from which on worker processes, which take a second or two to start, save time."""
NOTES = (
    *(TRIMMED, LOST_CONTENT, LOST_REASONING, LOST_CALLS, LOST_TOOLS, REASONING),
    *(f"{REPAIRED}{repair}" for repair in Repair),
    *(EMPTY_ANSWERS, "episodes", "untrained_terminators", "records_without_trained_tokens"),
    *("turns_that_later_messages_change", "turns_without_proof", "stops_appended", "rows_added"),
    *("tokens_in_added_rows", "branches", "tokens_repeated_by_splits", *SAMPLED, LOGPROBS_LEFT),
    *(HISTORY_CHANGED, HISTORY_ROWS, NULLS_LEFT_OUT, CALLS_FAILED),
)
"""Notes of the ledger that are derived again; `records_beyond_max_records` is counted from the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofJob:
    """The order to derive one chunk and to compare it with its shards; small and picklable."""

    number: int
    directory: Path
    recipe: str
    """The recipe as JSON."""
    pieces: tuple[ChunkPiece, ...]
    splits: tuple[str, ...]
    """Those of the dataset."""
    unreadable: tuple[str, ...]
    """Those of them that cannot be read, which is a finding already."""
    rejected: tuple[int, int]
    """Its part of rejected.jsonl, in bytes."""
    run: str
    """Names the check: what a process has opened serves for one."""

    @property
    def label(self) -> str:
        """The job in words."""
        return f"chunk {self.number} ({self.pieces[0].range.describe()})"


@lru_cache(maxsize=1)
def _reference(recipe: str, run: str) -> Reference:
    checked = stored_recipe(recipe)
    return Reference(checked, reference_tokenizer(checked))


@lru_cache(maxsize=4)
def _split(directory: Path, name: str, run: str) -> EpisodeDataset:
    return EpisodeDataset(directory, name)


def _load(given: tuple[str, str]) -> None:
    """Make a worker ready."""
    _reference(*given)


def prove_chunk(job: ProofJob) -> tuple[VerifyReport, Ledger]:
    """Derive a chunk and compare it; what was found, and the ledger of its records."""
    check = _ChunkCheck(job)
    group = check.recipe.tree.group if check.recipe.tree else None
    losers = losers_of(job.pieces)
    for piece in job.pieces:
        came_of_arrow = find_shape(piece.range.shape).nulls_are_absent
        for record in read_piece(piece, group, losers):
            check.take(record, came_of_arrow=came_of_arrow)
    check.finish()
    return check.book, check.ledger


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
    """Derive and compare all chunks, or `sample` of them, evenly spread.

    `splits` are the ones that can be read, `engine` names the tokenizer of the slow path.
    """
    text, run = recipe_json(recipe), secrets.token_hex(8)
    if workers is None and sum(file["bytes"] for file in manifest["inputs"]) < WORTH_WORKERS:
        workers = 0
    with TemporaryDirectory(prefix="chatmill-verify-") as spool, LocalExecutor(workers) as executor:
        executor.prepare(_load, (text, run))  # while this process cuts the inputs
        chunks, beyond = stated_chunks(folder, manifest, recipe, Path(spool))
        for name, split in splits.items():
            if len(split.shards) != len(chunks):
                raise FormatError(f"{name} has {len(split.shards)} shards, and the dataset has {len(chunks)} chunks")
        jobs = [
            ProofJob(
                number=number,
                directory=folder,
                recipe=text,
                pieces=chunk.pieces,
                splits=tuple(manifest["splits"]),
                unreadable=tuple(name for name in manifest["splits"] if name not in splits),
                rejected=chunk.rejected,
                run=run,
            )
            for number, chunk in enumerate(chunks)
        ]
        wanted = len(jobs) if sample is None else min(sample, len(jobs))
        chosen = [jobs[number * len(jobs) // wanted] for number in range(wanted)]
        ledgers = [chunk.ledger for chunk in chunks]
        for job, (found, ledger) in zip(chosen, _proved(chosen, executor, book), strict=True):
            book.add(found)
            ledgers[job.number] = ledger
    book.counts["chunks_derived"] += len(chosen)
    total = Ledger()
    for ledger in ledgers:
        total.add(ledger)
    for source, count in beyond.items():
        total.notes[source, "records_beyond_max_records"] += count
    _check_ledger(Ledger.from_json(manifest["ledger"]), total, book)
    _describe(engine, len(jobs), book)


def _proved(jobs: Sequence[ProofJob], executor: LocalExecutor, book: VerifyReport) -> list[tuple[VerifyReport, Ledger]]:
    """What each job gives, in order."""
    found: dict[int, tuple[VerifyReport, Ledger]] = {}
    book.progress("chunks", 0, len(jobs))
    for index, given in executor.map(prove_chunk, jobs):
        found[index] = given
        book.progress("chunks", len(found), len(jobs))
    return [found[index] for index in range(len(jobs))]


def _check_ledger(stated: Ledger, derived: Ledger, book: VerifyReport) -> None:
    """The ledger of the manifest is the one that the records give."""
    known = (*NOTES, "records_beyond_max_records")
    said, found = _flat(stated, known), _flat(derived, known)
    for key in sorted(set(said) | set(found)):
        if said[key] != found[key]:
            what = "/".join(filter(None, key[1:]))
            book.wrong(MANIFEST, f"its ledger says {said[key]:,} {key[0]} {what}; the inputs give {found[key]:,}")


class _ChunkCheck:
    """One pass over the input of a chunk, beside one pass over its shards."""

    def __init__(self, job: ProofJob) -> None:
        self.book = VerifyReport(directory=job.directory, deep=True)
        self.ledger = Ledger()
        self._job, self._folder = job, job.directory
        self._reference = _reference(job.recipe, job.run)
        self.recipe = self._reference.recipe
        self._repairs = useful_repairs(self.recipe.repairs, self._reference.template)
        self._splits = {name: _split(job.directory, name, job.run) for name in job.splits if name not in job.unreadable}
        self._next = {name: int(split.episode_offsets[job.number]) for name, split in self._splits.items()}
        """The number of the next episode of each split."""
        self._answers = AnswerCheck(self._reference.template, self._reference.policy, self.book.counts)
        self._sample = ProcessorSample(self._reference.template.pictures, self.recipe.tokenizer)
        self._rejected = _lines(job.directory / REJECTED, *job.rejected)
        self._shared: dict[str, tuple[PlainTrees, list[Conversation]]] = {}
        """The trees of each group whose records share them, and the records that have rows there."""

    def take(self, record: ReadRecord, *, came_of_arrow: bool) -> None:
        """The next record of the chunk; `came_of_arrow`: its null fields are absent."""
        self.ledger.records[record.source, "read", ""] += 1
        if record.error is not None and record.error.code in (WHERE, PICK):
            self.ledger.records[record.source, "skipped", record.error.code] += 1
        elif record.error is not None and record.error.code == LABEL_FALSE and self.recipe.preferences is not None:
            self.ledger.records[record.source, "skipped", LABEL_FALSE] += 1
        elif record.error is not None:
            self._reject(record.error, record.source)
        else:
            self.ledger.notes[record.source, NULLS_LEFT_OUT] += came_of_arrow
            self._derive(record)

    def _copies(self, record: ReadRecord) -> list[Conversation]:
        """A record as often as its weight says, entered in the ledger."""
        conversation = record.conversation
        assert conversation is not None
        if not record.copies:
            self.ledger.records[record.source, "skipped", "weight"] += 1
        elif record.copies > 1:
            self.ledger.records[record.source, "read", "repeated"] += record.copies - 1
        return [conversation] * record.copies

    def _derive(self, record: ReadRecord) -> None:
        """The slow path."""
        if record.group is not None:
            self._shared.setdefault(record.group, (PlainTrees(record.source), []))
        for conversation in self._copies(record):
            self.book.counts["records_derived"] += 1
            rule = self._reference.policy.errors
            given = [side if rule is None else without_failed(side, rule) for side in conversation.sides]
            try:
                sides = [self._repaired(side) for side in given]
                is_tree, compared = self.recipe.expand is Expand.TREE, self.recipe.preferences == "pairs"
                refuse_unfit([derived for _, derived, _ in sides], compared=compared, is_tree=is_tree)
            except RecordError as error:
                self._refuse(conversation, error)
                continue
            except DataError as error:
                self._found(conversation, MANIFEST, str(error))
                continue
            whole = joined([derived for _, derived, _ in sides])
            account(self.ledger, conversation, whole, str(self.recipe.packing.overflow))
            episodes = sum(len(sequence.episodes) for sequence in whole.sequences)
            if self.recipe.expand is Expand.TREE:
                self.ledger.notes[conversation.source, "episodes"] -= episodes
                if episodes:
                    self._plant(sides[0][0], whole.sequences, record.group)
            weights = [[one.weight for side in some for one in side.messages] for some in (conversation.sides, given)]
            self.ledger.notes[conversation.source, CALLS_FAILED] += sum(map(ne, *weights))
            for side, derived, notes in sides:
                for name, count in notes.items():
                    self.ledger.notes[conversation.source, name] += count
                self._check_side(side, derived)

    def _repaired(self, conversation: Conversation) -> tuple[Conversation, DerivedRecord, Counter[str]]:
        def derive(changed: Conversation) -> DerivedRecord:
            return derive_after(self._reference, changed, self._job.pieces[0].rules.history)

        return derived_repaired(conversation, self._repairs, self.recipe.not_shown, derive)

    def _check_side(self, conversation: Conversation, derived: DerivedRecord) -> None:
        """Compare the rows of a conversation with what is stored, and prove its answers."""
        numbers = []
        if self.recipe.expand is not Expand.TREE:
            rows = (episode for sequence in derived.sequences for episode in sequence.episodes)
            numbers = [self._compare(conversation, episode) for episode in rows]
        for variant, own in derived.variants or [(conversation, derived)]:
            for sentence in self._sample.wrong(variant, own.shown):
                self._found(conversation, self._split_of(conversation), sentence)
            checked = self._answers.mismatches(variant, own.options, own.rows) if own.rows else ()
            for mismatch in checked:
                near = slice(max(0, mismatch.token - CONTEXT), mismatch.token + CONTEXT)
                self._found(
                    conversation,
                    self._split_of(conversation),
                    mismatch.message,
                    episode=numbers[0] if numbers else None,
                    token=mismatch.token,
                    derived=self._decoded(own.sequences[mismatch.sequence].ids[near]),
                )

    def _plant(self, conversation: Conversation, sequences: Sequence[Derived], group: str | None) -> None:
        """Put the rows of a record into its tree, which is compared when no other record is to share it."""
        trees, owners = (PlainTrees(conversation.source), []) if group is None else self._shared[group]
        trees.add(sequences, len(conversation.messages))
        owners.append(conversation)
        if group is None:
            is_pair = conversation.side is Side.CHOSEN
            self._compare_trees(conversation._replace(side=Side.PAIR) if is_pair else conversation, trees)

    def _compare_trees(self, conversation: Conversation, trees: PlainTrees) -> None:
        for episode in trees.write(self.recipe.packing.max_length, self.ledger):
            self.book.counts["rows_of_trees"] += 1 + (len(episode.branches.starts) if episode.branches else 0)
            self._compare(conversation, episode)

    def _refuse(self, conversation: Conversation, error: RecordError) -> None:
        """A template refuses a record."""
        error.record_id = error.record_id or conversation.id
        error.where = error.where or conversation.where
        self._reject(error, conversation.source)

    def _reject(self, error: RecordError, source: str) -> None:
        """A record that cannot be used must be in rejected.jsonl."""
        self.ledger.records[source, "quarantined", error.code] += 1
        self.book.counts["records_rejected"] += 1
        key = _rejected_key(error.where, error.record_id, error.code)
        if self._rejected[key]:
            self._rejected[key] -= 1
        else:
            sentence = f"lacks a record that cannot be used: {error.message} ({error.code})"
            self.book.found(Finding(file=REJECTED, message=sentence, record=error.record_id, where=error.where))

    def _split_of(self, conversation: Conversation) -> str:
        return split_of(record_key(conversation), self.recipe.split.val_fraction)

    def _compare(self, conversation: Conversation, expected: DerivedEpisode) -> int | None:
        """Compare the next stored episode of a record's split with what it must hold; gives its number."""
        name = self._split_of(conversation)
        self.book.counts["episodes_compared"] += 1
        split = self._splits.get(name)
        if split is None:
            if name not in self._job.splits:
                self._found(conversation, name, "an episode must be here, and there is no such split")
            return None
        number, end = self._next[name], int(split.episode_offsets[self._job.number + 1])
        self._next[name] += 1
        if number >= end:
            if number == end:
                sentence = f"ends before episode {number:,} of {name}, and one more must be there"
                self._found(conversation, self._shard(name), sentence)
            return number
        stored = split[number]
        for column, place, sentence in _differences(stored, expected, conversation, self.recipe.keep_kinds):
            file, offset = place_of(split, number, column, place)
            around = slice(max(0, place - CONTEXT), place + CONTEXT)
            has_text = column in ("ids", "length")
            self._found(
                conversation,
                file.relative_to(self._folder).as_posix(),
                sentence,
                offset=offset,
                split=name,
                episode=number,
                token=place if column in ("ids", "weights", "kinds", "logprobs", "length") else None,
                stored=self._decoded(stored.ids[around]) if has_text else "",
                derived=self._decoded(expected.ids[around]) if has_text else "",
            )
        return number

    def _shard(self, split: str) -> str:
        """The folder of its shard in a split."""
        return self._splits[split].shards[self._job.number].folder.relative_to(self._folder).as_posix()

    def _found(self, conversation: Conversation, file: str, message: str, **place: Any) -> None:
        """Note a difference in what a record has become."""
        key = record_key(conversation)
        self.book.found(Finding(file=file, message=message, record=key, where=conversation.where, **place))

    def _decoded(self, ids: Sequence[int] | NDArray[Any]) -> str:
        try:
            return self._reference.tokenizer.decode(ids)
        except TokenizerError:
            return f"ids {[int(i) for i in ids]}"

    def finish(self) -> None:
        """Nothing is left over: no tree, no episode, no rejected record."""
        self.book.counts["pictures_processed"] += self._sample.processed
        self.book.counts["pictures_not_processed"] += bool(self._sample.blocked)
        for trees, owners in self._shared.values():
            if owners:
                self._compare_trees(owners[0], trees)
        for name, split in self._splits.items():
            end = int(split.episode_offsets[self._job.number + 1])
            if self._next[name] < end:
                over = end - self._next[name]
                sentence = f"has {over:,} episodes more than its input gives, from {self._next[name]:,} on"
                self.book.wrong(self._shard(name), sentence)
        for count in (self._rejected - Counter()).values():
            self.book.wrong(REJECTED, f"has {count:,} records that the inputs do not give, or twice")


def _describe(engine: str, chunks: int, book: VerifyReport) -> None:
    """Say what was compared, and what was not."""
    counts, say = book.counts, book.compared.append
    some = f", of {counts['chunks_derived']} of {chunks} chunks" if counts["chunks_derived"] < chunks else ""
    say(f"{counts['records_derived']:,} records derived from their source by the slow path ({engine}){some}")
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


def _flat(ledger: Ledger, notes: Sequence[str]) -> Counter[tuple[str, ...]]:
    """All counts of a ledger under one kind of key; of the notes only those that are named."""
    flat: Counter[tuple[str, ...]] = Counter()
    flat.update({("tokens", *key): count for key, count in ledger.tokens.items()})
    flat.update({("records", *key): count for key, count in ledger.records.items()})
    flat.update({("notes", *key): count for key, count in ledger.notes.items() if key[1] in notes})
    return flat


def _differences(
    stored: Episode, expected: DerivedEpisode, conversation: Conversation, keep_kinds: bool
) -> list[tuple[str, int, str]]:
    """(column, first token, sentence) of everything that differs."""
    found: list[tuple[str, int, str]] = []
    place = first_difference(stored.ids, expected.ids)
    if place is not None and place < min(len(stored.ids), len(expected.ids)):
        found.append(("ids", place, f"the id is {stored.ids[place]} and must be {expected.ids[place]}"))
    if place is not None and len(stored.ids) != len(expected.ids):
        sentence = f"there are {len(stored.ids):,} tokens and must be {len(expected.ids):,}"
        found.append(("length", place, sentence))
        return found
    found += _branch_differences(stored, expected)
    weights = expected.weights.astype(np.float32)
    if stored.logprobs is not None and expected.logprobs is not None:
        has, needs = stored.logprobs, expected.logprobs
        wrong = np.flatnonzero((has != needs) & ~(np.isnan(has) & np.isnan(needs)))
        for place in wrong[:1].tolist():
            found.append(("logprobs", place, f"logprobs is {has[place]} and must be {needs[place]}"))
    for column, values, wanted in (("weights", stored.weights, weights), ("kinds", stored.kinds, expected.kinds)):
        if values is None:
            if column == "weights" or keep_kinds:
                found.append((column, 0, "is not stored, and must be"))
        elif (place := first_difference(values, wanted)) is not None:
            found.append((column, place, f"{column} is {values[place]} and must be {wanted[place]}"))
    per_episode = {
        "source": (stored.source, conversation.source),
        "turns": (stored.turns, expected.turns),
        "trained": (stored.trained, int(np.count_nonzero(weights))),
        "record_id": (stored.record_id, record_key(conversation)),
        "side": (stored.side, SIDE_NAMES[conversation.side]),
        "images": (_without_data(stored.images), expected.images),
    }
    if stored.side in ("chosen", "rejected", "pair") and stored.margin != margin_of(conversation.metadata):
        found.append(("margin", 0, f"the margin is {stored.margin} and must be {margin_of(conversation.metadata)}"))
    for column, (value, must) in per_episode.items():
        if value is not None and value != must:
            found.append((column, 0, f"the column {column} has {value!r} and must have {must!r}"))
    return found


def _without_data(line: str | None) -> list[StoredPicture] | None:
    """The pictures of an episode, without where their bytes are."""
    return None if line is None else [one._replace(data=None) for one in stored_pictures(line)]


def _branch_differences(stored: Episode, expected: DerivedEpisode) -> list[tuple[str, int, str]]:
    """The first branch that differs, or their number."""
    wanted = expected.branches
    if wanted is None:
        return []
    for name, values, must in (
        ("begins at token", stored.branches.starts, wanted.starts),
        ("begins at depth", stored.branches.depths, wanted.depths),
    ):
        if (place := first_difference(values, must)) is not None:
            if place == min(len(values), len(must)):
                return [("branches", 0, f"there are {len(values):,} branches and must be {len(must):,}")]
            return [("branches", 0, f"branch {place + 1} {name} {values[place]:,} and must at {must[place]:,}")]
    return []


def _lines(path: Path, start: int, end: int) -> Counter[bytes]:
    """How often each rejected record is listed in a part of their file."""
    counts: Counter[bytes] = Counter()
    if start < end:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(end - start).splitlines()
        for line in lines:
            try:
                entry = json.loads(line)
                counts[_rejected_key(entry["where"], entry["id"], entry["reason"])] += 1
            except (ValueError, KeyError, TypeError):
                counts[b""] += 1
    return counts


def _rejected_key(where: str, record_id: str, reason: str) -> bytes:
    text = json.dumps([where, record_id, reason])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
