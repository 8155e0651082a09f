"""The dataset that a trainer is given: a folder, a URL, or a recipe, which is built first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chatmill.compiler.run import run_build
from chatmill.core.publish import storing
from chatmill.store.episode_layout import SPLITS
from chatmill.store.receipts import read_manifest

RECIPES = (".yaml", ".yml")
"""How names of recipes end."""


def dataset_of(dataset: str | os.PathLike[str]) -> str | Path:
    """Return the address of a dataset; build it first where a recipe is given.

    `chats.yaml` is built into `chats-built` beside it, by the first process that asks. The others wait, and each
    checks that the recipe and its inputs are those of the build: another one in that folder is an error.
    """
    recipe = Path(dataset)
    if recipe.suffix not in RECIPES or not recipe.is_file():
        return os.fspath(dataset)

    built = recipe.with_name(f"{recipe.stem}-built")
    with _one_at_a_time(built):
        is_built = built.is_dir() and read_manifest(built) is not None
        earlier = built if is_built else None  # its inputs are not read again while their times say the same
        run_build(recipe, built, resume=True, reuse=earlier)
    return built


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in here for the same folder."""
    try:
        import fcntl
    except ImportError:  # without such locks the build itself refuses a second one
        yield
        return

    name = folder.with_name(f".{folder.name}.lock")
    with storing(name), open(name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def split_of(address: str) -> tuple[str, str]:
    """Return a dataset and one of its splits, for trainers that name each by one text: `built` or `built/val`."""
    dataset, _, last = address.rstrip("/").rpartition("/")
    if dataset and last in SPLITS:
        return dataset, last
    return address, SPLITS[0]
