"""Small conversations that show how a template writes answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from chatmill.core.conversation import ARGUMENTS_FIRST, Conversation, Message, Role, ToolCall

CONTENT, REASONING = "Content-q0zz.", "Reasoning-q0zz."
NAMES = ("probe_fnx", "probe_fny")
TEXTS = {"ka_q0zz": "va-q0zz", "kb_q0zz": "vb-q0zz"}
MIXED = {**TEXTS, "kc_q0zz": 70707, "kd_q0zz": 80808, "ke_q0zz": "vc-q0zz"}
ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("arguments of both kinds", MIXED),
    ("arguments that end with a number", {"ka_q0zz": 70707, "kb_q0zz": "va-q0zz", "kc_q0zz": 80808}),
    ("one text argument", {"ka_q0zz": "va-q0zz"}),
    ("one number argument", {"ka_q0zz": 70707}),
    ("no arguments", {}),
    ("an object argument", {"ka_q0zz": {"kx_q0zz": "vx-q0zz", "ky_q0zz": 3}, "kb_q0zz": "vb-q0zz"}),
    ("a list argument", {"kb_q0zz": "vb-q0zz", "ka_q0zz": ["vx-q0zz", 4]}),
)
MANY = 8
"""Calls of the longest probe."""


class AnswerProbe(NamedTuple):
    """A conversation that ends with the answer to look at."""

    name: str
    conversation: Conversation


def tool(name: str) -> dict[str, Any]:
    """Return the definition of a tool of the probes."""
    properties = {key: {"type": "string"} for key in MIXED}
    function = {"name": name, "description": "d", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


TOOLS = tuple(tool(name) for name in NAMES)
ASKED = (Message(Role.USER, "Question-q0zz?"),)


def call_id(index: int) -> str:
    """Return the id of the n-th call, in the only form that all templates take."""
    return f"call{index:05d}"


def _call(index: int, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(NAMES[index % 2], json.dumps(arguments), id=call_id(index))


def after_result() -> tuple[Message, ...]:
    """Return messages that end with a tool's result."""
    call = _call(90, {"ka_q0zz": "v"})
    return (
        *ASKED,
        Message(Role.ASSISTANT, "", tool_calls=(call,)),
        Message(Role.TOOL, "Result-q0zz.", tool_call_id=call.id, name=call.name),
    )


def _calls() -> Iterator[tuple[str, tuple[ToolCall, ...]]]:
    """Yield names and calls of the probes."""
    for name, arguments in ARGUMENTS:
        yield f"a call with {name}", (_call(0, arguments),)
        yield f"two calls with {name}", (_call(0, arguments), _call(1, {"ka_q0zz": "vz-q0zz"}))
    first = [_call(index, {"ka_q0zz": "va-q0zz"})._replace(order=ARGUMENTS_FIRST) for index in range(2)]
    yield "a call with its arguments first", tuple(first[:1])
    yield "two calls with their arguments first", tuple(first)
    yield "many calls", tuple(_call(index, {"ka_q0zz": f"v{index}-q0zz"}) for index in range(MANY))


def probe_conversations() -> Iterator[AnswerProbe]:
    """Yield all probes, the plain ones first."""
    for context, before in (("", ASKED), (" after a result", after_result())):
        for reasoning in (None, "", REASONING):
            said = {None: "", "": " with empty reasoning", REASONING: " with reasoning"}[reasoning]
            for tools in ((), TOOLS):
                message = Message(Role.ASSISTANT, CONTENT, reasoning=reasoning)
                yield _probe(f"content{said}{context}", before, message, tools)
            for name, calls in _calls() if not context else list(_calls())[:2]:
                for content in (CONTENT, ""):
                    beside = " and content" if content else ""
                    message = Message(Role.ASSISTANT, content, reasoning=reasoning, tool_calls=calls)
                    yield _probe(f"{name}{beside}{said}{context}", before, message, TOOLS)


def _probe(name: str, before: tuple[Message, ...], message: Message, tools: tuple[Any, ...]) -> AnswerProbe:
    return AnswerProbe(name, Conversation((*before, message), id="probe", tools=tools))
