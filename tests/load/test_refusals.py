"""Small rules of loaders and collators, each by itself: what is refused, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError
from chatmill.load.boundary_keys import Needs
from chatmill.load.config import TrainingConfig
from chatmill.load.episode_rows import EpisodeRows, long_episodes
from chatmill.load.episodes import GPTEpisodeDataLoader, _refuse_unfit
from chatmill.load.hybrid_trial import STARTS, TOKENS, _isolates
from chatmill.load.packed_batch import PackedBatch
from chatmill.load.placement import named_device
from chatmill.load.row_buffer import RowBuffer
from chatmill.load.stream_blocks import StreamBlockLoader, StreamBlocks
from chatmill.pack.stream import pack_post_training_stream
from chatmill.store.episodes import EpisodeDataset
from tests.load.packed_features import PACKED, collate
from tests.load.sets import Item, items, write_set

STREAM = pack_post_training_stream(
    [[11, 3, 13, 12, 7, 8, 13]], block_size=9, system_id=10, user_id=11, assistant_id=12, end_id=13, eos_id=0
)
TREE = {"input_ids": [1, 2, 3, 2, 5], "position_ids": [0, 1, 2, 1, 2], "ends": [5, 3, 3, 5, 5]}


@pytest.mark.parametrize("option", ["return_cu_seqlens", "return_seq_idx"])
def test_lengths_say_nothing_of_branches(option: str) -> None:
    assert "document_mask" in collate([TREE], return_document_mask=True)
    with pytest.raises(ConfigError, match="branches of trees are none"):
        collate([TREE], return_document_mask=True, **{option: True})


def test_a_trial_notices_documents_that_differ_from_themselves_alone() -> None:
    """The logits tell the length of the row and nothing else: no document moves another, and none is as alone."""

    class Fake:
        dtype = torch.float32

        def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=torch.full((1, input_ids.shape[1], 3), float(input_ids.shape[1])))

    ids, other = torch.zeros(1, TOKENS, dtype=torch.int64), torch.ones(1, STARTS[1], dtype=torch.int64)
    assert not _isolates(Fake(), ids, other, Needs.of_recurrent(frozenset()))


def test_block_masks_are_made_on_the_device_of_the_model_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(_attn_implementation="flex_attention", model_type="llama")
    model = SimpleNamespace(config=config, device="cpu", dtype=torch.float32)
    assert collate(PACKED, model=model)["attention_mask"].shape == (2, 1, 5, 5)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    with pytest.raises(ConfigError, match="does not travel between processes"):
        collate(PACKED, model=model)


def test_an_episode_of_just_the_fewest_tokens_may_be_too_long(tmp_path: Path) -> None:
    made = [Item(ids=list(range(size)), weights=[1] * size) for size in (7, 8, 9)]
    rows = EpisodeRows(
        EpisodeDataset(write_set(tmp_path, made)), TrainingConfig(batch_size=1, block_size=4, episode_min_tokens=8)
    )
    assert long_episodes(rows).tolist() == [1, 2]


def test_rows_that_no_rank_gets_are_counted_in_epochs_alone(tmp_path: Path) -> None:
    write_set(tmp_path, items(7))
    for mode, left_out in (("epoch", 1), ("random", 0)):
        config = {"batch_size": 3, "block_size": 8, "pad_token_id": 0, "batch_sampling_mode": mode}
        loader = GPTEpisodeDataLoader(config, dataset_dir=tmp_path)
        assert loader.data_report()["rows_left_out"] == left_out


def test_a_stream_has_one_split_and_no_target_at_the_start_of_a_document() -> None:
    with pytest.raises(ConfigError, match=r"no split 'val' \(there is: train\)$"):
        StreamBlockLoader(STREAM, batch_size=1, eos_id=0).get_batch("val")
    block: Any = SimpleNamespace(
        input_ids=np.array([[5, 0, 6, 7]]),
        loss_mask=np.ones((1, 4), np.uint8),
        injected=np.array([0]),
        tokens=np.array([4]),
    )
    buffer = RowBuffer(1, 3, pad_id=0, weights=np.dtype(np.uint8), pin=False)
    buffer.clear()
    StreamBlocks(block, np.array([0]), 0, isolate=True).lay(buffer, 0, np.array([0]), np.array([0]))
    assert buffer.weights is not None
    assert buffer.weights.tolist() == [[0, 1, 0, 1]]


def test_data_that_batches_of_tokens_cannot_hold() -> None:
    for sides, pictures, words in ((True, False, "people compared"), (False, True, "holds pictures")):
        dataset: Any = SimpleNamespace(folder="set/train", has_sides=sides, has_pictures=pictures)
        with pytest.raises(ConfigError, match=words):
            _refuse_unfit(dataset)


def test_a_packed_batch_that_lost_the_lengths_of_its_rows() -> None:
    with pytest.raises(ConfigError, match="lost the lengths of its rows"):
        _ = PackedBatch(*(torch.zeros(1, 3, dtype=torch.int64) for _ in range(4))).segments


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert named_device("cuda").type == named_device("cuda:0").type == "cuda"
    with pytest.raises(ConfigError, match="there are 1 GPUs, counted from 0"):
        named_device("cuda:1")
