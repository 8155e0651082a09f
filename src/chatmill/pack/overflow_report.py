"""What an overflow policy did, in numbers: the ledger of tokens kept, lost and injected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode, roles_of
from chatmill.core.tokens import Tokens, ranges
from chatmill.pack.turns import LEADING

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowReport:
    """Counts over the conversations of one batch, or of many; a token is trained when its weight is above 0.

    Tokens in = kept + lost, trained and untrained apart. Tokens out = kept + injected.
    """

    conversations: int = 0
    """Conversations given."""
    over_long: int = 0
    """Those longer than the row: the only ones touched."""
    dropped: int = 0
    """Over-long conversations of which nothing is left."""
    episodes: int = 0
    """Episodes made of the over-long conversations that are left."""
    kept_trained: int = 0
    kept_untrained: int = 0
    lost_trained: int = 0
    lost_untrained: int = 0
    injected: int = 0
    """Untrained repetitions (head, lead of a split turn, document end) that windows added."""
    assistant_lost: int = 0
    """Assistant messages of which no token is left."""
    assistant_cut: int = 0
    """Assistant messages of which only a part is left."""
    results_lost: int = 0
    """Tool results that are gone, or only partly left."""
    heads_lost: int = 0
    """Episodes without (all of) the system prompt and tool definitions of their conversation."""

    def __add__(self, other: OverflowReport) -> OverflowReport:
        """The counts of two sets of conversations together."""
        return OverflowReport(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def total(reports: Iterable[OverflowReport]) -> OverflowReport:
    """The sum of the reports of many batches."""
    return sum(reports, OverflowReport())


def counted_untouched(tokens: Tokens, run_weights: NDArray[np.float32]) -> OverflowReport:
    """The report of a batch in which every conversation fits."""
    trained = int(tokens.run_lengths[run_weights > 0].sum())
    return OverflowReport(conversations=len(tokens), kept_trained=trained, kept_untrained=len(tokens.ids) - trained)


def counted(
    tokens: Tokens, run_weights: NDArray[np.float32], kept: Ints, over_long: Ints, dropped: Ints
) -> OverflowReport:
    """The report of a batch from the tokens kept of each run; what is counted in the output is added later."""
    lost = tokens.run_lengths - kept
    trained = run_weights > 0
    assistant_lost, assistant_cut = _messages_hurt(tokens, kept, over_long, RoleCode.ASSISTANT)
    return OverflowReport(
        conversations=len(tokens),
        over_long=len(over_long),
        dropped=len(dropped),
        kept_trained=int(kept[trained].sum()),
        kept_untrained=int(kept[~trained].sum()),
        lost_trained=int(lost[trained].sum()),
        lost_untrained=int(lost[~trained].sum()),
        assistant_lost=assistant_lost,
        assistant_cut=assistant_cut,
        results_lost=sum(_messages_hurt(tokens, kept, over_long, RoleCode.TOOL)),
    )


def _messages_hurt(tokens: Tokens, kept: Ints, over_long: Ints, role: RoleCode) -> tuple[int, int]:
    """How many messages of a role lost all their tokens, and how many a part of them."""
    counts = np.diff(tokens.conversation_runs)[over_long]
    run = ranges(tokens.conversation_runs[over_long], counts)
    message = np.repeat(tokens.message_offsets[over_long], counts) + tokens.run_messages[run]
    chosen = (roles_of(tokens.run_kinds[run]) == role) & (tokens.run_messages[run] >= 0)
    size = np.bincount(message[chosen], weights=tokens.run_lengths[run][chosen])
    left = np.bincount(message[chosen], weights=kept[run][chosen])
    return int(((size > 0) & (left == 0)).sum()), int(((left > 0) & (left < size)).sum())


def head_lengths(tokens: Tokens) -> Ints:
    """Tokens of each conversation before its first user, assistant or tool message."""
    leading = np.isin(roles_of(tokens.run_kinds), np.array(sorted(LEADING), dtype=np.uint8))
    others = np.append(np.flatnonzero(~leading & (tokens.run_lengths > 0)), len(leading))
    first, end = tokens.conversation_runs[:-1], tokens.conversation_runs[1:]
    head_end = np.minimum(others[np.searchsorted(others, first)], end)
    lengths: Ints = tokens.run_offsets[head_end] - tokens.offsets[:-1]
    return lengths
