"""Counts what the columns of a split say, and finds values that cannot be: one pass, a slice of tokens at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.ledger import role_name
from chatmill.core.kinds import KINDS, PLAIN, Part, RoleCode, parts_of, roles_of
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.prove.report import Finding
from chatmill.prove.stored import StoredSlice, place_of, slices
from chatmill.store.checksums import file_problems
from chatmill.store.episodes import EpisodeDataset


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

    def count(
        self, split: EpisodeDataset, name: str, *, vocab_size: int | None, bos_id: int | None
    ) -> Iterator[Finding]:
        """Add a split; gives what is wrong with its values, files with their whole path."""
        self.episodes += len(split)
        for part in slices(split):
            self.tokens += len(part.documents.ids)
            yield from _Values(part, split, name).problems(vocab_size)
            if part.documents.weights is not None:
                self._count_trained(part, split)
            if bos_id is not None:
                yield from self._count_double_bos(part, split, name, bos_id)

    def _count_trained(self, part: StoredSlice, split: EpisodeDataset) -> None:
        trained, kinds = part.documents.trained, part.documents.kinds
        self.trained += int(np.count_nonzero(trained))
        if part.sources is not None:
            per_episode = _per_episode(trained, part)
            for code, count in enumerate(np.bincount(part.sources, weights=per_episode).tolist()):
                if count:
                    name = split.source_names[code] if code < len(split.source_names) else f"code {code}"
                    self.trained_of_source[name] += int(count)
        if kinds is not None:
            for code, count in enumerate(np.bincount(roles_of(kinds[trained])).tolist()):
                if count and code < len(RoleCode):
                    self.trained_of_role[role_name(code)] += count
            self._count_turns(part.documents.offsets[:-1], kinds, trained)

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

    def _count_double_bos(self, part: StoredSlice, split: EpisodeDataset, name: str, bos_id: int) -> Iterator[Finding]:
        """The first double BOS of a slice is a finding, all of them are counted."""
        is_bos = part.documents.ids == bos_id
        doubled = np.append(False, is_bos[1:] & is_bos[:-1])
        doubled[part.documents.offsets[:-1]] = False  # the second one opens another episode
        self.double_bos += int(doubled.sum())
        yield from _Values(part, split, name).where(doubled, "ids", "one BOS token follows another")


@dataclass(frozen=True, slots=True)
class _Values:
    """One slice, looked at for values that no build writes."""

    part: StoredSlice
    split: EpisodeDataset
    name: str

    def problems(self, vocab_size: int | None) -> Iterator[Finding]:
        part, some = self.part, self.part.documents
        if vocab_size is not None:
            yield from self.where(some.ids >= vocab_size, "ids", f"no id of the vocabulary, which has {vocab_size:,}")
        if some.kinds is not None:
            plain = some.kinds & PLAIN
            yield from self.where(plain >= KINDS, "kinds", f"no kind; their codes are below {KINDS}, without flags")
        if some.weights is not None and some.weights.dtype.kind == "f":
            wrong = ~(np.isfinite(some.weights) & (some.weights >= 0))
            yield from self.where(wrong, "weights", "a weight that is negative or not finite")
        if some.weights is not None and part.trained is not None:
            yield from self._trained(_per_episode(some.weights != 0, part), part.trained)
        if part.sources is not None:
            names = len(self.split.source_names)
            for row in np.flatnonzero(part.sources >= names)[:1].tolist():
                sentence = f"has the source code {part.sources[row]}; the manifest has {names} names"
                yield self._finding("source", row, None, sentence)

    def where(self, wrong: NDArray[np.bool_], column: str, sentence: str) -> Iterator[Finding]:
        """The first token that is wrong, if one is."""
        if not wrong.any():
            return
        at, some = int(np.argmax(wrong)), self.part.documents
        row = int(np.searchsorted(some.offsets, at, side="right")) - 1
        yield self._finding(column, row, at - int(some.offsets[row]), f"{getattr(some, column)[at]}: {sentence}")

    def _trained(self, counted: NDArray[np.int64], stored: NDArray[np.uint32]) -> Iterator[Finding]:
        for row in np.flatnonzero(counted != stored)[:1].tolist():
            sentence = f"says {stored[row]:,} trained tokens; the mask has {counted[row]:,}"
            yield self._finding("trained", row, None, sentence)

    def _finding(self, column: str, row: int, token: int | None, sentence: str) -> Finding:
        number = int(self.part.numbers[row])
        file, offset = place_of(self.split, number, column, token or 0)
        return Finding(file=str(file), offset=offset, split=self.name, episode=number, token=token, message=sentence)


def _per_episode(flags: NDArray[np.bool_], part: StoredSlice) -> NDArray[np.int64]:
    """How many flags are set in each episode, one without tokens included."""
    sums, offsets = offsets_of(flags.view(np.uint8)), part.documents.offsets
    counts: NDArray[np.int64] = sums[offsets[1:]] - sums[offsets[:-1]]
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheck:
    """What a check found; the split is sound when there are no problems."""

    episodes: int
    tokens: int
    files: int
    """Files whose hash was compared with the manifest; 0 without a manifest."""
    problems: tuple[str, ...]
    """One line each: the file, the place and the numbers."""


def check_episodes(dir: str | Path, split: str = "train") -> SplitCheck:
    """Read every byte of a split; every file that is wrong, and the first wrong value of a kind in a million tokens.

    A split that cannot be opened is one problem.
    """
    try:
        dataset = EpisodeDataset(dir, split)
    except FormatError as error:
        return SplitCheck(episodes=0, tokens=0, files=0, problems=(str(error),))
    shards = dataset.manifest.shards if dataset.manifest else ()
    problems = [line for shard in shards for line in file_problems(dataset.folder / shard.name, shard.files)]
    problems += [str(one) for part in slices(dataset) for one in _Values(part, dataset, split).problems(None)]
    files = sum(len(shard.files) for shard in shards)
    return SplitCheck(episodes=len(dataset), tokens=dataset.tokens, files=files, problems=tuple(problems))
