"""LLaMA-Factory: a folder for `tokenized_path`, with rows as `neat_packing` lays them out, and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.export.arrow_files import Columns, save_splits
from chatmill.export.pairs import pairs_to_llamafactory
from chatmill.export.row_layout import RowBatch
from chatmill.export.trainer_lines import llamafactory_lines
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.images.headers import MOST_PIXELS, is_turned
from chatmill.load.pictures import row_pictures

if TYPE_CHECKING:
    from chatmill.export.targets import Export

VALIDATION = "validation"
"""What LLaMA-Factory calls `val`."""
LEAST_SIDE = 28
"""LLaMA-Factory enlarges a picture with a shorter side before the model's processor sees it."""
MULTIPLE = 8
"""LLaMA-Factory pads the ids of a training batch to this multiple, and not their positions: the two would not fit."""


def to_llamafactory(export: Export) -> None:
    """Write a folder for `tokenized_path`: `train` and `validation`.

    Packed rows are laid out as `neat_packing` lays them out: `attention_mask` holds the number of the document in its
    row, `position_ids` restart with each, and `packing_params` say where each ends, from which LLaMA-Factory makes the
    positions of models whose positions have several dimensions. All rows are padded to one width (`_width`).
    """
    shows = any(documents.has_pictures for documents in export.source.splits.values())
    if any(documents.has_sides for documents in export.source.splits.values()):
        if shows:
            raise ConfigError("pairs with pictures are not exported to LLaMA-Factory: hf and parquet hold both")
        pairs_to_llamafactory(export)
        return
    export.begin_for("LLaMA-Factory")
    plans = export.rows()
    for split, rows in plans.items():
        if rows.packed and rows.capacity:
            plans[split] = replace(rows, width=_width(rows.capacity))

    def columns(batch: RowBatch) -> Columns:
        mask = batch.numbers_in_row if batch.width else np.ones(len(batch.ids), dtype=np.int8)
        made = {
            "input_ids": batch.per_token(batch.ids, export.pad_id),
            "attention_mask": batch.per_token(mask),
            "labels": batch.per_token(export.labels(batch), IGNORE_INDEX),
        }
        pictures: Sequence[Sequence[StoredPicture]] = [()] * len(batch)
        if shows:
            shown = row_pictures(export.source.splits[batch.split], batch.numbers, batch.lengths, batch.row_offsets)
            pictures = [stored_pictures(line) for line in shown.lines]
            made["images"] = _files(pictures, shown.data)
        if batch.width:
            made["position_ids"] = batch.per_token(batch.positions)
            made["packing_params"] = _packing_params(batch, pictures)
        return made

    names = {split: {"train": "train", "val": VALIDATION}.get(split, f"{VALIDATION}_{split}") for split in plans}
    save_splits(export, plans, columns, names=names)
    export.config += llamafactory_lines(export.facts(plans, most_pixels=MOST_PIXELS))


def _width(capacity: int) -> int:
    """Return to how many tokens rows are padded: a multiple of 8, and at least one token of padding.

    Without padding a row would lose its mask in flash attention, and one with a single document its `packing_params`.
    """
    return (capacity // MULTIPLE + 1) * MULTIPLE


def _packing_params(batch: RowBatch, pictures: Sequence[Sequence[StoredPicture]]) -> Any:
    """Return a column that says of each packed row where its documents end, and whose each picture is."""
    import pyarrow as pa

    numbers = ("sequence_boundaries", "image_subseq_ids", "video_subseq_ids", "audio_subseq_ids")
    fields = [(name, pa.list_(pa.int64())) for name in numbers]
    kind = pa.struct([*fields, ("right_padding_length", pa.int64())])
    bounds = pairwise(batch.row_offsets.tolist())
    ends = [offsets_of(batch.lengths[first:last]).tolist() for first, last in bounds]
    params = [
        _packing(its_pictures, its_ends, batch.width) for its_pictures, its_ends in zip(pictures, ends, strict=True)
    ]
    return pa.array(params, type=kind)


def _packing(pictures: Sequence[StoredPicture], ends: list[int], width: int) -> dict[str, Any]:
    """Return what LLaMA-Factory keeps of a packed row: where its documents end, and whose each picture is."""
    owners = np.searchsorted(ends, [picture.start for picture in pictures], side="right") - 1
    return {
        "sequence_boundaries": [*ends, width],
        "image_subseq_ids": owners.tolist(),
        "video_subseq_ids": [],
        "audio_subseq_ids": [],
        "right_padding_length": width - ends[-1],
    }


def _files(rows: Sequence[Sequence[StoredPicture]], data: Sequence[bytes]) -> Any:
    """Return a column of the pictures of each row."""
    import pyarrow as pa

    files = []
    for pictures, row_data in zip(rows, data, strict=True):
        files.append([_file(picture, row_data) for picture in pictures])
    return pa.array(files, type=pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))


def _file(picture: StoredPicture, data: bytes) -> dict[str, Any]:
    """Return the bytes of a picture that LLaMA-Factory shows to the processor as it is."""
    if picture.data is None:
        raise DataError(
            f"the picture {picture.place} is not stored in the dataset, and LLaMA-Factory would look for it elsewhere: "
            "build with --store-images"
        )
    content = data[picture.data[0] : sum(picture.data)]
    named = picture.place or "a picture"
    if is_turned(content):
        raise DataError(f"{named} is turned by EXIF, which LLaMA-Factory does not read: turn the file itself")
    if min(picture.height, picture.width) < LEAST_SIDE:
        raise DataError(
            f"{named} has {picture.width} x {picture.height} pixels, and LLaMA-Factory enlarges pictures with a side "
            f"under {LEAST_SIDE}: leave the record out, or enlarge the file itself"
        )
    return {"bytes": content, "path": picture.place or None}
