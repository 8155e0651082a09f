"""The branches of trees in words: which message each goes back to, and what it changes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chatmill.core.kinds import Part, parts_of
from chatmill.core.trees import Branches
from chatmill.look.items import Item


class MessageSpan(NamedTuple):
    """Where a message is in an item, and who speaks."""

    start: int
    tokens: int
    label: str


class TreeSpan(NamedTuple):
    """Where a document is in an item, and its messages."""

    start: int
    tokens: int
    messages: Sequence[MessageSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchView:
    """Where a branch of a tree begins, and what it is for."""

    start: int
    """Its first token in the item."""
    number: int
    """Counted from 1 in its tree."""
    count: int
    """Branches of its tree."""
    message: int
    """The message that it goes back to, counted from 1 in the item."""
    label: str
    """Who speaks there."""
    loses_reasoning: bool
    """Whether it has that message without the reasoning: the history that later answers are given."""

    @property
    def name(self) -> str:
        """Such as `branch 2 of 3`."""
        return f"branch {self.number} of {self.count}"

    @property
    def words(self) -> str:
        """Such as `branch 1 of 1: goes back to message 2 (assistant), and on from there in another way`."""
        message = f"message {self.message}" + (f" ({self.label})" if self.label else "")
        how = "as later answers see it, without its reasoning" if self.loses_reasoning else "and goes on in another way"
        return f"{self.name}: back to {message}, {how}"


def describe_branches(item: Item, documents: Sequence[TreeSpan]) -> Iterator[BranchView]:
    """Yield the branches of an item's trees, in stored order.

    Args:
        item: The item; its branches are counted in it, their depths in their trees.
        documents: Its documents, with their messages.
    """
    messages_before = 0

    for document in documents:
        end = document.start + document.tokens
        places = [(start - document.start, depth) for start, depth in item.branches if document.start <= start < end]
        if places:
            yield from _describe_tree(item, document, places, messages_before)
        messages_before += len(document.messages)


def _describe_tree(
    item: Item, document: TreeSpan, places: Sequence[tuple[int, int]], messages_before: int
) -> Iterator[BranchView]:
    """Yield the branches of one tree.

    Args:
        item: The item that the tree is in.
        document: The tree.
        places: Start and depth of each branch, counted in the tree.
        messages_before: Messages of the item before the tree.
    """
    starts = np.array([start for start, _ in places], dtype=np.int64)
    depths = np.array([depth for _, depth in places], dtype=np.int64)
    tree = Branches(offsets=np.array([0, len(places)]), starts=starts, depths=depths)
    ends = tree.positions_and_ends(np.array([document.tokens]))[1]
    messages = document.messages
    message_starts = np.array([message.start - document.start for message in messages], dtype=np.int64)

    for index, (start, depth) in enumerate(places):
        # The token of which the branch begins with a copy is the next after those that the branch has before it.
        path = np.flatnonzero(ends[:start] > start)
        split = int(path[depth - 1]) + 1 if depth else 0
        left = int(np.searchsorted(message_starts, split, side="right")) - 1
        entered = int(np.searchsorted(message_starts, start, side="right")) - 1
        is_same_speaker = messages[left].label == messages[entered].label
        yield BranchView(
            start=document.start + start,
            number=index + 1,
            count=len(places),
            message=messages_before + left + 1,
            label=messages[left].label,
            loses_reasoning=is_same_speaker
            and _has_reasoning(item, messages[left], document.start + split)
            and not _has_reasoning(item, messages[entered], document.start + start),
        )


def _has_reasoning(item: Item, message: MessageSpan, first: int) -> bool:
    """Say whether a message has reasoning from a token of the item on."""
    if item.kinds is None:
        return False
    kinds = item.kinds[max(first, message.start) : message.start + message.tokens]
    return bool((parts_of(kinds) == Part.REASONING).any())
