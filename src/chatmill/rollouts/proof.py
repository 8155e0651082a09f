"""Proves readings of an answer: the template has to write prompt and answer from the message exactly as they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.rollouts.grammar import Grammar
from chatmill.rollouts.probes import call_id
from chatmill.rollouts.reader import ReadCall, Reading, Value, decode_value
from chatmill.rollouts.sampled_text import SampledText
from chatmill.rollouts.template import RolloutTemplate

MAX_COMBINATIONS = 8
"""Combinations of undecided values that are all tried; of more, two are."""

ToolTypes = Mapping[tuple[str, str], frozenset[str]]
"""JSON types of a tool's parameters, by the names of both."""


class Candidate(NamedTuple):
    """A message that may be what an answer says."""

    message: Message
    is_decided: bool = True
    """Whether the tools say of which type every argument is."""


class Prover:
    """Holds a sampled answer against what the template writes after one prompt."""

    def __init__(
        self, template: RolloutTemplate, grammar: Grammar, prompt_text: str, conversation: Conversation
    ) -> None:
        """`prompt_text` is the template's own text of the prompt."""
        self._template, self._grammar = template, grammar
        self._prompt, self._conversation = prompt_text, conversation

    def is_written(self, message: Message, sampled: SampledText, *, needs_stop: bool = True) -> bool:
        """Tell whether the template writes the prompt and then exactly this answer from a message."""
        conversation = self._conversation._replace(messages=(*self._conversation.messages, message))
        specials = self._template.specials
        spells_special = any(specials.search(text) for text in _texts(message))
        if not spells_special:
            text = self._template.plain(conversation, prompt=False)
            if text is None:
                return False
            if text.startswith(self._prompt):
                answer = text[len(self._prompt) : len(self._prompt) + len(sampled.text)]
                if answer != sampled.text:
                    return False
                found = [match.span() for match in specials.finditer(answer)]
                rest = text[len(self._prompt) + len(answer) :]
                return found == sampled.specials and (not needs_stop or self._is_stop(rest, sampled))
        written = self._template.labelled(conversation)
        if written is None or not written.text.startswith(self._prompt + sampled.text):
            return False
        begin, end = len(self._prompt), len(self._prompt) + len(sampled.text)
        inside = [(start - begin, stop - begin) for start, stop in written.specials if start >= begin and stop <= end]
        return inside == sampled.specials and (not needs_stop or self._is_stop(written.text[end:], sampled))

    def _is_stop(self, rest: str, sampled: SampledText) -> bool:
        """Tell whether the template ends an answer with the sampled stop; `rest` is what it writes there."""
        if sampled.stop is None:
            return False
        name = self._template.token_name(sampled.stop)
        if name not in self._grammar.stops:  # one that only the generation config names
            own = [stop for stop in self._grammar.stops if rest.startswith(stop)]
            return bool(own) or not rest
        return rest.startswith(name) or not rest


def _texts(message: Message) -> Iterator[str]:
    yield message.content
    yield message.reasoning or ""
    for call in message.tool_calls:
        yield call.name
        yield call.arguments
        yield call.id or ""


def tool_types(tools: Sequence[Any]) -> dict[tuple[str, str], frozenset[str]]:
    """Return the JSON types of the parameters of tools."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for definition in tools:
        function = definition.get("function", definition) if isinstance(definition, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if not isinstance(properties, Mapping):
            continue
        for name, schema in properties.items():
            found[str(function.get("name")), str(name)] = frozenset(_types(schema))
    return found


def _types(schema: Any) -> Iterator[str]:
    """Yield the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return
    listed = schema.get("type")
    if isinstance(listed, str):
        yield listed.lower()
    elif isinstance(listed, Sequence):
        yield from map(str, listed)
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            yield from _types(one)
    if listed is None and isinstance(schema.get("enum"), Sequence):
        yield from {"string" if isinstance(one, str) else "number" for one in schema["enum"]}


def tool_names(tools: Sequence[Any]) -> set[str]:
    """Return the names of tools."""
    names: set[str] = set()
    for definition in tools:
        function = definition.get("function", definition) if isinstance(definition, Mapping) else {}
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            names.add(function["name"])
    return names


def candidates(reading: Reading, types: ToolTypes, first_id: int) -> Iterator[Candidate]:
    """Yield the messages that a reading may be, the likeliest first."""
    choices = [list(_arguments(call, types)) for call in reading.calls]
    is_decided = all(decided for choice in choices for _, decided in choice)
    for combination in _combinations(choices):
        calls = [
            ToolCall(call.name, arguments, id=call.call_id or call_id(first_id + index), order=call.order)
            for index, (call, (arguments, _)) in enumerate(zip(reading.calls, combination, strict=True))
        ]
        message = Message(Role.ASSISTANT, reading.content, reasoning=reading.reasoning, tool_calls=tuple(calls))
        yield Candidate(message, is_decided)
        if reading.reasoning is None:
            yield Candidate(message._replace(reasoning=""), is_decided)


def _arguments(call: ReadCall, types: ToolTypes) -> Iterator[tuple[str, bool]]:
    """Yield the arguments of a call as JSON text, and whether they are decided."""
    if call.arguments is not None:
        yield call.arguments, True
        return
    choices = [list(_values(value, types.get((call.name, key), frozenset()))) for key, value in call.values.items()]
    is_decided = all(len(choice) == 1 for choice in choices)
    for combination in _combinations(choices):
        pairs = zip(call.values, combination, strict=True)
        text = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in pairs)
        yield "{" + text + "}", is_decided


def _combinations(choices: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of choices; of too many only those of all first and of all last ones."""
    if math.prod(len(choice) for choice in choices) <= MAX_COMBINATIONS:
        yield from product(*choices)
    else:
        yield tuple(choice[0] for choice in choices)
        yield tuple(choice[-1] for choice in choices)


def _values(value: Value, types: frozenset[str]) -> Iterator[str]:
    """Yield the JSON texts of a value; several if neither grammar nor tools decide."""
    as_text = json.dumps(value.text, ensure_ascii=False)
    if not value.may_be_json:
        yield as_text
        return
    decoded = decode_value(value.text, value.quote)
    if decoded is None or (isinstance(decoded[0], str) and value.may_be_text):
        yield as_text
        return
    if not value.may_be_text:
        yield decoded[1]
        return
    allows_text = not types or "string" in types
    allows_other = not types or bool(types - {"string"})
    if allows_other:
        yield decoded[1]
    if allows_text:
        yield as_text
