"""The bytes of all ids as columns, and whether the ids of a text are those that the tokenizer gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.literals import special_ids
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import TokenizerError
from chatmill.render.bound import BoundTemplate

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class VocabularyBytes:
    """The bytes of ids, read when an id is first asked for: a set uses a small part of a vocabulary."""

    def __init__(self, bound: BoundTemplate) -> None:
        """Reads nothing yet."""
        self._tokenizer = bound.tokenizer
        size = bound.tokenizer.vocab_size
        self._read = np.zeros(size, dtype=np.bool_)
        self._known = np.zeros(size, dtype=np.bool_)
        self._lengths = np.zeros(size, dtype=np.int64)
        self._starts = np.zeros(size, dtype=np.int64)
        self._white = np.zeros(size, dtype=np.bool_)
        self._bytes = np.empty(0, dtype=np.uint8)
        self.special = np.zeros(size, dtype=np.bool_)
        self.special[list(special_ids(bound))] = True

    def _inside(self, ids: Ints) -> Ints:
        """Ids of the vocabulary, read; others become its last one."""
        inside: Ints = np.minimum(ids, len(self._read) - 1)
        unread = np.unique(inside[~self._read[inside]])
        spelled = []
        for token_id in unread.tolist():
            try:
                one = self._tokenizer.token_bytes(token_id)
                self._known[token_id] = True
            except TokenizerError:
                one = b""
            self._lengths[token_id] = len(one)
            self._white[token_id] = one[:1].isspace()
            spelled.append(one)
        if spelled:
            self._starts[unread] = len(self._bytes) + offsets_of(self._lengths[unread])[:-1]
            self._bytes = np.concatenate([self._bytes, np.frombuffer(b"".join(spelled), dtype=np.uint8)])
            self._read[unread] = True
        return inside

    def has(self, ids: Ints) -> Bools:
        """Which ids the vocabulary has."""
        known: Bools = self._known[self._inside(ids)] & (ids < len(self._known))
        return known

    def begins_white(self, ids: Ints) -> Bools:
        """Which ids begin with white space."""
        white: Bools = self._white[self._inside(ids)]
        return white

    def texts(self, ids: Ints, starts: Ints, ends: Ints) -> list[str | None]:
        """The text of stretches of ids; None where the bytes are no UTF-8."""
        known = self._inside(ids)
        sizes = self._lengths[known]
        flat = self._bytes[ranges(self._starts[known], sizes)].tobytes()
        at = offsets_of(sizes)
        found: list[str | None] = []
        for first, last in zip(at[starts].tolist(), at[ends].tolist(), strict=True):
            try:
                found.append(flat[first:last].decode("utf-8"))
            except UnicodeDecodeError:
                found.append(None)
        return found

    def spelled(self, ids: Ints) -> bytes:
        """The bytes of some ids."""
        known = self._inside(ids[ids < len(self._lengths)])
        return self._bytes[ranges(self._starts[known], self._lengths[known])].tobytes()

    def unlike(self, ids: Ints, starts: Ints, ends: Ints) -> Bools:
        """Which stretches of ids are not what the tokenizer gives for their text."""
        texts = self.texts(ids, starts, ends)
        encoded, offsets = self._tokenizer.encode_batch([text or "" for text in texts])
        sizes = np.diff(offsets)
        wrong: Bools = (sizes != ends - starts) | np.array([text is None for text in texts], dtype=np.bool_)
        same = np.flatnonzero(~wrong)
        mine = ids[ranges(starts[same], sizes[same])]
        theirs = encoded[ranges(offsets[:-1][same], sizes[same])]
        differs = np.append(0, np.cumsum(mine != theirs))
        bounds = offsets_of(sizes[same])
        wrong[same] = differs[bounds[1:]] > differs[bounds[:-1]]
        return wrong


def text_stretches(ids: Ints, special: Bools, breaks: Sequence[Ints], documents: Ints) -> tuple[Ints, Ints]:
    """Stretches between special tokens, cut at `breaks` and at documents."""
    size = len(ids)
    is_special = special[np.minimum(ids, len(special) - 1)]
    cut = np.zeros(size + 1, dtype=np.bool_)
    cut[0] = cut[size] = True
    cut[:-1] |= is_special
    cut[1:] |= is_special
    cut[documents] = True
    for one in breaks:
        cut[one] = True
    edges = np.flatnonzero(cut)
    starts, ends = edges[:-1], edges[1:]
    text = ~is_special[starts]
    return starts[text], ends[text]
