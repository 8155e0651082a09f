"""The tokens of one sequence by the slow, obvious path: one item after the other, each text encoded by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from chatmill.render.sequence_items import Ids, TextPart
from chatmill.tokenizer.tokenizer import Tokenizer

NO_LOGPROB = float("nan")


@dataclass(slots=True)
class PlainTokens:
    """The tokens of one sequence; lists of one length."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    """Index of the message each token belongs to; -1 for none."""
    logprobs: list[float] = field(default_factory=list)

    def add(
        self, ids: Sequence[int], codes: Sequence[int], message: int, logprobs: Sequence[float | None] = ()
    ) -> None:
        """Append tokens of one message."""
        given = logprobs or [None] * len(ids)
        self.ids += ids
        self.kinds += codes
        self.messages += [message] * len(ids)
        self.logprobs += [NO_LOGPROB if one is None else one for one in given]


def plain_row(items: Sequence[Ids | TextPart], tokenizer: Tokenizer, known: dict[str, list[int]]) -> PlainTokens:
    """The tokens of a sequence; `known` keeps the ids of texts, so that shared beginnings are encoded once."""
    row = PlainTokens()
    piece: list[TextPart] = []
    for item in (*items, Ids((), 0, -1)):
        if piece and (isinstance(item, Ids) or item.opens):
            _encode(row, piece, tokenizer, known)
            piece = []
        if isinstance(item, Ids):
            row.add(item.ids, [item.kind] * len(item.ids), item.message)
        else:
            piece.append(item)
    return row


def _encode(row: PlainTokens, piece: Sequence[TextPart], tokenizer: Tokenizer, known: dict[str, list[int]]) -> None:
    """The parts as one text; a token has the kind of the part its first byte lies in."""
    text = "".join(part.text for part in piece)
    if text not in known:
        known[text] = tokenizer.encode(text)
    ids = known[text]
    ends = [_tokens_before(prefix, text, ids, tokenizer) for prefix in accumulate(part.text for part in piece[:-1])]
    for start, end, part in zip([0, *ends], [*ends, len(ids)], piece, strict=True):
        row.add(ids[start:end], [part.kind] * len(ids[start:end]), part.message)


def _tokens_before(prefix: str, text: str, ids: list[int], tokenizer: Tokenizer) -> int:
    """How many tokens of a text begin inside its prefix."""
    if not tokenizer.bytes_add_up:
        encoded = np.array(ids, dtype=np.int32), np.array([0, len(ids)], dtype=np.int64)
        return int(tokenizer.split_points(encoded, np.zeros(1, dtype=np.int64), [prefix], [text])[0])
    size, at = len(tokenizer.normalize(prefix).encode()), 0
    for count, token in enumerate(ids):
        if at >= size:
            return count
        at += len(tokenizer.token_bytes(token))
    return len(ids)
