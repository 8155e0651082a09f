"""Counts what the columns of a split say, and finds values that cannot be: one pass, a slice of tokens at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import KINDS, PLAIN, Part, RoleCode, parts_of, role_name, roles_of
from chatmill.core.tokens import segment_sums
from chatmill.errors import DataError
from chatmill.prove.report import Finding
from chatmill.prove.stored import place_of
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Documents


@dataclass(slots=True)
class ColumnCounts:
    """What a dataset holds; several splits add up."""

    episodes: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens with a weight above 0."""
    trained_of_role: Counter[str] = field(default_factory=Counter)
    """By the roles of the kinds; empty where kinds are not stored."""
    trained_of_source: Counter[str] = field(default_factory=Counter)
    """Empty where sources are not stored."""
    turns: int = 0
    """Stretches of assistant tokens with a trained one in them."""
    unended_turns: int = 0
    """Those of them in which no terminator is trained."""
    double_bos: int = 0
    """Places where one BOS token follows another in an episode."""

    def count(self, split: EpisodeDataset, name: str, *, vocab_size: int, bos_id: int | None) -> Iterator[Finding]:
        """Add a split; gives what is wrong with its values, files with their whole path."""
        self.episodes += len(split)
        for numbers in split.batches():
            part = _Slice(split, name, numbers, split.gather(numbers))
            self.tokens += len(part.documents.ids)
            yield from part.problems(vocab_size)
            if part.documents.weights is not None:
                self._count_trained(part)
            if bos_id is not None:
                yield from self._count_double_bos(part, bos_id)

    def _count_trained(self, part: _Slice) -> None:
        trained, kinds, sources = part.documents.trained, part.documents.kinds, part.column("source")
        self.trained += int(np.count_nonzero(trained))
        if sources is not None:
            names, per_episode = part.split.source_names, segment_sums(trained, part.documents.offsets)
            for code, count in enumerate(np.bincount(sources, weights=per_episode).tolist()):
                if count:
                    self.trained_of_source[names[code] if code < len(names) else f"code {code}"] += int(count)
        if kinds is not None:
            for code, count in enumerate(np.bincount(roles_of(kinds[trained])).tolist()):
                if count and code < len(RoleCode):
                    self.trained_of_role[role_name(code)] += count
            self._count_turns(part.starts, kinds, trained)

    def _count_turns(self, starts: NDArray[np.int64], kinds: NDArray[np.uint8], trained: NDArray[np.bool_]) -> None:
        """Trained stretches of assistant tokens, and those whose end is not trained."""
        is_assistant = roles_of(kinds) == RoleCode.ASSISTANT
        opens = is_assistant.copy()
        opens[1:] &= ~is_assistant[:-1]
        opens[starts] = is_assistant[starts]
        at = np.flatnonzero(is_assistant)
        if not len(at):
            return
        first = np.flatnonzero(opens[at])
        ends = trained[at] & (parts_of(kinds[at]) == Part.TERMINATOR)
        any_trained = np.logical_or.reduceat(trained[at], first)
        self.turns += int(any_trained.sum())
        self.unended_turns += int((any_trained & ~np.logical_or.reduceat(ends, first)).sum())

    def _count_double_bos(self, part: _Slice, bos_id: int) -> Iterator[Finding]:
        """The first double BOS of a slice is a finding, all of them are counted."""
        is_bos = part.documents.ids == bos_id
        doubled = np.append(False, is_bos[1:] & is_bos[:-1])
        doubled[part.starts] = False  # the second one opens another episode or branch
        self.double_bos += int(doubled.sum())
        yield from part.first(doubled, "ids", "one BOS token follows another")


@dataclass(frozen=True, slots=True)
class _Slice:
    """Consecutive episodes of a split, looked at for values that no build writes."""

    split: EpisodeDataset
    name: str
    numbers: NDArray[np.int64]
    documents: Documents

    def column(self, name: str) -> NDArray[Any] | None:
        """A value for each episode; None where the column is not stored."""
        return self.split.column(name)[self.numbers] if name in self.split.columns else None

    def problems(self, vocab_size: int) -> Iterator[Finding]:
        """The first wrong value of each kind."""
        some, sources, trained = self.documents, self.column("source"), self.column("trained")
        if self.split.has_trees:
            yield from self._branch_problems()
        yield from self.first(some.ids >= vocab_size, "ids", f"no id of the vocabulary, which has {vocab_size:,}")
        if some.kinds is not None:
            plain = some.kinds & PLAIN
            yield from self.first(plain >= KINDS, "kinds", f"no kind; their codes are below {KINDS}, without flags")
        if some.weights is not None and some.weights.dtype.kind == "f":
            wrong = ~(np.isfinite(some.weights) & (some.weights >= 0))
            yield from self.first(wrong, "weights", "a weight that is negative or not finite")
        if some.weights is not None and trained is not None:
            counted = segment_sums(some.weights != 0, some.offsets)
            for row in np.flatnonzero(counted != trained)[:1].tolist():
                sentence = f"says {trained[row]:,} trained tokens; the mask has {counted[row]:,}"
                yield self._finding("trained", row, None, sentence)
        if sources is not None:
            names = len(self.split.source_names)
            for row in np.flatnonzero(sources >= names)[:1].tolist():
                sentence = f"has the source code {sources[row]}; the manifest has {names} names"
                yield self._finding("source", row, None, sentence)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where texts begin: those of episodes, and those of branches."""
        offsets = self.documents.offsets
        return np.union1d(offsets[:-1], self.split.branches(self.numbers).flat_starts(np.diff(offsets)))

    def _branch_problems(self) -> Iterator[Finding]:
        """The first tree whose branches do not fit it."""
        branches, lengths = self.split.branches(self.numbers), np.diff(self.documents.offsets)
        with suppress(DataError):
            branches.positions_and_ends(lengths)
            return
        for row in range(len(self.numbers)):
            try:
                branches.take(np.array([row])).positions_and_ends(lengths[row : row + 1])
            except DataError as error:
                yield self._finding("branches", row, None, str(error))
                return

    def first(self, wrong: NDArray[np.bool_], column: str, sentence: str) -> Iterator[Finding]:
        """The first token that is wrong, if one is."""
        if not wrong.any():
            return
        at, some = int(np.argmax(wrong)), self.documents
        row = int(np.searchsorted(some.offsets, at, side="right")) - 1
        yield self._finding(column, row, at - int(some.offsets[row]), f"{getattr(some, column)[at]}: {sentence}")

    def _finding(self, column: str, row: int, token: int | None, sentence: str) -> Finding:
        number = int(self.numbers[row])
        file, offset = place_of(self.split, number, column, token or 0)
        return Finding(file=str(file), offset=offset, split=self.name, episode=number, token=token, message=sentence)
