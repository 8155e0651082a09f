"""Renders conversations: finds the plan of each, and writes all rows at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chatmill.core import html
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.gc_pause import without_collector
from chatmill.core.native.row_layout import Origin
from chatmill.core.texts import Texts
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.render.bound import BoundTemplate
from chatmill.render.fill import applied, fill, numbers_in
from chatmill.render.plan_book import PlanBook
from chatmill.render.plan_table import PlanTable
from chatmill.render.registry import bind, template_mistake
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rendered:
    """Tokens of the conversations that could be rendered, in order, and the ones that could not."""

    tokens: Tokens
    """One entry per row; a conversation whose turns cannot share a sequence has several rows next to each other."""
    kept: Ints
    """Index of the conversation of each row in the input."""
    stripped: Ints
    """Characters of contents and reasoning that no row of the conversation shows; 0 but for its first row."""
    failed: tuple[tuple[int, RecordError], ...]
    """Input index and error of each conversation that the template refused; empty unless failures are collected."""
    turns: Ints
    """Answers of each row's conversation that are trained; 0 but for its first row."""
    unstable: Ints
    """Those of them that later messages change."""
    untrained: Ints
    """Answers that are context because their mask cannot be proved."""
    appended: Ints
    """Answers whose stop the template itself does not write."""

    def _facts(self) -> list[tuple[str, int]]:
        """What is worth a look; nothing that is 0."""
        facts = (
            ("conversations", len(np.unique(self.kept))),
            ("refused by the template", len(self.failed)),
            ("rows", len(self.tokens)),
            ("tokens", len(self.tokens.ids)),
            ("characters that are not shown", int(self.stripped.sum())),
            ("turns that later messages change", int(self.unstable.sum())),
            ("turns without proof", int(self.untrained.sum())),
            ("stops that the template does not write", int(self.appended.sum())),
        )
        return [(words, count) for words, count in facts if count]

    def __repr__(self) -> str:
        facts = ", ".join(f"{count:,} {words}" for words, count in self._facts())
        first = f"; first refused: {self.failed[0][1]}" if self.failed else ""
        return f"Rendered({facts}{first})"

    def _repr_html_(self) -> str:
        refused = "; ".join(str(error) for _, error in self.failed[:SHOWN_FAILURES])
        return html.card("Rendered", html.table(self._facts()), refused)


def render(
    conversations: Sequence[Conversation],
    template: BoundTemplate | str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    collect_failures: bool = False,
    add_generation_prompt: bool = False,
) -> Rendered:
    """Render conversations; all their text is encoded in one call.

    `template` is a bound template, or a name or path that is bound to `tokenizer`. The first conversation that the
    template cannot write raises its `RecordError`; with `collect_failures` it is left out and reported instead.
    """
    bound = template if isinstance(template, BoundTemplate) else bind(template, tokenizer)
    batch = conversations if isinstance(conversations, Conversations) else Conversations.of(conversations)
    try:
        if add_generation_prompt:
            return _render_prompts(batch, bound)
        with without_collector():
            numbers, failed = bound.book.find(batch)
    except Exception as error:
        if (mistake := template_mistake(error)) is not None:
            raise mistake from error
        raise
    if failed and not collect_failures:
        raise failed[0][1]
    chosen = np.flatnonzero(numbers >= 0)
    numbers = numbers[chosen]
    plans = bound.book.plans.columns
    rows, plan_of = plans.rows.of(numbers)
    kept = chosen[plan_of]
    filled = fill(bound.book.table, rows[:, 0], kept, batch, bound.tokenizer, bound.book.computer(batch))
    is_first = np.diff(plan_of, prepend=-1) > 0
    per_row = np.zeros((len(rows), 5), dtype=np.int64)
    per_row[is_first, :4] = plans.counts[numbers]
    per_row[is_first, 4] = _stripped(batch, chosen, numbers, bound.book, filled.changed)
    return Rendered(
        tokens=filled.tokens,
        kept=kept,
        stripped=per_row[:, 4],
        failed=tuple(failed),
        turns=per_row[:, 0],
        unstable=per_row[:, 1],
        untrained=per_row[:, 2],
        appended=per_row[:, 3],
    )


