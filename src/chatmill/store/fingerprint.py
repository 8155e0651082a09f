"""Fingerprints that tell large files apart in milliseconds: evenly spaced samples of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.store.durable import RunningDigest

SAMPLE = 4096
SAMPLES = 64
"""Samples of `SAMPLE` bytes per file; with many shards each gets fewer, but always its two ends."""


def probe(digest: RunningDigest, values: NDArray[Any], *, shards: int = 1) -> None:
    """Add the number of bytes and samples of them to `digest`; small arrays are added whole."""
    data = values.view(np.uint8) if values.dtype != np.uint8 else values
    digest.update(len(data).to_bytes(8, "little"))
    if len(data) <= SAMPLE * SAMPLES:
        digest.update(data)
        return
    count = max(2, SAMPLES // shards)
    for place in np.linspace(0, len(data) - SAMPLE, count).astype(np.int64).tolist():
        digest.update(data[place : place + SAMPLE])
