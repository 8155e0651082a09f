"""Writes conversations from the columns of a batch, all of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.tokens import offsets_of
from chatmill.render.template import ROLE_CODES, Template
from chatmill.render.written import Written


def column_conversations(batch: Conversations, template: Template) -> NDArray[np.bool_]:
    """Which conversations of a batch can be written from its columns.

    The others are for `Template.emit`: those that `Template.check` may refuse, and those with a message that the
    template writes by `emit` alone.
    """
    messages = batch.messages
    known = np.zeros(len(RoleCode), dtype=np.bool_)
    known[[ROLE_CODES[role] for role in template.roles]] = True
    odd_calls = (messages.call_counts > 0) & (messages.roles != RoleCode.ASSISTANT)
    refused = ~(known[messages.roles] & template.column_messages(batch)) | odd_calls
    for special in (messages.channels, messages.recipients, messages.content_types, messages.structured):
        refused |= special.present
    chosen = np.ones(len(batch), dtype=np.bool_)
    chosen[batch.owners(np.flatnonzero(refused))] = False
    if not template.writes_tool_calls:
        chosen[batch.tools.lengths > 0] = False
    return chosen


def write_columns(batch: Conversations, template: Template) -> Written:
    """Write all conversations of a batch."""
    counts = np.diff(batch.offsets)
    out = template.write_messages(batch)
    indexes = np.arange(len(batch.messages)) - np.repeat(batch.offsets[:-1], counts)
    event_messages = np.repeat(indexes.astype(np.int32), np.diff(out.first))
    event_messages[out.of_no_message] = -1
    pieces, event_pieces = out.pieces()
    conversation_events = out.first[batch.offsets]
    return Written(
        events=out.frames,
        event_messages=event_messages,
        conversation_events=conversation_events,
        pieces=pieces,
        conversation_pieces=event_pieces[conversation_events],
        cuts=[],
        message_counts=counts,
        message_weights=batch.messages.weights.astype(np.float32),
        stripped=np.diff(offsets_of(out.stripped)[batch.offsets]),
    )
