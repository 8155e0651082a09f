"""The loaders inside torch's DataLoader and torchdata's StatefulDataLoader, with and without workers."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.loader import BatchLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.load.token_stream import GPTDataLoader
from chatmill.store.episodes import Episode, EpisodeDataset
from tests.load.sets import PAD, items, same, write_set

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

BASE = {"batch_size": 2, "block_size": 6, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set"), items(13), items(5), shards=2)


def make(directory: Path, kind: str) -> BatchLoader:
    if kind == "stream":
        return GPTDataLoader(BASE, None, directory, use_loss_mask=True)
    config = {**BASE, "epoch_drop_last": False}
    return GPTEpisodeDataLoader(config, None, directory, pack=kind == "packed")


def as_it_is(batch: Any) -> Any:
    return batch


def first_batches(wrapped: Any, count: int) -> list[Any]:
    """Some batches of an endless loader; its workers are ended here, not whenever it is collected."""
    running = iter(wrapped)
    try:
        return list(itertools.islice(running, count))
    finally:
        end_workers(running)


def end_workers(running: Any) -> None:
    if hasattr(running, "_shutdown_workers"):
        running._shutdown_workers()


@pytest.mark.parametrize(("kind", "workers"), [("episodes", 2), ("stream", 0)])
def test_a_dataloader_hands_out_the_same_batches(directory: Path, kind: str, workers: int) -> None:
    alone = make(directory, kind)
    wanted = [alone.get_batch() for _ in range(17)]
    wrapped = DataLoader(make(directory, kind), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    got = first_batches(wrapped, 17)
    assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


def test_workers_after_the_loader_was_used(directory: Path) -> None:
    """The workers go on from the delivered place."""
    alone, used = make(directory, "episodes"), make(directory, "episodes")
    for _ in range(3):
        alone.get_batch()
        used.get_batch()
    wrapped = DataLoader(used, batch_size=None, num_workers=2)  # type: ignore[arg-type]
    assert all(same(got, alone.get_batch()) for got in first_batches(wrapped, 8))


def test_workers_never_touch_cuda(directory: Path) -> None:
    """A loader for a GPU pins its batches; a forked worker cannot, and gives them in ordinary memory."""
    alone = make(directory, "episodes")
    config = {**BASE, "epoch_drop_last": False}
    made = GPTEpisodeDataLoader(config, None, directory, device="cuda", pin_memory=True)
    wrapped = DataLoader(made, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    assert all(same(got, alone.get_batch()) for got in first_batches(wrapped, 4))


def test_a_loader_is_pickled_as_spawned_workers_need_it(directory: Path) -> None:
    made = make(directory, "episodes")
    copy = pickle.loads(pickle.dumps(made))
    assert all(same(copy.get_batch(), made.get_batch()) for _ in range(3))


def test_threads_do_not_disturb_each_other(directory: Path) -> None:
    """A batch that another thread asks for waits, also where rows are laid slowly."""
    made, steps, expected = make(directory, "episodes"), [], []
    for _ in range(2):
        expected.append(made.get_batch())
        steps.append(made.last_step())
    rows = made.rows("train")
    lay, started = rows.lay, threading.Barrier(2)

    def slowly(*arguments: Any) -> Any:
        laid = lay(*arguments)
        time.sleep(0.05)
        return laid

    def asked(number: int) -> Any:
        started.wait()
        return made.batch_of(steps[number])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(rows, "lay", slowly)
        batches = list(threads.map(asked, range(2)))
    assert all(map(same, batches, expected))


def test_packed_batches_keep_their_boundaries_with_a_collate_fn(directory: Path) -> None:
    alone = make(directory, "packed")
    wrapped = DataLoader(
        make(directory, "packed"),
        batch_size=None,
        num_workers=1,
        collate_fn=as_it_is,  # type: ignore[arg-type]
    )
    for got in first_batches(wrapped, 3):
        wanted = alone.get_batch()
        assert isinstance(got, PackedBatch)
        assert isinstance(wanted, PackedBatch)
        assert torch.equal(got.position_ids, wanted.position_ids)
    plain = next(iter(DataLoader(make(directory, "packed"), batch_size=None)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="collate_fn"):
        _ = plain.position_ids


@pytest.mark.parametrize(("kind", "workers"), [("episodes", 0), ("stream", 2), ("packed", 2)])
def test_a_stateful_dataloader_resumes_at_every_step(directory: Path, kind: str, workers: int) -> None:
    alone = make(directory, kind)
    wanted = [alone.get_batch() for _ in range(14)]
    first = StatefulDataLoader(make(directory, kind), batch_size=None, num_workers=workers)
    running = iter(first)
    for stop in range(1, 9):
        assert same(next(running), wanted[stop - 1])
        if workers and stop % 3:
            continue
        resumed = StatefulDataLoader(make(directory, kind), batch_size=None, num_workers=workers)
        resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        got = first_batches(resumed, 5)
        assert all(same(a, b) for a, b in zip(got, wanted[stop : stop + 5], strict=True))
    end_workers(running)


def test_a_state_of_another_number_of_workers_is_refused(directory: Path) -> None:
    first = StatefulDataLoader(make(directory, "episodes"), batch_size=None, num_workers=2)
    running = iter(first)
    next(running)
    worker = next(iter(first.state_dict()["_snapshot"]["_worker_snapshots"].values()))
    made = make(directory, "episodes")
    made.load_state_dict(worker["dataset_state"])
    wrapped = DataLoader(made, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same num_workers"):
        first_batches(wrapped, 1)
    end_workers(running)


def test_an_episode_dataset_is_a_map_style_dataset(directory: Path) -> None:
    dataset = EpisodeDataset(directory)
    wrapped = DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=as_it_is)  # type: ignore[arg-type]
    got: list[Episode] = [episode for batch in wrapped for episode in batch]
    assert [e.ids.tolist() for e in got] == [e.ids.tolist() for e in dataset]
    assert len(got) == 13
