"""Lays documents out according to their plans.

A plan is a range of lines in a table, an item each: fixed ids, a fixed text, or a text of a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.native.library import call, int64s, struct
from chatmill.core.native.trees import rises
from chatmill.core.texts import OptionalTexts, Texts

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
NOBODY = -(1 << 30)
"""The owner of items that are no message's."""
OUTSIDE = "a plan, a conversation, a message or a call lies outside its array"


class Origin(IntEnum):
    """Which column a text is taken from."""

    FIXED = 0
    """The plans' own texts."""
    CONTENT = 1
    REASONING = 2
    NAME = 3
    TOOL_CALL_ID = 4
    CHANNEL = 5
    RECIPIENT = 6
    CONTENT_TYPE = 7
    CALL_NAME = 8
    CALL_ARGUMENTS = 9
    CALL_ID = 10
    TOOL = 11
    """One tool definition, as JSON; the column has a line for each."""
    COMPUTED = 12
    """No column: an expression that is evaluated record by record (inside tools and arguments)."""


COLUMNS: Mapping[Origin, str] = {
    Origin.CONTENT: "contents",
    Origin.REASONING: "reasoning",
    Origin.NAME: "names",
    Origin.TOOL_CALL_ID: "tool_call_ids",
    Origin.CHANNEL: "channels",
    Origin.RECIPIENT: "recipients",
    Origin.CONTENT_TYPE: "content_types",
    Origin.CALL_NAME: "call_names",
    Origin.CALL_ARGUMENTS: "call_arguments",
    Origin.CALL_ID: "call_ids",
}
"""The columns of messages and of calls, by their names in `MessageColumns`."""

ITEM = np.dtype(
    [
        ("start", np.int64),  # of fixed ids in `ids`, of fixed texts in `text`
        ("size", np.int64),  # of fixed ids and fixed texts
        ("owner", np.int32),  # the message it belongs to, counted from its stretch's; `NOBODY` for none
        ("message", np.int32),
        ("call", np.int32),
        ("operations", np.int32),  # number of the operations on a text, 0 for none
        ("expression", np.int32),  # number of an expression that has no column
        ("kind", np.uint8),
        ("origin", np.uint8),
        ("is_ids", np.bool_),
        ("opens", np.bool_),  # whether a new piece of text begins here
        ("form", np.int32),  # the same for items that differ in the flag of repeated answers alone
    ],
    align=True,
)
"""An item of a plan, as in layout.h."""


class ItemTable(NamedTuple):
    """The items of all plans."""

    firsts: Ints
    """First item of each plan, and the number of all items."""
    items: NDArray[Any]
    """As `ITEM` says."""
    ids: NDArray[np.int32]
    text: Bytes

    @property
    def struct(self) -> Ints:
        """The table as compiled code reads it."""
        return struct(self.firsts, self.items, len(self.firsts) - 1)


class Layout(NamedTuple):
    """The items of many documents, one after another, and those among them that are texts."""

    starts: Ints
    """Of ids in the table; for texts, nothing yet."""
    sizes: Ints
    kinds: Bytes
    owners: NDArray[np.int32]
    is_text: NDArray[np.bool_]
    text_items: Ints
    """Which items are texts."""
    buffers: list[Bytes]
    which: Bytes
    """For each text its buffer."""
    text_starts: Ints
    text_sizes: Ints
    opens: NDArray[np.bool_]
    """For each text whether a piece begins with it."""
    others: Ints
    """The texts that are in no column, or that operations are applied to: what is here is not yet what they show."""
    lines: Ints
    """For each of the others its line in the table."""
    conversations: Ints
    """For each of the others its conversation."""
    bases: Ints
    """For each of the others the message that its stretch counts from."""
    whole: NDArray[np.bool_]
    """For each message whether its content and its reasoning are shown as they are."""


class Sharing(NamedTuple):
    """What rows begin with like the one before them."""

    skips: Ints
    """For each stretch how many of its items an earlier row has."""
    parents: Ints
    """For each row the one that it goes on from; -1 for none."""
    until: Ints
    """The run of the parent before which a row leaves it, among the runs of all rows that are not shared."""
    others: Ints
    """Rows, runs and kinds: what a run is in a row that shares it, where it is flagged as repeated in one of both."""


_OUTPUTS: tuple[tuple[str, Any], ...] = (
    *(("starts", np.int64), ("sizes", np.int64), ("kinds", np.uint8), ("is_text", np.bool_), ("owners", np.int32)),
    *(("text_items", np.int64), ("which", np.uint8), ("text_starts", np.int64), ("text_sizes", np.int64)),
    *(("opens", np.bool_), ("others", np.int64), ("lines", np.int64), ("conversations", np.int64), ("bases", np.int64)),
)


