"""The grammar of a template's answers, derived from probe conversations by the origin of their text.

An answer is a chain of slots (reasoning, content, a call's name, ...) with literal text of the template between them.
Every probe shows which literal leads from a slot to the next one; the grammar is the set of these edges. It accepts
more than the template writes: a parsed message counts only if the template writes the same answer from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message
from chatmill.errors import RecordError
from chatmill.rollouts.probes import probe_conversations
from chatmill.rollouts.template import AnswerSpan, RolloutTemplate

MIN_MARK = 3
"""Characters of the shortest literal that counts as the mark of a call."""
MARK_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""What a mark of a call begins with in most templates."""


class SlotKind(StrEnum):
    """What stands in a slot of an answer."""

    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"
    NAME = "name"
    ID = "id"
    ARGUMENTS = "arguments"
    """All arguments of a call as JSON."""
    ARGUMENTS_TEXT = "arguments_text"
    """All arguments as JSON inside a JSON string."""
    KEY = "key"
    TEXT = "text"
    """The value of an argument that is a string."""
    VALUE = "value"
    """Any other value."""
    END = "end"


class Slot(NamedTuple):
    """A slot; the same field may be written more than once in a call."""

    kind: SlotKind
    occurrence: int = 0


START, END = Slot(SlotKind.START), Slot(SlotKind.END)


class Edge(NamedTuple):
    """A literal that leads from one slot to another."""

    literal: str
    target: Slot
    opens_call: bool = False
    """Whether the target is the first slot of a call."""
    escapes: tuple[tuple[str, str], ...] = ()
    """What the template replaces in the target's text, in order."""
    is_json: bool = False
    """Whether the target's text is the inside of a JSON string."""


class _Part(NamedTuple):
    """A literal or a slot of one probe."""

    text: str
    slot: SlotKind | None = None
    call: int = -1
    key: Any = None
    """What sets apart the slots of one call."""
    escapes: tuple[tuple[str, str], ...] = ()
    is_json: bool = False
    is_joined: bool = False
    """Whether literals of the template are inside."""


