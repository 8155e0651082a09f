"""Tokens as pieces that a page can show: whole characters, with the ids and bytes behind them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import TokenizerError
from chatmill.look.viewer.vocabulary import Vocabulary
from chatmill.tokenizer.protocol import Tokenizer


class TokenText:
    """The bytes of every token of a tokenizer, or none at all where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer ids are shown as numbers."""
        self.tokenizer = tokenizer
        self.adds_up = tokenizer is not None and bool(getattr(tokenizer, "bytes_add_up", True))
        """Whether the bytes of tokens, joined, are the text; if not, texts are decoded one by one."""

    @cached_property
    def control(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(self.tokenizer.control_ids.values()) if self.tokenizer else frozenset()

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of one id; None for an id that the vocabulary does not have."""
        assert self.tokenizer is not None
        try:
            return self.tokenizer.token_bytes(token_id)
        except (TokenizerError, KeyError, IndexError):
            return None

    @cached_property
    def table(self) -> list[bytes]:
        """The bytes of every id of the vocabulary; empty for ids that are not in it."""
        assert self.tokenizer is not None
        return [self.bytes_of(token_id) or b"" for token_id in range(self.tokenizer.vocab_size)]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """For searches that match case."""
        return Vocabulary(self.table)

    @cached_property
    def lower_vocabulary(self) -> Vocabulary:
        """For searches that take A to Z in either case."""
        return Vocabulary([raw if raw == (low := raw.lower()) else low for raw in self.table])

    def joined(self, ids: Sequence[int]) -> bytes:
        """The bytes of many ids."""
        table = self.table
        return b"".join(table[i] if i < len(table) else b"" for i in ids)

    def text(self, ids: NDArray[np.integer] | Sequence[int]) -> str:
        """What some ids say, in one string; ids themselves without a tokenizer."""
        numbers = [int(i) for i in ids]
        if self.tokenizer is None:
            return " ".join(map(str, numbers))
        if self.adds_up:
            return b"".join(self.bytes_of(i) or b"" for i in numbers).decode("utf-8", errors="replace")
        return self.tokenizer.decode([i for i in numbers if self.bytes_of(i) is not None])


def pieces_of(ids: NDArray[np.integer] | Sequence[int], text: TokenText) -> list[dict[str, Any]]:
    """The tokens of a run as pieces, in order.

    A piece has its text `t` and its ids `i`; tokens that hold parts of one character are one piece. `b` lists the
    bytes of each token in hexadecimal, where they are not simply the UTF-8 of the text. `f` is `control`, `raw`
    (bytes that are no UTF-8), `unknown` (not in the vocabulary) or `id` (there is no tokenizer).
    """
    numbers = [int(i) for i in ids]
    if text.tokenizer is None:
        return [{"t": str(i), "i": [i], "f": "id"} for i in numbers]
    return list(_pieces(numbers, text))


def _pieces(numbers: list[int], text: TokenText) -> Iterator[dict[str, Any]]:
    held: list[tuple[int, bytes]] = []
    for number in numbers:
        raw = text.bytes_of(number)
        if raw is None or number in text.control:
            yield from _release(held)
            held = []
            if raw is None:
                yield {"t": str(number), "i": [number], "f": "unknown"}
            else:
                yield {"t": raw.decode("utf-8", errors="replace"), "i": [number], "f": "control"}
            continue
        held.append((number, raw))
        if not _waits(b"".join(part for _, part in held)):
            yield from _release(held)
            held = []
    yield from _release(held)


def _waits(raw: bytes) -> bool:
    """Whether bytes end in the middle of a character that more bytes may finish."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
    try:
        decoder.decode(raw)
    except UnicodeDecodeError:
        return False
    return bool(decoder.getstate()[0])


def _release(held: list[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
    """Tokens whose bytes belong together as one piece; those that are no text one by one."""
    if not held:
        return
    joined = b"".join(raw for _, raw in held)
    try:
        text = joined.decode("utf-8")
    except UnicodeDecodeError:
        for number, raw in held:
            yield _single(number, raw)
        return
    piece: dict[str, Any] = {"t": text, "i": [number for number, _ in held]}
    if len(held) > 1:
        piece["b"] = [raw.hex() for _, raw in held]
    yield piece


def _single(number: int, raw: bytes) -> dict[str, Any]:
    try:
        return {"t": raw.decode("utf-8"), "i": [number]}
    except UnicodeDecodeError:
        shown = raw.decode("utf-8", errors="backslashreplace")
        return {"t": shown, "i": [number], "b": [raw.hex()], "f": "raw"}
