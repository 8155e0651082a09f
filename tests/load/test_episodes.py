"""The episode loader against slow, obvious batches: shapes, padding, masks, order, coverage."""

from __future__ import annotations

import linecache
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.errors import ConfigError
from chatmill.label.presets import find_policy
from chatmill.load.config import load_training_config
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.token_stream import GPTDataLoader, make_loader
from chatmill.store.episode_writer import EpisodeWriter
from tests.load.sets import PAD, Item, batch, epoch_steps, items, same, write_set

BASE = {"batch_size": 3, "block_size": 8, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}


def loader(directory: Path, **options: object) -> GPTEpisodeDataLoader:
    names = {"rank", "world_size", "policy", "strict", "pack", "device", "tokenizer"}
    own = {k: v for k, v in options.items() if k in names}
    return GPTEpisodeDataLoader(
        {**BASE, **{k: v for k, v in options.items() if k not in names}}, dataset_dir=directory, **own
    )


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
    plain = loader(tmp_path, epoch_shuffle=False, use_loss_mask=False).get_batch()
    assert same(plain, (x, y))


@pytest.mark.parametrize(
    ("shards", "mask", "fractional"), [(0, "u1", False), (1, "<f4", True), (4, "u1", False), (4, "<f4", True)]
)
def test_epochs_equal_the_slow_reference(tmp_path: Path, shards: int, mask: str, fractional: bool) -> None:
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


def test_shards_may_have_masks_of_both_types(tmp_path: Path) -> None:
    train = items(12, fractional=False)
    write_set(tmp_path / "a", train, shards=2)
    write_set(tmp_path / "b", train, shards=2, mask="<f4")
    (tmp_path / "b/train/shard_00000").rename(tmp_path / "old")
    (tmp_path / "a/train/shard_00000").rename(tmp_path / "b/train/shard_00000")
    made = loader(tmp_path / "b")
    for rows in epoch_steps(train, seed=1337, epoch=0, step=3):
        assert same(made.get_batch(), batch(rows, 8))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    count=st.integers(1, 25),
    batch_size=st.integers(1, 4),
    world=st.integers(1, 3),
    block=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    masks=st.booleans(),
)
def test_drop_last_false_covers_every_episode_once_on_all_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    batch_size: int,
    world: int,
    block: int,
    shuffle: bool,
    seed: int,
    masks: bool,
) -> None:
    directory = tmp_path_factory.mktemp("set")
    train = items(count, seed=seed % 1000, low=2, high=15)
    write_set(directory, train, shards=min(count, 2))
    options = {
        "batch_size": batch_size,
        "block_size": block,
        "epoch_shuffle": shuffle,
        "epoch_seed": seed,
        "epoch_drop_last": False,
        "use_loss_mask": masks,
    }
    ranks = [loader(directory, rank=rank, world_size=world, **options) for rank in range(world)]
    for epoch in range(2):
        firsts = []
        for rows in epoch_steps(
            train, seed=seed, epoch=epoch, step=batch_size * world, shuffle=shuffle, drop_last=False
        ):
            for rank, one in enumerate(ranks):
                mine = rows[rank * batch_size : (rank + 1) * batch_size]
                got, wanted = one.get_batch(), batch(mine, block)
                firsts += [int(v) for v, item in zip(got[0][:, 0], mine, strict=True) if item is not None]
                if not masks:
                    for i, item in enumerate(mine):
                        if item is None:
                            wanted[1][i] = -100
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


def test_pad_id_is_the_option_else_the_tokenizers_eos_else_an_error(tmp_path: Path) -> None:
    write_set(tmp_path, items(4))
    bare = {**BASE, "pad_token_id": None}
    for tokenizer in (SimpleNamespace(eos_id=77), SimpleNamespace(eos_token_id=77), SimpleNamespace(eos_id=0)):
        made = GPTEpisodeDataLoader(bare, tokenizer, tmp_path)
        assert made.pad_token_id == getattr(tokenizer, "eos_id", 77)
        assert GPTEpisodeDataLoader(bare, tokenizer, tmp_path, pad_token_id=5).pad_token_id == 5
    for tokenizer in (None, SimpleNamespace(eos_id=None)):
        with pytest.raises(ConfigError, match="pad_token_id"):
            GPTEpisodeDataLoader(bare, tokenizer, tmp_path)