class Grammar:
    """The edges between slots, and what was not derived."""

    def __init__(self) -> None:
        """Hold no edge yet."""
        self.edges: dict[Slot, list[Edge]] = {}
        self.stops: set[str] = set()
        """Stop tokens that the template writes after answers."""
        self.refused: dict[str, str] = {}
        """Kinds of answers that the template does not write, with the reason code."""

    @property
    def has_calls(self) -> bool:
        """Whether calls can be told from text."""
        return any(edge.opens_call for edges in self.edges.values() for edge in edges)

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning can be told from content."""
        return any(edge.target.kind is SlotKind.REASONING for edge in self.edges.get(START, ()))

    @property
    def has_ids(self) -> bool:
        """Whether calls are written with their ids."""
        return any(edge.target.kind is SlotKind.ID for edges in self.edges.values() for edge in edges)

    @property
    def call_marks(self) -> list[str]:
        """Texts that begin a call."""
        marks: set[str] = set()
        for source, edges in self.edges.items():
            if source.kind not in (SlotKind.START, SlotKind.CONTENT):
                continue
            for edge in edges:
                mark = call_mark(edge.literal) if edge.opens_call else ""
                if len(mark) >= MIN_MARK:
                    marks.add(mark)
        return sorted(marks)

    @cached_property
    def unmarked_calls(self) -> list[re.Pattern[str]]:
        """Beginnings of answers that are a call, where a bracket and a name are all that says so, such as `[name(`."""
        after = sorted({edge.literal.strip() for edge in self.edges.get(Slot(SlotKind.NAME), ())} - {""})
        found: list[re.Pattern[str]] = []
        for edge in self.edges.get(Slot(SlotKind.START), ()):
            is_short = len(call_mark(edge.literal)) < MIN_MARK
            if edge.opens_call and is_short and edge.target.kind is SlotKind.NAME and after:
                following = "|".join(map(re.escape, after))
                found.append(re.compile(rf"\s*{re.escape(edge.literal.strip())}\s*[\w.-]+\s*(?:{following})"))
        return found

    def spells_call(self, content: str) -> bool:
        """Tell whether a content has what begins a call."""
        if any(mark in content for mark in self.call_marks):
            return True
        return any(pattern.match(content) for pattern in self.unmarked_calls)

    @cached_property
    def quote(self) -> str:
        """The mark that a template writes around texts and not around numbers, if there is one."""
        opening = {SlotKind.TEXT: set[str](), SlotKind.VALUE: set[str]()}
        for edge in self.edges.get(Slot(SlotKind.KEY), ()):
            opening.setdefault(edge.target.kind, set()).add(edge.literal)
        for bare in opening[SlotKind.VALUE]:
            for quoted in opening[SlotKind.TEXT]:
                if quoted.startswith(bare) and quoted != bare:
                    return quoted.removeprefix(bare)
        return ""

    def add(self, source: Slot, edge: Edge) -> None:
        """Add an edge that is not there yet."""
        edges = self.edges.setdefault(source, [])
        if edge not in edges:
            edges.append(edge)

    def loosened(self) -> Grammar:
        """Return the grammar without the white space around literals."""
        loose = Grammar()
        for source, edges in self.edges.items():
            for edge in edges:
                loose.add(source, edge._replace(literal=edge.literal.strip()))
        return loose


def call_mark(literal: str) -> str:
    """Return the beginning of a literal by which a call is recognised."""
    text = literal.strip()
    found = list(MARK_TOKEN.finditer(text))
    if not found:
        return text
    # Reasoning may end in the same literal: the last block of marks belongs to the call.
    thinking = [match for match in found if "think" in match.group().lower()]
    start = thinking[-1].end() if thinking else 0
    first = next((match for match in found if match.start() >= start), None)
    return text[start:].strip() if first is None else first.group()


def derive_grammar(template: RolloutTemplate) -> Grammar:
    """Derive the grammar of a template from probe conversations."""
    grammar = Grammar()
    for probe in probe_conversations():
        try:
            answer = template.answer(probe.conversation)
        except RecordError as error:
            grammar.refused.setdefault(probe.name, error.code)
            continue
        parts = _parts(answer.spans, probe.conversation)
        if parts is None:
            grammar.refused.setdefault(probe.name, "form_not_derived")
            continue
        if answer.stop:
            grammar.stops.add(answer.stop.strip())
        _add_chain(grammar, parts)
    return grammar


def _add_chain(grammar: Grammar, parts: list[_Part]) -> None:
    """Add the edges of one probe."""
    source, literal, call = START, "", -1
    seen: dict[Any, int] = {}
    for part in parts:
        if part.slot is None:
            literal += part.text
            continue
        opens = part.call >= 0 and part.call != call
        if opens:
            seen, call = {}, part.call
        occurrence = 0
        if part.slot in (SlotKind.NAME, SlotKind.ID):
            occurrence = seen[part.slot] = seen.get(part.slot, -1) + 1
        target = Slot(part.slot, occurrence)
        grammar.add(source, Edge(literal, target, opens, part.escapes, part.is_json))
        source, literal = target, ""
    grammar.add(source, Edge(literal, END))


def _parts(spans: list[AnswerSpan], conversation: Conversation) -> list[_Part] | None:
    """Return literals and slots of an answer, or None if a field comes in pieces."""
    message = conversation.messages[-1]
    found: list[_Part] = []
    for span in spans:
        part = _part(span, message)
        previous = found[-1] if found else None
        if (previous is not None and part.slot is None and previous.slot is None) or (
            previous is not None and _continues(previous, part)
        ):
            found[-1] = previous._replace(text=previous.text + part.text)
        else:
            found.append(part)
    found = _merge_values(found)
    for index, call in enumerate(message.tool_calls):
        found = _merge_json(found, index, call.arguments)
    plain = [part.slot for part in found if part.slot in (SlotKind.CONTENT, SlotKind.REASONING)]
    is_in_pieces = len(plain) != len(set(plain)) or any(part.is_joined for part in found)
    return None if is_in_pieces else found


def _continues(previous: _Part, part: _Part) -> bool:
    """Tell whether two parts are one value."""
    return (
        part.slot is not None and part.slot == previous.slot and part.call == previous.call and part.key == previous.key
    )


def _part(span: AnswerSpan, message: Message) -> _Part:
    """Return what a span of an answer is."""
    expression = span.expression
    if expression is None or expression[0] == "const":
        return _Part(span.text)
    escapes, is_json = _escapes(expression)
    inner = expression
    while inner[0] == "apply":
        inner = inner[3]
    path = inner[-1]
    if len(path) == 2 and path[1] in ("content", "reasoning"):
        return _Part(span.text, SlotKind(path[1]))
    if len(path) < 4 or path[1] != "call":
        return _Part(span.text)
    call, field = path[2], path[3]
    if field in ("name", "id"):
        return _Part(span.text, SlotKind(field), call, field, escapes, is_json)
    if len(path) == 4:
        kind = SlotKind.ARGUMENTS_TEXT if is_json else SlotKind.ARGUMENTS
        return _Part(span.text, kind, call, "arguments")
    entry = path[4]
    if isinstance(entry, tuple) and entry[0] == "key" and len(path) == 5:
        return _Part(span.text, SlotKind.KEY, call, entry, escapes, is_json)
    value = _argument(message, call, entry)
    kind = SlotKind.TEXT if isinstance(value, str) else SlotKind.VALUE
    return _Part(span.text, kind, call, entry, escapes, is_json)


def _argument(message: Message, call: int, entry: Any) -> Any:
    """Return the value of an argument by its place or its name."""
    arguments = json.loads(message.tool_calls[call].arguments)
    if isinstance(entry, tuple):
        return list(arguments.values())[entry[1]]
    return arguments.get(entry)


def _escapes(expression: tuple[Any, ...]) -> tuple[tuple[tuple[str, str], ...], bool]:
    """Return what is replaced in a text, in order, and whether it is written inside a JSON string."""
    replaced: list[tuple[str, str]] = []
    is_json = False
    while expression[0] == "apply":
        if expression[1] == "replace":
            replaced.append((expression[2][0], expression[2][1]))
        is_json = is_json or expression[1] == "json_string"
        expression = expression[3]
    replaced.reverse()
    return tuple(replaced), is_json


def _merge_values(parts: list[_Part]) -> list[_Part]:
    """Join the pieces of one value, with the literals between them."""
    merged: list[_Part] = []
    for part in parts:
        is_value = part.slot in (SlotKind.TEXT, SlotKind.VALUE)
        first = len(merged) - 1
        if is_value and first >= 1 and merged[first].slot is None and _continues(merged[first - 1], part):
            literal = merged.pop().text
            text = merged[-1].text + literal + part.text
            merged[-1] = merged[-1]._replace(text=text, is_joined=True)
        else:
            merged.append(part)
    return merged


def _merge_json(parts: list[_Part], call: int, arguments: str) -> list[_Part]:
    """Make one slot of arguments that are written as a JSON object in pieces."""
    inside = [
        index
        for index, part in enumerate(parts)
        if part.call == call and part.slot in (SlotKind.KEY, SlotKind.TEXT, SlotKind.VALUE)
    ]
    if not inside or inside[0] == 0 or parts[inside[0] - 1].slot is not None:
        return parts
    first = inside[0] - 1
    text = "".join(part.text for part in parts[first:])
    for start in _braces(parts[first].text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if value == json.loads(arguments):
            return [*parts[:first], *_cut(parts[first:], text, start, end, call)]
    return parts


def _braces(text: str) -> Iterator[int]:
    """Yield the places of opening braces, the last one first."""
    place = text.rfind("{")
    while place >= 0:
        yield place
        place = text.rfind("{", 0, place)


def _cut(parts: list[_Part], text: str, start: int, end: int, call: int) -> list[_Part]:
    """Return parts with one slot for the characters from start to end."""
    size = 0
    rest: list[_Part] = []
    for part in parts:
        if size + len(part.text) > end:
            cut = max(end - size, 0)
            rest.append(part._replace(text=part.text[cut:]))
        size += len(part.text)
    arguments = _Part(text[start:end], SlotKind.ARGUMENTS, call, "arguments")
    return [_Part(text[:start]), arguments, *rest]