def share(table: ItemTable, stretches: Ints, bases: Ints, firsts: Ints, conversations: Ints) -> Sharing:
    """Find what rows share: each has the stretches `firsts[i]` up to `firsts[i + 1]`, and its conversation's number.

    Two rows that follow each other share the items that both begin with, kinds but for the flag of repeated answers
    included, up to where a new piece of text begins in both.
    """
    if len(bases) != len(stretches) or len(conversations) != len(firsts) - 1 or not rises(firsts, len(stretches)):
        raise IndexError(OUTSIDE)
    items = np.append(0, np.cumsum(_sizes(table, stretches)))
    rows, longest = len(firsts) - 1, int(np.diff(items[firsts]).max(initial=0))
    path, others = np.empty((longest, 5), dtype=np.int64), np.empty((int(items[-1]), 3), dtype=np.int64)
    skips, parents, until = np.empty(len(stretches), dtype=np.int64), *np.empty((2, rows), dtype=np.int64)
    places = int64s(stretches, bases, firsts, conversations)
    count = call("chatmill_share", table.struct, *places, rows, path, skips, parents, until, others)
    if count < 0:
        raise IndexError(OUTSIDE)
    return Sharing(skips, parents, until, others[:count].copy())


def _sizes(table: ItemTable, stretches: Ints) -> Ints:
    """Return how many items each stretch has; a table that does not fit itself, and other stretches, are refused."""
    if not rises(table.firsts, len(table.items)):
        raise IndexError(OUTSIDE)
    if len(stretches) and not 0 <= stretches.min() <= stretches.max() < len(table.firsts) - 1:
        raise IndexError(OUTSIDE)
    sizes: Ints = table.firsts[stretches + 1] - table.firsts[stretches]
    return sizes


def lay_out(
    table: ItemTable, stretches: Ints, conversations: Ints, bases: Ints, skips: Ints, batch: Conversations
) -> Layout:
    """Lay out the items of stretches, each with its number, conversation and the message it counts from.

    The first `skips` items of each are left out.
    """
    buffers, columns = shown_columns(table, batch)
    stretches, conversations, bases, skips = int64s(stretches, conversations, bases, skips)
    if not len(stretches) == len(conversations) == len(bases) == len(skips):
        raise IndexError(OUTSIDE)
    sizes = _sizes(table, stretches)
    if (skips < 0).any() or (skips > sizes).any() or (bases <= NOBODY).any() or (bases >= -NOBODY).any():
        raise IndexError(OUTSIDE)
    items = int((sizes - skips).sum())
    shown = np.zeros((len(Origin), 3), dtype=np.int64)
    kept = {origin: int64s(column.starts, column.lengths) for origin, (column, _) in columns.items()}
    for origin, (_, buffer) in columns.items():
        shown[origin] = struct(*kept[origin], buffer)
    arrays = {name: np.empty(items, dtype=dtype) for name, dtype in _OUTPUTS}
    whole = np.zeros((len(batch.messages), 2), dtype=np.bool_)
    outputs = struct(*arrays.values(), whole, 0, 0)
    offsets, call_offsets = int64s(batch.offsets, batch.messages.call_offsets)
    places = (stretches, conversations, bases, skips, len(stretches), offsets, len(batch), call_offsets)
    if call("chatmill_lay_out", table.struct, *places, shown, outputs) != items:
        raise IndexError(OUTSIDE)
    texts, others = outputs[-2:].tolist()
    for name in ("text_items", "which", "text_starts", "text_sizes", "opens"):
        arrays[name] = arrays[name][:texts]
    for name in ("others", "lines", "conversations", "bases"):
        arrays[name] = arrays[name][:others]
    return Layout(buffers=buffers, whole=whole, **arrays)


def shown_columns(
    table: ItemTable, batch: Conversations
) -> tuple[list[Bytes], Mapping[Origin, tuple[Texts | OptionalTexts, int]]]:
    """All buffers, that of fixed texts first; and the columns that plans show, with the number of their buffer."""
    buffers: list[Bytes] = [table.text]
    shown = np.bincount(table.items["origin"], minlength=len(Origin))
    columns = {origin: getattr(batch.messages, name) for origin, name in COLUMNS.items() if shown[origin]}
    return buffers, {origin: (column, buffer_number(buffers, column.data)) for origin, column in columns.items()}


def buffer_number(buffers: list[Bytes], data: Bytes) -> int:
    """Find the number of a buffer in a list, and append it if it is missing."""
    for number, buffer in enumerate(buffers):
        if buffer is data:
            return number
    buffers.append(data)
    return len(buffers) - 1
