"""Rows as Arrow columns: Parquet shards, and folders of the datasets library."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import need
from chatmill.export.row_layout import RowBatch, RowPlan
from chatmill.store.episode_layout import shard_name

if TYPE_CHECKING:
    from chatmill.export.targets import Export
Columns = Mapping[str, tuple[NDArray[Any] | list[Any], NDArray[np.int64]]]
"""Values and the offsets of the rows in them, by the name of the column."""


def write_parquet(
    export: Export,
    split: str,
    rows: RowPlan,
    schema: Any,
    columns: Callable[[RowBatch], Columns],
    *,
    width: int = 0,
    suffix: str = ".parquet",
) -> None:
    """Write a split as `SPLIT/shard_00000.parquet`, ...; `width` is that of padded rows."""
    import pyarrow.parquet as pq

    folder = export.folder / split
    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(export.shards(split, rows, width=width)):
        with pq.ParquetWriter(folder / f"{shard_name(number)}{suffix}", schema, compression="zstd") as file:
            for batch in shard:
                file.write_batch(record_batch(columns(batch), schema))


def save_splits(
    export: Export,
    plan: Callable[[str], RowPlan],
    layout: Callable[[RowPlan], tuple[Any, Callable[[RowBatch], Columns]]],
    *,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write all splits for `datasets.load_from_disk`; one that was asked for by name is not in a folder of its own.

    `plan` gives the rows of a split, `layout` their schema and what makes columns of a batch, `names` other names.
    """
    known = [(names or {}).get(split, split) for split in export.source.splits]
    for split, name in zip(export.source.splits, known, strict=True):
        rows = plan(split)
        folder = export.folder if export.alone else export.folder / name
        save_dataset(export, split, rows, *layout(rows), folder)
    if not export.alone:
        (export.folder / "dataset_dict.json").write_text(json.dumps({"splits": known}))


def save_dataset(
    export: Export,
    split: str,
    rows: RowPlan,
    schema: Any,
    columns: Callable[[RowBatch], Columns],
    folder: Path,
) -> None:
    """Write a split as what `Dataset.load_from_disk` opens; one batch is in memory at a time."""
    need("datasets", "exporting to folders of the datasets library")
    import datasets

    streams = export.folder / ".streams"  # a dataset is not saved into the folder that it is read from
    streams.mkdir()
    stream = streams / f"{split}.arrow"
    batches = (record_batch(columns(batch), schema) for batch in export.batches(split, rows))
    write_stream(stream, schema, batches)
    name = f"{export.source.fingerprint}/{split}/{rows.capacity}/{','.join(schema.names)}"
    table = datasets.table.MemoryMappedTable.from_file(str(stream))
    # A fingerprint of ours: the one that would be made up depends on the time of the file.
    dataset = datasets.Dataset(table, fingerprint=hashlib.sha256(name.encode()).hexdigest()[:16])
    with _no_progress_bars(datasets):
        dataset.save_to_disk(str(folder))
    del dataset, table
    stream.unlink()
    streams.rmdir()


@contextlib.contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def lists(**kinds: Any) -> Any:
    """A schema of list columns; each is named with the type of its values."""
    import pyarrow as pa

    return pa.schema([(name, pa.list_(kind)) for name, kind in kinds.items()])


def record_batch(columns: Columns, schema: Any) -> Any:
    """The columns of a schema: lists of values where its type is one, else a value a row."""
    import pyarrow as pa

    arrays = []
    for field in schema:
        values, offsets = columns[field.name]
        if pa.types.is_list(field.type):
            flat = values if isinstance(values, pa.Array) else pa.array(values, type=field.type.value_type)
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat))
        else:
            arrays.append(pa.array(values, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_stream(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write record batches as an Arrow stream, which the datasets library maps."""
    import pyarrow as pa

    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
