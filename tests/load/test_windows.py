"""`order: windows`: every row once an epoch, shards inside windows, the same for all world sizes and resumes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from chatmill.errors import ConfigError
from chatmill.files import stores
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.windows import mean_distance, plan_windows
from chatmill.pack.plan import Strategy
from chatmill.store.episode_writer import EpisodeWriter
from tests.files.stores_for_tests import put_folder

SHARDS, EACH = 12, 10
CONFIG = {
    "batch_size": 2,
    "block_size": 16,
    "pad_token_id": 0,
    "order": "windows",
    "window": 3,
    "epoch_drop_last": False,
}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Shards of ten episodes, each of which has its own number as every token."""
    with EpisodeWriter(tmp_path / "set", "train", shard_tokens=7 * EACH) as writer:
        for number in range(SHARDS * EACH):
            writer.append([number + 1] * (5, 9)[number % 2])
    return tmp_path / "set"


def seen(loader: GPTEpisodeDataLoader, steps: int) -> list[list[list[int]]]:
    out = []
    for _ in range(steps):
        x, *_ = loader.get_batch()
        out.append(x.tolist())
    return out


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_has_every_episode_once_and_windows_hold_their_shards(stored: Path, pack: bool) -> None:
    loader = GPTEpisodeDataLoader(CONFIG, dataset_dir=stored, pack=pack)
    rows = loader.episode_rows()
    shard_of = np.searchsorted(rows.dataset.episode_offsets, np.arange(len(rows.dataset)), side="right") - 1
    orders = []
    for epoch in range(2):
        planned = rows.epoch_plan(epoch)
        assert planned.bounds is not None
        numbers, counts = rows.documents(epoch, planned.rows)
        assert sorted(numbers.tolist()) == list(range(len(rows.dataset)))
        window_of_row = np.repeat(np.arange(len(planned.windows)), np.diff(planned.bounds))
        window_of_shard = {int(shard): n for n, own in enumerate(planned.windows) for shard in own}
        for row, window in zip(np.split(numbers, np.cumsum(counts)[:-1]), window_of_row, strict=True):
            assert {window_of_shard[int(shard_of[number])] for number in row} == {window}
        orders.append(numbers.tolist())
    assert orders[0] != orders[1]


@pytest.mark.parametrize("pack", [False, True])
def test_batches_are_the_same_for_world_sizes_and_resumes_between_them(stored: Path, pack: bool) -> None:
    whole = GPTEpisodeDataLoader({**CONFIG, "batch_size": 24}, dataset_dir=stored, pack=pack)
    steps = 9
    expected = [row for batch in seen(whole, steps) for row in batch]
    for world in (1, 2, 3, 8):
        config = {**CONFIG, "batch_size": 24 // world}
        ranks = [
            GPTEpisodeDataLoader(config, dataset_dir=stored, pack=pack, rank=rank, world_size=world)
            for rank in range(world)
        ]
        batches = [[row for rank in ranks for row in seen(rank, 1)[0]] for _ in range(4)]
        state = json.loads(json.dumps(ranks[0].state_dict()))
        other = GPTEpisodeDataLoader({**CONFIG, "batch_size": 24}, dataset_dir=stored, pack=pack)
        other.load_state_dict(state)
        batches += seen(pickle.loads(pickle.dumps(other)), steps - 4)
        assert [row for batch in batches for row in batch] == expected


def test_a_state_of_another_window_is_refused(stored: Path) -> None:
    state = GPTEpisodeDataLoader(CONFIG, dataset_dir=stored).state_dict()
    with pytest.raises(ConfigError, match="window = 3, this loader has 4"):
        GPTEpisodeDataLoader({**CONFIG, "window": 4}, dataset_dir=stored).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"order = 'windows', this loader has None"):
        GPTEpisodeDataLoader({**CONFIG, "order": "global"}, dataset_dir=stored).load_state_dict(state)


