"""The pictures of documents as a column: a line of JSON for each document, empty for one without pictures."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from chatmill.core.texts import Texts
from chatmill.core.tokens import Tokens
from chatmill.errors import FormatError
from chatmill.images.expand import PictureRuns
from chatmill.images.rule import Grid


class StoredPicture(NamedTuple):
    """A picture of a document."""

    start: int
    """Its first token in the document."""
    stop: int
    place: str
    """As the record writes it; empty where the record held the bytes."""
    hash: str
    """xxh128 of its bytes."""
    height: int
    """Of the picture as it is shown: turned as EXIF says."""
    width: int
    grid: Grid
    """What the rule of the manifest makes of the size."""
    data: tuple[int, int] | None = None
    """Start and length of its bytes among those of the document, where the dataset stores them."""

    @property
    def words(self) -> str:
        """The picture in words."""
        return f"[image {self.width}x{self.height}, {self.stop - self.start} tokens]"


def picture_columns(tokens: Tokens, pictures: PictureRuns) -> tuple[Texts, Texts]:
    """Make the columns of the pictures of documents and of their bytes."""
    lines, stored = [""] * len(tokens), [b""] * len(tokens)
    owners = np.searchsorted(tokens.document_runs, pictures.runs, side="right") - 1
    starts, stops = tokens.run_offsets[pictures.runs], tokens.run_offsets[pictures.runs + 1]
    firsts = tokens.offsets[owners]
    places = zip(owners.tolist(), (starts - firsts).tolist(), (stops - firsts).tolist(), strict=True)
    listed: dict[int, list[StoredPicture]] = {}
    for (owner, start, stop), shown in zip(places, pictures.pictures, strict=True):
        data = (len(stored[owner]), len(shown.data)) if shown.data else None
        stored[owner] += shown.data
        listed.setdefault(owner, []).append(StoredPicture(start, stop, *shown[:-1], data))
    for owner, entries in listed.items():
        lines[owner] = json.dumps([entry._asdict() for entry in entries], ensure_ascii=False, separators=(",", ":"))
    flat = np.frombuffer(b"".join(stored), dtype=np.uint8)
    return Texts.of(lines), Texts.packed_in(flat, np.array(list(map(len, stored)), dtype=np.int64))


def stored_pictures(line: str | None) -> list[StoredPicture]:
    """Read the pictures of a document from its line of the column."""
    if not line:
        return []
    try:
        pictures = [StoredPicture(**fields) for fields in json.loads(line)]
    except (ValueError, TypeError) as error:
        raise FormatError(f"the column of pictures is damaged: {error}") from None
    return [
        picture._replace(grid=tuple(picture.grid), data=picture.data and (picture.data[0], picture.data[1]))
        for picture in pictures
    ]
