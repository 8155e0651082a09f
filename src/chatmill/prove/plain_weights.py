"""Weights of parts of an answer, from plain Jinja alone: letters at the ends of each part show where it comes out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Message
from chatmill.core.weight_spans import ARGUMENTS, CONTENT, REASONING, WeightSpan
from chatmill.prove.answers import PlainAnswer, PlainIds, plain_answer
from chatmill.prove.plain import PlainRecord
from chatmill.prove.rows import covered_characters
from chatmill.render.model_template import ModelTemplate

Field = tuple[str, int]
"""A field of a message, and the call whose arguments these are."""


def part_weights(
    chat: ModelTemplate, record: PlainRecord, index: int, answer: PlainAnswer, ids: PlainIds
) -> NDArray[np.float64] | None:
    """Return the weight of each token of a row, by the parts of one answer in it; NaN for tokens that do not tell.

    White space at the ends of a field may be the template's or the record's: its tokens do not tell. None where a
    letter does not come out, or changes anything else.
    """
    text = answer.text.text
    places = _places(chat, record, index, text)
    if places is None or not ids.pieces:
        return None
    message = record.messages[index]
    weights = np.full(len(text), 1.0 if message.weight is None else message.weight)
    for span in message.spans:
        begin, end = places[span.field, span.call, span.begin], places[span.field, span.call, span.end]
        weights[begin:end] = span.weight
    for span in message.spans:
        field = _text_of(message, (span.field, span.call))
        start, stop = places[span.field, span.call, span.begin], places[span.field, span.call, span.end]
        while not field[: span.begin].strip() and start > 0 and text[start - 1].isspace():
            start -= 1
            weights[start] = np.nan
        while not field[span.end :].strip() and stop < len(text) and text[stop].isspace():
            weights[stop] = np.nan
            stop += 1
    found = np.full(len(ids.ids), 1.0 if message.weight is None else message.weight)
    firsts = [*(piece.first for piece in ids.pieces[1:]), len(ids.ids)]
    for piece, following in zip(ids.pieces, firsts, strict=True):
        tokens = ids.ids[piece.first : following]
        if piece.place >= len(text):
            break
        for number, covered in enumerate(covered_characters(piece.text, tokens, chat.tokenizer), piece.first):
            begin, end = (piece.place + max(edge - piece.prefix, 0) for edge in (covered.start, covered.stop))
            if number < following and begin < end <= len(text):
                found[number] = weights[begin:end].min()
    return found


def _places(chat: ModelTemplate, record: PlainRecord, index: int, text: str) -> dict[tuple[str, int, int], int] | None:
    """Return where the ends of all parts are in the text through an answer, by field, call and character."""
    message = record.messages[index]
    fields = sorted({(span.field, span.call) for span in message.spans})
    letters = record.letters(len(fields))
    if len(letters) < len(fields):
        return None
    edges = {field: _edges(message.spans, field, _text_of(message, field)) for field in fields}
    marked = message
    for field, letter in zip(fields, letters, strict=True):
        marked = _with_text(marked, field, _marked(_text_of(message, field), letter, edges[field].values()))
    changed = record.with_message(index, marked)
    shown = plain_answer(changed, changed.messages, index, chat.stops, chat.given)
    if not isinstance(shown, PlainAnswer):
        return None
    without, at = "", dict[str, list[int]]()
    for character in shown.text.text:
        if character in letters:
            at.setdefault(character, []).append(len(without))
        else:
            without += character
    if without != text:
        return None
    found: dict[tuple[str, int, int], int] = {}
    for field, letter in zip(fields, letters, strict=True):
        inserted = sorted(set(edges[field].values()))
        if len(at.get(letter, ())) != len(inserted):
            return None
        shown_at = dict(zip(inserted, at[letter], strict=True))
        found |= {(*field, edge): shown_at[place] for edge, place in edges[field].items()}
    return found


def _edges(spans: Sequence[WeightSpan], field: Field, text: str) -> dict[int, int]:
    """Return where a letter is put for each end of a part: not into white space around the text, which may be cut."""
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    own = [span for span in spans if (span.field, span.call) == field]
    return {edge: min(max(edge, first), last) for span in own for edge in (span.begin, span.end)}


def _marked(text: str, letter: str, places: Collection[int]) -> str:
    """Return a text with a letter in some places."""
    for place in sorted(set(places), reverse=True):
        text = text[:place] + letter + text[place:]
    return text


def _text_of(message: Message, field: Field) -> str:
    name, call = field
    if name == ARGUMENTS:
        return message.tool_calls[call].arguments
    return message.content if name == CONTENT else message.reasoning or ""


def _with_text(message: Message, field: Field, text: str) -> Message:
    name, call = field
    if name == REASONING:
        return message._replace(reasoning=text)
    if name == CONTENT:
        return message._replace(content=text)
    calls = list(message.tool_calls)
    calls[call] = calls[call]._replace(arguments=text)
    return message._replace(tool_calls=tuple(calls))
