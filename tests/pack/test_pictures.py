"""Overflow never leaves a part of a picture, nor a part of its message without it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.kinds import PICTURE, Part, RoleCode, kind
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.pack.overflow import without_cut_pictures
from chatmill.pack.windows import KeptSpan

WORDS = kind(RoleCode.USER, Part.CONTENT)
Chat = list[list[tuple[bool, int]]]
"""Messages of runs: whether each is a picture, and its length."""
chats = st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=3), min_size=1, max_size=4)


def tokens_of(*batch: Chat) -> Tokens:
    runs = [(is_picture, size, n) for chat in batch for n, message in enumerate(chat) for is_picture, size in message]
    run_offsets = offsets_of(np.array([size for _, size, _ in runs]))
    document_runs = offsets_of(np.array([sum(map(len, chat)) for chat in batch]))
    return Tokens(
        ids=np.zeros(run_offsets[-1], dtype=np.int32),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=np.array([PICTURE if is_picture else WORDS for is_picture, *_ in runs], dtype=np.uint8),
        run_messages=np.array([message for *_, message in runs], dtype=np.int32),
        document_runs=document_runs,
        message_offsets=offsets_of(np.array([len(chat) for chat in batch])),
        message_weights=np.zeros(sum(map(len, batch)), dtype=np.float32),
    )


@given(chats, chats, st.data())
def test_no_part_of_a_message_is_kept_without_its_pictures(other: Chat, chat: Chat, data: st.DataObject) -> None:
    ends = offsets_of(np.array([sum(size for _, size in message) for message in chat])).tolist()
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, ends[-1])] * 2)))
    injected = data.draw(st.booleans())
    kept = without_cut_pictures(tokens_of(other, chat, other), 1, [[KeptSpan(a, b, injected)]])
    wanted: list[int] = []
    for message, first, last in zip(chat, ends[:-1], ends[1:], strict=True):
        shown = first + sum(
            size for _, size in message[: max((n for n, (p, _) in enumerate(message, 1) if p), default=0)]
        )
        if shown == first or (a <= first and shown <= b):
            wanted += range(max(a, first), min(b, last))
    assert [token for spans in kept for span in spans for token in range(span.start, span.end)] == wanted
    assert all(span.injected == injected for spans in kept for span in spans)


def test_an_episode_keeps_its_other_spans() -> None:
    chat = [[(False, 2)], [(False, 1), (True, 3), (False, 1)], [(False, 2)]]
    spans = [KeptSpan(0, 1, injected=True), KeptSpan(3, 5), KeptSpan(6, 9)]
    kept = without_cut_pictures(tokens_of(chat, chat), 0, [spans, [KeptSpan(3, 4)]])
    assert kept == [[KeptSpan(0, 1, injected=True), KeptSpan(7, 9)], []]
