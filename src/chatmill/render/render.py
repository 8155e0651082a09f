"""Renders batches of conversations into labelled-ready tokens with one template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.render.emitter import Emitter
from chatmill.render.registry import bind
from chatmill.render.template import Template
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
    """
    bound = template if isinstance(template, Template) else bind(template, tokenizer)
    out = Emitter(bound.table)
    kept: list[int] = []
    failed: list[tuple[int, RecordError]] = []
    for index, conversation in enumerate(conversations):
        try:
            bound.check(conversation)
            bound.emit(conversation, out)
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
            bound.emit_generation_prompt(conversation, out)
        weights = [message.weight for message in conversation.messages]
        out.end_conversation([*weights, None] if add_generation_prompt else weights)
        kept.append(index)
    tokens, stripped = out.finish(bound.tokenizer)
    return Rendered(tokens=tokens, kept=np.array(kept, dtype=np.int64), stripped=stripped, failed=tuple(failed))
