"""Files of Arrow record batches: what Arrow writes to, and Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatmill.store.episode_layout import shard_name


class ArrowSink(io.RawIOBase):
    """A file for Arrow to write to that passes all bytes to a writer with a running hash."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        """`write` takes the next bytes."""
        super().__init__()
        self._write = write

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Pass bytes on."""
        self._write(memoryview(data))
        return len(data)


def parquet_writer(path: Path, schema: Any) -> Any:
    """A writer for a `with` block; each record batch that it writes is one row group.

    The file is written in place: give it a folder that is not published yet.
    """
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(path, schema, compression="zstd")


def parquet_shard(folder: Path, number: int, schema: Any, suffix: str = ".parquet") -> Any:
    """The same for `shard_00000.parquet`, `shard_00001.parquet`, ..."""
    return parquet_writer(folder / f"{shard_name(number)}{suffix}", schema)
