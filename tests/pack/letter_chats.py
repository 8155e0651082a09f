"""Batches from runs, conversations written as letters, one for each message, and what overflow makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from chatmill.core.kinds import PICTURE, Part, RoleCode, kind, role_of
from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.pack.overflow import OverflowResult, apply_overflow

LETTERS = dict(zip("xsduat", RoleCode, strict=False)) | {"c": RoleCode.ASSISTANT, "p": RoleCode.USER}
"""`c` is an assistant message that calls a tool, `p` a user message with a picture; `x` are tokens of no message."""
Run = tuple[int, int, int]
"""Kind, number of tokens, and message (-1: of none)."""


def tokens_of(documents: list[list[Run]], messages: list[int]) -> Tokens:
    """Token ids count from 0 over the whole batch, so that every token can be recognised."""
    runs = np.array([run for document in documents for run in document], dtype=np.int64).reshape(-1, 3)
    run_offsets = offsets_of(runs[:, 1])
    document_runs = offsets_of(np.array([len(document) for document in documents], dtype=np.int64))
    message_offsets = offsets_of(np.array(messages, dtype=np.int64))
    return Tokens(
        ids=np.arange(run_offsets[-1], dtype=np.int32),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=runs[:, 0].astype(np.uint8),
        run_messages=runs[:, 2].astype(np.int32),
        document_runs=document_runs,
        message_offsets=message_offsets,
        message_weights=np.arange(message_offsets[-1], dtype=np.float32),
    )


@dataclass(frozen=True)
class Chat:
    """A conversation in letters: roles and total tokens of each message (at least 1: short ones lack parts)."""

    messages: list[tuple[str, int]]
    bos: bool = False
    eod: bool = False

    def runs(self) -> list[Run]:
        border = (kind(RoleCode.NONE, Part.DOCUMENT), 1, -1)
        said = [
            (code, size, -1 if letter == "x" else index)
            for index, (letter, total) in enumerate(self.messages)
            for code, size in runs_of(letter, total)
        ]
        return [border] * self.bos + said + [border] * self.eod


def runs_of(letter: str, size: int) -> list[tuple[int, int]]:
    """Kinds and sizes: header, content (with an empty run before it) and terminator."""
    role = LETTERS[letter]
    content = kind(role, {"c": Part.TOOL_CALL, "x": Part.DOCUMENT}.get(letter, Part.CONTENT))
    header, terminator = (kind(role, Part.HEADER), 1), (kind(role, Part.TERMINATOR), 1)
    if letter == "p":
        return [header, (PICTURE, size - 3), (content, 1), terminator] if size > 3 else [(PICTURE, size)]
    if letter == "x" or size < 3:
        return [(content, size)]
    return [header, (kind(role, Part.REASONING), 0), (content, size - 2), terminator]


def batch(chats: list[Chat]) -> Tokens:
    return tokens_of([chat.runs() for chat in chats], [len(chat.messages) for chat in chats])


def assistant_weights(tokens: Tokens) -> np.ndarray:
    """Everything an assistant writes but its header, with weights that differ from run to run."""
    roles, parts = tokens.run_kinds // 8, tokens.run_kinds % 8
    trained = (roles == RoleCode.ASSISTANT) & (parts != Part.HEADER)
    return np.where(trained, 0.5 + np.arange(len(roles)) % 3, 0).astype(np.float32)


def one(text: str, **options: bool) -> Chat:
    """`one("s3 u4 a5")`: a chat of three messages."""
    return Chat([(word[0], int(word[1:])) for word in text.split()], **options)


def applied(
    chats: list[Chat], capacity: int, policy: str, *, everything: bool = False
) -> tuple[Tokens, np.ndarray, OverflowResult]:
    """Apply a policy to chats of which the answers, or all tokens, are trained, and check what it gives."""
    tokens = batch(chats)
    weights = np.ones(len(tokens.run_kinds), dtype=np.float32) if everything else assistant_weights(tokens)
    result = apply_overflow(tokens, weights, capacity, policy)
    check(tokens, weights, capacity, result)
    assert policy == "windows" or not result.injected_runs.any()
    return tokens, weights, result


def check(tokens: Tokens, weights: np.ndarray, capacity: int, result: OverflowResult) -> None:
    """Every token is kept once at most, as it was, and accounted for; repetitions are never trained."""
    made = result.tokens
    assert made.lengths.max(initial=0) <= capacity
    assert made.offsets[0] == made.run_offsets[0] == made.document_runs[0] == made.message_offsets[0] == 0
    assert made.offsets[-1] == made.run_offsets[-1] == len(made.ids)
    assert made.document_runs[-1] == len(made.run_kinds) == len(made.run_messages) == len(result.run_weights)
    assert (made.run_lengths >= 0).all()
    assert (made.run_offsets[made.document_runs] == made.offsets).all()
    assert made.message_offsets[-1] == len(made.message_weights)
    assert (made.ids.dtype, result.run_weights.dtype) == (np.int32, np.float32)
    messages = np.diff(tokens.message_offsets)[result.source_index]
    assert np.array_equal(np.diff(made.message_offsets), messages)
    own_weights = tokens.message_weights[ranges(tokens.message_offsets[result.source_index], messages)]
    assert np.array_equal(made.message_weights, own_weights, equal_nan=True)
    order = list(zip(result.source_index.tolist(), result.window.tolist(), strict=True))
    assert order == sorted(set(order))
    assert len(order) == len(made)
    assert set(result.dropped.tolist()) == set(range(len(tokens))) - set(result.source_index.tolist())
    # Ids are places in the input.
    run_of = tokens.per_token(np.arange(len(tokens.run_kinds)))
    injected = made.per_token(result.injected_runs)
    assert np.array_equal(made.per_token(result.source_runs), run_of[made.ids])
    assert np.array_equal(made.kinds, tokens.kinds[made.ids])
    assert np.array_equal(made.messages, tokens.messages[made.ids])
    old = tokens.per_token(weights)
    assert np.array_equal(made.per_token(result.run_weights), np.where(injected, 0, old[made.ids]))
    is_later = made.per_token(result.later_runs)
    for number, first in enumerate(tokens.offsets[result.source_index].tolist()):
        inside = slice(*made.offsets[number : number + 2].tolist())
        begins = np.cumprod(made.ids[inside] - first == np.arange(made.lengths[number]))
        assert np.array_equal(is_later[inside], begins == 0), "after what is left out"
    own = made.ids[~injected]
    assert np.bincount(own).max(initial=0) <= 1
    assert np.array_equal(result.kept_of_run, np.bincount(run_of[own], minlength=len(tokens.run_kinds)))
    # What fits is not touched: each of its runs is there once, empty ones too.
    fits = np.repeat(tokens.lengths <= capacity, np.diff(tokens.document_runs))
    assert np.array_equal(result.kept_of_run[fits], tokens.run_lengths[fits])
    assert (np.bincount(result.source_runs, minlength=len(fits))[fits] == 1).all()


def spelled(result: OverflowResult) -> list[str]:
    """Each episode as messages in letters with sizes; upper case where anything in it is trained."""
    names = {role: letter for letter, role in reversed(LETTERS.items())}
    made, episodes = result.tokens, []
    for first, last in zip(made.offsets[:-1], made.offsets[1:], strict=True):
        messages, kinds = made.messages[first:last], made.kinds[first:last]
        weights = made.per_token(result.run_weights)[first:last]
        words = []
        for message in dict.fromkeys(messages.tolist()):
            own = messages == message
            letter = names.get(role_of(int(kinds[own][0])), "p")
            words.append(f"{letter.upper() if weights[own].any() else letter}{own.sum()}")
        episodes.append(" ".join(words))
    return episodes


def said(letters: str, most: int = 9) -> st.SearchStrategy[tuple[str, int]]:
    return st.tuples(st.sampled_from(letters), st.integers(1, most))


chats = st.builds(
    Chat,
    st.lists(st.tuples(st.sampled_from("sduuuaaacctttxp"), st.integers(0, 14)), min_size=1, max_size=14),
    bos=st.booleans(),
    eod=st.booleans(),
)
turns = st.one_of(
    st.tuples(said("u"), said("a")),
    st.tuples(said("u"), said("c"), said("t", 20), said("t"), said("c"), said("t"), said("a")),
)
dialogues = st.builds(
    lambda system, turns, bos, eod: Chat([*system, *(message for turn in turns for message in turn)], bos, eod),
    st.lists(said("sd", 6), max_size=2),
    st.lists(turns, min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
