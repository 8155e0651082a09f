"""Packed rows: every document once, whole, with its boundaries, the same on every rank; log-probabilities in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.collate import DataCollatorForCausalLM, get_pos_ids_for_packed_sequence
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.pack.plan import Strategy
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
from tests.load.sets import PAD, Item, Special, items, loader, state_rows, write_set


def make(directory: Path, batch_size: int = 2, **options: Any) -> GPTEpisodeDataLoader:
    return loader(directory, batch_size, 15, pack=True, **options)


def check_rows(packed: PackedBatch, episodes: dict[int, Item], width: int, *, masks: bool) -> list[int]:
    """Walk every row document by document; returns the first ids of the documents found."""
    x, y, mask, starts = packed
    found = []
    for r in range(len(x)):
        begins = [s for s in starts[r].tolist() if s >= 0]
        assert begins == sorted(set(begins))
        assert begins[0] == 0
        ids: list[int] = []
        weights: list[float] = []
        for s in begins if packed.tokens[r] else ():
            item = episodes[int(x[r, s])]
            found.append(item.ids[0])
            assert len(ids) == s
            ids += item.ids[:width]
            own = item.weights[: len(ids) - s] if masks else [1.0] * (len(ids) - s)
            weights += [0.0, *own[1:]]
        assert len(ids) <= width
        ids += [PAD] * (width - len(ids))
        weights += [0.0] * (width - len(weights))
        assert (x[r].tolist(), y[r].tolist(), mask[r].tolist()) == (ids[:-1], ids[1:], weights[1:])
    return found


OPTIONS = st.fixed_dictionaries(
    {"epoch_shuffle": st.booleans(), "use_loss_mask": st.booleans(), "packing_strategy": st.sampled_from(Strategy)}
)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(2, 30), st.integers(1, 3), st.integers(0, 1000), OPTIONS)
def test_every_episode_once_per_epoch_over_all_ranks(
    tmp_path_factory: pytest.TempPathFactory, count: int, high: int, world: int, seed: int, options: dict[str, Any]
) -> None:
    train = items(count, seed=seed, high=high)
    directory = write_set(tmp_path_factory.mktemp("set"), train, shards=min(2, count))
    ranks = [make(directory, rank=r, world_size=world, epoch_drop_last=False, **options) for r in range(world)]
    by_first = {item.ids[0]: item for item in train}
    for epoch in range(2):
        batches = [one.get_batch() for _ in range(ranks[0].steps_per_epoch(epoch=epoch)) for one in ranks]
        found = [check_rows(got, by_first, 16, masks=options["use_loss_mask"]) for got in batches]
        assert sorted(v for part in found for v in part) == [item.ids[0] for item in train]
        assert len({tuple(t.shape for t in got) for got in batches}) == 1


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
    batches: list[Any] = [made.get_batch() for _ in range(made.steps_per_epoch())]
    tokens = np.concatenate([b.tokens for b in batches])
    documents = np.concatenate([(b[3] >= 0).sum(1).numpy() for b in batches])
    assert tokens.mean() / 15 > 0.97
    assert abs(documents[: len(documents) // 2].mean() - documents[len(documents) // 2 :].mean()) < 0.5


def test_boundaries_equal_those_of_the_packing_collator(tmp_path: Path) -> None:
    write_set(tmp_path, items(61, high=9))
    made = make(tmp_path, 4, epoch_drop_last=False, pad_token_id=Special.pad_token_id)
    forms = {"return_cu_seqlens": True, "return_seq_idx": True, "return_document_mask": True, "cu_seqlens_size": 70}
    collator = DataCollatorForCausalLM(Special(), padding="max_length", max_length=15, **forms)
    compared = 0
    for _ in range(made.steps_per_epoch()):
        got: Any = made.get_batch()
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


def test_rows_of_padding_have_no_document_but_can_be_positioned(tmp_path: Path) -> None:
    write_set(tmp_path, items(3, low=12, high=14))
    got: Any = make(tmp_path, 5, epoch_drop_last=False).get_batch()
    assert got.tokens.tolist()[3:] == [0, 0]
    assert got.document_starts[:, 0].tolist() == [0] * 5
    assert float(got.mask[3:].sum()) == 0
    assert got.position_ids[4].tolist() == list(range(15))
    assert get_pos_ids_for_packed_sequence(got.x, document_starts=got.document_starts).shape == (5, 15)


def test_a_document_of_one_token_in_the_last_place_does_not_begin_in_x(tmp_path: Path) -> None:
    write_set(tmp_path, [Item(ids=list(range(1000, 1015)), weights=[1] * 15), Item(ids=[2000], weights=[1])])
    x, y, mask, starts = make(tmp_path, 1, episode_min_tokens=1, epoch_shuffle=False).get_batch()
    assert x.tolist() == [list(range(1000, 1015))]
    assert (int(y[0, -1]), float(mask[0, -1])) == (2000, 0)
    assert [s for s in starts[0].tolist() if s >= 0] == [0]


# ---- rows that a build states


def rows_of(made: GPTEpisodeDataLoader) -> list[list[int]]:
    """Rows of an epoch without padding, by the tokens that `x` holds."""
    batches: list[Any] = [made.get_batch() for _ in range(made.steps_per_epoch())]
    rows = [(row, n) for batch in batches for row, n in zip(batch.x, batch.tokens.tolist(), strict=True)]
    return [row[:n].tolist() for row, n in rows if n]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_without_shuffling_the_rows_are_those_of_the_build(tmp_path: Path, strategy: Strategy) -> None:
    train = items(70, high=16)
    write_set(tmp_path, train, shards=3)
    state_rows(tmp_path / "train", 16, strategy)
    plan = EpisodeDataset(tmp_path).plan
    assert plan is not None
    wanted = [[i for n in plan.bin(row).tolist() for i in train[n].ids] for row in range(len(plan))]
    for options in ({}, {"packing_strategy": strategy}):
        made = rows_of(make(tmp_path, epoch_shuffle=False, epoch_drop_last=False, **options))
        assert made == [row[:15] for row in wanted], "x lacks the last of a full row"


def test_a_state_knows_its_strategy_and_width(tmp_path: Path) -> None:
    write_set(tmp_path, items(30, high=9))
    state_rows(tmp_path / "train", 16)
    state = make(tmp_path).state_dict()
    state_rows(tmp_path / "train", 16, "greedy")
    with pytest.raises(ConfigError, match="the state was taken with packing_strategy = 'best_fit'"):
        make(tmp_path).load_state_dict(state)
    make(tmp_path, packing_strategy="best_fit").load_state_dict(state)
    with pytest.raises(ConfigError, match="block_size = 15, this loader has 12"):
        loader(tmp_path, 2, 12, pack=True, packing_strategy="best_fit").load_state_dict(state)


# ---- log-probabilities of sampled tokens reach batches next to the targets

BLOCK = 23


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls of different lengths, some longer than a row, some without log-probabilities."""
    folder, generator = tmp_path_factory.mktemp("logprobs"), np.random.default_rng(5)
    records = []
    for number in range(40):
        sizes = generator.integers(1, 18, 2).tolist()
        prompt, own = (generator.integers(0, 256, size).tolist() for size in sizes)
        logprobs = (-generator.random(sizes[1])).tolist() if number % 3 else None
        records.append({"id": str(number), "prompt_token_ids": prompt, "token_ids": own, "logprobs": logprobs})
    path = write_jsonl(folder / "calls.jsonl", records)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}
    for name, stored in (("with", True), ("without", False)):
        run_build({**recipe, "logprobs": stored}, folder / name, workers=0)
    return folder


