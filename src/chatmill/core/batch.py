"""A batch of conversations as columns: roles and contents of all messages in flat lists, objects on demand.

It is a sequence of `Conversation`, so whatever takes conversations takes a batch. What knows about columns (templates
with `plain_frames`) hardly ever makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.tokens import offsets_of, ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationBatch(Sequence[Conversation]):
    """C conversations; message `m` of conversation `c` is at `offsets[c] + m` in the columns, if `in_columns[c]`."""

    roles: list[Role]
    contents: list[str]
    offsets: NDArray[np.int64]
    """C + 1 offsets into `roles` and `contents`; a conversation that is not in the columns has no messages there."""
    in_columns: NDArray[np.bool_]
    """Whether a conversation stands in the columns; the others are had from `make` alone."""
    rich: dict[int, Message]
    """By place in the columns: the messages that are more than a role and a content, whole."""
    tools: dict[int, tuple[Any, ...]]
    """By conversation in the columns: tool definitions, where it has some."""
    sources: list[str]
    keys: list[str]
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

    def message(self, place: int) -> Message:
        """The message at a place in the columns."""
        return self.rich.get(place) or Message(self.roles[place], self.contents[place])

    def owners(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The conversations that places in the columns belong to."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def take(self, chosen: NDArray[np.int64]) -> ConversationBatch:
        """The chosen conversations, in that order; one may be chosen more than once."""
        counts = np.diff(self.offsets)[chosen]
        places = ranges(self.offsets[chosen], counts).tolist()
        which = chosen.tolist()
        return ConversationBatch(
            roles=[self.roles[i] for i in places],
            contents=[self.contents[i] for i in places],
            offsets=offsets_of(counts),
            in_columns=self.in_columns[chosen],
            rich={new: self.rich[old] for new, old in enumerate(places) if old in self.rich} if self.rich else {},
            tools={new: self.tools[old] for new, old in enumerate(which) if old in self.tools} if self.tools else {},
            sources=[self.sources[i] for i in which],
            keys=[self.keys[i] for i in which],
            make=self.make,
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


def keys_of(conversations: Sequence[Conversation]) -> list[str]:
    """The key of every conversation (see `record_key`)."""
    if isinstance(conversations, ConversationBatch):
        return conversations.keys
    return [record_key(conversation) for conversation in conversations]
