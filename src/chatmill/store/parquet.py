"""Writing Arrow record batches as numbered Parquet files: one batch in memory, files of bounded size."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from chatmill.store.episode_layout import shard_name


class ParquetShards:
    """Appends batches to `shard_00000.parquet`, `shard_00001.parquet`, ...; use it in a `with` block.

    The files are written in place: give it a folder that is not published yet. Each batch is one row group.
    """

    def __init__(self, folder: Path, schema: Any, *, shard_tokens: int, suffix: str = ".parquet") -> None:
        """`shard_tokens`: a file is closed before it would hold more tokens; a larger batch is alone in its file."""
        self._folder, self._schema, self._limit, self._suffix = folder, schema, shard_tokens, suffix
        self._writer: Any = None
        self._tokens = 0
        self.files = 0
        """Files begun so far."""
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, batch: Any, tokens: int) -> None:
        """Write one record batch that holds so many tokens."""
        if self._writer is not None and self._tokens + tokens > self._limit:
            self._close()
        if self._writer is None:
            import pyarrow.parquet as pq

            path = self._folder / f"{shard_name(self.files)}{self._suffix}"
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
            self.files += 1
            self._tokens = 0
        self._writer.write_batch(batch, row_group_size=max(1, len(batch)))
        self._tokens += tokens

    def _close(self) -> None:
        self._writer.close()
        self._writer = None

    def __enter__(self) -> ParquetShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._close()
