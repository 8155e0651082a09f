"""Which rows a step takes, and resuming: anywhere, with another world size, in torch's loaders and torchrun."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from chatmill.errors import ConfigError
from chatmill.load.order import CHUNK, Draws, EpochPlace, RankShare, Recent, epoch_order, epoch_step, steps_per_epoch
from chatmill.load.packed_batch import PackedBatch
from chatmill.load.placement import named_device, rank_and_world
from chatmill.load.token_stream import GPTDataLoader
from chatmill.store.episodes import EpisodeDataset
from tests.forked import for_shells, run_forked
from tests.load.sets import PAD, items, loader, same, write_set

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

KINDS: dict[str, dict[str, Any]] = {
    "epoch": {},
    "filled": {"epoch_drop_last": False},
    "random": {"batch_sampling_mode": "random"},
    "packed": {"epoch_drop_last": False, "pack": True},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set"), items(13), items(5, seed=3), shards=2)


def make(directory: Path, kind: str, **options: Any) -> Any:
    if kind == "stream":
        config = {"batch_size": 2, "block_size": 6, "pad_token_id": PAD}
        return GPTDataLoader(config, None, directory, use_loss_mask=True, **options)
    return loader(directory, 2, 6, **KINDS[kind], **options)


def make_ranks(directory: Path, kind: str, world: int) -> list[Any]:
    return [make(directory, kind, rank=rank, world_size=world) for rank in range(world)]


# ---- orders, draws and positions


def test_the_order_of_an_epoch_is_the_permutation_of_its_seed() -> None:
    for epoch, seed in itertools.product(range(3), (0, 5)):
        wanted = np.random.RandomState(seed + epoch).permutation(40)
        assert epoch_order(seed, epoch, 40, shuffle=True).tolist() == wanted.tolist()
    assert (epoch_order(5, 2, 6, shuffle=False) == np.arange(6)).all()
    with pytest.raises(ConfigError, match="epoch_seed"):
        epoch_order(2**32 - 1, 1, 4, shuffle=True)


@pytest.mark.parametrize("position", [0, 1, CHUNK - 3, CHUNK - 1, CHUNK, 2 * CHUNK - 5])
def test_draws_are_one_stream_in_chunks(position: int) -> None:
    stream = np.concatenate([np.random.RandomState(9 + j).randint(0, 1000, CHUNK) for j in range(4)])
    draws = Draws(9, 1000)
    for count in (1, 7, 100, CHUNK + 9):
        assert draws.take(position, count).tolist() == stream[position : position + count].tolist()


def test_what_two_epochs_need_is_made_once() -> None:
    """Where one epoch ends and the next begins, batches and those made ahead ask for both."""
    made: list[int] = []
    recent = Recent(lambda epoch: made.append(epoch) or epoch)
    assert [recent.get(epoch) for epoch in (0, 1, 0, 1, 2, 1, 0)] == [0, 1, 0, 1, 2, 1, 0]
    assert made == [0, 1, 2, 0]


@given(
    st.integers(1, 60), st.builds(RankShare, batch_size=st.integers(1, 5), world_size=st.integers(1, 4)),
    st.booleans(), st.integers(1, 30),
)  # fmt: skip
@example(6, RankShare(batch_size=2), True, 9)
def test_ranks_share_every_epoch_without_gap_or_overlap(
    rows: int, first: RankShare, drop_last: bool, steps: int
) -> None:
    batch, world, place = first.batch_size, first.world_size, EpochPlace()
    shares = [RankShare(batch_size=batch, rank=rank, world_size=world) for rank in range(world)]
    if drop_last and rows < batch * world:
        with pytest.raises(ConfigError, match=f"{rows:,} rows"):
            epoch_step(place, lambda e: rows, first, drop_last=True, name="here")
        return
    taken: dict[int, list[int]] = {}
    for _ in range(steps):
        made = [epoch_step(place, lambda e: rows, share, drop_last=drop_last, name="here") for share in shares]
        assert len({(begin, after) for begin, _, after in made}) == 1
        for share, (begin, real, _) in zip(shares, made, strict=True):
            assert 0 <= real <= batch
            at = begin.position + share.first
            taken.setdefault(begin.epoch, []).extend(range(at, at + real))
        place = made[0][2]
    *whole, last = sorted(taken)
    per_epoch = rows // (batch * world) * batch * world if drop_last else rows
    for epoch in whole:
        assert taken[epoch] == list(range(per_epoch))
    assert taken[last] == list(range(len(taken[last])))
    assert last == (steps - 1) // steps_per_epoch(rows, first, drop_last=drop_last)


# ---- states


@pytest.mark.parametrize("kind", [*KINDS, "stream"])
def test_resume_at_every_step_gives_the_same_remaining_batches(directory: Path, kind: str) -> None:
    whole = make(directory, kind)
    states, batches = [], []
    for step in range(20):
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append((whole.get_batch(), whole.get_batch("val") if step % 3 == 0 else None))
    for start, state in enumerate(states):
        resumed = make(directory, kind) if start else whole  # it may go back, too
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
    steps = make_ranks(tmp_path, kind, worlds[0])[0].steps_per_epoch()
    assert steps > 2
    for stop in range(steps):
        old, new = (make_ranks(tmp_path, kind, world) for world in worlds)
        seen = [_starts(one.get_batch()) for _ in range(stop) for one in old]
        state = old[0].state_dict()
        assert all(one.state_dict() == state for one in old)
        for one in new:
            one.load_state_dict(state)
        while new[0].epoch() == 0:
            got = [_starts(one.get_batch()) for one in new]
            if new[0].epoch() == 0:
                seen += got
        assert sorted(v for part in seen for v in part) == [item.ids[0] for item in train]


def _starts(batch: tuple[torch.Tensor, ...]) -> list[int]:
    """First ids of the documents in a batch: they are multiples of 1000 (padding is not)."""
    return [v for v in batch[0].flatten().tolist() if v % 1000 == 0]


@pytest.mark.parametrize("kind", ["random", "stream"])
def test_draws_go_on_with_another_world_size(directory: Path, kind: str) -> None:
    alone = make(directory, kind)
    rows = torch.cat([alone.get_batch()[0] for _ in range(12)])
    pair, three = make_ranks(directory, kind, 2), make_ranks(directory, kind, 3)
    seen = [torch.cat([one.get_batch()[0] for one in pair]) for _ in range(3)]
    for one in three:
        one.load_state_dict(pair[0].state_dict())
    seen += [torch.cat([one.get_batch()[0] for one in three]) for _ in range(2)]
    assert torch.equal(torch.cat(seen), rows)


def test_drop_last_with_another_world_size_drops_only_the_tail(tmp_path: Path) -> None:
    write_set(tmp_path, items(11))
    old, new = make(tmp_path, "epoch"), make_ranks(tmp_path, "epoch", 3)
    seen = [_starts(old.get_batch()) for _ in range(2)]
    for one in new:
        one.load_state_dict(old.state_dict())
        assert one.rows_left_out() == 1
    seen += [_starts(one.get_batch()) for one in new]
    assert new[0].epoch() == 0
    assert len({v for part in seen for v in part}) == 10
    new[0].get_batch()
    assert new[0].epoch() == 1


def test_another_dataset_is_refused_with_both_fingerprints(directory: Path, tmp_path: Path) -> None:
    write_set(tmp_path, items(12, seed=1))
    for kind in ("epoch", "stream"):
        one, other = make(directory, kind), make(tmp_path, kind)
        state, before = one.state_dict(), other.state_dict()
        with pytest.raises(ConfigError) as caught:
            other.load_state_dict({**state, "splits": {"train": state["splits"]["train"]}})
        for made in (one, other):
            assert made.state_dict()["splits"]["train"]["fingerprint"] in str(caught.value)
        assert other.state_dict() == before


def test_a_state_of_another_kind_version_or_order_is_refused(directory: Path, tmp_path: Path) -> None:
    state = make(directory, "epoch").state_dict()
    write_set(tmp_path, items(12))
    for saved, other, says in (
        (state, make(directory, "stream"), "token_stream"),
        ({**state, "version": 99}, make(directory, "epoch"), "version"),
        (state, make(directory, "epoch", epoch_seed=1), "epoch_seed"),
        (state, make(directory, "epoch", epoch_shuffle=False), "epoch_shuffle"),
        (state, make(directory, "random"), "batch_sampling_mode"),
        (state, make(directory, "epoch", episode_min_tokens=6), "episodes"),
        ({**state, "splits": {"val": {}}}, make(tmp_path, "epoch"), "'val'"),
    ):
        with pytest.raises(ConfigError, match=says):
            other.load_state_dict(saved)
    loader(directory, 3, 6).load_state_dict(state)


# ---- torch's DataLoader and torchdata's StatefulDataLoader


def as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def running(wrapped: Any) -> Iterator[Iterator[Any]]:
    """The batches of an endless loader; its workers are ended here, not whenever it is collected."""
    batches = iter(wrapped)
    try:
        yield batches
    finally:
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


def first_batches(wrapped: Any, count: int) -> list[Any]:
    with running(wrapped) as batches:
        return list(itertools.islice(batches, count))


@pytest.mark.parametrize(("kind", "workers", "used"), [("filled", 2, 0), ("stream", 0, 0), ("filled", 2, 3)])
def test_a_dataloader_hands_out_the_same_batches(directory: Path, kind: str, workers: int, used: int) -> None:
    """They go on from the delivered place."""
    alone, made = make(directory, kind), make(directory, kind)
    for _ in range(used):
        assert same(made.get_batch(), alone.get_batch())
    made = pickle.loads(pickle.dumps(made))  # as spawned workers get it
    got = first_batches(DataLoader(made, batch_size=None, num_workers=workers), 17)
    assert all(same(batch, alone.get_batch()) for batch in got)


def test_workers_never_touch_cuda(directory: Path) -> None:
    """A loader for a GPU pins its batches; a forked worker cannot, and gives them in ordinary memory."""
    alone, made = make(directory, "filled"), make(directory, "filled", device="cuda", pin_memory=True)
    wrapped = DataLoader(made, batch_size=None, num_workers=1)
    assert all(same(got, alone.get_batch()) for got in first_batches(wrapped, 4))


def test_threads_do_not_disturb_each_other(directory: Path) -> None:
    """A batch that another thread asks for waits, also where rows are laid slowly."""
    made, steps, expected = make(directory, "filled"), [], []
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
    wrapped = DataLoader(make(directory, "packed"), batch_size=None, num_workers=1, collate_fn=as_it_is)
    for got in first_batches(wrapped, 3):
        assert isinstance(got, PackedBatch)
        assert torch.equal(got.position_ids, alone.get_batch().position_ids)
    plain: Any = next(iter(DataLoader(make(directory, "packed"), batch_size=None)))
    with pytest.raises(ConfigError, match=r"lost the lengths of its rows.*collate_fn"):
        _ = plain.position_ids
    dataset: Any = EpisodeDataset(directory)
    wrapped = DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=as_it_is)
    episodes = [episode.ids.tolist() for batch in wrapped for episode in batch]
    assert episodes == [episode.ids.tolist() for episode in dataset]
    assert len(episodes) == 13


@pytest.mark.parametrize(("kind", "workers"), [("filled", 0), ("stream", 2), ("packed", 2)])
def test_a_stateful_dataloader_resumes_at_every_step(directory: Path, kind: str, workers: int) -> None:
    alone = make(directory, kind)
    wanted = [alone.get_batch() for _ in range(14)]
    first = StatefulDataLoader(make(directory, kind), batch_size=None, num_workers=workers)
    with running(first) as batches:
        for stop in range(1, 9):
            assert same(next(batches), wanted[stop - 1])
            if workers and stop % 3:
                continue
            resumed = StatefulDataLoader(make(directory, kind), batch_size=None, num_workers=workers)
            resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
            assert all(map(same, first_batches(resumed, 5), wanted[stop : stop + 5]))
        if workers:
            worker = next(iter(first.state_dict()["_snapshot"]["_worker_snapshots"].values()))
            made = make(directory, kind)
            made.load_state_dict(worker["dataset_state"])
            with pytest.raises(ValueError, match="same num_workers"):
                first_batches(DataLoader(made, batch_size=None, num_workers=1), 1)


# ---- processes

SCRIPT = """
import json, sys
from chatmill.load.episodes import GPTEpisodeDataLoader

