"""Packed rows: every document once, whole, with its boundaries, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError
from chatmill.load.collate import DataCollatorForCausalLM, get_pos_ids_for_packed_sequence
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.store.episodes import EpisodeDataset
from tests.load.sets import PAD, Item, items, state_rows, write_set

BASE = {"batch_size": 2, "block_size": 15, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}


def make(directory: Path, **options: object) -> GPTEpisodeDataLoader:
    names = {"rank", "world_size", "packing_strategy"}
    own = {k: v for k, v in options.items() if k in names}
    config = {**BASE, **{k: v for k, v in options.items() if k not in names}}
    return GPTEpisodeDataLoader(config, None, directory, pack=True, **own)


def check_rows(packed: PackedBatch, episodes: dict[int, Item], width: int, *, masks: bool = True) -> list[int]:
    """Walk every row document by document; returns the first ids of the documents found."""
    x, y, mask, starts = packed
    found = []
    for r in range(len(x)):
        begins = [s for s in starts[r].tolist() if s >= 0]
        assert begins == sorted(set(begins))
        assert begins[0] == 0
        ids, weights = [], []
        for s in begins:
            if packed.tokens[r] == 0:
                break
            item = episodes[int(x[r, s])]
            found.append(item.ids[0])
            kept = item.ids[:width]
            assert len(ids) == s
            ids += kept
            own = item.weights[: len(kept)] if masks else [1.0] * len(kept)
            weights += [0.0, *own[1:]]
        assert len(ids) <= width
        ids += [PAD] * (width - len(ids))
        weights += [0.0] * (width - len(weights))
        assert x[r].tolist() == ids[:-1]
        assert y[r].tolist() == ids[1:]
        assert mask[r].tolist() == weights[1:]
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    count=st.integers(1, 40),
    high=st.integers(2, 30),
    world=st.integers(1, 3),
    shuffle=st.booleans(),
    masks=st.booleans(),
    strategy=st.sampled_from(["best_fit", "first_fit", "greedy"]),
    seed=st.integers(0, 1000),
)
def test_every_episode_once_per_epoch_over_all_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    high: int,
    world: int,
    shuffle: bool,
    masks: bool,
    strategy: str,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("set")
    train = items(count, seed=seed, high=high)
    write_set(directory, train, shards=min(2, count))
    options = {"epoch_drop_last": False, "epoch_shuffle": shuffle, "use_loss_mask": masks, "packing_strategy": strategy}
    ranks = [make(directory, rank=r, world_size=world, **options) for r in range(world)]
    by_first = {item.ids[0]: item for item in train}
    for epoch in range(2):
        found = []
        widths = set()
        for _ in range(ranks[0].steps_per_epoch(epoch=epoch)):
            for one in ranks:
                got = one.get_batch()
                assert isinstance(got, PackedBatch)
                widths.add(tuple(t.shape for t in got))
                found += check_rows(got, by_first, 16, masks=masks)
        assert sorted(found) == [item.ids[0] for item in train]
        assert len(widths) == 1


def test_epochs_are_planned_anew_and_the_same_everywhere(tmp_path: Path) -> None:
    write_set(tmp_path, items(60, high=9))
    one, other = make(tmp_path), make(tmp_path)
    epochs: list[list[list[int]]] = [[], [], []]
    while one.epoch() < 2 or len(epochs[2]) < 3:
        got = one.get_batch()
        assert all(torch.equal(a, b) for a, b in zip(got, other.get_batch(), strict=True))
        epochs[one.epoch()].append(got[0].tolist())
    assert epochs[0][:3] != epochs[1][:3] != epochs[2][:3]


def test_rows_are_shuffled_and_well_filled(tmp_path: Path) -> None:
    write_set(tmp_path, items(200, high=14))
    made = make(tmp_path)
    batches = [made.get_batch() for _ in range(made.steps_per_epoch())]
    tokens = np.concatenate([b.tokens for b in batches])
    documents = np.concatenate([(b[3] >= 0).sum(1).numpy() for b in batches])
    assert tokens.mean() / 15 > 0.97
    assert abs(documents[: len(documents) // 2].mean() - documents[len(documents) // 2 :].mean()) < 0.5


def test_boundaries_equal_those_of_the_packing_collator(tmp_path: Path) -> None:
    train = items(61, high=9)
    write_set(tmp_path, train)
    made = make(tmp_path, epoch_drop_last=False, batch_size=4)
    collator = DataCollatorForCausalLM(
        _Tokenizer(), return_cu_seqlens=True, return_seq_idx=True, return_document_mask=True,
        padding="max_length", max_length=15, cu_seqlens_size=70,
    )  # fmt: skip
    compared = 0
    for _ in range(made.steps_per_epoch()):
        got = made.get_batch()
        assert isinstance(got, PackedBatch)
        if (got.tokens == 0).any():
            continue
        features = [
            {"input_ids": got.x[r, : got.tokens[r]].tolist(), "document_starts": [s for s in row if s >= 0]}
            for r, row in enumerate(got.document_starts.tolist())
        ]
        wanted = collator(features)
        assert torch.equal(got.x, wanted["input_ids"])
        assert torch.equal(got.position_ids, wanted["position_ids"])
        assert torch.equal(got.seq_idx, wanted["seq_idx"])
        assert torch.equal(got.cu_seqlens(70), wanted["cu_seqlens"])
        assert got.max_seqlen == int(wanted["max_seqlen"])
        assert torch.equal(got.dense_mask(), wanted["document_mask"])
        compared += 1
    assert compared >= 2


class _Tokenizer:
    eos_token_id = PAD
    pad_token_id = PAD


def test_rows_of_padding_have_no_document_but_can_be_positioned(tmp_path: Path) -> None:
    write_set(tmp_path, items(3, low=12, high=14))
    made = make(tmp_path, epoch_drop_last=False, batch_size=5)
    got = made.get_batch()
    assert isinstance(got, PackedBatch)
    assert got.tokens.tolist()[3:] == [0, 0]
    assert got.document_starts[:, 0].tolist() == [0] * 5
    assert float(got.mask[3:].sum()) == 0
    assert got.position_ids[4].tolist() == list(range(15))
    positions = get_pos_ids_for_packed_sequence(got.x, document_starts=got.document_starts)
    assert positions.shape == (5, 15)


def test_a_document_of_one_token_in_the_last_place_does_not_begin_in_x(tmp_path: Path) -> None:
    train = [Item(ids=list(range(1000, 1015)), weights=[1] * 15), Item(ids=[2000], weights=[1])]
    write_set(tmp_path, train)
    got = make(tmp_path, episode_min_tokens=1, batch_size=1, epoch_shuffle=False).get_batch()
    assert got[0].tolist() == [list(range(1000, 1015))]
    assert int(got[1][0, -1]) == 2000
    assert float(got[2][0, -1]) == 0
    assert [s for s in got[3][0].tolist() if s >= 0] == [0]


# ---- rows that a build states


def rows_of(loader: GPTEpisodeDataLoader) -> list[list[int]]:
    """Rows of an epoch without padding, by the tokens that `x` holds."""
    batches = [loader.get_batch() for _ in range(loader.steps_per_epoch())]
    return [
        row[:n].tolist()
        for batch in batches
        for row, n in zip(batch.x, batch.tokens.tolist(), strict=True)  # type: ignore[union-attr]
        if n
    ]


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit", "greedy"])
def test_without_shuffling_the_rows_are_those_of_the_build(tmp_path: Path, strategy: str) -> None:
    train = items(70, high=16)
    write_set(tmp_path, train, shards=3)
    state_rows(tmp_path / "train", 16, strategy)
    plan = EpisodeDataset(tmp_path).plan
    assert plan is not None
    wanted = [[i for n in plan.bin(row).tolist() for i in train[n].ids] for row in range(len(plan))]
    made = rows_of(make(tmp_path, epoch_shuffle=False, epoch_drop_last=False))
    assert made == [row[:15] for row in wanted], "x lacks the last of a full row"
    assert made == rows_of(make(tmp_path, packing_strategy=strategy, epoch_shuffle=False, epoch_drop_last=False))


def test_a_state_knows_its_strategy(tmp_path: Path) -> None:
    write_set(tmp_path, items(30, high=9))
    state_rows(tmp_path / "train", 16)
    made = make(tmp_path)
    made.get_batch()
    state = made.state_dict()
    state_rows(tmp_path / "train", 16, "greedy")
    with pytest.raises(ConfigError, match="the state was taken with packing_strategy = 'best_fit'"):
        make(tmp_path).load_state_dict(state)
    make(tmp_path, packing_strategy="best_fit").load_state_dict(state)
