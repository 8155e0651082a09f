"""Opening the folder of a dataset: its splits, and what is known about how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import FormatError
from chatmill.store.episode_layout import MANIFEST, SPLITS, WORK, dataset_folder, is_episode_split, names_in
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import is_kd, open_kd_dataset
from chatmill.store.receipts import KD_SCHEMA, manifest_kind, read_export, read_manifest
from chatmill.store.split import StoredDataset, chosen_splits


def open_dataset(directory: str | Path, splits: Sequence[str] | None = None) -> StoredDataset:
    """Open a finished build, a distillation dataset, an export to megatron, or a plain folder of splits of episodes.

    `splits` chooses some; by default all that are there are opened.
    """
    folder = dataset_folder(directory)
    if is_kd(folder) or manifest_kind(folder) == KD_SCHEMA:
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
    folders = [path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir()]
    names = [name for name in folders if is_episode_split(folder / name)] if manifest is None else manifest["splits"]
    if not names:
        raise FormatError(
            f"{folder}: holds no split of episodes (found: {names_in(folder)}); give the folder "
            "that chatmill build wrote"
        )
    return StoredDataset(
        directory=folder,
        about=manifest if manifest is not None else _about_export(folder),
        of_build=None if manifest is None else manifest["fingerprint"],
        splits={name: EpisodeDataset(folder, name) for name in chosen_splits(sorted(names, key=_split_order), splits)},
    )


def _split_order(name: str) -> tuple[int, str]:
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS)), name


def _about_export(folder: Path) -> dict[str, Any]:
    export = read_export(folder)
    return {} if export is None else dict(export["source"]["about"])
