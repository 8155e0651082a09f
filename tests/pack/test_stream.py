"""Spec 2, packing, masks and targets: the fast code against slow references that read one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.shift import inputs_and_targets, shift_left, shift_left_ragged
from chatmill.errors import ChatmillError
from chatmill.pack.stream import (
    PackedStream,
    pack_post_training_stream,
    post_training_loss_mask,
    post_training_targets,
)

SYSTEM, USER, ASSISTANT, END, EOS = 10, 11, 12, 13, 0
IDS = {"system_id": SYSTEM, "user_id": USER, "assistant_id": ASSISTANT, "end_id": END, "eos_id": EOS}
COUNTS = ("records", "blocks", "injected", "padded", "left_out", "records_cut", "system_not_injected")
OPENING = (SYSTEM, USER, ASSISTANT)

# Marker soup: anything next to anything, with runs of text between.
tokens = st.one_of(st.sampled_from([SYSTEM, USER, ASSISTANT, END, END]), st.integers(20, 29))
marked = st.one_of(tokens, tokens, tokens, st.just(EOS))
soup = st.lists(marked, max_size=60)
# Well-formed conversations, sometimes with a second system span or two assistants in a row.
spans = st.tuples(st.sampled_from(OPENING), st.lists(st.integers(20, 29), max_size=9))
conversation = st.lists(spans, min_size=1, max_size=8).map(
    lambda said: [token for marker, text in said for token in (marker, *text, END)]
)
records = st.lists(st.one_of(soup, conversation, conversation), max_size=6)


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


def with_eos(raw: list[list[int]]) -> list[list[int]]:
    """One record per eos, each ending in it."""
    result: list[list[int]] = []
    for record in raw:
        piece: list[int] = []
        for token in record if record[-1:] == [EOS] else [*record, EOS]:
            piece.append(token)
            if token == EOS:
                result.append(piece)
                piece = []
    return result


def slow_pack(raw: list[list[int]], block_size: int, drop_last: bool) -> tuple[list[list[int]], dict[str, int]]:
    """The packer of the page, one token at a time: blocks and the report."""
    blocks: list[list[int]] = [[]]
    notes: list[Counter[str]] = [Counter()]
    left_out = 0
    record_list = with_eos(raw)
    for record in record_list:
        system: list[int] | None = None
        open_system: list[int] | None = None
        in_user = carried = False
        for at, token in enumerate(record):
            if len(blocks[-1]) == block_size:
                blocks.append([])
                notes.append(Counter())
                carried = False
            if not blocks[-1] and in_user and token not in (*OPENING, EOS):
                carried = True
                if system is not None and len(system) + 2 <= block_size:
                    blocks[-1] += system
                else:
                    notes[-1]["system_not_injected"] = int(system is not None)
                blocks[-1].append(USER)
                notes[-1]["injected"] = len(blocks[-1])
            blocks[-1].append(token)
            notes[-1]["tokens"] += 1
            if token in (*OPENING, EOS, END):
                if token == END and open_system is not None:
                    system = [*open_system, END]
                in_user, carried = token == USER, False
                open_system = [SYSTEM] if token == SYSTEM else None
            elif open_system is not None:
                open_system.append(token)
            if carried and len(blocks[-1]) == block_size:
                notes[-1]["records_cut"] = 1
                left_out += len(record) - at - 1
                break
    padded = 0
    if len(blocks[-1]) < block_size:
        if drop_last or not blocks[-1]:
            left_out += notes[-1]["tokens"]
            blocks.pop()
            notes.pop()
        else:
            padded = block_size - len(blocks[-1])
            blocks[-1] += [EOS] * padded
    whole = Counter(records=len(record_list), blocks=len(blocks), padded=padded, left_out=left_out)
    total = sum(notes, whole)
    return blocks, {name: total[name] for name in COUNTS}


# ---- blocks

BY_HAND = [
    # the latest whole system span is injected
    (
        [[10, 1, 13, 11, 2, 13, 12, 3, 13, 10, 4, 13, 10, 5, 11, 6, 7, 13, 12, 8, 13]],
        16,
        [[10, 1, 13, 11, 2, 13, 12, 3, 13, 10, 4, 13, 10, 5, 11, 6], [10, 4, 13, 11, 7, 13, 12, 8, 13] + [0] * 7],
    ),
    # a system span that leaves no room is not
    (
        [[10, 1, 2, 13, 11, 3, 4, 13, 12, 5, 13]],
        5,
        [[10, 1, 2, 13, 11], [11, 3, 4, 13, 12], [5, 13, 0, 0, 0]],
    ),
    # eos clears the history
    (
        [[10, 1, 13, 11, 2, 13, 12, 3, 13, 0, 11, 4, 5, 6, 13, 12, 7, 13]],
        13,
        [[10, 1, 13, 11, 2, 13, 12, 3, 13, 0, 11, 4, 5], [11, 6, 13, 12, 7, 13] + [0] * 7],
    ),
    # the rest of a cut record is left out
    (
        [[20], [11, 1, 2, 3, 4, 5, 6, 7, 8, 13, 12, 9, 13], [11, 14, 13, 12, 15, 13]],
        4,
        [[20, 0, 11, 1], [11, 2, 3, 4], [11, 14, 13, 12], [15, 13, 0, 0]],
    ),
]


@pytest.mark.parametrize(("raw", "size", "blocks"), BY_HAND)
def test_packing_by_hand(raw: list[list[int]], size: int, blocks: list[list[int]]) -> None:
    packed = pack(raw, size)
    assert packed.input_ids.tolist() == blocks
    assert slow_pack(raw, size, drop_last=False) == (blocks, dict(packed.report))


def test_the_examples_of_the_page() -> None:
    packed = pack([[10, 101, 13, 11, 201, 202, 13, 12, 301, 13]], 5)
    assert packed.input_ids.tolist() == [[10, 101, 13, 11, 201], [10, 101, 13, 11, 202]]
    assert not packed.loss_mask.any()
    counts = {"records": 1, "blocks": 2, "injected": 4, "padded": 0, "left_out": 5, "records_cut": 1}
    assert dict(packed.report) == counts | {"system_not_injected": 0}
    assert (packed.lost_at_edges, pack([[11, 2, 13]], 5).lost_at_edges) == (1.0, 0.0)
    # The end marker still lies inside.
    packed = pack([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]], 9)
    assert packed.input_ids.tolist() == [[10, 1, 13, 11, 2, 3, 4, 5, 6], [10, 1, 13, 11, 13, 12, 7, 13, 0]]
    assert packed.loss_mask.tolist() == [[0] * 9, [0, 0, 0, 0, 0, 1, 1, 1, 0]]
    assert [column.tolist() for column in (packed.starts, packed.injected, packed.tokens)] == [[0, 9], [0, 4], [9, 5]]
    assert (packed.input_ids.dtype, packed.loss_mask.dtype, len(packed)) == (np.int64, np.uint8, 2)


@settings(max_examples=600)
@given(records, st.integers(2, 24), st.booleans())
def test_packer_equals_the_slow_one(raw: list[list[int]], block_size: int, drop_last: bool) -> None:
    packed = pack(raw, block_size, drop_last)
    blocks, report = slow_pack(raw, block_size, drop_last)
    assert packed.input_ids.tolist() == blocks
    assert dict(packed.report) == report
    assert packed.loss_mask.tolist() == [slow_mask(block) for block in blocks]
    # Where each token comes from: the stream in order, what was injected, and padding.
    stream = np.array([token for record in with_eos(raw) for token in record], dtype=np.int64)
    after = 0
    for row, mask, start, injected, count in zip(
        packed.input_ids, packed.loss_mask, packed.starts, packed.injected, packed.tokens, strict=True
    ):
        assert row[injected : injected + count].tolist() == stream[start : start + count].tolist()
        assert start >= after
        after = start + count
        assert not mask[:injected].any()
        assert not mask[injected + count :].any()
    assert packed.injected.sum() == report["injected"]
    assert packed.tokens.sum() == len(stream) - report["left_out"]


# ---- the loss mask

MASKS = [
    ([11, 1, 13, 12, 2, 13], [0, 0, 0, 1, 1, 1]),  # a pair
    ([11, 1, 13, 12, 2, 13, 12, 3, 13], [0] * 3 + [1] * 6),  # two assistants after one user
    ([11, 1, 12, 2, 13, 12, 3, 13], [0] * 8),  # the user span never ended, for the next assistant either
    ([11, 1, 13, 0, 12, 2, 13], [0] * 7),  # eos resets
    ([11, 1, 13, 10, 2, 13, 12, 2, 13], [0] * 9),  # a system marker resets
    ([11, 1, 13, 11, 2, 12, 2, 13], [0] * 8),  # a new user marker: nothing is complete any more
    ([11, 1, 13, 12, 2], [0] * 5),  # an answer met the end of the block
    ([11, 1, 13, 12, 2, 11, 3, 13, 12, 4, 13], [0] * 8 + [1] * 3),  # abandoned by a user marker
    ([], []),
]


@pytest.mark.parametrize(("ids", "expected"), MASKS)
def test_mask_by_hand(ids: list[int], expected: list[int]) -> None:
    assert post_training_loss_mask(ids, **IDS).tolist() == expected
    assert slow_mask(ids) == expected


@settings(max_examples=400)
@given(st.integers(1, 25).flatmap(lambda width: st.lists(st.lists(marked, min_size=width, max_size=width), min_size=1)))
def test_rows_are_read_alone_by_the_state_machine(rows: list[list[int]]) -> None:
    mask = post_training_loss_mask(np.array(rows), **IDS)
    assert mask.shape == (len(rows), len(rows[0]))
    assert mask.tolist() == [slow_mask(row) for row in rows]
    assert post_training_loss_mask(rows[0], **IDS).tolist() == slow_mask(rows[0])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pack([[11, 1, 13]], 1), "block_size is 1"),
        (lambda: pack([[1], [1.0]], 4), "record 1 holds values of type float64"),  # type: ignore[list-item]
        (lambda: pack([np.zeros((2, 2), dtype=int)], 4), "record 0 has 2 dimensions"),  # type: ignore[list-item]
        (lambda: post_training_loss_mask([1], **{**IDS, "end_id": 0}), r"five different ids.*end_id=0, eos_id=0"),
        (lambda: post_training_loss_mask([1.5], **IDS), "float64; token ids are integers"),
        (lambda: post_training_loss_mask(np.zeros((1, 1, 1), dtype=int), **IDS), "3 dimensions"),
        (
            lambda: post_training_targets(np.ones((2, 3), dtype=int), np.ones((2, 2), dtype=int)),
            r"shape \(2, 3\) and the mask \(2, 2\)",
        ),
    ],
)
def test_wrong_values_are_errors(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert isinstance(caught.value, ChatmillError)


# ---- targets


def test_targets_are_shifted_and_masked() -> None:
    packed = pack([[11, 1, 13, 12, 2, 13], [11, 3, 13, 12, 4, 13]], 7)
    x, y = post_training_targets(packed.input_ids, packed.loss_mask, -7)
    assert x.tolist() == [[11, 1, 13, 12, 2, 13], [11, 3, 13, 12, 4, 13]]
    assert y.tolist() == [[-7, -7, 12, 2, 13, -7], [-7, -7, 12, 4, 13, -7]]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_targets_are_a_copy_in_numpy_and_torch(dtype: str) -> None:
    """What is not trained is overwritten in the targets, and never in the ids that the model reads."""
    mask = np.array([[1, 0, 1, 0]])
    for make, library in ((np.array, np), (torch.tensor, torch)):
        ids, own = make([[5, 6, 7, 8]], dtype=getattr(library, dtype)), make(mask)
        x, y = post_training_targets(ids, own)
        assert (x.tolist(), y.tolist()) == ([[5, 6, 7]], [[-100, 7, -100]])
        assert type(x) is type(y) is type(ids)
        assert y.dtype == getattr(library, {"uint8": "int64"}.get(dtype, dtype))
        inputs_and_targets(ids)[1][...] = 0
        shift_left(ids, 1)[...] = 0
        assert ids.tolist() == [[5, 6, 7, 8]]


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5), st.integers(0, 3))
def test_the_shift_in_its_forms(pieces: list[list[int]], fill: int) -> None:
    offsets = np.cumsum([0, *map(len, pieces)])
    flat = np.array([value for piece in pieces for value in piece], dtype=np.int64)
    expected = [[*piece[1:], fill] if piece else [] for piece in pieces]
    shifted = shift_left_ragged(flat, offsets, fill)
    assert [shifted[a:b].tolist() for a, b in pairwise(offsets)] == expected
    assert [shift_left(np.array(piece, dtype=np.int64), fill).tolist() for piece in pieces] == expected
