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
from chatmill.load.model_folder import LOCAL, open_model_folder
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Split

Ints = NDArray[np.int64]


class RowPictures(NamedTuple):
    """The pictures of rows, a line of JSON each, and their bytes, where the dataset stores them."""

    lines: list[str]
    data: list[bytes]


def row_pictures(dataset: Split, numbers: Ints, lengths: Ints, borders: Ints) -> RowPictures:
    """Collect the pictures of rows; `borders` cut the documents (numbers, and tokens read of each) into rows."""
    lists = dataset.facts("images", numbers) or [""] * len(numbers)
    stored = dataset if isinstance(dataset, EpisodeDataset) and "image_bytes" in dataset.columns else None
    result = RowPictures([], [])
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        listed: list[StoredPicture] = []
        data, at = b"", 0
        for place in range(first, last):
            size, pictures = int(lengths[place]), stored_pictures(lists[place])
            for picture in pictures:
                moved = None if picture.data is None else (picture.data[0] + len(data), picture.data[1])
                listed.append(picture._replace(start=picture.start + at, stop=picture.stop + at, data=moved))
            if pictures and stored is not None:
                data += stored.image_bytes(int(numbers[place]))
            at += size
        result.lines.append(json.dumps([picture._asdict() for picture in listed], ensure_ascii=False) if listed else "")
        result.data.append(data)
    return result


class PictureCollator:
    """Adds to the batches of another collator what a model needs to see the pictures of their rows.

    `model` is the model's folder; `images` the folder that the paths of pictures start from (not needed for whole
    paths, nor where the dataset stores their bytes). A picture whose bytes have changed since the build, or of which
    the processor makes another grid, is an error.
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
        """Collate rows, with `pixel_values` and what goes with them."""
        plain = [{key: value for key, value in row.items() if key not in ("images", "image_bytes")} for row in features]
        rows = [stored_pictures(feature.get("images")) for feature in features]
        batch = dict(self._collator(plain))
        if len(batch["input_ids"]) != len(features):
            rows = [_joined(rows, [len(feature["input_ids"]) for feature in features])]
        width = batch["input_ids"].shape[1]
        for row in rows:
            if any(picture.stop > width for picture in row):
                raise DataError("a picture is cut off: rows with pictures must not be truncated")
        shown = [
            [(picture, self._bytes(picture, feature)) for picture in document]
            for feature in features
            for document in _by_document(feature)
        ]
        if self.rule.has_axes:
            batch["position_ids"] = self._positions(batch, rows)
        if self.rule.types:
            batch[self.rule.types] = _types(batch, rows)
        return batch | self._pixels(shown) if any(shown) else batch

    def with_bytes(self, features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copy rows with the bytes of all their pictures."""
        rows = []
        for feature in features:
            listed, data = [], b""
            for picture in stored_pictures(feature.get("images")):
                content = self._bytes(picture, feature)
                listed.append(picture._replace(data=(len(data), len(content)))._asdict())
                data += content
            rows.append({**feature, "images": json.dumps(listed), "image_bytes": data})
        return rows

    def _bytes(self, picture: StoredPicture, feature: Mapping[str, Any]) -> bytes:
        if picture.data is not None:
            data = bytes(feature["image_bytes"][picture.data[0] : sum(picture.data)])
        else:
            data = read_picture(picture.place, self._folder_of(picture.place))
        if picture_hash(data) != picture.hash:
            raise DataError(f"the picture {picture.place} has changed since the dataset was built: build it again")
        return data

    def _folder_of(self, place: str) -> str:
        """Find the folder that the path of a picture starts from; a whole path needs none."""
        if self._images is not None:
            return os.fspath(self._images)
        if not os.path.isabs(place.removeprefix("file://")):
            raise ConfigError(
                f"the picture {place} is a path, and nothing says where it starts: give images= the folder of the "
                "pictures, or build with store_images, which keeps their bytes"
            )
        return os.path.sep

    def _pixels(self, documents: Sequence[Sequence[tuple[StoredPicture, bytes]]]) -> dict[str, Any]:
        """Process all pictures of a batch, and compare their grids with those of the build."""
        outputs = _processed(self.rule, self._model, [[data for _, data in document] for document in documents])
        shown = [picture for document in documents for picture, _ in document]
        grids = self.rule.grids_made(outputs, len(shown))
        for picture, grid in zip(shown, grids, strict=True):
            if grid != picture.grid:
                raise DataError(
                    f"the processor of {self._model} makes {grid} of the picture {picture.place} ({picture.width} x "
                    f"{picture.height}), and the dataset was built with {picture.grid}: rebuild with this model's files"
                )
        return {key: value for key, value in outputs.items() if key not in self.rule.unused_keys}

    def _positions(self, batch: Mapping[str, Any], rows: Sequence[Sequence[StoredPicture]]) -> Any:
        """Compute positions on four axes, text, time, height and width, which restart with each document."""
        import torch

        count, width = batch["input_ids"].shape
        stored = batch.get("position_ids")
        plain = np.tile(np.arange(width), (count, 1)) if stored is None else np.asarray(stored)
        axes = np.repeat(plain[None].astype(np.int64), 4, axis=0)
        for number, row in enumerate(rows):
            for picture in row:
                inside, step = self.rule.axes(picture.grid)
                first = int(axes[1, number, picture.start])
                axes[1:, number, picture.start : picture.stop] = first + inside
                ends = np.flatnonzero(plain[number, picture.stop :] == 0)
                end = picture.stop + int(ends[0]) if len(ends) else width
                if end > picture.stop:
                    axes[1:, number, picture.stop : end] += first + step - axes[1, number, picture.stop]
        return torch.from_numpy(axes)


