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
from chatmill.train.isolation import IsolationReport, alone_tolerance, note_movement, spread, still
from chatmill.train.isolation_batches import Document

Row = Mapping[str, Any]
"""A packed row: `input_ids`, `seq_lengths`, `images` and the bytes of its pictures."""


def check_pictures(
    model: Any, features: Sequence[Row], collator: PictureCollator, *, max_probes: int = 8, seed: int = 0
) -> IsolationReport:
    """Check packed rows with pictures on a transformers model, called with what the collator makes.

    At most `max_probes` documents of each row are changed. The model is called in eval mode.
    """
    random = np.random.RandomState(seed)
    documents: list[Document] = []
    eps = tolerance = 0.0
    with still(model), torch.no_grad():
        for number, feature in enumerate(collator.with_bytes(features)):
            base = _logits(model, collator, feature)
            eps = max(eps, torch.finfo(base.dtype).eps * max(1.0, float(base.abs().max())))
            tolerance = max(tolerance, alone_tolerance(base))
            in_row = _documents(number, feature)
            for probe in (in_row[place] for place in spread(len(in_row), max_probes)):
                note_movement(in_row, probe, (_logits(model, collator, _changed(feature, probe, random)) - base).abs())
            for document in in_row:
                alone = _logits(model, collator, _alone(feature, document))
                document.alone = float((alone - base[document.start : document.end]).abs().max())
            documents += in_row
    if not any(document.number for document in documents):
        raise DataError("no row holds two documents, so there is nothing to keep apart: pack first")
    return IsolationReport(documents=tuple(documents), moved_tolerance=eps, alone_tolerance=tolerance)


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
