"""One shard while it grows: open files, running hashes, and the mask that turns float32 when it must."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.publish import GrowingFile
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.core.trees import Branches
from chatmill.store.episode_columns import EpisodeColumns
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import BRANCHES, ColumnSpec, ShardRecord, StoredFile

COPY = 1 << 22
BYTE, FLOAT = np.dtype(np.uint8), np.dtype("<f4")


class ShardWriter:
    """Writes the files of one shard into a folder that is not yet visible to readers."""

    def __init__(self, folder: Path, columns: Sequence[ColumnSpec], *, masks: bool) -> None:
        """Create the folder and open its files; what an earlier, killed writer left there goes."""
        self.folder = folder
        self._specs = tuple(columns)
        self.episodes = 0
        self.tokens = 0
        self._mask_dtype: np.dtype[Any] = BYTE
        self._files: dict[str, GrowingFile] = {}
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        names = [TOKENS, INDEX, *([MASK] if masks else []), *(c.file for c in columns)]
        names += [c.offsets_file for c in columns if c.offsets_file]
        self._files = {name: GrowingFile(folder / name) for name in names}
        self._written = {spec.name: 0 for spec in columns if spec.offsets_file}
        """Values of the columns that have several an episode."""
        for spec in columns:
            if spec.offsets_file:
                self._files[spec.offsets_file].write(np.zeros(1, dtype="<u8"))

    def append(self, columns: EpisodeColumns) -> None:
        """Write whole episodes after the ones that are there."""
        starts = offsets_of(columns.lengths)[:-1] + self.tokens
        self._files[TOKENS].write(columns.ids.astype("<u4", copy=False))
        self._files[INDEX].write(np.stack([starts, columns.lengths], axis=1).astype("<u8"))
        if columns.mask is not None:
            self._append_mask(columns.mask)
        for spec in self._specs:
            if spec == BRANCHES:
                self._append_branches(spec, columns.branches)
            elif spec.offsets_file:
                self._append_text(spec, getattr(columns, spec.name))
            else:
                self._files[spec.file].write(getattr(columns, spec.name).astype(spec.dtype, copy=False))
        self.episodes += len(columns)
        self.tokens += len(columns.ids)

    def _append_text(self, spec: ColumnSpec, texts: Texts | None) -> None:
        assert texts is not None, "the columns of a split were compared before"
        self._files[spec.file].write(texts.packed().data)
        self._append_counts(spec, texts.lengths)

    def _append_branches(self, spec: ColumnSpec, branches: Branches | None) -> None:
        assert branches is not None, "the columns of a split were compared before"
        self._files[spec.file].write(np.stack([branches.starts, branches.depths], axis=1).astype(spec.dtype))
        self._append_counts(spec, branches.counts)

    def _append_counts(self, spec: ColumnSpec, counts: NDArray[np.int64]) -> None:
        """Where the values of each episode end."""
        ends = self._written[spec.name] + np.cumsum(counts)
        self._files[spec.offsets_file].write(ends.astype("<u8"))
        self._written[spec.name] = int(ends[-1])

    def _append_mask(self, mask: NDArray[Any]) -> None:
        if mask.dtype != np.uint8 and self._mask_dtype == np.uint8:
            if self._files[MASK].size:
                self._widen_mask()
            self._mask_dtype = FLOAT
        self._files[MASK].write(mask.astype(self._mask_dtype, copy=False))

    def _widen_mask(self) -> None:
        """The first fractional weight of the shard: rewrite what is there as float32, piece by piece."""
        self._files[MASK].finish()
        narrow = self.folder / f"{MASK}.uint8"
        (self.folder / MASK).rename(narrow)
        self._files[MASK] = GrowingFile(self.folder / MASK)
        with narrow.open("rb") as file:
            while piece := file.read(COPY):
                self._files[MASK].write(np.frombuffer(piece, dtype=np.uint8).astype(FLOAT))
        self._files[MASK].flush()
        narrow.unlink()

    def finish(self, name: str) -> ShardRecord:
        """Close every file; the caller syncs and renames the folder."""
        records = {file: growing.finish() for file, growing in sorted(self._files.items())}
        files = {file: StoredFile(record.bytes, record.digest) for file, record in records.items()}
        return ShardRecord(name=name, episodes=self.episodes, tokens=self.tokens, files=files)

    def discard(self) -> None:
        """Close and remove everything."""
        for growing in self._files.values():
            growing.discard()
        shutil.rmtree(self.folder, ignore_errors=True)
