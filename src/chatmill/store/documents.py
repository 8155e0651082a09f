"""Opening the folder of a dataset: its splits, and what is known about how it was made."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chatmill.errors import FormatError, UnknownNameError
from chatmill.store.episode_layout import SPLITS, WORK, is_episode_split
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import KD_SCHEMA, MANIFEST, manifest_kind, read_export, read_manifest
from chatmill.store.split import Split


@dataclass(frozen=True, kw_only=True)
class StoredDataset:
    """A folder with one or more splits, and what is known about how it was made."""

    directory: Path
    about: dict[str, Any]
    """The build's manifest; for an export what it says about its source; empty where there is neither."""
    of_build: str | None
    """The fingerprint of the build; None where there is no manifest of one."""
    splits: Mapping[str, Split]
    """Train and val first."""

    @cached_property
    def fingerprint(self) -> str:
        """That of the build where there is a manifest; else a hash over the splits."""
        if self.of_build is not None:
            return self.of_build
        text = "\n".join(f"{name} {documents.fingerprint}" for name, documents in self.splits.items())
        return hashlib.sha256(text.encode()).hexdigest()


def open_dataset(directory: str | Path, splits: Sequence[str] | None = None) -> StoredDataset:
    """Open a finished build, an export of episodes, a distillation dataset, or a plain folder of splits of episodes.

    `splits` chooses some; by default all that are there are opened.
    """
    folder = Path(directory)
    if manifest_kind(folder) == KD_SCHEMA:
        from chatmill.store.kd_documents import open_kd_dataset

        return open_kd_dataset(folder, splits)
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
    return StoredDataset(
        directory=folder,
        about=manifest if manifest is not None else _about_export(folder),
        of_build=None if manifest is None else manifest["fingerprint"],
        splits={name: EpisodeDataset(folder, name) for name in chosen_splits(there, splits)},
    )


def chosen_splits(there: Collection[str], splits: Sequence[str] | None, hint: str = "") -> list[str]:
    """Those that are asked for, in the order of the dataset (default: all); one that is not there is an error."""
    for name in splits or ():
        if name not in there:
            raise UnknownNameError("split", name, list(there), hint)
    return [name for name in there if not splits or name in splits]


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
