"""One shard of episodes: tokens and mask, the index, and the optional columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.trees import Branches
from chatmill.errors import FormatError
from chatmill.store.episode_layout import INDEX, TOKENS, has_file
from chatmill.store.episode_manifest import BRANCHES, ColumnSpec, Per
from chatmill.store.mapped import MappedFiles, file_size, whole_records
from chatmill.store.token_files import TokenShard

MAX_CODE = 2**32 - 1
INDEX_TYPE = np.dtype(("<u8", (2,)))
BRANCH_TYPE = np.dtype(("<u4", (2,)))


class EpisodeShard(TokenShard):
    """The files of one folder of episodes. Index and columns are checked when they are first used."""

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, ColumnSpec],
        source_codes: NDArray[np.uint32] | None = None,
        files: MappedFiles | None = None,
    ) -> None:
        """`source_codes`: for each code in the `source` file of the shard, that of the split; None: they are equal."""
        super().__init__(folder, files or MappedFiles())
        self._source_codes, self._specs = source_codes, specs
        if BRANCHES.name not in self._specs and has_file(folder / BRANCHES.file):
            raise FormatError(
                f"{folder}: its episodes are trees ({BRANCHES.file}), and the manifest of the split, which says so, is "
                "missing or does not name that column: read as plain texts, branches would follow each other"
            )
        self.episodes = whole_records(folder / INDEX, file_size(folder / INDEX), INDEX_TYPE.itemsize)
        self._index_is_checked = False

    @property
    def index(self) -> NDArray[np.uint64]:
        """(episodes, 2): start and length of every episode, in tokens of this shard; all lie inside `tokens.bin`."""
        index = self._map(INDEX, INDEX_TYPE, self.episodes)
        if not self._index_is_checked and self.episodes:
            starts, lengths = index.T
            total = np.uint64(self.tokens)
            outside = (starts > total) | (lengths > total - np.minimum(starts, total))  # unsigned sums wrap around
            if outside.any():
                row = int(np.argmax(outside))
                start, length = int(starts[row]), int(lengths[row])
                raise FormatError(
                    f"{self.folder / INDEX}: record {row:,} is start {start:,}, length {length:,} and ends at token "
                    f"{start + length:,}, but {TOKENS} has {self.tokens:,} tokens: one of the two files was cut or "
                    "replaced"
                )
            self._index_is_checked = True
        return index

    def spans(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Start and length of some episodes, in tokens: two rows."""
        return self.index[rows].T

    def column(self, name: str, rows: Any = slice(None)) -> NDArray[Any]:
        """Return a column that the manifest names; source codes are those of the split.

        `rows` choose some of its values, where each episode has one.
        """
        spec = self._specs[name]
        if spec == BRANCHES:
            return self._map(spec.file, BRANCH_TYPE, None)
        if spec.offsets_file:  # the bytes of texts are compared with their offsets when they are read
            return self._map(spec.file, "u1", None)
        count = self.tokens if spec.per is Per.TOKEN else self.episodes
        values: NDArray[Any] = self._map(spec.file, spec.dtype, count)[rows]
        if name != "source" or self._source_codes is None:
            return values
        # a code that the table of the shard does not have becomes the largest number
        recoded: NDArray[Any] = np.append(self._source_codes, np.uint32(MAX_CODE))[
            np.minimum(values, len(self._source_codes))
        ]
        return recoded

    def offsets(self, name: str) -> NDArray[np.uint64]:
        """Return where the values of each episode begin in a column that has several, and where the last ones end."""
        return self._map(self._specs[name].offsets_file, "<u8", self.episodes + 1)

    def bytes_of(self, name: str, row: int) -> bytes:
        """Return those of one episode in a column of texts."""
        (start, stop), data = self.offsets(name)[row : row + 2].tolist(), self.column(name)
        if not start <= stop <= len(data):
            raise FormatError(f"{self.folder}: the offsets of {name} do not fit its {len(data):,} bytes")
        return data[start:stop].tobytes()

    def branches(self, rows: NDArray[np.int64]) -> Branches:
        """Return the branches of some episodes; none where episodes are no trees."""
        if BRANCHES.name not in self._specs:
            return Branches.none(len(rows))
        offsets, values = self.offsets(BRANCHES.name), self.column(BRANCHES.name)
        begins, ends = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
        if len(rows) and (int(begins.min()) < 0 or (ends < begins).any() or int(ends.max()) > len(values)):
            raise FormatError(f"{self.folder}: the offsets of branches do not fit the {len(values):,} that are there")
        starts, depths = values[ranges(begins, ends - begins)].astype(np.int64).T
        return Branches(offsets=offsets_of(ends - begins), starts=starts, depths=depths)
