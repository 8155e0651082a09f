"""The size of a picture from its header, turned as EXIF says; no pixel is decoded."""

from __future__ import annotations

import io
import warnings

from chatmill.errors import ChatmillError, need

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 178_956_970
"""A picture with more is taken for a bomb, a small file that becomes a huge picture: Pillow opens none either."""
SMALL = 1 << 18
"""A JPEG file of this size may end inside of its head, where a preview has an end of its own."""
ORIENTATION = 0x0112
TURNED = frozenset({5, 6, 7, 8})
"""Orientations in which height and width change places."""


class BrokenPictureError(ChatmillError):
    """Bytes that are no whole picture."""


def picture_size(data: bytes) -> tuple[int, int]:
    """Height and width; a `BrokenPictureError` says what is wrong with the bytes."""
    need("PIL", "reading pictures")
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures, and of broken EXIF
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                form = image.format
                turned = image.getexif().get(ORIENTATION) in TURNED
    except UnidentifiedImageError:
        raise BrokenPictureError(f"is not a picture that can be read ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise BrokenPictureError(f"has more than {MOST_PIXELS:,} pixels") from None
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise BrokenPictureError(f"is cut off or has a broken header: {error}") from None
    if height * width > MOST_PIXELS:
        raise BrokenPictureError(f"has {height:,} x {width:,} pixels, more than {MOST_PIXELS:,}")
    if not height or not width:
        raise BrokenPictureError(f"has {height} x {width} pixels")
    if not _is_whole(data, form or ""):
        raise BrokenPictureError("is cut off: its end is missing")
    return (width, height) if turned else (height, width)


def is_turned(data: bytes) -> bool:
    """Return whether EXIF says that a picture, which can be opened, is not shown as it is stored."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return bool(image.getexif().get(ORIENTATION, 1) != 1)


def _is_whole(data: bytes, form: str) -> bool:
    """Tell whether a file is complete."""
    if form == "JPEG" and len(data) > SMALL:  # no such bytes are in what is coded, and a preview is in the head
        return b"\xff\xd9" in data[-4096:]
    if form == "JPEG":
        return data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda") >= 0
    if form == "PNG":
        return b"IEND" in data[-4096:]
    if form == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    if form == "GIF":
        return b"\x3b" in data[-4096:]
    return len(data) >= int.from_bytes(data[2:6], "little")
