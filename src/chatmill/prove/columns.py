"""Counts what the columns of a split say, and finds values that cannot be: one pass, a slice of tokens at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.ledger import role_name
from chatmill.core.kinds import KINDS, PLAIN, Part, RoleCode, parts_of, roles_of
from chatmill.prove.report import Finding
from chatmill.prove.stored import StoredSlice, place_of, slices
from chatmill.store.episodes import EpisodeDataset


@dataclass(slots=True)
class ColumnCounts:
    """What stands in a dataset; several splits add up."""

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

    def count(
        self, split: EpisodeDataset, name: str, *, vocab_size: int | None, bos_id: int | None
    ) -> Iterator[Finding]:
        """Add a split; gives what is wrong with its values, files with their whole path."""
        self.episodes += len(split)
        for part in slices(split):
            self.tokens += len(part.ids)
            yield from _Values(part, split, name).problems(vocab_size)
            if part.weights is not None:
                self._count_trained(part, split)
            if bos_id is not None:
                yield from self._count_double_bos(part, split, name, bos_id)

    def _count_trained(self, part: StoredSlice, split: EpisodeDataset) -> None:
        assert part.weights is not None
        trained = part.weights > 0
        self.trained += int(np.count_nonzero(trained))
        if part.sources is not None:
            per_episode = np.add.reduceat(trained, part.offsets[:-1], dtype=np.int64)
            for code, count in enumerate(np.bincount(part.sources, weights=per_episode).tolist()):
                if count:
                    name = split.source_names[code] if code < len(split.source_names) else f"code {code}"
                    self.trained_of_source[name] += int(count)
        if part.kinds is not None:
            for code, count in enumerate(np.bincount(roles_of(part.kinds[trained])).tolist()):
                if count and code < len(RoleCode):
                    self.trained_of_role[role_name(code)] += count
            self._count_turns(part, part.kinds, trained)

    def _count_turns(self, part: StoredSlice, kinds: NDArray[np.uint8], trained: NDArray[np.bool_]) -> None:
        """Trained stretches of assistant tokens, and those whose end is not trained."""
        is_assistant = roles_of(kinds) == RoleCode.ASSISTANT
        opens = is_assistant.copy()
        opens[1:] &= ~is_assistant[:-1]
        opens[part.offsets[:-1]] = is_assistant[part.offsets[:-1]]
        at = np.flatnonzero(is_assistant)
        if not len(at):
            return
        first = np.flatnonzero(opens[at])
        ends = trained[at] & (parts_of(kinds[at]) == Part.TERMINATOR)
        any_trained = np.logical_or.reduceat(trained[at], first)
        self.turns += int(any_trained.sum())
        self.unended_turns += int((any_trained & ~np.logical_or.reduceat(ends, first)).sum())

    def _count_double_bos(self, part: StoredSlice, split: EpisodeDataset, name: str, bos_id: int) -> Iterator[Finding]:
        """The first double BOS of a slice is a finding, all of them are counted."""
        is_bos = part.ids == bos_id
        doubled = np.append(False, is_bos[1:] & is_bos[:-1])
        doubled[part.offsets[:-1]] = False  # the second one opens another episode
        self.double_bos += int(doubled.sum())
        yield from _Values(part, split, name).where(doubled, "ids", "one BOS token follows another")


@dataclass(frozen=True, slots=True)
class _Values:
    """One slice, looked at for values that no build writes."""

    part: StoredSlice
    split: EpisodeDataset
    name: str

    def problems(self, vocab_size: int | None) -> Iterator[Finding]:
        part = self.part
        if vocab_size is not None:
            yield from self.where(part.ids >= vocab_size, "ids", f"no id of the vocabulary, which has {vocab_size:,}")
        if part.kinds is not None:
            plain = part.kinds & PLAIN
            yield from self.where(plain >= KINDS, "kinds", f"no kind; their codes are below {KINDS}, without flags")
        weights = part.weights
        if weights is not None and weights.dtype.kind == "f":
            wrong = ~(np.isfinite(weights) & (weights >= 0))
            yield from self.where(wrong, "weights", "a weight that is negative or not finite")
        if weights is not None and part.trained is not None:
            yield from self._trained(np.add.reduceat(weights != 0, part.offsets[:-1], dtype=np.int64), part.trained)

    def where(self, wrong: NDArray[np.bool_], column: str, sentence: str) -> Iterator[Finding]:
        """The first token that is wrong, if one is."""
        if not wrong.any():
            return
        at, part = int(np.argmax(wrong)), self.part
        row = int(np.searchsorted(part.offsets, at, side="right")) - 1
        values = {"ids": part.ids, "kinds": part.kinds, "weights": part.weights}[column]
        assert values is not None
        yield self._finding(column, row, at - int(part.offsets[row]), f"{values[at]}: {sentence}")

    def _trained(self, counted: NDArray[np.int64], stored: NDArray[np.uint32]) -> Iterator[Finding]:
        for row in np.flatnonzero(counted != stored)[:1].tolist():
            sentence = f"says {stored[row]:,} trained tokens; the mask has {counted[row]:,}"
            yield self._finding("trained", row, None, sentence)

    def _finding(self, column: str, row: int, token: int | None, sentence: str) -> Finding:
        number = int(self.part.numbers[row])
        file, offset = place_of(self.split, number, column, token or 0)
        return Finding(file=str(file), offset=offset, split=self.name, episode=number, token=token, message=sentence)
