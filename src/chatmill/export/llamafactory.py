"""LLaMA-Factory: a folder for `tokenized_path`, with rows as `neat_packing` lays them out, and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError
from chatmill.export.arrow_files import Columns, lists, save_splits
from chatmill.export.pairs import pairs_to_llamafactory
from chatmill.export.row_layout import PaddedRows, RowBatch
from chatmill.export.trainers import labels_of
from chatmill.images.column import StoredPicture, stored_pictures
from chatmill.images.headers import MOST_PIXELS, is_turned
from chatmill.load.pictures import row_pictures

if TYPE_CHECKING:
    from chatmill.export.targets import Export

VALIDATION = "validation"
"""What LLaMA-Factory calls `val`."""
LEAST_SIDE = 28
"""LLaMA-Factory enlarges a picture with a shorter side before the model's processor sees it."""


def to_llamafactory(export: Export) -> None:
    """A folder for `tokenized_path`: `train` and `validation`.

    Packed rows are laid out as `neat_packing` lays them out: `attention_mask` holds the number of the document in its
    row and `position_ids` restart with each; all rows are padded to one token more than their length.
    """
    shows = any(documents.has_pictures for documents in export.source.splits.values())
    if any(documents.has_sides for documents in export.source.splits.values()):
        if shows:
            raise ConfigError("pairs with pictures are not exported to LLaMA-Factory: hf and parquet hold both")
        pairs_to_llamafactory(export)
        return
    export.begin_for("LLaMA-Factory")
    plans = {split: export.rows(split) for split in export.source.splits}
    # One token more, as LLaMA-Factory does: a row without padding loses its mask in flash attention.
    widths = {split: rows.capacity + 1 if rows.packed and rows.capacity else 0 for split, rows in plans.items()}

    def columns(batch: RowBatch) -> Columns:
        width = widths[batch.split]
        made = _packed(export, batch, width) if width else _plain(export, batch)
        return {**made, **(_pictures(export, batch, width) if shows else {})}

    names = {split: {"train": "train", "val": VALIDATION}.get(split, f"{VALIDATION}_{split}") for split in plans}
    save_splits(export, plans.__getitem__, lambda rows: (_schema(rows.packed, shows), columns), names=names)
    is_packed, longest = max((p.packed, p.capacity or int(p.row_tokens.max(initial=0))) for p in plans.values())
    export.config += ["stage: sft", "tokenized_path: {out}", f"cutoff_len: {longest}"]
    export.config += ["neat_packing: true"] if is_packed else []
    if shows:  # else it resizes pictures, and their tokens are others
        export.config += [f"image_max_pixels: {MOST_PIXELS}", "image_min_pixels: 1"]


def _schema(packed: bool, shows: bool) -> Any:
    import pyarrow as pa

    schema = lists(input_ids=pa.int32(), attention_mask=pa.int32() if packed else pa.int8(), labels=pa.int32())
    if packed:
        schema = schema.append(pa.field("position_ids", pa.list_(pa.int32())))
    if shows:
        picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        schema = schema.append(pa.field("images", pa.list_(picture)))
    if shows and packed:
        numbers = ("sequence_boundaries", "image_subseq_ids", "video_subseq_ids", "audio_subseq_ids")
        about = [(name, pa.list_(pa.int64())) for name in numbers] + [("right_padding_length", pa.int64())]
        schema = schema.append(pa.field("packing_params", pa.struct(about)))
    return schema


def _plain(export: Export, batch: RowBatch) -> Columns:
    offsets = batch.token_offsets
    return {
        "input_ids": (batch.ids, offsets),
        "attention_mask": (np.ones(len(batch.ids), dtype=np.int8), offsets),
        "labels": (labels_of(batch, export.targets(batch)), offsets),
    }


def _packed(export: Export, batch: RowBatch, width: int) -> Columns:
    padding = PaddedRows(batch, width)
    return {
        "input_ids": (padding.of(batch.ids, export.pad_id), padding.offsets),
        "attention_mask": (padding.of(batch.numbers_in_row, 0), padding.offsets),
        "position_ids": (padding.of(batch.positions, 0), padding.offsets),
        "labels": (padding.of(labels_of(batch, export.targets(batch)), IGNORE_INDEX), padding.offsets),
    }


def _pictures(export: Export, batch: RowBatch, width: int) -> Columns:
    """The pictures of rows, and in packed ones to which document each belongs."""
    documents, lengths = export.source.splits[batch.split], np.diff(batch.documents.offsets)
    shown = row_pictures(documents, batch.numbers, lengths, batch.row_offsets)
    rows = [stored_pictures(line) for line in shown.lines]
    files = [_file(one, data) for own, data in zip(rows, shown.data, strict=True) for one in own]
    columns: dict[str, Any] = {"images": (files, offsets_of(np.array([len(own) for own in rows], dtype=np.int64)))}
    if width:
        borders = zip(batch.row_offsets[:-1].tolist(), batch.row_offsets[1:].tolist(), strict=True)
        about = [
            _packing(own, offsets_of(lengths[a:b]).tolist(), width) for own, (a, b) in zip(rows, borders, strict=True)
        ]
        columns["packing_params"] = (about, batch.row_offsets)
    return columns


def _packing(pictures: Sequence[StoredPicture], ends: list[int], width: int) -> dict[str, Any]:
    """What LLaMA-Factory keeps of a packed row: where its documents end, and whose each picture is."""
    owners = np.searchsorted(ends, [one.start for one in pictures], side="right") - 1
    return {
        "sequence_boundaries": [*ends, width],
        "image_subseq_ids": owners.tolist(),
        "video_subseq_ids": [],
        "audio_subseq_ids": [],
        "right_padding_length": width - ends[-1],
    }


def _file(one: StoredPicture, data: bytes) -> dict[str, Any]:
    """The bytes of a picture that LLaMA-Factory shows to the processor as it is."""
    if one.data is None:
        raise DataError(
            f"the picture {one.place} is not stored in the dataset, and LLaMA-Factory would look for it elsewhere: "
            "build with --store-images"
        )
    own = data[one.data[0] : sum(one.data)]
    named = one.place or "a picture"
    if is_turned(own):
        raise DataError(f"{named} is turned by EXIF, which LLaMA-Factory does not read: turn the file itself")
    if min(one.height, one.width) < LEAST_SIDE:
        raise DataError(
            f"{named} has {one.width} x {one.height} pixels, and LLaMA-Factory enlarges pictures with a side under "
            f"{LEAST_SIDE}: leave the record out, or enlarge the file itself"
        )
    return {"bytes": own, "path": one.place or None}
