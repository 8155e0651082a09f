"""Finds text that spells control tokens: `<|im_end|>` typed by a user is text, and this counts how often that is so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from chatmill.look.decoder import Decoder
from chatmill.look.items import LookSplit, TokenBatch
from chatmill.look.token_bytes import TokenBytes

NEVER_IN_UTF8 = b"\xff"
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


def spelled_controls(split: LookSplit, decoder: Decoder) -> SpelledControls:
    """Read a split once and count; memory does not grow with it."""
    found = SpelledControls()
    pattern = spelled_pattern(decoder.tokenizer.control_ids)
    if pattern is None:
        return found
    texts = TokenBytes(decoder.tokenizer, control=NEVER_IN_UTF8)
    for batch in split.batches():
        _count(found, batch, texts, pattern)
    return found


def _count(found: SpelledControls, batch: TokenBatch, texts: TokenBytes, pattern: re.Pattern[bytes]) -> None:
    data, starts = texts.joined(batch.ids)
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
