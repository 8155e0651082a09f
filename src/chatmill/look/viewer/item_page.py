"""One item for the page: a window of its runs with their tokens, its messages, its documents, and their map."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import Part, RoleCode, kind_name, parts_of, role_of, roles_of
from chatmill.core.tokens import segment_sums
from chatmill.errors import ConfigError
from chatmill.label.policy import Policy
from chatmill.look.decoder import Decoder, text_of
from chatmill.look.items import Ints, Item, stretches
from chatmill.look.viewer.opened import OpenedSplit
from chatmill.store.kd import SPAN_NAMES

WINDOW = 2048
"""Tokens of one page of an item."""
MOST_WINDOW = 16384
LONG_CHAT = 6
"""Messages of an item; one with more has a list of them."""
MOST_LISTED = 1000
OPENING = 40
"""Tokens of the text that stands for an item in lists."""


def item_json(
    opened: OpenedSplit, number: int, *, first: int = 0, count: int = WINDOW, policy: str | None = None
) -> Any:
    """Tokens `first` up to `first + count` of an item as runs; counts speak of the whole item.

    `policy` shows what would be trained under another one; `stored` weights are then beside the tried ones.
    """
    item = opened.item(number)
    if not 1 <= count <= MOST_WINDOW:
        raise ConfigError(f"a window has 1 to {MOST_WINDOW:,} tokens, not {count:,}")
    if first and not 0 <= first < len(item):
        raise ConfigError(f"token {first:,} of {opened.split.layout.item} {item.number:,}, which has {len(item):,}")
    tried = opened.policy(policy)
    weights = _weights(item, tried)
    last = min(first + count, len(item))
    decoder = opened.dataset.decoder
    messages = _messages(item, weights)
    return {
        "number": item.number,
        "items": len(opened.split),
        "tokens": len(item),
        "trained": int(np.count_nonzero(weights > 0)),
        "trained_stored": item.trained,
        "policy": tried.name if tried else None,
        "record_id": item.record_id,
        "source": item.source,
        "turns": item.turns,
        "capacity": item.capacity,
        "padding": item.padding,
        "features": list(item.features),
        "problem": item.problem,
        "documents": _documents(item, weights, decoder),
        "first_trained": _first_trained(weights),
        "list": _list(item, messages, decoder),
        "window": {"first": first, "last": last},
        "messages": {
            number: one
            for number, one in enumerate(messages)
            if one["start"] < last and one["start"] + one["tokens"] > first
        },
        "runs": _runs(item, weights, decoder, first, last),
        "map": _map(item, weights) if item.capacity or len(item.starts) > 1 else None,
    }


def _weights(item: Item, policy: Policy | None) -> NDArray[Any]:
    if policy is not None:
        assert item.kinds is not None
        return policy.token_weights(item.kinds, np.append(item.starts, len(item)))
    return np.ones(len(item), dtype=np.uint8) if item.weights is None else item.weights


def _borders(item: Item, weights: NDArray[Any]) -> Ints:
    """Where runs of one document, message, kind, span, tried weight and stored weight begin; and the end."""
    begins = np.zeros(len(item) + 1, dtype=np.bool_)
    begins[item.run_starts()] = True
    begins[-1] = True
    begins[1:-1] |= weights[1:] != weights[:-1]
    return np.flatnonzero(begins)


def _runs(item: Item, weights: NDArray[Any], decoder: Decoder | None, first: int, last: int) -> list[dict[str, Any]]:
    borders = _borders(item, weights)
    inside = np.unique(np.clip(borders, first, last))
    messages = np.searchsorted(item.message_starts, inside[:-1], side="right") - 1
    documents = np.searchsorted(item.starts, inside[:-1], side="right") - 1
    runs = []
    for begin, end, message, document in zip(inside, inside[1:], messages, documents, strict=False):
        run: dict[str, Any] = {
            "start": int(begin),
            "document": int(document),
            "message": int(message),
            "weight": float(weights[begin]),
            "stored": 1.0 if item.weights is None else float(item.weights[begin]),
            "pieces": pieces_of(item.ids[begin:end], decoder),
        }
        if item.kinds is not None:
            run["kind"] = kind_name(int(item.kinds[begin]))
        if item.spans is not None:
            run["span"] = SPAN_NAMES[int(item.spans[begin])]
        runs.append(run)
    return runs


def _messages(item: Item, weights: NDArray[Any]) -> list[dict[str, Any]]:
    """All messages: role, first token, and how many tokens."""
    borders = np.append(item.message_starts, len(item))
    trained = segment_sums(weights > 0, borders).tolist()
    return [
        {
            "start": first,
            "role": None if item.kinds is None else role_of(int(item.kinds[first])).name.lower(),
            "tokens": last - first,
            "trained": trained[number],
        }
        for number, (first, last) in enumerate(pairwise(borders.tolist()))
    ]


def _first_trained(weights: NDArray[Any]) -> int | None:
    found = np.flatnonzero(weights > 0)
    return int(found[0]) if len(found) else None


def _list(item: Item, messages: list[dict[str, Any]], decoder: Decoder | None) -> list[dict[str, Any]]:
    """The messages of a long item, each with its first words; empty for a short one."""
    if item.kinds is None or len(messages) <= LONG_CHAT:
        return []
    return [
        {**one, "text": opening_text(item, decoder, one["start"], one["start"] + one["tokens"], most=32)}
        for one in messages[:MOST_LISTED]
    ]


def _documents(item: Item, weights: NDArray[Any], decoder: Decoder | None) -> list[dict[str, Any]]:
    borders = np.append(item.starts, len(item))
    trained = segment_sums(weights > 0, borders).tolist()
    return [
        {
            "number": None if item.documents is None else int(item.documents[i]),
            "start": start,
            "tokens": end - start,
            "trained": trained[i],
            "text": opening_text(item, decoder, start, end, most=16) if len(item.starts) > 1 else "",
        }
        for i, (start, end) in enumerate(item.borders)
    ]


def _map(item: Item, weights: NDArray[Any]) -> list[list[int]]:
    """Stretches of trained tokens in the row: [first, tokens]."""
    firsts, ends = stretches(weights > 0)
    return [[first, end - first] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]


def opening_text(
    item: Item, decoder: Decoder | None, start: int = 0, end: int | None = None, most: int = OPENING
) -> str:
    """The words that stand for an item or a document: a user's first ones, else anyone's, else the first tokens."""
    end = len(item) if end is None else end
    if item.kinds is not None:
        kinds = item.kinds[start:end]
        content = parts_of(kinds) == Part.CONTENT
        for wanted in (content & (roles_of(kinds) == RoleCode.USER), content):
            if wanted.any():
                begin = int(np.argmax(wanted))
                same = int(np.argmin(wanted[begin:])) or len(kinds) - begin
                return text_of(item.ids[start + begin : start + begin + min(same, most)], decoder)
    return text_of(item.ids[start : min(end, start + most)], decoder)


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
