"""The interface of rows: how many an epoch has, their order, and how they are laid into a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.load.order import Recent, epoch_order
from chatmill.load.row_buffer import LaidRows, RowBuffer

Ints = NDArray[np.int64]


class Rows(ABC):
    """The rows of one split."""

    data: Any
    """What is read; its `fingerprint` tells it from others."""
    weight_dtype: np.dtype[Any] = np.dtype(np.uint8)
    """The type in which weights are laid."""
    order_facts: Mapping[str, Any] = {}
    """What gives a position its meaning, besides the options and the fingerprint."""
    has_masks: bool
    """Whether the rows say what is trained; else every token is."""
    most_documents: int = 1
    """No row of any epoch holds more documents than this."""
    has_trees: bool = False
    """Whether documents may be trees, so that batches say what each token sees."""
    ignores_untrained: bool = False
    """Whether targets that are not trained are `IGNORE_INDEX` in packed batches."""

    def __init__(self, name: str, *, width: int, seed: int = 0, shuffle: bool = False) -> None:
        """`name` is what errors call the rows; `width` is block_size + 1."""
        self.name, self.width, self.seed, self.shuffle = name, width, seed, shuffle
        self._orders: Recent[Ints] = Recent(self._order)

    @abstractmethod
    def rows_of(self, epoch: int) -> int:
        """Rows of an epoch."""

    def select(self, epoch: int, first: int, count: int) -> Ints:
        """Rows `first` up to `first + count - 1` in the order of an epoch."""
        return self._orders.get(epoch)[first : first + count]

    def _order(self, epoch: int) -> Ints:
        return epoch_order(self.seed, epoch, self.rows_of(epoch), shuffle=self.shuffle)

    @abstractmethod
    def lay(self, buffer: RowBuffer, epoch: int, rows: Ints, slots: Ints) -> LaidRows:
        """Lay rows into the given slots of a buffer."""
