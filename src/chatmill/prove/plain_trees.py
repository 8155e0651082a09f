"""The tree of a record by the slow, obvious path: rows go into it token by token, and it is written leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from chatmill.core.kinds import REPEATED, RoleCode, role_name, role_of
from chatmill.core.ledger import Ledger
from chatmill.core.tokens import offsets_of
from chatmill.core.trees import Branches
from chatmill.prove.reference import Derived, DerivedEpisode


@dataclass(slots=True)
class _Token:
    """A token of a tree; `below` has those that follow it in some row, by id and kind."""

    id: int = -1
    kind: int = 0
    weight: float = 0.0
    message: int = -1
    logprob: float = float("nan")
    kept: bool = False
    """Whether some row has it for good, and not as a repetition."""
    below: dict[tuple[int, int], _Token] = field(default_factory=dict)


@dataclass(slots=True)
class PlainTrees:
    """The rows of one group of records, and the trees that they make."""

    source: str
    trees: list[DerivedEpisode] = field(default_factory=list)
    _top: _Token = field(default_factory=_Token)
    _kept: dict[tuple[str, bool], int] = field(default_factory=dict)
    _injected: dict[str, int] = field(default_factory=dict)
    _messages: int = 0

    def add(self, sequences: Sequence[Derived], messages: int) -> None:
        """Put the episodes of a record, which has so many messages, into the tree."""
        for derived in sequences:
            for episode, pieces in zip(derived.episodes, derived.spans, strict=True):
                places = [(place, piece.injected) for piece in pieces for place in range(piece.start, piece.end)]
                self._add_row(derived, episode, places)
        self._messages += messages

    def _add_row(self, derived: Derived, episode: DerivedEpisode, places: Sequence[tuple[int, bool]]) -> None:
        at = self._top
        for n, (place, injected) in enumerate(places):
            kind, weight = int(episode.kinds[n]), float(episode.weights[n])
            role = role_name(role_of(kind))
            if injected:
                self._injected[role] = self._injected.get(role, 0) + 1
            else:
                self._kept[role, weight > 0] = self._kept.get((role, weight > 0), 0) + 1
            key = (int(episode.ids[n]), kind & ~REPEATED)
            if key not in at.below:
                message = derived.messages[place]
                at.below[key] = _Token(key[0], kind, message=message + self._messages if message >= 0 else -1)
                at.below[key].logprob = derived.logprobs[place]
            at = at.below[key]
            at.weight = max(at.weight, weight)
            at.kind = at.kind if kind & REPEATED else key[1]
            at.kept |= not injected

    def _leaves(self) -> Iterator[list[_Token]]:
        """The longest rows, in the order in which the tree is walked."""
        waiting = [[token] for token in reversed(self._top.below.values())]
        while waiting:
            path = waiting.pop()
            if path[-1].below:
                waiting += [[*path, token] for token in reversed(path[-1].below.values())]
            else:
                yield path

    def write(self, capacity: int | None, ledger: Ledger) -> list[DerivedEpisode]:
        """The trees, none longer than `capacity`; the ledger, which has the rows, gets what sharing changes."""
        trees: list[list[tuple[_Token, str]]] = []
        branches: list[list[tuple[int, int]]] = []
        before: list[_Token] = []
        for path in self._leaves():
            shared = next((n for n, (a, b) in enumerate(zip(before, path, strict=False)) if a is not b), len(before))
            new = [(token, "") for token in path[shared:]]
            if shared == 0 or (capacity is not None and len(trees[-1]) + 1 + len(new) > capacity):
                trees.append([(token, "again") for token in path[:shared]] + new)
                branches.append([])
            else:
                branches[-1].append((len(trees[-1]), shared - 1))
                trees[-1] += [(path[shared - 1], "copy"), *new]
            before = path
        self._account(trees, branches, ledger)
        return [_episode(tree, starts) for tree, starts in zip(trees, branches, strict=True)]

    def _account(
        self, trees: list[list[tuple[_Token, str]]], branches: list[list[tuple[int, int]]], ledger: Ledger
    ) -> None:
        kept, injected = dict(self._kept), {role: -count for role, count in self._injected.items()}
        for token, state in (one for tree in trees for one in tree):
            role = role_name(role_of(token.kind))
            if state or not token.kept:
                injected[role] = injected.get(role, 0) + 1
            else:
                kept[role, token.weight > 0] -= 1
        for (role, is_trained), count in kept.items():
            name = "trained" if is_trained else "context"
            ledger.tokens[self.source, role, f"shared_{name}"] += count
            ledger.tokens[self.source, role, name] -= count
        for role, count in injected.items():
            ledger.tokens[self.source, role, "injected"] += count
        ledger.notes[self.source, "branches"] += sum(map(len, branches))
        again = sum(state == "again" for tree in trees for _, state in tree)
        ledger.notes[self.source, "tokens_repeated_by_splits"] += again
        ledger.notes[self.source, "episodes"] += len(trees)


def _episode(tree: list[tuple[_Token, str]], branches: list[tuple[int, int]]) -> DerivedEpisode:
    is_assistant = [token for token, _ in tree if role_of(token.kind) is RoleCode.ASSISTANT]
    starts, depths = np.array(branches, dtype=np.int64).reshape(-1, 2).T
    return DerivedEpisode(
        ids=np.array([token.id for token, _ in tree], dtype=np.uint32),
        weights=np.array([0.0 if state else token.weight for token, state in tree], dtype=np.float32),
        kinds=np.array([token.kind | (REPEATED if state == "again" else 0) for token, state in tree], dtype=np.uint8),
        logprobs=np.array([token.logprob for token, _ in tree], dtype=np.float32),
        turns=len({token.message for token in is_assistant}),
        branches=Branches(offsets=offsets_of(np.array([len(branches)])), starts=starts, depths=depths),
    )
