"""The bytes of all ids as columns, and whether the ids of a text are those that the tokenizer gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import TokenizerError
from chatmill.render.bound import BoundTemplate

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class VocabularyBytes:
    """The bytes of every id."""

    def __init__(self, bound: BoundTemplate) -> None:
        """Reads the whole vocabulary once."""
        self._tokenizer = bound.tokenizer
        spelled: list[bytes] = []
        known = np.zeros(bound.tokenizer.vocab_size, dtype=np.bool_)
        for token_id in range(bound.tokenizer.vocab_size):
            try:
                spelled.append(bound.tokenizer.token_bytes(token_id))
                known[token_id] = True
            except TokenizerError:
                spelled.append(b"")
        self._known = known
        self._lengths = np.array([len(one) for one in spelled], dtype=np.int64)
        self._starts = offsets_of(self._lengths)[:-1]
        self._bytes = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        self._white = np.array([one[:1].isspace() for one in spelled], dtype=np.bool_)
        ordinary = getattr(bound.tokenizer, "ordinary", ())
        self.special = np.zeros(bound.tokenizer.vocab_size, dtype=np.bool_)
        self.special[[i for name, i in bound.tokenizer.control_ids.items() if name not in ordinary]] = True

    def has(self, ids: Ints) -> Bools:
        """Which ids the vocabulary has."""
        known: Bools = (ids < len(self._known)) & self._known[np.minimum(ids, len(self._known) - 1)]
        return known

    def begins_white(self, ids: Ints) -> Bools:
        """Which ids begin with white space."""
        white: Bools = self._white[np.minimum(ids, len(self._white) - 1)]
        return white

    def texts(self, ids: Ints, starts: Ints, ends: Ints) -> list[str | None]:
        """The text of stretches of ids; None where the bytes are no UTF-8."""
        known = np.minimum(ids, len(self._lengths) - 1)
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
        known = ids[ids < len(self._lengths)]
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
