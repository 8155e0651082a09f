"""Small pictures for pages, of files in the folder that the build names, or of bytes that the dataset stores."""

from __future__ import annotations

import io

import numpy as np

from chatmill.errors import DataError, UnknownNameError
from chatmill.images.column import StoredPicture
from chatmill.images.files import picture_folder, picture_hash, read_picture
from chatmill.images.headers import FORMATS, picture_size
from chatmill.look.items import Item
from chatmill.look.splits import StoredSplit
from chatmill.look.viewer.opened import OpenedSplit
from chatmill.store.episodes import EpisodeDataset

SIDE = 320
"""Pixels of the longer side, at most."""


def thumbnail(opened: OpenedSplit, number: int, which: int) -> bytes:
    """A picture of an item as PNG, written anew: no byte of the file reaches the page."""
    item = opened.item(number)
    if not 0 <= which < len(item.pictures):
        raise UnknownNameError("picture", str(which), [str(place) for place in range(len(item.pictures))])
    data = _bytes(opened, item, item.pictures[which])
    picture_size(data)  # refuses what is no picture, and bombs
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.draft("RGB", (SIDE, SIDE))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"the picture cannot be decoded: {error}") from None
    small.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    small.save(out, "PNG")
    return out.getvalue()


def _bytes(opened: OpenedSplit, item: Item, one: StoredPicture) -> bytes:
    stored = opened.split.stored if isinstance(opened.split, StoredSplit) else None
    if one.data is not None and isinstance(stored, EpisodeDataset):
        place = int(np.searchsorted(item.starts, one.start, side="right")) - 1
        document = item.number if item.documents is None else int(item.documents[place])
        return stored.image_bytes(document)[one.data[0] : sum(one.data)]
    recipe = opened.look.about.get("recipe") or {}
    paths = [source["path"] for source in recipe.get("sources", ())]
    patterns = [path for some in paths for path in ([some] if isinstance(some, str) else some)]
    data = read_picture(one.place, picture_folder(recipe.get("images"), patterns))
    if picture_hash(data) != one.hash:
        raise DataError(f"the picture {one.place} has changed since the dataset was built")
    return data
