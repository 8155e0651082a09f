"""Loaders take the rows that a build planned: those that packing at load time gives, and the same in every epoch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, FormatError, UnknownNameError
from chatmill.load import episode_rows
from chatmill.load.episode_rows import PlannedRows
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.hf import to_hf_dataset
from chatmill.load.packed_batch import PackedBatch
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import PackPlan
from tests.load.sets import PAD, Item, items, state_rows, write_set

LENGTH = 16
BASE = {"batch_size": 2, "block_size": 15, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}
STRATEGIES = ["best_fit", "first_fit", "greedy", "in_order"]


def write(directory: Path, train: list[Item], strategy: str = "best_fit", **options: Any) -> list[Item]:
    write_set(directory, train, **options)
    state_rows(directory / "train", LENGTH, strategy)
    return train


def make(directory: Path, **options: Any) -> GPTEpisodeDataLoader:
    names = {"rank", "world_size", "packing_strategy", "planning", "pack", "check", "policy"}
    own = {"pack": True} | {k: v for k, v in options.items() if k in names}
    return GPTEpisodeDataLoader(
        {**BASE, **{k: v for k, v in options.items() if k not in names}}, None, directory, **own
    )


def stored(directory: Path) -> PackPlan:
    found = EpisodeDataset(directory).plan
    assert found is not None
    return found


def joined(pieces: Iterable[list[int]]) -> list[int]:
    return [value for piece in pieces for value in piece]


def uses_plan(loader: GPTEpisodeDataLoader) -> bool:
    return isinstance(loader.episode_rows("train"), PlannedRows)


def epoch_of(loader: GPTEpisodeDataLoader, epoch: int = 0) -> list[PackedBatch]:
    return [loader.get_batch() for _ in range(loader.steps_per_epoch(epoch=epoch))]  # type: ignore[misc]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 3])
def test_the_same_batches_as_packing_at_load_time(tmp_path: Path, strategy: str, world: int) -> None:
    write(tmp_path, items(70, high=LENGTH), strategy, shards=3)
    options: dict[str, Any] = {"epoch_shuffle": False, "epoch_drop_last": False, "world_size": world}
    for rank in range(world):
        by_plan = make(tmp_path, rank=rank, **options)
        here = make(tmp_path, rank=rank, planning="epoch", packing_strategy=strategy, **options)
        assert (uses_plan(by_plan), uses_plan(here)) == (True, False)
        assert by_plan.steps_per_epoch() == here.steps_per_epoch() > 2
        for one, other in zip(epoch_of(by_plan), epoch_of(here), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert np.array_equal(one.tokens, other.tokens)  # type: ignore[arg-type]
            assert torch.equal(one.position_ids, other.position_ids)
            assert torch.equal(one.seq_idx, other.seq_idx)


def test_rows_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a plan was made")

    write(tmp_path, items(40, high=9))
    monkeypatch.setattr(episode_rows, "plan", refuse)
    made = make(tmp_path)
    epoch_of(made)
    epoch_of(made, 1)
    with pytest.raises(AssertionError, match="a plan was made"):
        make(tmp_path, planning="epoch").get_batch()


def rows_of(batches: list[PackedBatch]) -> list[tuple[int, ...]]:
    """Rows without padding, by the tokens that `x` holds."""
    return [tuple(row[:n].tolist()) for b in batches for row, n in zip(b.x, b.tokens.tolist(), strict=True) if n]  # type: ignore[union-attr]


def test_epochs_differ_in_the_order_of_rows_alone(tmp_path: Path) -> None:
    train = write(tmp_path, items(60, high=9))
    made, again = (make(tmp_path, epoch_drop_last=False) for _ in range(2))
    epochs = [rows_of(epoch_of(made, epoch)) for epoch in range(3)]
    assert epochs == [rows_of(epoch_of(again, epoch)) for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    plan = stored(tmp_path)
    laid = [joined(train[number].ids for number in plan.row(row).tolist()) for row in range(len(plan))]
    order = np.random.RandomState(1337).permutation(len(plan))
    assert epochs[0] == [tuple(laid[row][:15]) for row in order.tolist()], "x has all tokens but the last of a full row"


def test_documents_do_not_leak_and_first_tokens_are_no_targets(tmp_path: Path) -> None:
    train = write(tmp_path, items(50, high=7))
    by_first = {item.ids[0]: item for item in train}
    found = []
    for batch in epoch_of(make(tmp_path, epoch_drop_last=False)):
        for row, tokens in enumerate(batch.tokens.tolist()):  # type: ignore[union-attr]
            starts = [s for s in batch.document_starts[row].tolist() if s >= 0] if tokens else []
            for number, start in enumerate(starts):
                item = by_first[int(batch.x[row, start])]
                found.append(item.ids[0])
                end = min(start + len(item.ids), 15)
                assert batch.position_ids[row, start:end].tolist() == list(range(end - start))
                assert set(batch.seq_idx[row, start:end].tolist()) == {number}
                if start:
                    assert batch.mask[row, start - 1] == 0
    assert sorted(found) == sorted(by_first)


@pytest.mark.parametrize(("block_size", "fits"), [(14, False), (15, True), (16, True), (17, False), (31, False)])
def test_a_plan_is_used_where_its_rows_fill_the_block(
    tmp_path: Path, block_size: int, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, items(40, high=9))
    with caplog.at_level(logging.WARNING):
        made = make(tmp_path, block_size=block_size, epoch_drop_last=False)
    assert uses_plan(made) == fits
    assert ("packed anew: its plan has rows of 16 tokens by best_fit" in caplog.text) != fits
    assert sum(int(b.tokens.sum()) for b in epoch_of(made)) > 0  # type: ignore[union-attr]


def test_another_strategy_is_packed_here(tmp_path: Path) -> None:
    write(tmp_path, items(40, high=9), "greedy")
    assert uses_plan(make(tmp_path))
    assert uses_plan(make(tmp_path, packing_strategy="greedy"))
    assert not uses_plan(make(tmp_path, packing_strategy="best_fit"))
    with pytest.raises(UnknownNameError, match="Known: auto, epoch"):
        make(tmp_path, planning="never")


def test_short_episodes_are_left_out_of_their_rows(tmp_path: Path) -> None:
    train = write(tmp_path, items(60, low=1, high=9))
    made = make(tmp_path, episode_min_tokens=4, epoch_shuffle=False, epoch_drop_last=False)
    assert uses_plan(made)
    plan = stored(tmp_path)
    wanted = []
    for row in range(len(plan)):
        kept = [train[number].ids for number in plan.row(row).tolist() if len(train[number].ids) >= 4]
        wanted += [tuple(joined(kept)[:15])] if kept else []
    assert len(wanted) > 5
    assert sum(len(item.ids) < 4 for item in train) > 5
    assert rows_of(epoch_of(made)) == wanted


def test_without_pack_a_plan_changes_nothing(tmp_path: Path) -> None:
    train = items(20, high=9)
    write_set(tmp_path / "plain", train)
    write(tmp_path / "planned", train)
    one, other = (make(tmp_path / name, pack=False) for name in ("plain", "planned"))
    for _ in range(8):
        assert all(torch.equal(a, b) for a, b in zip(one.get_batch(), other.get_batch(), strict=True))


def test_a_state_goes_on_at_every_position_and_knows_its_plan(tmp_path: Path) -> None:
    write(tmp_path, items(30, high=9))
    made = make(tmp_path)
    states, batches = [], []
    for _ in range(2 * made.steps_per_epoch()):
        states.append(json.loads(json.dumps(made.state_dict())))
        batches.append(made.get_batch())
    for number, state in enumerate(states):
        resumed = make(tmp_path)
        resumed.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(resumed.get_batch(), batches[number], strict=True))
    with pytest.raises(ConfigError, match="the state was taken with pack_plan"):
        make(tmp_path, planning="epoch").load_state_dict(states[1])
    state_rows(tmp_path / "train", LENGTH, "greedy")
    with pytest.raises(ConfigError, match="the state was taken with pack_plan"):
        make(tmp_path).load_state_dict(states[1])


def test_rows_that_cannot_be_made_again_are_an_error_at_opening(tmp_path: Path) -> None:
    write(tmp_path, [Item(ids=[n, n], weights=[0, 1]) for n in range(1, 20)])
    path = tmp_path / "train" / "episodes.json"
    path.write_text(path.read_text().replace('"count": 3', '"count": 4'))
    with pytest.raises(FormatError, match=r"states 4 packed rows of 16 tokens by best_fit, and the planner makes 3"):
        make(tmp_path)
    make(tmp_path, pack=False)
    make(tmp_path, planning="epoch")


def test_rows_for_hugging_face_trainers(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    train = write(tmp_path, items(40, high=9), "greedy")
    rows = to_hf_dataset(tmp_path, pack=True)
    plan = stored(tmp_path)
    assert len(rows) == len(plan)
    for number, row in enumerate(rows):
        episodes = [train[episode] for episode in plan.row(number).tolist()]
        assert row["input_ids"] == joined(item.ids for item in episodes)
        assert row["seq_lengths"] == [len(item.ids) for item in episodes]
        labels = [[i if w > 0 else -100 for i, w in zip(e.ids, e.weights, strict=True)] for e in episodes]
        assert row["labels"] == joined([-100, *one[1:]] for one in labels)
    assert rows["input_ids"][:] == to_hf_dataset(tmp_path, pack=True, max_length=16, packing_strategy="greedy",
                                                 planning="epoch")["input_ids"][:]  # fmt: skip
    with pytest.raises(ConfigError, match="pack=True needs max_length"):
        to_hf_dataset(tmp_path, pack=True, planning="epoch")
