"""The bytes of many ids at once: a table of the ids that were asked for, and one gather."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import TokenizerError
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]


class TokenBytes:
    """The bytes of ids, read when an id is first asked for: a set uses a small part of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, control: bytes | None = None) -> None:
        """Reads nothing yet. `control` are the bytes of every control token; default: those of its name."""
        self.tokenizer = tokenizer
        self._control = {} if control is None else dict.fromkeys(tokenizer.control_ids.values(), control)
        size = tokenizer.vocab_size + 1  # the last place is that of ids which are not in the vocabulary
        self._known = np.zeros(size, dtype=np.bool_)
        self._read = np.zeros(size, dtype=np.bool_)
        self._read[-1] = True
        self._lengths: Ints = np.zeros(size, dtype=np.int64)
        self._starts: Ints = np.zeros(size, dtype=np.int64)
        self._bytes = np.empty(0, dtype=np.uint8)

    def _places(self, ids: NDArray[np.integer]) -> Ints:
        """Where the ids are in the table; those that are new are read."""
        places: Ints = np.minimum(ids, len(self._read) - 1).astype(np.int64)
        unread = np.unique(places[~self._read[places]])
        spelled = []
        for token_id in unread.tolist():
            try:
                spelled.append(self._control.get(token_id) or self.tokenizer.token_bytes(token_id))
                self._known[token_id] = True
            except TokenizerError:  # a gap in the vocabulary
                spelled.append(b"")
        if spelled:
            self._lengths[unread] = [len(one) for one in spelled]
            self._starts[unread] = len(self._bytes) + offsets_of(self._lengths[unread])[:-1]
            self._bytes = np.concatenate([self._bytes, np.frombuffer(b"".join(spelled), dtype=np.uint8)])
            self._read[unread] = True
        return places

    def has(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which ids the vocabulary has."""
        places = self._places(ids)
        return self._known[places]

    def joined(self, ids: NDArray[np.integer]) -> tuple[bytes, Ints]:
        """The bytes of all ids, none for those that are not in the vocabulary; and where each begins, with the end."""
        places = self._places(ids)
        lengths = self._lengths[places]
        return self._bytes[ranges(self._starts[places], lengths)].tobytes(), offsets_of(lengths)
