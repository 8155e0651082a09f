"""A document before its texts are known: control ids, and pieces of text whose parts are fixed or taken from a record.

A *piece* is encoded as a whole: a token may cross the parts of a piece, and belongs to the part it starts in. Special
tokens are found in template text alone. Everything that can be encoded once per shape is encoded here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from chatmill.core.kinds import PICTURE
from chatmill.core.texts import Texts
from chatmill.images.rule import PictureRule
from chatmill.render.jinja.expressions import Expression, Notes
from chatmill.render.jinja.labels import NOBODY, Span
from chatmill.render.jinja.stops import any_of
from chatmill.tokenizer.tokenizer import Tokenizer

WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""White space as `tokenizers` sees it next to tokens that take it away."""


class Ids(NamedTuple):
    """Fixed ids of one kind."""

    ids: tuple[int, ...]
    kind: int
    message: int


class TextPart(NamedTuple):
    """A part of a piece."""

    text: str
    """The text of the record that the document was made for."""
    expression: Expression | None
    """None for fixed text."""
    kind: int
    message: int
    opens: bool
    """Whether a new piece begins here."""


class TokenRules:
    """What a tokenizer says about template text: which tokens it may write, and which of them take white space away."""

    def __init__(self, tokenizer: Tokenizer, pictures: PictureRule | None = None) -> None:
        """Template text may write every control token; record text those that the tokenizer finds by itself.

        Where the rule for pictures is known, their placeholders become what the model's processor writes, but for
        the number of tokens, which differs from picture to picture.
        """
        self.tokenizer, self._pictures = tokenizer, pictures
        self.picture_names = frozenset() if pictures is None else pictures.names
        self.placeholders = () if pictures is None else (pictures.placeholder,)
        """What template text writes in the place of a picture."""
        self.pattern = any_of(tuple(tokenizer.special_tokens))
        """Matches the tokens that template text writes."""
        self.borders = any_of(tuple(name for name in tokenizer.special_tokens if name not in self.picture_names))
        """Matches those that may begin or end a message: not those of pictures."""
        self.stripping, self.prefix = tokenizer.stripping, tokenizer.prefix
        self.depends_on_texts = self.prefix is not None or bool(self.stripping)
        """Whether the items of a stretch depend on its texts."""
        self.looks_back = any(before for before, _ in self.stripping.values())
        """Whether a token takes white space away from what was written before it."""
        self.first = Carry(wants_prefix=self.prefix is not None)

    def template_text(self, text: str) -> str:
        """Template text as the model's processor leaves it."""
        rule = self._pictures
        if rule is None or rule.placeholder not in text:
            return text
        return text.replace(rule.placeholder, rule.written)


class Carry(NamedTuple):
    """What one stretch of a document leaves to the next."""

    literals: tuple[Span, ...] = ()
    """Template text that the next stretch may go on with."""
    strips_next: bool = False
    wants_prefix: bool = False
    is_open: bool = False
    """Whether the piece of text before goes on."""

    def moved(self, by: int) -> Carry:
        """Return the same, as it is to a message that many places further on."""
        return self._replace(
            literals=tuple(
                span if span.message == NOBODY else span._replace(message=span.message - by) for span in self.literals
            )
        )


def items_of(
    spans: Sequence[Span], rules: TokenRules, notes: Notes, carry: Carry, *, ends: bool = False
) -> tuple[list[Ids | TextPart], Carry]:
    """Return the items of a stretch of a document after what comes before it, and what it leaves to the next."""
    writer = _Writer(rules, notes, carry)
    literals = list(carry.literals)
    for span in spans:
        if literals and (span.expression is not None or span.breaks):
            writer.literals(literals)
            literals = []
        if span.breaks:
            writer.end_piece()
        if span.expression is None:
            literals.append(span)
        else:
            writer.part(span.text, span.expression, span.kind, span.message)
    if ends:
        writer.literals(literals)
        writer.end_piece()
        return writer.items, Carry()
    return writer.items, writer.left(tuple(literals))