@pytest.mark.parametrize("pack", [False, True])
def test_batches_have_them_aligned_with_the_targets(built: Path, pack: bool) -> None:
    options = {"pad_token_id": 0, "epoch_drop_last": False, "pack": pack, "logprobs": True}
    made = loader(built / "with", 3, BLOCK, **options)
    episodes, known = EpisodeDataset(built / "with"), 0
    for _ in range(made.steps_per_epoch()):
        batch = made.get_batch()
        given = batch.logprobs if isinstance(batch, PackedBatch) else batch[3]
        assert given is not None
        wanted = np.zeros((3, BLOCK + 1), dtype=np.float32)
        for row, numbers in enumerate(made.last_episodes()):
            found = np.concatenate([episodes[number].logprobs for number in numbers])[: BLOCK + 1]
            wanted[row, : len(found)] = found
        np.testing.assert_array_equal(given.numpy(), wanted[:, 1:])
        known += np.count_nonzero(np.isfinite(wanted) & (wanted != 0))
    assert known > 100


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("most", [None, 11])
def test_the_collator_has_them_beside_the_labels(built: Path, flattened: bool, most: int | None) -> None:
    rows = list(to_hf_dataset(built / "with"))[:5]
    options: dict[str, Any] = {} if most is None else {"max_length": most, "truncation": True}
    collate = DataCollatorForCausalLM(Special(), return_flattened=flattened, **options)
    batch = collate(rows)
    cut = [np.array(row["logprobs"], dtype=np.float32)[:most] for row in rows]
    wanted = np.zeros(batch["labels"].shape, dtype=np.float32)
    for row, line in enumerate([np.concatenate(cut)] if flattened else cut):
        wanted[row, : len(line)] = line
    np.testing.assert_array_equal(batch["logprobs"].numpy(), wanted)
    with pytest.raises(DataError, match="logprobs of row 0"):
        collate([{**rows[0], "logprobs": [0.0]}])


def test_what_is_not_stored_is_not_given(built: Path) -> None:
    assert "logprobs" not in to_hf_dataset(built / "without").column_names
    with pytest.raises(ConfigError, match="build with logprobs: true"):
        loader(built / "without", logprobs=True)
