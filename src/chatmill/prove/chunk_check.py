"""Derives the records of one chunk by the slow path, and compares them with what is stored of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.pairs import AnswerRow, KeptOfPair, picture_error, problem_of
from chatmill.compiler.repairs import derived_repaired, useful_repairs
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import record_key
from chatmill.core.ledger import CALLS_FAILED, NULLS_LEFT_OUT, Ledger
from chatmill.core.sides import IS_ANSWER, SIDE_NAMES, Side
from chatmill.errors import INTERNAL_ERROR, DataError, RecordError, TokenizerError
from chatmill.images.column import stored_pictures
from chatmill.prove.answer_check import AnswerCheck
from chatmill.prove.columns import file_of
from chatmill.prove.conversations import without_failed
from chatmill.prove.inputs import ReadRecord, StatedChunk
from chatmill.prove.pictures import ProcessorSample
from chatmill.prove.reference import DerivedDocument, DerivedRecord, Reference, account, hash_share
from chatmill.prove.report import Finding, VerifyReport
from chatmill.prove.trees import PlainTrees
from chatmill.read.picks import PICK
from chatmill.read.preferences import margin_of
from chatmill.read.record_shape import LABEL_FALSE
from chatmill.read.where import WHERE
from chatmill.render.jinja.options import Expand
from chatmill.store.episode_layout import MANIFEST
from chatmill.store.episodes import Episode, EpisodeDataset

CONTEXT = 8
"""Tokens that are shown on both sides of the first difference."""
Difference = tuple[str, int, str]
"""Column, first token that differs, and a sentence."""


class ChunkCheck:
    """One pass over the input of a chunk, next to one pass over its shards."""

    def __init__(
        self,
        folder: Path,
        chunk: StatedChunk,
        reference: Reference,
        splits: Mapping[str, EpisodeDataset],
    ) -> None:
        """`splits` are all of the dataset."""
        self.book = VerifyReport(directory=folder, deep=True)
        self.ledger = Ledger()
        self._folder, self._number, self._splits = folder, chunk.number, splits
        self._reference, self.recipe = reference, reference.recipe
        self._is_tree = self.recipe.expand is Expand.TREE
        self._repairs = useful_repairs(self.recipe.repairs, self._reference.template)
        self._next = {name: int(split.episode_offsets[chunk.number]) for name, split in splits.items()}
        """The number of the next episode of each split."""
        self._answers = AnswerCheck(self._reference.template, self._reference.policy, self.book.counts)
        self._sample = ProcessorSample(self._reference.template.pictures, self.recipe.tokenizer)
        self._rejected = _listed(folder / REJECTED, *chunk.rejected)
        self._shared: dict[str, tuple[PlainTrees, list[Conversation]]] = {}
        """The trees of each group whose records share them, and the records that have rows there."""

    def take(self, record: ReadRecord, *, came_of_arrow: bool) -> None:
        """Take the next record of the chunk; `came_of_arrow`: its null fields are absent."""
        self.ledger.records[record.source, "read", ""] += 1
        skipped = (WHERE, PICK) if self.recipe.preferences is None else (WHERE, PICK, LABEL_FALSE)
        if record.error is not None and record.error.code in skipped:
            self.ledger.records[record.source, "skipped", record.error.code] += 1
        elif record.error is not None:
            self._reject(record.error, record.source)
        else:
            self.ledger.notes[record.source, NULLS_LEFT_OUT] += came_of_arrow
            self.ledger.records[record.source, "skipped", "weight"] += not record.copies
            self.ledger.records[record.source, "read", "repeated"] += max(0, record.copies - 1)
            if record.group is not None:
                self._shared.setdefault(record.group, (PlainTrees(record.source), []))
            for _ in range(record.copies):
                self._derive(record)

    def _derive(self, record: ReadRecord) -> None:
        """The slow path."""
        conversation = record.conversation
        assert conversation is not None
        self.book.counts["records_derived"] += 1
        source, rule = conversation.source, self._reference.policy.errors
        if self._rejected[conversation.where, conversation.id, INTERNAL_ERROR]:  # what it should be nobody knows
            named = {"where": conversation.where, "record_id": conversation.id}
            self._reject(RecordError("a fault of Chatmill", code=INTERNAL_ERROR, **named), source)
            return
        sides_before = [side if rule is None else without_failed(side, rule) for side in conversation.sides]
        try:
            sides = [
                derived_repaired(side, self._repairs, self.recipe.not_shown, self._derive_side) for side in sides_before
            ]
            self._refuse_unfit([derived for _, derived, _ in sides])
        except RecordError as error:
            error.record_id = error.record_id or conversation.id
            error.where = error.where or conversation.where
            self._reject(error, source)
            return
        except DataError as error:
            self._found(conversation, MANIFEST, str(error))
            return
        account(self.ledger, source, [derived for _, derived, _ in sides], str(self.recipe.packing.overflow))
        documents = [document for _, derived, _ in sides for row in derived.rows for document in row.documents]
        if self._is_tree:
            self.ledger.notes[source, "episodes"] -= len(documents)
            if documents:
                self._plant(sides[0][0], documents, record.group)
        weights = [
            [message.weight for side in side_group for message in side.messages]
            for side_group in (conversation.sides, sides_before)
        ]
        self.ledger.notes[source, CALLS_FAILED] += sum(map(ne, *weights))
        for side, derived, notes in sides:
            for name, count in notes.items():
                self.ledger.notes[source, name] += count
            self._check_side(side, derived)

    def _derive_side(self, conversation: Conversation) -> DerivedRecord:
        return self._reference.derive(conversation)

    def _refuse_unfit(self, sides: Sequence[DerivedRecord]) -> None:
        """Raise the error of a record whose answers people compared and no trainer could; drop its rows together."""
        rows, compared = [row for side in sides for row in side.rows], self.recipe.preferences == "pairs"
        if (compared or self._is_tree) and any(row.images for row in rows):
            raise picture_error()
        if not compared:
            return
        answers = []
        for row in rows:
            first = next((place for place, code in enumerate(row.kinds) if IS_ANSWER[code]), None)
            answers.append(AnswerRow(row.ids, first))
        if problem := problem_of([len(side.rows) for side in sides], answers, KeptOfPair.by(self.recipe)):
            raise problem
        if not all(row.documents for row in rows):
            for row in rows:
                row.spans, row.documents = [], []

    def _check_side(self, conversation: Conversation, derived: DerivedRecord) -> None:
        """Compare the rows of a conversation with what is stored, and prove its answers."""
        numbers: dict[int, list[int | None]] = {}
        """The stored episodes of each row."""
        for row in () if self._is_tree else derived.rows:
            numbers[id(row)] = [self._compare(conversation, document) for document in row.documents]
        for claim in derived.claims:
            for sentence in self._sample.wrong(claim.conversation, claim.shown):
                self._found(conversation, self._split_of(conversation), sentence)
            for mismatch in self._answers.mismatches(claim.conversation, claim.options, claim.rows):
                self._found(
                    conversation,
                    self._split_of(conversation),
                    mismatch.message,
                    episode=next(iter(numbers.get(id(claim.derived[mismatch.document]), ())), None),
                    token=mismatch.token,
                    stored=self._text(claim.rows[mismatch.document].ids, mismatch.token),
                    derived="" if mismatch.ids is None else self._text(mismatch.ids, mismatch.token),
                )

    def _plant(self, conversation: Conversation, documents: Sequence[DerivedDocument], group: str | None) -> None:
        """Put the rows of a record into its tree, which is compared when no other record is to share it."""
        trees, owners = (PlainTrees(conversation.source), []) if group is None else self._shared[group]
        trees.add(documents, len(conversation.messages))
        owners.append(conversation)
        if group is None:
            is_pair = conversation.side is Side.CHOSEN
            self._compare_trees(conversation._replace(side=Side.PAIR) if is_pair else conversation, trees)

    def _compare_trees(self, conversation: Conversation, trees: PlainTrees) -> None:
        for tree in trees.write(self.recipe.packing.max_length, self.ledger):
            self.book.counts["rows_of_trees"] += 1 + len(tree.branches or ())
            self._compare(conversation, tree)

    def _reject(self, error: RecordError, source: str) -> None:
        """Check that a record that cannot be used is in rejected.jsonl."""
        self.ledger.records[source, "quarantined", error.code] += 1
        self.book.counts["records_rejected"] += 1
        key = (error.where, error.record_id, error.code)
        if self._rejected[key]:
            self._rejected[key] -= 1
        else:
            sentence = f"lacks a record that cannot be used: {error.message} ({error.code})"
            self.book.found(Finding(file=REJECTED, message=sentence, record=error.record_id, where=error.where))

    def _split_of(self, conversation: Conversation) -> str:
        """Return the split of a record, by the key it is known by."""
        is_val = hash_share(record_key(conversation)) < Fraction(str(self.recipe.split.val_fraction))
        return "val" if is_val else "train"

    def _compare(self, conversation: Conversation, expected: DerivedDocument) -> int | None:
        """Compare the next stored episode of a record's split with what it must hold; gives its number."""
        name = self._split_of(conversation)
        self.book.counts["episodes_compared"] += 1
        split = self._splits.get(name)
        if split is None:
            self._found(conversation, name, "an episode must be here, and there is no such split")
            return None
        number, end = self._next[name], int(split.episode_offsets[self._number + 1])
        self._next[name] += 1
        if number >= end:
            if number == end:
                sentence = f"ends before episode {number:,} of {name}, and one more must be there"
                self._found(conversation, self._shard(name), sentence)
            return number
        stored = split[number]
        for column, place, sentence in _differences(stored, expected, conversation, self.recipe.keep_kinds):
            has_text = column in ("ids", "length")
            self._found(
                conversation,
                file_of(split, number, column),
                sentence,
                split=name,
                episode=number,
                token=place if column in ("ids", "weights", "kinds", "logprobs", "length") else None,
                stored=self._text(stored.ids, place) if has_text else "",
                derived=self._text(expected.ids, place) if has_text else "",
            )
        return number

    def _shard(self, split: str) -> str:
        """Return the folder of its shard in a split."""
        return self._splits[split].shards[self._number].folder.relative_to(self._folder).as_posix()

    def _found(self, conversation: Conversation, file: str, message: str, **place: Any) -> None:
        """Note a difference in what a record has become."""
        key = record_key(conversation)
        self.book.found(Finding(file=file, message=message, record=key, where=conversation.where, **place))

    def _text(self, ids: Sequence[int] | NDArray[Any], place: int) -> str:
        """Of the tokens around a place."""
        ids = ids[max(0, place - CONTEXT) : place + CONTEXT]
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
            end = int(split.episode_offsets[self._number + 1])
            if self._next[name] < end:
                over = end - self._next[name]
                sentence = f"has {over:,} episodes more than its input gives, from {self._next[name]:,} on"
                self.book.wrong(self._shard(name), sentence)
        for count in (self._rejected - Counter()).values():
            self.book.wrong(REJECTED, f"has {count:,} records that the inputs do not give, or twice")


