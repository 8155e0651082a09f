"""Mixtures: shares, own epochs, determinism, resume and other world sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError
from chatmill.load.mixture import MixtureLoader, SourceDraws
from chatmill.load.order import CHUNK
from tests.load.sets import PAD, Item, items, row, same, write_set

BASE = {"batch_size": 4, "block_size": 8, "dataset_mode": "sft_episode", "pad_token_id": PAD, "use_loss_mask": True}
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
SIZES = {"a": 9, "b": 5, "c": 14}


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, list[Item]]:
    made = {}
    for number, (name, size) in enumerate(SIZES.items(), 1):
        shifted = [
            Item(ids=[t + 100_000 * number for t in item.ids], weights=item.weights)
            for item in items(size, seed=number)
        ]
        write_set(tmp_path / name, shifted, shifted[:3] if name != "c" else [])
        made[name] = shifted
    return made


def make(directory: Path, **options: object) -> MixtureLoader:
    sources = {directory / name: weight for name, weight in WEIGHTS.items()}
    return MixtureLoader({**BASE, **options.pop("config", {})}, sources, **options)  # type: ignore[dict-item,arg-type]


def reference(sets: dict[str, list[Item]], rows: int) -> list[Item]:
    """Row by row: draw the source, then take the next episode of that source's own epochs."""
    shares = np.cumsum(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    draws = np.random.RandomState(1337).random_sample(65536)
    orders = {
        name: [i for epoch in range(60) for i in np.random.RandomState(1337 + epoch).permutation(len(episodes))]
        for name, episodes in sets.items()
    }
    taken = dict.fromkeys(sets, 0)
    made = []
    for u in draws[:rows]:
        name = list(sets)[int(np.sum(u >= shares))]
        made.append(sets[name][orders[name][taken[name]]])
        taken[name] += 1
    return made


def as_tensors(rows: list[Item]) -> tuple[torch.Tensor, ...]:
    x, y, mask = zip(*(row(item, 8) for item in rows), strict=True)
    return torch.tensor(x), torch.tensor(y), torch.tensor(mask, dtype=torch.float32)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_equal_the_slow_reference(tmp_path: Path, sets: dict[str, list[Item]], world: int) -> None:
    ranks = [make(tmp_path, rank=r, world_size=world) for r in range(world)]
    wanted = reference(sets, 4 * world * 20)
    for step in range(20):
        for rank, one in enumerate(ranks):
            first = (step * world + rank) * 4
            assert same(one.get_batch(), as_tensors(wanted[first : first + 4]))


def test_shares_follow_the_weights_and_epochs_are_in_the_state(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    made = make(tmp_path, config={"batch_size": 100})
    counts = np.zeros(3)
    for _ in range(35):
        firsts = made.get_batch()[0][:, 0].numpy() // 100_000 - 1
        counts += np.bincount(firsts, minlength=3)
    assert np.abs(counts / counts.sum() - np.array([2, 4, 1]) / 7).max() < 0.02
    place = json.loads(json.dumps(made.state_dict()))["splits"]["train"]["place"]
    assert place["position"] == 3500
    for i, name in enumerate(WEIGHTS):
        at = place["sources"][str(tmp_path / name)]
        assert at["epoch"] * SIZES[name] + at["position"] == counts[i]
        assert at["epoch"] > 10


@pytest.mark.parametrize("pack", [False, True])
def test_resume_at_every_step_and_with_another_world_size(
    tmp_path: Path, sets: dict[str, list[Item]], pack: bool
) -> None:
    whole = make(tmp_path, pack=pack)
    states, rows = [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(whole.state_dict())))
        rows.append(whole.get_batch())
    for start, state in enumerate(states):
        resumed = make(tmp_path, pack=pack, prefetch=False)
        resumed.load_state_dict(state)
        assert all(same(resumed.get_batch(), one) for one in rows[start:])
    pair = [make(tmp_path, pack=pack, rank=r, world_size=2) for r in range(2)]
    for one in pair:
        one.load_state_dict(states[4])
    for step in range(4):
        for rank, one in enumerate(pair):
            assert same(one.get_batch(), rows[4 + 2 * step + rank])


def test_one_set_without_masks_leaves_the_mixture_without(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    """Masks of some rows and made-up ones of others would say that the others train everything."""
    for mask in (tmp_path / "b").rglob("mask.bin"):
        mask.unlink()
    with pytest.warns(UserWarning, match=r"b.train: there is no mask\.bin.*batches come without"):
        made = make(tmp_path)
    assert same(made.get_batch(), as_tensors(reference(sets, 4))[:2])


def test_val_mixes_the_sets_that_have_one(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    made = make(tmp_path)
    firsts = np.concatenate([made.get_batch("val")[0][:, 0].numpy() // 100_000 for _ in range(20)])
    assert set(firsts.tolist()) == {1, 2}


def test_val_has_options_of_its_own(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    own = make(tmp_path, val={"batch_size": 2, "epoch_seed": 7})
    seeded = make(tmp_path, config={"batch_size": 2, "epoch_seed": 7})
    for _ in range(10):
        assert same(own.get_batch("val"), seeded.get_batch("val"))
    assert same(own.get_batch(), make(tmp_path).get_batch())


def test_random_mode_and_a_mapping_of_folders(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    folders = {tmp_path / name: weight for name, weight in WEIGHTS.items()}
    made = MixtureLoader({**BASE, "batch_sampling_mode": "random"}, folders)
    again = MixtureLoader({**BASE, "batch_sampling_mode": "random"}, folders)
    assert all(same(made.get_batch(), again.get_batch()) for _ in range(5))


def test_random_draws_go_on_from_step_to_step(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    """However many rows a step takes, row `n` of the mixture is the same; each source draws on from where it was."""

    def random(**config: object) -> MixtureLoader:
        return make(tmp_path, config={"batch_sampling_mode": "random", **config})

    small, large = random(batch_size=4), random(batch_size=240)
    states, steps = [], []
    for _ in range(60):
        states.append(json.loads(json.dumps(small.state_dict())))
        steps.append(small.get_batch())
    whole = large.get_batch()
    assert same([torch.cat(column) for column in zip(*steps, strict=True)], whole)
    firsts = whole[0][:, 0].numpy()
    place = small.state_dict()["splits"]["train"]["place"]
    for number, name in enumerate(WEIGHTS, 1):
        drawn = firsts[firsts // 100_000 == number]
        assert place["sources"][str(tmp_path / name)] == {"epoch": 0, "position": len(drawn)}
        assert set(drawn.tolist()) > set(drawn[:4].tolist())
    resumed = random(batch_size=4)
    resumed.load_state_dict(states[30])
    assert all(same(resumed.get_batch(), step) for step in steps[30:])


@pytest.mark.parametrize("position", [0, CHUNK - 3, CHUNK, 2 * CHUNK - 5])
def test_sources_are_drawn_by_chunks_of_their_own_seed(position: int) -> None:
    shares = np.cumsum(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    draws = np.concatenate([np.random.RandomState(9 + j).random_sample(CHUNK) for j in range(3)])
    wanted = (draws[:, None] >= shares[None, :-1]).sum(axis=1)
    made = SourceDraws(9, list(WEIGHTS.values()))
    for count in (1, 7, 100):
        assert made.take(position, count).tolist() == wanted[position : position + count].tolist()


def test_a_share_that_ends_at_a_draw_does_not_take_it() -> None:
    """Shares are half-open: a draw that equals the border belongs to the next source."""
    first = float(np.random.RandomState(9).random_sample(1)[0])
    assert SourceDraws(9, [first, 1 - first]).take(0, 1).tolist() == [1]


def test_other_episodes_of_the_same_sets_are_refused_on_resume(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    state = make(tmp_path).state_dict()
    with pytest.raises(ConfigError, match="episodes"):
        make(tmp_path, config={"episode_min_tokens": 12}).load_state_dict(state)


RANDOM = {**BASE, "batch_sampling_mode": "random"}


def random_mixture(directory: Path, **options: object) -> MixtureLoader:
    """Two sources of the same size and weight."""
    for number, name in enumerate(("one", "two"), 1):
        if not (directory / name).exists():
            write_set(directory / name, [Item(ids=[1000 * number + i] * 9, weights=[1.0] * 9) for i in range(50)])
    return MixtureLoader(RANDOM, {directory / "one": 1.0, directory / "two": 1.0}, **options)  # type: ignore[arg-type]


def drawn(loader: MixtureLoader, steps: int) -> list[int]:
    """1000 * source + row number of every row."""
    return [int(value) for _ in range(steps) for value in loader.get_batch()[0][:, 0]]


def test_in_random_mode_every_source_has_draws_of_its_own(tmp_path: Path) -> None:
    rows = drawn(random_mixture(tmp_path), 50)
    which = np.random.RandomState(1337).random_sample(200) >= 0.5
    taken = []
    for number in range(2):
        seed = np.random.RandomState([1337, number]).randint(0, 2**31)
        taken.append(iter(np.random.RandomState(seed).randint(0, 50, 65536)))
    assert rows == [1000 * (source + 1) + int(next(taken[source])) for source in which.astype(int)]
    one, two = ([row % 1000 for row in rows if row // 1000 == number][:60] for number in (1, 2))
    assert one != two
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 10


def test_random_draws_go_on_exactly(tmp_path: Path) -> None:
    whole = random_mixture(tmp_path)
    states = []
    rows: list[list[int]] = []
    for _ in range(8):
        states.append(json.loads(json.dumps(whole.state_dict())))
        rows.append(drawn(whole, 1))
    for start, state in enumerate(states):
        resumed = random_mixture(tmp_path, prefetch=False)
        resumed.load_state_dict(state)
        assert drawn(resumed, 8 - start) == [row for step in rows[start:] for row in step]
    pair = [random_mixture(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for rank, one in enumerate(pair):
        one.load_state_dict(states[2])
        assert drawn(one, 2) == [*rows[2 + rank], *rows[4 + rank]]


def test_a_state_of_draws_with_one_seed_for_all_is_refused(tmp_path: Path) -> None:
    loader = random_mixture(tmp_path)
    state = json.loads(json.dumps(loader.state_dict()))
    del state["splits"]["train"]["order"]["source_seeds"]
    with pytest.raises(ConfigError, match="source_seeds"):
        loader.load_state_dict(state)
    assert "source_seeds" not in make_epochs(tmp_path).state_dict()["splits"]["train"]["order"]


def make_epochs(directory: Path) -> MixtureLoader:
    return MixtureLoader(BASE, {directory / "one": 1.0})


def test_other_weights_or_sets_are_refused_on_resume(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    state = make(tmp_path).state_dict()
    changed = {tmp_path / name: weight + (name == "b") for name, weight in WEIGHTS.items()}
    with pytest.raises(ConfigError, match="sources"):
        MixtureLoader(BASE, changed).load_state_dict(state)
    (tmp_path / "b").rename(tmp_path / "gone")
    write_set(tmp_path / "b", sets["b"][::-1])
    with pytest.raises(ConfigError, match="another dataset"):
        make(tmp_path).load_state_dict(state)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing_are_refused(tmp_path: Path, sets: dict[str, list[Item]], weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        MixtureLoader(BASE, {tmp_path / "a": weight})


def test_no_sets_and_double_names_are_refused(tmp_path: Path, sets: dict[str, list[Item]]) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        MixtureLoader(BASE, {})
    with pytest.raises(ConfigError, match="same name"):
        MixtureLoader(BASE, {tmp_path / "a": 1.0, str(tmp_path / "a"): 1.0})
