"""The episode loader against slow, obvious batches: shapes, padding, masks, order, coverage, and what it refuses."""

from __future__ import annotations

import linecache
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import ConfigError, DataError, FormatError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load import episode_rows
from chatmill.load.config import load_training_config
from chatmill.load.episodes import GPTEpisodeDataLoader, _refuse_unfit
from chatmill.load.token_stream import GPTDataLoader, make_loader
from chatmill.store.episode_writer import EpisodeWriter
from tests.load.sets import PAD, Item, batch, epoch_steps, items, loader, same, write_set

BASE = {"batch_size": 3, "block_size": 8}


def test_padding_truncation_and_alignment_by_hand(tmp_path: Path) -> None:
    short = Item(ids=[5, 6, 7], weights=[0, 1, 1])
    long = Item(ids=list(range(10, 22)), weights=[1, 0] * 6)
    exact = Item(ids=list(range(30, 39)), weights=[0] * 8 + [1])
    write_set(tmp_path, [short, long, exact])
    x, y, mask = loader(tmp_path, epoch_shuffle=False).get_batch()
    p = PAD
    assert x.tolist() == [[5, 6, 7, p, p, p, p, p], list(range(10, 18)), list(range(30, 38))]
    assert y.tolist() == [[6, 7, p, p, p, p, p, p], list(range(11, 19)), list(range(31, 39))]
    assert mask.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1], [0] * 7 + [1]]
    assert (x.dtype, y.dtype, mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert all(t.shape == (3, 8) and t.is_contiguous() for t in (x, y, mask))
    assert same(loader(tmp_path, epoch_shuffle=False, use_loss_mask=False).get_batch(), (x, y))


@pytest.mark.parametrize(
    ("shards", "mask", "fractional"),
    [(0, "u1", False), (1, "<f4", True), (4, "u1", False), (4, "<f4", True), (2, ("u1", "<f4"), False)],
)
def test_epochs_equal_the_slow_reference(tmp_path: Path, shards: int, mask: Any, fractional: bool) -> None:
    pad = 1001  # an id that episodes hold, as the end of a turn is in models that have no other
    train, val = items(23, fractional=fractional), items(7, seed=1, fractional=fractional)
    write_set(tmp_path, train, val, shards=shards, mask=mask)
    made = loader(tmp_path, pad_token_id=pad, epoch_shuffle=True, epoch_drop_last=True)
    checked = 0
    for epoch in range(3):
        for split, episodes in (("train", train), ("val", val)):
            for rows in epoch_steps(episodes, seed=1337, epoch=epoch, step=3):
                assert same(made.get_batch(split), batch(rows, 8, pad))
                checked += 1
    assert checked == 3 * (7 + 2)


OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "block_size": st.integers(1, 12),
        "epoch_shuffle": st.booleans(),
        "epoch_seed": st.integers(0, 2**31),
        "use_loss_mask": st.booleans(),
    }
)


@settings(max_examples=40)
@given(count=st.integers(1, 25), world=st.integers(1, 3), options=OPTIONS)
def test_drop_last_false_covers_every_episode_once_on_all_ranks(
    tmp_path_factory: pytest.TempPathFactory, count: int, world: int, options: dict[str, Any]
) -> None:
    seed, size, masks = options["epoch_seed"], options["batch_size"], options["use_loss_mask"]
    train = items(count, seed=seed % 1000, low=2, high=15)
    directory = write_set(tmp_path_factory.mktemp("set"), train, shards=min(count, 2))
    ranks = [loader(directory, rank=r, world_size=world, epoch_drop_last=False, **options) for r in range(world)]
    for epoch in range(2):
        order = {"seed": seed, "epoch": epoch, "step": size * world, "shuffle": options["epoch_shuffle"]}
        firsts = []
        for rows in epoch_steps(train, drop_last=False, **order):
            for rank, one in enumerate(ranks):
                mine = rows[rank * size : (rank + 1) * size]
                got, wanted = one.get_batch(), batch(mine, options["block_size"])
                firsts += [int(v) for v, item in zip(got[0][:, 0], mine, strict=True) if item is not None]
                if not masks:
                    wanted[1][[item is None for item in mine]] = -100
                assert same(got, wanted if masks else wanted[:2])
        assert sorted(firsts) == [item.ids[0] for item in train]


