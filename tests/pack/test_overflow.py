"""Overflow policies on made-up conversations: whole turns, once-only training, a ledger that balances."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import PICTURE, Part, RoleCode, kind
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import Overflow, apply_overflow, without_cut_pictures
from chatmill.pack.turns import outline
from chatmill.pack.windows import KeptSpan
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.systems.token_native_sft import pack_sft_ids_and_mask, sft_loss_mask_for_ids
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.pack.letter_chats import Chat, applied, assistant_weights, batch, chats, dialogues, one, spelled, tokens_of

# --- all policies


@pytest.mark.parametrize("policy", [p for p in Overflow if p is not Overflow.ERROR])
@settings(max_examples=200)
@given(st.lists(st.one_of(chats, dialogues), max_size=4), st.integers(1, 40), st.booleans())
def test_every_policy_keeps_to_the_capacity_and_balances_its_ledger(
    policy: Overflow, given_chats: list[Chat], capacity: int, everything: bool
) -> None:
    applied(given_chats, capacity, policy, everything=everything)


def test_when_all_fit_nothing_is_copied() -> None:
    for policy in Overflow:
        tokens, weights, result = applied([one("u2 a3"), one("u2")], 5, policy)
        assert result.tokens is tokens
        assert result.run_weights is weights


def test_cut_keeps_the_first_tokens_and_drop_none() -> None:
    given_chats = [one("u4 a5"), one("s3 u4 a5 u4 a5"), one("u1")]
    tokens, weights, cut = applied(given_chats, 10, "cut")
    assert spelled(cut) == ["u4 A5", "s3 u4 A3", "u1"]
    assert spelled(applied(given_chats, 10, "drop")[2]) == ["u4 A5", "u1"]
    # The answers of one record are dropped together, and cut each for itself.
    records = np.array([3, 7, 7])
    assert spelled(apply_overflow(tokens, weights, 10, "drop", records)) == ["u4 A5"]
    assert spelled(apply_overflow(tokens, weights, 10, "cut", records)) == spelled(cut)


def test_errors_name_the_conversations_and_what_is_allowed() -> None:
    tokens = batch([one("u4 a5")] + [one(f"u{n} a5") for n in (9, 7, 6, 9, 9, 8, 9)])
    weights = assistant_weights(tokens)
    five = r"7 of 8 .* row of 10 tokens: conversation 1 \(14 tokens\), .*5 \(14 tokens\) and 2 more\."
    # Rows of one record have one name: it is said once, with the longest.
    records: dict[str, Any] = {"name_of": lambda index: str(index // 2)}
    four = r"7 of 8 .*: 0 \(14 tokens\), 1 \(12 tokens\), 2 \(14 tokens\), 3 \(14 tokens\)\. Choose .*windows"
    for capacity, policy, options, error, says in (
        (10, "error", {}, DataError, five),
        (10, "error", records, DataError, four),
        (5, "truncate", {}, ConfigError, "drop_oldest_turns"),
        (0, "cut", {}, ConfigError, "not 0"),
    ):
        with pytest.raises(error, match=says):
            apply_overflow(tokens, weights, capacity, policy, **options)
    with pytest.raises(DataError, match=re.escape(f"{len(weights)} runs, and run_weights has shape (3,)")):
        apply_overflow(tokens, weights[:3], 5, "cut")


# --- one episode


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("ab", max_size=6)), min_size=1, max_size=9),
    st.booleans(),
    st.integers(2, 70),
)
def test_drop_oldest_turns_of_rendered_chats_equals_the_public_function(
    said: list[tuple[str, str]], system: bool, capacity: int
) -> None:
    source = find_template("token_native")
    tokenizer = byte_tokenizer(source.control_tokens)
    names = ("sys_id", "usr_id", "asst_id", "eot_id")
    markers = dict(zip(names, map(tokenizer.control, source.control_tokens), strict=True))
    messages = [Message(Role(role), text) for role, text in [("system", "be")] * system + said]
    tokens = render([Conversation(messages=tuple(messages))], bind(source, tokenizer)).tokens
    result = apply_overflow(tokens, find_policy("assistant").run_weights(tokens), capacity, "drop_oldest_turns")
    mask = sft_loss_mask_for_ids(tokens.ids.tolist(), **markers)
    ids, trained = pack_sft_ids_and_mask(tokens.ids.tolist(), mask, S=capacity, pad_id=-1, **markers)
    kept = [i for i in ids if i != -1]
    assert result.tokens.ids.tolist() == kept
    assert (result.tokens.per_token(result.run_weights) > 0).tolist() == trained[: len(kept)]


@pytest.mark.parametrize(
    ("chat", "capacity", "episode"),
    [
        ("s3 u4 a5 u4 a5 u4 a5", 21, "s3 u4 A5 u4 A5"),
        ("s3 u4 a5 u9", 14, "s3 u4 A5"),
        ("s3 u9 a5", 10, "u5 A5"),
        ("s3 u4 c5 t6 a5 u4 a5", 17, "s3 A5 u4 A5"),  # a call is dropped with its result, and with the question
        ("s3 u4 c5 t6 a5 u4 a5", 26, "s3 A5 u4 A5"),
        ("s3 u4 c5 t6 c5 t6 a5", 20, "s3 A5 t6 A5"),
        ("s3 u4 c5 t9", 14, "s3 u4 A5"),  # results after the final call go before anything is cut
        ("p9 a5 u4 a5", 21, "u4 A5"),  # a message with a picture is one message
    ],
)
def test_drop_oldest_turns_by_example(chat: str, capacity: int, episode: str) -> None:
    assert spelled(applied([one(chat)], capacity, "drop_oldest_turns")[2]) == [episode]


def test_drop_oldest_turns_keeps_the_document_end() -> None:
    _, _, result = applied([one("s3 u4 a5 u4 a5", bos=True, eod=True)], 14, "drop_oldest_turns")
    assert result.tokens.conversation(0).ids.tolist() == [0, 1, 2, 3, *range(13, 22), 22]


@pytest.mark.parametrize(
    ("chat", "capacity", "turns", "last_turns"),
    [
        ("s3 u4 a5 u4 a5 u4 a5", 21, "s3 u4 A5 u4 A5", "s3 u4 u4 A5"),
        ("s3 u4 a5 u4 a5 u4 a5", 12, "s3 u4 A5", None),
        ("s3 u4 a5 u4 a5 u4 a5", 11, None, None),
        ("s3 u4 c5 t6 c5 t6 a5", 20, "s3 u4 A5", "s3 u4 A5"),
        ("s3 u4 c5 t6 c5 t6 a5", 23, "s3 u4 A5 t6 A5", "s3 u4 A5 t6 A5"),
        ("s3 u4 c5 t6 a5 u4 a5", 18, "s3 u4 A5", "s3 u4 u4 A5"),
        ("u4 a30 u4 a5", 14, None, "u4 u4 A5"),
        ("u4 a5 u9", 14, "u4 A5", None),
    ],
)
def test_whole_answers_from_either_end(chat: str, capacity: int, turns: str | None, last_turns: str | None) -> None:
    for policy, wanted in (("turns", turns), ("last_turns", last_turns)):
        assert spelled(applied([one(chat)], capacity, policy)[2]) == ([] if wanted is None else [wanted])


# --- windows


@settings(max_examples=400)
@given(st.one_of(chats, dialogues), st.integers(1, 40))
def test_windows_train_every_assistant_message_once_and_whole(chat: Chat, capacity: int) -> None:
    tokens, weights, result = applied([chat], capacity, "windows")
    per_token, episode_of = tokens.per_token(weights), np.repeat(np.arange(len(result.tokens)), result.tokens.lengths)
    new = result.tokens.per_token(result.run_weights)
    checked = lost = 0
    for message, (letter, size) in enumerate(chat.messages):
        ids = np.flatnonzero(tokens.messages == message)
        if letter not in "ac" or not (per_token[ids] > 0).any():
            continue
        wanted = ids if size <= capacity else ids[-capacity:]
        lost += int((per_token[ids[: len(ids) - len(wanted)]] > 0).sum())
        wanted = wanted[per_token[wanted] > 0]
        where = np.flatnonzero(np.isin(result.tokens.ids, wanted) & (new > 0))
        assert result.tokens.ids[where].tolist() == wanted.tolist(), "each trained token once, in order"
        assert len(set(episode_of[where].tolist())) <= 1, "and all in one window"
        checked += 1
    assert (tokens.run_lengths - result.kept_of_run)[weights > 0].sum() == lost
    assert checked or not (per_token > 0).any()


@settings(max_examples=400)
@given(dialogues, st.integers(6, 60))
def test_windows_keep_calls_with_results_and_begin_with_head_and_user(chat: Chat, capacity: int) -> None:
    tokens, _, result = applied([chat], capacity, "windows")
    assume(tokens.lengths[0] > capacity and not len(result.dropped))
    plan = outline(tokens, 0)
    episodes = [result.tokens.conversation(number).ids.tolist() for number in range(len(result.tokens))]
    tail = plan.length - plan.tail
    for turn in plan.turns(capacity):
        lead = turn.lead[1] - turn.lead[0]
        for step in turn.steps:
            if plan.head + lead + step.end - step.start + tail <= capacity:
                wanted = list(range(step.start, step.end))
                (home,) = (ids for ids in episodes if contains(ids, wanted))  # it stands whole in one window
                assert home[: plan.head] == list(range(plan.head)), "which begins with the head"
                assert int(tokens.kinds[home[plan.head]]) // 8 == RoleCode.USER, "and then a user"
                if tail:
                    assert home[-1] == plan.tail


def contains(ids: list[int], wanted: list[int]) -> bool:
    return wanted[0] in ids and ids[ids.index(wanted[0]) :][: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("chat", "capacity", "episodes"),
    [
        # whole turns while they fit, the head again and untrained
        ("s3 u4 a5 u4 a5 u4 a5", 21, "s3 u4 A5 u4 A5 | s3 u4 A5"),
        ("u4 a5 u2 u2 a5", 9, "u4 A5 | u2 u2 A5"),  # without a head; a user who says two things in a row
        # a turn of many steps is parted between them and its question is injected
        ("s3 u4 c5 t6 c5 t6 a5", 20, "s3 u4 A5 t6 | s3 u4 A5 t6 | s3 u4 A5"),
        ("s3 u4 c5 t3 c5 t3 a5", 23, "s3 u4 A5 t3 A5 t3 | s3 u4 A5"),
        # it begins a window; after it the next whole turn may join its last
        ("s3 u2 a4 u4 c5 t3 c5 t3 a5", 23, "s3 u2 A4 | s3 u4 A5 t3 A5 t3 | s3 u4 A5"),
        ("s3 u4 c5 t6 a5 u2 a3", 18, "s3 u4 A5 t6 | s3 u4 A5 u2 A3"),
        # two calls before their two results stay together, two answers in a row do not
        ("u4 c5 c5 t3 t3 c5 c5 t3 t3", 26, "u4 A5 A5 t3 t3 | u4 A5 A5 t3 t3"),
        ("u4 a5 a5", 13, "u4 A5 | u4 A5"),
        # an answer that leaves little room: the question keeps its header and its end
        ("s3 u9 a5 u2 a3", 14, "s3 u6 A5 | s3 u2 A3"),
        ("s3 u9 a5", 9, "s3 A5"),  # and is left out when nothing but its header would fit
        ("u9 u3 a5", 8, "u3 A5"),  # of two questions the last is kept whole where it fits
        ("s9 u9 a5", 12, "u7 A5"),  # no room for the head either
        ("s3 u4 a20", 12, "A12"),  # an answer longer than the row keeps its last tokens
        ("s3 u4 c5 t30 a5", 20, "s3 u4 A5 t8 | s3 u4 A5"),  # a long result is cut, the call is not
        # a question that nobody answers is context where it fits, and no window of its own
        ("u4 a5 u3", 11, "u4 A5"),
        ("u4 a5 u4 a5 u2", 11, "u4 A5 | u4 A5 u2"),
        ("a5 s3 u4 a5", 12, "A5 | s3 u4 A5"),  # an assistant first, a system message in the middle
        ("u4 a5 x1 u4 a5", 11, "u4 A5 | x1 u4 A5"),  # a document start before every question goes with the question
        # to the token: a turn of one token, one token of a question, two calls that fill the row
        ("a1 u4 a5", 9, "A1 | u4 A5"),
        ("s3 u9 a5", 10, "s3 u2 A5"),
        ("c5 c5 t3 t3", 10, "A5 A5"),
        ("u4 t5 a5 u4 a5", 14, "u4 t5 A5 | u4 A5"),  # results without a call
        # no part of a message without its picture: not where a question keeps its end, nor where the row begins
        ("p6 a5 u4 a5", 11, "u6 A5 | u4 A5"),
        ("s2 p9 a5", 13, "s2 A5"),
        ("p9 a5", 13, "A5"),
    ],
)
def test_windows_by_example(chat: str, capacity: int, episodes: str) -> None:
    _, _, result = applied([one("u2 a3"), one(chat)], capacity, "windows")
    assert " | ".join(spelled(result)) == f"u2 A3 | {episodes}"
    assert result.window.tolist() == [0, *range(len(result.tokens) - 1)]


def test_windows_train_head_and_document_end_once_where_everything_is_trained() -> None:
    """The head in the first window, the end in the last; the other windows repeat them as context."""
    _, _, result = applied([one("s3 u4 a5 u4 a5", bos=True, eod=True)], 14, "windows", everything=True)
    weights = result.tokens.per_token(result.run_weights).tolist()
    assert result.tokens.conversation(0).ids.tolist() == [*range(4), *range(4, 13), 22]
    assert result.tokens.conversation(1).ids.tolist() == [*range(4), *range(13, 22), 22]
    assert weights == [1] * 13 + [0] + [0] * 4 + [1] * 10
    assert (result.tokens.per_token(result.injected_runs) == (np.array(weights) == 0)).all()
    # A question that is asked again before each step of its answer is trained with the first.
    _, _, result = applied([one("s3 u4 c5 t6 c5 t6 a5")], 20, "windows", everything=True)
    weights = result.tokens.per_token(result.run_weights).tolist()
    assert weights == [1] * 18 + [0] * 7 + [1] * 11 + [0] * 7 + [1] * 5


def test_the_document_end_is_kept_before_the_head() -> None:
    for capacity, kept in ((6, [7, 8, 9, 10, 11, 12]), (5, [7, 8, 9, 10, 11])):
        _, _, result = applied([one("s3 u4 a5", eod=True)], capacity, "windows")
        assert result.tokens.conversation(0).ids.tolist() == kept


def test_windows_leave_out_what_would_train_nothing() -> None:
    tokens = batch([one("s3 u4 a5 u4 a5")])
    weights = assistant_weights(tokens)
    weights[(tokens.run_messages == 2) & (tokens.run_lengths > 0)] = 0
    weights[tokens.run_lengths == 0] = 1  # a run without tokens trains nothing
    result = apply_overflow(tokens, weights, 13, "windows")
    assert spelled(result) == ["s3 u4 A5"]
    assert result.tokens.ids.tolist() == [0, 1, 2, *range(12, 21)]
    assert not result.injected_runs.any()
    lost = tokens.run_lengths - result.kept_of_run
    assert (lost[weights > 0].sum(), lost[weights == 0].sum()) == (0, 9)
    weights[tokens.run_messages == 3] = 1  # what is trained from the very border on is not in the window before it
    assert spelled(apply_overflow(tokens, weights, 13, "windows")) == ["s3 U4 A5"]
    nothing = apply_overflow(tokens, np.zeros_like(weights), 13, "windows")
    assert (len(nothing.tokens), nothing.dropped.tolist()) == (0, [0])
    assert nothing.kept_of_run.sum() == len(tokens.ids) - 21


# --- pictures

Shown = list[list[tuple[bool, int]]]
"""Messages of runs: whether each is a picture, and its length."""
shown_chats = st.lists(
    st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=3), min_size=1, max_size=4
)


def pictured(*shown: Shown) -> Tokens:
    kinds = kind(RoleCode.USER, Part.CONTENT), PICTURE
    runs = [
        [(kinds[is_picture], size, n) for n, part in enumerate(chat) for is_picture, size in part] for chat in shown
    ]
    return tokens_of(runs, [len(chat) for chat in shown])


@given(shown_chats, shown_chats, st.data())
def test_no_part_of_a_message_is_kept_without_its_pictures(other: Shown, chat: Shown, data: st.DataObject) -> None:
    ends = offsets_of(np.array([sum(size for _, size in message) for message in chat])).tolist()
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, ends[-1])] * 2)))
    injected = data.draw(st.booleans())
    kept = without_cut_pictures(pictured(other, chat, other), 1, [[KeptSpan(a, b, injected)]])
    wanted: list[int] = []
    for message, first, last in zip(chat, ends[:-1], ends[1:], strict=True):
        until = max((n for n, (is_picture, _) in enumerate(message, 1) if is_picture), default=0)
        shown = first + sum(size for _, size in message[:until])
        if shown == first or (a <= first and shown <= b):
            wanted += range(max(a, first), min(b, last))
    assert [token for spans in kept for span in spans for token in range(span.start, span.end)] == wanted
    assert all(span.injected == injected for spans in kept for span in spans)


def test_an_episode_keeps_its_other_spans() -> None:
    chat = [[(False, 2)], [(False, 1), (True, 3), (False, 1)], [(False, 2)]]
    spans = [KeptSpan(0, 1, injected=True), KeptSpan(3, 5), KeptSpan(6, 9)]
    kept = without_cut_pictures(pictured(chat, chat), 0, [spans, [KeptSpan(3, 4)]])
    assert kept == [[KeptSpan(0, 1, injected=True), KeptSpan(7, 9)], []]
