"""Keeps the resident memory of readers small: mapped pages of files are let go now and then."""

from __future__ import annotations

from collections.abc import Iterator

from chatmill.look.items import LookSplit, TokenBatch

BATCHES = 4
"""Batches (of about a million tokens) that a pass reads before it unmaps what it has read."""


def release(split: LookSplit) -> None:
    """Unmap the files of a split; arrays that are in use stay valid, and the next access maps the files again.

    Only the thread that uses the reader may call it. Readers without mapped files are left alone.
    """
    for shard in getattr(getattr(split, "_dataset", None), "shards", ()):
        shard.release()


def released_batches(split: LookSplit, *, ids: bool = False) -> Iterator[TokenBatch]:
    """`split.batches()`, unmapping every few batches and at the end."""
    try:
        for number, batch in enumerate(split.batches(ids=ids)):
            yield batch
            del batch
            if number % BATCHES == BATCHES - 1:
                release(split)
    finally:
        release(split)
