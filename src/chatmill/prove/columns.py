"""A built split opened for a check: its layout, what its columns say, values that cannot be, and where each one is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import KINDS, PLAIN, Part, RoleCode, parts_of, role_name, roles_of
from chatmill.core.tokens import offsets_of, segment_sums
from chatmill.errors import DataError, FormatError
from chatmill.prove.report import Finding, VerifyReport
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import Per
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Documents


def open_split(directory: Path, split: str) -> EpisodeDataset:
    """A split whose sizes, index and layout are right; a `FormatError` says what is wrong."""
    dataset = EpisodeDataset(directory, split)
    for shard in dataset.shards:
        _refuse_gaps(shard)
        for name, spec in dataset.columns.items():  # looking at a column checks its size
            shard.column(name)
            if spec.offsets_file:
                shard.offsets(name)
    return dataset


def _refuse_gaps(shard: EpisodeShard) -> None:
    """A build writes episodes one after another."""
    starts, lengths = shard.index.astype(np.int64).T
    expected = offsets_of(lengths)
    wrong = np.flatnonzero(starts != expected[:-1])
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"{shard.folder / INDEX}: record {row:,} (byte {row * 16:,}) starts at token {starts[row]:,}; the "
            f"episodes before it end at {expected[row]:,}"
        )
    if expected[-1] != shard.tokens:
        raise FormatError(
            f"{shard.folder / TOKENS}: {shard.tokens:,} tokens, and {INDEX} has {expected[-1]:,} in its episodes"
        )


def place_of(dataset: EpisodeDataset, number: int, column: str, token: int) -> tuple[str, int]:
    """File (below the dataset's folder) and byte of one value: of a token, or of a column of the episode itself."""
    shard_number = int(np.searchsorted(dataset.episode_offsets, number, side="right")) - 1
    shard = dataset.shards[shard_number]
    row = number - int(dataset.episode_offsets[shard_number])
    at = int(shard.index[row, 0]) + token
    spec = dataset.columns.get(column)
    if column == "ids":
        name, byte = TOKENS, at * 4
    elif column == "length":
        name, byte = INDEX, row * 16 + 8
    elif column == "weights":
        name, byte = MASK, at * (shard.mask_dtype.itemsize if shard.mask_dtype else 1)
    elif spec is None:
        name, byte = "", 0
    elif spec.offsets_file:
        name, byte = spec.offsets_file, row * 8
    else:
        name, byte = spec.file, (at if spec.per is Per.TOKEN else row) * np.dtype(spec.dtype).itemsize
    return (shard.folder / name).relative_to(dataset.directory).as_posix(), byte


class ColumnCheck:
    """One pass over the columns of splits, a slice of tokens at a time: counts and findings go into a report."""

    def __init__(self, book: VerifyReport, *, vocab_size: int, bos_id: int | None) -> None:
        self._book, self._vocab_size, self._bos_id = book, vocab_size, bos_id
        self.trained: dict[str, Counter[str]] = {"source": Counter(), "role": Counter()}
        """Trained tokens of each source and role; empty where sources or kinds are not stored."""

    def check(self, split: EpisodeDataset, name: str) -> None:
        """Count a split, and find what is wrong with its values."""
        self._book.counts["episodes"] += len(split)
        for numbers in split.batches():
            part = _Slice(split, name, numbers, split.gather(numbers))
            self._book.counts["tokens"] += len(part.documents.ids)
            for finding in part.problems(self._vocab_size):
                self._book.found(finding)
            if part.documents.weights is not None:
                self._count_trained(part)
            if self._bos_id is not None:
                self._count_double_bos(part, self._bos_id)

    def _count_trained(self, part: _Slice) -> None:
        trained, kinds, sources = part.documents.trained, part.documents.kinds, part.column("source")
        self._book.counts["trained_tokens"] += int(np.count_nonzero(trained))
        if sources is not None:
            names, per_episode = part.split.source_names, segment_sums(trained, part.documents.offsets)
            for code, count in enumerate(np.bincount(sources, weights=per_episode).tolist()):
                if count:
                    self.trained["source"][names[code] if code < len(names) else f"code {code}"] += int(count)
        if kinds is not None:
            for code, count in enumerate(np.bincount(roles_of(kinds[trained])).tolist()):
                if count and code < len(RoleCode):
                    self.trained["role"][role_name(code)] += count
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
        is_unended = any_trained & ~np.logical_or.reduceat(ends, first)
        self._book.counts["trained_turns"] += int(any_trained.sum())
        self._book.counts["trained_turns_without_trained_terminator"] += int(is_unended.sum())

    def _count_double_bos(self, part: _Slice, bos_id: int) -> None:
        """The first double BOS of a slice is a finding, all of them are counted."""
        is_bos = part.documents.ids == bos_id
        doubled = np.append(False, is_bos[1:] & is_bos[:-1])
        doubled[part.starts] = False  # the second one opens another episode or branch
        self._book.counts["double_bos"] += int(doubled.sum())
        for finding in part.first(doubled, "ids", "one BOS token follows another"):
            self._book.found(finding)


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
        documents, sources, trained = self.documents, self.column("source"), self.column("trained")
        if self.split.has_trees:
            yield from self._branch_problems()
        yield from self.first(documents.ids >= vocab_size, "ids", f"no id of the vocabulary, which has {vocab_size:,}")
        if documents.kinds is not None:
            plain = documents.kinds & PLAIN
            yield from self.first(plain >= KINDS, "kinds", f"no kind; their codes are below {KINDS}, without flags")
        if documents.weights is not None and documents.weights.dtype.kind == "f":
            wrong = ~(np.isfinite(documents.weights) & (documents.weights >= 0))
            yield from self.first(wrong, "weights", "a weight that is negative or not finite")
        if documents.weights is not None and trained is not None:
            counted = segment_sums(documents.weights != 0, documents.offsets)
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
        at, documents = int(np.argmax(wrong)), self.documents
        row = int(np.searchsorted(documents.offsets, at, side="right")) - 1
        yield self._finding(
            column, row, at - int(documents.offsets[row]), f"{getattr(documents, column)[at]}: {sentence}"
        )

    def _finding(self, column: str, row: int, token: int | None, sentence: str) -> Finding:
        number = int(self.numbers[row])
        file, offset = place_of(self.split, number, column, token or 0)
        return Finding(file=file, offset=offset, split=self.name, episode=number, token=token, message=sentence)
