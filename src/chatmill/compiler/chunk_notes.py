"""How far the chunks in work have come: workers note it in a file, for a display and nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

NOTES = "progress"
"""The file in the work folder, a float64 for each chunk: the share of it that is done, 0 when it is finished."""


class ChunkNotes(NamedTuple):
    """The notes about some chunks of a build."""

    work: Path
    numbers: list[int]

    def begin(self) -> None:
        """Ask workers for notes: they write none if there is no file."""
        with contextlib.suppress(OSError):
            (self.work / NOTES).touch()
            for number in self.numbers:
                note(self.work, number, 0.0)

    def read(self) -> float:
        """How many chunks the parts that are done amount to."""
        try:
            shares = np.fromfile(self.work / NOTES, dtype="<f8")
        except OSError:
            return 0.0
        return float(sum(shares[number] for number in self.numbers if number < len(shares)))


def note(work: Path, number: int, share: float) -> None:
    """Note, in a worker, which share of a chunk is done."""
    with contextlib.suppress(OSError), (work / NOTES).open("r+b") as file:
        file.seek(8 * number)
        file.write(np.array(share, dtype="<f8").tobytes())
