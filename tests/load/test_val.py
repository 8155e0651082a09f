"""The split val: in order, whole and the same every time; what is in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import ConfigError
from chatmill.load.episodes import GPTEpisodeDataLoader
from tests.load.sets import PAD, batch, epoch_steps, items, same, write_set

BASE = {"batch_size": 4, "block_size": 20, "pad_token_id": PAD, "use_loss_mask": True}


def make(directory: Path, **options: Any) -> GPTEpisodeDataLoader:
    own = {name: options.pop(name) for name in ("pack", "rank", "world_size") if name in options}
    return GPTEpisodeDataLoader({**BASE, **options}, None, directory, **own)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("pack", [False, True])
def test_unset_options_read_val_whole_and_in_order_every_time(tmp_path: Path, size: int, pack: bool) -> None:
    val = items(10, seed=1)
    write_set(tmp_path, items(30), val)
    loader = make(tmp_path, batch_size=size, pack=pack)
    if not pack:
        wanted = [
            batch(rows, 20) for rows in epoch_steps(val, seed=0, epoch=0, step=size, shuffle=False, drop_last=False)
        ]
        for _ in range(2):
            assert all(same(loader.get_batch("val"), one) for one in wanted)
    passes = [list(loader.one_pass()) for _ in range(2)]
    ids = sorted(i for one in passes[0] for i in one[1][one[2] != 0].tolist())
    assert ids == sorted(i for e in val for i, w in zip(e.ids[1:], e.weights[1:], strict=True) if w)
    assert all(same(tuple(a), tuple(b)) for a, b in zip(*passes, strict=True))


def test_a_pass_does_not_move_the_split_and_random_mode_has_none(tmp_path: Path) -> None:
    write_set(tmp_path, items(30), items(10, seed=1))
    loader = make(tmp_path)
    first = loader.get_batch("val")
    state = loader.state_dict()
    assert same(next(iter(loader.one_pass("val"))), first)
    assert loader.state_dict() == state
    random = make(tmp_path, batch_sampling_mode="random")
    with pytest.raises(ConfigError, match="random"):
        next(iter(random.one_pass()))
    with pytest.raises(TypeError, match="random"):
        len(random)
    assert random, "a loader without a length is still something"


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_which_episodes_are_in_a_batch(tmp_path: Path, pack: bool, sampling: str) -> None:
    train = items(11, low=3)
    write_set(tmp_path, train)
    loader = make(tmp_path, pack=pack, batch_sampling_mode=sampling, batch_size=2, rank=1, world_size=2)
    with pytest.raises(ConfigError, match="not called"):
        loader.last_episodes()
    for number in range(7):
        x = loader.get_batch()[0]
        held = loader.last_episodes()
        assert held == loader.episodes_in_batch(number)
        for row, episodes in zip(x.tolist(), held, strict=True):
            laid = [token for episode in episodes for token in train[episode].ids][:20]
            assert row[: len(laid)] == laid
