"""The post-training mode of spec 2: transcripts to targets, one pass, skipped blocks, and the warmup."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, DataError
from chatmill.load.row_buffer import RowBuffer
from chatmill.load.stream_blocks import StreamBlockLoader, StreamBlocks
from chatmill.pack.stream import PackedStream, pack_post_training_stream
from chatmill.train.losses import token_losses
from chatmill.train.options import TrainOptions
from chatmill.train.trainer import _Run, fit
from tests.load.sets import write_set
from tests.train.tiny import IDS, loader_over, numbered, small_items, tiny_model

LONG = [11, *[2] * 30, 13, 12, 7, 13]
"""A user span longer than two blocks: nothing of it trains."""
SHORT = [11, 3, 13, 12, 7, 8, 13]


def stream(records: list[list[int]], block_size: int = 9) -> PackedStream:
    return pack_post_training_stream(records, block_size=block_size, **IDS)


def loader_of(packed: PackedStream, batch_size: int = 1, **options: Any) -> StreamBlockLoader:
    return StreamBlockLoader(packed, batch_size=batch_size, eos_id=0, **options)


def numbers_of(batches: Iterable[Any]) -> list[int]:
    """What is asked in the rows that train."""
    return [int(row[1]) for batch in batches for row, own in zip(batch.x, batch.mask, strict=True) if own.any()]


def test_batches_are_shifted_and_masked_targets_are_minus_100() -> None:
    loader = loader_of(stream([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]]))
    assert (len(loader), loader.skipped) == (1, 1)
    sample = loader.sample(0)
    assert sample["input_ids"].tolist() == [10, 1, 13, 11, 13, 12, 7, 13, 0]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]
    x, y, mask, starts = loader.get_batch()
    assert x.tolist() == [[10, 1, 13, 11, 13, 12, 7, 13]]
    assert y.tolist() == [[-100, -100, -100, -100, 12, 7, 13, -100]]
    assert mask.tolist() == [[0, 0, 0, 0, 1, 1, 1, 0]]
    assert starts.tolist() == [[0]]
    with pytest.raises(StopIteration):
        loader.get_batch()
    with pytest.raises(ConfigError, match=r"no split 'val' \(there is: train\)$"):
        loader.get_batch("val")


def test_blocks_without_targets_are_skipped_and_counted() -> None:
    packed = stream([LONG, SHORT, LONG, SHORT, SHORT])
    trains = [bool(mask[1:].any()) for mask in packed.loss_mask]
    loader = loader_of(packed, 2)
    assert loader.skipped == trains.count(False) > 0
    assert loader.kept.tolist() == [block for block, yes in enumerate(trains) if yes]
    assert len(list(loader)) == len(loader)
    with pytest.raises(DataError, match="none of the"):
        loader_of(stream([LONG]))
    report = loader_of(stream([LONG, SHORT, [11, 3, 13, 12, *[7] * 20, 13]])).data_report()
    assert (report["assistant_tokens"], report["trained_tokens"]) == (3 + 4 + 22, 4)
    assert report["lost_at_edges"] == pytest.approx(25 / 29)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_blocks_and_the_state_is_global(ranks: int) -> None:
    loaders = [loader_of(numbered(), 2, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert len({len(loader) for loader in loaders}) == 1
    seen = numbers_of(loader.get_batch() for loader in loaders)
    state = json.loads(json.dumps(loaders[-1].state_dict()))
    seen += numbers_of(loader.get_batch() for _ in range(len(loaders[0]) - 1) for loader in loaders)
    assert seen == list(range(20, 41))
    alone = loader_of(numbered(), 2)
    alone.load_state_dict(state)
    assert numbers_of(alone) == list(range(20 + 2 * ranks, 41))
    with pytest.raises(ConfigError, match="stream blocks: the state belongs to another dataset"):
        loader_of(stream([SHORT])).load_state_dict(state)


def test_conversations_of_a_block_do_not_see_each_other_unless_asked() -> None:
    model = tiny_model(initializer_range=0.5).double().eval()
    first, second = ([11, n, n, 13, 12, n, 13] for n in (40, 41))

    def loss_of_first(packed: PackedStream, isolate: bool) -> float:
        loader = loader_of(packed, isolate=isolate)
        batch = _Run(model, loader, None, TrainOptions())._batch(loader.get_batch())
        batch.labels[:, :-8] = -100
        with torch.no_grad():
            return token_losses(model(**batch.inputs).logits, batch.labels).sum().item()

    both = stream([second, first], block_size=16)
    alone = loss_of_first(stream([first], block_size=8), isolate=True)
    assert loss_of_first(both, isolate=True) == pytest.approx(alone, abs=1e-9)
    assert abs(loss_of_first(both, isolate=False) - alone) > 1e-3


def test_no_target_is_at_the_start_of_a_document() -> None:
    columns = {"input_ids": [[5, 0, 6, 7]], "loss_mask": [[1] * 4], "injected": [0], "tokens": [4]}
    block: Any = SimpleNamespace(**{name: np.array(values) for name, values in columns.items()})
    buffer = RowBuffer(1, 3, pad_id=0, weights=np.dtype(np.uint8), pin=False)
    buffer.clear()
    StreamBlocks(block, np.array([0]), 0, isolate=True).lay(buffer, 0, np.array([0]), np.array([0]))
    assert buffer.weights is not None
    assert buffer.weights.tolist() == [[0, 1, 0, 1]]


def test_the_mode_makes_one_pass_and_no_more() -> None:
    records = [[11, n, 13, 12, n, 13] for n in range(20, 41)]
    packed = stream([LONG, *records], block_size=7)
    loader = loader_of(packed, 2)
    assert loader.skipped > 0
    result = fit(tiny_model(), loader, post_training=True, log_every=1, accumulation=3, steps=1000)
    assert result.data["blocks_skipped"] == loader.skipped
    assert result.step == 4  # 11 batches, whatever steps says
    trained = sum(values["tokens"] for values in result.history)
    assert trained == 3 * len(records) == int(packed.loss_mask[:, 1:].sum())


def test_a_dataset_of_episodes_is_read_once_and_whole(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(21))
    episodes = fit(tiny_model(), loader_over(tmp_path, epoch_drop_last=False), post_training=True, steps=1000)
    assert episodes.step == 6
    for options, says in (
        ({}, "sees every row once"),
        ({"use_loss_mask": False, "pack": True}, "trains every token"),
        ({"batch_sampling_mode": "random", "epoch_drop_last": False}, "never ends"),
    ):
        with pytest.raises(ConfigError, match=says):
            fit(tiny_model(), loader_over(tmp_path, **options), post_training=True, steps=3)
