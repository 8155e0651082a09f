"""Ids of transcripts for tests of the post-training stream, and its mask as a plain loop."""

from __future__ import annotations

from hypothesis import strategies as st

from chatmill.pack.stream import (
    PackedStream,
    pack_post_training_stream,
)

SYSTEM, USER, ASSISTANT, END, EOS = 10, 11, 12, 13, 0
IDS = {"system_id": SYSTEM, "user_id": USER, "assistant_id": ASSISTANT, "end_id": END, "eos_id": EOS}

# Marker soup: anything next to anything, with runs of text between.
tokens = st.one_of(st.sampled_from([SYSTEM, USER, ASSISTANT, END, END]), st.integers(20, 29))
soup = st.lists(st.one_of(tokens, tokens, tokens, st.just(EOS)), max_size=60)


def slow_mask(ids: list[int]) -> list[int]:
    """The state machine of the page, one token at a time."""
    mask = [0] * len(ids)
    in_user = user_complete = counts = False
    assistant_at: int | None = None
    for at, token in enumerate(ids):
        if token in (EOS, SYSTEM):
            in_user = user_complete = False
            assistant_at = None
        elif token == USER:
            in_user, user_complete, assistant_at = True, False, None
        elif token == ASSISTANT:
            in_user = False
            assistant_at, counts = at, user_complete
        elif token == END:
            if in_user:
                in_user, user_complete = False, True
            elif assistant_at is not None:
                if counts:
                    mask[assistant_at : at + 1] = [1] * (at + 1 - assistant_at)
                assistant_at = None
    return mask


def pack(raw: list[list[int]], block_size: int, drop_last: bool = False) -> PackedStream:
    return pack_post_training_stream(raw, block_size=block_size, drop_last=drop_last, **IDS)
