"""Which items to show: by number, by record id, at random or from a place on; an error names the nearest one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from chatmill.errors import ConfigError
from chatmill.look.dataset import LookDataset
from chatmill.look.items import Item, LookSplit
from chatmill.look.row_split import RowSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenItems:
    """The items to show, read one at a time."""

    split: LookSplit
    """The split that was asked for, or the first."""
    items: Iterator[Item]
    count: int


def choose(
    dataset: LookDataset,
    *,
    episode: int | None = None,
    row: int | None = None,
    record_id: str | None = None,
    random: bool = False,
    seed: int = 0,
    split_name: str | None = None,
    start: int = 0,
    examples: int = 5,
) -> ChosenItems:
    """What a user asked to see, by one of the first four or from `start` on.

    A number or id that is not there is a `ConfigError`.
    """
    asked = {
        "--episode": episode is not None,
        "--row": row is not None,
        "--id": record_id is not None,
        "--random": random,
    }
    given = [name for name, there in asked.items() if there]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} choose different things: give one of them")
    split = dataset.split(split_name)
    if record_id is not None:
        found = dataset.find(record_id, None if split_name is None else [split])
        if isinstance(found[0][0], RowSplit):
            episodes = _record(found, record_id)
            return ChosenItems(split=found[0][0], items=iter(episodes), count=len(episodes))
        return ChosenItems(split=found[0][0], items=(one.item(number) for one, number in found), count=len(found))
    if episode is not None and isinstance(split, RowSplit):
        alone = split.episode(dataset.check_number(split.episodes, episode))
        return ChosenItems(split=split, items=iter([alone]), count=1)
    if row is not None and not dataset.layout.packed:
        raise ConfigError(f"{dataset.path} holds {dataset.layout.item}s that are not packed into rows: use --episode")
    number = row if row is not None else episode
    if number is not None:
        return _numbered(split, np.array([dataset.check_number(split, number)]))
    if random:
        count = min(examples, len(split))
        return _numbered(split, np.random.RandomState(seed).permutation(len(split))[:count])
    first = dataset.check_number(split, start)
    return _numbered(split, np.arange(first, min(first + examples, len(split))))


def _numbered(split: LookSplit, numbers: np.ndarray) -> ChosenItems:
    return ChosenItems(split=split, items=map(split.item, numbers.tolist()), count=len(numbers))


def _record(found: Sequence[tuple[LookSplit, int]], record_id: str) -> list[Item]:
    """The episodes of a record, cut out of the rows that hold it."""
    splits = dict.fromkeys(split for split, _ in found if isinstance(split, RowSplit))
    return [split.episode(number) for split in splits for number in split.episodes.find(record_id)]
