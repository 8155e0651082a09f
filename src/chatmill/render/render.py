"""Renders conversations: finds the plan of each, and writes all rows at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.texts import Texts
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.render.bound import BoundTemplate
from chatmill.render.fill import applied, fill
from chatmill.render.plan_table import Origin, PlanTable, RecordPlan
from chatmill.render.registry import bind, template_mistake
from chatmill.tokenizer.protocol import Tokenizer

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
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
        plans, failed = bound.book.find(batch)
    except Exception as error:
        if (mistake := template_mistake(error)) is not None:
            raise mistake from error
        raise
    if failed and not collect_failures:
        raise failed[0][1]
    chosen = [index for index, plan in enumerate(plans) if plan is not None]
    found = [plan for plan in plans if plan is not None]
    rows = np.array([row for plan in found for row in plan.rows], dtype=np.int64)
    counts = np.array([len(plan.rows) for plan in found], dtype=np.int64)
    kept = np.repeat(np.array(chosen, dtype=np.int64), counts)
    tokens = fill(bound.book.table, rows, kept, batch, bound.tokenizer, bound.book.computer(batch))
    firsts = np.cumsum(counts) - counts
    noted = np.array([plan.counts for plan in found], dtype=np.int64).reshape(-1, 4)
    per_row = np.zeros((len(rows), 5), dtype=np.int64)
    per_row[firsts, :4] = noted
    per_row[firsts, 4] = _stripped(batch, np.array(chosen, dtype=np.int64), found, bound.book.table)
    return Rendered(
        tokens=tokens,
        kept=kept,
        stripped=per_row[:, 4],
        failed=tuple(failed),
        turns=per_row[:, 0],
        unstable=per_row[:, 1],
        untrained=per_row[:, 2],
        appended=per_row[:, 3],
    )


def _stripped(batch: Conversations, chosen: Ints, plans: Sequence[RecordPlan], table: PlanTable) -> Ints:
    """Characters of contents and reasoning that a conversation's rows do not show."""
    stripped = np.zeros(len(chosen), dtype=np.int64)
    hidden = [(number, *field) for number, plan in enumerate(plans) for field in plan.hidden]
    for origin, texts in ((Origin.CONTENT, batch.messages.contents), (Origin.REASONING, batch.messages.reasoning)):
        mine = np.array([(n, message) for n, field, message in hidden if field is origin], dtype=np.int64).reshape(
            -1, 2
        )
        if len(mine):
            places = batch.offsets[chosen[mine[:, 0]]] + mine[:, 1]
            np.add.at(stripped, mine[:, 0], texts.take(places).characters())
        _count_trimmed(stripped, batch, chosen, plans, table, origin, texts)
    return stripped


def _count_trimmed(
    stripped: Ints,
    batch: Conversations,
    chosen: Ints,
    plans: Sequence[RecordPlan],
    table: PlanTable,
    origin: Origin,
    texts: Texts,
) -> None:
    """Add what string operations take away from texts that are shown; of several rows, what the best one lacks."""
    by_operations: dict[int, list[tuple[int, int]]] = {}
    for number, plan in enumerate(plans):
        for field in plan.trimmed:
            if field.origin is not origin:
                continue
            if field.showings[1:] or field.showings[0][1:]:
                own = texts.take(batch.offsets[chosen[[number]]] + field.message)
                rows = [[applied(own, table.operations[one]) for one in row] for row in field.showings]
                best = max(sum(int(left.characters()[0]) for left in row) for row in rows)
                stripped[number] += max(int(own.characters()[0]) - best, 0)
            else:
                by_operations.setdefault(field.showings[0][0], []).append((number, field.message))
    for operations, pairs in by_operations.items():
        mine = np.array(pairs, dtype=np.int64)
        own = texts.take(batch.offsets[chosen[mine[:, 0]]] + mine[:, 1])
        left = applied(own, table.operations[operations])
        np.add.at(stripped, mine[:, 0], _characters_lost(own, left))


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
    tokens = fill(table, np.array(rows, dtype=np.int64), every, batch, bound.tokenizer, bound.book.computer(batch))
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