@lru_cache(maxsize=4)
def _processor(model: str) -> Any:
    """Return the model's own image processor."""
    need("transformers", "making pixels of pictures")
    from transformers import AutoImageProcessor

    return open_model_folder(model, lambda: AutoImageProcessor.from_pretrained(model, **LOCAL))


def _processed(rule: PictureRule, model: str, documents: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    from PIL import Image, ImageOps

    opened = [
        [ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB") for data in document]
        for document in documents
    ]
    return dict(_processor(model)(images=rule.arranged(opened), return_tensors="pt", **rule.processor_options))


def made_grids(rule: PictureRule, model: str, pictures: Sequence[bytes]) -> list[Grid]:
    """Run the image processor of a model folder on pictures, for their grids."""
    return rule.grids_made(_processed(rule, model, [[data] for data in pictures]), len(pictures))


def _by_document(feature: Mapping[str, Any]) -> list[list[StoredPicture]]:
    """Group the pictures of a row by its documents."""
    pictures = stored_pictures(feature.get("images"))
    lengths = feature.get("seq_lengths")
    ends = np.cumsum([len(feature["input_ids"])] if lengths is None else lengths)
    owners = np.searchsorted(ends, [picture.start for picture in pictures], side="right")
    return [[pictures[at] for at in np.flatnonzero(owners == number).tolist()] for number in range(len(ends))]


def _joined(rows: Sequence[Sequence[StoredPicture]], lengths: Sequence[int]) -> list[StoredPicture]:
    """Move the pictures of rows that were joined into one."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        picture._replace(start=picture.start + at, stop=picture.stop + at)
        for at, row in zip(starts, rows, strict=False)
        for picture in row
    ]


def _types(batch: Mapping[str, Any], rows: Sequence[Sequence[StoredPicture]]) -> Any:
    """1 for tokens of pictures, 0 for text."""
    import torch

    types = torch.zeros_like(batch["input_ids"])
    for number, row in enumerate(rows):
        for picture in row:
            types[number, picture.start : picture.stop] = 1
    return types
