"""A random-access source over `chatmill export --to torchtitan`: `len(source)` and `source[i]`, from mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import FormatError
from chatmill.store.episode_layout import dataset_folder

if TYPE_CHECKING:
    import torch

ARRAYS = ("input", "labels", "positions")
"""Rows of one length as three int32 arrays on disk: `input.npy` and so on, (rows, length)."""


class RowSource:
    """The rows of one split, each as torchtitan's own datasets give it: `({"input", "positions"}, labels)`.

    Labels are shifted already, and -100 where nothing is trained; positions restart with each document.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = dataset_folder(folder)
        self._arrays = _open_arrays(self.folder)
        self._rows, self.seq_len = self._arrays["input"].shape

    def __len__(self) -> int:
        return int(self._rows)

    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        import torch

        row: dict[str, Any] = {
            name: torch.from_numpy(array[number].astype(np.int64)) for name, array in self._arrays.items()
        }
        return {"input": row["input"], "positions": row["positions"]}, row["labels"]


def _open_arrays(folder: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
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
