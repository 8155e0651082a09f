"""Overflow policies on made-up conversations: whole turns, once-only training, a ledger that balances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ConfigError, DataError
from chatmill.label.presets import find_policy
from chatmill.pack.overflow import Overflow, apply_overflow
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.systems.token_native_sft import pack_sft_ids_and_mask, sft_loss_mask_for_ids
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.pack.letter_chats import (
    Chat,
    applied,
    assistant_weights,
    batch,
    batches,
    ids_of,
    one,
    spelled,
)


@pytest.mark.parametrize("policy", [p for p in Overflow if p is not Overflow.ERROR])
@settings(max_examples=200)
@given(batches, st.integers(1, 40), st.booleans())
def test_every_policy_keeps_to_the_capacity_and_balances_its_ledger(
    policy: Overflow, given_chats: list[Chat], capacity: int, everything: bool
) -> None:
    applied(given_chats, capacity, policy, everything=everything)


def test_when_all_fit_nothing_is_copied() -> None:
    for policy in Overflow:
        tokens, weights, result = applied([one("u2 a3"), one("u2")], 5, policy)
        assert result.tokens is tokens
        assert result.run_weights is weights


# --- whole turns


def test_drop_oldest_turns_by_example() -> None:
    for chat, capacity, episode in [
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
        # a message with a picture is one message
        ("p9 a5 u4 a5", 21, "u4 A5"),
    ]:
        tokens, _, result = applied([one(chat)], capacity, "drop_oldest_turns")
        assert spelled(tokens, result) == [f"0: {episode}"], chat


def test_whole_answers_from_either_end() -> None:
    for chat, capacity, turns, last_turns in [
        ("s3 u4 a5 u4 a5 u4 a5", 21, "s3 u4 A5 u4 A5", "s3 u4 u4 A5"),
        ("s3 u4 a5 u4 a5 u4 a5", 12, "s3 u4 A5", None),
        ("s3 u4 a5 u4 a5 u4 a5", 11, None, None),
        ("s3 u4 c5 t6 c5 t6 a5", 20, "s3 u4 A5", "s3 u4 A5"),
        ("s3 u4 c5 t6 c5 t6 a5", 23, "s3 u4 A5 t6 A5", "s3 u4 A5 t6 A5"),
        ("s3 u4 c5 t6 a5 u4 a5", 18, "s3 u4 A5", "s3 u4 u4 A5"),
        ("u4 a30 u4 a5", 14, None, "u4 u4 A5"),
        ("u4 a5 u9", 14, "u4 A5", None),
    ]:
        for policy, wanted in (("turns", turns), ("last_turns", last_turns)):
            tokens, _, result = applied([one(chat)], capacity, policy)
            assert spelled(tokens, result) == ([] if wanted is None else [f"0: {wanted}"]), chat


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
    tokens, weights, cut = applied(given_chats, 10, "cut")
    assert spelled(tokens, cut) == ["0: u4 A5", "1: s3 u4 A3", "2: u1"]
    tokens, _, drop = applied(given_chats, 10, "drop")
    assert spelled(tokens, drop) == ["0: u4 A5", "2: u1"]
    # The answers of one record are dropped together, and cut each for itself.
    records = np.array([3, 7, 7])
    assert spelled(tokens, apply_overflow(tokens, weights, 10, "drop", records)) == ["0: u4 A5"]
    assert spelled(tokens, apply_overflow(tokens, weights, 10, "cut", records)) == spelled(tokens, cut)


def test_error_names_the_conversations() -> None:
    tokens = batch([one("u4 a5")] + [one(f"u{n} a5") for n in (9, 7, 6, 9, 9, 8, 9)])
    weights = assistant_weights(tokens)
    with pytest.raises(
        DataError, match=r"7 of 8 .* row of 10 tokens: conversation 1 \(14 tokens\), .*5 \(14 tokens\) and 2 more\."
    ):
        apply_overflow(tokens, weights, 10, "error")
    # Rows of one record have one name: it is said once, with the longest.
    says = r"7 of 8 .*: 0 \(14 tokens\), 1 \(12 tokens\), 2 \(14 tokens\), 3 \(14 tokens\)\. Choose .*windows"
    with pytest.raises(DataError, match=says):
        apply_overflow(tokens, weights, 10, "error", name_of=lambda index: str(index // 2))


def test_bad_arguments() -> None:
    tokens = batch([one("u4 a5")])
    weights = assistant_weights(tokens)
    with pytest.raises(ConfigError, match="drop_oldest_turns"):
        apply_overflow(tokens, weights, 5, "truncate")
    with pytest.raises(ConfigError, match="not 0"):
        apply_overflow(tokens, weights, 0, "cut")
    with pytest.raises(DataError, match=r"8 runs.*\(3,\)"):
        apply_overflow(tokens, weights[:3], 5, "cut")
