"""Small episode datasets for the tests, written by hand, and the slow, obvious batches they must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from chatmill.core.checksums import FileRecord
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.pack.plan import plan
from chatmill.store.episode_manifest import EpisodeManifest, PackedRows, ShardRecord, StoredFile, read_split_manifest
from chatmill.store.episodes import EpisodeDataset

PAD = 50_256


class Special:
    """As many base tokenizers: one id ends documents and pads rows."""

    eos_token_id = pad_token_id = 2


@dataclass(frozen=True)
class Item:
    """One episode: ids and token-aligned weights."""

    ids: list[int]
    weights: list[float]


def items(count: int, *, seed: int = 0, low: int = 2, high: int = 20, fractional: bool = False) -> list[Item]:
    """Episodes whose ids tell them apart: token t of episode i is 1000 * i + t."""
    rng = np.random.RandomState(seed)
    made = []
    for i in range(count):
        length = int(rng.randint(low, high + 1))
        weights = rng.randint(0, 2, length) * (0.25 if fractional else 1)
        made.append(Item(ids=[1000 * i + t for t in range(length)], weights=weights.tolist()))
    return made


def write_set(
    directory: Path, train: Sequence[Item], val: Sequence[Item] = (), *, shards: int = 0, mask: Any = "u1"
) -> Path:
    """A dataset folder, flat or in some shards of about equal numbers of episodes: files as the page describes them.

    `mask` is the type of the masks, or those of the shards; None: no masks.
    """
    for split, episodes in (("train", train), ("val", val)):
        for number in range(shards or 1) if episodes else ():
            folder = directory / split / f"shard_{number:05d}" if shards else directory / split
            folder.mkdir(parents=True)
            part = episodes[len(episodes) * number // (shards or 1) : len(episodes) * (number + 1) // (shards or 1)]
            np.array([token for item in part for token in item.ids], dtype="<u4").tofile(folder / "tokens.bin")
            lengths = np.array([len(item.ids) for item in part], dtype="<u8")
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            np.stack([starts, lengths], axis=1).astype("<u8").tofile(folder / "episodes.idx")
            if mask is not None:
                weights = [weight for item in part for weight in item.weights]
                np.array(weights, dtype=mask if isinstance(mask, str) else mask[number]).tofile(folder / "mask.bin")
    return directory


def loader(directory: Path, batch_size: int = 3, block_size: int = 8, **options: Any) -> GPTEpisodeDataLoader:
    """A loader of episodes with masks, unless the options say otherwise."""
    config = {"batch_size": batch_size, "block_size": block_size, "pad_token_id": PAD, "use_loss_mask": True}
    return GPTEpisodeDataLoader(config, None, directory, **options)


def state_rows(folder: Path, length: int, strategy: str = "best_fit") -> None:
    """Pack a split: state rows of this length in its manifest, which is made if there is none."""
    dataset = EpisodeDataset(folder.parent, folder.name)
    shards = [
        ShardRecord(
            name="" if shard.folder == folder else shard.folder.name,
            episodes=shard.episodes,
            tokens=shard.tokens,
            files={
                path.name: StoredFile(path.stat().st_size, FileRecord.of_file(path).digest)
                for path in shard.folder.iterdir()
                if path.suffix != ".json"
            },
        )
        for shard in dataset.shards
    ]
    manifest = read_split_manifest(folder) or EpisodeManifest(split=folder.name, shards=tuple(shards))
    stated = PackedRows(length=length, strategy=strategy, count=plan(dataset.lengths, length, strategy).bins)
    (folder / "episodes.json").write_bytes(replace(manifest, rows=stated).to_bytes())


def row(item: Item, block: int, pad: int = PAD) -> tuple[list[int], list[int], list[float]]:
    """x, y and mask of one episode, token by token."""
    ids = [item.ids[t] if t < len(item.ids) else pad for t in range(block + 1)]
    weights = [item.weights[t] if t < len(item.weights) else 0.0 for t in range(block + 1)]
    return ids[:-1], ids[1:], weights[1:]


def batch(rows: Sequence[Item | None], block: int, pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch of some episodes; None is a row of padding."""
    made = [row(item or Item(ids=[], weights=[]), block, pad) for item in rows]
    x, y, mask = zip(*made, strict=True)
    return torch.tensor(x), torch.tensor(y), torch.tensor(mask, dtype=torch.float32)


def epoch_steps(
    episodes: Sequence[Item], *, seed: int, epoch: int, step: int, shuffle: bool = True, drop_last: bool = True
) -> list[list[Item | None]]:
    """The rows of every global step of an epoch, filled up with None when nothing is dropped."""
    n = len(episodes)
    order = np.random.RandomState(seed + epoch).permutation(n) if shuffle else np.arange(n)
    rows: list[Item | None] = [episodes[i] for i in order]
    if drop_last:
        rows = rows[: n // step * step]
    else:
        rows += [None] * (-n % step)
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Same tensors: types, shapes, values."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )
