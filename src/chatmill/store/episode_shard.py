"""One shard of episodes: its three files and optional columns, checked against each other when opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts
from chatmill.errors import FormatError
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import ColumnSpec, Per
from chatmill.store.mapped import MappedFile, file_size

CHECK_CHUNK = 1 << 18
"""Index records checked at a time, so that opening needs no memory of the size of the index."""


MAX_CODE = 2**32 - 1


class EpisodeShard:
    """The files of one folder. `index` is (episodes, 2) uint64: start and length, counted in tokens."""

    def __init__(
        self, folder: Path, specs: Sequence[ColumnSpec] = (), source_codes: NDArray[np.uint32] | None = None
    ) -> None:
        """Open and check; masks are judged by size alone and a wrong one is kept as `mask_problem`.

        `source_codes`: for each code in the `source` file of the shard, that of the split; None: they are the same.
        """
        self.folder = folder
        self._source_codes = source_codes
        self._tokens = MappedFile(folder / TOKENS, "<u4")
        self._index = MappedFile(folder / INDEX, np.dtype(("<u8", (2,))))
        self.tokens, self.episodes = self._tokens.records, self._index.records
        self.mask_dtype: np.dtype[Any] | None = None
        self.mask_problem = ""
        self._mask = self._open_mask()
        self._columns: dict[str, MappedFile] = {}
        self._offsets: dict[str, MappedFile] = {}
        _check_index(self._index, self._tokens)
        for spec in specs:
            self._open_column(spec)

    def _open_mask(self) -> MappedFile | None:
        path = self.folder / MASK
        if not path.exists():
            return None
        size = file_size(path)
        for dtype in (np.dtype("u1"), np.dtype("<f4")):
            if size == self.tokens * dtype.itemsize:
                self.mask_dtype = dtype
                return MappedFile(path, dtype, self.tokens)
        self.mask_problem = (
            f"{path}: {size:,} bytes for {self.tokens:,} tokens; a mask has 1 byte (uint8) or 4 bytes (float32) "
            "per token"
        )
        return None

    def _open_column(self, spec: ColumnSpec) -> None:
        path = self.folder / spec.file
        if not path.is_file():
            raise FormatError(
                f"{self.folder}: {spec.file} is missing; the manifest names it as the column {spec.name!r}"
            )
        if spec.offsets_file:
            offsets = MappedFile(self.folder / spec.offsets_file, "<u8", self.episodes + 1)
            last = int(offsets.array[-1])
            offsets.release()
            self._offsets[spec.name] = offsets
            self._columns[spec.name] = MappedFile(path, "u1", last)
        else:
            records = self.tokens if spec.per is Per.TOKEN else self.episodes
            self._columns[spec.name] = MappedFile(path, spec.dtype, records)

    @property
    def index(self) -> NDArray[np.uint64]:
        """(episodes, 2): start and length of every episode, in tokens of this shard."""
        return self._index.array

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """All token ids of the shard."""
        return self._tokens.array

    @property
    def mask(self) -> NDArray[Any]:
        """Token-aligned weights, uint8 or float32."""
        if self._mask is None:
            raise FormatError(self.mask_problem or f"{self.folder}: there is no {MASK}")
        return self._mask.array

    def column(self, name: str) -> NDArray[Any]:
        """One of the extra columns that the manifest names; source codes are those of the split."""
        values = self._columns[name].array
        return values if name != "source" or self._source_codes is None else _recoded(values, self._source_codes)

    def value(self, name: str, row: int) -> int | None:
        """One number of a per-episode column; None when there is no such column."""
        if name not in self._columns:
            return None
        if name == "source" and self._source_codes is not None:
            return int(_recoded(self._columns[name].array[row : row + 1], self._source_codes)[0])
        return int(self._columns[name].array[row])

    def text(self, name: str, row: int) -> str | None:
        """One string of a per-episode column; None when there is no such column."""
        if name not in self._offsets:
            return None
        first, last = (int(v) for v in self._offsets[name].array[row : row + 2])
        data = self._columns[name].array
        if not first <= last <= len(data):
            raise FormatError(f"{self.folder}: {name} of episode {row} is bytes {first}..{last} of {len(data):,}")
        return bytes(data[first:last]).decode("utf-8", errors="replace")

    def texts(self, name: str, first: int, last: int) -> Texts:
        """The strings of episodes `first` up to `last - 1` of a per-episode column (views of its file)."""
        offsets = self._offsets[name].array[first : last + 1].astype(np.int64)
        data = self._columns[name].array
        lengths = np.diff(offsets)
        if len(offsets) and (lengths.min(initial=0) < 0 or not 0 <= offsets[0] <= offsets[-1] <= len(data)):
            raise FormatError(f"{self.folder}: the offsets of {name} do not fit its {len(data):,} bytes")
        return Texts.packed_in(data[offsets[0] : offsets[-1]], lengths)

    def files(self) -> list[MappedFile]:
        """Every file of the shard that readers may map."""
        mask = [self._mask] if self._mask else []
        return [self._tokens, self._index, *mask, *self._columns.values(), *self._offsets.values()]

    def check_sizes(self) -> None:
        """Raise when a mapped file has changed its size since it was opened."""
        self._tokens.check()
        self._index.check()
        if self._mask is not None:
            self._mask.check()
        for file in self._columns.values():
            file.check()
        for file in self._offsets.values():
            file.check()

    def release(self) -> None:
        """Unmap all files; they are mapped again when they are needed."""
        for file in self.files():
            file.release()


def _recoded(values: NDArray[np.uint32], codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes of a shard as those of the split; one that the shard's table does not have becomes the largest number."""
    table = np.append(codes, np.uint32(MAX_CODE))
    return table[np.minimum(values, len(codes))]


def _check_index(index: MappedFile, tokens: MappedFile) -> None:
    """Every episode lies inside `tokens.bin`; unsigned sums that would wrap around are caught too."""
    records: NDArray[np.uint64] = index.array
    total = np.uint64(tokens.records)
    for first in range(0, len(records), CHECK_CHUNK):
        starts, lengths = records[first : first + CHECK_CHUNK].T
        outside = (starts > total) | (lengths > total - np.minimum(starts, total))
        if outside.any():
            row = first + int(np.argmax(outside))
            start, length = (int(v) for v in records[row])
            raise FormatError(
                f"{index.path}: record {row:,} is start {start:,}, length {length:,} and ends at token "
                f"{start + length:,}, but {tokens.path.name} has {tokens.records:,} tokens: one of the two files was "
                "cut or replaced"
            )
