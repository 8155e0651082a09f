"""Rows put into trees with all their columns, against the slow tree of `verify --deep`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from chatmill.core.ledger import Ledger
from chatmill.core.shared_rows import SharedRows
from chatmill.pack.trees import Trees, put_into_trees
from chatmill.prove.reference import DerivedDocument
from chatmill.prove.trees import PlainTrees
from tests.pack.letter_chats import tokens_of

OF_NONE, ASKED, ANSWERED = (
    kind(RoleCode.NONE, Part.DOCUMENT),
    kind(RoleCode.USER, Part.CONTENT),
    kind(RoleCode.ASSISTANT, Part.CONTENT),
)
CODES = [OF_NONE, ASKED, ANSWERED, ANSWERED | REPEATED, kind(RoleCode.ASSISTANT, Part.TOOL_CALL) | MARK]
MESSAGES = 3
"""Of every record."""


class Token(NamedTuple):
    id: int
    kind: int
    weight: float
    message: int
    injected: bool = False


Group = list[list[list[Token]]]
"""Records of rows of tokens."""


@st.composite
def records(draw: st.DrawFn) -> list[list[Token]]:
    """The rows of one record: they begin alike, and what they share is of the same messages."""
    rows: list[list[Token]] = []
    for _ in range(draw(st.integers(1, 4))):
        kept: list[Token] = []
        if rows:
            before = draw(st.sampled_from(rows))
            kept = before[: draw(st.integers(0, len(before)))]
        for _ in range(draw(st.integers(0 if kept else 1, 5))):
            code = draw(st.sampled_from(CODES))
            # the message follows from id and kind, so that tokens that are one in a tree are of one message
            number = draw(st.integers(0, 2))
            weight = 0.0 if code & REPEATED else draw(st.sampled_from([0.0, 1.0, 0.5]))
            kept = [*kept, Token(number, code, weight, -1 if code == OF_NONE else number, draw(st.booleans()))]
        rows.append(kept)
    return rows


def grown(groups: list[Group], capacity: int) -> Trees:
    """The trees of rows in which every token is a run; log-probabilities count the tokens of the batch."""
    every = [
        (number, n, row) for n, group in enumerate(groups) for number, record in enumerate(group) for row in record
    ]
    flat = [token for *_, row in every for token in row]
    tokens = tokens_of([[(t.kind, 1, t.message) for t in row] for *_, row in every], [MESSAGES] * len(every))
    ids, logprobs = np.array([token.id for token in flat], np.int32), np.arange(len(flat), dtype=np.float32)
    return put_into_trees(
        SharedRows.apart(replace(tokens, ids=ids, logprobs=logprobs)),
        np.array([token.weight for token in flat], dtype=np.float32),
        np.array([token.injected for token in flat], dtype=np.bool_),
        np.array([number + 2 * n for number, n, _ in every], dtype=np.int64),
        np.array([n for _, n, _ in every], dtype=np.int64),
        capacity,
    )


def slow_trees(group: Group, first: int, capacity: int) -> tuple[list[DerivedDocument], Ledger]:
    """`first` is the number of the group's first token in the batch."""
    plain, ledger = PlainTrees("all"), Ledger()
    for record in group:
        documents = []
        for row in record:
            ids, kinds, weights, messages, injected = map(list, zip(*row, strict=True))
            logprobs = [float(first + n) for n in range(len(row))]
            documents.append(DerivedDocument(ids, kinds, messages, logprobs, weights, injected=injected, turns=0))
            first += len(row)
        plain.add(documents, MESSAGES)
    return plain.write(capacity, ledger), ledger


@settings(max_examples=300)
@given(groups=st.lists(st.lists(records(), min_size=1, max_size=2), max_size=3), more=st.integers(0, 12))
def test_trees_equal_the_slow_reference(groups: list[Group], more: int) -> None:
    longest = max((len(row) for group in groups for record in group for row in record), default=0)
    made = grown(groups, longest + more)
    tokens, at, first, first_row = made.tokens, 0, 0, 0
    weights, injected = tokens.per_token(made.run_weights), tokens.per_token(made.injected_runs)
    assert tokens.logprobs is not None
    for group in groups:
        expected, ledger = slow_trees(group, first, longest + more)
        sizes = [len(record) for record in group]
        brought = [MESSAGES * (first_row + before) + n for before in (0, *sizes[:-1]) for n in range(MESSAGES)]
        for number, tree in enumerate(expected, start=at):
            inside = slice(*tokens.offsets[number : number + 2].tolist())
            assert tokens.ids[inside].tolist() == tree.ids
            assert tokens.kinds[inside].tolist() == tree.kinds
            assert weights[inside].tolist() == tree.weights
            assert tokens.logprobs[inside].tolist() == tree.logprobs
            assert (made.turns[number], made.first_row[number]) == (tree.turns, first_row)
            cut = slice(*made.branches.offsets[number : number + 2].tolist())
            branches = zip(made.branches.starts[cut].tolist(), made.branches.depths[cut].tolist(), strict=True)
            assert list(branches) == tree.branches
            said = slice(*tokens.message_offsets[number : number + 2].tolist())
            assert tokens.message_weights[said].tolist() == brought
        here = slice(int(tokens.offsets[at]), int(tokens.offsets[at + len(expected)]))
        split = ledger.notes["all", "tokens_repeated_by_splits"]
        assert made.split_tokens[at : at + len(expected)].sum() == split
        added = sum(count for (*_, name), count in ledger.tokens.items() if name == "injected")
        rows = [row for record in group for row in record]
        assert injected[here].sum() == added + sum(token.injected for row in rows for token in row)
        at, first, first_row = at + len(expected), first + sum(map(len, rows)), first_row + len(rows)
    assert at == len(tokens)


def test_messages_are_numbered_through_the_records_of_a_group() -> None:
    said = [Token(n, ANSWERED, 1.0, n) for n in (1, 2)]
    other = [Token(5, ASKED, 0.0, 0), Token(6, OF_NONE, 0.0, -1)]
    made = grown([[[said[:1], said], [other]], [[other]]], 100)
    assert made.tokens.messages.tolist() == [1, 2, 3, -1, 0, -1]
    assert made.turns.tolist() == [2, 0, 0]
    assert made.tokens.message_offsets.tolist() == [0, 6, 12, 15]
