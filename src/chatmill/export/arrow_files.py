"""Rows as Arrow columns: Parquet shards, and folders of the datasets library."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill.errors import need
from chatmill.export.row_layout import RowBatch, RowPlan
from chatmill.store.episode_layout import shard_name

if TYPE_CHECKING:
    from chatmill.export.targets import Export
Columns = Mapping[str, Any]
"""An Arrow array for each column, by its name."""
MakeColumns = Callable[[RowBatch], Columns]


def write_parquet(
    export: Export,
    plans: Mapping[str, RowPlan],
    columns: MakeColumns,
    *,
    suffix: str = ".parquet",
) -> None:
    """Write splits as `SPLIT/shard_00000.parquet`, ..."""
    import pyarrow.parquet as pq

    for split, rows in plans.items():
        folder = export.folder / split
        folder.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(export.shards(split, rows)):
            schema, batches = _record_batches(shard, columns)
            with pq.ParquetWriter(folder / f"{shard_name(number)}{suffix}", schema, compression="zstd") as file:
                for batch in batches:
                    file.write_batch(batch)


def save_splits(
    export: Export, plans: Mapping[str, RowPlan], columns: MakeColumns, *, names: Mapping[str, str] | None = None
) -> None:
    """Write all splits for `datasets.load_from_disk`, under other `names` if they are given.

    One that was asked for by name is not in a folder of its own.
    """
    folder_names = {split: (names or {}).get(split, split) for split in plans}
    for split, rows in plans.items():
        save_dataset(
            export, split, rows, columns, export.folder if export.alone else export.folder / folder_names[split]
        )
    if not export.alone:
        (export.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(folder_names.values())}))


def save_dataset(export: Export, split: str, rows: RowPlan, columns: MakeColumns, folder: Path) -> None:
    """Write a split as what `Dataset.load_from_disk` opens; one batch is in memory at a time."""
    need("datasets", "exporting to folders of the datasets library")
    import datasets

    streams = export.folder / ".streams"  # a dataset is not saved into the folder that it is read from
    streams.mkdir()
    stream = streams / f"{split}.arrow"
    names = write_stream(stream, export.batches(split, rows), columns)
    name = f"{export.source.fingerprint}/{split}/{rows.capacity}/{','.join(names)}"
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


def write_stream(path: Path, rows: Iterable[RowBatch], columns: MakeColumns) -> list[str]:
    """Write rows as an Arrow stream, which the datasets library maps; the names of its columns."""
    import pyarrow as pa

    schema, batches = _record_batches(rows, columns)
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return list(schema.names)


def _record_batches(rows: Iterable[RowBatch], columns: MakeColumns) -> tuple[Any, Iterator[Any]]:
    """Return the schema of rows, of which there is one at least, and all of them."""
    import pyarrow as pa

    batches = (pa.RecordBatch.from_pydict(columns(batch)) for batch in rows)
    first = next(batches)
    return first.schema, chain([first], batches)
