"""Overflow policies on made-up conversations: whole turns, once-only training, a ledger that balances."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import RoleCode, role_of
from chatmill.core.tokens import Tokens
from chatmill.errors import ConfigError, DataError
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import Overflow, OverflowReport, OverflowResult, apply_overflow
from chatmill.pack.turns import outline
from chatmill.read.conversations import read_conversations
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.systems.token_native_sft import pack_sft_ids_and_mask, sft_loss_mask_for_ids
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.pack.letter_chats import (
    A,
    Chat,
    D,
    S,
    U,
    applied,
    assistant_weights,
    batch,
    batches,
    ids_of,
    kept_by_id,
    one,
    spelled,
)


def report_of(**counts: int) -> OverflowReport:
    """A report with these counts, and 0 elsewhere."""
    return OverflowReport(**{**dict.fromkeys(OverflowReport.__slots__, 0), **counts})


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
    assert report.over_long == int((tokens.lengths > capacity).sum())
    assert set(result.dropped.tolist()) | set(result.source_index.tolist()) == set(range(len(tokens)))
    if policy is not Overflow.WINDOWS:
        assert report.injected == 0
        assert max(seen.values(), default=1) == 1
    # every token keeps its kind, message and weight, or has none
    at = made.ids
    assert (made.kinds == tokens.kinds[at]).all()
    assert (made.messages == tokens.messages[at]).all()
    new, old = made.per_token(result.run_weights), tokens.per_token(weights)[at]
    assert ((new == old) | (new == 0)).all()


def assert_valid(made: Tokens, result: OverflowResult) -> None:
    """The invariants of `Tokens`, and of the columns next to them."""
    assert made.offsets[0] == made.run_offsets[0] == made.document_runs[0] == made.message_offsets[0] == 0
    assert made.offsets[-1] == made.run_offsets[-1] == len(made.ids)
    assert made.document_runs[-1] == len(made.run_kinds) == len(made.run_messages) == len(result.run_weights)
    assert (made.run_lengths >= 0).all()
    assert (made.run_offsets[made.document_runs] == made.offsets).all()
    assert made.message_offsets[-1] == len(made.message_weights)
    assert len(made) == len(result.source_index) == len(result.window)
    assert made.ids.dtype == np.int32
    assert result.run_weights.dtype == np.float32
    order = list(zip(result.source_index.tolist(), result.window.tolist(), strict=True))
    assert order == sorted(set(order))
    highest = np.full(len(made), -1)
    np.maximum.at(highest, np.repeat(np.arange(len(made)), np.diff(made.document_runs)), made.run_messages)
    assert (highest < np.diff(made.message_offsets)).all()


@settings(max_examples=100)
@given(batches, st.integers(1, 40), st.sampled_from([p for p in Overflow if p is not Overflow.ERROR]))
def test_conversations_that_fit_are_not_touched(given_chats: list[Chat], capacity: int, policy: Overflow) -> None:
    tokens, weights, result = applied(given_chats, capacity, policy)
    for index in np.flatnonzero(tokens.lengths <= capacity).tolist():
        (episode,) = np.flatnonzero(result.source_index == index).tolist()
        before, after = tokens.conversation(index), result.tokens.conversation(episode)
        for name in (field.name for field in fields(Tokens)):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name), name)
        a, b = tokens.document_runs[index : index + 2]
        c, d = result.tokens.document_runs[episode : episode + 2]
        assert weights[a:b].tolist() == result.run_weights[c:d].tolist()
        assert result.window[episode] == 0


def test_when_all_fit_nothing_is_copied() -> None:
    for policy in Overflow:
        tokens, weights, result = applied([one("u2 a3"), one("u2")], 5, policy)
        assert result.tokens is tokens
        assert result.run_weights is weights
        assert result.report == report_of(kept_trained=2, kept_untrained=5)


# --- whole turns


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
        # results after the final call go before anything is cut
        ("s3 u4 c5 t9", 14, "s3 u4 A5"),
    ],
)
def test_drop_oldest_turns_by_example(chat: str, capacity: int, episode: str) -> None:
    tokens, _, result = applied([one(chat)], capacity, "drop_oldest_turns")
    assert spelled(tokens, result) == [f"0: {episode}"]


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
        tokens, _, result = applied([one(chat)], capacity, policy)
        assert spelled(tokens, result) == ([] if wanted is None else [f"0: {wanted}"])


def test_drop_oldest_turns_keeps_the_document_end() -> None:
    _tokens, _, result = applied([one("s3 u4 a5 u4 a5", bos=True, eod=True)], 14, "drop_oldest_turns")
    assert ids_of(result.tokens, 0) == [0, 1, 2, 3, *range(13, 22), 22]


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
    template = bind(source, tokenizer)
    sys_id, usr_id, asst_id, eot_id = (tokenizer.control(name) for name in source.control_tokens)
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
    assert cut.report == report_of(over_long=1, kept_trained=6, kept_untrained=14, lost_trained=6, lost_untrained=5)
    assert cut.source_index.tolist() == [0, 1, 2]
    tokens, _, drop = applied(given_chats, 10, "drop")
    assert spelled(tokens, drop) == ["0: u4 A5", "2: u1"]
    assert drop.dropped.tolist() == [1]
    assert (drop.report.lost_trained, drop.report.lost_untrained) == (8, 13)


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
    tokens = batch([one("u4 a5")] + [one("u9 a5")] * 7)
    says = r"7 of 8 .* row of 10 tokens: conversation 1 \(14 tokens\).* and 2 more.*windows"
    with pytest.raises(DataError, match=says):
        apply_overflow(tokens, assistant_weights(tokens), 10, "error")


# --- real conversations, rendered by a real template


@pytest.fixture(scope="module")
def rendered() -> tuple[Tokens, np.ndarray]:
    tokenizer = byte_tokenizer(find_template("qwen3").control_tokens)
    folder = Path(__file__).parents[1] / "data" / "conversations"
    files = [folder / f"{name}.jsonl.gz" for name in ("tau_airline", "swe_agent", "reason_tool_use", "oasst_en100")]
    in_place = TemplateOptions(expand=Expand.NONE, unproved=Unproved.UNTRAINED)  # a row per conversation
    tokens = render(list(read_conversations(files)), bind("qwen3", tokenizer, in_place)).tokens
    # every token is known by its place, as in the made-up batches
    return replace(tokens, ids=np.arange(len(tokens.ids), dtype=np.int32)), find_policy("assistant").run_weights(tokens)


@pytest.mark.parametrize("capacity", [3000, 16384])
def test_windows_of_real_conversations(rendered: tuple[Tokens, np.ndarray], capacity: int) -> None:
    tokens, weights = rendered
    result = apply_overflow(tokens, weights, capacity, "windows")
    assert result.report.over_long > 50
    assert len(result.tokens) > len(tokens) + result.report.over_long
    assert result.tokens.lengths.max() <= capacity
    assert_valid(result.tokens, result)
    new, old = result.tokens.per_token(result.run_weights) > 0, tokens.per_token(weights) > 0
    trained = Counter(result.tokens.ids[new].tolist())
    assert max(trained.values()) == 1
    lost = set(np.flatnonzero(old).tolist()) - set(trained)
    assert len(lost) == result.report.lost_trained
    assert lost <= {i for start, end in too_long(tokens, capacity) for i in range(start, end - capacity)}
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
