"""Conversations written as letters, one for each message, and what overflow makes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from chatmill.core.kinds import Part, RoleCode, kind, role_of
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.pack.overflow import OverflowResult, apply_overflow

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
    document_runs = offsets_of(np.array(counts, dtype=np.int64))
    run_offsets = offsets_of(np.array(sizes, dtype=np.int64))
    message_counts = np.array([len(chat.messages) for chat in chats], dtype=np.int64)
    return Tokens(
        ids=np.arange(run_offsets[-1], dtype=np.int32),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=np.array(kinds, dtype=np.uint8),
        run_messages=np.array(messages, dtype=np.int32),
        document_runs=document_runs,
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
        a, b = result.tokens.document_runs[index : index + 2]
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
batches = st.lists(st.one_of(chats, dialogues), max_size=4)


def kept_by_id(tokens: Tokens, result: OverflowResult) -> tuple[Counter[int], Counter[int]]:
    """How often each id (= input position) stands in the output, and how often with a weight above 0."""
    weights = result.tokens.per_token(result.run_weights)
    return Counter(result.tokens.ids.tolist()), Counter(result.tokens.ids[weights > 0].tolist())


def ids_of(tokens: Tokens, index: int) -> list[int]:
    return tokens.ids[tokens.offsets[index] : tokens.offsets[index + 1]].tolist()
