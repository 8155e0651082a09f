"""The ledger of a distillation build: every row, and every token by the role of its message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import ROLE_NAMES, START
from chatmill.core.kinds import RoleCode, role_name
from chatmill.core.ledger import Ledger
from chatmill.core.tokens import offsets_of
from chatmill.distill.rows import KDBatch
from chatmill.errors import FormatError


def account(ledger: Ledger, source: str, batch: KDBatch, read: int) -> None:
    """Enter the rows of a batch: `read` of them, those that it holds built. The caller enters the others."""
    ledger.records[source, "read", ""] += read
    ledger.records[source, "built", ""] += len(batch.rows)
    ledger.notes[source, "episodes"] += len(batch.rows)
    offsets = offsets_of(batch.lengths)
    tokens, in_spans = role_tokens(batch.ids, offsets), np.count_nonzero(batch.spans)
    if in_spans != tokens[RoleCode.ASSISTANT]:
        raise FormatError(
            f"{source}: {in_spans:,} tokens are in spans, but {tokens[RoleCode.ASSISTANT]:,} are of the assistant: the "
            "renderer is wrong: report it"
        )
    enter_tokens(ledger, source, tokens, int(in_spans - np.count_nonzero(batch.spans[offsets[:-1]])))


def enter_tokens(ledger: Ledger, source: str, tokens: NDArray[np.int64], trained: int) -> None:
    """Enter the tokens of each role, and how many of the assistant's are trained.

    That is all of them, but for the first token of a document, which nothing predicts.
    """
    for role in np.flatnonzero(tokens).tolist():
        name, count = role_name(role), int(tokens[role])
        own = trained if role == RoleCode.ASSISTANT else 0
        for fate, part in (("rendered", count), ("trained", own), ("context", count - own)):
            if part:
                ledger.tokens[source, name, fate] += part


def differences(stated: Ledger, found: Ledger, whats: Sequence[str]) -> Iterator[tuple[str, int]]:
    """What a ledger says otherwise than another, in words, and the other's count; `whats` are their accounts."""
    for what in whats:
        said, there = getattr(stated, what), getattr(found, what)
        for key in sorted(set(said) | set(there)):
            if said[key] != there[key]:
                yield f"{said[key]:,} {what} {'/'.join(filter(None, key))}", there[key]


def role_tokens(ids: NDArray[np.integer], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each role code in whole documents. The EOD of each is of no message.

    A message goes from `<|start|>`, which is never text, to the next; the token behind it is the role.
    """
    tokens = np.zeros(len(RoleCode), dtype=np.int64)
    if len(offsets) < 2:
        return tokens
    starts = np.flatnonzero(ids[:-1] == START)
    if not len(starts):  # damaged: no message at all
        tokens[RoleCode.NONE] = len(ids)
        return tokens
    names = ids[starts + 1]
    roles = np.zeros(len(starts), dtype=np.int64)
    for role, name in ROLE_NAMES.items():
        roles[names == name] = role
    tokens += np.bincount(roles, weights=np.diff(np.append(starts, len(ids))), minlength=len(tokens)).astype(np.int64)
    ends = offsets[1:] - 1
    tokens -= np.bincount(roles[np.searchsorted(starts, ends) - 1], minlength=len(tokens))
    tokens[RoleCode.NONE] += len(ends)
    return tokens
