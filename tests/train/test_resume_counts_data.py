"""A run that goes on with other ranks, batches or accumulation still sees each row as often as an unbroken one."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.pack.stream import PackedStream, pack_post_training_stream
from chatmill.train.batch import TrainBatch, as_batch
from chatmill.train.config import TrainConfig
from chatmill.train.feed import TrainFeed
from chatmill.train.phase import Phase, phase_of
from chatmill.train.step import Stepper
from chatmill.train.stream_blocks import StreamBlockLoader
from chatmill.train.trainer import RunOutcome, fit
from tests.load.sets import write_set
from tests.train.test_trainer import CPU, PAD, small_items
from tests.train.tiny import tiny_gpt

IDS = {"system_id": 10, "user_id": 11, "assistant_id": 12, "end_id": 13, "eos_id": 0}
GEOMETRIES = [(1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 3), (2, 1, 2), (3, 1, 1)]
"""(ranks, batch size, accumulation)."""
PAIRS = list(itertools.product(GEOMETRIES, repeat=2))
Targets = Counter[tuple[int, int]]


def blocks() -> PackedStream:
    """21 blocks that each train targets of their own."""
    return pack_post_training_stream([[11, n, 13, 12, n, 13] for n in range(20, 41)], block_size=7, **IDS)


def targets_of(batches: list[TrainBatch]) -> Targets:
    """What is trained, as (the token before, the target)."""
    found: Targets = Counter()
    for batch in batches:
        trained = batch.labels != -100
        if batch.weights is not None:
            trained &= batch.weights != 0
        found.update(zip(batch.input_ids[trained].tolist(), batch.labels[trained].tolist(), strict=True))
    return found


def walk(feeds: list[TrainFeed], phases: list[Phase], accumulation: int, steps: int | None = None) -> Targets:
    """Take the steps of a phase (or some of them) on all ranks, as the trainer does."""
    seen: Targets = Counter()
    for feed, phase in zip(feeds, phases, strict=True):
        for number in range(phase.steps_left if steps is None else steps):
            count = phase.micro_batches(number, accumulation)
            taken = [feed.next() for _ in range(count)]
            assert all(batch is not None for batch in taken)
            seen += targets_of([batch for batch in taken if batch is not None])
    return seen


def opened(make: Any, geometry: tuple[int, int, int], config: dict[str, Any], state: Any, done: int) -> Any:
    ranks, size, accumulation = geometry
    feeds = [TrainFeed(make(size, rank, ranks), CPU) for rank in range(ranks)]
    for feed in feeds:
        if state is not None:
            feed.load_state(state)
    options = TrainConfig(accumulation=accumulation, **config)
    return feeds, [phase_of(feed, options, done=done, first_epoch=0) for feed in feeds]


def stopped_and_gone_on(make: Any, before: Any, after: Any, config: dict[str, Any]) -> tuple[Targets, Phase]:
    """Two steps of one geometry, and the rest of the phase in another."""
    feeds, phases = opened(make, before, config, None, 0)
    seen = walk(feeds, phases, before[2], steps=2)
    state = feeds[-1].state()
    feeds, phases = opened(make, after, config, state, 2)
    assert len({(p.steps, p.steps_left) for p in phases}) == 1, "ranks agree"
    return seen + walk(feeds, phases, after[2]), phases[0]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_stream_goes_on_with_any_geometry_to_its_last_block(before: Any, after: Any) -> None:
    packed = blocks()

    def make(size: int, rank: int, ranks: int) -> StreamBlockLoader:
        return StreamBlockLoader(packed, batch_size=size, eos_id=0, rank=rank, world_size=ranks)

    whole, _ = opened(make, (1, 1, 1), {"post_training": True}, None, 0)
    expected = targets_of([whole[0].next() for _ in range(21)])
    assert sum(expected.values()) == 21 * 3
    seen, phase = stopped_and_gone_on(make, before, after, {"post_training": True})
    assert seen == expected
    if before == after:
        assert phase.first == 2


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.parametrize("pack", [False, True])
def test_epochs_go_on_with_any_geometry_to_their_end(
    before: Any, after: Any, pack: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = _set_of(tmp_path_factory)

    def make(size: int, rank: int, ranks: int) -> GPTEpisodeDataLoader:
        config = {"batch_size": size, "block_size": 16, "pad_token_id": PAD, "use_loss_mask": True}
        options: dict[str, Any] = {"pack": pack, "rank": rank, "world_size": ranks, "prefetch": False}
        return GPTEpisodeDataLoader(config | {"epoch_drop_last": False}, None, directory, **options)

    alone = make(1, 0, 1)
    rows = sum(alone.steps_per_epoch(epoch=epoch) for epoch in range(2))
    feed = TrainFeed(alone, CPU)
    expected = targets_of([feed.next() for _ in range(rows)])  # type: ignore[misc]
    assert sum(expected.values()) > 100
    seen, phase = stopped_and_gone_on(make, before, after, {"epochs": 2})
    assert seen == expected
    if before == after:
        assert phase.first == 2


_SETS: list[Path] = []


def _set_of(factory: pytest.TempPathFactory) -> Path:
    if not _SETS:
        _SETS.append(write_set(factory.mktemp("set"), small_items(29)))
    return _SETS[0]


class _Recorded:
    """Every batch that a run trains on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[TrainBatch] = []
        step = Stepper.step

        def recorded(stepper: Stepper, batches: Any, rate: float) -> Any:
            self.batches += batches
            return step(stepper, batches, rate)

        monkeypatch.setattr(Stepper, "step", recorded)


