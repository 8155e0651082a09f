"""Tokens as pieces that a page can show: whole characters, with the ids and bytes behind them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.look.decoder import Decoder


def pieces_of(ids: NDArray[np.integer] | Sequence[int], decoder: Decoder | None) -> list[dict[str, Any]]:
    """The tokens of a run as pieces, in order.

    A piece has its text `t` and its ids `i`; tokens that hold parts of one character are one piece. `b` lists the
    bytes of each token in hexadecimal, where they are not simply the UTF-8 of the text. `f` is `control`, `raw`
    (bytes that are no UTF-8), `unknown` (not in the vocabulary) or `id` (there is no tokenizer).
    """
    numbers = [int(i) for i in ids]
    if decoder is None:
        return [{"t": str(i), "i": [i], "f": "id"} for i in numbers]
    return list(_pieces(numbers, decoder))


def _pieces(numbers: list[int], decoder: Decoder) -> Iterator[dict[str, Any]]:
    held: list[tuple[int, bytes]] = []
    for number in numbers:
        raw = decoder.known_bytes(number)
        if raw is None or number in decoder.control_ids:
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
