"""Pictures on their way to a model: the column of rows, and the collator that makes pixels of it.

A row has its pictures as JSON (`chatmill.images.column`), with places counted in the row. Pixels are made where the
collator runs, in the workers of a `DataLoader`, by the model's own image processor.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError, DataError, need
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.images.files import picture_hash, read_picture
from chatmill.images.find_rule import find_rule
from chatmill.images.rule import Grid, PictureRule
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Split

Ints = NDArray[np.int64]


class RowPictures(NamedTuple):
    """The pictures of rows, a line of JSON each, and their bytes, where the dataset stores them."""

    lines: list[str]
    data: list[bytes]


def row_pictures(dataset: Split, numbers: Ints, lengths: Ints, borders: Ints) -> RowPictures:
    """The pictures of rows; `borders` cut the documents (their numbers, and how much of each is read) into rows."""
    own = dataset.facts("images", numbers) or [""] * len(numbers)
    stored = dataset if isinstance(dataset, EpisodeDataset) and "image_bytes" in dataset.columns else None
    made = RowPictures([], [])
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        listed: list[StoredPicture] = []
        data, at = b"", 0
        for place in range(first, last):
            size, found = int(lengths[place]), stored_pictures(own[place])
            cut = next((one for one in found if one.stop > size), None)
            if cut is not None:
                raise DataError(
                    f"document {numbers[place]:,} is cut to {size:,} tokens, and its picture "
                    f"{cut.place} ends after: choose longer rows, or overflow='drop'"
                )
            for one in found:
                moved = None if one.data is None else (one.data[0] + len(data), one.data[1])
                listed.append(one._replace(start=one.start + at, stop=one.stop + at, data=moved))
            if found and stored is not None:
                data += stored.image_bytes(int(numbers[place]))
            at += size
        made.lines.append(json.dumps([one._asdict() for one in listed], ensure_ascii=False) if listed else "")
        made.data.append(data)
    return made


class PictureCollator:
    """Adds to the batches of another collator what a model needs to see the pictures of their rows.

    `model` is the model's folder; `images` the folder that the paths of pictures start from (not needed where the
    dataset stores their bytes). A picture whose bytes have changed since the build, or of which the processor makes
    another grid, is an error.
    """

    def __init__(
        self, collator: Any, model: str | os.PathLike[str], images: str | os.PathLike[str] | None = None
    ) -> None:
        """`collator` is a `DataCollatorForCausalLM`, or anything that takes the same features."""
        rule = find_rule(Path(model))
        if isinstance(rule, str):
            raise ConfigError(f"{model}: {rule}")
        self.rule: PictureRule = rule
        self._collator, self._model, self._images = collator, os.fspath(model), images

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of rows, with `pixel_values` and what goes with them."""
        plain = [{key: value for key, value in one.items() if key not in ("images", "image_bytes")} for one in features]
        rows = [stored_pictures(one.get("images")) for one in features]
        batch = dict(self._collator(plain))
        if len(batch["input_ids"]) != len(features):
            rows = [_joined(rows, [len(one["input_ids"]) for one in features])]
        width = batch["input_ids"].shape[1]
        for row in rows:
            if any(one.stop > width for one in row):
                raise DataError("a picture is cut off: rows with pictures must not be truncated")
        shown = [
            [(one, self._bytes(one, feature)) for one in own] for feature in features for own in _by_document(feature)
        ]
        if self.rule.has_axes:
            batch["position_ids"] = self._positions(batch, rows)
        if self.rule.types:
            batch[self.rule.types] = _types(batch, rows)
        return batch | self._pixels(shown) if any(shown) else batch

    def with_bytes(self, features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows that hold the bytes of all their pictures."""
        made = []
        for feature in features:
            listed, data = [], b""
            for one in stored_pictures(feature.get("images")):
                own = self._bytes(one, feature)
                listed.append(one._replace(data=(len(data), len(own)))._asdict())
                data += own
            made.append({**feature, "images": json.dumps(listed), "image_bytes": data})
        return made

    def _bytes(self, one: StoredPicture, feature: Mapping[str, Any]) -> bytes:
        if one.data is not None:
            data = bytes(feature["image_bytes"][one.data[0] : sum(one.data)])
        else:
            data = read_picture(one.place, None if self._images is None else os.fspath(self._images))
        if picture_hash(data) != one.hash:
            raise DataError(f"the picture {one.place} has changed since the dataset was built: build it again")
        return data

    def _pixels(self, documents: Sequence[Sequence[tuple[StoredPicture, bytes]]]) -> dict[str, Any]:
        """What the processor makes of all pictures of a batch, compared with what was compiled."""
        made = _processed(self.rule, self._model, [[data for _, data in own] for own in documents])
        shown = [one for own in documents for one, _ in own]
        grids = self.rule.grids_made(made, len(shown))
        for one, grid in zip(shown, grids, strict=True):
            if grid != one.grid:
                raise DataError(
                    f"the processor of {self._model} makes {grid} of the picture {one.place} ({one.width} x "
                    f"{one.height}), and the dataset was built with {one.grid}: build it with this model's files"
                )
        return {key: value for key, value in made.items() if key not in self.rule.unused_keys}

    def _positions(self, batch: Mapping[str, Any], rows: Sequence[Sequence[StoredPicture]]) -> Any:
        """Positions of four axes: in the text, in time, height and width; all restart with each document."""
        import torch

        count, width = batch["input_ids"].shape
        known = batch.get("position_ids")
        plain = np.tile(np.arange(width), (count, 1)) if known is None else np.asarray(known)
        axes = np.repeat(plain[None].astype(np.int64), 4, axis=0)
        for number, row in enumerate(rows):
            for one in row:
                inside, step = self.rule.axes(one.grid)
                first = int(axes[1, number, one.start])
                axes[1:, number, one.start : one.stop] = first + inside
                ends = np.flatnonzero(plain[number, one.stop :] == 0)
                end = one.stop + int(ends[0]) if len(ends) else width
                if end > one.stop:
                    axes[1:, number, one.stop : end] += first + step - axes[1, number, one.stop]
        return torch.from_numpy(axes)


@lru_cache(maxsize=4)
def _processor(model: str) -> Any:
    """The model's own image processor."""
    need("transformers", "making pixels of pictures")
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(model)


def _processed(rule: PictureRule, model: str, documents: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    from PIL import Image, ImageOps

    opened = [
        [ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB") for data in own] for own in documents
    ]
    return dict(_processor(model)(images=rule.arranged(opened), return_tensors="pt", **rule.processor_options))


def made_grids(rule: PictureRule, model: str, pictures: Sequence[bytes]) -> list[Grid]:
    """The grids that the image processor of the model in a folder makes of pictures."""
    return rule.grids_made(_processed(rule, model, [[one] for one in pictures]), len(pictures))


def _by_document(feature: Mapping[str, Any]) -> list[list[StoredPicture]]:
    """The pictures of a row, by the documents that are packed into it."""
    pictures = stored_pictures(feature.get("images"))
    lengths = feature.get("seq_lengths")
    ends = np.cumsum([len(feature["input_ids"])] if lengths is None else lengths)
    owners = np.searchsorted(ends, [one.start for one in pictures], side="right")
    return [[pictures[at] for at in np.flatnonzero(owners == number).tolist()] for number in range(len(ends))]


def _joined(rows: Sequence[Sequence[StoredPicture]], lengths: Sequence[int]) -> list[StoredPicture]:
    """The pictures of rows that were put into one."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        one._replace(start=one.start + at, stop=one.stop + at)
        for at, row in zip(starts, rows, strict=False)
        for one in row
    ]


def _types(batch: Mapping[str, Any], rows: Sequence[Sequence[StoredPicture]]) -> Any:
    """1 for tokens of pictures, 0 for text."""
    import torch

    types = torch.zeros_like(batch["input_ids"])
    for number, row in enumerate(rows):
        for one in row:
            types[number, one.start : one.stop] = 1
    return types
