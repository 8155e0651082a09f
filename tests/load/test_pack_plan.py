"""Loaders and the rows that a build states: its rows without shuffling, its strategy by default."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.errors import ConfigError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.pack.plan import Plan
from chatmill.store.episodes import EpisodeDataset
from tests.load.sets import PAD, Item, items, state_rows, write_set

LENGTH = 16
BASE = {"batch_size": 2, "block_size": 15, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}


def write(directory: Path, train: list[Item], strategy: str = "best_fit", **options: Any) -> list[Item]:
    write_set(directory, train, **options)
    state_rows(directory / "train", LENGTH, strategy)
    return train


def make(directory: Path, *, pack: bool = True, packing_strategy: str | None = None, **config: Any) -> Any:
    return GPTEpisodeDataLoader({**BASE, **config}, None, directory, pack=pack, packing_strategy=packing_strategy)


def stored(directory: Path) -> Plan:
    found = EpisodeDataset(directory).plan
    assert found is not None
    return found


def joined(pieces: Iterable[list[int]]) -> list[int]:
    return [value for piece in pieces for value in piece]


def rows_of(loader: Any) -> list[tuple[int, ...]]:
    """Rows of an epoch without padding, by the tokens that `x` holds."""
    batches: list[PackedBatch] = [loader.get_batch() for _ in range(loader.steps_per_epoch())]
    return [tuple(row[:n].tolist()) for b in batches for row, n in zip(b.x, b.tokens.tolist(), strict=True) if n]  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit", "greedy"])
def test_without_shuffling_the_rows_are_those_of_the_build(tmp_path: Path, strategy: str) -> None:
    train = write(tmp_path, items(70, high=LENGTH), strategy, shards=3)
    options: dict[str, Any] = {"epoch_shuffle": False, "epoch_drop_last": False}
    plan = stored(tmp_path)
    wanted = [joined(train[number].ids for number in plan.bin(row).tolist()) for row in range(len(plan))]
    assert rows_of(make(tmp_path, **options)) == [tuple(row[:15]) for row in wanted], "x lacks the last of a full row"
    assert rows_of(make(tmp_path, packing_strategy=strategy, **options)) == rows_of(make(tmp_path, **options))


def test_without_pack_rows_that_are_stated_change_nothing(tmp_path: Path) -> None:
    train = items(20, high=9)
    write_set(tmp_path / "plain", train)
    write(tmp_path / "planned", train)
    one, other = (make(tmp_path / name, pack=False) for name in ("plain", "planned"))
    for _ in range(8):
        assert all(torch.equal(a, b) for a, b in zip(one.get_batch(), other.get_batch(), strict=True))


def test_a_state_goes_on_at_every_position_and_knows_its_strategy(tmp_path: Path) -> None:
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
    state_rows(tmp_path / "train", LENGTH, "greedy")
    with pytest.raises(ConfigError, match="the state was taken with packing_strategy = 'best_fit'"):
        make(tmp_path).load_state_dict(states[1])
    make(tmp_path, packing_strategy="best_fit").load_state_dict(states[1])


def test_rows_for_hugging_face_trainers(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    train = write(tmp_path, items(40, high=9), "greedy")
    rows = to_hf_dataset(tmp_path, pack=True)
    plan = stored(tmp_path)
    assert len(rows) == len(plan)
    for number, row in enumerate(rows):
        episodes = [train[episode] for episode in plan.bin(number).tolist()]
        assert row["input_ids"] == joined(item.ids for item in episodes)
        assert row["seq_lengths"] == [len(item.ids) for item in episodes]
        labels = [[i if w > 0 else -100 for i, w in zip(e.ids, e.weights, strict=True)] for e in episodes]
        assert row["labels"] == joined([-100, *one[1:]] for one in labels)
    write_set(tmp_path / "plain", train)
    with pytest.raises(ConfigError, match="pack=True needs max_length"):
        to_hf_dataset(tmp_path / "plain", pack=True)
