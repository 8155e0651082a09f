"""Episodes on their way to disk, as flat columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts
from chatmill.core.trees import Branches


@dataclass(slots=True)
class SourceCodes:
    """Source names in the order in which they were first seen; a name's place is its code."""

    codes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in code order."""
        return tuple(self.codes)

    def code(self, name: str) -> int:
        """The code of a name."""
        return self.codes.setdefault(name, len(self.codes))

    def translate(self, codes: NDArray[np.uint32], names: Sequence[str]) -> NDArray[np.uint32]:
        """Our codes for those of another table with these names."""
        found, places = np.unique(codes, return_index=True)
        known = np.zeros(len(names), dtype=np.uint32)
        for code in found[np.argsort(places)].tolist():  # new names in the order in which the episodes show them
            known[code] = self.code(names[code])
        return known[codes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeColumns:
    """C episodes as flat columns; per-token columns have one value per token, the others one per episode."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    mask: NDArray[Any] | None = None
    """Token-aligned weights: uint8 when all of them are whole numbers up to 255, else float32."""
    kinds: NDArray[np.uint8] | None = None
    source: NDArray[np.uint32] | None = None
    turns: NDArray[np.uint32] | None = None
    trained: NDArray[np.uint32] | None = None
    side: NDArray[np.uint8] | None = None
    margin: NDArray[np.float32] | None = None
    record_id: Texts | None = None
    """One text per episode."""
    branches: Branches | None = None
    """Those of each episode, where episodes are trees."""
    logprobs: NDArray[np.float32] | None = None
    """Of each token, NaN where none is known."""
    images: Texts | None = None
    """The pictures of each episode, as JSON."""
    image_bytes: Texts | None = None
    """Their bytes."""

    def __len__(self) -> int:
        return len(self.lengths)


def as_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """Weights as uint8 when that loses nothing, else as float32."""
    if values.dtype == np.uint8:
        return values
    if values.size == 0 or (values.max() <= 255 and bool((values == np.floor(values)).all())):
        return values.astype(np.uint8)
    return values.astype("<f4")
