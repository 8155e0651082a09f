"""One shard while it grows: open files, running hashes, and the mask that turns float32 when it must."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.core.whole_file import sync_folder
from chatmill.store.durable import Durability, GrowingFile
from chatmill.store.episode_columns import EpisodeColumns
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import RECORD_ID, ColumnSpec, ShardRecord

COPY = 1 << 22
BYTE, FLOAT = np.dtype(np.uint8), np.dtype("<f4")


class ShardWriter:
    """Writes the files of one shard into a folder that is not yet visible to readers."""

    def __init__(self, folder: Path, columns: Sequence[ColumnSpec], *, masks: bool, durability: Durability) -> None:
        """Create the folder and open its files; what an earlier, killed writer left there goes."""
        self.folder = folder
        self._durability = durability
        self._specs = tuple(columns)
        self.episodes = 0
        self.tokens = 0
        self._mask_dtype: np.dtype[Any] = BYTE
        self._text_bytes = 0
        self._files: dict[str, GrowingFile] = {}
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        names = [TOKENS, INDEX, *([MASK] if masks else []), *(c.file for c in columns)]
        names += [c.offsets_file for c in columns if c.offsets_file]
        self._files = {name: GrowingFile(folder / name, durability) for name in names}
        if RECORD_ID in self._specs:
            self._files[RECORD_ID.offsets_file].write(np.zeros(1, dtype="<u8"))

    def append(self, columns: EpisodeColumns) -> None:
        """Write whole episodes behind the ones that are there."""
        starts = offsets_of(columns.lengths)[:-1] + self.tokens
        self._files[TOKENS].write(columns.ids.astype("<u4", copy=False))
        self._files[INDEX].write(np.stack([starts, columns.lengths], axis=1).astype("<u8"))
        if columns.mask is not None:
            self._append_mask(columns.mask)
        for spec in self._specs:
            if spec.offsets_file:
                self._append_text(spec, columns.record_id)
            else:
                self._files[spec.file].write(getattr(columns, spec.name).astype(spec.dtype, copy=False))
        self.episodes += len(columns)
        self.tokens += len(columns.ids)

    def _append_text(self, spec: ColumnSpec, texts: Texts | None) -> None:
        assert texts is not None, "the columns of a split were compared before"
        ends = self._text_bytes + np.cumsum(texts.lengths)
        self._files[spec.file].write(texts.packed().data)
        self._files[spec.offsets_file].write(ends.astype("<u8"))
        self._text_bytes = int(ends[-1])

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
        self._files[MASK] = GrowingFile(self.folder / MASK, self._durability)
        with narrow.open("rb") as file:
            while piece := file.read(COPY):
                self._files[MASK].write(np.frombuffer(piece, dtype=np.uint8).astype(FLOAT))
        self._files[MASK].flush()
        narrow.unlink()

    def finish(self, name: str) -> ShardRecord:
        """Sync every file and the folder; the caller renames the folder."""
        files = {file: growing.finish() for file, growing in self._files.items()}
        if self._durability is Durability.SYNCED:
            sync_folder(self.folder)
        return ShardRecord(name=name, episodes=self.episodes, tokens=self.tokens, files=files)

    def discard(self) -> None:
        """Close and remove everything."""
        for growing in self._files.values():
            growing.discard()
        shutil.rmtree(self.folder, ignore_errors=True)
