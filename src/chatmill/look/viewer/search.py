"""Searching the text of a split: the bytes of about a million tokens at a time, and a search in them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError
from chatmill.look.decoder import Decoder, text_of
from chatmill.look.items import Ints
from chatmill.look.splits import LookSplit, TokenBatch

AROUND = 60
"""Bytes shown on both sides of what was found."""
ID_BYTES = 4
"""Bytes of an id, where ids are searched."""


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

    A to Z are found in either case. Control tokens are found by their names. Without a tokenizer, `wanted` is a list
    of ids.
    """
    if not wanted.strip():
        raise ConfigError("there is nothing to search for: give some text")
    needle = wanted.encode("utf-8", errors="replace").lower()
    if decoder is None:
        ids = wanted.replace(",", " ").split()
        if not all(part.isdigit() and int(part) < 2**32 for part in ids):
            raise ConfigError(
                f"{wanted!r} cannot be searched for: this dataset is shown without a tokenizer, so give ids such as "
                "'151644 872', or start the viewer with --tokenizer"
            )
        needle = np.array(ids, dtype=np.uint32).tobytes()
    for batch in split.batches():
        yield from _hits(batch, decoder, needle, chosen)
        yield int(batch.items[-1]) + 1 if len(batch.items) else 0
        del batch


def _hits(batch: TokenBatch, decoder: Decoder | None, needle: bytes, chosen: NDArray[np.bool_] | None) -> Iterator[Hit]:
    """Find the first hit in each item of a batch."""
    raw, starts = _bytes(batch, decoder)
    searched = raw if decoder is None else raw.lower()
    borders = starts[batch.offsets]
    place, seen = searched.find(needle), -1
    while place >= 0:
        document = int(np.searchsorted(borders, place, side="right")) - 1
        number, end = int(batch.items[document]), place + len(needle)
        first_byte, last_byte = int(borders[document]), int(borders[document + 1])
        if end > last_byte or (decoder is None and place % ID_BYTES):  # it crosses documents, or begins inside an id
            place = searched.find(needle, place + 1)
            continue
        if number != seen and (chosen is None or chosen[number]):
            seen = number
            first = int(np.searchsorted(starts, place, side="right")) - 1
            last = int(np.searchsorted(starts, end, side="left")) - 1
            begin = int(batch.offsets[np.searchsorted(batch.items, number)])
            around = ((max(first_byte, place - AROUND), place), (place, end), (end, min(last_byte, end + AROUND)))
            yield Hit(number, first - begin, last - first + 1, *(_shown(raw[a:b], decoder) for a, b in around))
        # the rest of this item is of no interest
        after = int(np.searchsorted(batch.items, number, side="right"))
        place = searched.find(needle, max(place + 1, int(borders[after])))


def _bytes(batch: TokenBatch, decoder: Decoder | None) -> tuple[bytes, Ints]:
    """Join the bytes of a batch; also the offsets of each token's bytes."""
    if decoder is None:
        return batch.ids.astype(np.uint32).tobytes(), ID_BYTES * np.arange(len(batch.ids) + 1)
    if decoder.tokenizer.bytes_add_up:
        return decoder.vocabulary.joined(batch.ids)
    # tokens have no bytes of their own: the text of a document counts as that of its first token
    texts = [decoder.text(part).encode() for part in np.split(batch.ids, batch.offsets[1:-1])]
    lengths = np.zeros(len(batch.ids), dtype=np.int64)
    for first, last, text in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), texts, strict=True):
        if last > first:
            lengths[first] = len(text)
    return b"".join(texts), offsets_of(lengths)


def _shown(part: bytes, decoder: Decoder | None) -> str:
    return text_of(np.frombuffer(part, dtype=np.uint32), None) if decoder is None else part.decode(errors="ignore")
