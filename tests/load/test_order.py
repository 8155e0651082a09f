"""Orders, draws and the arithmetic of global positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import ConfigError
from chatmill.load.order import CHUNK, Draws, EpochPlace, RankShare, Recent, epoch_order, epoch_step, steps_per_epoch


def test_the_order_of_an_epoch_is_the_permutation_of_its_seed() -> None:
    for epoch in range(3):
        for seed in (0, 5):
            wanted = np.random.RandomState(seed + epoch).permutation(40)
            assert epoch_order(seed, epoch, 40, shuffle=True).tolist() == wanted.tolist()
    assert (epoch_order(5, 2, 6, shuffle=False) == np.arange(6)).all()


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


def test_a_seed_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch_seed"):
        epoch_order(2**32 - 1, 1, 4, shuffle=True)


@given(
    rows=st.integers(1, 60),
    batch=st.integers(1, 5),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    steps=st.integers(1, 30),
)
def test_ranks_share_every_epoch_without_gap_or_overlap(
    rows: int, batch: int, world: int, drop_last: bool, steps: int
) -> None:
    place = EpochPlace()
    shares = [RankShare(batch_size=batch, rank=rank, world_size=world) for rank in range(world)]
    if drop_last and rows < batch * world:
        with pytest.raises(ConfigError, match=f"{rows:,} rows"):
            epoch_step(place, lambda e: rows, shares[0], drop_last=True, name="here")
        return
    taken: dict[int, list[int]] = {}
    for _ in range(steps):
        made = [epoch_step(place, lambda e: rows, share, drop_last=drop_last, name="here") for share in shares]
        assert len({(begin, after) for begin, _, after in made}) == 1
        for share, (begin, real, _) in zip(shares, made, strict=True):
            assert 0 <= real <= batch
            first = begin.position + share.first
            taken.setdefault(begin.epoch, []).extend(range(first, first + real))
        place = made[0][2]
    *whole, last = sorted(taken)
    per_epoch = rows // (batch * world) * batch * world if drop_last else rows
    for epoch in whole:
        assert taken[epoch] == list(range(per_epoch))
    assert taken[last] == list(range(len(taken[last])))
    assert last == (steps - 1) // steps_per_epoch(rows, shares[0], drop_last=drop_last)
