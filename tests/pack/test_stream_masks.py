"""Masks and targets of the blocks of the post-training stream."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.shift import inputs_and_targets, shift_left, shift_left_ragged
from chatmill.errors import ChatmillError
from chatmill.pack.stream import (
    post_training_loss_mask,
    post_training_targets,
)
from tests.pack.streams import IDS, pack, slow_mask, soup, tokens


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


def test_mask_is_uint8_and_takes_any_integers() -> None:
    ids = np.array([11, 1, 13, 12, 2, 13], dtype=np.uint32)
    mask = post_training_loss_mask(ids, **IDS)
    assert mask.dtype == np.uint8
    assert mask.tolist() == [0, 0, 0, 1, 1, 1]


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


def test_the_soup_holds_trained_spans_and_unbalanced_ones() -> None:
    """The generators above must reach the interesting cases, or the properties say nothing."""
    rng = np.random.RandomState(0)
    rows = rng.choice([10, 11, 12, 13, 13, 0, 20, 21], size=(2000, 12), p=[0.05, 0.2, 0.2, 0.1, 0.2, 0.05, 0.1, 0.1])
    mask = post_training_loss_mask(rows, **IDS)
    assert mask.tolist() == [slow_mask(row) for row in rows.tolist()]
    assert 200 < int(mask.any(axis=1).sum()) < 1800


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


def test_unsigned_ids_give_signed_targets() -> None:
    import torch

    ids, mask = np.array([5, 6, 7], dtype=np.uint16), np.array([1, 0, 1], dtype=np.uint8)
    assert inputs_and_targets(ids, mask)[1].tolist() == [-100, 7]
    assert inputs_and_targets(torch.tensor([5, 6, 7], dtype=torch.uint8), torch.tensor(mask))[1].tolist() == [
        -100,
        7,
    ]
    assert inputs_and_targets(ids)[1].tolist() == [6, 7]


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