def _stripped(batch: Conversations, chosen: Ints, numbers: Ints, book: PlanBook, changed: Ints) -> Ints:
    """Characters of contents and reasoning that a conversation's rows do not show; `changed` have texts cut there."""
    stripped, plans, firsts = np.zeros(len(chosen), dtype=np.int64), book.plans.columns, batch.offsets[chosen]
    is_cut = np.zeros(len(batch), dtype=np.bool_)
    is_cut[changed] = True
    cut = np.flatnonzero(is_cut[chosen])
    hidden, hidden_in = plans.hidden.of(numbers)
    trimmed, trimmed_in = plans.trimmed.of(numbers[cut])
    for origin, texts in ((Origin.CONTENT, batch.messages.contents), (Origin.REASONING, batch.messages.reasoning)):
        mine = hidden[:, 0] == origin
        places = firsts[hidden_in[mine]] + hidden[mine, 1]
        np.add.at(stripped, hidden_in[mine], texts.take(places).characters())
        for operations in numbers_in(trimmed[trimmed[:, 0] == origin, 2]):
            mine = (trimmed[:, 0] == origin) & (trimmed[:, 2] == operations)
            owners = cut[trimmed_in[mine]]
            own = texts.take(firsts[owners] + trimmed[mine, 1])
            left = applied(own, book.table.operations[operations])
            np.add.at(stripped, owners, _characters_lost(own, left))
    _count_pieced(stripped, batch, firsts, cut, numbers, book)
    return stripped


def _count_pieced(stripped: Ints, batch: Conversations, firsts: Ints, cut: Ints, numbers: Ints, book: PlanBook) -> None:
    """Add what is missing of texts that are shown in pieces, or otherwise in other rows: what the best row lacks."""
    fields, plan_of = book.plans.columns.pieced.of(numbers[cut])
    for number, place in zip(fields[:, 0].tolist(), cut[plan_of].tolist(), strict=True):
        field = book.plans.pieced[number]
        texts = batch.messages.contents if field.origin is Origin.CONTENT else batch.messages.reasoning
        own = texts.take(firsts[[place]] + field.message)
        rows = [[applied(own, book.table.operations[one]) for one in row] for row in field.showings]
        best = max(sum(int(left.characters()[0]) for left in row) for row in rows)
        stripped[place] += max(int(own.characters()[0]) - best, 0)


def _characters_lost(texts: Texts, left: Texts) -> Ints:
    """How many characters are missing; where texts are cut out of the first ones, only what was cut off is read."""
    if left.data is not texts.data:
        lost: Ints = np.maximum(texts.characters() - left.characters(), 0)
        return lost
    heads = Texts(texts.data, texts.starts, left.starts - texts.starts)
    stops = left.starts + left.lengths
    tails = Texts(texts.data, stops, texts.starts + texts.lengths - stops)
    return heads.characters() + tails.characters()


def _render_prompts(batch: Conversations, bound: BoundTemplate) -> Rendered:
    """Every conversation up to where an answer begins, one by one."""
    table = PlanTable(arguments_are_text=True)
    rows = []
    for index in range(len(batch)):
        fixed = [
            item if hasattr(item, "ids") else item._replace(expression=None)
            for item in bound.write_prompt(batch[index])
        ]
        rows.append(table.add(fixed))
    every = np.arange(len(batch), dtype=np.int64)
    tokens = fill(
        table, np.array(rows, dtype=np.int64), every, batch, bound.tokenizer, bound.book.computer(batch)
    ).tokens
    nothing = np.zeros(len(batch), dtype=np.int64)
    tokens = replace(  # the message that is still to come has a place, and no weight of its own
        tokens,
        message_offsets=tokens.message_offsets + np.arange(len(batch) + 1),
        message_weights=np.insert(tokens.message_weights, tokens.message_offsets[1:], np.float32(np.nan)),
    )
    return Rendered(
        tokens=tokens,
        kept=every,
        stripped=nothing,
        failed=(),
        turns=nothing,
        unstable=nothing,
        untrained=nothing,
        appended=nothing,
    )
