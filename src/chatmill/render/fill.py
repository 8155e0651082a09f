"""Writes rows from their plans: texts are gathered from the columns of a batch, encoded in one call, and laid out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.native.distinct import distinct
from chatmill.core.native.gather import gathered
from chatmill.core.texts import OptionalTexts, Texts
from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.render.jinja.expressions import APPLIED, Expression
from chatmill.render.plan_table import OF_CALLS, Operations, Origin, PlanTable
from chatmill.tokenizer.backends import Encoded
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Compute = Callable[[int, Expression], str]
"""The text of an expression for a conversation of the batch."""


def fill(
    plans: PlanTable,
    rows: Ints,
    conversations: Ints,
    batch: Conversations,
    tokenizer: Tokenizer,
    compute: Compute,
) -> Tokens:
    """The tokens of rows: each has the number of its plan, and of its conversation in the batch."""
    table = plans.table
    counts = table.firsts[rows + 1] - table.firsts[rows]
    at = ranges(table.firsts[rows], counts)
    row_of = np.repeat(np.arange(len(rows)), counts)
    is_ids = table.is_ids[at]
    text_items = np.flatnonzero(~is_ids)
    texts = _Sources(plans, batch, compute).texts(at[text_items], conversations[row_of[text_items]])
    opens = table.opens[at[text_items]]
    pieces, piece_of = _pieces(texts, opens)
    different, number = different_pieces(pieces)
    encoded = tokenizer.encode_batch(different)
    prefixes = texts.starts - pieces.starts[piece_of]
    begins, ends = _part_borders(prefixes, piece_of, number[piece_of], different, encoded, tokenizer)
    starts, sizes = table.starts[at], table.sizes[at]
    starts[text_items], sizes[text_items] = begins, ends - begins
    ids = gathered([table.ids, encoded[0]], (~is_ids).view(np.uint8), starts, sizes)
    run_offsets = offsets_of(sizes)
    message_counts = np.diff(batch.offsets)[conversations]
    messages = ranges(batch.offsets[conversations], message_counts)
    conversation_runs = offsets_of(counts)
    return Tokens(
        ids=ids,
        offsets=run_offsets[conversation_runs],
        run_offsets=run_offsets,
        run_kinds=table.kinds[at],
        run_messages=table.owners[at],
        conversation_runs=conversation_runs,
        message_offsets=offsets_of(message_counts),
        message_weights=batch.messages.weights[messages].astype(np.float32),
    )


class _Sources:
    """Finds the texts of items in the columns of a batch."""

    def __init__(self, plans: PlanTable, batch: Conversations, compute: Compute) -> None:
        self._plans, self._batch, self._compute = plans, batch, compute

    def texts(self, items: Ints, conversations: Ints) -> Texts:
        """One text per item, all in one buffer."""
        table, messages = self._plans.table, self._batch.messages
        origins = table.origins[items]
        starts, sizes = table.starts[items], table.sizes[items]
        places = self._batch.offsets[conversations] + table.messages[items]
        columns: dict[Origin, Texts | OptionalTexts] = {
            Origin.CONTENT: messages.contents,
            Origin.REASONING: messages.reasoning,
            Origin.NAME: messages.names,
            Origin.TOOL_CALL_ID: messages.tool_call_ids,
            Origin.CALL_NAME: messages.call_names,
            Origin.CALL_ARGUMENTS: messages.call_arguments,
            Origin.CALL_ID: messages.call_ids,
        }
        buffers: list[NDArray[np.uint8]] = [table.text]
        which = np.zeros(len(items), dtype=np.uint8)
        for origin, column in columns.items():
            mine = np.flatnonzero(origins == origin)
            if not len(mine):
                continue
            at = places[mine]
            if origin in OF_CALLS:
                at = messages.call_offsets[at] + table.calls[items[mine]]
            starts[mine], sizes[mine] = column.starts[at], column.lengths[at]
            which[mine] = _buffer(buffers, column.data)
        tools = np.flatnonzero(origins == Origin.TOOL)
        if len(tools):
            listed = tool_lines(self._batch.tools, conversations[tools], table.calls[items[tools]])
            self._put(tools, listed, buffers, which, starts, sizes)
        computed = np.flatnonzero(origins == Origin.COMPUTED)
        if len(computed):
            self._put(computed, self._computed(items[computed], conversations[computed]), buffers, which, starts, sizes)
        applied = table.operations[items]
        for number in np.unique(applied[applied > 0]).tolist():
            mine = np.flatnonzero(applied == number)
            changed = self._applied(number, mine, buffers, which, starts, sizes)
            self._put(mine, changed, buffers, which, starts, sizes)
        return Texts.packed_in(gathered(buffers, which, starts, sizes), sizes)

    @staticmethod
    def _put(
        mine: Ints, texts: Texts, buffers: list[NDArray[np.uint8]], which: NDArray[np.uint8], starts: Ints, sizes: Ints
    ) -> None:
        which[mine] = _buffer(buffers, texts.data)
        starts[mine], sizes[mine] = texts.starts, texts.lengths

    def _computed(self, items: Ints, conversations: Ints) -> Texts:
        numbers = self._plans.table.expressions[items].tolist()
        expressions = self._plans.expressions
        pairs = zip(numbers, conversations.tolist(), strict=True)
        return Texts.of([self._compute(conversation, expressions[number]) for number, conversation in pairs])

    def _applied(
        self,
        number: int,
        mine: Ints,
        buffers: Sequence[NDArray[np.uint8]],
        which: NDArray[np.uint8],
        starts: Ints,
        sizes: Ints,
    ) -> Texts:
        """What string operations make of some of the texts."""
        own = which[mine]
        if (own == own[0]).all():
            texts = Texts(buffers[int(own[0])], starts[mine], sizes[mine])
        else:
            texts = Texts.packed_in(gathered(list(buffers), own, starts[mine], sizes[mine]), sizes[mine])
        return applied(texts, self._plans.operations[number])


def tool_lines(tools: Texts, conversations: Ints, numbers: NDArray[np.int32]) -> Texts:
    """Single tool definitions of conversations; each is a line of the column, with its line feed before it."""
    feeds = np.flatnonzero(tools.data == ord("\n"))
    begins = tools.starts[conversations]
    first = np.searchsorted(feeds, begins) + numbers
    starts = feeds[first] + 1
    following = np.append(feeds, len(tools.data))[first + 1]
    stops = np.minimum(following, begins + tools.lengths[conversations])
    return Texts(tools.data, starts, stops - starts)


def applied(texts: Texts, operations: Operations) -> Texts:
    """Texts after string operations; stripping is done on columns, anything else text by text."""
    for name, arguments in operations:
        characters = arguments[0] if name in ("strip", "lstrip", "rstrip") else ""
        if characters is None or (isinstance(characters, str) and len(characters) == 1 and characters.isascii()):
            byte = None if characters is None else ord(characters)
            texts = texts.trimmed(byte, begin=name != "rstrip", end=name != "lstrip")
        else:
            texts = Texts.of([APPLIED[name](text, *arguments) for text in texts])
    return texts


def _buffer(buffers: list[NDArray[np.uint8]], data: NDArray[np.uint8]) -> int:
    """The number of a buffer, kept once."""
    for number, known in enumerate(buffers):
        if known is data:
            return number
    buffers.append(data)
    return len(buffers) - 1


def _pieces(texts: Texts, opens: NDArray[np.bool_]) -> tuple[Texts, Ints]:
    """The parts of every piece as one text, and the piece of each part."""
    firsts = np.flatnonzero(opens)
    ends = np.append(firsts, len(opens))[1:]
    offsets = texts.offsets
    lengths = offsets[ends] - offsets[firsts]
    return Texts.packed_in(texts.data, lengths), np.cumsum(opens) - 1


def different_pieces(pieces: Texts) -> tuple[Texts, Ints]:
    """The pieces that differ from each other, and which of them each piece is; many share instructions and tools."""
    numbers, firsts = distinct(pieces.data, pieces.starts, pieces.lengths)
    return (pieces.take(firsts).packed() if len(firsts) < len(pieces) else pieces), numbers


def _part_borders(
    prefixes: Ints, piece_of: Ints, number: Ints, different: Texts, encoded: Encoded, tokenizer: Tokenizer
) -> tuple[Ints, Ints]:
    """Where the tokens of every part begin and end; a token belongs to the part in which its first byte lies.

    `prefixes` has the bytes before each part in its piece, `number` the text of that piece among the different ones.
    """
    begins, ends = encoded[1][number], encoded[1][number + 1]
    inner = np.flatnonzero(piece_of[1:] == piece_of[:-1]) + 1  # parts that another part of their piece comes before
    if len(inner):
        begins[inner] = tokenizer.byte_points(encoded, number[inner], prefixes[inner], different)
        ends[inner - 1] = begins[inner]
    return begins, ends
