"""One placeholder of a document becomes the tokens of its picture, for all documents of a batch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import PICTURE
from chatmill.core.native.gather import gathered
from chatmill.core.pictures import Picture
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import RecordError
from chatmill.images.files import Pictures, Shown
from chatmill.images.rule import Grid, PictureRule

Ints = NDArray[np.int64]


class PictureRuns(NamedTuple):
    """The runs of tokens that are pictures."""

    runs: Ints
    pictures: list[Shown]

    def taken(self, source_runs: Ints) -> PictureRuns:
        """Select the pictures of derived tokens; `source_runs` has the run that each run was made of."""
        wanted = np.flatnonzero(np.isin(source_runs, self.runs))
        numbers = np.searchsorted(self.runs, source_runs[wanted])
        return PictureRuns(wanted, [self.pictures[number] for number in numbers.tolist()])


NO_PICTURES = PictureRuns(np.empty(0, dtype=np.int64), [])


def look_at(
    batch: Conversations, pictures: Pictures, wanted: NDArray[np.bool_]
) -> tuple[dict[int, list[Shown]], dict[int, RecordError]]:
    """Look at the pictures of the wanted conversations; by number of the conversation, in order, and the errors."""
    owners = batch.owners(batch.messages.pictured)
    shown: dict[int, list[Shown]] = {}
    failed: dict[int, RecordError] = {}
    for owner in np.unique(owners[wanted[owners]]).tolist():
        messages = batch.messages.parts[slice(*batch.offsets[owner : owner + 2])]
        named = [
            (part, f"messages[{message}].content[{number}]")
            for message, parts in enumerate(messages)
            for number, part in enumerate(parts)
            if isinstance(part, Picture)
        ]
        try:
            shown[owner] = pictures.look(named)
        except RecordError as error:
            failed[owner] = error
    return shown, failed


class Expander:
    """Writes the tokens of pictures with one vocabulary."""

    def __init__(self, rule: PictureRule, tokenizer: Any) -> None:
        """Check that the tokenizer has all control tokens of the rule."""
        self.rule, self._tokenizer = rule, tokenizer
        self.token: int = tokenizer.control_ids[rule.token]
        self._known: dict[tuple[Grid, tuple[int, int], bool], NDArray[np.int32]] = {}

    def ids(self, shown: Shown, others: int) -> NDArray[np.int32]:
        """Make the ids that replace the placeholder."""
        key = (shown.grid, (shown.height, shown.width), others > 0)
        ids = self._known.get(key)
        if ids is None:
            pieces = self.rule.pieces(shown.grid, (shown.height, shown.width), others)
            parts = [np.tile(np.array(self._encode(text), dtype=np.int32), count) for text, count in pieces]
            ids = np.concatenate(parts)
            if len(self._known) < 1 << 16:
                self._known[key] = ids
        return ids

    def _encode(self, text: str) -> list[int]:
        control = self._tokenizer.control_ids.get(text)
        return self._tokenizer.encode(text) if control is None else [control]

    def placeholders(self, tokens: Tokens) -> Ints:
        """Find the runs that stand for a picture; each is one token."""
        runs = np.flatnonzero((tokens.run_kinds == PICTURE) & (tokens.run_lengths == 1))
        placeholders: Ints = runs[tokens.ids[tokens.run_offsets[runs]] == self.token]
        return placeholders

    def misplaced(
        self, tokens: Tokens, kept: Ints, batch: Conversations, shown: Mapping[int, Sequence[Shown]]
    ) -> dict[int, RecordError]:
        """Find conversations whose documents do not show all pictures up to their end, each once and in order.

        `kept` has the conversation of each document.
        """
        runs = self.placeholders(tokens)
        documents = np.searchsorted(tokens.document_runs, runs, side="right") - 1
        written = np.bincount(documents, minlength=len(tokens))
        doubtful = np.flatnonzero((written > 0) | np.isin(kept, list(shown)))
        most: dict[int, int] = {}
        wrong: dict[int, tuple[int, int]] = {}
        for document in doubtful.tolist():
            owner = int(kept[document])
            part = slice(*tokens.document_runs[document : document + 2].tolist())
            last = int(tokens.run_messages[part].max(initial=-1))
            expected = _pictures_up_to(batch, owner, last)
            if written[document] != expected:
                wrong[owner] = (int(written[document]), expected)
            most[owner] = max(most.get(owner, 0), int(written[document]))
        for owner, count in most.items():
            if count != len(shown.get(owner, ())):
                wrong.setdefault(owner, (count, len(shown.get(owner, ()))))
        return {owner: _differ(*counts, self.rule) for owner, counts in wrong.items()}

    def spelled(self, tokens: Tokens, kept: Ints) -> dict[int, RecordError]:
        """Find conversations in which text, or a sampled answer, has the id of a placeholder."""
        places = np.flatnonzero(tokens.ids == self.token)
        runs = np.searchsorted(tokens.run_offsets, places, side="right") - 1
        runs = runs[tokens.run_kinds[runs] != PICTURE]
        owners = np.unique(kept[np.searchsorted(tokens.document_runs, runs, side="right") - 1])
        return {index: spelled_error(self.rule) for index in owners.tolist()}

    def expanded(self, tokens: Tokens, kept: Ints, shown: Mapping[int, Sequence[Shown]]) -> tuple[Tokens, PictureRuns]:
        """Replace the placeholders, none of which is missing, with the tokens of their pictures."""
        runs = self.placeholders(tokens)
        if not len(runs):
            return tokens, NO_PICTURES
        documents = np.searchsorted(tokens.document_runs, runs, side="right") - 1
        first = np.searchsorted(documents, documents)
        numbers = (np.arange(len(runs)) - first).tolist()
        owners = kept[documents].tolist()
        pictures = [shown[owner][number] for owner, number in zip(owners, numbers, strict=True)]
        others = (np.bincount(documents)[documents] - 1).tolist()
        parts = [self.ids(picture, count) for picture, count in zip(pictures, others, strict=True)]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        at = tokens.run_offsets[runs]
        grown = offsets_of(sizes - 1)

        def moved(offsets: Ints) -> Ints:
            return offsets + grown[np.searchsorted(at, offsets, side="left")]

        starts = np.empty(2 * len(at) + 1, dtype=np.int64)
        lengths, which = np.empty_like(starts), np.zeros(len(starts), dtype=np.uint8)
        starts[0::2], starts[1::2] = np.append(0, at + 1), offsets_of(sizes)[:-1]
        lengths[0::2], lengths[1::2], which[1::2] = np.append(at, len(tokens.ids)) - starts[0::2], sizes, 1
        result = replace(
            tokens,
            ids=gathered([tokens.ids, np.concatenate(parts)], which, starts, lengths),
            logprobs=None
            if tokens.logprobs is None
            else gathered([tokens.logprobs, np.full(sizes.sum(), np.nan, np.float32)], which, starts, lengths),
            part_weights=None
            if tokens.part_weights is None
            else gathered([tokens.part_weights, np.full(sizes.sum(), np.nan, np.float32)], which, starts, lengths),
            offsets=moved(tokens.offsets),
            run_offsets=moved(tokens.run_offsets),
        )
        return result, PictureRuns(runs, pictures)


def _pictures_up_to(batch: Conversations, conversation: int, last: int) -> int:
    """Count the pictures of a conversation up to one of its messages."""
    first = int(batch.offsets[conversation])
    parts = batch.messages.parts[first : min(first + last + 1, int(batch.offsets[conversation + 1]))].tolist()
    return sum(isinstance(part, Picture) for message in parts for part in message)


def spelled_error(rule: PictureRule) -> RecordError:
    """Make the error of a record in which something else would be taken for a picture."""
    return RecordError(
        f"a text, or what a model sampled, has the id of the placeholder {rule.token}: set strict_text (--set "
        "strict_text=true), under which text is always text",
        code="placeholder_in_text",
    )


def _differ(written: int, expected: int, rule: PictureRule) -> RecordError:
    return RecordError(
        f"the template writes {written} placeholders ({rule.placeholder}) where the messages have {expected} pictures",
        code="images_differ",
    )
