"""Going on: at every position, with another world size, on the wrong dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chatmill.errors import ConfigError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.loader import BatchLoader
from chatmill.load.token_stream import GPTDataLoader
from tests.load.sets import PAD, items, same, write_set

BASE = {"batch_size": 2, "block_size": 6, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}


def make(directory: Path, kind: str, **options: object) -> BatchLoader:
    if kind == "stream":
        return GPTDataLoader(BASE, None, directory, use_loss_mask=True, **options)
    extra = {
        "epoch": {},
        "filled": {"epoch_drop_last": False},
        "random": {"batch_sampling_mode": "random"},
        "packed": {"epoch_drop_last": False},
    }[kind]
    return GPTEpisodeDataLoader({**BASE, **extra}, None, directory, pack=kind == "packed", **options)


@pytest.mark.parametrize("kind", ["epoch", "filled", "random", "stream", "packed"])
def test_resume_at_every_step_gives_the_same_remaining_batches(tmp_path: Path, kind: str) -> None:
    write_set(tmp_path, items(13), items(5, seed=3), shards=2)
    whole = make(tmp_path, kind)
    states, batches = [], []
    for step in range(20):
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append((whole.get_batch(), whole.get_batch("val") if step % 3 == 0 else None))
    for start, state in enumerate(states):
        resumed = make(tmp_path, kind)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for train, val in batches[start:]:
            assert same(resumed.get_batch(), train)
            if val is not None:
                assert same(resumed.get_batch("val"), val)


@pytest.mark.parametrize("worlds", [(1, 3), (3, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("kind", ["filled", "packed"])
def test_another_world_size_sees_exactly_what_was_left(tmp_path: Path, worlds: tuple[int, int], kind: str) -> None:
    train = items(29, high=5)
    write_set(tmp_path, train)
    before, after = worlds
    steps = make(tmp_path, kind, world_size=before, rank=0).steps_per_epoch()  # type: ignore[attr-defined]
    assert steps > 2
    for stop in range(steps):
        old = [make(tmp_path, kind, rank=r, world_size=before) for r in range(before)]
        seen = [_starts(one.get_batch()) for _ in range(stop) for one in old]
        state = old[0].state_dict()
        assert all(one.state_dict() == state for one in old)
        new = [make(tmp_path, kind, rank=r, world_size=after) for r in range(after)]
        for one in new:
            one.load_state_dict(state)
        while new[0].epoch() == 0:  # type: ignore[attr-defined]
            got = [_starts(one.get_batch()) for one in new]
            if new[0].epoch() == 0:  # type: ignore[attr-defined]
                seen += got
        assert sorted(v for part in seen for v in part) == [item.ids[0] for item in train]


def _starts(batch: tuple[torch.Tensor, ...]) -> list[int]:
    """First ids of the documents in a batch: they are multiples of 1000 (padding is not)."""
    return [v for v in batch[0].flatten().tolist() if v % 1000 == 0]


@pytest.mark.parametrize("kind", ["random", "stream"])
def test_draws_go_on_with_another_world_size(tmp_path: Path, kind: str) -> None:
    write_set(tmp_path, items(20))
    alone = make(tmp_path, kind)
    rows = torch.cat([alone.get_batch()[0] for _ in range(12)])
    pair = [make(tmp_path, kind, rank=r, world_size=2) for r in range(2)]
    seen = [torch.cat([one.get_batch()[0] for one in pair]) for _ in range(3)]
    three = [make(tmp_path, kind, rank=r, world_size=3) for r in range(3)]
    for one in three:
        one.load_state_dict(pair[0].state_dict())
    seen += [torch.cat([one.get_batch()[0] for one in three]) for _ in range(2)]
    assert torch.equal(torch.cat(seen), rows)


def test_drop_last_with_another_world_size_drops_only_the_tail(tmp_path: Path) -> None:
    train = items(11)
    write_set(tmp_path, train)
    old = make(tmp_path, "epoch")
    first = [old.get_batch()[0][:, 0].tolist() for _ in range(2)]
    new = [make(tmp_path, "epoch", rank=r, world_size=3) for r in range(3)]
    for one in new:
        one.load_state_dict(old.state_dict())
        assert one.rows_left_out() == 1  # type: ignore[attr-defined]
    then = [one.get_batch()[0][:, 0].tolist() for one in new]
    assert new[0].epoch() == 0  # type: ignore[attr-defined]
    assert len({v for part in first + then for v in part}) == 10
    new[0].get_batch()
    assert new[0].epoch() == 1  # type: ignore[attr-defined]


def test_going_back(tmp_path: Path) -> None:
    write_set(tmp_path, items(12))
    made = make(tmp_path, "epoch")
    state = made.state_dict()
    first = [made.get_batch() for _ in range(3)]
    made.load_state_dict(state)
    assert all(same(made.get_batch(), one) for one in first)


def test_another_dataset_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    write_set(tmp_path / "a", items(12))
    write_set(tmp_path / "b", items(12, seed=1))
    for kind in ("epoch", "stream"):
        one, other = make(tmp_path / "a", kind), make(tmp_path / "b", kind)
        state, before = one.state_dict(), other.state_dict()
        with pytest.raises(ConfigError) as caught:
            other.load_state_dict(state)
        for made in (one, other):
            assert made.state_dict()["splits"]["train"]["fingerprint"] in str(caught.value)
        assert other.state_dict() == before


def test_a_state_of_another_kind_version_or_order_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, items(12, low=3))
    state = make(tmp_path, "epoch").state_dict()
    with pytest.raises(ConfigError, match="token_stream"):
        make(tmp_path, "stream").load_state_dict(state)
    with pytest.raises(ConfigError, match="version"):
        make(tmp_path, "epoch").load_state_dict({**state, "version": 99})
    for option, value in (("epoch_seed", 1), ("epoch_shuffle", False), ("batch_sampling_mode", "random")):
        other = GPTEpisodeDataLoader({**BASE, option: value}, None, tmp_path)
        with pytest.raises(ConfigError, match=option):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match="episodes"):
        GPTEpisodeDataLoader({**BASE, "episode_min_tokens": 6}, None, tmp_path).load_state_dict(state)
    smaller = GPTEpisodeDataLoader({**BASE, "batch_size": 3}, None, tmp_path)
    smaller.load_state_dict(state)
    write_set(tmp_path / "more", items(12, low=3), items(4))
    with pytest.raises(ConfigError, match="'val'"):
        make(tmp_path, "epoch").load_state_dict(make(tmp_path / "more", "epoch").state_dict())
