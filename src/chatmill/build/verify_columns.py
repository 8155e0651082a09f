"""Counts what the columns of a split say, and finds values that cannot be: one pass, a slice of tokens at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chatmill.build.ledger import role_name
from chatmill.build.verify_stored import StoredSlice, StoredSplit
from chatmill.core.kinds import KINDS, Part, RoleCode, parts_of, roles_of


@dataclass(slots=True)
class ColumnCounts:
    """What stands in a split; sums of several splits are sums of these."""

    episodes: int = 0
    tokens: int = 0
    """Of episodes, padding not counted."""
    padding: int = 0
    trained: int = 0
    """Tokens with a weight above 0."""
    trained_of_role: Counter[str] = field(default_factory=Counter)
    """By the roles of the kinds; empty where kinds are not stored."""
    trained_of_source: Counter[str] = field(default_factory=Counter)
    """Empty in blocks, which do not store sources."""
    turns: int = 0
    """Stretches of assistant tokens with a trained one in them."""
    unended_turns: int = 0
    """Those of them in which no terminator is trained."""
    double_bos: int = 0
    """Places where one BOS token follows another in an episode."""
    first_double_bos: str = ""
    """Where the first of them is."""

    def add(self, other: ColumnCounts) -> None:
        """Add another split."""
        for name in self.__slots__:
            if name == "first_double_bos":
                self.first_double_bos = self.first_double_bos or other.first_double_bos
            elif isinstance(getattr(self, name), Counter):
                getattr(self, name).update(getattr(other, name))
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))


def count_columns(split: StoredSplit, bos_id: int | None) -> tuple[ColumnCounts, list[tuple[str, str]]]:
    """The counts of a split, and (file, sentence) of what is wrong with its values."""
    counts = ColumnCounts(episodes=split.episodes, padding=split.padding)
    problems = [(str(folder), sentence) for folder, sentence in split.padding_problems()]
    for part in split.slices():
        counts.tokens += len(part.ids)
        problems += _problems(part)
        if part.weights is not None:
            _count_trained(counts, part, split)
        if bos_id is not None:
            _count_double_bos(counts, part, bos_id)
    return counts, problems


def _problems(part: StoredSlice) -> Iterator[tuple[str, str]]:
    """Kinds and weights that no build writes, and stored counts that the mask does not bear out."""
    folder = str(part.folder)
    if part.kinds is not None and (wrong := np.flatnonzero(part.kinds >= KINDS)).size:
        episode, token = _place(part, int(wrong[0]))
        yield f"{folder}/kinds.u8", f"{episode}, token {token}: the code {part.kinds[wrong[0]]} is no kind"
    weights = part.weights
    if weights is None:
        return
    if weights.dtype.kind == "f" and (wrong := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))).size:
        episode, token = _place(part, int(wrong[0]))
        yield folder, f"{episode}, token {token}: the weight {weights[wrong[0]]} is negative or not finite"
    if part.trained is not None:
        counted = np.add.reduceat(weights != 0, part.offsets[:-1], dtype=np.int64)
        for row in np.flatnonzero(counted != part.trained)[:1].tolist():
            sentence = f"says {part.trained[row]:,} trained tokens, its mask has {counted[row]:,}"
            yield f"{folder}/trained.u32", f"episode {part.first + row:,} {sentence}"


def _place(part: StoredSlice, at: int) -> tuple[str, int]:
    episode = int(np.searchsorted(part.offsets, at, side="right")) - 1
    return f"episode {part.first + episode:,}", at - int(part.offsets[episode])


def _count_trained(counts: ColumnCounts, part: StoredSlice, split: StoredSplit) -> None:
    assert part.weights is not None
    trained = part.weights > 0
    counts.trained += int(np.count_nonzero(trained))
    if part.sources is not None:
        per_episode = np.add.reduceat(trained, part.offsets[:-1], dtype=np.int64)
        for code, count in enumerate(np.bincount(part.sources, weights=per_episode).tolist()):
            if count:
                counts.trained_of_source[split.source_name(code)] += int(count)
    if part.kinds is not None:
        per_role = np.bincount(roles_of(part.kinds[trained]), minlength=1)
        for code, count in enumerate(per_role.tolist()):
            if count and code < len(RoleCode):
                counts.trained_of_role[role_name(code)] += count
        _count_turns(counts, part, trained)


def _count_turns(counts: ColumnCounts, part: StoredSlice, trained: NDArray[np.bool_]) -> None:
    """Trained stretches of assistant tokens, and those whose end is not trained."""
    assert part.kinds is not None
    is_assistant = roles_of(part.kinds) == RoleCode.ASSISTANT
    opens = is_assistant.copy()
    opens[1:] &= ~is_assistant[:-1]
    begins = part.offsets[:-1]
    opens[begins] = is_assistant[begins]
    at = np.flatnonzero(is_assistant)
    if not len(at):
        return
    first = np.flatnonzero(opens[at])
    ends = trained[at] & (parts_of(part.kinds[at]) == Part.TERMINATOR)
    any_trained = np.logical_or.reduceat(trained[at], first)
    counts.turns += int(any_trained.sum())
    counts.unended_turns += int((any_trained & ~np.logical_or.reduceat(ends, first)).sum())


def _count_double_bos(counts: ColumnCounts, part: StoredSlice, bos_id: int) -> None:
    is_bos = part.ids == bos_id
    doubled = is_bos[1:] & is_bos[:-1]
    doubled[part.offsets[1:-1] - 1] = False  # the second one opens another episode
    if doubled.any():
        counts.double_bos += int(doubled.sum())
        episode, token = _place(part, int(np.argmax(doubled)) + 1)
        counts.first_double_bos = counts.first_double_bos or f"{part.folder}, {episode}, token {token}"