def test_random_mode_draws_with_replacement_by_global_position(tmp_path: Path) -> None:
    train = items(11)
    write_set(tmp_path, train, shards=2)
    draws = np.random.RandomState(1337).randint(0, 11, 65536)
    ranks = [loader(tmp_path, batch_sampling_mode="random", rank=rank, world_size=2) for rank in range(2)]
    for step in range(20):
        for rank, one in enumerate(ranks):
            first = (step * 2 + rank) * 3
            assert same(one.get_batch(), batch([train[i] for i in draws[first : first + 3]], 8))


def test_short_episodes_are_left_out(tmp_path: Path) -> None:
    train = [Item(ids=[i] * n, weights=[1] * n) for i, n in enumerate([1, 5, 2, 3, 1, 4, 7, 2])]
    write_set(tmp_path, train)
    made = loader(tmp_path, episode_min_tokens=3, batch_size=2, epoch_drop_last=False)
    kept = [item for item in train if len(item.ids) >= 3]
    assert len(kept) == 4
    for rows in epoch_steps(kept, seed=1337, epoch=0, step=2, drop_last=False):
        assert same(made.get_batch(), batch(rows, 8))
    with pytest.raises(FormatError, match=r"none of its 8 episodes has episode_min_tokens = 8 tokens .*longest has 7"):
        loader(tmp_path, episode_min_tokens=8)


def test_a_batch_is_never_overwritten(tmp_path: Path) -> None:
    write_set(tmp_path, items(40))
    made = loader(tmp_path)
    kept = [made.get_batch() for _ in range(10)]
    copies = [[t.clone() for t in one] for one in kept]
    for _ in range(20):
        made.get_batch()
    assert all(same(a, b) for a, b in zip(kept, copies, strict=True))
    assert len({t.data_ptr() for one in kept for t in one}) == 30


# ---- options


def test_pad_id_is_the_option_else_the_tokenizers_eos_else_an_error(tmp_path: Path) -> None:
    write_set(tmp_path, items(4))
    for tokenizer in (SimpleNamespace(eos_id=77), SimpleNamespace(eos_token_id=77), SimpleNamespace(eos_id=0)):
        made = GPTEpisodeDataLoader(BASE, tokenizer, tmp_path)
        assert made.pad_token_id == getattr(tokenizer, "eos_id", 77)
        assert GPTEpisodeDataLoader(BASE, tokenizer, tmp_path, pad_token_id=5).pad_token_id == 5
    for tokenizer in (None, SimpleNamespace(eos_id=None)):
        with pytest.raises(ConfigError, match="pad_token_id"):
            GPTEpisodeDataLoader(BASE, tokenizer, tmp_path)


def test_options_override_the_config_and_none_means_as_the_config_says(tmp_path: Path) -> None:
    train = items(9)
    write_set(tmp_path, train)
    base = {**BASE, "pad_token_id": PAD, "device": "meta"}
    config = load_training_config(**base, epoch_shuffle=False, use_loss_mask=False, dataset_dir=str(tmp_path))
    plain = GPTEpisodeDataLoader(config).get_batch()
    assert (len(plain), plain[0].device.type) == (2, "meta")
    options = {"use_loss_mask": True, "epoch_shuffle": True, "epoch_seed": 4, "device": "cpu"}
    made = GPTEpisodeDataLoader(config, None, tmp_path, **options)
    assert same(made.get_batch(), batch(epoch_steps(train, seed=4, epoch=0, step=3)[0], 8))
    with pytest.raises(ConfigError, match="should be 'random' or 'epoch'"):
        loader(tmp_path, batch_sampling_mode="sometimes")
    with pytest.raises(ConfigError, match="dataset_dir"):
        GPTEpisodeDataLoader(base)


