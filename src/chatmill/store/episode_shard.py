"""One shard of episodes: its three files and optional columns, checked against each other when opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.trees import Branches
from chatmill.errors import FormatError
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import BRANCHES, ColumnSpec, Per
from chatmill.store.mapped import MappedFile, whole_records
from chatmill.store.token_shard import TokenShard

CHECK_CHUNK = 1 << 18
"""Index records checked at a time, so that opening needs no memory of the size of the index."""
MAX_CODE = 2**32 - 1
INDEX_TYPE = np.dtype(("<u8", (2,)))
BRANCH_TYPE = np.dtype(("<u4", (2,)))


class EpisodeShard(TokenShard):
    """The files of one folder. `index` is (episodes, 2) uint64: start and length, counted in tokens.

    Opening costs one look at the folder, and one at index and columns unless these wait for their first use, so that
    a split may have thousands of shards; files are mapped when they are first used.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[ColumnSpec] = (),
        source_codes: NDArray[np.uint32] | None = None,
        *,
        check_all: bool = True,
    ) -> None:
        """Open and check; masks are judged by size alone and a wrong one is kept as `mask_problem`.

        `source_codes`: for each code in the `source` file of the shard, that of the split; None: they are the same.
        Without `check_all` the index is checked, and the size of a column compared, when it is first used.
        """
        self._source_codes = source_codes
        self._specs = {spec.name: spec for spec in specs}
        self._names, sizes = _files(folder)
        for name in (TOKENS, INDEX):
            if name not in self._names:
                raise FormatError(f"{folder}: {name} is missing; a shard has {TOKENS} and {INDEX}, and may have {MASK}")
        if BRANCHES.file in self._names and BRANCHES.name not in self._specs:
            raise FormatError(
                f"{folder}: its episodes are trees ({BRANCHES.file}), and the manifest of the split, which says so, is "
                "missing or does not name that column: read as plain texts, branches would follow each other"
            )
        super().__init__(folder, sizes)
        self.episodes = whole_records(f"{folder}/{INDEX}", sizes[INDEX], 16)
        self._index_is_checked = False
        if check_all:
            self._check_index()
        for spec in specs:
            self._check_column(spec, size=check_all)

    def _check_column(self, spec: ColumnSpec, *, size: bool) -> None:
        if spec.file not in self._names or (spec.offsets_file and spec.offsets_file not in self._names):
            raise FormatError(
                f"{self.folder}: {spec.file} is missing; the manifest names it as the column {spec.name!r}"
            )
        if size:
            self._map(spec.offsets_file, "<u8", self.episodes + 1) if spec.offsets_file else self._map_column(spec)

    def _read(self, name: str, start: int, size: int) -> bytes:
        path = f"{self.folder}/{name}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                return os.pread(descriptor, size, start)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _check_index(self) -> None:
        for _ in self._index_records():
            pass

    def _index_records(self) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]]:
        """The index a piece at a time: number of the first episode, starts and lengths.

        Every episode lies inside `tokens.bin`; unsigned sums that would wrap around are caught too.
        """
        total = np.uint64(self.tokens)
        for first in range(0, self.episodes, CHECK_CHUNK):
            size = min(CHECK_CHUNK, self.episodes - first) * 16
            data = self._read(INDEX, first * 16, size)
            if len(data) != size:
                raise FormatError(f"{self.folder / INDEX}: was cut while it was read; open the dataset again")
            records = np.frombuffer(data, dtype="<u8")
            starts, lengths = records[::2], records[1::2]
            outside = (starts > total) | (lengths > total - np.minimum(starts, total))
            if outside.any():
                row = int(np.argmax(outside))
                start, length = int(starts[row]), int(lengths[row])
                raise FormatError(
                    f"{self.folder / INDEX}: record {first + row:,} is start {start:,}, length {length:,} and ends at "
                    f"token {start + length:,}, but {TOKENS} has {self.tokens:,} tokens: one of the two files was cut "
                    "or replaced"
                )
            yield first, starts, lengths
        self._index_is_checked = True

    def copy_lengths(self, out: NDArray[np.int64]) -> None:
        """Write the lengths of all episodes, without mapping the index."""
        for first, _, lengths in self._index_records():
            out[first : first + len(lengths)] = lengths

    def _map_column(self, spec: ColumnSpec) -> MappedFile:
        if spec == BRANCHES:
            return self._map(spec.file, BRANCH_TYPE, None)
        if spec.offsets_file:  # the bytes of texts are compared with their offsets when they are read
            return self._map(spec.file, "u1", None)
        return self._map(spec.file, spec.dtype, self.tokens if spec.per is Per.TOKEN else self.episodes)

    @property
    def index(self) -> NDArray[np.uint64]:
        """(episodes, 2): start and length of every episode, in tokens of this shard."""
        if not self._index_is_checked:
            self._check_index()
        return self._map(INDEX, INDEX_TYPE, self.episodes).array

    def _values(self, spec: ColumnSpec) -> NDArray[Any]:
        return self._map_column(spec).array

    def _offsets(self, spec: ColumnSpec) -> NDArray[np.uint64]:
        return self._map(spec.offsets_file, "<u8", self.episodes + 1).array

    def column(self, name: str) -> NDArray[Any]:
        """One of the extra columns that the manifest names; source codes are those of the split."""
        values = self._values(self._specs[name])
        return values if name != "source" or self._source_codes is None else _recoded(values, self._source_codes)

    def value(self, name: str, row: int) -> int | None:
        """One number of a per-episode column; None when there is no such column."""
        if name not in self._specs:
            return None
        values = self._values(self._specs[name])[row : row + 1]
        if name == "source" and self._source_codes is not None:
            values = _recoded(values, self._source_codes)
        return int(values[0])

    def text(self, name: str, row: int) -> str | None:
        """One string of a per-episode column; None when there is no such column."""
        if name not in self._specs:
            return None
        return bytes(self.texts(name, row, row + 1).data).decode("utf-8", errors="replace")

    def texts(self, name: str, first: int, last: int) -> Texts:
        """The strings of episodes `first` up to `last - 1` of a per-episode column (views of its file)."""
        spec = self._specs[name]
        offsets = self._offsets(spec)[first : last + 1].astype(np.int64)
        data = self._values(spec)
        lengths = np.diff(offsets)
        if len(offsets) and (lengths.min(initial=0) < 0 or not 0 <= offsets[0] <= offsets[-1] <= len(data)):
            raise FormatError(f"{self.folder}: the offsets of {name} do not fit its {len(data):,} bytes")
        return Texts.packed_in(data[offsets[0] : offsets[-1]], lengths)

    def branches(self, rows: NDArray[np.int64]) -> Branches:
        """The branches of some episodes; none where episodes are no trees."""
        if BRANCHES.name not in self._specs:
            return Branches.none(len(rows))
        offsets, values = self._offsets(BRANCHES), self._values(BRANCHES)
        begins, ends = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
        if len(rows) and (int(begins.min()) < 0 or (ends < begins).any() or int(ends.max()) > len(values)):
            raise FormatError(f"{self.folder}: the offsets of branches do not fit the {len(values):,} that are there")
        starts, depths = values[ranges(begins, ends - begins)].astype(np.int64).T
        return Branches(offsets=offsets_of(ends - begins), starts=starts, depths=depths)


def _files(folder: Path) -> tuple[set[str], dict[str, int]]:
    """The names in a folder, and the sizes of the three files that every reader knows."""
    try:
        path = os.fspath(folder)
        names = set(os.listdir(path))
        return names, {name: os.stat(f"{path}/{name}").st_size for name in (TOKENS, INDEX, MASK) if name in names}
    except OSError as error:
        raise FormatError(f"{folder}: {error.strerror or error}; the dataset is not complete") from error


def _recoded(values: NDArray[np.uint32], codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes of a shard as those of the split; one that the shard's table does not have becomes the largest number."""
    table = np.append(codes, np.uint32(MAX_CODE))
    return table[np.minimum(values, len(codes))]
