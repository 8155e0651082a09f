"""Small pictures for pages, of files in the folder that the build names, or of bytes that the dataset stores."""

from __future__ import annotations

import io

from chatmill.errors import DataError, UnknownNameError
from chatmill.images.column import StoredPicture
from chatmill.images.files import picture_hash, read_picture
from chatmill.images.headers import FORMATS, picture_size
from chatmill.look.items import Item
from chatmill.look.viewer.opened import OpenedSplit
from chatmill.store.named_paths import find_image_folder

SIDE = 320
"""Pixels of the longer side, at most."""


def thumbnail(opened: OpenedSplit, number: int, which: int) -> bytes:
    """Re-encode a picture of an item as PNG: no byte of the file reaches the page."""
    item = opened.item(number)
    if not 0 <= which < len(item.pictures):
        raise UnknownNameError("picture", str(which), [str(place) for place in range(len(item.pictures))])
    data = _bytes(opened, item, item.pictures[which])
    picture_size(data)  # refuses anything but pictures, and decompression bombs
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


def _bytes(opened: OpenedSplit, item: Item, picture: StoredPicture) -> bytes:
    stored = opened.split.picture_bytes(item, picture)
    if stored is not None:
        return stored
    folder = find_image_folder(opened.look.about.get("recipe") or {}, opened.look.path)
    data = read_picture(picture.place, folder)
    if picture_hash(data) != picture.hash:
        raise DataError(f"the picture {picture.place} has changed since the dataset was built")
    return data