def test_how_far_rows_of_a_shard_are_apart_is_said(stored: Path) -> None:
    apart = [
        GPTEpisodeDataLoader({**CONFIG, "window": window}, dataset_dir=stored).data_report()["rows_apart"]
        for window in (1, 3, 12)
    ]
    assert apart == sorted(apart)
    assert apart[0] == pytest.approx((EACH + 1) / 3)
    assert apart[2] == pytest.approx((SHARDS * EACH + 1) / 3, rel=0.15)
    assert mean_distance(np.array([0, 1, 0, 0]), np.arange(4)) == (2 + 3 + 1) / 3


def test_windows_are_planned_as_if_each_were_a_dataset() -> None:
    lengths = np.random.RandomState(1).randint(1, 9, 50)
    starts = np.arange(0, 51, 5)
    planned = plan_windows(lengths, starts, window=2, width=10, strategy=Strategy.BEST_FIT, seed=None)
    assert planned.bounds is not None
    for number, shards in enumerate(planned.windows):
        first, last = planned.bounds[number], planned.bounds[number + 1]
        alone = plan_windows(
            lengths[10 * number : 10 * number + 10], np.array([0, 10]), window=1, width=10,
            strategy=Strategy.BEST_FIT, seed=None,
        )  # fmt: skip
        own = planned.order[planned.offsets[first] : planned.offsets[last]]
        assert (own - 10 * number).tolist() == alone.order.tolist()
        assert shards.tolist() == [2 * number, 2 * number + 1]


@pytest.fixture
def url(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    name = f"memory://{tmp_path.name}/set"
    put_folder(stored, name)
    manifest = json.loads((stored / "train/episodes.json").read_bytes())
    files = {f"train/{shard['name']}/{file}": of for shard in manifest["shards"] for file, of in shard["files"].items()}
    from chatmill.core.checksums import FileRecord

    files["train/episodes.json"] = FileRecord.of_file(stored / "train/episodes.json").to_json()
    export = {"files": files}
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/set/export.json", json.dumps(export).encode())
    yield name
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_each_byte_is_fetched_once_an_epoch_from_a_cache_of_two_windows(
    stored: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [path.stat().st_size for path in stored.rglob("tokens.bin")]
    heads = sum(path.stat().st_size for path in stored.rglob("*") if path.is_file()) - sum(sizes)
    monkeypatch.setenv("CHATMILL_CACHE_LIMIT", str(heads + 7 * max(sizes)))
    read, fetched = stores.read_range, []

    def counted(url: str, start: int, stop: int) -> bytes:
        fetched.append(url)
        return read(url, start, stop)

    monkeypatch.setattr(stores, "read_range", counted)
    local = GPTEpisodeDataLoader(CONFIG, dataset_dir=stored)
    far = GPTEpisodeDataLoader(CONFIG, dataset_dir=url)
    steps = local.steps_per_epoch()
    assert seen(far, steps) == seen(local, steps)
    tokens = [name for name in fetched if name.endswith("tokens.bin")]
    assert sorted(set(tokens)) == sorted(tokens), "each once"
    assert len(tokens) == SHARDS


def test_an_order_that_does_not_fit_the_cache_is_refused_with_both_ways_out(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPTEpisodeDataLoader(CONFIG, dataset_dir=url)  # fetches the indexes
    monkeypatch.setenv("CHATMILL_CACHE_LIMIT", "2000")
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes .* may hold 2,000: raise CHATMILL_CACHE_LIMIT.*windows"):
        GPTEpisodeDataLoader({**CONFIG, "order": "global"}, dataset_dir=url)
    with pytest.raises(ConfigError, match="or give a smaller window than 12 shards"):
        GPTEpisodeDataLoader({**CONFIG, "window": 12}, dataset_dir=url)


def test_rows_at_random_have_no_windows(stored: Path) -> None:
    with pytest.raises(ConfigError, match="order=windows is for epochs"):
        GPTEpisodeDataLoader({**CONFIG, "batch_sampling_mode": "random"}, dataset_dir=stored)
