"""A random-access source over `chatmill export --to torchtitan`: `len(source)` and `source[i]`, from mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chatmill.store.row_arrays import open_row_arrays

if TYPE_CHECKING:
    import torch


class RowSource:
    """The rows of one split, each as torchtitan's own datasets give it: `({"input", "positions"}, labels)`.

    Labels are shifted already, and -100 where nothing is trained; positions restart with each document.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._arrays = open_row_arrays(folder)
        self._rows, self.seq_len = self._arrays["input"].shape

    def __len__(self) -> int:
        return int(self._rows)

    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        import torch

        row: dict[str, Any] = {
            name: torch.from_numpy(array[number].astype(np.int64)) for name, array in self._arrays.items()
        }
        return {"input": row["input"], "positions": row["positions"]}, row["labels"]