def _differences(
    stored: Episode, expected: DerivedDocument, conversation: Conversation, keep_kinds: bool
) -> Iterator[Difference]:
    """Everything that differs; of an episode with another number of tokens nothing but that and its ids."""
    size = len(stored.ids), len(expected.ids)
    types = {"ids": np.uint32, "weights": np.float32, "kinds": np.uint8, "logprobs": np.float32}
    for column, dtype in types.items():
        values, wanted = getattr(stored, column), np.array(getattr(expected, column), dtype=dtype)
        if values is None:
            if column == "weights" or (column == "kinds" and keep_kinds):
                yield column, 0, "is not stored, and must be"
            continue
        values, wanted = values[: min(size)], wanted[: min(size)]
        is_same = (values == wanted) | ((values != values) & (wanted != wanted))  # a log-probability may be NaN
        places = np.append(np.flatnonzero(~is_same), min(size))
        place, name = int(places[0]), "the id" if column == "ids" else column
        if len(places) > 1:
            yield column, place, f"{name} is {values[place]} and must be {wanted[place]}"
        if size[0] != size[1]:
            yield "length", place, f"there are {size[0]:,} tokens and must be {size[1]:,}"
            return
    if expected.branches is not None:
        has = zip(stored.branches.starts.tolist(), stored.branches.depths.tolist(), strict=True)
        for stored_pair, other in zip_longest(map(list, has), map(list, expected.branches)):
            if stored_pair != other:
                yield "branches", 0, f"a branch begins at [token, depth] {stored_pair} and must at {other}"
                break
    margin = margin_of(conversation.metadata)
    if stored.side in ("chosen", "rejected", "pair") and stored.margin != margin:
        yield "margin", 0, f"the margin is {stored.margin} and must be {margin}"
    shown = stored.images if stored.images is None else [p._replace(data=None) for p in stored_pictures(stored.images)]
    for name, value, must in (
        ("source", stored.source, conversation.source),
        ("turns", stored.turns, expected.turns),
        ("trained", stored.trained, sum(weight > 0 for weight in expected.weights)),
        ("record_id", stored.record_id, record_key(conversation)),
        ("side", stored.side, SIDE_NAMES[conversation.side]),
        ("images", shown, expected.images),
    ):
        if value is not None and value != must:
            yield name, 0, f"the column {name} has {value!r} and must have {must!r}"


def _listed(path: Path, start: int, end: int) -> Counter[tuple[str, str, str]]:
    """Place, id and reason of the rejected records in a part of their file."""
    counts: Counter[tuple[str, str, str]] = Counter()
    if start < end:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(end - start).splitlines()
        for line in lines:
            try:
                entry = json.loads(line)
                counts[entry["where"], entry["id"], entry["reason"]] += 1
            except (ValueError, KeyError, TypeError):
                counts["", "", ""] += 1
    return counts
