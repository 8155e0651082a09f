"""Writing a split of packed rows: constant memory, a shard is there whole or not at all, the manifest comes last."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import ArrayLike

from chatmill.core.machine_limits import disk_way_out
from chatmill.errors import ConfigError, DataError
from chatmill.store.block_manifest import (
    COLUMNS,
    DOCUMENTS,
    IDS,
    KINDS,
    MANIFEST,
    MAX_CAPACITY,
    MAX_ID,
    REQUIRED,
    ROW_LENGTHS,
    STARTS,
    STARTS_OFFSETS,
    WEIGHTS_F32,
    WEIGHTS_U8,
    BlockColumn,
    BlockManifest,
    BlockShardRecord,
)
from chatmill.store.block_rows import BlockRows, RowShape, checked_rows
from chatmill.store.durable import GrowingFile, lock_file, remove_path, sync_folder, write_synced
from chatmill.store.episode_layout import MAX_SHARDS, SHARD_NAME, shard_name, writing_mark
from chatmill.store.names import is_split_name
from chatmill.store.shard_writer import COPY

PARTIAL = re.compile(r"\.(shard_\d+|blocks\.json)\.partial")
"""Names under which the parts of a split grow, and go."""


class BlockWriter:
    """Appends packed rows to one split of a dataset; use it in a `with` block, or call `close`.

    Whether a split has weights and kinds is decided by the first rows; all others bring the same columns. Weights are
    stored as uint8, or as float32 for the whole split when one of them is a fraction or above 255. Leaving the `with`
    block by an exception removes the split.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        *,
        capacity: int,
        pad_id: int,
        rows_per_shard: int,
        fractional: bool | None = None,
    ) -> None:
        """`capacity`: tokens per row, padding included; every shard but the last has `rows_per_shard` rows.

        `fractional`: True stores float32 weights in any case, False refuses weights that need them; None finds out:
        shards that were written before the first such weight are then written again when the split is closed.
        """
        for name, value, low, high in (
            ("capacity", capacity, 1, MAX_CAPACITY),
            ("pad_id", pad_id, 0, MAX_ID),
            ("rows_per_shard", rows_per_shard, 1, MAX_CAPACITY),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be {low} to {high}")
        if not is_split_name(split):
            raise ConfigError(f"{split!r} is no name for a split; use a plain folder name such as 'train'")
        self.directory, self.split = Path(directory), split
        self.capacity, self.pad_id, self.rows_per_shard, self.fractional = capacity, pad_id, rows_per_shard, fractional
        self.rows = 0
        """Rows appended so far."""
        self._names: frozenset[str] | None = None
        self._wide = fractional is True
        self._published: list[BlockShardRecord] = []
        self._shard: _Shard | None = None
        self._closed = False
        self._folder = self.directory / split
        try:
            self._lock = self._begin()
        except OSError as error:
            raise ConfigError(
                f"{self.directory}: cannot write a dataset here: {error.strerror or error}; "
                + disk_way_out(error, "choose a folder you may write to")
            ) from error

    def _begin(self) -> IO[bytes]:
        """Claim the split: refuse one that is there, sweep what a killed writer left, leave a mark."""
        self.directory.mkdir(parents=True, exist_ok=True)
        mark = writing_mark(self.directory, self.split)
        was_stopped = mark.exists()
        lock = lock_file(mark)
        try:
            self._sweep(was_stopped)
            self._folder.mkdir(exist_ok=True)
        except BaseException:
            if not was_stopped:
                mark.unlink(missing_ok=True)
            lock.close()
            raise
        return lock

    def _sweep(self, was_stopped: bool) -> None:
        """Remove an unfinished split of blocks; anything else is not ours to remove."""
        there = list(self._folder.iterdir()) if self._folder.exists() else []
        whole = [path for path in there if not PARTIAL.fullmatch(path.name)]
        unfinished = was_stopped and all(SHARD_NAME.fullmatch(p.name) and (p / IDS.file).is_file() for p in whole)
        if whole and not unfinished:
            raise ConfigError(
                f"{self._folder}: already holds {min(path.name for path in whole)}; a writer never adds to a split "
                "that is there: choose another folder, or delete this one first"
            )
        for path in there:
            _take_away(path)

    def append(
        self,
        ids: ArrayLike,
        row_lengths: ArrayLike,
        start_values: ArrayLike,
        start_offsets: ArrayLike,
        documents: ArrayLike,
        weights: ArrayLike | None = None,
        kinds: ArrayLike | None = None,
    ) -> None:
        """Append B rows, as the fields of a `PackedRows`: `ids`, `weights` and `kinds` are B x capacity.

        `weights` are token-aligned: how much each token counts as a target. Behind the first `row_lengths[r]` tokens
        row `r` holds the pad id, weight 0 and kind 0. How rows are divided among calls does not change a byte.
        Nothing of a call with a mistake in it is written.
        """
        if self._closed:
            raise DataError(f"{self._folder}: this writer is closed")
        rows = checked_rows(
            ids,
            row_lengths,
            start_values,
            start_offsets,
            documents,
            weights,
            kinds,
            shape=RowShape(capacity=self.capacity, pad_id=self.pad_id, fractional=self.fractional, first=self.rows),
        )
        if not len(rows):
            return
        self._same_columns(rows)
        with self._or_nothing("writing"):
            self._write(rows)

    @contextlib.contextmanager
    def _or_nothing(self, doing: str) -> Iterator[None]:
        """A step that ends well, or the split goes: half a call must never be published."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise ConfigError(
                f"{self._folder}: {doing} failed: {error.strerror or error}; nothing of this split is left; "
                + disk_way_out(error, "check the disk")
            ) from error
        except BaseException:
            self.abort()
            raise

    def _same_columns(self, rows: BlockRows) -> None:
        names = frozenset(name for name in ("weights", "kinds") if getattr(rows, name) is not None)
        if self._names is None:
            self._names = names
        elif names != self._names:
            raise DataError(
                f"row {self.rows:,} brings the columns {', '.join(sorted(names)) or 'none'}, but the rows before it "
                f"{', '.join(sorted(self._names)) or 'none'}: a column is there for all rows of a split or for none"
            )

    @property
    def columns(self) -> tuple[BlockColumn, ...]:
        """The columns of this split; which of the optional ones there are is known after the first rows."""
        weights = WEIGHTS_F32 if self._wide else WEIGHTS_U8
        chosen = {column.name: column for column in (weights, KINDS) if column.name in (self._names or ())}
        return tuple(column for column in COLUMNS if column in REQUIRED or column is chosen.get(column.name))

    def _write(self, rows: BlockRows) -> None:
        if rows.weights is not None and rows.weights.dtype != np.uint8 and not self._wide:
            self._wide = True
            if self._shard is not None:
                self._shard.widen()
        done = 0
        while done < len(rows):
            if self._shard is None:
                self._shard = _Shard(self._partial(self._next_name()), self.columns)
            upto = min(len(rows), done + self.rows_per_shard - self._shard.rows)
            self._shard.append(rows.part(done, upto))
            done = upto
            if self._shard.rows == self.rows_per_shard:
                self._publish_shard()
        self.rows += len(rows)

    def _next_name(self) -> str:
        if len(self._published) >= MAX_SHARDS:
            raise ConfigError(f"{self._folder}: more than {MAX_SHARDS:,} shards: choose a larger rows_per_shard")
        return shard_name(len(self._published))

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}.partial"

    def _publish_shard(self) -> None:
        assert self._shard is not None
        name = self._next_name()
        record = self._shard.finish(name)
        self._shard.folder.rename(self._folder / name)
        sync_folder(self._folder)
        self._published.append(record)
        self._shard = None

    def manifest(self) -> BlockManifest:
        """What has been published so far."""
        return BlockManifest(
            split=self.split,
            capacity=self.capacity,
            pad_id=self.pad_id,
            rows_per_shard=self.rows_per_shard,
            columns=self.columns,
            shards=tuple(self._published),
        )

    def close(self) -> BlockManifest:
        """Publish what is left and the manifest, and return it; a writer without rows publishes nothing."""
        if self._closed:
            return self.manifest()
        if not self.rows:
            self.abort()
            raise DataError(f"{self._folder}: no row was appended, and a split cannot be empty")
        with self._or_nothing("publishing"):
            self._finish()
        self._closed = True
        self._release()
        return self.manifest()

    def _finish(self) -> None:
        if self._shard is not None:
            self._publish_shard()
        if self._wide:
            self._published = [self._widened(record) for record in self._published]
        partial = self._partial(MANIFEST)
        write_synced(partial, self.manifest().to_bytes())
        partial.rename(self._folder / MANIFEST)
        sync_folder(self._folder)
        sync_folder(self.directory)

    def _widened(self, record: BlockShardRecord) -> BlockShardRecord:
        """A shard with float32 weights; one that was published with uint8 is hidden again while they are written."""
        if WEIGHTS_U8.file not in record.files:
            return record
        shard, hidden = self._folder / record.name, self._partial(record.name)
        shard.rename(hidden)
        wide = _widened_weights(hidden).finish()
        sync_folder(hidden)
        hidden.rename(shard)
        sync_folder(self._folder)
        files = {name: file for name, file in record.files.items() if name != WEIGHTS_U8.file}
        return replace(record, files=files | {WEIGHTS_F32.file: wide})

    def abort(self) -> None:
        """Stop, and remove everything that this writer has written."""
        if self._closed:
            return
        self._closed = True
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        for name in (MANIFEST, *(shard_name(number) for number in range(len(self._published) + 1))):
            for path in (self._folder / name, self._partial(name)):
                with contextlib.suppress(OSError):
                    _take_away(path)
        self._published = []
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        if self._folder.exists():
            self._lock.close()  # something could not be removed: the mark stays and says that it is unfinished
        else:
            self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._lock.name)
        self._lock.close()

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class _Shard:
    """One shard while it grows, in a folder that is not yet visible to readers."""

    def __init__(self, folder: Path, columns: Sequence[BlockColumn]) -> None:
        self.folder = folder
        self.rows = 0
        self._tokens = 0
        self._documents = 0
        folder.mkdir()
        self._columns = {column.name: column for column in columns}
        self._files: dict[str, GrowingFile] = {}
        try:
            for column in columns:
                self._files[column.name] = GrowingFile(folder / column.file)
        except BaseException:
            self.discard()
            raise

    def append(self, rows: BlockRows) -> None:
        """Write rows behind the ones that are there."""
        columns = {
            IDS.name: rows.ids,
            WEIGHTS_U8.name: rows.weights,
            KINDS.name: rows.kinds,
            ROW_LENGTHS.name: rows.row_lengths,
            STARTS.name: rows.start_values,
            STARTS_OFFSETS.name: (rows.start_offsets + self._documents)[1 if self.rows else 0 :],
            DOCUMENTS.name: rows.documents,
        }
        for name, growing in self._files.items():
            values = columns[name]
            assert values is not None
            growing.write(values.astype(self._columns[name].dtype, copy=False))
        self.rows += len(rows)
        self._tokens += int(rows.row_lengths.sum())
        self._documents += len(rows.documents)

    def widen(self) -> None:
        """The first weight of the split that needs float32: rewrite those that are there."""
        self._files[WEIGHTS_U8.name].finish()
        self._files[WEIGHTS_U8.name] = _widened_weights(self.folder)
        self._columns[WEIGHTS_U8.name] = WEIGHTS_F32

    def finish(self, name: str) -> BlockShardRecord:
        """Sync every file and the folder; the caller renames the folder."""
        files = {self._columns[column].file: growing.finish() for column, growing in self._files.items()}
        sync_folder(self.folder)
        return BlockShardRecord(
            name=name, rows=self.rows, tokens=self._tokens, documents=self._documents, files=dict(sorted(files.items()))
        )

    def discard(self) -> None:
        """Close and remove everything."""
        for growing in self._files.values():
            growing.discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def _widened_weights(folder: Path) -> GrowingFile:
    """The weights of a hidden shard as float32, in a file that may grow; the uint8 file goes."""
    wide = GrowingFile(folder / WEIGHTS_F32.file)
    try:
        with (folder / WEIGHTS_U8.file).open("rb") as file:
            while piece := file.read(COPY):
                wide.write(np.frombuffer(piece, dtype=np.uint8).astype(WEIGHTS_F32.dtype))
        (folder / WEIGHTS_U8.file).unlink()
    except BaseException:
        wide.discard()
        raise
    return wide


def _take_away(path: Path) -> None:
    """Remove a file or folder; a shard is hidden first, so that it is never seen in half."""
    if SHARD_NAME.fullmatch(path.name) and path.exists():
        path = path.rename(path.with_name(f".{path.name}.partial"))
    remove_path(path)
