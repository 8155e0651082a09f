"""Tokens as pieces that a page can show: whole characters, with the ids and bytes behind them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import starmap
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
    held: list[tuple[int, bytes]] = []  # tokens whose bytes end in the middle of a character
    for number in numbers:
        raw = decoder.known_bytes(number)
        if raw is None or number in decoder.control_ids:
            yield from starmap(_single, held)
            held = []
            if raw is None:
                yield {"t": str(number), "i": [number], "f": "unknown"}
            else:
                yield {"t": raw.decode("utf-8", errors="replace"), "i": [number], "f": "control"}
            continue
        held.append((number, raw))
        joined = b"".join(part for _, part in held)
        try:
            text, used = codecs.utf_8_decode(joined, "strict", False)
        except UnicodeDecodeError:  # no bytes that follow can mend it
            yield from starmap(_single, held)
            held = []
            continue
        if used == len(joined):
            bytes_of_each = {"b": [part.hex() for _, part in held]} if len(held) > 1 else {}
            yield {"t": text, "i": [number for number, _ in held], **bytes_of_each}
            held = []
    yield from starmap(_single, held)


def _single(number: int, raw: bytes) -> dict[str, Any]:
    """A token that shares no character with its neighbours; its bytes are spelled out where they are no text."""
    try:
        return {"t": raw.decode("utf-8"), "i": [number]}
    except UnicodeDecodeError:
        shown = raw.decode("utf-8", errors="backslashreplace")
        return {"t": shown, "i": [number], "b": [raw.hex()], "f": "raw"}
