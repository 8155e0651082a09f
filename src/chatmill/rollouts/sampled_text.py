"""Sampled ids as text, with the place of every token in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import TokenizerError
from chatmill.rollouts.template import RolloutTemplate
from chatmill.tokenizer.tokenizer import Tokenizer

UNKNOWN = "\ufffd".encode()
"""Bytes of an id outside of the vocabulary."""


class SampledText:
    """The text of sampled ids without the stop token at their end.

    Attributes:
        text: The text, with special tokens spelled out.
        specials: Start and end of each special token in the text.
        stop: Id of the stop token at the end, or None.
        is_valid: Whether the bytes are UTF-8.
    """

    def __init__(self, ids: Sequence[int], template: RolloutTemplate) -> None:
        """Decode ids."""
        numbers = np.asarray(ids, dtype=np.int64).reshape(-1)
        self.stop: int | None = None
        if len(numbers) and int(numbers[-1]) in template.stops:
            self.stop = int(numbers[-1])
            numbers = numbers[:-1]
        self.ids = numbers
        table = {token_id: _token_bytes(template.tokenizer, token_id) for token_id in np.unique(numbers).tolist()}
        pieces = list(map(table.__getitem__, numbers.tolist()))
        if not template.tokenizer.bytes_add_up:
            pieces = _decoded_pieces(numbers, pieces, template)
        self._offsets = np.concatenate([[0], np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))])
        raw = b"".join(pieces)
        self.is_valid = UNKNOWN not in pieces
        try:
            self.text = raw.decode()
        except UnicodeDecodeError:
            self.is_valid = False
            self.text = raw.decode(errors="replace")
        self._is_ascii = self.text.isascii()
        places = np.flatnonzero(np.isin(numbers, template.special_ids)).tolist()
        self.specials = [self._characters(place) for place in places] if self.is_valid else []

    def _characters(self, token: int) -> tuple[int, int]:
        """Return where a token is in the text."""
        start, end = int(self._offsets[token]), int(self._offsets[token + 1])
        if self._is_ascii:
            return start, end
        return self._character(start), self._character(end)

    def _character(self, offset: int) -> int:
        """Return the number of characters before a byte, on the boundary of a character."""
        starts = self._character_bytes()
        return int(np.searchsorted(starts, offset))

    def _character_bytes(self) -> NDArray[np.int64]:
        """Return the byte offset of each character."""
        if not hasattr(self, "_starts"):
            raw = np.frombuffer(self.text.encode(), dtype=np.uint8)
            self._starts = np.flatnonzero((raw & 0xC0) != 0x80)
        return self._starts

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of tokens that holds some characters."""
        if not self._is_ascii:
            starts = np.append(self._character_bytes(), len(self.text.encode()))
            start, end = int(starts[min(start, len(starts) - 1)]), int(starts[min(end, len(starts) - 1)])
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        last = int(np.searchsorted(self._offsets, end, side="left"))
        return max(first, 0), min(last, len(self.ids))


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except TokenizerError:
        return UNKNOWN


def _decoded_pieces(ids: NDArray[np.int64], pieces: list[bytes], template: RolloutTemplate) -> list[bytes]:
    """Return pieces that add up to the decoded text, for vocabularies whose bytes do not.

    The text between two special tokens is one piece, that of its last token.
    """
    is_special = np.isin(ids, template.special_ids)
    found = [b""] * len(ids)
    start = 0
    for end in [*np.flatnonzero(is_special).tolist(), len(ids)]:
        if end > start:
            found[end - 1] = template.tokenizer.decode(ids[start:end]).encode()
        if end < len(ids):
            found[end] = pieces[end]
        start = end + 1
    return found
