"""Whether the ids of texts are those that the tokenizer gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.literals import special_ids
from chatmill.core.tokens import offsets_of, ranges, segment_sums
from chatmill.look.token_bytes import TokenBytes
from chatmill.render.bound import BoundTemplate

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class VocabularyBytes(TokenBytes):
    """The bytes of ids, and which of them no text can have."""

    def __init__(self, bound: BoundTemplate) -> None:
        super().__init__(bound.tokenizer)
        self.special = np.zeros(bound.tokenizer.vocab_size, dtype=np.bool_)
        self.special[list(special_ids(bound))] = True

    def begins_white(self, ids: Ints) -> Bools:
        """Which ids begin with white space."""
        data, at = self.joined(ids)
        return np.array([data[first : first + 1].isspace() for first in at[:-1].tolist()], dtype=np.bool_)

    def texts(self, ids: Ints, starts: Ints, ends: Ints) -> list[str | None]:
        """The text of stretches of ids; None where the bytes are no UTF-8."""
        flat, at = self.joined(ids)
        found: list[str | None] = []
        for first, last in zip(at[starts].tolist(), at[ends].tolist(), strict=True):
            try:
                found.append(flat[first:last].decode("utf-8"))
            except UnicodeDecodeError:
                found.append(None)
        return found

    def unlike(self, ids: Ints, starts: Ints, ends: Ints) -> Bools:
        """Which stretches of ids are not what the tokenizer gives for their text."""
        texts = self.texts(ids, starts, ends)
        encoded, offsets = self.tokenizer.encode_batch([text or "" for text in texts])
        sizes = np.diff(offsets)
        wrong: Bools = (sizes != ends - starts) | np.array([text is None for text in texts], dtype=np.bool_)
        same = np.flatnonzero(~wrong)
        mine = ids[ranges(starts[same], sizes[same])]
        theirs = encoded[ranges(offsets[:-1][same], sizes[same])]
        wrong[same] = segment_sums(mine != theirs, offsets_of(sizes[same])) > 0
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
