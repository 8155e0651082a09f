"""The texts of a batch of rows in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of


class RowTexts(Sequence[bytes | None]):
    """R rows, one behind the other in one buffer: row `i` is `data[offsets[i] : offsets[i + 1]]`, or None."""

    def __init__(self, data: bytes, offsets: NDArray[np.int64], missing: frozenset[int] = frozenset()) -> None:
        """`offsets` begin with 0; `missing` are the places of rows that are None."""
        self.data, self.offsets, self.missing = data, offsets, missing

    @classmethod
    def of(cls, rows: Sequence[bytes | None]) -> RowTexts:
        """Any rows as a column."""
        if isinstance(rows, RowTexts):
            return rows
        texts = [row or b"" for row in rows]
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        missing = frozenset(place for place, row in enumerate(rows) if row is None)
        return cls(b"".join(texts), offsets_of(lengths), missing)

    @classmethod
    def from_arrow(cls, column: Any) -> RowTexts:
        """The bytes of an Arrow array of strings, whatever they are."""
        import pyarrow

        stored = column.cast(pyarrow.large_binary())
        _, places, data = stored.buffers()
        offsets = np.frombuffer(places, dtype=np.int64, count=len(stored) + 1, offset=8 * stored.offset)
        first, last = int(offsets[0]), int(offsets[-1])
        missing = np.flatnonzero(stored.is_null().to_numpy(zero_copy_only=False)).tolist() if stored.null_count else ()
        return cls(data[first:last].to_pybytes() if last > first else b"", offsets - first, frozenset(missing))

    def without(self, places: frozenset[int]) -> RowTexts:
        """The same column with None in some more places."""
        return RowTexts(self.data, self.offsets, self.missing | places) if places else self

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, place: int) -> bytes | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes | None]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes | None] | None:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(f"there is no row {place}, only {len(self)} from 0 on")
        return None if place in self.missing else self.data[self.offsets[place] : self.offsets[place + 1]]
