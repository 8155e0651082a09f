"""Where the files of a split are: the flat layout, numbered shard folders, and what may not be mixed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chatmill.core.publish import whole_folder
from chatmill.errors import ConfigError, FormatError
from chatmill.files import remote
from chatmill.files.builds import new_folder_at

TOKENS = "tokens.bin"
"""uint32 token ids, little-endian."""
INDEX = "episodes.idx"
"""Records of 16 bytes: start and length, uint64 little-endian, counted in tokens."""
MASK = "mask.bin"
"""uint8 or float32 weights, one per token; the file size says which of the two."""
MANIFEST = "manifest.json"
"""Of the dataset, written last: a folder with splits and without it was written by hand, or is unfinished."""
SPLIT_MANIFEST = "episodes.json"
"""What was written: counts, columns and hashes; written last. Readers of the three files do not need it."""

SPLITS = ("train", "val")
WORK = ".build"
"""Where a build keeps its unfinished work."""
SHARD_NAME = re.compile(r"shard_\d+")
MAX_SHARDS = 100_000
"""Shard numbers have five digits, so that the order of names is the order of numbers."""


def dataset_folder(path: str | os.PathLike[str], *, whole: bool = False) -> Path:
    """Return the folder of a dataset, an export or a part of one, given as a path or a URL.

    The folder of a URL is in the cache and fills on demand, or at once with `whole`.
    """
    return remote.local_folder(path, whole=whole)


def dataset_url(path: str | os.PathLike[str]) -> str | None:
    """Return the address of a dataset that is a URL; None for a folder."""
    return remote.address(path)


@contextmanager
def new_folder(path: Path | str, last: str, *, replace: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which then gets its name, or is uploaded to its URL with the file `last` at the end.

    Args:
        path: The folder, or the URL as a text.
        last: The file that says that all others are there.
        replace: Whether a folder may be there.
    """
    if isinstance(path, Path):
        with whole_folder(path, replace=replace) as folder:
            yield folder
        return
    with new_folder_at(path, last) as folder:
        yield folder


def fetch_again(path: Path) -> bool:
    """Fetch a file of a remote dataset once more; return whether it is one."""
    return remote.fill_again(path)


def stored_problems(folder: Path, within: Sequence[str]) -> dict[str, str]:
    """Return what is wrong with the objects of a remote dataset in their store; empty for other folders.

    Nothing may be added in the folders `within`.
    """
    return remote.stored_problems(folder, within)


def fetch_folder(folder: Path) -> None:
    """Fetch all files of a remote dataset; nothing happens for other folders."""
    remote.fill_all([path for path in folder.rglob("*") if path.is_symlink()])


def beside(folder: Path, name: str) -> Path:
    """Return where what is made of a dataset goes by default: beside its folder, or for a URL where we are."""
    return Path(name) if remote.origin(folder) else folder.with_name(name)


def has_file(path: Path) -> bool:
    """Return whether a dataset has a file, which may not be fetched yet."""
    return os.path.lexists(path)


def was_compared(path: Path) -> bool:
    """Return whether a file was compared with its digest when it was fetched."""
    return remote.stored_size(path) is not None


def shard_name(number: int) -> str:
    """`shard_00000`, `shard_00001`, ..."""
    if number >= MAX_SHARDS:
        raise ConfigError(f"more than {MAX_SHARDS:,} shards: choose a larger shard_tokens")
    return f"shard_{number:05d}"


def split_folder(directory: Path, split: str) -> Path:
    """Return the folder of a split, which must be there, and no part of a build that is not finished."""
    folder = directory / split
    if (directory / WORK).is_dir() and not (directory / MANIFEST).exists():
        raise FormatError(f"{directory}: an unfinished build: continue with chatmill build --resume")
    if folder.is_dir():
        return folder
    if not directory.is_dir():
        raise FormatError(f"{directory}: no such folder")
    raise FormatError(f"{folder}: no such folder; {directory} holds {names_in(directory)}")


def names_in(folder: Path) -> str:
    """Return the first names in a folder, for an error."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"


def shard_folders(folder: Path) -> list[Path]:
    """`shard_*` folders of a split in name order; empty for the flat layout."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if SHARD_NAME.fullmatch(entry.name) and entry.is_dir())
    return [folder / name for name in names]


def episode_folders(folder: Path) -> list[Path]:
    """Return the folders that hold the three files: the split itself (flat layout), or its shards in name order."""
    flat = has_file(folder / INDEX) or has_file(folder / TOKENS)
    shards = shard_folders(folder)
    if flat and shards:
        raise FormatError(
            f"{folder}: holds both {TOKENS} and shard folders ({shards[0].name}, ...): which of them is the dataset? "
            "Move one of the two away"
        )
    if not flat and not shards:
        raise FormatError(
            f"{folder}: an empty split: neither {INDEX} nor a shard folder is there (found: {names_in(folder)})"
        )
    _refuse_gaps(folder, shards)
    return shards or [folder]


def _refuse_gaps(folder: Path, shards: list[Path]) -> None:
    """Shards are numbered from 0 on: a number that is not there is a shard that got lost, also without a manifest."""
    numbers = {int(shard.name.removeprefix("shard_")) for shard in shards}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FormatError(
            f"{folder}: {shard_name(missing[0])} is missing{more}, but {shards[-1].name} is there: copy the dataset "
            "again, or rename the shards to leave it out on purpose"
        )


def is_episode_split(folder: Path) -> bool:
    """Return whether a split folder holds episodes (flat or sharded) rather than plain token files."""
    return any(has_file(place / INDEX) for place in (folder, *shard_folders(folder)))
