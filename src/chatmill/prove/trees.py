"""The tree of a record by the slow, obvious path: rows go into it token by token, and it is written leaf by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chatmill.core.kinds import REPEATED, RoleCode, role_name, role_of
from chatmill.core.ledger import Ledger
from chatmill.prove.reference import DerivedDocument


@dataclass(slots=True)
class _Token:
    """A token of a tree; `below` has those that follow it in some row."""

    id: int = -1
    kind: int = 0
    message: int = -1
    logprob: float = float("nan")
    weight: float = 0.0
    kept: bool = False
    """Whether some row has it for good, and not as a repetition."""
    later: bool = False
    """Whether some row lacks something of its conversation before it."""
    below: list[_Token] = field(default_factory=list)

    def next(self, number: int, kind: int, weight: float, later: bool) -> _Token | None:
        """Return the token below that a row shares; two answers that are only alike by chance are not shared."""
        for token in self.below:
            is_lost = (later or token.later) and weight > 0 and token.weight > 0
            if token.id == number and (token.kind ^ kind) in (0, REPEATED) and not is_lost:
                return token
        return None


class PlainTrees:
    """The rows of one group of records, and the trees that they make."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._top = _Token()
        self._changes: Counter[tuple[str, str]] = Counter()
        """What the ledger has of the rows by role, less what it will have of the trees."""
        self._messages = 0

    def add(self, documents: Sequence[DerivedDocument], messages: int) -> None:
        """Put the documents of a record, which has so many messages, into the tree."""
        for row in documents:
            at = self._top
            columns = (row.ids, row.kinds, row.messages, row.logprobs, row.weights, row.injected, row.later)
            for number, kind, message, logprob, weight, injected, later in zip(*columns, strict=True):
                self._changes[_fate(kind, weight, not injected)] += 1
                token = at.next(number, kind, weight, later)
                if token is None:
                    owner = message + self._messages if message >= 0 else -1
                    token = _Token(number, kind, owner, logprob)
                    at.below.append(token)
                at = token
                at.weight = max(at.weight, weight)
                at.kind = at.kind if kind & REPEATED else kind
                at.kept |= not injected
                at.later |= later
        self._messages += messages

    def _leaves(self) -> Iterator[list[_Token]]:
        """Yield the longest rows, in the order in which the tree is walked."""
        waiting = [[token] for token in reversed(self._top.below)]
        while waiting:
            path = waiting.pop()
            if path[-1].below:
                waiting += [[*path, token] for token in reversed(path[-1].below)]
            else:
                yield path

    def write(self, capacity: int | None, ledger: Ledger) -> list[DerivedDocument]:
        """Return the trees, none longer than `capacity`; the ledger, which has the rows, gets what sharing changes."""
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
        changes = Counter(self._changes)
        changes.subtract(
            _fate(token.kind, token.weight, token.kept and not state) for tree in trees for token, state in tree
        )
        for (role, fate), count in changes.items():
            ledger.tokens[self.source, role, fate] -= count
            if fate != "injected":
                ledger.tokens[self.source, role, f"shared_{fate}"] += count
        again = sum(state == "again" for tree in trees for _, state in tree)
        notes = {"branches": sum(map(len, branches)), "tokens_repeated_by_splits": again, "episodes": len(trees)}
        for name, count in notes.items():
            ledger.notes[self.source, name] += count
        return [_document(tree, starts) for tree, starts in zip(trees, branches, strict=True)]


def _fate(kind: int, weight: float, kept: bool) -> tuple[str, str]:
    """Return the role of a token, and what the ledger calls it."""
    return role_name(role_of(kind)), ("trained" if weight > 0 else "context") if kept else "injected"


def _document(tree: list[tuple[_Token, str]], branches: list[tuple[int, int]]) -> DerivedDocument:
    tokens = [token for token, _ in tree]
    return DerivedDocument(
        ids=[token.id for token in tokens],
        kinds=[token.kind | (REPEATED if state == "again" else 0) for token, state in tree],
        messages=[token.message for token in tokens],
        logprobs=[token.logprob for token in tokens],
        weights=[0.0 if state else token.weight for token, state in tree],
        injected=[bool(state) or not token.kept for token, state in tree],
        later=[token.later for token in tokens],
        turns=len({token.message for token in tokens if role_of(token.kind) is RoleCode.ASSISTANT}),
        branches=branches,
    )
