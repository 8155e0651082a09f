"""Reads the text of an answer by a grammar: reasoning, content and calls, with the calls that are broken."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chatmill.core.conversation import ARGUMENTS_FIRST
from chatmill.rollouts.grammar import END, START, Edge, Grammar, Slot, SlotKind, call_mark
from chatmill.rollouts.types import CallStatus

NAME = re.compile(r"[^\s\"'<>{}()\[\],|]+")
"""What the name of a tool, or an id, may be."""
BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
"""A key without quotes inside of a value."""
DECODER = json.JSONDecoder()
MAX_LITERAL = 10_000
"""Characters of the longest value that is read as Python writes it."""


class Value(NamedTuple):
    """The value of one argument, as the answer has it."""

    text: str
    may_be_text: bool
    may_be_json: bool
    quote: str = ""
    """The mark around texts inside of the value."""


@dataclass
class ReadCall:
    """A call while it is read.

    Attributes:
        start: First character.
        end: Character after the last one.
        name: Name of the tool.
        call_id: Id of the call, or None.
        arguments: Arguments as JSON text, or None if they come one by one.
        values: Arguments by name.
        order: Order of its fields, as `ToolCall` has it.
        status: Whether it is whole.
    """

    start: int
    end: int
    name: str = ""
    call_id: str | None = None
    arguments: str | None = None
    values: dict[str, Value] = field(default_factory=dict)
    order: int = 0
    status: CallStatus = CallStatus.OK


@dataclass
class Reading:
    """One way to read an answer.

    Attributes:
        reasoning: Text of the reasoning, or None.
        content: Text of the content.
        calls: The calls in order, broken ones too.
        is_whole: Whether every character has its place in the grammar.
    """

    reasoning: str | None = None
    content: str = ""
    calls: list[ReadCall] = field(default_factory=list)
    is_whole: bool = True

    @property
    def is_broken(self) -> bool:
        """Return whether a call is broken."""
        return any(call.status is not CallStatus.OK for call in self.calls)


class _BrokenError(Exception):
    """A call does not go on as the grammar says."""

    def __init__(self, status: CallStatus) -> None:
        """`status` is what is wrong with it."""
        self.status = status
        super().__init__(status.value)


class Reader:
    """Reads one text by one grammar, in time linear in its length."""

    def __init__(self, text: str, grammar: Grammar, *, is_loose: bool = False) -> None:
        """`is_loose`: white space around slots is no part of them."""
        self._text, self._grammar, self._is_loose = text, grammar, is_loose
        self._size = len(text.rstrip())
        """Characters before the white space at the end."""
        self._slots = {edge.target.kind for edges in grammar.edges.values() for edge in edges}
        self._found: dict[str, int] = {}
        """Next place of each literal that was looked for."""

    def readings(self) -> Iterator[Reading]:
        """Yield the ways to read the text, the most structured first."""
        starts = [edge for edge in self._grammar.edges.get(START, ()) if self._starts(edge, 0)]
        starts.sort(key=lambda edge: (edge.target.kind is SlotKind.REASONING, len(edge.literal)), reverse=True)
        for edge in starts:
            self._found.clear()
            reading = self._read(edge)
            if reading is not None:
                yield reading

    def _starts(self, edge: Edge, place: int) -> bool:
        return self._text.startswith(edge.literal, self._skip(place))

    def _skip(self, place: int) -> int:
        """Return the next place that is no white space, if white space does not count."""
        if self._is_loose:
            while place < len(self._text) and self._text[place].isspace():
                place += 1
        return place

    def _find(self, literal: str, place: int) -> int:
        """Return the next place of a literal, or -1; every character is looked at once per literal."""
        known = self._found.get(literal)
        if known is None or 0 <= known < place:
            known = self._found[literal] = self._text.find(literal, place)
        return known

    def _edges(self, slot: Slot) -> list[Edge]:
        return self._grammar.edges.get(slot, [])

    def _read(self, first: Edge) -> Reading | None:
        """Read the text from one of its beginnings."""
        reading = Reading()
        edge, start = first, self._skip(0)
        place = start + len(first.literal)
        while edge.target != END:
            if edge.opens_call:
                following = self._read_calls(reading, edge, start, place)
            else:
                following = self._read_text(reading, edge.target, place)
            if following is None:
                return None
            edge, start, place = following
        if self._skip(place) != len(self._text):
            reading.is_whole = False
        return reading

    def _read_text(self, reading: Reading, slot: Slot, place: int) -> tuple[Edge, int, int] | None:
        """Read reasoning or content; return the edge after it, with its start and end."""
        found = self._next_edge(slot, place)
        if found is None:
            return None
        edge, start = found
        self._put(reading, slot, self._text[place:start])
        return edge, start, start + len(edge.literal)

    def _put(self, reading: Reading, slot: Slot, text: str) -> None:
        if self._is_loose:
            text = text.strip()
        if slot.kind is SlotKind.REASONING:
            reading.reasoning = text
        else:
            reading.content += text

    def _next_edge(self, slot: Slot, place: int) -> tuple[Edge, int] | None:
        """Return the edge that comes first after reasoning or content, the longest of several."""
        best: tuple[Edge, int] | None = None
        for edge in self._edges(slot):
            if edge.target == END or not edge.literal:
                continue
            start = self._find(edge.literal, place)
            if start >= 0 and (best is None or (start, -len(edge.literal)) < (best[1], -len(best[0].literal))):
                best = edge, start
        if best is not None:
            return best
        ends = [edge for edge in self._edges(slot) if edge.target == END and self._text.endswith(edge.literal)]
        ends = [edge for edge in ends if len(self._text) - len(edge.literal) >= place]
        if not ends:
            return None
        edge = max(ends, key=lambda one: len(one.literal))
        return edge, len(self._text) - len(edge.literal)

    def _read_calls(self, reading: Reading, edge: Edge, start: int, place: int) -> tuple[Edge, int, int] | None:
        """Read one call; return the edge after it. A broken call ends where the next one begins."""
        mark = call_mark(edge.literal)
        begin = start + max(edge.literal.rfind(mark), 0)
        call = ReadCall(begin, len(self._text))
        reading.calls.append(call)
        try:
            following = self._read_call(call, edge, place)
        except _BrokenError as error:
            call.status = error.status
            return self._after_broken(reading, call, place)
        after, start, place = following
        own = self._closing_size(after)
        call.end = start + own
        while call.end > start and self._text[call.end - 1].isspace():
            call.end -= 1
        return after, start, place

    def _closing_size(self, edge: Edge) -> int:
        """Return how much of a literal after a call belongs to that call."""
        if not edge.opens_call:
            return len(edge.literal)
        opening = 0
        for source in (START, Slot(SlotKind.CONTENT)):
            for other in self._edges(source):
                if other.opens_call:
                    opening = max(opening, _common_end(edge.literal, other.literal))
        return len(edge.literal) - opening

    def _after_broken(self, reading: Reading, call: ReadCall, place: int) -> tuple[Edge, int, int]:
        """Return the edge to the next call, or to the end."""
        best: tuple[Edge, int] | None = None
        for source in (START, Slot(SlotKind.CONTENT)):
            for edge in self._edges(source):
                if not edge.opens_call or not edge.literal:
                    continue
                start = self._find(edge.literal, place)
                if start >= 0 and (best is None or start < best[1]):
                    best = edge, start
        if best is None:
            return Edge("", END), len(self._text), len(self._text)
        edge, start = best
        call.end = start
        return edge, start, start + len(edge.literal)

    def _read_call(self, call: ReadCall, edge: Edge, place: int) -> tuple[Edge, int, int]:
        """Read the slots of one call."""
        key = ""
        while True:
            slot = edge.target
            text, following, start = self._read_slot(edge, place)
            if slot.kind is SlotKind.NAME:
                if not NAME.fullmatch(text) or (slot.occurrence and text != call.name):
                    raise _BrokenError(CallStatus.MALFORMED_CALL)
                call.name = text
            elif slot.kind is SlotKind.ID:
                call.call_id = text
            elif slot.kind in (SlotKind.ARGUMENTS, SlotKind.ARGUMENTS_TEXT):
                call.arguments = text
                call.order = 0 if call.name else ARGUMENTS_FIRST
            elif slot.kind is SlotKind.KEY:
                key = text
                if key in call.values:
                    raise _BrokenError(CallStatus.MALFORMED_CALL)
            else:
                call.values[key] = self._value(edge, text)
            place = start + len(following.literal)
            is_over = following.target == END or following.opens_call
            if is_over or following.target.kind in (SlotKind.CONTENT, SlotKind.REASONING):
                return following, start, place
            edge = following

    def _value(self, edge: Edge, text: str) -> Value:
        """Return a value, and whether the grammar says of which kind it is."""
        same = {other.target.kind for other in self._edges(Slot(SlotKind.KEY)) if other.literal == edge.literal}
        is_text = SlotKind.TEXT in same
        is_json = SlotKind.VALUE in same or SlotKind.VALUE not in self._slots
        return Value(text, is_text, is_json, self._grammar.quote)

    def _read_slot(self, edge: Edge, place: int) -> tuple[str, Edge, int]:
        """Read one slot of a call; return its text, the edge after it, and where that begins."""
        slot = edge.target
        if slot.kind is SlotKind.ARGUMENTS:
            return self._read_arguments(slot, place)
        if slot.kind is SlotKind.ARGUMENTS_TEXT:
            return self._read_arguments_text(slot, place)
        closing = self._closing_edges(edge)
        if slot.kind is SlotKind.VALUE or edge.is_json:
            found = self._read_json(edge, closing, place) or self._read_brackets(edge, closing, place)
            if found is not None:
                return found
        best = self._first(closing, place, is_escaped=bool(edge.escapes) or edge.is_json)
        if best is None:
            raise _BrokenError(CallStatus.MALFORMED_CALL)
        after, start = best
        return _unescape(self._text[place:start], edge), after, start

    def _closing_edges(self, edge: Edge) -> list[Edge]:
        """Return the edges after a slot; a value of unknown kind may end as either does."""
        edges = list(self._edges(edge.target))
        if edge.target.kind in (SlotKind.TEXT, SlotKind.VALUE):
            for other in self._edges(Slot(SlotKind.KEY)):
                if other.literal == edge.literal and other.target != edge.target:
                    edges += [one for one in self._edges(other.target) if one not in edges]
        return edges

    def _first(self, edges: list[Edge], place: int, *, is_escaped: bool) -> tuple[Edge, int] | None:
        """Return the edge whose literal comes first, the longest of several."""
        best: tuple[Edge, int] | None = None
        for edge in edges:
            if not edge.literal:
                continue
            start = self._find(edge.literal, place)
            while is_escaped and start >= 0 and self._is_escaped(start, place):
                start = self._text.find(edge.literal, start + 1)
            if start < 0 or not self._fits(edge, start):
                continue
            if best is None or (start, -len(edge.literal)) < (best[1], -len(best[0].literal)):
                best = edge, start
        return best

    def _fits(self, edge: Edge, start: int) -> bool:
        """Tell whether an edge to the end has only white space after its literal."""
        return edge.target != END or start + len(edge.literal) >= self._size

    def _is_escaped(self, place: int, first: int) -> bool:
        """Tell whether an odd number of backslashes is before a place."""
        count = 0
        while place - count > first and self._text[place - count - 1] == "\\":
            count += 1
        return count % 2 == 1

    def _matching(self, edges: list[Edge], place: int) -> Edge | None:
        """Return the longest edge whose literal is at a place."""
        place = self._skip(place)
        fitting = [edge for edge in edges if self._text.startswith(edge.literal, place) and self._fits(edge, place)]
        return max(fitting, key=lambda edge: len(edge.literal), default=None)

    def _read_json(self, edge: Edge, closing: list[Edge], place: int) -> tuple[str, Edge, int] | None:
        """Read a value that is JSON, or the inside of a JSON string."""
        try:
            value, end = DECODER.raw_decode(self._text, place - 1 if edge.is_json else place)
        except (ValueError, RecursionError):
            return None
        if edge.is_json:
            end -= 1
        after = self._matching(closing, end)
        if after is None:
            return None
        return (str(value) if edge.is_json else self._text[place:end]), after, self._skip(end)

    def _read_brackets(self, edge: Edge, closing: list[Edge], place: int) -> tuple[str, Edge, int] | None:
        """Read an object or a list in the template's own form, up to its closing bracket."""
        if edge.is_json or not self._grammar.quote or self._text[place : place + 1] not in ("{", "["):
            return None
        end = _closing_bracket(self._text, place, self._grammar.quote)
        after = None if end < 0 else self._matching(closing, end)
        return None if after is None else (self._text[place:end], after, self._skip(end))

    def _read_arguments(self, slot: Slot, place: int) -> tuple[str, Edge, int]:
        """Read arguments that are a JSON object."""
        place = self._skip(place)
        try:
            value, end = DECODER.raw_decode(self._text, place)
        except (ValueError, RecursionError):
            raise _BrokenError(CallStatus.ARGUMENTS_NOT_JSON) from None
        if not isinstance(value, dict):
            raise _BrokenError(CallStatus.ARGUMENTS_NOT_JSON)
        after = self._matching(self._edges(slot), end)
        if after is None:
            raise _BrokenError(CallStatus.MALFORMED_CALL)
        return self._text[place:end], after, self._skip(end)

    def _read_arguments_text(self, slot: Slot, place: int) -> tuple[str, Edge, int]:
        """Read arguments that are JSON inside a JSON string."""
        try:
            text, end = DECODER.raw_decode(self._text, place - 1)
            value = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise _BrokenError(CallStatus.ARGUMENTS_NOT_JSON) from None
        if not isinstance(value, dict):
            raise _BrokenError(CallStatus.ARGUMENTS_NOT_JSON)
        after = self._matching(self._edges(slot), end - 1)
        if after is None:
            raise _BrokenError(CallStatus.MALFORMED_CALL)
        return text, after, self._skip(end - 1)


