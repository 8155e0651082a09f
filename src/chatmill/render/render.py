"""Renders batches of conversations into labelled-ready tokens with one template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.render.by_columns import column_conversations, write_columns
from chatmill.render.emitter import Emitter
from chatmill.render.layout import lay_out
from chatmill.render.registry import bind
from chatmill.render.template import Template
from chatmill.render.written import Written, merged
from chatmill.tokenizer.protocol import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Tokens of the conversations that could be rendered, in order, and the ones that could not."""

    tokens: Tokens
    kept: NDArray[np.int64]
    """Index of each rendered conversation in the input."""
    stripped: NDArray[np.int64]
    """Characters of each rendered conversation that the template chose not to show (see `Template.declares`)."""
    failed: tuple[tuple[int, RecordError], ...]
    """Input index and error of each conversation that the template refused; empty unless failures are collected."""


def render(
    conversations: Sequence[Conversation],
    template: Template | str,
    tokenizer: Tokenizer | None = None,
    *,
    collect_failures: bool = False,
    add_generation_prompt: bool = False,
) -> Rendered:
    """Render conversations; all their text is encoded in one call.

    `template` is a bound template, or a name or path that is bound to `tokenizer`. The first conversation that the
    template cannot write raises its `RecordError`; with `collect_failures` it is left out and reported instead.
    A `Conversations` is written from its columns, as far as the template can.
    """
    bound = template if isinstance(template, Template) else bind(template, tokenizer)
    if isinstance(conversations, Conversations) and bound.writes_columns and not add_generation_prompt:
        by_columns = column_conversations(conversations, bound)
        written, kept, failed = _emit(conversations, np.flatnonzero(~by_columns), bound, collect_failures)
        chosen = np.flatnonzero(by_columns)
        kept = np.sort(np.concatenate([chosen, kept]))
        batch = conversations if len(chosen) == len(conversations) else conversations.take(chosen)
        written = merged(written, write_columns(batch, bound), by_columns[kept])
    else:
        everything = np.arange(len(conversations))
        written, kept, failed = _emit(conversations, everything, bound, collect_failures, add_generation_prompt)
    tokens = lay_out(written, bound.table, bound.tokenizer)
    return Rendered(tokens=tokens, kept=kept, stripped=written.stripped, failed=failed)


def _emit(
    conversations: Sequence[Conversation],
    chosen: NDArray[np.int64],
    template: Template,
    collect_failures: bool,
    add_generation_prompt: bool = False,
) -> tuple[Written, NDArray[np.int64], tuple[tuple[int, RecordError], ...]]:
    """Let the template write conversations one by one; also which of them it wrote, and why not the others."""
    out = Emitter(template.table)
    kept: list[int] = []
    failed: list[tuple[int, RecordError]] = []
    for index in chosen.tolist():
        conversation = conversations[index]
        try:
            template.check(conversation)
            template.emit(conversation, out)
        except RecordError as error:
            error.record_id = error.record_id or conversation.id
            error.where = error.where or conversation.where
            if not collect_failures:
                raise
            out.discard_conversation()
            failed.append((index, error))
            continue
        if add_generation_prompt:
            out.message(len(conversation.messages))
            template.emit_generation_prompt(conversation, out)
        weights = [message.weight for message in conversation.messages]
        out.end_conversation([*weights, None] if add_generation_prompt else weights)
        kept.append(index)
    return out.written(), np.array(kept, dtype=np.int64), tuple(failed)
