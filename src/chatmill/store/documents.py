"""Opening the folder of a dataset: its splits, and what is known about how it was made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import FormatError, UnknownNameError
from chatmill.store.episode_layout import SPLITS, is_episode_split
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import PACK
from chatmill.store.receipts import KD_SCHEMA, MANIFEST, manifest_kind, read_export, read_manifest
from chatmill.store.split import Split

WORK = ".build"
"""Where a build keeps its unfinished work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFolder:
    """What is in the folder of a dataset, before any split is opened."""

    directory: Path
    splits: tuple[str, ...]
    """Train and val first."""
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty where there is neither."""
    fingerprint: str | None
    """That of the build; None where there is no manifest of one."""

    @property
    def packed(self) -> bool:
        """Whether all splits have a pack plan."""
        return all((self.directory / split / PACK).is_dir() for split in self.splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataset:
    """A folder with one or more splits, and what is known about how it was made."""

    directory: Path
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty where there is neither."""
    fingerprint: str
    """That of the build where there is a manifest; else a hash over the splits."""
    splits: Mapping[str, Split]


def open_dataset(directory: str | Path, splits: Sequence[str] | None = None) -> StoredDataset:
    """Open a finished build, an export of episodes, a distillation dataset, or a plain folder of splits of episodes.

    `splits` chooses some; by default all that are there are opened.
    """
    if manifest_kind(Path(directory)) == KD_SCHEMA:
        from chatmill.store.kd_documents import open_kd_dataset

        return open_kd_dataset(Path(directory), splits)
    found = find_splits(directory, splits)
    opened = {name: EpisodeDataset(found.directory, name) for name in found.splits}
    return StoredDataset(
        directory=found.directory,
        about=found.about,
        fingerprint=found.fingerprint or fingerprint_of(opened),
        splits=opened,
    )


def find_splits(directory: str | Path, splits: Sequence[str] | None = None) -> DatasetFolder:
    """Look into a dataset folder and read its manifest, without opening its splits; `splits` chooses some."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder; give the folder of a dataset, which holds a split such as train/")
    manifest = read_manifest(folder)
    if manifest is None and is_episode_split(folder):
        raise FormatError(f"{folder}: this is one split of a dataset; give the folder above it")
    if manifest is None and (folder / WORK).is_dir():
        raise FormatError(
            f"{folder}: an unfinished build ({MANIFEST} is missing): continue with chatmill build --resume"
        )
    there = _split_names(folder) if manifest is None else sorted(manifest["splits"], key=_split_order)
    if not there:
        raise FormatError(_why_nothing(folder))
    for name in splits or ():
        if name not in there:
            raise UnknownNameError("split", name, there)
    return DatasetFolder(
        directory=folder,
        splits=tuple(name for name in there if not splits or name in splits),
        about=manifest if manifest is not None else _about_export(folder),
        fingerprint=None if manifest is None else manifest["fingerprint"],
    )


def _split_order(name: str) -> tuple[int, str]:
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS)), name


def _split_names(folder: Path) -> list[str]:
    found = [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted((name for name in found if is_episode_split(folder / name)), key=_split_order)


def _why_nothing(folder: Path) -> str:
    there = sorted(path.name for path in folder.iterdir())[:10]
    return (
        f"{folder}: holds no split of episodes (found: {', '.join(there) or 'nothing'}); give the folder "
        "that chatmill build wrote"
    )


def _about_export(folder: Path) -> dict[str, Any]:
    export = read_export(folder)
    return {} if export is None else dict(export["source"]["about"])


def fingerprint_of(splits: Mapping[str, Split]) -> str:
    """A hash over the splits of a dataset that no manifest names."""
    text = "\n".join(f"{name} {documents.fingerprint}" for name, documents in splits.items())
    return hashlib.sha256(text.encode()).hexdigest()
