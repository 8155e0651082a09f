"""Rows of one length as three int32 arrays on disk: `input.npy`, `labels.npy` and `positions.npy`, (rows, length)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import FormatError

ARRAYS = ("input", "labels", "positions")


class RowArrayWriter:
    """Appends rows to the three arrays; use it in a `with` block. How many come must be known before."""

    def __init__(self, folder: Path, rows: int, length: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files: list[IO[bytes]] = [(folder / f"{name}.npy").open("wb") for name in ARRAYS]
        header = {"descr": "<i4", "fortran_order": False, "shape": (rows, length)}
        for file in self._files:
            np.lib.format.write_array_header_1_0(file, header)

    def append(self, *columns: NDArray[np.int32]) -> None:
        """Flat values of some rows: inputs, labels and positions."""
        for file, values in zip(self._files, columns, strict=True):
            file.write(values.astype("<i4").tobytes())

    def __enter__(self) -> RowArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def open_row_arrays(folder: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays, memory-mapped; a folder without them, or with arrays of different shapes, is a `FormatError`."""
    try:
        arrays = {name: np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{folder}: no split of `chatmill export --to torchtitan` ({error}); give the folder OUT/train"
        ) from None
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise FormatError(f"{folder}: input, labels and positions do not fit together: {sorted(shapes)}")
    return arrays
