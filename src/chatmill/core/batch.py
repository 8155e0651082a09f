"""A batch of conversations as columns: roles, texts and calls of all messages, flat; objects on demand.

It is a sequence of `Conversation`, so whatever takes conversations takes a batch. What knows about columns (templates
that write from them) hardly ever makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of, ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageColumns:
    """M messages, those of one conversation next to each other; every column has one entry per message."""

    roles: NDArray[np.uint8]
    """`RoleCode` of each message."""
    contents: Texts
    """Empty where a message has none."""
    has_reasoning: NDArray[np.bool_]
    """Whether a message has reasoning of its own, be it empty."""
    reasoning: Texts
    """Empty where a message has none."""
    named: NDArray[np.bool_]
    """Whether a message has a name or answers a call by its id, which these columns do not hold."""
    call_offsets: NDArray[np.int64]
    """M + 1 offsets into the calls."""
    call_names: Texts
    call_arguments: Texts
    """The arguments as they are written, JSON as a rule."""

    def __len__(self) -> int:
        return len(self.roles)

    @property
    def call_counts(self) -> NDArray[np.int64]:
        """Calls of each message."""
        return np.diff(self.call_offsets)

    def take(self, places: NDArray[np.int64]) -> MessageColumns:
        """The messages at these places, in that order."""
        counts = self.call_counts[places]
        calls = ranges(self.call_offsets[places], counts)
        return MessageColumns(
            roles=self.roles[places],
            contents=self.contents.take(places),
            has_reasoning=self.has_reasoning[places],
            reasoning=self.reasoning.take(places),
            named=self.named[places],
            call_offsets=offsets_of(counts),
            call_names=self.call_names.take(calls),
            call_arguments=self.call_arguments.take(calls),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationBatch(Sequence[Conversation]):
    """C conversations; message `m` of conversation `c` is at `offsets[c] + m` in the columns, if `in_columns[c]`."""

    messages: MessageColumns
    offsets: NDArray[np.int64]
    """C + 1 offsets into `messages`; a conversation that is not in the columns has no messages there."""
    in_columns: NDArray[np.bool_]
    """Whether a conversation stands in the columns; the others are had from `make` alone."""
    tools: Texts
    """The tool definitions of each conversation in the columns, as `listed_tools` writes them; empty for none."""
    sources: list[str]
    keys: Sequence[str]
    """What each record is known by: its id, or its place where it has none."""
    make: Callable[[int], Conversation]
    """Makes one conversation as an object, given its number in the batch that was read."""
    numbers: NDArray[np.int64]
    """The number that `make` knows each conversation by."""

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self.make(number) for number in self.numbers[index].tolist()]
        return self.make(int(self.numbers[index]))

    def owners(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The conversations that places in the columns belong to."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def take(self, chosen: NDArray[np.int64]) -> ConversationBatch:
        """The chosen conversations, in that order; one may be chosen more than once."""
        counts = np.diff(self.offsets)[chosen]
        which = chosen.tolist()
        return replace(
            self,
            messages=self.messages.take(ranges(self.offsets[chosen], counts)),
            offsets=offsets_of(counts),
            in_columns=self.in_columns[chosen],
            tools=self.tools.take(chosen),
            sources=[self.sources[i] for i in which],
            keys=self.keys.take(chosen) if isinstance(self.keys, Texts) else [self.keys[i] for i in which],
            numbers=self.numbers[chosen],
        )


def record_key(conversation: Conversation) -> str:
    """What a record is known by in hashes and stored columns: its id, or its place where it has none."""
    return conversation.id or conversation.where


def sources_of(conversations: Sequence[Conversation]) -> list[str]:
    """The source of every conversation."""
    if isinstance(conversations, ConversationBatch):
        return conversations.sources
    return [conversation.source for conversation in conversations]


def keys_of(conversations: Sequence[Conversation]) -> Sequence[str]:
    """The key of every conversation (see `record_key`)."""
    if isinstance(conversations, ConversationBatch):
        return conversations.keys
    return [record_key(conversation) for conversation in conversations]
