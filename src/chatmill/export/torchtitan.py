"""The export to torchtitan: three arrays of rows, which `RowSource` reads at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chatmill.core.shift import IGNORE_INDEX, shift_left_ragged
from chatmill.export.targets import ids_of
from chatmill.export.trained import PaddedRows, Targets, positions_of
from chatmill.store.row_arrays import RowArrayWriter

if TYPE_CHECKING:
    from chatmill.export.targets import Export


def to_torchtitan(export: Export) -> None:
    """`SPLIT/{input,labels,positions}.npy`: int32 arrays of shape (rows, length), for `numpy.load(mmap_mode="r")`.

    Labels are moved by one in each document, as torchtitan's loss expects them, and positions begin anew with each
    document, which is where its attention masks find the bounds. Padding is a document of its own.
    """
    targets = Targets(export, "torchtitan")
    widths = set()
    for split in export.source.splits:
        rows = export.rows_of_one_length(split, "torchtitan")
        width = rows.capacity or 0
        widths.add(width)
        with RowArrayWriter(export.folder / split, len(rows.row_offsets) - 1, width) as arrays:
            for batch in export.batches(split, rows, width=width):
                ids, padding = ids_of(split, batch), PaddedRows(batch, width)
                labels = np.where(targets.of(batch), ids, np.int32(IGNORE_INDEX))
                labels = shift_left_ragged(labels, batch.documents.offsets, IGNORE_INDEX)
                arrays.append(
                    padding.of(ids, export.pad_id),
                    padding.of(labels, IGNORE_INDEX),
                    padding.of(positions_of(batch), padding.counted),
                )
    targets.say_what_is_lost()
    export.config += [
        "from chatmill.torchtitan import ChatmillDataLoader",
        f'dataloader=ChatmillDataLoader.Config(dataset_path="{{out}}/{export.main_split}")',
        f"training.seq_len = {max(widths)}",
    ]
