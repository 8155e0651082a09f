"""Searching the text of a split: the bytes of about a million tokens at a time, and a search in them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError
from chatmill.look.decoder import Decoder
from chatmill.look.items import Ints
from chatmill.look.splits import LookSplit, TokenBatch

AROUND = 60
"""Bytes shown on both sides of what was found."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One item that holds the words; the first place only."""

    number: int
    at: int
    """The token of the item in which the words begin."""
    tokens: int
    """Tokens that the words touch."""
    before: str
    match: str
    after: str


def search(
    split: LookSplit, decoder: Decoder | None, wanted: str, chosen: NDArray[np.bool_] | None = None
) -> Generator[Hit | int, None, None]:
    """Hits as they are found, and after each batch how many items were searched; `chosen` says which items count.

    A to Z are found in either case. Control tokens are found by their names.
    """
    if not wanted.strip():
        raise ConfigError("there is nothing to search for: give some text")
    if decoder is None:
        raise ConfigError("ids have no text to search in: start the viewer with --tokenizer")
    needle = wanted.encode("utf-8", errors="replace").lower()
    for batch in split.batches():
        yield from _hits(batch, decoder, needle, chosen)
        yield int(batch.items[-1]) + 1 if len(batch.items) else 0
        del batch


def _hits(batch: TokenBatch, decoder: Decoder, needle: bytes, chosen: NDArray[np.bool_] | None) -> Iterator[Hit]:
    """Find the first hit in each item of a batch."""
    raw, starts = _bytes(batch, decoder)
    lowered = raw.lower()
    borders = starts[batch.offsets]
    place, seen = lowered.find(needle), -1
    while place >= 0:
        document = int(np.searchsorted(borders, place, side="right")) - 1
        number, end = int(batch.items[document]), place + len(needle)
        first_byte, last_byte = int(borders[document]), int(borders[document + 1])
        if end > last_byte:  # the end of one document and the beginning of the next
            place = lowered.find(needle, place + 1)
            continue
        if number != seen and (chosen is None or chosen[number]):
            seen = number
            first = int(np.searchsorted(starts, place, side="right")) - 1
            last = int(np.searchsorted(starts, end, side="left")) - 1
            begin = int(batch.offsets[np.searchsorted(batch.items, number)])
            around = (max(first_byte, place - AROUND), place, end, min(last_byte, end + AROUND))
            texts = [raw[a:b].decode(errors="ignore") for a, b in pairwise(around)]
            yield Hit(number, first - begin, last - first + 1, *texts)
        # the rest of this item is of no interest
        after = int(np.searchsorted(batch.items, number, side="right"))
        place = lowered.find(needle, max(place + 1, int(borders[after])))


def _bytes(batch: TokenBatch, decoder: Decoder) -> tuple[bytes, Ints]:
    """Join the bytes of a batch; also the offsets of each token's bytes."""
    if decoder.tokenizer.bytes_add_up:
        return decoder.joined_bytes(batch.ids)
    # tokens have no bytes of their own: the text of a document counts as that of its first token
    texts = [decoder.text(part).encode() for part in np.split(batch.ids, batch.offsets[1:-1])]
    lengths = np.zeros(len(batch.ids), dtype=np.int64)
    for first, last, text in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), texts, strict=True):
        if last > first:
            lengths[first] = len(text)
    return b"".join(texts), offsets_of(lengths)
