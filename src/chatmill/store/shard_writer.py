"""One shard while it grows: open files, running hashes, and the mask that turns float32 when it must."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.publish import GrowingFile
from chatmill.core.tokens import offsets_of
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episode_manifest import BRANCHES, ColumnSpec, ShardRecord, StoredFile

COPY = 1 << 22
BYTE, FLOAT = np.dtype(np.uint8), np.dtype("<f4")


def as_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """Weights as uint8 when that loses nothing, else as float32."""
    if values.dtype == np.uint8:
        return values
    if values.size == 0 or (values.max() <= 255 and bool((values == np.floor(values)).all())):
        return values.astype(np.uint8)
    return values.astype("<f4")


@dataclass(slots=True)
class SourceCodes:
    """Source names in the order in which they were first seen; a name's place is its code."""

    codes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in code order."""
        return tuple(self.codes)

    def code(self, name: str) -> int:
        """Return the code of a name."""
        return self.codes.setdefault(name, len(self.codes))

    def translate(self, codes: NDArray[np.uint32], names: Sequence[str]) -> NDArray[np.uint32]:
        """Our codes for those of another table with these names."""
        distinct, places = np.unique(codes, return_index=True)
        translated = np.zeros(len(names), dtype=np.uint32)
        for code in distinct[np.argsort(places)].tolist():  # new names in the order in which the episodes show them
            translated[code] = self.code(names[code])
        return translated[codes]


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

    def append(self, lengths: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Write whole episodes after the ones that are there: `ids`, `mask`, and each column of the shard by its name.

        Texts are `Texts`, branches `Branches`; all others have a value per token or per episode.
        """
        starts = offsets_of(lengths)[:-1] + self.tokens
        self._files[TOKENS].write(columns["ids"].astype("<u4", copy=False))
        self._files[INDEX].write(np.stack([starts, lengths], axis=1).astype("<u8"))
        if MASK in self._files:
            self._append_mask(columns["mask"])
        for spec in self._specs:
            values = columns[spec.name]
            if spec == BRANCHES:
                pairs, counts = np.stack([values.starts, values.depths], axis=1), values.counts
                self._files[spec.file].write(pairs.astype(spec.dtype))
            elif spec.offsets_file:
                self._files[spec.file].write(values.packed().data)
                counts = values.lengths
            else:
                self._files[spec.file].write(values.astype(spec.dtype, copy=False))
                continue
            ends = self._written[spec.name] + np.cumsum(counts)
            self._files[spec.offsets_file].write(ends.astype("<u8"))
            self._written[spec.name] = int(ends[-1])
        self.episodes += len(lengths)
        self.tokens += len(columns["ids"])

    def _append_mask(self, mask: NDArray[Any]) -> None:
        if mask.dtype != np.uint8 and self._mask_dtype == np.uint8:
            if self._files[MASK].size:
                self._widen_mask()
            self._mask_dtype = FLOAT
        self._files[MASK].write(mask.astype(self._mask_dtype, copy=False))

    def _widen_mask(self) -> None:
        """Rewrite what is there as float32, piece by piece, at the first fractional weight of the shard."""
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
