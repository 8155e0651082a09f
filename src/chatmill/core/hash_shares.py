"""A share of all records, chosen by the hash of their ids: the same ones on every machine, whatever else is there."""

from __future__ import annotations

from decimal import Decimal
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts

ALL = 2**64
"""The limit that every hash is below."""


def hash_limit(fraction: float) -> int:
    """Return what the hashes of this share of all ids are below; the fraction is taken as it is written in decimals."""
    return int(Decimal(str(fraction)) * ALL)


def hash_of(text: bytes) -> int:
    """Return the hash of an id in UTF-8: blake2b, 8 bytes, big-endian."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def hashes_below(texts: Texts, limit: int) -> NDArray[np.bool_]:
    """Return which texts have a hash below the limit."""
    if limit == ALL:
        return np.ones(len(texts), dtype=np.bool_)
    packed = texts.packed()
    data, borders = packed.data.tobytes(), pairwise(packed.offsets.tolist())
    digests = b"".join([blake2b(data[start:stop], digest_size=8).digest() for start, stop in borders])
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64) < np.uint64(limit)
