"""Which items to show: by number, by record id, at random or from a place on; an error names the nearest one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chatmill.errors import ConfigError
from chatmill.look.dataset import LookDataset
from chatmill.look.items import Item, LookSplit
from chatmill.look.stored_split import StoredSplit


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
) -> tuple[LookSplit, Iterator[Item]]:
    """The items that a user asked to see, by one of the first four or from `start` on, and the split they are of.

    Items are read one at a time. A number or id that is not there is a `ConfigError`.
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
        if isinstance(found[0][0], StoredSplit):  # episodes, cut out of the rows that hold them
            splits = dict.fromkeys(one for one, _ in found if isinstance(one, StoredSplit))
            return found[0][0], (one.episode(number) for one in splits for number in one.find_episodes(record_id))
        return found[0][0], (one.item(number) for one, number in found)
    if episode is not None and isinstance(split, StoredSplit):
        return split, iter([split.episode(dataset.check_number(split.episodes, episode))])
    if row is not None and not dataset.layout.packed:
        raise ConfigError(f"{dataset.path} holds {dataset.layout.item}s that are not packed into rows: use --episode")
    number = row if row is not None else episode
    if number is not None:
        return split, iter([split.item(dataset.check_number(split, number))])
    if random:
        drawn = np.random.RandomState(seed).permutation(len(split))[:examples]
        return split, map(split.item, drawn.tolist())
    first = dataset.check_number(split, start)
    return split, map(split.item, range(first, min(first + examples, len(split))))
