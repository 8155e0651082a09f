"""Overflow and pictures: no episode has a part of a picture, nor a part of its message without it."""

from __future__ import annotations

from chatmill.core.kinds import RoleCode, roles_of
from chatmill.core.tokens import Tokens
from chatmill.pack.windows import KeptSpan


def without_cut_pictures(tokens: Tokens, index: int, episodes: list[list[KeptSpan]]) -> list[list[KeptSpan]]:
    """Episodes of an over-long conversation whose spans begin and end outside of the messages that show pictures.

    A span that would end in such a message, before its last picture has ended, ends before the message. One that would
    begin there begins after the message.
    """
    messages = _pictured_messages(tokens, index)
    if not messages:
        return episodes
    made = [[_moved(span, messages) for span in spans] for spans in episodes]
    kept = [[span for span in spans if span.start < span.end] for spans in made]
    return [spans for spans in kept if spans]


def _moved(span: KeptSpan, messages: list[tuple[int, int, int]]) -> KeptSpan:
    start, end = span.start, span.end
    for first, shown, last in messages:
        if first < start < shown:
            start = last
        if first < end < shown:
            end = first
    return KeptSpan(start, end, span.injected)


def _pictured_messages(tokens: Tokens, index: int) -> list[tuple[int, int, int]]:
    """Of each message with pictures: its first token, the end of its last picture, and its own end."""
    a, b = tokens.sequence_runs[index : index + 2].tolist()
    is_picture = roles_of(tokens.run_kinds[a:b]) == RoleCode.IMAGE
    if not is_picture.any():
        return []
    owners = tokens.run_messages[a:b]
    starts = tokens.run_offsets[a:b] - tokens.offsets[index]
    ends = tokens.run_offsets[a + 1 : b + 1] - tokens.offsets[index]
    found = []
    for message in sorted(set(owners[is_picture].tolist())):
        own = owners == message
        found.append((int(starts[own].min()), int(ends[own & is_picture].max()), int(ends[own].max())))
    return found
