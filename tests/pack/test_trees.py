"""Rows put into trees with all their columns, against the slow tree of `verify --deep`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from chatmill.core.ledger import Ledger
from chatmill.core.shared_rows import SharedRows
from chatmill.pack.overflow import Overflow, apply_overflow
from chatmill.pack.trees import Trees, put_into_trees
from chatmill.prove.reference import DerivedDocument
from chatmill.prove.trees import PlainTrees
from tests.pack.letter_chats import Chat, assistant_weights, chats, dialogues, tokens_of

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
    later: bool = False


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
        is_later = bool(kept and kept[-1].later) or draw(st.integers(0, 3)) == 0
        for _ in range(draw(st.integers(0 if kept else 1, 5))):
            code = draw(st.sampled_from(CODES))
            # the message follows from id and kind, so that tokens that are one in a tree are of one message
            number = draw(st.integers(0, 2))
            weight = 0.0 if code & REPEATED else draw(st.sampled_from([0.0, 1.0, 0.5]))
            message = -1 if code == OF_NONE else number
            kept = [*kept, Token(number, code, weight, message, draw(st.booleans()), is_later)]
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
        np.array([token.later for token in flat], dtype=np.bool_),
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
            ids, kinds, weights, messages, injected, later = map(list, zip(*row, strict=True))
            logprobs = [float(first + n) for n in range(len(row))]
            columns = (ids, kinds, messages, logprobs, weights)
            documents.append(DerivedDocument(*columns, injected=injected, later=later, turns=0))
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


@pytest.mark.parametrize("policy", [p for p in Overflow if p is not Overflow.ERROR])
@settings(max_examples=100)
@given(st.lists(st.one_of(chats, dialogues), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 3), st.data())
def test_trees_train_as_many_tokens_as_rows_whatever_overflow_leaves_of_them(
    policy: Overflow, given_chats: list[Chat], capacity: int, letters: int, data: st.DataObject
) -> None:
    """Of every conversation a beginning is one row, whose last message is trained there, and all of it another."""
    documents, trained = [], []
    for chat in given_chats:
        end = data.draw(st.integers(0, len(chat.messages) - 1))
        beginning = Chat(chat.messages[: end + 1], chat.bos).runs()
        documents += [beginning, chat.runs()]
        trained += [message == end for _, _, message in beginning]
        trained += [message != end for _, _, message in chat.runs()]
    tokens = tokens_of(documents, [len(chat.messages) for chat in given_chats for _ in (0, 1)])
    few = replace(tokens, ids=tokens.ids % np.int32(letters))  # so that most things are alike
    weights = np.where(trained, assistant_weights(tokens), 0).astype(np.float32)
    fitted = apply_overflow(few, weights, capacity, policy)
    records = fitted.source_index // 2
    flags = (fitted.injected_runs, fitted.later_runs)
    rows = SharedRows.apart(fitted.tokens)
    made = put_into_trees(rows, fitted.run_weights, *flags, records, records, capacity)
    of_rows, of_trees = np.zeros((2, len(given_chats)))
    for sums, kept, its_weights, owners in (
        (of_rows, fitted.tokens, fitted.run_weights, records),
        (of_trees, made.tokens, made.run_weights, records[made.first_row]),
    ):
        owner = np.repeat(owners, np.diff(kept.document_runs))
        np.add.at(sums, owner, np.where(its_weights > 0, kept.run_lengths, 0))
    assert of_trees.tolist() == of_rows.tolist()
