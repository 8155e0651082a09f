"""Searching the text of millions of tokens: a filter over ids first, then the bytes of what may hold the words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ConfigError
from chatmill.look.decoder import Decoder, text_of
from chatmill.look.items import LookSplit, TokenBatch
from chatmill.look.token_bytes import TokenBytes

HITS_AT_ONCE = 20
SECONDS_AT_ONCE = 0.1
"""A part of a search is handed over when it has so many hits, or has taken so long."""
AROUND = 60
"""Bytes shown on both sides of what was found."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hit:
    """One item that holds the words; the first place only."""

    number: int
    at: int
    """The token of the item in which the words begin."""
    tokens_hit: int
    """Tokens that the words touch."""
    before: str
    match: str
    after: str


@dataclass(slots=True)
class SearchPart:
    """What a part of a search brought."""

    hits: list[Hit] = field(default_factory=list)
    items: int = 0
    """Items searched so far, from the first one of the split on."""


def search(
    split: LookSplit, decoder: Decoder | None, wanted: str, *, chosen: Bools | None = None, match_case: bool = False
) -> Iterator[SearchPart]:
    """Go through a split about a million tokens at a time; `chosen` says which items count (default: all).

    Without `match_case` the letters A to Z are found in either case. Control tokens are found by their names.
    Without a tokenizer, `wanted` is a list of ids.
    """
    if not wanted.strip():
        raise ConfigError("there is nothing to search for: give some text")
    finder = _finder(decoder, wanted, match_case)
    for batch in split.batches():
        yield from _search_batch(finder, batch, chosen)
        del batch


def _search_batch(finder: _Ids | _Bytes | _Decoded, batch: TokenBatch, chosen: Bools | None) -> Iterator[SearchPart]:
    """What one batch brings, in parts: a page shows the first hits at once, and can stop between any two parts."""
    part, begun = SearchPart(), time.monotonic()
    seen = -1
    for document in finder.candidates(batch).tolist():
        number = int(batch.items[document])
        if number == seen or (chosen is not None and not chosen[number]):
            continue
        first, last = int(batch.offsets[document]), int(batch.offsets[document + 1])
        found = finder.look(batch.ids[first:last])
        if found is not None:
            seen = number
            begin = int(np.searchsorted(batch.items, number))  # the first document of the same item
            part.hits.append(Hit(number, first - int(batch.offsets[begin]) + found[0], *found[1:]))
        part.items = number
        if len(part.hits) >= HITS_AT_ONCE or time.monotonic() - begun > SECONDS_AT_ONCE:
            yield part
            part, begun = SearchPart(), time.monotonic()
    part.items = int(batch.items[-1]) + 1 if len(batch.items) else 0
    yield part


Found = tuple[int, int, str, str, str]
"""The first token and the number of tokens in a document, and the text before, of, and behind the words."""


def _finder(decoder: Decoder | None, wanted: str, match_case: bool) -> _Ids | _Bytes | _Decoded:
    if decoder is None:
        return _Ids(wanted)
    return (_Bytes if decoder.bytes_add_up else _Decoded)(decoder, wanted, match_case)


def _documents(batch: TokenBatch, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The documents of some tokens, each once, in order."""
    return np.unique(np.searchsorted(batch.offsets, places, side="right") - 1)


class _Bytes:
    """Text by the bytes of its tokens."""

    def __init__(self, decoder: Decoder, wanted: str, match_case: bool) -> None:
        self._match_case = match_case
        self._wanted = self._folded(wanted.encode("utf-8", errors="replace"))
        self._bytes = TokenBytes(decoder.tokenizer)
        # A place either lies inside one token, or begins at the end of one and continues in the next.
        self._spelling = decoder.spelling.spelling(self._wanted)

    def _folded(self, raw: bytes) -> bytes:
        return raw if self._match_case else raw.lower()

    def candidates(self, batch: TokenBatch) -> NDArray[np.int64]:
        """Documents that may hold the words."""
        spelling = self._spelling
        ids = np.minimum(batch.ids, len(spelling.whole) - 1)
        may = spelling.whole[ids]
        if len(ids) > 1:
            may[:-1] |= spelling.begins[ids[:-1]] & spelling.goes_on[ids[1:]]
        return _documents(batch, np.flatnonzero(may))

    def look(self, ids: NDArray[np.integer]) -> Found | None:
        """The first place in one document."""
        raw, starts = self._bytes.joined(ids)
        place = self._folded(raw).find(self._wanted)
        if place < 0:
            return None
        end = place + len(self._wanted)
        first = int(np.searchsorted(starts, place, side="right")) - 1
        last = int(np.searchsorted(starts, end, side="left")) - 1
        before = raw[max(0, place - AROUND) : place].decode("utf-8", errors="ignore")
        match = raw[place:end].decode("utf-8", errors="replace")
        return first, last - first + 1, before, match, raw[end : end + AROUND].decode("utf-8", errors="ignore")


class _Decoded:
    """Text of tokenizers whose tokens have no bytes of their own: every document is decoded."""

    def __init__(self, decoder: Decoder, wanted: str, match_case: bool) -> None:
        self._decoder, self._match_case = decoder, match_case
        self._wanted = wanted if match_case else wanted.lower()

    def candidates(self, batch: TokenBatch) -> NDArray[np.int64]:
        """All of them."""
        return np.arange(len(batch.items), dtype=np.int64)

    def look(self, ids: NDArray[np.integer]) -> Found | None:
        """The first place; tokens have no bytes of their own, so the hit is the whole document."""
        text = self._decoder.text(ids)
        place = (text if self._match_case else text.lower()).find(self._wanted)
        if place < 0:
            return None
        end = place + len(self._wanted)
        return 0, len(ids), text[max(0, place - AROUND) : place], text[place:end], text[end : end + AROUND]


class _Ids:
    """Ids in a row, where there is no tokenizer."""

    def __init__(self, wanted: str) -> None:
        try:
            self._wanted = [int(part) for part in wanted.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(
                f"{wanted!r} cannot be searched for: this dataset is shown without a tokenizer, so give ids such as "
                "'151644 872', or start the viewer with --tokenizer"
            ) from None

    def _places(self, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        count = len(ids) - len(self._wanted) + 1
        if count <= 0:
            return np.empty(0, dtype=np.int64)
        same = np.ones(count, dtype=np.bool_)
        for i, wanted in enumerate(self._wanted):
            same &= ids[i : i + count] == wanted
        return np.flatnonzero(same)

    def candidates(self, batch: TokenBatch) -> NDArray[np.int64]:
        """Documents that hold the first of the ids."""
        return _documents(batch, self._places(batch.ids))

    def look(self, ids: NDArray[np.integer]) -> Found | None:
        """The first place in one document."""
        places = self._places(ids)
        if not len(places):
            return None
        at, end = int(places[0]), int(places[0]) + len(self._wanted)
        before, match, after = (
            text_of(part, None) for part in (ids[max(0, at - 8) : at], ids[at:end], ids[end : end + 8])
        )
        return at, len(self._wanted), f"{before} ".lstrip(), match, f" {after}"
