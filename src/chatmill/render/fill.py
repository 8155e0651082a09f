"""Writes documents: their texts are gathered from the columns of a batch, encoded in one call, and laid out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, RoleCode, roles_of
from chatmill.core.native.document_layout import Layout, Origin, Sharing, buffer_number, lay_out, share
from chatmill.core.native.gather import Pieces, gathered, joined_pieces
from chatmill.core.native.text_ranges import positions_of
from chatmill.core.shared_rows import SharedRows
from chatmill.core.texts import TextJoiner, Texts
from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.render.jinja.expressions import APPLIED, Expression, evaluate, root
from chatmill.render.jinja.questions import shifted
from chatmill.render.jinja.record_view import InputForm, RecordView
from chatmill.render.part_weights import PartWeights, TextItems, weigh_parts
from chatmill.render.stretch_table import StretchTable
from chatmill.render.text_columns import Operations
from chatmill.tokenizer.backends import Encoded
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]


class Entries(NamedTuple):
    """The stretches of documents."""

    stretches: Ints
    bases: Ints
    """The messages that they count from."""
    counts: Ints
    """How many each document has."""


class Filled(NamedTuple):
    """Documents with their texts."""

    rows: SharedRows
    layout: Layout
    parts: PartWeights | None
    """Weights of parts of messages; None where the batch has none."""


def fill(
    stretch_table: StretchTable,
    entries: Entries,
    conversations: Ints,
    batch: Conversations,
    tokenizer: Tokenizer,
    form: InputForm,
) -> Filled:
    """The tokens of documents; each has the number of its conversation in the batch, which templates see in a form."""
    table, stretches = stretch_table.table, entries.stretches
    has_parts = bool(len(batch.messages.with_spans))
    if has_parts:
        shared = _nothing_shared(len(stretches), len(conversations))
    else:
        shared = share(table, stretches, entries.bases, offsets_of(entries.counts), conversations)
    owners = np.repeat(conversations, entries.counts)
    layout = lay_out(table, stretches, owners, entries.bases, shared.skips, batch)
    _put_other_texts(layout, stretch_table, batch, form)
    pieces = joined_pieces(layout.buffers, layout.which, layout.text_starts, layout.text_sizes, layout.opens)
    texts = Texts.packed_in(pieces.data, np.diff(pieces.offsets))
    encoded = tokenizer.encode_batch(texts)
    begins, ends = _part_borders(pieces, layout.opens, texts, encoded, tokenizer)
    starts, sizes = layout.starts, layout.sizes
    starts[layout.text_items], sizes[layout.text_items] = begins, ends - begins
    ids = gathered([table.ids, encoded[0]], layout.is_text.view(np.uint8), starts, sizes)
    run_offsets = offsets_of(sizes)
    message_counts = np.diff(batch.offsets)[conversations]
    messages = ranges(batch.offsets[conversations], message_counts)
    own = table.firsts[stretches + 1] - table.firsts[stretches] - shared.skips
    document_runs = offsets_of(own)[offsets_of(entries.counts)]
    tokens = Tokens(
        ids=ids,
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=layout.kinds,
        run_messages=layout.owners,
        document_runs=document_runs,
        message_offsets=offsets_of(message_counts),
        message_weights=batch.messages.weights[messages].astype(np.float32),
    )
    parts = None
    if has_parts:
        items = TextItems(
            lines=ranges(table.firsts[stretches], own)[layout.text_items],
            conversations=np.repeat(owners, own)[layout.text_items],
            bases=np.repeat(entries.bases, own)[layout.text_items],
            starts=run_offsets[layout.text_items],
        )
        parts = weigh_parts(layout, stretch_table, items, batch, pieces, texts, encoded, tokenizer, len(ids))
    rows = SharedRows(own=tokens, parents=shared.parents, until=shared.until, others=shared.others)
    return Filled(_with_unwanted(rows), layout, parts)


def _nothing_shared(stretches: int, rows: int) -> Sharing:
    """Return rows that have all of their items themselves: their weights may differ where their texts do not."""
    none = np.zeros(rows, dtype=np.int64)
    return Sharing(np.zeros(stretches, dtype=np.int64), none - 1, none, np.empty((0, 3), dtype=np.int64))


def _with_unwanted(rows: SharedRows) -> SharedRows:
    """Around an answer of weight 0 nothing is trained either, also by a policy that is chosen at load."""
    tokens = rows.own
    if not (tokens.message_weights == 0).any():
        return rows
    runs = np.diff(tokens.document_runs)
    places = np.repeat(tokens.message_offsets[:-1], runs) + tokens.run_messages
    is_there = (tokens.run_messages >= 0) & (places < np.repeat(tokens.message_offsets[1:], runs))
    weights = tokens.message_weights[np.where(is_there, places, 0)]
    is_unwanted = is_there & (weights == 0) & (roles_of(tokens.run_kinds) == RoleCode.ASSISTANT)
    kinds = np.where(is_unwanted, tokens.run_kinds | np.uint8(REPEATED), tokens.run_kinds)
    others = rows.others[~is_unwanted[rows.others[:, 1]]]
    return replace(rows, own=replace(tokens, run_kinds=kinds), others=others)


def _put_other_texts(layout: Layout, stretch_table: StretchTable, batch: Conversations, form: InputForm) -> None:
    """Complete a layout with what is not in the columns: tools, computed texts, and what operations make of texts."""
    table, others = stretch_table.table, layout.others
    lines, conversations = layout.lines, layout.conversations
    origins = table.items["origin"][lines]
    operations = table.items["operations"][lines]
    tools = np.flatnonzero(origins == Origin.TOOL)
    if len(tools):
        _put(others[tools], tool_lines(batch.tools, conversations[tools], table.items["call"][lines[tools]]), layout)
    computed = np.flatnonzero(origins == Origin.COMPUTED)
    if len(computed):
        numbers = table.items["expression"][lines[computed]].tolist()
        expressions = [stretch_table.expressions[number] for number in numbers]
        places = zip(conversations[computed].tolist(), layout.bases[computed].tolist(), expressions, strict=True)
        _put(others[computed], _computed(places, batch, form), layout)
    results: list[tuple[Ints, Texts]] = []
    for number in numbers_in(operations[operations > 0]):
        own = np.flatnonzero(operations == number)
        after = applied(texts_at(others[own], layout), stretch_table.operations[number])
        if any(after.data is buffer for buffer in layout.buffers):
            _put(others[own], after, layout)
        else:
            results.append((others[own], after))
    if results:  # in one buffer: operations may be many (the lines of a text one by one), and buffers only a few
        joiner = TextJoiner([texts for _, texts in results])
        _put(np.concatenate([places for places, _ in results]), joiner.join([texts for _, texts in results]), layout)


def _computed(places: Iterable[tuple[int, int, Expression]], batch: Conversations, form: InputForm) -> Texts:
    """Return the texts of expressions for conversations of the batch; their paths count from a message."""
    views: dict[int, RecordView] = {}
    listed: dict[tuple[str, Expression], str] = {}
    texts: list[str] = []
    for index, base, expression in places:
        if index not in views:
            views[index] = RecordView((batch, index), form)
        if root(expression)[0] != "tools":
            texts.append(evaluate(shifted(expression, base), views[index].field))
            continue
        key = (batch.tools[index], expression)
        if key not in listed:
            listed[key] = evaluate(expression, views[index].field)
        texts.append(listed[key])
    return Texts.of(texts)


def _put(places: Ints, texts: Texts, layout: Layout) -> None:
    """Have texts of a layout be these."""
    layout.which[places] = buffer_number(layout.buffers, texts.data)
    layout.text_starts[places], layout.text_sizes[places] = texts.starts, texts.lengths


def texts_at(places: Ints, layout: Layout) -> Texts:
    """Return some texts of a layout."""
    which, starts, sizes = layout.which[places], layout.text_starts[places], layout.text_sizes[places]
    if (which == which[0]).all():
        return Texts(layout.buffers[int(which[0])], starts, sizes)
    return Texts.packed_in(gathered(layout.buffers, which, starts, sizes), sizes)


def numbers_in(column: NDArray[Any]) -> list[int]:
    """Return the numbers that occur in a column of small ones, in order."""
    return np.flatnonzero(np.bincount(column)).tolist()


def tool_lines(tools: Texts, conversations: Ints, numbers: NDArray[np.int32]) -> Texts:
    """Single tool definitions of conversations; each is a line of the column, with its line feed before it."""
    feeds = positions_of(b"\n", tools.data)
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


def _part_borders(
    pieces: Pieces, opens: NDArray[np.bool_], texts: Texts, encoded: Encoded, tokenizer: Tokenizer
) -> tuple[Ints, Ints]:
    """Return where the tokens of every part begin and end; a token belongs to the part in which its first byte lies."""
    begins, ends = encoded[1][pieces.numbers], encoded[1][pieces.numbers + 1]
    inner = np.flatnonzero(~opens[1:]) + 1  # parts that another part of their piece comes before
    if len(inner):
        numbers, before = pieces.numbers[inner], pieces.before[inner]
        begins[inner] = tokenizer.byte_points(encoded, numbers, before, texts, not_ascii=pieces.not_ascii)
        ends[inner - 1] = begins[inner]
    return begins, ends
