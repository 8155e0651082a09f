"""Finds text that spells control tokens: `<|im_end|>` typed by a user is text, and this counts how often that is so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.look.decoder import Decoder
from chatmill.look.items import Ints, LookSplit, Progress, TokenBatch

NEVER_IN_UTF8 = 0xFF
"""Stands for a control token among the bytes, so that no text reaches across one."""


@dataclass(slots=True)
class SpelledControls:
    """How often the text of a split spells a control token."""

    documents: int = 0
    """Documents with such a text."""
    spellings: Counter[str] = field(default_factory=Counter)
    """Each control token that is spelled, and how often."""
    first_items: list[int] = field(default_factory=list)
    """Some of the items that hold one."""


def spelled_pattern(names: Iterable[str]) -> re.Pattern[bytes] | None:
    """Matches any of these strings in UTF-8, longest first; names of one character are left out: they are just text."""
    found = sorted({name.encode() for name in names if len(name) > 1}, key=lambda name: (-len(name), name))
    return re.compile(b"|".join(map(re.escape, found))) if found else None


class TextBytes:
    """The text of many ids as bytes in one go: a table of all tokens, and one gather."""

    def __init__(self, decoder: Decoder) -> None:
        tokenizer = decoder.tokenizer
        tokens = [
            bytes([NEVER_IN_UTF8]) if number in decoder.control_ids else _bytes(decoder, number)
            for number in range(tokenizer.vocab_size)
        ]
        self._lengths: NDArray[np.int64] = np.array([len(token) for token in tokens], dtype=np.int64)
        self._starts = offsets_of(self._lengths)[:-1]
        self._data = np.frombuffer(b"".join(tokens), dtype=np.uint8)

    def of(self, ids: NDArray[np.integer]) -> tuple[bytes, Ints]:
        """The bytes of all ids, 0xff for each control token; and where each token's begin, with the end."""
        known = np.where(ids < len(self._lengths), ids, 0)
        lengths = np.where(ids < len(self._lengths), self._lengths[known], 0)
        return self._data[ranges(self._starts[known], lengths)].tobytes(), offsets_of(lengths)


def _bytes(decoder: Decoder, number: int) -> bytes:
    from chatmill.errors import TokenizerError

    try:
        return decoder.tokenizer.token_bytes(number)
    except TokenizerError:  # a gap in the vocabulary
        return b""


def spelled_controls(split: LookSplit, decoder: Decoder, progress: Progress | None = None) -> SpelledControls:
    """Read a split once and count; memory does not grow with it."""
    found = SpelledControls()
    pattern = spelled_pattern(decoder.tokenizer.control_ids)
    if pattern is None:
        return found
    texts = TextBytes(decoder)
    done = 0
    for batch in split.batches(ids=True):
        _count(found, batch, texts, pattern)
        done += int(batch.offsets[-1])
        if progress is not None:
            progress(done, split.total_tokens)
    return found


def _count(found: SpelledControls, batch: TokenBatch, texts: TextBytes, pattern: re.Pattern[bytes]) -> None:
    assert batch.ids is not None
    data, starts = texts.of(batch.ids)
    document_bytes = starts[batch.offsets]
    seen: set[int] = set()
    for match in pattern.finditer(data):
        document = int(np.searchsorted(document_bytes, match.start(), side="right")) - 1
        if match.end() > document_bytes[document + 1]:
            continue  # the end of one document and the beginning of the next
        found.spellings[match[0].decode()] += 1
        seen.add(document)
    found.documents += len(seen)
    found.first_items += [int(batch.items[document]) for document in sorted(seen)][: 5 - len(found.first_items)]