class _Stopping(StreamBlockLoader):
    """Ends the run after some batches, as SIGTERM from outside does."""

    after = 3

    def get_batch(self, split: str = "train") -> Any:
        self.after -= 1
        if not self.after:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().get_batch(split)


@pytest.mark.parametrize("second", [(4, 1), (2, 3), (1, 1), (16, 1)])
def test_fit_counts_blocks_and_not_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: tuple[int, int]
) -> None:
    recorded = _Recorded(monkeypatch)
    packed = blocks()
    torch.manual_seed(0)
    first = fit(
        tiny_gpt(layers=1), _Stopping(packed, batch_size=2, eos_id=0), out=tmp_path, post_training=True, warmup_pct=0
    )
    assert (first.outcome, first.step) == (RunOutcome.STOPPED, 3)
    size, accumulation = second
    loader = StreamBlockLoader(packed, batch_size=size, eos_id=0)
    options: dict[str, Any] = {"accumulation": accumulation, "post_training": True, "log_every": 1, "warmup_pct": 0}
    done = fit(tiny_gpt(layers=1), loader, out=tmp_path, **options)
    assert done.outcome is RunOutcome.FINISHED
    assert done.step == 3 + -(-15 // (size * accumulation))
    whole = StreamBlockLoader(packed, batch_size=21, eos_id=0)
    assert targets_of(recorded.batches) == targets_of([as_batch(whole.get_batch(), CPU)])
    assert done.history[-1]["lr"] == pytest.approx(3e-5), "the schedule ends with the data"
    again = fit(tiny_gpt(layers=1), StreamBlockLoader(packed, batch_size=3, eos_id=0), out=tmp_path, post_training=True)
    assert again.outcome is RunOutcome.ALREADY_FINISHED


def test_a_pass_ends_with_its_data_where_accumulation_does_not_divide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 batches at 2 a step are 3 steps, and the third has one batch, not one of the next epoch."""
    recorded = _Recorded(monkeypatch)
    write_set(tmp_path, small_items(20))
    config = {"batch_size": 4, "block_size": 16, "pad_token_id": PAD, "use_loss_mask": True}
    loader = GPTEpisodeDataLoader(config, None, tmp_path)
    assert fit(tiny_gpt(layers=1), loader, epochs=1, accumulation=2).step == 3
    assert len(recorded.batches) == 5
    assert fit(tiny_gpt(layers=1), loader, epochs=1, accumulation=2).step == 3, "the next epoch of the same loader"
    assert len(recorded.batches) == 10
    once, twice = targets_of(recorded.batches[:5]), targets_of(recorded.batches)
    assert twice == once + once
