"""Derives every record of a dataset again from its source, and compares it with what is stored, token by token."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_job import BATCH_BYTES, BATCH_ROWS
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import record_key
from chatmill.core.ledger import Ledger
from chatmill.core.tokens import first_difference
from chatmill.errors import DataError, RecordError, TokenizerError
from chatmill.prove.inputs import ReadRecord, capped, read_inputs
from chatmill.prove.reference import DerivedEpisode, Reference, account, split_of
from chatmill.prove.report import Finding, VerifyReport
from chatmill.prove.spans import SpanCheck
from chatmill.prove.stored import place_of
from chatmill.read.record_shape import LABEL_FALSE
from chatmill.store.episodes import Episode, EpisodeDataset
from chatmill.store.receipts import MANIFEST
from chatmill.tokenizer.tokenizer import Tokenizer

CONTEXT = 8
"""Tokens that are shown on both sides of the first difference."""
NOTES = (
    *("stripped_characters", "episodes", "untrained_terminators", "records_without_trained_tokens"),
    *("turns_that_later_messages_change", "turns_without_proof", "stops_appended", "rows_added"),
    "tokens_in_added_rows",
)
"""Notes of the ledger that are derived again; `records_beyond_max_records` is counted from the inputs."""


class DeepCheck:
    """One pass over the inputs, beside one pass over the dataset."""

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        recipe: Recipe,
        splits: Mapping[str, EpisodeDataset],
        book: VerifyReport,
    ) -> None:
        """`splits` are the ones that can be read."""
        self._folder, self._manifest, self._recipe = folder, manifest, recipe
        self._splits, self._book = splits, book
        self._next: Counter[str] = Counter()
        """The number of the next episode of each split."""
        self._ledger = Ledger()
        self._rejected = _lines(folder / REJECTED)

    def run(self, tokenizer: Tokenizer, sample: int | None) -> None:
        """Derive and compare everything; with `sample` so many records slowly, the others by the fast path."""
        self._reference = Reference(self._recipe, tokenizer)
        self._spans = SpanCheck(self._reference, self._book)
        inputs = self._manifest["inputs"]
        total = Ledger.from_json(self._manifest["ledger"])
        records = sum(count for (_, what, why), count in total.records.items() if what == "read" and not why)
        chosen = None if sample is None or sample >= records else {i * records // sample for i in range(sample)}
        bulk = None if chosen is None else _Bulk(Pipeline(self._recipe), self)
        for number, record in enumerate(read_inputs(self._recipe, inputs)):
            if number % 64 == 0:
                self._book.progress("records", number, records)
            self._ledger.records[record.source, "read", ""] += 1
            if record.error is not None and record.error.code == LABEL_FALSE and self._recipe.preferences is not None:
                self._ledger.records[record.source, "skipped", LABEL_FALSE] += 1
            elif record.error is not None:
                self._reject(record.error, record.source)
            elif chosen is not None and bulk is not None and number not in chosen:
                bulk.add(record)
            else:
                if bulk is not None:
                    bulk.flush()
                self._derive(record)
        if bulk is not None:
            bulk.flush()
        self._finish()
        self._describe(tokenizer.backend.name)

    def copies(self, record: ReadRecord) -> list[Conversation]:
        """A record as often as its weight says, entered in the ledger."""
        conversation = record.conversation
        assert conversation is not None
        if not record.copies:
            self._ledger.records[record.source, "skipped", "weight"] += 1
        elif record.copies > 1:
            self._ledger.records[record.source, "read", "repeated"] += record.copies - 1
        return [conversation] * record.copies

    def _derive(self, record: ReadRecord) -> None:
        """The slow path."""
        for conversation in self.copies(record):
            self._book.counts["records_derived"] += 1
            try:
                derived = self._reference.derive(conversation)
            except RecordError as error:
                self.refuse(conversation, error)
                continue
            except DataError as error:
                self._found(conversation, MANIFEST, str(error))
                continue
            account(self._ledger, conversation, derived, str(self._recipe.packing.overflow))
            numbers = [
                self.compare(conversation, episode) for sequence in derived.sequences for episode in sequence.episodes
            ]
            for mismatch in self._spans.mismatches(conversation, derived):
                around = derived.sequences[mismatch.sequence].ids[
                    max(0, mismatch.token - CONTEXT) : mismatch.token + CONTEXT
                ]
                self._found(
                    conversation,
                    self._split_of(conversation),
                    mismatch.message,
                    episode=numbers[0] if numbers else None,
                    token=mismatch.token,
                    derived=self._decoded(around),
                )

    def refuse(self, conversation: Conversation, error: RecordError) -> None:
        """A template refuses a record."""
        error.record_id = error.record_id or conversation.id
        error.where = error.where or conversation.where
        self._reject(error, conversation.source)

    def add_fast(self, records: int, ledger: Ledger) -> None:
        """Add the counts of the fast path."""
        self._book.counts["records_by_fast_path"] += records
        self._ledger.add(ledger)

    def _reject(self, error: RecordError, source: str) -> None:
        """A record that cannot be used must be in rejected.jsonl."""
        self._ledger.records[source, "quarantined", error.code] += 1
        self._book.counts["records_rejected"] += 1
        key = _rejected_key(error.where, error.record_id, error.code)
        if self._rejected[key]:
            self._rejected[key] -= 1
        else:
            sentence = f"lacks a record that cannot be used: {error.message} ({error.code})"
            self._book.found(Finding(file=REJECTED, message=sentence, record=error.record_id, where=error.where))

    def _split_of(self, conversation: Conversation) -> str:
        return split_of(record_key(conversation), self._recipe.split.val_fraction)

    def compare(self, conversation: Conversation, expected: DerivedEpisode) -> int:
        """Compare the next stored episode of a record's split with what it must hold; gives its number."""
        name = self._split_of(conversation)
        number = self._next[name]
        self._next[name] += 1
        self._book.counts["episodes_compared"] += 1
        split = self._splits.get(name)
        if split is None:
            if name not in self._manifest["splits"]:
                self._found(conversation, name, f"episode {number:,} must be here, and there is no such split")
            return number
        if number >= len(split):
            if number == len(split):
                self._found(conversation, name, f"the split ends after {number:,} episodes, and this one must follow")
            return number
        stored = split[number]
        for column, place, sentence in _differences(stored, expected, conversation, self._recipe.keep_kinds):
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
                token=place if column in ("ids", "weights", "kinds", "length") else None,
                stored=self._decoded(stored.ids[around]) if has_text else "",
                derived=self._decoded(expected.ids[around]) if has_text else "",
            )
        return number

    def _found(self, conversation: Conversation, file: str, message: str, **place: Any) -> None:
        """Note a difference in what a record has become."""
        key = record_key(conversation)
        self._book.found(Finding(file=file, message=message, record=key, where=conversation.where, **place))

    def _decoded(self, ids: Sequence[int] | NDArray[Any]) -> str:
        try:
            return self._reference.tokenizer.decode(ids)
        except TokenizerError:
            return f"ids {[int(i) for i in ids]}"

    def _finish(self) -> None:
        """Nothing is left over: no episode, no rejected record, no difference in the ledger."""
        for name, split in self._splits.items():
            if self._next[name] < len(split):
                over = len(split) - self._next[name]
                self._book.wrong(name, f"has {over:,} episodes more than its inputs give, from {self._next[name]:,} on")
        for count in (self._rejected - Counter()).values():
            self._book.wrong(REJECTED, f"has {count:,} records that the inputs do not give, or twice")
        self._check_ledger()

    def _check_ledger(self) -> None:
        """The ledger of the manifest is the one that the records give."""
        stated = Ledger.from_json(self._manifest["ledger"])
        for source, count in capped(self._recipe, self._manifest["inputs"]).items():
            self._ledger.notes[source, "records_beyond_max_records"] += count
        known = (*NOTES, "records_beyond_max_records")
        said, derived = _flat(stated, known), _flat(self._ledger, known)
        for key in sorted(set(said) | set(derived)):
            if said[key] != derived[key]:
                what = "/".join(filter(None, key[1:]))
                self._book.wrong(
                    MANIFEST, f"its ledger says {said[key]:,} {key[0]} {what}; the inputs give {derived[key]:,}"
                )

    def _describe(self, engine: str) -> None:
        counts, template = self._book.counts, self._recipe.template
        say = self._book.compared.append
        fast = f", {counts['records_by_fast_path']:,} more by the fast path" if counts["records_by_fast_path"] else ""
        say(f"{counts['records_derived']:,} records derived from their source by the slow path ({engine}){fast}")
        say(f"{counts['episodes_compared']:,} episodes in ids, weights, kinds and columns; the ledger as a whole")
        if counts["answers_proved"]:
            say(
                f"{counts['answers_proved']:,} of {counts['trained_messages']:,} trained answers by plain Jinja: what "
                "comes before is the prompt a model would get, the trained ids are the answer through its one stop"
            )
        if counts["contexts_equal"]:
            say(f"the context of {counts['contexts_equal']:,} answers with their whole generation prompt")
        for name, sentence in (
            (
                "contexts_that_change",
                f"the context of {{:,}} answers: {template} writes it otherwise once messages follow",
            ),
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
            ("answers_left_untrained", "{:,} answers that have no proof and are context"),
            ("contexts_cut", "the context of {:,} answers that are in windows or cut"),
            ("answers_that_go_on", "the context of {:,} messages that continue a turn"),
        ):
            if counts[name]:
                self._book.unchecked.append(sentence.format(counts[name]))


