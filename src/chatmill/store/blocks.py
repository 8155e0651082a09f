"""Reading a split of packed rows: memory-mapped, checked when opened, one row or many at a time."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, FormatError
from chatmill.store.block_manifest import (
    MANIFEST,
    WEIGHTS_F32,
    WEIGHTS_U8,
    BlockColumn,
    BlockManifest,
    BlockShardRecord,
    Per,
    read_block_manifest,
)
from chatmill.store.block_rows import Block, BlockRows, layout_problem, offsets_problem, token_problem
from chatmill.store.checksums import CheckedShards, file_problems
from chatmill.store.episode_layout import shard_folders, split_folder
from chatmill.store.mapped import MappedFile, file_size, open_file_limit

CHECK_ROWS = 1 << 14
"""Rows whose lengths and starts are checked at a time, so that opening needs little memory."""
CHECK_TOKENS = 1 << 20
"""Tokens looked at together by `check_blocks`."""


class BlockShard:
    """The files of one shard as arrays, checked against the manifest and each other when opened."""

    def __init__(self, folder: Path, manifest: BlockManifest, record: BlockShardRecord) -> None:
        self.folder, self.record, self.capacity = folder, record, manifest.capacity
        self._files: dict[str, MappedFile] = {}
        for column in manifest.columns:
            path = folder / column.file
            if not path.is_file():
                raise FormatError(_why_missing(folder, column))
            values = record.values(column.per, manifest.capacity)
            self._files[column.name] = MappedFile(path, column.dtype, values)
        for name, file in record.files.items():
            size = file_size(folder / name)
            if size != file.bytes:
                raise FormatError(
                    f"{folder / name}: {size:,} bytes; {MANIFEST} says {file.bytes:,}: it was cut or replaced"
                )
        self._check_rows()

    def _check_rows(self) -> None:
        """Borders, lengths and starts, in words of the first row that is wrong; tokens are not read."""
        count = len(self.documents)
        first, last = int(self.starts_offsets[0]), int(self.starts_offsets[-1])
        if (first, last) != (0, count):
            raise FormatError(f"{self.folder}: starts_offsets go from {first:,} to {last:,}; 0 to {count:,} is needed")
        tokens = 0
        for begin in range(0, self.record.rows, CHECK_ROWS):
            end = min(begin + CHECK_ROWS, self.record.rows)
            problem = offsets_problem(self.starts_offsets[begin : end + 1], begin)
            if not problem and self.starts_offsets[end] > count:
                problem = f"row {end - 1:,}: its document starts end at {self.starts_offsets[end]:,} of {count:,}"
            rows = self.rows(begin, end) if not problem else None
            if rows is not None:
                problem = layout_problem(rows, self.capacity, begin)
                tokens += int(rows.row_lengths.sum())
            if problem:
                raise FormatError(f"{self.folder}: {problem}: a file was changed or does not belong here")
        if tokens != self.record.tokens:
            raise FormatError(
                f"{self.folder}: row_lengths add up to {tokens:,} tokens; {MANIFEST} says {self.record.tokens:,}"
            )

    def rows(self, first: int, last: int) -> BlockRows:
        """Rows `first` up to `last - 1`; per-token columns are views, the others new int64 arrays."""
        offsets = self.starts_offsets[first : last + 1].astype(np.int64)
        documents = slice(int(offsets[0]), int(offsets[-1]))
        return BlockRows(
            ids=self.ids[first:last],
            row_lengths=self.row_lengths[first:last].astype(np.int64),
            start_values=self.starts[documents].astype(np.int64),
            start_offsets=offsets - offsets[0],
            documents=self.documents[documents].astype(np.int64, copy=False),
            weights=None if self.weights is None else self.weights[first:last],
            kinds=None if self.kinds is None else self.kinds[first:last],
        )

    def __len__(self) -> int:
        return self.record.rows

    @property
    def ids(self) -> NDArray[np.uint32]:
        """(rows, capacity) token ids."""
        return self._files["ids"].array.reshape(-1, self.capacity)

    @property
    def weights(self) -> NDArray[Any] | None:
        """(rows, capacity) token-aligned weights, uint8 or float32; None when not stored."""
        return self._files["weights"].array.reshape(-1, self.capacity) if "weights" in self._files else None

    @property
    def kinds(self) -> NDArray[np.uint8] | None:
        """(rows, capacity) kinds; None when not stored."""
        return self._files["kinds"].array.reshape(-1, self.capacity) if "kinds" in self._files else None

    @property
    def row_lengths(self) -> NDArray[np.int32]:
        """Tokens of each row."""
        return self._files["row_lengths"].array

    @property
    def starts(self) -> NDArray[np.int32]:
        """Document starts of all rows, counted in their row."""
        return self._files["starts"].array

    @property
    def starts_offsets(self) -> NDArray[np.int64]:
        """`rows + 1` offsets into `starts` and `documents`."""
        return self._files["starts_offsets"].array

    @property
    def documents(self) -> NDArray[np.int64]:
        """The number of each document, aligned with `starts`."""
        return self._files["documents"].array

    def check_sizes(self) -> None:
        """Raise when a mapped file has changed its size since it was opened."""
        for file in self._files.values():
            file.check()

    def release(self) -> None:
        """Unmap all files; they are mapped again when they are needed."""
        for file in self._files.values():
            file.release()


class BlockDataset:
    """The packed rows of one split, in order. Rows are fixed arrays on disk: reading one is a slice.

    Opening checks sizes, lengths and starts; `check_blocks` reads every byte.
    """

    def __init__(self, directory: str | Path, split: str = "train", *, check: bool = False) -> None:
        """Open `directory/split`; a split without its `blocks.json` is unfinished and refused.

        `check=True` compares all files of a shard with the hashes of `blocks.json` before its first row is read.
        """
        self.directory, self.split = Path(directory), split
        self.folder = split_folder(self.directory, split)
        self.manifest: BlockManifest = read_block_manifest(self.folder)
        _match_shards(self.manifest, self.folder)
        self.capacity: int = self.manifest.capacity
        """Tokens per row, padding included."""
        self.pad_id: int = self.manifest.pad_id
        self.tokens: int = self.manifest.tokens
        """Tokens of all documents, padding not counted."""
        self.shards: list[BlockShard] = []
        for record in self.manifest.shards:
            self.shards.append(BlockShard(self.folder / record.name, self.manifest, record))
            self.shards[-1].release()
        self.row_offsets: NDArray[np.int64] = offsets_of(np.array([len(shard) for shard in self.shards]))
        """First row of each shard, and the number of all rows."""
        hashed = [(shard.folder, shard.record.files) for shard in self.shards] if check else []
        self._checked = CheckedShards(hashed)
        self._open: OrderedDict[int, None] = OrderedDict()
        self._open_limit = open_file_limit(files_per_shard=len(self.manifest.columns))

    def __len__(self) -> int:
        return int(self.row_offsets[-1])

    def __repr__(self) -> str:
        return f"BlockDataset({str(self.folder)!r}: {len(self):,} rows of {self.capacity:,}, {self.tokens:,} tokens)"

    @property
    def weights_dtype(self) -> np.dtype[Any] | None:
        """uint8 or float32; None when the split stores no weights: then every token is a target."""
        column = self.manifest.column("weights")
        return np.dtype(column.dtype) if column else None

    @property
    def has_kinds(self) -> bool:
        """Whether the split stores kinds."""
        return self.manifest.column("kinds") is not None

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Tokens of every row (a new array)."""
        return np.concatenate([self.shard(i).row_lengths for i in range(len(self.shards))]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """sha256 over the manifest, and so over the sizes and hashes of all files as they were written."""
        return self.manifest.fingerprint

    def shard(self, number: int) -> BlockShard:
        """A shard ready to be read: its files are checked for a changed size, and old mappings are let go."""
        shard = self.shards[number]
        self._checked.check(number)
        if number not in self._open:
            self._open[number] = None
            if len(self._open) > self._open_limit:
                self.shards[self._open.popitem(last=False)[0]].release()
        elif len(self._open) > 1:
            self._open.move_to_end(number)
        shard.check_sizes()
        return shard

    def __getitem__(self, index: int) -> Block:
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self):,} in {self.folder}")
        number = int(np.searchsorted(self.row_offsets, position, side="right")) - 1
        shard, row = self.shard(number), position - int(self.row_offsets[number])
        first, last = (int(v) for v in shard.starts_offsets[row : row + 2])
        weights, kinds = shard.weights, shard.kinds
        return Block(
            index=position,
            ids=shard.ids[row],
            weights=None if weights is None else weights[row],
            kinds=None if kinds is None else kinds[row],
            row_length=int(shard.row_lengths[row]),
            document_starts=shard.starts[first:last],
            documents=shard.documents[first:last],
        )

    def __iter__(self) -> Iterator[Block]:
        return (self[i] for i in range(len(self)))

    def rows(self, which: slice | ArrayLike, *, out: Mapping[str, NDArray[Any]] | None = None) -> BlockRows:
        """Some rows, copied: a slice, or row numbers in any order.

        `out` may bring arrays for `ids`, `weights` and `kinds`, of shape (at least that many rows, capacity) and of a
        type that holds every stored value (int64 for ids, say): they are filled from row 0 on, and the result has
        views of them. What it does not bring is allocated.
        """
        chosen = self._positions(which)
        dense = {
            column.name: self._target(column, len(chosen), out or {})
            for column in self.manifest.columns
            if column.per is Per.TOKEN
        }
        for name in out or {}:
            if name not in dense:
                raise ConfigError(f"{self.folder}: no column {name!r} per token; there is: {', '.join(dense)}")
        pieces: list[BlockRows] = []
        numbers = np.searchsorted(self.row_offsets, chosen, side="right") - 1
        breaks = np.flatnonzero((np.diff(chosen) != 1) | (np.diff(numbers) != 0)) + 1
        borders = [0, *breaks.tolist(), len(chosen)] if len(chosen) else [0]
        for begin, end in itertools.pairwise(borders):
            number = int(numbers[begin])
            row = int(chosen[begin] - self.row_offsets[number])
            piece = self.shard(number).rows(row, row + end - begin)
            for name, target in dense.items():
                target[begin:end] = getattr(piece, name)
            pieces.append(piece)
        empty = np.empty(0, dtype=np.int64)
        return BlockRows(
            ids=dense["ids"],
            row_lengths=np.concatenate([empty, *(p.row_lengths for p in pieces)]),
            start_values=np.concatenate([empty, *(p.start_values for p in pieces)]),
            start_offsets=offsets_of(np.concatenate([empty, *(np.diff(p.start_offsets) for p in pieces)])),
            documents=np.concatenate([empty, *(p.documents for p in pieces)]),
            weights=dense.get("weights"),
            kinds=dense.get("kinds"),
        )

    def _positions(self, which: slice | ArrayLike) -> NDArray[np.int64]:
        if isinstance(which, slice):
            return np.arange(*which.indices(len(self)), dtype=np.int64)
        given = np.asarray(which)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(
                f"rows are chosen by a slice or a flat list of row numbers, not {given.dtype} {given.shape}"
            )
        chosen = given.astype(np.int64)
        chosen[chosen < 0] += len(self)
        outside = (chosen < 0) | (chosen >= len(self))
        if outside.any():
            raise IndexError(f"row {given[outside][0]} of {len(self):,} in {self.folder}")
        return chosen

    def _target(self, column: BlockColumn, rows: int, out: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Where the chosen rows of a column go."""
        dtype = np.dtype(column.dtype)
        if column.name not in out:
            return np.empty((rows, self.capacity), dtype=dtype)
        target = out[column.name]
        if target.ndim != 2 or len(target) < rows or target.shape[1] != self.capacity:
            raise ConfigError(
                f"out[{column.name!r}] has the shape {target.shape}; {rows} rows of {self.capacity} are to go in"
            )
        if not np.can_cast(dtype, target.dtype, "safe"):
            raise ConfigError(f"out[{column.name!r}] is {target.dtype}, which does not hold every {dtype}")
        return target[:rows]

    def to_features(self, index: int) -> dict[str, Any]:
        """One row without its padding, as `DataCollatorForCausalLM` takes it; numpy arrays, no torch.

        `input_ids` and `document_starts`; with stored weights also `loss_mask` (uint8, 1 = train on this token) and
        the `weights` themselves; with stored kinds `kinds`.
        """
        block = self[index]
        tokens = slice(block.row_length)
        features: dict[str, Any] = {"input_ids": block.ids[tokens], "document_starts": block.document_starts}
        if block.weights is not None:
            features["loss_mask"] = (block.weights[tokens] != 0).astype(np.uint8)
            features["weights"] = block.weights[tokens]
        if block.kinds is not None:
            features["kinds"] = block.kinds[tokens]
        return features

    @property
    def features(self) -> BlockFeatures:
        """The same rows as a sequence of features, for a torch `DataLoader`."""
        return BlockFeatures(self)


class BlockFeatures:
    """A `BlockDataset` whose items are the dicts of `to_features`."""

    def __init__(self, dataset: BlockDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset.to_features(index)


def check_blocks(directory: str | Path, split: str = "train") -> tuple[str, ...]:
    """Read every byte of a split and say in one line each what is wrong; a split that cannot be opened is one line."""
    try:
        dataset = BlockDataset(directory, split)
    except FormatError as error:
        return (str(error),)
    return tuple(line for i in range(len(dataset.shards)) for line in _shard_problems(dataset, i))


def _shard_problems(dataset: BlockDataset, number: int) -> Iterator[str]:
    shard = dataset.shard(number)
    yield from file_problems(shard.folder, shard.record.files, MANIFEST)
    at_a_time = max(1, CHECK_TOKENS // dataset.capacity)
    for first in range(0, len(shard), at_a_time):
        last = min(first + at_a_time, len(shard))
        problem = token_problem(shard.rows(first, last), dataset.pad_id, first)
        if problem:
            yield f"{shard.folder}: {problem}"


def _why_missing(folder: Path, column: BlockColumn) -> str:
    text = f"{folder}: {column.file} is missing; {MANIFEST} names it as the column {column.name!r}"
    other = WEIGHTS_F32 if column is WEIGHTS_U8 else WEIGHTS_U8
    if column.name == other.name and (folder / other.file).exists():
        text += f" ({other.file} is there: all shards of a split store their weights in the same type)"
    return text


def _match_shards(manifest: BlockManifest, folder: Path) -> None:
    """The shards on disk must be the ones that the manifest names, in its order."""
    found, named = [path.name for path in shard_folders(folder)], [shard.name for shard in manifest.shards]
    if found != named:
        gone, more = sorted(set(named) - set(found)), sorted(set(found) - set(named))
        raise FormatError(
            f"{folder}: {MANIFEST} names {len(named)} shards, {len(found)} are there"
            + (f"; missing: {', '.join(gone[:5])}" if gone else "")
            + (f"; not named: {', '.join(more[:5])}" if more else "")
        )