def _common_end(text: str, other: str) -> int:
    """Return how many characters two texts end with alike."""
    size = 0
    while size < min(len(text), len(other)) and text[-1 - size] == other[-1 - size]:
        size += 1
    return size


def _unescape(text: str, edge: Edge) -> str:
    """Undo what the template replaces in a text."""
    if edge.is_json:
        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:
            return text
    if not edge.escapes:
        return text
    table = {new: old for old, new in edge.escapes if new}
    if not table:
        return text
    pattern = re.compile("|".join(map(re.escape, sorted(table, key=len, reverse=True))))
    return pattern.sub(lambda match: table[match.group()], text)


def _closing_bracket(text: str, place: int, quote: str) -> int:
    """Return the place after the bracket that closes the one at a place, or -1."""
    depth, is_quoted = 0, False
    for match in re.compile(rf"{re.escape(quote)}|[\[\]{{}}]").finditer(text, place):
        found = match.group()
        if found == quote:
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += 1 if found in "[{" else -1
            if depth == 0:
                return match.end()
    return -1


def decode_value(text: str, quote: str = "") -> tuple[Any, str] | None:
    """Return the value of an argument that is no string, and its JSON text; None if there is none."""
    try:
        return json.loads(text), text.strip()
    except (ValueError, RecursionError):
        pass
    if quote and quote in text:
        written = _as_json(text, quote)
        try:
            return json.loads(written), written
        except (ValueError, RecursionError):
            pass
    if len(text) > MAX_LITERAL:
        return None
    try:
        value = ast.literal_eval(text.strip())
        return value, json.dumps(value, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _as_json(text: str, quote: str) -> str:
    """Return a value in a template's own form as JSON: its texts are between marks, its keys may be bare."""
    pieces = text.split(quote)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = json.dumps(piece, ensure_ascii=False)
        else:
            pieces[index] = BARE_KEY.sub(r'\1"\2":', piece)
    return "".join(pieces)