class _Bulk:
    """Records that are not in the sample: compiled by the fast path, a batch at a time."""

    def __init__(self, pipeline: Pipeline, check: DeepCheck) -> None:
        self._pipeline, self._check = pipeline, check
        self._batch: list[Conversation] = []
        self._characters = 0

    def add(self, record: ReadRecord) -> None:
        """Take a record; a full batch is compiled."""
        copies = self._check.copies(record)
        self._batch += copies
        self._characters += sum(len(message.content) for one in copies for message in one.messages)
        if len(self._batch) >= BATCH_ROWS or self._characters >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Compile and compare what has gathered."""
        if not self._batch:
            return
        compiled = self._pipeline.compile(self._batch)
        self._check.add_fast(len(self._batch), compiled.ledger)
        for index, error in compiled.failed:
            self._check.refuse(self._batch[index], error)
        ids, offsets, weights, kinds = compiled.columns(range(len(compiled.tokens)))
        for episode, index in enumerate(compiled.source_index.tolist()):
            tokens = slice(int(offsets[episode]), int(offsets[episode + 1]))
            made = DerivedEpisode(
                ids=ids[tokens], weights=weights[tokens], kinds=kinds[tokens], turns=int(compiled.turns[episode])
            )
            self._check.compare(self._batch[index], made)
        self._batch, self._characters = [], 0


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
    weights = expected.weights.astype(np.float32)
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
    }
    for column, (value, must) in per_episode.items():
        if value is not None and value != must:
            found.append((column, 0, f"the column {column} has {value!r} and must have {must!r}"))
    return found


def _lines(path: Path) -> Counter[bytes]:
    """How often each rejected record is listed."""
    counts: Counter[bytes] = Counter()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    counts[_rejected_key(entry["where"], entry["id"], entry["reason"])] += 1
                except (ValueError, KeyError, TypeError):
                    counts[b""] += 1
    return counts


def _rejected_key(where: str, record_id: str, reason: str) -> bytes:
    text = json.dumps([where, record_id, reason])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
