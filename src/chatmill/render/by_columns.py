"""Writes conversations from the columns of a batch: plain messages all at once, the others one by one among them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from chatmill.core.batch import ConversationBatch
from chatmill.core.conversation import Role
from chatmill.core.tokens import offsets_of, ranges
from chatmill.render.emitter import Emitter
from chatmill.render.frames import Frame
from chatmill.render.template import Template
from chatmill.render.written import Ints, Written, grouped, merged, write_plain


def column_conversations(batch: ConversationBatch, template: Template) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which conversations of a batch can be written from its columns, and which messages in them are plain.

    The others are for `Template.emit`: those that are not in the columns, those that `Template.check` may refuse, and,
    unless the template writes single messages, those with more than plain messages.
    """
    plain = template.plain_messages(batch)
    chosen = batch.in_columns.copy()
    unknown = set(batch.roles) - template.roles
    if unknown:
        strange = np.array([role in unknown for role in batch.roles], dtype=np.bool_)
        chosen[batch.owners(np.flatnonzero(strange))] = False
    odd_calls = [place for place, m in batch.rich.items() if m.tool_calls and m.role is not Role.ASSISTANT]
    chosen[batch.owners(np.array(odd_calls, dtype=np.int64))] = False
    if not template.writes_single_messages:
        chosen[list(batch.tools)] = False
        chosen[batch.owners(np.flatnonzero(~plain))] = False
    return chosen, plain


def write_columns(
    batch: ConversationBatch, chosen: Ints, plain: NDArray[np.bool_], template: Template, frames: Mapping[Role, Frame]
) -> Written:
    """Write the chosen conversations; `plain` tells which messages of the batch are plain."""
    counts = np.diff(batch.offsets)[chosen]
    places = ranges(batch.offsets[chosen], counts)
    indexes = (np.arange(len(places)) - np.repeat(offsets_of(counts)[:-1], counts)).astype(np.int32)
    is_plain = plain[places]
    units, unit_indexes, unit_counts = places, indexes, counts
    with_tools = [number for number, conversation in enumerate(chosen.tolist()) if conversation in batch.tools]
    if with_tools:  # a system message takes them in; where there is none they are a unit of their own, of no message
        firsts = offsets_of(counts)[with_tools]
        systems = np.array([batch.roles[place] is Role.SYSTEM for place in places[firsts].tolist()], dtype=np.bool_)
        is_plain[firsts[systems]] = False
        alone = firsts[~systems]
        units, unit_indexes = np.insert(places, alone, -1), np.insert(indexes, alone, -1)
        is_plain = np.insert(is_plain, alone, False)
        unit_counts = counts.copy()
        unit_counts[np.array(with_tools)[~systems]] += 1
    if is_plain.all():
        written = write_plain(*_messages(batch, units), unit_indexes, frames)
    else:
        single = _write_single(batch, chosen, units, unit_indexes, unit_counts, ~is_plain, template)
        written = merged(
            single, write_plain(*_messages(batch, units[is_plain]), unit_indexes[is_plain], frames), is_plain
        )
    return grouped(written, offsets_of(unit_counts), counts)


def _messages(batch: ConversationBatch, places: Ints) -> tuple[list[Role], list[str]]:
    if len(places) == len(batch.roles):
        return batch.roles, batch.contents
    which = places.tolist()
    return [batch.roles[place] for place in which], [batch.contents[place] for place in which]


def _write_single(
    batch: ConversationBatch,
    chosen: Ints,
    units: Ints,
    indexes: NDArray[np.int32],
    counts: Ints,
    wanted: NDArray[np.bool_],
    template: Template,
) -> Written:
    """Let the template write the wanted units one by one."""
    out = Emitter(template.table)
    roles, bounds = batch.roles, batch.offsets.tolist()
    owners = np.repeat(chosen, counts)[wanted].tolist()
    for place, index, owner in zip(units[wanted].tolist(), indexes[wanted].tolist(), owners, strict=True):
        out.message(index)
        tools = batch.tools.get(owner)
        if tools is not None and index <= 0 and (index < 0 or roles[place] is Role.SYSTEM):
            template.emit_tools(tools, None if index < 0 else batch.contents[place], out)
        else:
            before = roles[place - 1] if index else None
            after = roles[place + 1] if place + 1 < bounds[owner + 1] else None
            template.emit_message(batch.message(place), before, after, out)
        out.end_conversation(())
    return out.written()
