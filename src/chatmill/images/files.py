"""Opens the pictures that records name: inside one folder, never from the network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from chatmill.core.pictures import Picture
from chatmill.errors import RecordError
from chatmill.images.find_rule import find_rule, no_rule
from chatmill.images.headers import BrokenPictureError, picture_size
from chatmill.images.rule import Grid, PictureRule, SizeError

MOST_BYTES = 1 << 28
"""A larger file is no picture that a model is trained on."""


def picture_folder(named: str | None, patterns: Iterable[str]) -> str | None:
    """Find where the paths of pictures start: the named folder, or the one that holds all sources."""
    if named is not None:
        return named
    folders = {os.path.dirname(pattern) for pattern in patterns}
    return (folders.pop() or ".") if len(folders) == 1 else None


class Shown(NamedTuple):
    """A picture of a record, as far as it matters to tokens."""

    place: str
    """As the record writes it; empty where the record holds the bytes."""
    hash: str
    """xxh128 of the bytes."""
    height: int
    width: int
    grid: Grid
    data: bytes = b""
    """Its bytes, where the dataset stores them."""


class Pictures(NamedTuple):
    """What a recipe says about pictures."""

    rule: PictureRule | str
    """How the model's processor writes them; else why it is not known."""
    folder: str | None = None
    """Paths of pictures start from here, and none leads out of it; None: no path is followed."""
    stores: bool = False
    """Whether the bytes of pictures go into the dataset."""

    @classmethod
    def of(cls, model: str | os.PathLike[str], folder: str | None = None, stores: bool = False) -> Pictures:
        """Read it from a model's folder, or a file in it."""
        path = Path(model)
        return cls(find_rule(path.parent if path.is_file() else path), folder, stores)

    def read(self, picture: Picture, path: str = "") -> bytes:
        """Read the bytes of a picture: from the record, or a file in the folder."""
        if picture.data:
            return picture.data
        return read_picture(picture.place, self.folder, path)

    def look(self, pictures: Sequence[tuple[Picture, str]]) -> list[Shown]:
        """Look at the pictures of a record, given with their paths in it; a `RecordError` for the first bad one."""
        if isinstance(self.rule, str):
            raise no_rule(self.rule)
        return [self._look(picture, path, self.rule) for picture, path in pictures]

    def _look(self, picture: Picture, path: str, rule: PictureRule) -> Shown:
        if picture.data and not self.stores:
            raise RecordError(
                "the record holds the bytes of the picture, which loaders need again: store them in the dataset "
                "(--store-images)",
                code="image_not_stored",
                path=path,
            )
        data = self.read(picture, path)
        named = picture.place or "the picture"
        try:
            height, width = picture_size(data)
            grid = rule.grid(height, width)
        except BrokenPictureError as error:
            raise RecordError(f"{named} {error}", code="bad_image", path=path) from None
        except SizeError as error:
            raise RecordError(f"{named} has {width} x {height} pixels: {error}", code="image_size", path=path) from None
        digest = picture_hash(data)
        return Shown(picture.place, digest, height, width, grid, data if self.stores else b"")


def picture_hash(data: bytes) -> str:
    """Return the hash by which a picture is known again."""
    import xxhash  # rows of text are loaded without it

    return xxhash.xxh128_hexdigest(data)


def _limited(data: bytes, named: str, path: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise RecordError(f"{named} is larger than {MOST_BYTES >> 20} MiB", code="bad_image", path=path)
    return data


def read_picture(place: str, folder: str | None, path: str = "") -> bytes:
    """Read a picture in a folder; a `RecordError` if it is missing, or outside the folder."""
    scheme = urlsplit(place).scheme if "://" in place else ""
    if scheme and scheme != "file":
        raise RecordError(
            f"{place[:200]} is not a file, and nothing is fetched: download it (img2dataset does), and write its path",
            code="image_not_local",
            path=path,
        )
    if folder is None:
        raise RecordError(
            f"{place} is a path, and no folder is named that it starts from: name one (--images DIR)",
            code="image_not_local",
            path=path,
        )
    root = os.path.realpath(folder)
    try:
        file = os.path.realpath(os.path.join(root, place.removeprefix("file://") if scheme else place))
    except ValueError as error:
        raise RecordError(f"{place!r} is not a path: {error}", code="image_missing", path=path) from None
    if os.path.commonpath([root, file]) != root:
        raise RecordError(
            f"{place} leads out of the folder of pictures, {folder}: name the folder that holds it (--images DIR)",
            code="image_outside",
            path=path,
        )
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise RecordError(f"{place} in {folder} is a pipe or a device, not a file", code="image_missing", path=path)
    try:
        with open(file, "rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{place} cannot be opened in {folder}: {why}", code="image_missing", path=path) from None
    return _limited(data, place, path)
