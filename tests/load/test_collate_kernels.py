"""What the collator gives for other attention kernels, and positions from starts or tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from chatmill.load.collate import get_pos_ids_for_packed_sequence
from chatmill.load.document_masks import dense_document_mask, ends_of, flex_document_mask, mask_mod
from tests.load.packed_features import EOS, collate, feature_lists

# ---- other kernels


@given(feature_lists())
@settings(max_examples=50)
def test_all_mask_forms_say_the_same(features: list[dict[str, Any]]) -> None:
    batch = collate(features, return_seq_idx=True, return_document_mask=True)
    seq_idx, mask = batch["seq_idx"], batch["document_mask"]
    rows, width = seq_idx.shape
    allowed = torch.zeros(rows, width, width, dtype=torch.bool)
    for r in range(rows):
        for q in range(width):
            for k in range(q + 1):
                allowed[r, q, k] = bool(seq_idx[r, q] == seq_idx[r, k])
    assert mask.shape == (rows, 1, width, width)
    assert mask.dtype == torch.float32
    assert torch.equal(mask[:, 0] == 0, allowed)
    assert torch.equal(mask[:, 0] == torch.finfo(torch.float32).min, ~allowed)
    index = torch.arange(width)
    mod = mask_mod(ends_of(seq_idx))
    by_mod = mod(torch.arange(rows)[:, None, None], torch.tensor(0), index[:, None], index[None, :])
    assert torch.equal(by_mod, allowed)


# ---- get_pos_ids_for_packed_sequence


def test_positions_from_tokens() -> None:
    x = torch.tensor([[5, 6, EOS, EOS, 7, 8], [EOS, 5, 6, 7, 8, EOS]])
    after = get_pos_ids_for_packed_sequence(x, token_id=EOS)
    assert after.tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert after.dtype == torch.int64
    at = get_pos_ids_for_packed_sequence(x, token_id=EOS, eos=False)
    assert at.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize(
    "starts",
    [
        [[0, 2, 4], [0]],
        [np.array([0, 2, 4]), np.array([0])],
        [torch.tensor([0, 2, 4]), torch.tensor([0])],
        torch.tensor([[0, 2, 4], [0, -1, -1]]),
        np.array([[0, 2, 4], [0, -1, -1]], dtype=np.int32),
    ],
    ids=["lists", "arrays", "tensors", "padded tensor", "padded array"],
)
def test_positions_from_starts(starts: Any) -> None:
    x = torch.full((2, 5), EOS)
    positions = get_pos_ids_for_packed_sequence(x, token_id=EOS, document_starts=starts)
    assert positions.tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]


def test_positions_need_starts_or_a_token() -> None:
    x = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="document_starts, or the token_id"):
        get_pos_ids_for_packed_sequence(x)
    with pytest.raises(ValueError, match=r"row 0: entry 1 is 4"):
        get_pos_ids_for_packed_sequence(x, document_starts=[[0, 4]])
    with pytest.raises(ValueError, match=r"not of shape \(4,\)"):
        get_pos_ids_for_packed_sequence(x[0], token_id=1)


def test_the_flex_mask_is_a_block_mask() -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    features = [{"input_ids": list(range(300)), "document_starts": [0, 128, 200]}] * 2
    batch = collate(features, return_document_mask="flex", return_seq_idx=True)
    assert isinstance(batch["document_mask"], BlockMask)
    assert batch["document_mask"].shape == (2, 1, 300, 300)
    # Blocks of 128: the first document fills block 0 and is unseen by the others; the rest is masked in part.
    assert batch["document_mask"].to_dense()[0, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    dense = create_mask(mask_mod(ends_of(batch["seq_idx"])), 2, 1, 300, 300, device="cpu")
    assert torch.equal(dense, dense_document_mask(batch["seq_idx"]) == 0)
    assert flex_document_mask(batch["seq_idx"]).shape == (2, 1, 300, 300)