@pytest.mark.parametrize("damage", ["missing", "short", "one shard"])
def test_masks_that_cannot_be_had_warn_once_and_give_x_and_y(tmp_path: Path, damage: str) -> None:
    train = items(12)
    write_set(tmp_path, train, items(6), shards=3)
    for mask in sorted(tmp_path.rglob("mask.bin"))[: 1 if damage == "one shard" else None]:
        mask.unlink() if damage != "short" else mask.write_bytes(mask.read_bytes()[:-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = GPTEpisodeDataLoader({**BASE, "pad_token_id": PAD}, None, tmp_path, use_loss_mask=True)
        for rows in epoch_steps(train, seed=1337, epoch=0, step=3):
            assert same(made.get_batch(), batch(rows, 8)[:2])
    assert len(caught) == 1
    assert "mask.bin" in str(caught[0].message)
    assert "GPTEpisodeDataLoader(" in linecache.getline(caught[0].filename, caught[0].lineno), "it points at the caller"
    with pytest.raises((ConfigError, ValueError), match=r"mask\.bin"):
        loader(tmp_path, strict=True)


def test_the_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_set(tmp_path, items(10, high=9), items(4, high=9))
    with caplog.at_level(logging.INFO):
        made = loader(tmp_path)
        for _ in range(7):
            made.get_batch()
    opening, other, *starts = [record.getMessage() for record in caplog.records]
    assert "split=train episodes=10 tokens=" in opening
    assert "mask=true" in opening
    assert "split=val episodes=4" in other
    line = (
        "[EpisodeLoader] split=train epoch={} episodes=10 batches=3 shuffle=true drop_last=true pad_id=50256 mask=true"
    )
    assert starts == [line.format(epoch) for epoch in range(3)]


def test_both_loaders_side_by_side_from_the_same_options(tmp_path: Path) -> None:
    write_set(tmp_path, items(12), items(5), shards=2)
    config = {**BASE, "pad_token_id": PAD, "use_loss_mask": True}
    kinds = {"token_stream": GPTDataLoader, "sft_episode": GPTEpisodeDataLoader}
    for sampling in ("random", "epoch"):
        for mode, kind in kinds.items():
            made = make_loader({**config, "dataset_mode": mode, "batch_sampling_mode": sampling}, tmp_path)
            assert type(made) is kind
            for split in ("train", "val"):
                x, y, mask = made.get_batch(split)
                assert x.shape == y.shape == mask.shape == (3, 8)
                assert (x[:, 1:] == y[:, :-1]).all()


# ---- the split val, and what is in a batch


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("pack", [False, True])
def test_unset_options_read_val_whole_and_in_order_every_time(tmp_path: Path, size: int, pack: bool) -> None:
    val = items(10, seed=1)
    write_set(tmp_path, items(30), val)
    made = loader(tmp_path, size, 20, pack=pack)
    steps = epoch_steps(val, seed=0, epoch=0, step=size, shuffle=False, drop_last=False)
    for rows in [] if pack else 2 * steps:
        assert same(made.get_batch("val"), batch(rows, 20))
    passes = [list(made.one_pass()) for _ in range(2)]
    ids = sorted(i for one in passes[0] for i in one[1][one[2] != 0].tolist())
    assert ids == sorted(i for e in val for i, w in zip(e.ids[1:], e.weights[1:], strict=True) if w)
    assert all(same(tuple(a), tuple(b)) for a, b in zip(*passes, strict=True))


def test_a_pass_does_not_move_the_split_and_random_mode_has_none(tmp_path: Path) -> None:
    write_set(tmp_path, items(30), items(10, seed=1))
    made = loader(tmp_path)
    first, state = made.get_batch("val"), made.state_dict()
    assert same(next(iter(made.one_pass("val"))), first)
    assert made.state_dict() == state
    random = loader(tmp_path, batch_sampling_mode="random")
    with pytest.raises(ConfigError, match="random"):
        next(iter(random.one_pass()))
    with pytest.raises(TypeError, match="random"):
        len(random)
    assert random, "a loader without a length is still something"
    assert [one.data_report()["rows_left_out"] for one in (loader(tmp_path, 4), random)] == [2, 0]


def test_a_split_smaller_than_a_step_raises_at_its_first_batch(tmp_path: Path) -> None:
    write_set(tmp_path, items(9), items(2))
    made = loader(tmp_path, epoch_drop_last=True)
    assert len(made.get_batch()) == 3
    with pytest.raises(ConfigError, match=r"val: 2 rows .* takes 3 .*epoch_drop_last"):
        made.get_batch("val")
    assert len(loader(tmp_path, epoch_drop_last=False).get_batch("val")) == 3


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_which_episodes_are_in_a_batch(tmp_path: Path, pack: bool, sampling: str) -> None:
    train = items(11, low=3)
    write_set(tmp_path, train)
    made = loader(tmp_path, 2, 20, pack=pack, batch_sampling_mode=sampling, rank=1, world_size=2)
    with pytest.raises(ConfigError, match="not called"):
        made.last_episodes()
    for number in range(7):
        x = made.get_batch()[0]
        held = made.last_episodes()
        assert held == made.episodes_in_batch(number)
        for row, episodes in zip(x.tolist(), held, strict=True):
            laid = [token for episode in episodes for token in train[episode].ids][:20]
            assert row[: len(laid)] == laid


# ---- episodes longer than a row: nothing is cut without a word, and what is lost is counted


@pytest.mark.parametrize("pack", [False, True])
def test_loaders_cut_as_the_format_says_and_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture, pack: bool) -> None:
    sizes, trained = (3, 20, 9, 20), (2, 15, 9, 1)  # of the second 4 of 15 trained tokens fit, of the last none
    train = [
        Item([30 * i + t for t in range(n)], [0] * (n - k) + [1] * k)
        for i, (n, k) in enumerate(zip(sizes, trained, strict=True))
    ]
    write_set(tmp_path, train)
    report = loader(tmp_path, 2, pack=pack).data_report()
    assert [r.levelno for r in caplog.records if "and are cut" in r.message] == [logging.WARNING]
    assert "2 of 4 episodes are longer than a row of 9 tokens (the longest has 20) and are cut: 22 of" in caplog.text
    assert (report["episodes_cut"], report["tokens_left_out"], report["trained_tokens_left_out"]) == (2, 22, 12)
    assert "Give block_size=19 or more" in caplog.text
    caplog.clear()
    assert loader(tmp_path, 2, 19, pack=pack).data_report()["trained_tokens_left_out"] == 0
    assert "lost" not in caplog.text
    with pytest.raises(DataError, match=r"2 of 4 documents are longer than a row of 9 tokens.*longest has 20"):
        to_hf_dataset(tmp_path, max_length=9, packed=pack)
    assert len(to_hf_dataset(tmp_path, max_length=20)) == 4


@pytest.mark.parametrize("shards", [0, 3])
def test_counts_equal_the_slow_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    train = items(60, high=40)
    write_set(tmp_path, train, shards=shards)
    monkeypatch.setattr(episode_rows, "TOKENS_AT_A_TIME", 50)  # many groups
    report = loader(tmp_path, episode_min_tokens=12).data_report()
    long = [item for item in train if len(item.ids) >= 12]
    assert report["trained_tokens_left_out"] == sum(weight > 0 for item in long for weight in item.weights[9:]) > 100
    short = sum(len(item.ids) for item in train if len(item.ids) < 12)
    assert report["tokens_left_out"] == sum(len(item.ids) - 9 for item in long) + short
    report = loader(tmp_path, use_loss_mask=False).data_report()
    assert report["trained_tokens_left_out"] == report["tokens_left_out"]


def test_a_policy_decides_what_is_lost(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([5, 6, 7, 8], [1, 1, 1, 1], kinds=[26, 34, 34, 37])
    assert loader(tmp_path, 2, 1, policy="assistant").data_report()["trained_tokens_left_out"] == 2


# ---- broken datasets: one clear error each, at opening; `tests/store` has every fault of the files


def cut_tokens(folder: Path) -> None:
    path = folder / "tokens.bin"
    path.write_bytes(path.read_bytes()[:40])


def index_outside(folder: Path) -> None:
    index = np.fromfile(folder / "episodes.idx", dtype="<u8").reshape(-1, 2)
    index[1] = (40, 10**6)
    index.tofile(folder / "episodes.idx")


def no_index(folder: Path) -> None:
    (folder / "episodes.idx").unlink()


@pytest.mark.parametrize("part", ["train", "val", "train/shard_00001"])
@pytest.mark.parametrize("damage", [cut_tokens, index_outside, no_index])
def test_faults_at_opening(tmp_path: Path, damage: Callable[[Path], None], part: str) -> None:
    write_set(tmp_path, items(60, low=10), items(12), shards=3 * ("shard" in part))
    damage(tmp_path / part)
    with pytest.raises(FormatError, match=f"{tmp_path / part}.*(tokens.bin has 10 tokens|record 1 is|episodes.idx)"):
        loader(tmp_path)


def test_a_missing_shard_is_seen_without_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "other/tain").mkdir(parents=True)
    with pytest.raises(FormatError, match="holds tain"):
        loader(tmp_path / "other")
    write_set(tmp_path, items(20), shards=4)
    shutil.rmtree(tmp_path / "train/shard_00001")
    for make in (GPTEpisodeDataLoader, GPTDataLoader):
        with pytest.raises(FormatError, match="shard_00001 is missing, but shard_00003 is there"):
            make({**BASE, "pad_token_id": PAD}, None, tmp_path)
    shutil.rmtree(tmp_path / "train/shard_00000")
    with pytest.raises(FormatError, match="shard_00000 is missing and 1 more"):
        loader(tmp_path)


def test_data_that_batches_of_tokens_cannot_hold() -> None:
    for sides, pictures, words in ((True, False, "people compared"), (False, True, "holds pictures")):
        dataset: Any = SimpleNamespace(folder="set/train", has_sides=sides, has_pictures=pictures)
        with pytest.raises(ConfigError, match=words):
            _refuse_unfit(dataset)