class _Writer:
    """Collects items; a piece is closed by a control token or by a break."""

    def __init__(self, rules: TokenRules, notes: Notes, carry: Carry) -> None:
        self._rules, self._notes = rules, notes
        self.items: list[Ids | TextPart] = []
        self._piece: list[TextPart] = []
        self._strips_next, self._wants_prefix, self._is_open = carry[1:]

    def literals(self, spans: Sequence[Span]) -> None:
        """Template text in one stretch; control tokens may lie across its spans."""
        texts = tuple(self._rules.template_text(span.text) for span in spans)
        for number, text, is_control in cuts_of(texts, self._rules.pattern):
            _, _, kind, message, _ = spans[number]
            if is_control:
                self._control(text, kind, message)
            else:
                self.part(text, None, kind, message)

    def part(self, text: str, expression: Expression | None, kind: int, message: int) -> None:
        """Add one part to the open piece."""
        if self._strips_next:
            text, expression = self._stripped("lstrip", text, expression)
            if text:
                self._strips_next = False
            elif expression is None:
                return
        self._piece.append(TextPart(text, expression, kind, message, False))

    def _stripped(self, method: str, text: str, expression: Expression | None) -> tuple[str, Expression | None]:
        """A part next to a token that takes white space away; later records must agree on whether anything is left."""
        left: str = getattr(text, method)(WHITE_SPACE)
        if expression is None:
            return left, None
        applied = ("apply", method, (WHITE_SPACE,), expression)
        self._notes.note(("filled", applied), bool(left))
        return left, applied

    def _control(self, name: str, kind: int, message: int) -> None:
        before, behind = self._rules.stripping.get(name, (False, False))
        if before:
            while self._piece:
                last = self._piece.pop()
                text, expression = self._stripped("rstrip", last.text, last.expression)
                if text or expression is not None:
                    self._piece.append(last._replace(text=text, expression=expression))
                if text:
                    break
                if expression is not None:
                    self._piece.pop()
        self.end_piece()
        self._strips_next = behind
        self._wants_prefix = self._rules.prefix is not None and self._rules.prefix.everywhere
        kind = PICTURE if name in self._rules.picture_names else kind
        self.items.append(Ids((self._rules.tokenizer.control(name),), kind, message))

    def end_piece(self) -> None:
        """Close the piece; one without a record's text is encoded at once."""
        if self._is_open or any(part.expression is not None for part in self._piece):
            self._flush()
        elif self._piece:
            piece = self._prefixed(self._piece)
            self.items += encoded_piece(piece, self._rules.tokenizer)
        self._piece, self._is_open = [], False

    def _flush(self) -> None:
        """Write the parts of a piece that may go on."""
        for part in self._prefixed(self._piece):
            self.items.append(part._replace(opens=not self._is_open))
            self._is_open = True
        self._piece = []

    def left(self, literals: tuple[Span, ...]) -> Carry:
        """Write what is open, and return what is left to the next stretch."""
        self._flush()
        return Carry(literals, self._strips_next, self._wants_prefix, self._is_open)

    def _prefixed(self, piece: list[TextPart]) -> list[TextPart]:
        """A piece with what its vocabulary puts in front of text; the prefix belongs to the first text there is."""
        prefix = self._rules.prefix
        if prefix is None or not self._wants_prefix:
            return piece
        for part in piece:
            self._notes.filled(part.expression, bool(part.text))
            if not part.text:
                continue
            self._wants_prefix = False
            begins = part.text.startswith(prefix.unless)
            if part.expression is not None and prefix.unless:
                self._notes.note(("method", part.expression, "startswith", (prefix.unless,)), begins)
            return piece if begins else [TextPart(prefix.text, None, part.kind, part.message, False), *piece]
        return piece


def encoded_piece(piece: Sequence[TextPart], tokenizer: Tokenizer) -> Iterator[Ids]:
    """Fixed text as ids; a token belongs to the part it starts in."""
    ids, cuts = _encoded(tuple(part.text for part in piece), tokenizer)
    for part, first, last in zip(piece, cuts[:-1], cuts[1:], strict=True):
        if first < last:
            yield Ids(ids[first:last], part.kind, part.message)


@lru_cache(maxsize=8192)
def _encoded(parts: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of parts as one text, and where each part begins among them; templates write the same few texts."""
    text = Texts.of(["".join(parts)])
    encoded = tokenizer.encode_batch(text)
    prefixes = np.cumsum([len(part.encode()) for part in parts[:-1]], dtype=np.int64)
    inner = tokenizer.byte_points(encoded, np.zeros(len(prefixes), dtype=np.int64), prefixes, text)
    return tuple(encoded[0].tolist()), (0, *inner.tolist(), len(encoded[0]))


class Cut(NamedTuple):
    """A stretch of template text."""

    number: int
    """The text that it begins in."""
    text: str
    is_control: bool


@lru_cache(maxsize=8192)
def cuts_of(texts: tuple[str, ...], controls: re.Pattern[str]) -> tuple[Cut, ...]:
    """Template text cut at its control tokens."""
    starts = [0, *accumulate(map(len, texts))]
    text = "".join(texts)
    cuts: list[Cut] = []
    at = 0
    for match in controls.finditer(text):
        cuts += _between(text, starts, at, match.start())
        cuts.append(Cut(bisect_right(starts, match.start()) - 1, match.group(), True))
        at = match.end()
    return (*cuts, *_between(text, starts, at, len(text)))


def _between(text: str, starts: Sequence[int], start: int, stop: int) -> Iterator[Cut]:
    for number, (first, last) in enumerate(pairwise(starts)):
        if max(first, start) < min(last, stop):
            yield Cut(number, text[max(first, start) : min(last, stop)], False)
