"""Spec 2, packing, masks and targets: the fast code against slow references that read one token at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
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


OPENING = (SYSTEM, USER, ASSISTANT)
text = st.lists(st.integers(20, 29), max_size=9)


def span(marker: int) -> st.SearchStrategy[list[int]]:
    return text.map(lambda body: [marker, *body, END])


# Well-formed conversations, sometimes with a second system span or two assistants in a row.
conversation = st.lists(st.sampled_from([SYSTEM, USER, ASSISTANT]).flatmap(span), min_size=1, max_size=8).map(
    lambda spans: [token for one in spans for token in one]
)
records = st.lists(st.one_of(soup, conversation, conversation), max_size=6)


def with_eos(raw: list[list[int]]) -> list[list[int]]:
    """One record per eos, each ending in it."""
    result: list[list[int]] = []
    for record in raw:
        closed = record if record and record[-1] == EOS else [*record, EOS]
        piece: list[int] = []
        for token in closed:
            piece.append(token)
            if token == EOS:
                result.append(piece)
                piece = []
    return result


def slow_pack(raw: list[list[int]], block_size: int, drop_last: bool) -> tuple[list[list[int]], dict[str, int]]:
    """The packer of the page, one token at a time: blocks and the report."""
    blocks: list[list[int]] = [[]]
    notes: list[dict[str, int]] = [{"injected": 0, "tokens": 0, "cut": 0, "crowded": 0}]
    left_out = 0
    record_list = with_eos(raw)
    for record in record_list:
        system: list[int] | None = None
        open_system: list[int] | None = None
        in_user = carried = False
        for at, token in enumerate(record):
            if len(blocks[-1]) == block_size:
                blocks.append([])
                notes.append({"injected": 0, "tokens": 0, "cut": 0, "crowded": 0})
                carried = False
            if not blocks[-1] and in_user and token not in (*OPENING, EOS):
                carried = True
                if system is not None and len(system) + 2 <= block_size:
                    blocks[-1] += system
                else:
                    notes[-1]["crowded"] = int(system is not None)
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
                notes[-1]["cut"] = 1
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
    return blocks, {
        "records": len(record_list),
        "blocks": len(blocks),
        "injected": sum(note["injected"] for note in notes),
        "padded": padded,
        "left_out": left_out,
        "records_cut": sum(note["cut"] for note in notes),
        "system_not_injected": sum(note["crowded"] for note in notes),
    }


# ---- blocks


def test_example_one_the_record_ends_where_a_block_is_full_before_its_end_marker() -> None:
    packed = pack([[10, 101, 13, 11, 201, 202, 13, 12, 301, 13]], 5)
    assert packed.input_ids.tolist() == [[10, 101, 13, 11, 201], [10, 101, 13, 11, 202]]
    assert not packed.loss_mask.any()
    assert (packed.lost_at_edges, pack([[11, 2, 13]], 5).lost_at_edges) == (1.0, 0.0)
    assert dict(packed.report) == {
        "records": 1,
        "blocks": 2,
        "injected": 4,
        "padded": 0,
        "left_out": 5,
        "records_cut": 1,
        "system_not_injected": 0,
    }


def test_example_two_the_end_marker_still_lies_inside() -> None:
    packed = pack([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]], 9)
    assert packed.input_ids.tolist() == [[10, 1, 13, 11, 2, 3, 4, 5, 6], [10, 1, 13, 11, 13, 12, 7, 13, 0]]
    assert packed.loss_mask.tolist() == [[0] * 9, [0, 0, 0, 0, 0, 1, 1, 1, 0]]
    assert packed.report.left_out == 0
    assert packed.report.padded == 0
    assert [column.tolist() for column in (packed.starts, packed.injected, packed.tokens)] == [[0, 9], [0, 4], [9, 5]]
    assert (packed.input_ids.dtype, packed.loss_mask.dtype, len(packed)) == (np.int64, np.uint8, 2)


@pytest.mark.parametrize(
    ("raw", "size", "blocks"),
    [
        pytest.param(
            [[11, 1, 2, 3, 4, 13, 12, 5, 13]],
            5,
            [[11, 1, 2, 3, 4], [11, 13, 12, 5, 13], [0] * 5],
            id="without a system span the user marker alone is injected",
        ),
        pytest.param(
            [[10, 1, 13, 11, 2, 13, 12, 3, 13, 10, 4, 13, 10, 5, 11, 6, 7, 13, 12, 8, 13]],
            16,
            [[10, 1, 13, 11, 2, 13, 12, 3, 13, 10, 4, 13, 10, 5, 11, 6], [10, 4, 13, 11, 7, 13, 12, 8, 13] + [0] * 7],
            id="the latest whole system span is injected",
        ),
        pytest.param(
            [[10, 1, 2, 13, 11, 3, 4, 13, 12, 5, 13]],
            5,
            [[10, 1, 2, 13, 11], [11, 3, 4, 13, 12], [5, 13, 0, 0, 0]],
            id="a system span that leaves no room is not",
        ),
        pytest.param(
            [[10, 1, 13, 11, 2, 13, 12, 3, 13, 0, 11, 4, 5, 6, 13, 12, 7, 13]],
            13,
            [[10, 1, 13, 11, 2, 13, 12, 3, 13, 0, 11, 4, 5], [11, 6, 13, 12, 7, 13] + [0] * 7],
            id="eos clears the history",
        ),
        pytest.param(
            [[10, 1, 2, 13, 11, 3, 13, 12, 4, 5, 13]],
            3,
            [[10, 1, 2], [13, 11, 3], [11, 13, 12], [4, 5, 13], [0, 0, 0]],
            id="nothing is injected inside a system or assistant span",
        ),
        pytest.param(
            [[20], [11, 1, 2, 3, 4, 5, 6, 7, 8, 13, 12, 9, 13], [11, 14, 13, 12, 15, 13]],
            4,
            [[20, 0, 11, 1], [11, 2, 3, 4], [11, 14, 13, 12], [15, 13, 0, 0]],
            id="the rest of a cut record is left out",
        ),
        pytest.param(
            [[11, 1, 2, 3, 12, 4, 5, 13]],
            3,
            [[11, 1, 2], [11, 3, 12], [4, 5, 13], [0, 0, 0]],
            id="an interrupted user span is over",
        ),
        pytest.param([[1], [2, 0], [3, 0, 4], [0, 0], []], 9, [[1, 0, 2, 0, 3, 0, 4, 0, 0], [0] * 9], id="eos"),
        pytest.param([], 8, [], id="nothing"),
    ],
)
def test_packing_by_hand(raw: list[list[int]], size: int, blocks: list[list[int]]) -> None:
    packed = pack(raw, size)
    assert packed.input_ids.tolist() == blocks
    assert slow_pack(raw, size, drop_last=False) == (blocks, dict(packed.report))


def test_bad_arguments() -> None:
    for size in (1, 0, -3):
        with pytest.raises(ValueError, match=f"block_size is {size}"):
            pack([[11, 1, 13]], size)
    with pytest.raises(ValueError, match="record 1 holds values of type float64"):
        pack([[1], [1.0]], 4)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="record 0 has 2 dimensions"):
        pack_post_training_stream([np.zeros((2, 2), dtype=int)], block_size=4, **IDS)


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


def mask_of(ids: list[int]) -> list[int]:
    return post_training_loss_mask(ids, **IDS).tolist()


# ---- the loss mask


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([11, 1, 13, 12, 2, 13], [0, 0, 0, 1, 1, 1], id="a pair"),
        pytest.param([11, 13, 12, 13], [0, 0, 1, 1], id="empty spans"),
        pytest.param([10, 5, 13, 11, 1, 13, 12, 2, 13, 0], [0] * 6 + [1] * 3 + [0], id="with a system span"),
        pytest.param([11, 1, 13, 12, 2, 13, 12, 3, 13], [0] * 3 + [1] * 6, id="two assistants after one user"),
        pytest.param([12, 2, 13], [0, 0, 0], id="no user"),
        pytest.param([1, 13, 12, 2, 13], [0] * 5, id="the user marker is in an earlier block"),
        pytest.param([11, 1, 12, 2, 13], [0] * 5, id="the user span never ended"),
        pytest.param([11, 1, 12, 2, 13, 12, 3, 13], [0] * 8, id="it stays incomplete for the next assistant"),
        pytest.param([11, 1, 13, 0, 12, 2, 13], [0] * 7, id="eos resets"),
        pytest.param([11, 1, 13, 10, 2, 13, 12, 2, 13], [0] * 9, id="a system marker resets"),
        pytest.param([11, 1, 13, 11, 2, 12, 2, 13], [0] * 8, id="a new user marker: nothing is complete any more"),
        pytest.param([11, 1, 13, 12, 2], [0] * 5, id="met the end of the block"),
        pytest.param([11, 1, 13, 12, 2, 0], [0] * 6, id="met an eos"),
        pytest.param([11, 1, 13, 12, 2, 12, 3, 13], [0] * 5 + [1] * 3, id="met another assistant marker"),
        pytest.param([11, 1, 13, 12, 2, 11, 3, 13, 12, 4, 13], [0] * 8 + [1] * 3, id="abandoned by a user marker"),
        pytest.param([11, 1, 13, 13, 12, 2, 13, 13], [0, 0, 0, 0, 1, 1, 1, 0], id="an end marker inside nothing"),
        pytest.param([11, 1, 13, 7, 12, 2, 13], [0] * 4 + [1] * 3, id="text between spans"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_mask_by_hand(ids: list[int], expected: list[int]) -> None:
    assert mask_of(ids) == expected
    assert slow_mask(ids) == expected


@settings(max_examples=400)
@given(soup)
def test_mask_equals_the_state_machine(ids: list[int]) -> None:
    assert mask_of(ids) == slow_mask(ids)


@settings(max_examples=200)
@given(st.integers(1, 25), st.data())
def test_rows_are_read_alone(width: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(tokens, min_size=width, max_size=width), min_size=1, max_size=8))
    mask = post_training_loss_mask(np.array(rows), **IDS)
    assert mask.shape == (len(rows), width)
    assert mask.tolist() == [slow_mask(row) for row in rows]


def test_equal_marker_ids_and_wrong_values_are_errors() -> None:
    with pytest.raises(ValueError, match=r"five different ids.*end_id=0, eos_id=0"):
        post_training_loss_mask([1], **{**IDS, "end_id": 0})
    with pytest.raises(ChatmillError, match="float64; token ids are integers"):
        post_training_loss_mask([1.5], **IDS)
    with pytest.raises(ValueError, match="3 dimensions"):
        post_training_loss_mask(np.zeros((1, 1, 1), dtype=int), **IDS)


# ---- targets


def test_targets_are_shifted_and_masked_in_numpy_and_torch() -> None:
    import torch

    packed = pack([[11, 1, 13, 12, 2, 13], [11, 3, 13, 12, 4, 13]], 7)
    x, y = post_training_targets(packed.input_ids, packed.loss_mask)
    assert x.tolist() == [[11, 1, 13, 12, 2, 13], [11, 3, 13, 12, 4, 13]]
    assert y.tolist() == [[-100, -100, 12, 2, 13, -100], [-100, -100, 12, 4, 13, -100]]
    assert isinstance(y, np.ndarray)
    assert y.dtype == np.int64
    tensors = post_training_targets(torch.from_numpy(packed.input_ids), torch.from_numpy(packed.loss_mask), -7)
    assert all(isinstance(t, torch.Tensor) and t.dtype == torch.int64 for t in tensors)
    assert tensors[0].tolist() == x.tolist()
    assert tensors[1].tolist() == np.where(y == -100, -7, y).tolist()
    assert packed.input_ids[0, 0] == 11, "the blocks themselves are not written to"


def test_targets_need_one_mask_value_per_token() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and the mask \(2, 2\)"):
        post_training_targets(np.ones((2, 3), dtype=int), np.ones((2, 2), dtype=int))


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5), st.integers(0, 3))
def test_the_shift_in_its_forms(pieces: list[list[int]], fill: int) -> None:
    offsets = np.cumsum([0, *map(len, pieces)])
    flat = np.array([value for piece in pieces for value in piece], dtype=np.int64)
    expected = [[*piece[1:], fill] if piece else [] for piece in pieces]
    shifted = shift_left_ragged(flat, offsets, fill)
    assert [shifted[a:b].tolist() for a, b in pairwise(offsets)] == expected
    assert [shift_left(np.array(piece, dtype=np.int64), fill).tolist() for piece in pieces] == expected


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_targets_are_a_copy(dtype: str) -> None:
    """What is not trained is overwritten in the targets, and never in the ids that the model reads."""
    import torch

    mask = np.array([[1, 0, 1, 0]])
    for ids in (np.array([[5, 6, 7, 8]], dtype=dtype), torch.tensor([[5, 6, 7, 8]], dtype=getattr(torch, dtype))):
        own = mask if isinstance(ids, np.ndarray) else torch.tensor(mask)
        x, y = inputs_and_targets(ids, own)
        assert (x.tolist(), y.tolist()) == ([[5, 6, 7]], [[-100, 7, -100]])
        assert ids.tolist() == [[5, 6, 7, 8]]
        inputs_and_targets(ids)[1][...] = 0
        shift_left(ids, 1)[...] = 0
        assert ids.tolist() == [[5, 6, 7, 8]]
