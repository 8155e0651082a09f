"""Rows put into trees with all their columns, against the slow tree of `verify --deep`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from chatmill.core.ledger import Ledger
from chatmill.core.shared_rows import SharedRows
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.pack.trees import Trees, put_into_trees
from chatmill.prove.reference import DerivedDocument
from chatmill.prove.trees import PlainTrees

CODES = [
    kind(RoleCode.NONE, Part.DOCUMENT),
    kind(RoleCode.USER, Part.CONTENT),
    kind(RoleCode.ASSISTANT, Part.CONTENT),
    kind(RoleCode.ASSISTANT, Part.CONTENT) | REPEATED,
    kind(RoleCode.ASSISTANT, Part.TOOL_CALL) | MARK,
]


@dataclass(frozen=True)
class Token:
    id: int
    kind: int
    weight: float
    message: int
    injected: bool


MESSAGES = 3
"""Of every record."""


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
            of_none = code == CODES[0]
            # the message follows from id and kind, so that tokens that are one in a tree are of one message
            number = draw(st.integers(0, 2))
            weight = 0.0 if code & REPEATED else draw(st.sampled_from([0.0, 1.0, 0.5]))
            kept = [*kept, Token(number, code, weight, -1 if of_none else number, draw(st.booleans()))]
        rows.append(kept)
    return rows


def tokens_of(rows: list[list[Token]]) -> Tokens:
    """Rows in which every token is a run."""
    flat = [token for row in rows for token in row]
    offsets = offsets_of(np.array([len(row) for row in rows], dtype=np.int64))
    return Tokens(
        ids=np.array([token.id for token in flat], dtype=np.int32),
        offsets=offsets,
        run_offsets=np.arange(len(flat) + 1, dtype=np.int64),
        run_kinds=np.array([token.kind for token in flat], dtype=np.uint8),
        run_messages=np.array([token.message for token in flat], dtype=np.int32),
        document_runs=offsets,
        message_offsets=MESSAGES * np.arange(len(rows) + 1, dtype=np.int64),
        message_weights=np.zeros(MESSAGES * len(rows), dtype=np.float32),
        logprobs=np.arange(len(flat), dtype=np.float32),
    )


def grown(groups: list[list[list[list[Token]]]], capacity: int) -> Trees:
    rows = [row for group in groups for record in group for row in record]
    record = [n for n, one in enumerate(one for group in groups for one in group) for _ in one]
    group_of = [n for n, group in enumerate(groups) for one in group for _ in one]
    flat = [token for row in rows for token in row]
    return put_into_trees(
        SharedRows.apart(tokens_of(rows)),
        np.array([token.weight for token in flat], dtype=np.float32),
        np.array([token.injected for token in flat], dtype=np.bool_),
        np.array(record, dtype=np.int64),
        np.array(group_of, dtype=np.int64),
        capacity,
    )


def slow_trees(group: list[list[list[Token]]], first: int, capacity: int) -> tuple[list[DerivedDocument], Ledger]:
    """`first` is the number of the group's first token in the batch."""
    plain, ledger = PlainTrees("all"), Ledger()
    for record in group:
        documents = []
        for row in record:
            ids, kinds, messages = ([getattr(one, name) for one in row] for name in ("id", "kind", "message"))
            logprobs, weights = [float(first + n) for n in range(len(row))], [token.weight for token in row]
            injected = [token.injected for token in row]
            documents.append(DerivedDocument(ids, kinds, messages, logprobs, weights, injected=injected, turns=0))
            first += len(row)
        plain.add(documents, MESSAGES)
    return plain.write(capacity, ledger), ledger


@settings(max_examples=300)
@given(groups=st.lists(st.lists(records(), min_size=1, max_size=2), max_size=3), more=st.integers(0, 12))
def test_trees_equal_the_slow_reference(groups: list[list[list[list[Token]]]], more: int) -> None:
    longest = max((len(row) for group in groups for record in group for row in record), default=0)
    made = grown(groups, longest + more)
    tokens, at, first, first_row = made.tokens, 0, 0, 0
    weights, injected = tokens.per_token(made.run_weights), tokens.per_token(made.injected_runs)
    assert tokens.logprobs is not None
    for group in groups:
        expected, ledger = slow_trees(group, first, longest + more)
        places = slice(at, at + len(expected))
        for number, tree in enumerate(expected, start=at):
            inside = slice(int(tokens.offsets[number]), int(tokens.offsets[number + 1]))
            assert tokens.ids[inside].tolist() == tree.ids
            assert tokens.kinds[inside].tolist() == tree.kinds
            assert weights[inside].tolist() == tree.weights
            assert made.turns[number] == tree.turns
            assert made.first_row[number] == first_row
            assert tree.branches is not None
            assert tokens.logprobs[inside].tolist() == tree.logprobs
            cut = slice(*made.branches.offsets[number : number + 2].tolist())
            assert made.branches.starts[cut].tolist() == [start for start, _ in tree.branches]
            assert made.branches.depths[cut].tolist() == [depth for _, depth in tree.branches]
            assert np.diff(tokens.message_offsets)[number] == MESSAGES * len(group)
        here = slice(int(tokens.offsets[at]), int(tokens.offsets[at + len(expected)]))
        split = ledger.notes["all", "tokens_repeated_by_splits"]
        assert made.split_tokens[places].sum() == split
        added = sum(count for (*_, name), count in ledger.tokens.items() if name == "injected")
        repeats = sum(token.injected for record in group for row in record for token in row)
        assert injected[here].sum() == added + repeats
        at += len(expected)
        first += sum(len(row) for record in group for row in record)
        first_row += sum(map(len, group))
    assert at == len(tokens)


def test_messages_are_numbered_through_the_records_of_a_group() -> None:
    said = [Token(n, CODES[2], 1.0, n, injected=False) for n in (1, 2)]
    other = [Token(5, CODES[1], 0.0, 0, injected=False), Token(6, CODES[0], 0.0, -1, injected=False)]
    made = grown([[[said[:1], said], [other]], [[other]]], 100)
    assert made.tokens.messages.tolist() == [1, 2, 3, -1, 0, -1]
    assert made.turns.tolist() == [2, 0, 0]
    assert made.tokens.message_offsets.tolist() == [0, 6, 12, 15]
