"""What runs add up to, against sums that are written out."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.accounts import ROLES, sum_lengths, sum_turns
from chatmill.core.kinds import Part, RoleCode, kind, part_of, role_of
from chatmill.core.tokens import Tokens, offsets_of

HEADER, CONTENT, END = (kind(RoleCode.ASSISTANT, part) for part in (Part.HEADER, Part.CONTENT, Part.TERMINATOR))
USER = kind(RoleCode.USER, Part.CONTENT)
Run = tuple[int, int, int, float]
"""Kind, message, length and weight."""

KINDS = [HEADER, CONTENT, END, CONTENT + 64, END + 128, USER, kind(RoleCode.NONE, Part.DOCUMENT)]
RUNS = st.tuples(
    st.sampled_from(KINDS), st.integers(-1, 3), st.sampled_from([0, 1, 7]), st.sampled_from([0.0, 0.5, 1.0])
)


def tokens_of(conversations: list[list[Run]]) -> tuple[Tokens, np.ndarray]:
    runs = [run for conversation in conversations for run in conversation]
    kinds, messages, lengths, weights = zip(*runs, strict=True) if runs else ((), (), (), ())
    offsets = offsets_of(np.array(lengths, dtype=np.int64))
    bounds = offsets_of(np.array([len(conversation) for conversation in conversations], dtype=np.int64))
    tokens = Tokens(
        ids=np.zeros(int(offsets[-1]), dtype=np.int32),
        offsets=offsets[bounds],
        run_offsets=offsets,
        run_kinds=np.array(kinds, dtype=np.uint8),
        run_messages=np.array(messages, dtype=np.int32),
        document_runs=bounds,
        message_offsets=np.arange(len(conversations) + 1, dtype=np.int64) * 5,
        message_weights=np.full(5 * len(conversations), np.nan, dtype=np.float32),
    )
    return tokens, np.array(weights, dtype=np.float32)


def counted(conversation: list[Run]) -> tuple[int, int, int, int]:
    """Trained tokens, turns, and turns without a trained terminator, by the rule and by themselves, run by run."""
    filled = [run for run in conversation if run[2]]
    turns: list[list[tuple[int, Run]]] = []
    for place, run in enumerate(filled):
        if role_of(run[0]) is RoleCode.ASSISTANT:
            if not turns or turns[-1][-1][1][1] != run[1]:
                turns.append([])
            turns[-1].append((place, run))
    unended = endless = 0
    for turn, following in zip_longest(turns, turns[1:]):
        trained = [run for _, run in turn if run[3] > 0]
        goes_on = bool(following) and following[0][0] == turn[-1][0] + 1
        has_no_end = bool(trained) and all(part_of(run[0]) is not Part.TERMINATOR for run in trained)
        endless += has_no_end
        unended += has_no_end and not goes_on
    return sum(run[2] for run in filled if run[3] > 0), len(turns), unended, endless


@settings(max_examples=300)
@given(st.lists(st.lists(RUNS, max_size=12), max_size=5), st.data())
def test_sums_are_those_of_a_loop(conversations: list[list[Run]], data: st.DataObject) -> None:
    tokens, weights = tokens_of(conversations)
    wanted = [list(column) for column in zip(*map(counted, conversations), strict=True)] or [[], [], [], []]
    assert [column.tolist() for column in sum_turns(tokens, weights)] == wanted
    codes = np.array([data.draw(st.integers(0, 2)) for _ in conversations], dtype=np.int64)
    lengths = tokens.run_lengths // 2
    sums = Counter[tuple[int, int, int]]()
    for code, conversation in zip(codes.tolist(), conversations, strict=True):
        for run in conversation:
            sums[code, int(role_of(run[0])), int(run[3] > 0)] += run[2] // 2
    found = sum_lengths(tokens, lengths, weights, codes, 3)
    assert found.shape == (3, ROLES, 2)
    assert {tuple(place): int(found[tuple(place)]) for place in np.argwhere(found)} == +sums


def test_a_message_that_goes_on_in_the_next_one_needs_no_terminator() -> None:
    analysis = [(HEADER, 1, 2, 0.0), (CONTENT, 1, 5, 1.0)]
    final = [(HEADER, 2, 2, 0.0), (CONTENT, 2, 5, 1.0), (END, 2, 1, 1.0)]
    asked = [(USER, 0, 4, 0.0)]
    tokens, weights = tokens_of([[*asked, *analysis, *final], [*asked, *analysis, *asked, *final], analysis])
    assert [column.tolist() for column in sum_turns(tokens, weights)] == [[11, 11, 5], [2, 2, 1], [0, 1, 1], [1, 1, 1]]