def test_options_override_the_config_and_none_means_as_the_config_says(tmp_path: Path) -> None:
    train = items(9)
    write_set(tmp_path, train)
    config = load_training_config(**{**BASE, "epoch_shuffle": False, "use_loss_mask": False})
    assert len(GPTEpisodeDataLoader(config, dataset_dir=tmp_path).get_batch()) == 2
    made = GPTEpisodeDataLoader(config, dataset_dir=tmp_path, use_loss_mask=True, epoch_shuffle=True, epoch_seed=4)
    assert same(made.get_batch(), batch(epoch_steps(train, seed=4, epoch=0, step=3)[0], 8))
    with pytest.raises(ConfigError, match="should be 'random' or 'epoch'"):
        GPTEpisodeDataLoader(config, dataset_dir=tmp_path, batch_sampling_mode="sometimes")


@pytest.mark.parametrize("damage", ["missing", "short", "one shard"])
def test_masks_that_cannot_be_had_warn_once_and_give_x_and_y(tmp_path: Path, damage: str) -> None:
    train = items(12)
    write_set(tmp_path, train, items(6), shards=3)
    for mask in sorted(tmp_path.rglob("mask.bin"))[: 1 if damage == "one shard" else None]:
        mask.unlink() if damage != "short" else mask.write_bytes(mask.read_bytes()[:-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = loader(tmp_path)
        for rows in epoch_steps(train, seed=1337, epoch=0, step=3):
            assert same(made.get_batch(), batch(rows, 8)[:2])
    assert len(caught) == 1
    assert "mask.bin" in str(caught[0].message)
    assert "GPTEpisodeDataLoader(" in linecache.getline(caught[0].filename, caught[0].lineno), "it points at the caller"
    with pytest.raises((ConfigError, ValueError), match=r"mask\.bin"):
        loader(tmp_path, strict=True)


def test_a_split_smaller_than_a_step_raises_at_its_first_batch(tmp_path: Path) -> None:
    write_set(tmp_path, items(9), items(2))
    made = loader(tmp_path, epoch_drop_last=True)
    assert len(made.get_batch()) == 3
    with pytest.raises(ConfigError) as caught:
        made.get_batch("val")
    for part in ("2 rows", "takes 3", "epoch_drop_last", "val"):
        assert part in str(caught.value)
    assert len(loader(tmp_path, epoch_drop_last=False).get_batch("val")) == 3


def test_the_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_set(tmp_path, items(10), items(4))
    with caplog.at_level(logging.INFO):
        made = loader(tmp_path)
        for _ in range(7):
            made.get_batch()
    opening = [r.getMessage() for r in caplog.records if "tokens=" in r.getMessage()]
    assert len(opening) == 2
    assert "split=train episodes=10" in opening[0]
    assert "mask=true" in opening[0]
    starts = [r.getMessage() for r in caplog.records if "epoch=" in r.getMessage()]
    line = (
        "[EpisodeLoader] split=train epoch={} episodes=10 batches=3 shuffle=true drop_last=true pad_id=50256 mask=true"
    )
    assert starts == [line.format(epoch) for epoch in range(3)]


def test_a_batch_is_never_overwritten(tmp_path: Path) -> None:
    write_set(tmp_path, items(40))
    made = loader(tmp_path)
    kept = [made.get_batch() for _ in range(10)]
    copies = [[t.clone() for t in one] for one in kept]
    for _ in range(20):
        made.get_batch()
    assert all(same(a, b) for a, b in zip(kept, copies, strict=True))
    assert len({t.data_ptr() for one in kept for t in one}) == 30


def test_both_loaders_side_by_side_from_the_same_xml(tmp_path: Path) -> None:
    train = items(12)
    write_set(tmp_path / "set", train, items(5), shards=2)
    text = (
        "<config><training><batch_size>3</batch_size><block_size>8</block_size><dataset_mode>{}</dataset_mode>"
        "<batch_sampling_mode>{}</batch_sampling_mode><use_loss_mask>true</use_loss_mask>"
        "<pad_token_id>50256</pad_token_id></training></config>"
    )
    for sampling in ("random", "epoch"):
        made = {}
        for mode in ("token_stream", "sft_episode"):
            path = tmp_path / f"{mode}.xml"
            path.write_text(text.format(mode, sampling))
            made[mode] = make_loader(load_training_config(path), tmp_path / "set")
        assert type(made["token_stream"]) is GPTDataLoader
        assert type(made["sft_episode"]) is GPTEpisodeDataLoader
        for split in ("train", "val"):
            for one in made.values():
                x, y, mask = one.get_batch(split)
                assert x.shape == y.shape == mask.shape == (3, 8)
                assert (x[:, 1:] == y[:, :-1]).all()


KIND = {
    "u": kind(RoleCode.USER, Part.CONTENT),
    "h": kind(RoleCode.ASSISTANT, Part.HEADER),
    "a": kind(RoleCode.ASSISTANT, Part.CONTENT),
    "e": kind(RoleCode.ASSISTANT, Part.TERMINATOR),
}


@pytest.mark.parametrize("name", ["assistant", "last_turn", "all", "final_only"])
def test_a_policy_at_load_chooses_what_is_trained(tmp_path: Path, name: str) -> None:
    texts = ["uuhaae", "uhaeuuhaaae", "uhaeuhaeuhae", "uuuuuuu", "haae", "uhaaaaaaaaaaaaae", "uhaeuuuuuuuuhae"]
    texts.append("uhaeuhaaaauhae")  # a row ends inside the second answer, and the last turn is the third
    with EpisodeWriter(tmp_path, "train", shard_tokens=30) as writer:
        for i, text in enumerate(texts):
            kinds = [KIND[c] for c in text]
            writer.append([100 * i + t for t in range(len(text))], [0] * len(text), kinds=kinds)
    policy = find_policy(name)
    rows = []
    for i, text in enumerate(texts):
        weights = policy.token_weights(np.array([KIND[c] for c in text], dtype=np.uint8))
        rows.append(Item(ids=[100 * i + t for t in range(len(text))], weights=weights.tolist()))
    config = {**BASE, "batch_size": 8, "epoch_shuffle": False, "use_loss_mask": False}
    made = GPTEpisodeDataLoader(config, dataset_dir=tmp_path, policy=name)
    got = made.get_batch()
    assert same(got, batch(rows, 8))
    assert float(got[2].sum()) > 0
    stored = GPTEpisodeDataLoader(config, dataset_dir=tmp_path, use_loss_mask=True).get_batch()
    assert float(stored[2].sum()) == 0


def test_a_policy_that_cannot_work_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "plain", items(3))
    with pytest.raises(ConfigError, match="kinds"):
        loader(tmp_path / "plain", policy="assistant")
    with EpisodeWriter(tmp_path / "kinds", "train") as writer:
        writer.append([1, 2, 3], kinds=[0, 1, 2])
    with pytest.raises(ConfigError, match="per_message"):
        loader(tmp_path / "kinds", policy="per_message")
    with pytest.raises(ConfigError, match="Known"):
        loader(tmp_path / "kinds", policy="no such policy")
    with pytest.raises(ConfigError, match="use_loss_mask=False"):
        GPTEpisodeDataLoader(BASE, dataset_dir=tmp_path / "kinds", policy="all", use_loss_mask=False)


def test_the_config_may_name_the_dataset_and_device(tmp_path: Path) -> None:
    write_set(tmp_path, items(4))
    made = GPTEpisodeDataLoader({**BASE, "dataset_dir": str(tmp_path), "device": "meta"})
    assert made.get_batch()[0].device.type == "meta"
    assert GPTEpisodeDataLoader({**BASE, "device": "meta"}, None, tmp_path, device="cpu").get_batch()[0].is_cpu
    with pytest.raises(ConfigError, match="dataset_dir"):
        GPTEpisodeDataLoader(BASE)
