"""The post-training mode of spec 2: transcripts to targets, one pass, skipped blocks, and the warmup."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, DataError
from chatmill.load.row_buffer import RowBuffer
from chatmill.load.stream_blocks import StreamBlockLoader, StreamBlocks
from chatmill.pack.stream import PackedStream, pack_post_training_stream, post_training_loss_mask
from chatmill.train.losses import token_losses
from chatmill.train.options import TrainOptions
from chatmill.train.trainer import _Run, fit
from tests.load.sets import write_set
from tests.train.tiny import loader_over, small_items, tiny_model

IDS = {"system_id": 10, "user_id": 11, "assistant_id": 12, "end_id": 13, "eos_id": 0}
LONG = [11, *[2] * 30, 13, 12, 7, 13]
"""A user span longer than two blocks: nothing of it trains."""
SHORT = [11, 3, 13, 12, 7, 8, 13]


def stream(records: list[list[int]], block_size: int = 9) -> PackedStream:
    return pack_post_training_stream(records, block_size=block_size, **IDS)


def test_batches_are_shifted_and_masked_targets_are_minus_100() -> None:
    packed = stream([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]])
    loader = StreamBlockLoader(packed, batch_size=1, eos_id=0)
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


def test_blocks_without_targets_are_skipped_and_counted() -> None:
    packed = stream([LONG, SHORT, LONG, SHORT, SHORT])
    trains = [bool(mask[1:].any()) for mask in packed.loss_mask]
    loader = StreamBlockLoader(packed, batch_size=2, eos_id=0)
    assert loader.skipped == trains.count(False) > 0
    assert loader.kept.tolist() == [block for block, yes in enumerate(trains) if yes]
    given = [batch.x for batch in loader]
    assert len(given) == len(loader)
    with pytest.raises(DataError, match="none of the"):
        StreamBlockLoader(stream([LONG]), batch_size=2, eos_id=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_blocks_and_the_state_is_global(ranks: int) -> None:
    packed = stream([[11, n, 13, 12, n, 13] for n in range(20, 41)], block_size=7)
    loaders = [StreamBlockLoader(packed, batch_size=2, eos_id=0, rank=r, world_size=ranks) for r in range(ranks)]
    assert len({len(loader) for loader in loaders}) == 1
    seen: list[int] = []
    for step in range(len(loaders[0])):
        batches = [loader.get_batch() for loader in loaders]
        seen += [int(row[1]) for batch in batches for row, own in zip(batch.x, batch.mask, strict=True) if own.any()]
        if step == 0:
            state = json.loads(json.dumps(loaders[-1].state_dict()))
    assert seen == list(range(20, 41))
    alone = StreamBlockLoader(packed, batch_size=2, eos_id=0)
    alone.load_state_dict(state)
    rest = [int(row[1]) for batch in alone for row, own in zip(batch.x, batch.mask, strict=True) if own.any()]
    assert rest == list(range(20 + 2 * ranks, 41))
    other = StreamBlockLoader(stream([SHORT]), batch_size=2, eos_id=0)
    with pytest.raises(ConfigError, match="stream blocks: the state belongs to another dataset"):
        other.load_state_dict(state)


def test_conversations_of_a_block_do_not_see_each_other_unless_asked() -> None:
    model = tiny_model(initializer_range=0.5).double().eval()
    first, second = ([11, n, n, 13, 12, n, 13] for n in (40, 41))
    alone = stream([first], block_size=8)
    both = stream([second, first], block_size=16)
    sums = {}
    for name, packed, isolate in (("alone", alone, True), ("both", both, True), ("seen", both, False)):
        loader = StreamBlockLoader(packed, batch_size=1, eos_id=0, isolate=isolate)
        batch = _Run(model, loader, None, TrainOptions())._batch(loader.get_batch())
        own = batch.labels.clone()
        own[:, : -8 if name != "alone" else 0] = -100
        with torch.no_grad():
            sums[name] = token_losses(model(**batch.inputs).logits, own).sum().item()
    assert sums["both"] == pytest.approx(sums["alone"], abs=1e-9)
    assert abs(sums["seen"] - sums["alone"]) > 1e-3


def test_the_mode_makes_one_pass_and_no_more() -> None:
    records = [[11, n, 13, 12, n, 13] for n in range(20, 41)]
    packed = stream([LONG, *records], block_size=7)
    loader = StreamBlockLoader(packed, batch_size=2, eos_id=0)
    assert loader.skipped > 0
    result = fit(tiny_model(), loader, post_training=True, log_every=1, accumulation=3, steps=1000)
    assert result.data["blocks_skipped"] == loader.skipped
    assert result.step == 4  # 11 batches, whatever steps says
    trained = sum(values["tokens"] for values in result.history)
    assert trained == 3 * len(records) == int(packed.loss_mask[:, 1:].sum())
    for block, mask in zip(packed.input_ids, packed.loss_mask, strict=True):
        assert np.array_equal(mask, post_training_loss_mask(block, **IDS))


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


def test_the_report_counts_what_is_lost() -> None:
    packed = stream([LONG, SHORT, [11, 3, 13, 12, *[7] * 20, 13]])
    report: dict[str, Any] = StreamBlockLoader(packed, batch_size=1, eos_id=0).data_report()
    assert (report["assistant_tokens"], report["trained_tokens"]) == (3 + 4 + 22, 4)
    assert report["lost_at_edges"] == pytest.approx(25 / 29)


def test_a_stream_has_one_split_and_no_target_at_the_start_of_a_document() -> None:
    with pytest.raises(ConfigError, match=r"no split 'val' \(there is: train\)$"):
        StreamBlockLoader(stream([SHORT]), batch_size=1, eos_id=0).get_batch("val")
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
