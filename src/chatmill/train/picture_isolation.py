"""The isolation check of rows with pictures: neither the text nor the pictures of one document reach another.

The words and the pictures of one document after the other are changed; the logits of the other documents of the row
must not move. And every document gives the logits that it gives alone, with its own pictures.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chatmill.errors import DataError
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.images.files import picture_hash
from chatmill.load.pictures import PictureCollator
from chatmill.train.isolation import IsolationReport, PackedDocuments, measure, still
from chatmill.train.isolation_batches import Document

Row = Mapping[str, Any]
"""A packed row: `input_ids`, `seq_lengths`, `images` and the bytes of its pictures."""


def check_pictures(
    model: Any, features: Sequence[Row], collator: PictureCollator, *, max_probes: int = 8, seed: int = 0
) -> IsolationReport:
    """Check packed rows with pictures on a transformers model, called with what the collator makes.

    At most `max_probes` documents of each row are changed. The model is called in eval mode.
    """
    packed = _PackedPictures(model, collator, list(collator.with_bytes(features)))
    if max(map(len, packed.rows)) < 2:
        raise DataError("no row holds two documents, so there is nothing to keep apart: pack first")
    with still(model), torch.no_grad():
        return measure(packed, max_probes=max_probes, seed=seed)


class _PackedPictures(PackedDocuments):
    """Packed rows with pictures, each collated by itself."""

    def __init__(self, model: Any, collator: PictureCollator, features: Sequence[Row]) -> None:
        self._model = model
        self._collator = collator
        self._features = features
        self.rows = [_documents(number, feature) for number, feature in enumerate(features)]

    def logits(self, changed: Mapping[int, Document], random: np.random.RandomState) -> Sequence[torch.Tensor]:
        """Compute the logits of each row, after changing words and pictures of one document of some rows."""
        features = [
            _changed(feature, changed[row], random) if row in changed else feature
            for row, feature in enumerate(self._features)
        ]
        return [_logits(self._model, self._collator, feature) for feature in features]

    def apart(self, document: Document, base: torch.Tensor) -> torch.Tensor:
        """Measure how far the logits of a document in its row are from those of the document alone."""
        alone = _logits(self._model, self._collator, _alone(self._features[document.row], document))
        return (alone - base[document.start : document.end]).abs()


def _logits(model: Any, collator: PictureCollator, feature: Row) -> torch.Tensor:
    batch = {name: value for name, value in collator([feature]).items() if name != "labels"}
    device = next(model.parameters()).device
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    logits: torch.Tensor = model(**{"use_cache": False, **batch}).logits[0]
    return logits


def _documents(row: int, feature: Row) -> list[Document]:
    ends = np.cumsum(feature["seq_lengths"]).tolist()
    return [
        Document(row=row, number=number, start=end - length, length=length)
        for number, (end, length) in enumerate(zip(ends, feature["seq_lengths"], strict=True))
    ]


def _within(feature: Row, document: Document) -> list[StoredPicture]:
    shown = stored_pictures(feature["images"])
    return [picture for picture in shown if document.start <= picture.start < document.end]


def _alone(feature: Row, document: Document) -> dict[str, Any]:
    """Make the row of one document."""
    moved = [
        picture._replace(start=picture.start - document.start, stop=picture.stop - document.start)
        for picture in _within(feature, document)
    ]
    ids = list(feature["input_ids"][document.start : document.end])
    return {**feature, "input_ids": ids, "labels": ids, "seq_lengths": [len(ids)], "images": _line(moved)}


def _changed(feature: Row, document: Document, random: np.random.RandomState) -> dict[str, Any]:
    """Change the words of one document, and its pictures to others of the same sizes."""
    ids, shown = np.array(feature["input_ids"]), stored_pictures(feature["images"])
    words = np.ones(len(ids), dtype=bool)
    for picture in shown:  # and the tokens that begin and end it
        words[max(picture.start - 1, 0) : picture.stop + 1] = False
    places = np.flatnonzero(words[document.start : document.end]) + document.start
    ids[places] = random.choice(ids[words], size=len(places))
    inside = {picture.start for picture in _within(feature, document)}
    data, listed = b"", []
    for picture in shown:
        assert picture.data is not None
        content = feature["image_bytes"][picture.data[0] : sum(picture.data)]
        content = _inverted(content) if picture.start in inside else content
        listed.append(picture._replace(hash=picture_hash(content), data=(len(data), len(content))))
        data += content
    return {**feature, "input_ids": ids.tolist(), "images": _line(listed), "image_bytes": data}


def _inverted(data: bytes) -> bytes:
    """Invert the colours of a picture."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    out = io.BytesIO()
    ImageOps.invert(image).save(out, "PNG")
    return out.getvalue()


def _line(pictures: Sequence[StoredPicture]) -> str:
    return json.dumps([picture._asdict() for picture in pictures])