made = GPTEpisodeDataLoader(json.loads(sys.argv[1]), None, sys.argv[2])
rows = [made.get_batch()[0][:, 0].tolist() for _ in range(made.steps_per_epoch())]
open(f"{sys.argv[3]}.{made.rank}", "w").write(json.dumps([made.world_size, rows]))
"""


def test_two_processes_of_torchrun_share_an_epoch(tmp_path: Path) -> None:
    train = items(25)
    write_set(tmp_path / "set", train)
    config = {"batch_size": 3, "block_size": 6, "pad_token_id": PAD, "epoch_drop_last": False}
    script, torchrun = tmp_path / "run.py", tmp_path / "torchrun.py"
    script.write_text(SCRIPT)
    torchrun.write_text("from torch.distributed.run import main; main()")
    options = ["--standalone", "--nproc_per_node=2", "--log-dir", str(tmp_path / "logs"), "--no-python"]
    command = ["python", str(script), json.dumps(config), str(tmp_path / "set"), str(tmp_path / "out")]
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}} | {"OMP_NUM_THREADS": "1"}
    done = run_forked(torchrun, *options, *command, env=for_shells(environment))
    assert done.returncode == 0, done.stderr[-3000:]
    (world, first), (_, second) = (json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2))
    assert (world, len(first), len(second)) == (2, 5, 5)
    taken = [v for part in first + second for v in part if v != PAD]
    assert sorted(taken) == [item.ids[0] for item in train]


def test_ranks_and_devices_come_from_the_arguments_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_and_world() == (0, 1)
    assert rank_and_world(2, 4) == (2, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_and_world() == (1, 3)
    assert rank_and_world(0) == (0, 3)
    with pytest.raises(ConfigError, match="rank 3 of world_size 3"):
        rank_and_world(3)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        rank_and_world()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert named_device("cuda").type == named_device("cuda:0").type == "cuda"
    with pytest.raises(ConfigError, match="there are 1 GPUs, counted from 0"):
        named_device("cuda:1")
