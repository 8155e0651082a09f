"""What the rows of a record must hold, from plain Jinja alone: for every answer its prompt, its text and its stop.

P(i) is the rendering of the messages before i with the generation prompt, A(i) that of the messages up to i, F that of
all messages. The answer of i is what A(i) has behind P(i), through the first stop that the template writes there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from chatmill.core.conversation import Message, Role
from chatmill.prove.plain import PlainRecord, PlainText
from chatmill.render.model_template import ModelTemplate
from chatmill.render.sequence_items import WHITE_SPACE

NEXT = "Next."
"""A message behind an answer, for templates whose next header writes the stop."""


class PlainAnswer(NamedTuple):
    """An answer."""

    text: PlainText
    """A(i) through its stop."""
    begin: int
    """The size of P(i)."""
    is_appended: bool
    """The stop is one that the header of a next message writes."""


class NotKnown(NamedTuple):
    """Why plain Jinja does not tell."""

    why: str


def plain_answer(
    record: PlainRecord, messages: Sequence[Message], index: int, stops: Collection[str]
) -> PlainAnswer | str | NotKnown:
    """The answer of a message; what is wrong where it has none; or that it cannot be known."""
    prompt, ended = record.rendering(index, prompt=True), record.rendering(index + 1, prompt=False)
    if isinstance(prompt, str) or isinstance(ended, str):
        return f"plain Jinja refuses it: {prompt if isinstance(prompt, str) else ended}"
    unknown = prompt.unknown or ended.unknown
    if unknown:
        return NotKnown(unknown)
    begin = len(prompt.text)
    if not ended.text.startswith(prompt.text):
        return "plain Jinja does not write its prompt as history"
    stop = next((token for token in ended.tokens if token.start >= begin and token.name in stops), None)
    if stop is not None:
        return PlainAnswer(ended.cut(stop.stop), begin, False)
    appended = _stop_of_next(record, messages, index, ended, stops)
    if appended is None:
        return "plain Jinja writes no stop behind it"
    return PlainAnswer(ended.cut(len(ended.text), appended), begin, True)


def _stop_of_next(
    record: PlainRecord, messages: Sequence[Message], index: int, ended: PlainText, stops: Collection[str]
) -> str | None:
    """The stop that the header of a next message writes behind an answer: where it ends most like A(i) does."""
    following = [Message(Role.USER, NEXT)]
    if messages[index].tool_calls:
        call = messages[index].tool_calls[-1]
        following.insert(0, Message(Role.TOOL, NEXT, tool_call_id=call.id, name=call.name))
    for message in following:
        longer = record.followed(index + 1, message)
        if isinstance(longer, str):
            continue
        limit = longer.text.rfind(NEXT)
        alike = [
            (_common_end(longer.text[: token.start], ended.text), token.start, token.name)
            for token in longer.tokens
            if token.name in stops and token.start < limit
        ]
        best = max(alike, default=(0, 0, ""))
        if best[0]:
            return best[2]
    return None


def _common_end(one: str, other: str) -> int:
    size = min(len(one), len(other))
    return next((k for k in range(size) if one[-1 - k] != other[-1 - k]), size)


class PlainIds(NamedTuple):
    """A text as ids."""

    ids: list[int]
    tokens_at: Mapping[int, int]
    """How many tokens come before a character, for those where tokens are cut."""


def encoded(chat: ModelTemplate, text: PlainText, breaks: Collection[int]) -> PlainIds:
    """The ids of a rendering: tokens of the template by name, all else as text, cut where a model starts to write."""
    special, rules = set(chat.tokenizer.special_tokens), chat.rules
    tokens = {found.start: found for found in text.tokens}
    places = sorted({0, len(text.text), *breaks, *(place for found in text.tokens for place in found[:2])})
    ids: list[int] = []
    tokens_at = {0: 0}
    strips, wants_prefix = False, rules.prefix is not None
    for start, stop in pairwise(places):
        piece, token = text.text[start:stop], tokens.get(start)
        if token is not None and token.name in special:
            strips = rules.stripping.get(token.name, (False, False))[1]
            wants_prefix = rules.prefix is not None and rules.prefix.everywhere
            ids.append(chat.tokenizer.control(token.name))
            tokens_at[stop] = len(ids)
            continue
        if strips:
            piece = piece.lstrip(WHITE_SPACE)
        behind = tokens.get(stop)
        if behind is not None and rules.stripping.get(behind.name, (False, False))[0]:
            piece = piece.rstrip(WHITE_SPACE)
        if piece:
            strips = False
            if wants_prefix and rules.prefix is not None and not piece.startswith(rules.prefix.unless):
                piece = rules.prefix.text + piece
            wants_prefix = False
        ids += chat.tokenizer.encode(piece) if piece else []
        tokens_at[stop] = len(ids)
    return PlainIds(ids, tokens_at)
