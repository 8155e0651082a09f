"""Overflow policies on made-up conversations: whole turns, once-only training, a ledger that balances."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import Part, RoleCode, kind, role_of
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import Overflow, OverflowResult, apply_overflow
from chatmill.pack.overflow_report import OverflowReport, total
from chatmill.pack.turns import outline
from chatmill.read.conversations import read_conversations
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.systems.token_native_sft import pack_sft_ids_and_mask, sft_loss_mask_for_ids
from chatmill.tokenizer.byte_level import ByteTokenizer

S, D, U, A, T = RoleCode.SYSTEM, RoleCode.DEVELOPER, RoleCode.USER, RoleCode.ASSISTANT, RoleCode.TOOL
LETTERS = {"s": S, "d": D, "u": U, "a": A, "c": A, "t": T, "x": RoleCode.NONE}
"""`c` is an assistant message that calls a tool; `x` are document tokens of no message."""


@dataclass(frozen=True)
class Chat:
    """A conversation in letters: roles and total tokens of each message (at least 1: short ones lack parts)."""

    messages: list[tuple[str, int]]
    bos: bool = False
    eod: bool = False


def runs_of(letter: str, size: int) -> list[tuple[Part, int]]:
    """Header, content (with an empty run before it) and terminator; a call has a call run too."""
    content = Part.TOOL_CALL if letter == "c" else Part.CONTENT
    if letter == "x":
        return [(Part.DOCUMENT, size)]
    if size < 3:
        return [(content, size)]
    return [(Part.HEADER, 1), (Part.REASONING, 0), (content, size - 2), (Part.TERMINATOR, 1)]


def batch(chats: list[Chat]) -> Tokens:
    """Token ids count from 0 over the whole batch, so that every token can be recognised."""
    kinds: list[int] = []
    sizes: list[int] = []
    messages: list[int] = []
    counts: list[int] = []
    for chat in chats:
        runs = [(kind(RoleCode.NONE, Part.DOCUMENT), 1, -1)] if chat.bos else []
        for index, (letter, size) in enumerate(chat.messages):
            message = -1 if letter == "x" else index
            runs += [(kind(LETTERS[letter], part), n, message) for part, n in runs_of(letter, size)]
        runs += [(kind(RoleCode.NONE, Part.DOCUMENT), 1, -1)] if chat.eod else []
        kinds += [k for k, _, _ in runs]
        sizes += [n for _, n, _ in runs]
        messages += [m for _, _, m in runs]
        counts.append(len(runs))
    conversation_runs = offsets_of(np.array(counts, dtype=np.int64))
    run_offsets = offsets_of(np.array(sizes, dtype=np.int64))
    message_counts = np.array([len(chat.messages) for chat in chats], dtype=np.int64)
    return Tokens(
        ids=np.arange(run_offsets[-1], dtype=np.int32),
        offsets=run_offsets[conversation_runs],
        run_offsets=run_offsets,
        run_kinds=np.array(kinds, dtype=np.uint8),
        run_messages=np.array(messages, dtype=np.int32),
        conversation_runs=conversation_runs,
        message_offsets=offsets_of(message_counts),
        message_weights=np.arange(message_counts.sum(), dtype=np.float32),
    )


def assistant_weights(tokens: Tokens) -> np.ndarray:
    """Everything an assistant writes but its header, with weights that differ from run to run."""
    roles, parts = tokens.run_kinds // 8, tokens.run_kinds % 8
    trained = (roles == A) & (parts != Part.HEADER)
    return np.where(trained, 0.5 + np.arange(len(roles)) % 3, 0).astype(np.float32)


def one(text: str, **options: bool) -> Chat:
    """`one("s3 u4 a5")`: a chat of three messages."""
    return Chat([(word[0], int(word[1:])) for word in text.split()], **options)


def applied(chats: list[Chat], capacity: int, policy: str) -> tuple[Tokens, np.ndarray, OverflowResult]:
    tokens = batch(chats)
    weights = assistant_weights(tokens)
    return tokens, weights, apply_overflow(tokens, weights, capacity, policy)


def spelled(tokens: Tokens, result: OverflowResult) -> list[str]:
    """Each episode as messages in letters with sizes; upper case where anything in it is trained."""
    episodes = []
    for index, source in enumerate(result.source_index.tolist()):
        part = result.tokens.conversation(index)
        a, b = result.tokens.conversation_runs[index : index + 2]
        weights = part.per_token(result.run_weights[a:b])
        sizes: dict[int, int] = {}
        trained: set[int] = set()
        letters: dict[int, str] = {}
        for message, code, weight in zip(part.messages.tolist(), part.kinds.tolist(), weights.tolist(), strict=True):
            sizes[message] = sizes.get(message, 0) + 1
            letters[message] = {v: k for k, v in LETTERS.items() if k != "c"}[role_of(code)]
            if weight > 0:
                trained.add(message)
        episodes.append(
            f"{source}: "
            + " ".join((letters[m].upper() if m in trained else letters[m]) + str(n) for m, n in sizes.items())
        )
    return episodes


chats = st.builds(
    Chat,
    st.lists(st.tuples(st.sampled_from("sduuuaaacctttx"), st.integers(0, 14)), min_size=1, max_size=14),
    bos=st.booleans(),
    eod=st.booleans(),
)
dialogues = st.builds(
    lambda system, turns, bos, eod: Chat([*system, *(m for turn in turns for m in turn)], bos, eod),
    st.lists(st.tuples(st.sampled_from("sd"), st.integers(1, 6)), max_size=2),
    st.lists(
        st.one_of(
            st.tuples(st.tuples(st.just("u"), st.integers(1, 9)), st.tuples(st.just("a"), st.integers(1, 9))),
            st.tuples(
                st.tuples(st.just("u"), st.integers(1, 9)),
                st.tuples(st.just("c"), st.integers(1, 9)),
                st.tuples(st.just("t"), st.integers(1, 20)),
                st.tuples(st.just("t"), st.integers(1, 9)),
                st.tuples(st.just("c"), st.integers(1, 9)),
                st.tuples(st.just("t"), st.integers(1, 9)),
                st.tuples(st.just("a"), st.integers(1, 9)),
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
)
batches = st.lists(st.one_of(chats, dialogues), min_size=1, max_size=4)


def kept_by_id(tokens: Tokens, result: OverflowResult) -> tuple[Counter[int], Counter[int]]:
    """How often each id (= input position) stands in the output, and how often with a weight above 0."""
    weights = result.tokens.per_token(result.run_weights)
    return Counter(result.tokens.ids.tolist()), Counter(result.tokens.ids[weights > 0].tolist())


@pytest.mark.parametrize("policy", [p for p in Overflow if p is not Overflow.ERROR])
@settings(max_examples=200)
@given(batches, st.integers(1, 40))
def test_every_policy_keeps_to_the_capacity_and_balances_its_ledger(
    policy: Overflow, given_chats: list[Chat], capacity: int
) -> None:
    tokens, weights, result = applied(given_chats, capacity, policy)
    made, report = result.tokens, result.report
    assert made.lengths.max(initial=0) <= capacity
    assert_valid(made, result)
    trained_in = set(tokens.ids[tokens.per_token(weights) > 0].tolist())
    seen, trained = kept_by_id(tokens, result)
    kept, lost = report.kept_trained + report.kept_untrained, report.lost_trained + report.lost_untrained
    assert kept + lost == len(tokens.ids)
    assert kept + report.injected == len(made.ids)
    assert report.kept_trained + report.lost_trained == len(trained_in)
    assert report.kept_trained == len(trained) == sum(trained.values()), "no token is trained twice"
    assert report.conversations == len(tokens)
    over_long = np.flatnonzero(tokens.lengths > capacity)
    assert report.over_long == len(over_long)
    assert report.dropped == len(result.dropped)
    assert set(result.dropped.tolist()) | set(result.source_index.tolist()) == set(range(len(tokens)))
    assert report.episodes == int(np.isin(result.source_index, over_long).sum())
    if policy is not Overflow.WINDOWS:
        assert report.injected == 0
        assert max(seen.values(), default=1) == 1
    heads = [outline(tokens, index).head for index in range(len(tokens))]
    starts = [ids_of(made, e)[: heads[source]] for e, source in enumerate(result.source_index.tolist())]
    whole = [
        [*range(tokens.offsets[source], tokens.offsets[source] + heads[source])]
        for source in result.source_index.tolist()
    ]
    assert report.heads_lost == sum(a != b for a, b in zip(starts, whole, strict=True))
    # every token keeps its kind, message and weight, or has none
    at = made.ids
    assert (made.kinds == tokens.kinds[at]).all()
    assert (made.messages == tokens.messages[at]).all()
    new, old = made.per_token(result.run_weights), tokens.per_token(weights)[at]
    assert ((new == old) | (new == 0)).all()


def assert_valid(made: Tokens, result: OverflowResult) -> None:
    """The invariants of `Tokens`, and of the columns beside them."""
    assert made.offsets[0] == made.run_offsets[0] == made.conversation_runs[0] == made.message_offsets[0] == 0
    assert made.offsets[-1] == made.run_offsets[-1] == len(made.ids)
    assert made.conversation_runs[-1] == len(made.run_kinds) == len(made.run_messages) == len(result.run_weights)
    assert (made.run_lengths >= 0).all()
    assert (made.run_offsets[made.conversation_runs] == made.offsets).all()
    assert made.message_offsets[-1] == len(made.message_weights)
    assert len(made) == len(result.source_index) == len(result.window)
    assert made.ids.dtype == np.int32
    assert result.run_weights.dtype == np.float32
    order = list(zip(result.source_index.tolist(), result.window.tolist(), strict=True))
    assert order == sorted(set(order))
    highest = np.full(len(made), -1)
    np.maximum.at(highest, np.repeat(np.arange(len(made)), np.diff(made.conversation_runs)), made.run_messages)
    assert (highest < np.diff(made.message_offsets)).all()


@settings(max_examples=100)
@given(batches, st.integers(1, 40), st.sampled_from([p for p in Overflow if p is not Overflow.ERROR]))
def test_conversations_that_fit_are_not_touched(given_chats: list[Chat], capacity: int, policy: Overflow) -> None:
    tokens, weights, result = applied(given_chats, capacity, policy)
    for index in np.flatnonzero(tokens.lengths <= capacity).tolist():
        (episode,) = np.flatnonzero(result.source_index == index).tolist()
        before, after = tokens.conversation(index), result.tokens.conversation(episode)
        for name in Tokens.__slots__:
            assert getattr(before, name).tolist() == getattr(after, name).tolist(), name
        a, b = tokens.conversation_runs[index : index + 2]
        c, d = result.tokens.conversation_runs[episode : episode + 2]
        assert weights[a:b].tolist() == result.run_weights[c:d].tolist()
        assert result.window[episode] == 0


def test_when_all_fit_nothing_is_copied() -> None:
    for policy in Overflow:
        tokens, weights, result = applied([one("u2 a3"), one("u2")], 5, policy)
        assert result.tokens is tokens
        assert result.run_weights is weights
        assert result.report == OverflowReport(conversations=2, kept_trained=2, kept_untrained=5)


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
    assert result.report.lost_trained == sum(
        int((per_token[tokens.messages == m][: max(0, size - capacity)] > 0).sum())
        for m, (letter, size) in enumerate(chat.messages)
        if LETTERS[letter] is A
    )
    assert checked or not (weights > 0).any() or not (per_token > 0).any()


@settings(max_examples=400)
@given(dialogues, st.integers(6, 60))
def test_windows_keep_calls_with_results_and_begin_with_head_and_user(chat: Chat, capacity: int) -> None:
    tokens, _, result = applied([chat], capacity, "windows")
    assume(result.report.over_long and not len(result.dropped))
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


def ids_of(tokens: Tokens, index: int) -> list[int]:
    return tokens.ids[tokens.offsets[index] : tokens.offsets[index + 1]].tolist()


def contains(ids: list[int], wanted: list[int]) -> bool:
    return wanted[0] in ids and ids[ids.index(wanted[0]) :][: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("chat", "capacity", "episodes"),
    [
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
        # results without a call
        ("u4 t5 a5 u4 a5", 14, ["u4 t5 A5", "u4 A5"]),
    ],
)
def test_windows_by_example(chat: str, capacity: int, episodes: list[str]) -> None:
    tokens, _, result = applied([one(chat)], capacity, "windows")
    assert spelled(tokens, result) == [f"0: {episode}" for episode in episodes]
    assert result.window.tolist() == list(range(len(episodes)))


def test_windows_open_and_close_with_the_document_tokens() -> None:
    _tokens, _, result = applied([one("s3 u4 a5 u4 a5", bos=True, eod=True)], 14, "windows")
    first, second = ids_of(result.tokens, 0), ids_of(result.tokens, 1)
    assert first == [0, 1, 2, 3, *range(4, 13), 22]
    assert second == [0, 1, 2, 3, *range(13, 22), 22]
    assert result.report.injected == 5
    assert result.report.lost_trained == result.report.lost_untrained == 0


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


@settings(max_examples=200, deadline=None)
@given(batches, st.integers(1, 40))
def test_windows_train_no_token_twice_where_everything_is_trained(given_chats: list[Chat], capacity: int) -> None:
    tokens = batch(given_chats)
    result = apply_overflow(tokens, np.ones(len(tokens.run_kinds), dtype=np.float32), capacity, "windows")
    _, trained = kept_by_id(tokens, result)
    assert set(trained.values()) <= {1}
    assert result.report.kept_trained == len(trained)
    assert result.report.injected == len(result.tokens.ids) - len(trained)
    assert not result.run_weights[result.injected_runs].any()


def test_the_document_end_is_kept_before_the_head() -> None:
    _, _, result = applied([one("s3 u4 a5", eod=True)], 6, "windows")
    assert ids_of(result.tokens, 0) == [7, 8, 9, 10, 11, 12]
    _, _, result = applied([one("s3 u4 a5", eod=True)], 5, "windows")
    assert ids_of(result.tokens, 0) == [7, 8, 9, 10, 11]


def test_windows_leave_out_what_would_train_nothing() -> None:
    tokens = batch([one("s3 u4 a5 u4 a5")])
    weights = assistant_weights(tokens)
    weights[tokens.run_messages == 2] = 0
    result = apply_overflow(tokens, weights, 13, "windows")
    assert spelled(tokens, result) == ["0: s3 u4 A5"]
    assert result.tokens.ids.tolist() == [0, 1, 2, *range(12, 21)]
    assert (result.report.injected, result.report.lost_trained, result.report.lost_untrained) == (0, 0, 9)
    weights[tokens.run_messages == 3] = 1  # what is trained from the very border on is not in the window before it
    at_the_border = apply_overflow(tokens, weights, 13, "windows")
    assert spelled(tokens, at_the_border) == ["0: s3 U4 A5"]
    nothing = apply_overflow(tokens, np.zeros_like(weights), 13, "windows")
    assert (len(nothing.tokens), nothing.report.dropped, nothing.dropped.tolist()) == (0, 1, [0])
    assert nothing.report.lost_untrained == 21


# --- drop_oldest_turns, against the rules of the token-native format told in lists


def newest(messages: list[tuple[str, list[int]]], system: list[int], capacity: int) -> list[int]:
    """Spec 1, steps 1 and 2, for user and assistant messages."""
    turns = list(messages)

    def joined() -> list[int]:
        return [*system, *(i for _, ids in turns for i in ids)]

    def final() -> int:
        answers = [i for i, (role, _) in enumerate(turns) if role == "a"]
        return answers[-1] if answers else len(turns) - 1

    while turns and len(joined()) > capacity:
        last = final()
        keep_from = last - 1 if last and turns[last][0] == "a" and turns[last - 1][0] == "u" else last
        if keep_from == 0:
            break
        pair = turns[0][0] == "u" and turns[1][0] == "a" and keep_from > 1
        del turns[: 2 if pair else 1]
    if len(joined()) > capacity and turns:
        del turns[final() + 1 :]
    return joined()[-capacity:]


@settings(max_examples=400)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from("ua"), st.integers(1, 9)), max_size=9),
    st.integers(1, 40),
)
def test_drop_oldest_turns_follows_the_token_native_rules(
    system: int, messages: list[tuple[str, int]], capacity: int
) -> None:
    chat = Chat([("s", system)] * (system > 0) + messages)
    if not chat.messages:
        return
    tokens, _, result = applied([chat], capacity, "drop_oldest_turns")
    bounds = offsets_of(np.array([system, *(n for _, n in messages)])).tolist()
    pieces = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    wanted = newest([(r, ids) for (r, _), ids in zip(messages, pieces[1:], strict=True)], pieces[0], capacity)
    if len(tokens.ids) <= capacity:
        wanted = tokens.ids.tolist()
    assert ids_of(result.tokens, 0) == wanted


@pytest.mark.parametrize(
    ("chat", "capacity", "episode"),
    [
        ("s3 u4 a5 u4 a5 u4 a5", 21, "s3 u4 A5 u4 A5"),
        ("s3 u4 a5 u4 a5 u4 a5", 12, "s3 u4 A5"),
        ("s3 u4 a5 u4 a5 u4 a5", 20, "s3 u4 A5"),
        ("s3 a5 u4 u4 a5", 17, "s3 u4 u4 A5"),
        ("s3 a5 u4 u4 a5", 15, "s3 u4 A5"),
        ("s3 u4 a5 u4 a5 u2", 14, "s3 u4 A5 u2"),
        ("s3 u4 a5 u9", 14, "s3 u4 A5"),
        ("s3 u4 a30", 10, "A10"),
        ("s3 u9 a5", 10, "u5 A5"),
        ("s3 u4 u4", 8, "s3 u4"),
        # a call is dropped with its result, and with the question before it
        ("s3 u4 c5 t6 a5 u4 a5", 17, "s3 A5 u4 A5"),
        ("s3 u4 c5 t6 a5 u4 a5", 26, "s3 A5 u4 A5"),
        ("s3 u4 c5 t6 c5 t6 a5", 20, "s3 A5 t6 A5"),
        # results behind the final call go before anything is cut
        ("s3 u4 c5 t9", 14, "s3 u4 A5"),
    ],
)
def test_drop_oldest_turns_by_example(chat: str, capacity: int, episode: str) -> None:
    tokens, _, result = applied([one(chat)], capacity, "drop_oldest_turns")
    assert spelled(tokens, result) == [f"0: {episode}"]


def test_drop_oldest_turns_keeps_the_document_end() -> None:
    _tokens, _, result = applied([one("s3 u4 a5 u4 a5", bos=True, eod=True)], 14, "drop_oldest_turns")
    assert ids_of(result.tokens, 0) == [0, 1, 2, 3, *range(13, 22), 22]


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("ab", max_size=6)), min_size=1, max_size=7),
    st.booleans(),
    st.integers(2, 70),
)
def test_drop_oldest_turns_of_rendered_chats_equals_the_public_function(
    said: list[tuple[str, str]], system: bool, capacity: int
) -> None:
    template = find_template("token_native")(ByteTokenizer(find_template("token_native").control_tokens))
    sys_id, usr_id, asst_id, eot_id = (template.tokenizer.control(name) for name in template.control_tokens)
    messages = [Message(Role(role), text) for role, text in [("system", "be")] * system + said]
    tokens = render([Conversation(messages=tuple(messages))], template).tokens
    weights = find_policy("assistant").run_weights(tokens)
    result = apply_overflow(tokens, weights, capacity, "drop_oldest_turns")
    markers = {"sys_id": sys_id, "usr_id": usr_id, "asst_id": asst_id, "eot_id": eot_id}
    mask = sft_loss_mask_for_ids(tokens.ids.tolist(), **markers)
    ids, trained = pack_sft_ids_and_mask(tokens.ids.tolist(), mask, S=capacity, pad_id=-1, **markers)
    kept = [i for i in ids if i != -1]
    assert result.tokens.ids.tolist() == kept
    assert (result.tokens.per_token(result.run_weights) > 0).tolist() == trained[: len(kept)]


# --- the plain ones


def test_cut_keeps_the_first_tokens_and_drop_none() -> None:
    given_chats = [one("u4 a5"), one("s3 u4 a5 u4 a5"), one("u1")]
    tokens, _, cut = applied(given_chats, 10, "cut")
    assert spelled(tokens, cut) == ["0: u4 A5", "1: s3 u4 A3", "2: u1"]
    assert cut.report == OverflowReport(
        conversations=3, over_long=1, episodes=1, kept_trained=6, kept_untrained=14, lost_trained=6, lost_untrained=5,
        assistant_lost=1, assistant_cut=1,
    )  # fmt: skip
    assert cut.source_index.tolist() == [0, 1, 2]
    tokens, _, drop = applied(given_chats, 10, "drop")
    assert spelled(tokens, drop) == ["0: u4 A5", "2: u1"]
    assert drop.dropped.tolist() == [1]
    assert (drop.report.dropped, drop.report.lost_trained, drop.report.lost_untrained) == (1, 8, 13)
    assert (drop.report.assistant_lost, drop.report.assistant_cut) == (2, 0)


def test_lost_results_are_counted() -> None:
    _, _, result = applied([one("s3 u4 c5 t30 a5")], 20, "windows")
    assert (result.report.results_lost, result.report.assistant_lost, result.report.assistant_cut) == (1, 0, 0)
    assert (result.report.lost_untrained, result.report.injected) == (22, 7)


def test_episodes_without_their_head_are_counted() -> None:
    given_chats = [one("s9 u9 a5"), one("s3 u4 a5 u4 a5"), one("s3 u4 a12 u2 a2"), one("s9"), one("u9 a9")]
    for policy, lost in (("windows", 2), ("drop_oldest_turns", 1), ("cut", 0), ("drop", 0)):
        assert applied(given_chats, 12, policy)[2].report.heads_lost == lost, policy
    assert applied(given_chats, 2, "cut")[2].report.heads_lost == 4
    assert applied([one("d9 u9 a5", bos=True)], 12, "windows")[2].report.heads_lost == 1
    assert applied([one("u0 s9 u9 a5")], 12, "windows")[2].report.heads_lost == 1


def test_error_names_the_conversations() -> None:
    tokens = batch([one("u4 a5")] + [one("u9 a5")] * 7)
    with pytest.raises(
        DataError, match=r"7 of 8 .* row of 10 tokens: conversation 1 \(14 tokens\).* and 2 more.*windows"
    ):
        apply_overflow(tokens, assistant_weights(tokens), 10, "error")


def test_bad_arguments() -> None:
    tokens = batch([one("u4 a5")])
    weights = assistant_weights(tokens)
    with pytest.raises(ConfigError, match="drop_oldest_turns"):
        apply_overflow(tokens, weights, 5, "truncate")
    with pytest.raises(ConfigError, match="not 0"):
        apply_overflow(tokens, weights, 0, "cut")
    with pytest.raises(DataError, match=r"8 runs.*\(3,\)"):
        apply_overflow(tokens, weights[:3], 5, "cut")


def test_reports_add_up_over_batches() -> None:
    given_chats = [one("s3 u4 a5 u4 a5"), one("u4 a5"), one("u30 a5")]
    _, _, whole = applied(given_chats, 12, "windows")
    parts = [applied([chat], 12, "windows")[2].report for chat in given_chats]
    assert total(parts) == whole.report
    assert total([]) == OverflowReport()


def test_an_empty_batch() -> None:
    _tokens, _, result = applied([], 5, "windows")
    assert len(result.tokens) == 0
    assert result.report == OverflowReport()


# --- real conversations, rendered by a real template


@pytest.fixture(scope="module")
def rendered() -> tuple[Tokens, np.ndarray]:
    tokenizer = ByteTokenizer(find_template("qwen3").control_tokens)
    folder = Path(__file__).parents[1] / "data" / "conversations"
    files = [folder / f"{name}.jsonl.gz" for name in ("tau_airline", "swe_agent", "reason_tool_use", "oasst_en100")]
    in_place = TemplateOptions(expand=Expand.NONE, unproved=Unproved.UNTRAINED)  # a row per conversation
    tokens = render(list(read_conversations(files)), bind("qwen3", tokenizer, in_place)).tokens
    # every token is known by its place, as in the made-up batches
    return replace(tokens, ids=np.arange(len(tokens.ids), dtype=np.int32)), find_policy("assistant").run_weights(tokens)


@pytest.mark.parametrize("capacity", [3000, 8192, 16384])
def test_windows_of_real_conversations(rendered: tuple[Tokens, np.ndarray], capacity: int) -> None:
    tokens, weights = rendered
    result = apply_overflow(tokens, weights, capacity, "windows")
    assert result.report.over_long > 50
    assert result.report.episodes > 2 * result.report.over_long
    assert result.tokens.lengths.max() <= capacity
    assert_valid(result.tokens, result)
    new, old = result.tokens.per_token(result.run_weights) > 0, tokens.per_token(weights) > 0
    trained = Counter(result.tokens.ids[new].tolist())
    assert max(trained.values()) == 1
    lost = set(np.flatnonzero(old).tolist()) - set(trained)
    assert len(lost) == result.report.lost_trained
    assert lost <= {i for start, end in too_long(tokens, capacity) for i in range(start, end - capacity)}
    assert result.report.assistant_lost == 0
    # a result never opens a window: its call stands before it
    for episode in range(len(result.tokens)):
        roles = [role_of(k) for k in result.tokens.conversation(episode).run_kinds.tolist()]
        body = [role for role in roles if role not in (S, D, RoleCode.NONE)]
        assert body[0] in (U, A), f"episode {episode} opens with {body[0]}"


def too_long(tokens: Tokens, capacity: int) -> list[tuple[int, int]]:
    """Start and end of every assistant message that alone is longer than the row."""
    return [
        (int(tokens.offsets[index]) + message.start, int(tokens.offsets[index]) + message.end)
        for index in range(len(tokens))
        for message in outline(tokens, index).messages
        if message.role is A and message.end - message.start > capacity
    ]
