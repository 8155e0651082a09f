"""The tokens of one sequence by the slow, obvious path: one item after the other, each text encoded by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from chatmill.render.sequence_items import Ids, TextPart
from chatmill.tokenizer.tokenizer import Tokenizer


class PlainRow:
    """The tokens of one sequence, made one item after the other."""

    def __init__(self, items: Sequence[Ids | TextPart], tokenizer: Tokenizer, known: dict[str, list[int]]) -> None:
        """`known` keeps the ids of texts, so that the beginnings of one conversation are encoded once."""
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.messages: list[int] = []
        """Index of the message each token belongs to; -1 for none."""
        self._tokenizer, self._known = tokenizer, known
        piece: list[TextPart] = []
        for item in items:
            if piece and (isinstance(item, Ids) or item.opens):
                self._encode(piece)
                piece = []
            if isinstance(item, Ids):
                self._add(item.ids, item.kind, item.message)
            else:
                piece.append(item)
        if piece:
            self._encode(piece)

    def _encode(self, piece: Sequence[TextPart]) -> None:
        """The parts as one text; a token has the kind of the part its first byte lies in."""
        text = "".join(part.text for part in piece)
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text)
        ids = self._known[text]
        ends = [self._tokens_before(prefix, text, ids) for prefix in accumulate(part.text for part in piece[:-1])]
        for start, end, part in zip([0, *ends], [*ends, len(ids)], piece, strict=True):
            self._add(ids[start:end], part.kind, part.message)

    def _tokens_before(self, prefix: str, text: str, ids: list[int]) -> int:
        """How many tokens of a text begin inside its prefix."""
        if not self._tokenizer.bytes_add_up:
            encoded = np.array(ids, dtype=np.int32), np.array([0, len(ids)], dtype=np.int64)
            points = self._tokenizer.split_points(encoded, np.zeros(1, dtype=np.int64), [prefix], [text])
            return int(points[0])
        size, at = len(self._tokenizer.normalize(prefix).encode()), 0
        for count, token in enumerate(ids):
            if at >= size:
                return count
            at += len(self._tokenizer.token_bytes(token))
        return len(ids)

    def _add(self, ids: Sequence[int], kind: int, message: int) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.messages += [message] * len(ids)
