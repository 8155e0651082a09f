"""The emitter: a template writes control ids and text into it, in order, and says what each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chatmill.core.conversation import Message, Role
from chatmill.render.jinja.traced import atoms_of, plain_text
from chatmill.render.row_items import Ids, TextPart, encoded_piece
from chatmill.tokenizer.tokenizer import Tokenizer

Literal = Sequence[int]
"""A fixed sequence of ids that a template made once: control tokens, encoded headers."""


class Frame(NamedTuple):
    """What is written around one text: fixed ids before and behind it, and fixed text that is encoded with it."""

    kind: int
    before: Sequence[tuple[Literal, int]] = ()
    """Literals and their kinds."""
    head: tuple[str, int] = ("", 0)
    """Text that is encoded together with the text behind it, and its kind."""
    tail: tuple[str, int] = ("", 0)
    after: Sequence[tuple[Literal, int]] = ()


class Emitter:
    """Takes what a template writes for one conversation. Control tokens that a text spells stay text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing is written yet."""
        self.items: list[Ids | TextPart] = []
        self.stripped = 0
        """Ignored: what no row shows is counted for every template alike. Templates of version 0.1 add to it."""
        self._tokenizer, self._message = tokenizer, -1

    def message(self, index: int) -> None:
        """What follows belongs to this message of the conversation; -1 for no message."""
        self._message = index

    def put(self, literal: Literal, kind: int) -> None:
        """Write a literal."""
        if literal:
            self.items.append(Ids(tuple(literal), kind, self._message))

    def text(self, text: str, kind: int) -> None:
        """Write a text as a piece of its own."""
        self.joined([(text, kind)])

    def framed(self, frame: Frame, text: str) -> None:
        """Write a text in a frame."""
        for literal, kind in frame.before:
            self.put(literal, kind)
        self.joined([part for part in (frame.head, (text, frame.kind), frame.tail) if part[0] or part[0] is text])
        for literal, kind in frame.after:
            self.put(literal, kind)

    def framed_messages(self, messages: Sequence[Message], frames: Mapping[Role, Frame]) -> None:
        """Write messages 0, 1, ... of a conversation, the content of each in the frame of its role."""
        for index, message in enumerate(messages):
            self.message(index)
            self.framed(frames[message.role], message.content)

    def joined(self, parts: Sequence[tuple[str, int]]) -> None:
        """Write several (text, kind) parts as one piece; a token belongs to the part it starts in."""
        piece: list[TextPart] = []
        for text, kind in parts:
            at, whole = 0, plain_text(text)
            for size, expression in atoms_of(text):
                piece.append(TextPart(whole[at : at + size], expression, kind, self._message, not piece))
                at += size
        if any(part.expression is not None for part in piece):
            self.items += piece
        elif piece:
            self.items += encoded_piece(piece, self._tokenizer)
