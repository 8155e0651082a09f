"""Parts: the rows of one chunk in raw columns, with sums by which they are checked whenever they are read again.

A part holds, for each split that got a row, `tokens` (int32), `span` (uint8, label-aligned) and `lengths` (int32);
the loss mask is made of the spans when parts are joined.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import FormatError
from chatmill.store.mapped import MappedFile
from chatmill.store.names import is_inner_path
from chatmill.systems.synth_kd import Split

BUFFER = 1 << 16
"""Bytes that are gathered before they are written; what is larger goes to the system at once."""
SLICE_TOKENS = 1 << 18
"""Tokens that are copied at a time: few enough to stay in the processor's cache while they are summed and hashed."""
RECEIPT = "receipt.json"
QUARANTINE = "quarantine.jsonl"
COLUMNS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype("<i4"),
    "span": np.dtype("u1"),
    "lengths": np.dtype("<i4"),
}
"""The files of a split in a part."""


class PartSplit:
    """The files of one split of a part while they grow, and what they hold."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._folder, self._split = folder, split
        self._files: dict[str, Any] = {}
        self.rows = self.tokens = self.id_sum = 0
        self.spans = np.zeros(3, dtype=np.int64)

    def append(self, ids: NDArray[np.int32], spans: NDArray[np.uint8], lengths: NDArray[np.int64]) -> None:
        """Write rows behind those that are there; spans are label-aligned."""
        if not self._files:
            self._files = {name: part_file(self._folder, self._split, name).open("wb", BUFFER) for name in COLUMNS}
        values: dict[str, NDArray[Any]] = {"tokens": ids, "span": spans, "lengths": lengths}
        for name, dtype in COLUMNS.items():
            self._files[name].write(np.ascontiguousarray(values[name], dtype=dtype).view(np.uint8).data)
        self.rows += len(lengths)
        self.tokens += len(ids)
        id_sum, counts = column_sums(ids, spans)
        self.id_sum = (self.id_sum + id_sum) % 2**32
        self.spans += counts

    def finish(self) -> dict[str, Any]:
        """Close the files; what they hold, by which a part is checked when it is read again."""
        self.close()
        return {
            "rows": self.rows, "tokens": self.tokens, "id_sum": self.id_sum, "span_tokens": self.spans.tolist(),
        }  # fmt: skip

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> PartSplit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_file(folder: Path, split: str, column: str) -> Path:
    """The file of a column of a split in a part."""
    return folder / f"{split}.{column}"


def column_sums(ids: NDArray[np.int32], spans: NDArray[np.uint8]) -> tuple[int, NDArray[np.int64]]:
    """The sum of the ids modulo 2**32, and how many spans are 0, 1 and 2: cheap, and other where a byte has changed."""
    total = int(np.add.reduce(ids.view(np.uint32), dtype=np.uint32))
    analysis, final = (int(np.count_nonzero(spans == span)) for span in (1, 2))
    return total, np.array([len(spans) - analysis - final, analysis, final], dtype=np.int64)


def part_receipt(folder: Path) -> dict[str, Any]:
    """The receipt of a published part."""
    try:
        receipt: dict[str, Any] = json.loads((folder / RECEIPT).read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder / RECEIPT} cannot be read: {error}; delete {folder} and resume") from None
    for split in receipt["splits"].values():
        for path in split.get("files", ()):
            if not is_inner_path(path):
                raise FormatError(f"{folder / RECEIPT} names {path!r}, which is outside; delete {folder} and resume")
    return receipt


class PartSlice(NamedTuple):
    """Some rows of a part, mapped from its files."""

    tokens: NDArray[np.int32]
    span: NDArray[np.uint8]
    lengths: NDArray[np.int32]


def check_part(part: Path, split: str, counts: Mapping[str, Any]) -> None:
    """Read a split of a part; a `FormatError` where it is not what its receipt says."""
    for _ in checked_slices(part, split, counts):
        pass


def checked_slices(part: Path, split: str, counts: Mapping[str, Any]) -> Iterator[PartSlice]:
    """A split of a part in slices of whole rows; at the end a `FormatError` where they are not what was written."""
    rows = id_sum = 0
    spans = np.zeros(3, dtype=np.int64)
    for piece in _slices(part, split):
        yield piece
        sums = column_sums(piece.tokens, piece.span)
        rows, id_sum, spans = rows + len(piece.lengths), (id_sum + sums[0]) % 2**32, spans + sums[1]
    found = {"rows": rows, "tokens": int(spans.sum()), "id_sum": id_sum, "span_tokens": spans.tolist()}
    if found != counts:
        raise FormatError(
            f"{part}: was changed after it was written: its {split} has {found}, but its receipt says {counts}. Resume "
            "the build: the part is then made again"
        )


def _slices(part: Path, split: str) -> Iterator[PartSlice]:
    """A part in slices of whole rows, mapped from its files."""
    lengths = np.fromfile(part_file(part, split, "lengths"), dtype=COLUMNS["lengths"])
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    tokens, span = (MappedFile(part_file(part, split, name), COLUMNS[name], total).array for name in ("tokens", "span"))
    first = before = 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(ends, before + SLICE_TOKENS, side="right")))
        own = slice(before, int(ends[last - 1]))
        yield PartSlice(tokens[own], span[own], lengths[first:last])
        first, before = last, own.stop
