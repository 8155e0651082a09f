"""Overflow and pictures: no episode has a part of a picture, nor a part of its message without it."""

from __future__ import annotations

from chatmill.core.kinds import RoleCode, roles_of
from chatmill.core.tokens import Tokens
from chatmill.pack.windows import KeptSpan


def without_cut_pictures(tokens: Tokens, index: int, episodes: list[list[KeptSpan]]) -> list[list[KeptSpan]]:
    """Move the borders of an over-long conversation's spans out of the messages that show pictures.

    A span that would end in such a message, before its last picture has ended, ends before the message. One that would
    begin in the midst of the message begins after it.
    """
    messages = _pictured_messages(tokens, index)
    if not messages:
        return episodes
    moved = [[_moved(span, messages) for span in spans] for spans in episodes]
    return [[span for span in spans if span.start < span.end] for spans in moved]


def _moved(span: KeptSpan, messages: list[tuple[int, int, int]]) -> KeptSpan:
    start, end = span.start, span.end
    for first, shown, last in messages:
        if first < start < last:
            start = last
        if first < end < shown:
            end = first
    return KeptSpan(start, end, span.injected)


def _pictured_messages(tokens: Tokens, index: int) -> list[tuple[int, int, int]]:
    """Find messages with pictures: first token, end of the last picture, and end of each."""
    a, b = tokens.document_runs[index : index + 2].tolist()
    is_picture = roles_of(tokens.run_kinds[a:b]) == RoleCode.IMAGE
    if not is_picture.any():
        return []
    owners = tokens.run_messages[a:b]
    starts = tokens.run_offsets[a:b] - tokens.offsets[index]
    ends = tokens.run_offsets[a + 1 : b + 1] - tokens.offsets[index]
    borders = []
    for message in sorted(set(owners[is_picture].tolist())):
        inside = owners == message
        borders.append((int(starts[inside].min()), int(ends[inside & is_picture].max()), int(ends[inside].max())))
    return borders
