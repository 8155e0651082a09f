"""Conversations longer than a row as windows of whole turns: every answer is whole and trained once."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chatmill.pack.overflow import apply_overflow
from chatmill.pack.turns import outline
from tests.pack.letter_chats import (
    LETTERS,
    A,
    Chat,
    U,
    applied,
    assistant_weights,
    batch,
    chats,
    dialogues,
    ids_of,
    one,
    spelled,
)


@settings(max_examples=400)
@given(st.one_of(chats, dialogues), st.integers(1, 40))
def test_windows_train_every_assistant_message_once_and_whole(chat: Chat, capacity: int) -> None:
    tokens, weights, result = applied([chat], capacity, "windows")
    per_token, episode_of = tokens.per_token(weights), np.repeat(np.arange(len(result.tokens)), result.tokens.lengths)
    new = result.tokens.per_token(result.run_weights)
    checked = 0
    for message, (letter, size) in enumerate(chat.messages):
        ids = np.flatnonzero(tokens.messages == message)
        if LETTERS[letter] is not A or not (per_token[ids] > 0).any():
            continue
        wanted = ids if size <= capacity else ids[-capacity:]
        wanted = wanted[per_token[wanted] > 0]
        where = np.flatnonzero(np.isin(result.tokens.ids, wanted) & (new > 0))
        assert result.tokens.ids[where].tolist() == wanted.tolist(), "each trained token once, in order"
        assert len(set(episode_of[where].tolist())) <= 1, "and all in one window"
        checked += 1
    assert (tokens.run_lengths - result.kept_of_run)[weights > 0].sum() == sum(
        int((per_token[tokens.messages == m][: max(0, size - capacity)] > 0).sum())
        for m, (letter, size) in enumerate(chat.messages)
        if LETTERS[letter] is A
    )
    assert checked or not (weights > 0).any() or not (per_token > 0).any()


@settings(max_examples=400)
@given(dialogues, st.integers(6, 60))
def test_windows_keep_calls_with_results_and_begin_with_head_and_user(chat: Chat, capacity: int) -> None:
    tokens, _, result = applied([chat], capacity, "windows")
    assume(tokens.lengths[0] > capacity and not len(result.dropped))
    plan = outline(tokens, 0)
    tail = plan.length - plan.tail
    for turn in plan.turns(capacity):
        lead = turn.lead[1] - turn.lead[0]
        for step in turn.steps:
            if plan.head + lead + step.end - step.start + tail <= capacity:
                wanted = list(range(step.start, step.end))
                homes = [e for e in range(len(result.tokens)) if contains(ids_of(result.tokens, e), wanted)]
                assert len(homes) == 1, "a step that fits stands whole in one window"
                opening = ids_of(result.tokens, homes[0])[: plan.head + 1]
                assert opening[: plan.head] == list(range(plan.head)), "which begins with the head"
                assert int(tokens.kinds[opening[plan.head]]) // 8 == U, "and then a user"
                if tail:
                    assert ids_of(result.tokens, homes[0])[-1] == plan.tail


def contains(ids: list[int], wanted: list[int]) -> bool:
    return wanted[0] in ids and ids[ids.index(wanted[0]) :][: len(wanted)] == wanted


def test_windows_by_example() -> None:
    for chat, capacity, episodes in [
        # whole turns while they fit, the head again and untrained
        ("s3 u4 a5 u4 a5 u4 a5", 21, ["s3 u4 A5 u4 A5", "s3 u4 A5"]),
        # without a head; a user who says two things in a row
        ("u4 a5 u2 u2 a5", 9, ["u4 A5", "u2 u2 A5"]),
        # a turn of many steps is parted between them and its question is injected
        ("s3 u4 c5 t6 c5 t6 a5", 20, ["s3 u4 A5 t6", "s3 u4 A5 t6", "s3 u4 A5"]),
        ("s3 u4 c5 t3 c5 t3 a5", 23, ["s3 u4 A5 t3 A5 t3", "s3 u4 A5"]),
        # after a parted turn the next whole turn may join its last window
        ("s3 u4 c5 t6 a5 u2 a3", 18, ["s3 u4 A5 t6", "s3 u4 A5 u2 A3"]),
        # two calls before their two results stay together
        ("u4 c5 c5 t3 t3 c5 c5 t3 t3", 26, ["u4 A5 A5 t3 t3", "u4 A5 A5 t3 t3"]),
        # two answers in a row do not
        ("u4 a5 a5", 13, ["u4 A5", "u4 A5"]),
        # an answer that leaves little room: the question keeps its header and its end
        ("s3 u9 a5 u2 a3", 14, ["s3 u6 A5", "s3 u2 A3"]),
        # and is left out when nothing but its header would fit
        ("s3 u9 a5", 9, ["s3 A5"]),
        # no room for the head either
        ("s9 u9 a5", 12, ["u7 A5"]),
        # an answer longer than the row keeps its last tokens
        ("s3 u4 a20", 12, ["A12"]),
        # a long result is cut, the call is not
        ("s3 u4 c5 t30 a5", 20, ["s3 u4 A5 t8", "s3 u4 A5"]),
        # a question that nobody answers is context where it fits, and no window of its own
        ("u4 a5 u3", 11, ["u4 A5"]),
        ("u4 a5 u4 a5 u2", 11, ["u4 A5", "u4 A5 u2"]),
        # an assistant first, a system message in the middle
        ("a5 s3 u4 a5", 12, ["A5", "s3 u4 A5"]),
        # a document start before every question goes with the question
        ("u4 a5 x1 u4 a5", 11, ["u4 A5", "x1 u4 A5"]),
        # to the token: a turn of one token, one token of a question, two calls that fill the row
        ("a1 u4 a5", 9, ["A1", "u4 A5"]),
        ("s3 u9 a5", 10, ["s3 u2 A5"]),
        ("c5 c5 t3 t3", 10, ["A5 A5"]),
        # results without a call
        ("u4 t5 a5 u4 a5", 14, ["u4 t5 A5", "u4 A5"]),
        # no part of a message without its picture: not where a question keeps its end, nor where the row begins
        ("p6 a5 u4 a5", 11, ["u6 A5", "u4 A5"]),
        ("s2 p9 a5", 13, ["s2 A5"]),
        ("p9 a5", 13, ["A5"]),
    ]:
        tokens, _, result = applied([one(chat)], capacity, "windows")
        assert spelled(tokens, result) == [f"0: {episode}" for episode in episodes], chat
        assert result.window.tolist() == list(range(len(episodes)))


def test_windows_train_head_and_document_end_once_where_everything_is_trained() -> None:
    """The head in the first window, the end in the last; the other windows repeat them as context."""
    tokens = batch([one("s3 u4 a5 u4 a5", bos=True, eod=True)])
    result = apply_overflow(tokens, np.ones(len(tokens.run_kinds), dtype=np.float32), 14, "windows")
    weights = result.tokens.per_token(result.run_weights).tolist()
    assert ids_of(result.tokens, 0) == [*range(4), *range(4, 13), 22]
    assert ids_of(result.tokens, 1) == [*range(4), *range(13, 22), 22]
    assert weights == [1] * 13 + [0] + [0] * 4 + [1] * 10
    assert (result.tokens.per_token(result.injected_runs) == (np.array(weights) == 0)).all()
    # A question that is asked again before each step of its answer is trained with the first.
    tokens = batch([one("s3 u4 c5 t6 c5 t6 a5")])
    result = apply_overflow(tokens, np.ones(len(tokens.run_kinds), dtype=np.float32), 20, "windows")
    weights = result.tokens.per_token(result.run_weights).tolist()
    assert weights == [1] * 18 + [0] * 7 + [1] * 11 + [0] * 7 + [1] * 5


def test_the_document_end_is_kept_before_the_head() -> None:
    _, _, result = applied([one("s3 u4 a5", eod=True)], 6, "windows")
    assert ids_of(result.tokens, 0) == [7, 8, 9, 10, 11, 12]
    _, _, result = applied([one("s3 u4 a5", eod=True)], 5, "windows")
    assert ids_of(result.tokens, 0) == [7, 8, 9, 10, 11]


def test_windows_leave_out_what_would_train_nothing() -> None:
    tokens = batch([one("s3 u4 a5 u4 a5")])
    weights = assistant_weights(tokens)
    weights[(tokens.run_messages == 2) & (tokens.run_lengths > 0)] = 0
    weights[tokens.run_lengths == 0] = 1  # a run without tokens trains nothing
    result = apply_overflow(tokens, weights, 13, "windows")
    assert spelled(tokens, result) == ["0: s3 u4 A5"]
    assert result.tokens.ids.tolist() == [0, 1, 2, *range(12, 21)]
    assert not result.injected_runs.any()
    lost = tokens.run_lengths - result.kept_of_run
    assert (lost[weights > 0].sum(), lost[weights == 0].sum()) == (0, 9)
    weights[tokens.run_messages == 3] = 1  # what is trained from the very border on is not in the window before it
    at_the_border = apply_overflow(tokens, weights, 13, "windows")
    assert spelled(tokens, at_the_border) == ["0: s3 U4 A5"]
    nothing = apply_overflow(tokens, np.zeros_like(weights), 13, "windows")
    assert (len(nothing.tokens), nothing.dropped.tolist()) == (0, [0])
    assert nothing.kept_of_run.sum() == len(tokens.ids) - 21
