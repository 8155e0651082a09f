"""Keep the last prompts, found again by their ids alone."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

Kept = TypeVar("Kept")


class PromptMemory(Generic[Kept]):
    """The last values that were kept, by lists of token ids.

    Several packages hand an adapter nothing but ids; what was rendered is found by their hash. Threads may share it.
    """

    def __init__(self, size: int) -> None:
        """Keep so many values; the one that was used longest ago goes first."""
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, Kept] = OrderedDict()

    def keep(self, ids: Sequence[int], value: Kept) -> None:
        """Keep a value under its ids."""
        key = _hash_ids(ids)
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)

    def find(self, ids: Sequence[int]) -> Kept | None:
        """Find the value of some ids."""
        key = _hash_ids(ids)
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value


def _hash_ids(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()
