"""What the rows of a record must hold, from plain Jinja alone: for every answer its prompt, its text and its stop.

P(i) is the rendering of the messages before i with the generation prompt, A(i) that of the messages up to i, F that of
all messages. The answer of i is what A(i) has after P(i), through the first stop that the template writes there. Where
the same generation prompt follows that stop, a model is asked again: it answers what is after, through the next stop.
Where A(i) writes the messages before i in another way than P(i) does, the answer is what A(i) has after the words that
P(i) ends with, from the end of the last message before i on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from chatmill.core.conversation import Message, Role
from chatmill.prove.pictures import processed
from chatmill.prove.plain import PlainRecord, PlainText, SpelledToken
from chatmill.prove.sampled_answers import prefers_sampled, sampled_answer
from chatmill.render.document_items import WHITE_SPACE
from chatmill.render.jinja.options import AnswerText, TemplateOptions
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.model_template import ModelTemplate

NEXT = "Next."
"""A message after an answer, for templates whose next header writes the stop."""


class PlainAnswer(NamedTuple):
    """An answer."""

    text: PlainText
    """P(i) and the answer through its stop, which is A(i) for most templates."""
    begin: int
    """The size of P(i)."""
    is_appended: bool
    """The stop is one that the header of a next message writes."""
    pauses: tuple[tuple[int, int], ...] = ()
    """What a server writes between two answers of one message: from after a stop to after the repeated prompt."""

    @property
    def begins(self) -> tuple[int, ...]:
        """Where a model starts to write."""
        return (self.begin, *(behind for _, behind in self.pauses))

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """What a model writes, as characters of the text."""
        return tuple(zip(self.begins, (*(stop for stop, _ in self.pauses), len(self.text.text)), strict=True))


def plain_answer(
    record: PlainRecord, messages: Sequence[Message], index: int, stop_tokens: StopTokens, given: TemplateOptions
) -> PlainAnswer | str | None:
    """Return the answer of a message; what is wrong where it has none; None where plain Jinja does not tell.

    `given` says whether it may be one that history does not have.
    """
    stops = stop_tokens.names
    prompt, ended = record.rendering(index, prompt=True), record.rendering(index + 1, prompt=False)
    if isinstance(prompt, str) or isinstance(ended, str):
        return f"plain Jinja refuses it: {prompt if isinstance(prompt, str) else ended}"
    if prompt.unknown or ended.unknown:
        return None
    begin = len(prompt.text)
    answered: PlainText | str | None = ended
    if not ended.text.startswith(prompt.text):
        answered = _after_prompt(record, messages, index, prompt, ended)
    is_found = isinstance(answered, PlainText)
    if given.answers is not AnswerText.HISTORY and (
        not is_found or prefers_sampled(record, messages[index], index, given)
    ):
        sampled = sampled_answer(record, messages[index], index, prompt, ended, given)
        answered = answered if is_found and not isinstance(sampled, PlainText) else sampled
    if not isinstance(answered, PlainText):
        return answered
    ended = answered
    behind = [token for token in ended.tokens if token.start >= begin]
    stop = next((token for token in behind if token.name in stops), None)
    if messages[index].channel in ("analysis", "commentary") and not messages[index].tool_calls:
        # A turn of Harmony goes on after these channels: what ends such a message is the last token of all.
        stop = next((token for token in reversed(behind) if token.name in (*stops, *stop_tokens.in_history)), None)
    if stop is not None:
        pauses: list[tuple[int, int]] = []
        prompt_text = _asked_with(record, messages, index)
        while prompt_text:
            at = len(ended.text) - len(ended.text[stop.stop :].lstrip())
            following = [
                token for token in ended.tokens if token.start >= at + len(prompt_text) and token.name in stops
            ]
            if not following or not ended.text.startswith(prompt_text, at):
                break
            pauses.append((stop.stop, at + len(prompt_text)))
            stop = following[0]
        return PlainAnswer(ended.cut(stop.stop), begin, False, tuple(pauses))
    appended = _stop_of_next(record, messages, index, ended, stops)
    if appended is None:
        return "plain Jinja writes no stop after it"
    blank, stop_text = appended
    longer = ended._replace(text=ended.text + blank)
    return PlainAnswer(longer.cut(len(longer.text), stop_text), begin, True)


def _after_prompt(
    record: PlainRecord, messages: Sequence[Message], index: int, prompt: PlainText, ended: PlainText
) -> PlainText | str | None:
    """P(i) and what A(i) writes after the same words, where A(i) writes the messages before i in another way.

    These words are what P(i) has after the end of the last message before i: a letter that is put there shows it. None
    where it does not.
    """
    places = record.ends_of(index - 1, (index, True), (index + 1, False)) if index else None
    if places is None:
        return None
    closing = prompt.text[places[0] :]
    if not ended.text.startswith(closing, places[1]):
        return "plain Jinja does not write its prompt as history"
    begin, by = places[1] + len(closing), len(prompt.text) - places[1] - len(closing)
    tokens = (
        SpelledToken(token.start + by, token.stop + by, token.name) for token in ended.tokens if token.start >= begin
    )
    return PlainText(prompt.text + ended.text[begin:], (*prompt.tokens, *tokens))


def _asked_with(record: PlainRecord, messages: Sequence[Message], index: int) -> str:
    """Return the generation prompt that opened the turn a message is in: what asking for an answer adds to the text."""
    for count in range(index, -1, -1):
        prompt, prefix = record.rendering(count, prompt=True), record.rendering(count, prompt=False)
        if isinstance(prompt, str) or isinstance(prefix, str):
            return ""
        added = prompt.text.removeprefix(prefix.text).lstrip() if prompt.text.startswith(prefix.text) else ""
        if added or not count or messages[count - 1].role is not Role.ASSISTANT:
            return added
    return ""


def _stop_of_next(
    record: PlainRecord, messages: Sequence[Message], index: int, ended: PlainText, stops: Collection[str]
) -> tuple[str, str] | None:
    """Return the stop that the header of a next message writes after an answer: where it ends most like A(i) does.

    Before it, the white space that the header begins with.
    """
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
            (_common_end(longer.text[:end], ended.text), token.start, longer.text[end : token.start], token.name)
            for token in longer.tokens
            for end in range(len(longer.text[: token.start].rstrip()), token.start + 1)
            if token.name in stops and token.start < limit
        ]
        best = max(alike, default=(0, 0, "", ""))
        if best[0]:
            return best[2:]
    return None


def _common_end(first: str, other: str) -> int:
    size = min(len(first), len(other))
    return next((k for k in range(size) if first[-1 - k] != other[-1 - k]), size)


class PlainIds(NamedTuple):
    """A text as ids."""

    ids: list[int]
    tokens_at: Mapping[int, int]
    """How many tokens come before a character, for those where tokens are cut."""
    pieces: Sequence[EncodedPiece] = ()
    """The texts that were encoded, in order."""


class EncodedPiece(NamedTuple):
    """A text between special tokens."""

    first: int
    """Its first token."""
    place: int
    """Where it begins in the rendering."""
    text: str
    prefix: int
    """Characters that the vocabulary puts in front of it."""


def encoded(chat: ModelTemplate, text: PlainText, breaks: Collection[int]) -> PlainIds:
    """The ids of a rendering: tokens of the template by name, all else as text, cut where a model starts to write.

    A picture is one token, with the text around it that the model's processor writes.
    """
    rule = None if chat.expander is None else chat.expander.rule
    if rule is None or rule.written == rule.placeholder:
        return _encoded(chat, text, breaks)
    names = [SpelledToken(*match.span(), match.group()) for match in chat.rules.pattern.finditer(rule.written)]
    shown = [match.start for match in text.tokens if match.name == rule.placeholder]
    longer = len(rule.written) - len(rule.placeholder)
    moved = {place: place + longer * bisect_left(shown, place) for place in range(len(text.text) + 1)}
    tokens = _encoded(chat, processed(text, rule.placeholder, rule.written, names), [moved[place] for place in breaks])
    kept = {place: tokens.tokens_at[new] for place, new in moved.items() if new in tokens.tokens_at}
    return PlainIds(tokens.ids, kept)


def _encoded(chat: ModelTemplate, text: PlainText, breaks: Collection[int]) -> PlainIds:
    """Return the same without pictures."""
    special, rules = set(chat.tokenizer.special_tokens), chat.rules
    tokens = {spelled.start: spelled for spelled in text.tokens}
    places = sorted({0, len(text.text), *breaks, *(place for spelled in text.tokens for place in spelled[:2])})
    ids: list[int] = []
    tokens_at = {0: 0}
    pieces: list[EncodedPiece] = []
    strips, wants_prefix = False, rules.prefix is not None
    for start, stop in pairwise(places):
        piece, token = text.text[start:stop], tokens.get(start)
        if token is not None and token.name in special:
            strips = rules.stripping.get(token.name, (False, False))[1]
            wants_prefix = rules.prefix is not None and rules.prefix.everywhere
            ids.append(chat.tokenizer.control(token.name))
            tokens_at[stop] = len(ids)
            continue
        place, prefix = start, 0
        if strips:
            piece = piece.lstrip(WHITE_SPACE)
            place = stop - len(piece)
        behind = tokens.get(stop)
        if behind is not None and rules.stripping.get(behind.name, (False, False))[0]:
            piece = piece.rstrip(WHITE_SPACE)
        if piece:
            strips = False
            if wants_prefix and rules.prefix is not None and not piece.startswith(rules.prefix.unless):
                piece = rules.prefix.text + piece
                prefix = len(rules.prefix.text)
            wants_prefix = False
            pieces.append(EncodedPiece(len(ids), place, piece, prefix))
        ids += chat.tokenizer.encode(piece) if piece else []
        tokens_at[stop] = len(ids)
    return PlainIds(ids, tokens_at, pieces)
