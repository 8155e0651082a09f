"""Paths that a manifest names relative to the folder of its build, found again from any other folder.

A dataset is moved together with its model, or opened from elsewhere: then a relative path is looked up from the
dataset's own folder and the folders around it. Whoever opens what is found compares its hash or fingerprint.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chatmill.images.files import picture_folder


def find_named(name: str, home: Path | None) -> list[str]:
    """List the places where a relative path may be: as it is named, then around a dataset.

    Args:
        name: The path as a manifest has it. A name that is no relative path stays the only one.
        home: Folder of the dataset.
    """
    if home is None or os.path.isabs(name) or "://" in name:
        return [name]
    around = [folder / name for folder in _around(home)]
    return [name, *(str(path) for path in around if path.exists())]


def find_first(name: str, home: Path | None) -> str:
    """Return the first place where a relative path exists; the name itself if it exists nowhere."""
    for place in find_named(name, home):
        if os.path.exists(place):
            return place
    return name


def folder_of_build(names: Iterable[str], home: Path) -> Path | None:
    """Find the folder from which all these relative paths or globs exist; None if it is the current one, or none is."""
    relative = [name for name in names if not os.path.isabs(name) and "://" not in name]
    for folder in (Path(), *_around(home)):
        if all(glob.glob(str(folder / name)) for name in relative):
            return None if folder == Path() else folder
    return None


def find_image_folder(recipe: Mapping[str, Any], home: Path) -> str | None:
    """Find the folder that the paths of a dataset's images start from; None if no folder is known.

    Args:
        recipe: The recipe in the manifest.
        home: Folder of the dataset.
    """
    patterns: list[str] = []
    for source in recipe.get("sources", ()):
        patterns += [source["path"]] if isinstance(source["path"], str) else source["path"]
    named = recipe.get("images")
    folder = picture_folder(named, patterns)
    if folder is None:
        return None

    # A name such as `.` is in every folder: where the sources are is where the build was.
    build = folder_of_build(patterns if named is None else [*patterns, named], home)
    return find_first(folder, home) if build is None else str(build / folder)


def _around(home: Path) -> Iterator[Path]:
    """Yield a folder and all that it lies in, from the inside."""
    folder = home.resolve()
    yield folder
    yield from folder.parents
