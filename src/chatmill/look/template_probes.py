"""Small conversations that show how a template behaves, and a vocabulary for templates that come without one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer

EXAMPLE_DAY = date(2026, 1, 1)
"""What a template that asks for the date is given while it is looked at, unless the user names a day."""
SPECIAL_LOOK = re.compile(
    r"<\|[\w./:+ -]{1,60}\|?>|<[\w./:+-]{1,60}\|>|<｜[^<>｜\s]{1,60}｜>|\[\|[\w/]{1,40}\|\]|</?s>|<(?:bos|eos|sop|eop)>"
    r"|<(?:start|end)_of_[a-z_]{1,30}>|<reserved_\d+>|\[gMASK\]"
)
"""What a special token looks like in the text of a template. No list of known names: families add their own."""
BRACKETS = re.compile(r"\[/?[A-Z][A-Z_]{2,30}\]")
"""Special tokens of Mistral's vocabularies (`[INST]`); the same spelling is plain text in Llama 2's."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A conversation with a purpose."""

    name: str
    conversation: Conversation
    shown: bool = False
    """Whether its rendering is printed; findings use all of them."""


def _probe(name: str, *messages: Message, tools: bool = False, shown: bool = False) -> Probe:
    definitions = (WEATHER,) if tools else ()
    return Probe(name=name, conversation=Conversation(messages, tools=definitions), shown=shown)


def _calls(*cities: str) -> tuple[ToolCall, ...]:
    # Nine letters and digits: Mistral's templates refuse other ids.
    return tuple(
        ToolCall("get_weather", f'{{"city": "{city}"}}', f"callid{n:03}") for n, city in enumerate(cities, start=1)
    )


def _result(text: str, number: int = 1) -> Message:
    return Message(Role.TOOL, text, tool_call_id=f"callid{number:03}", name="get_weather")


SYSTEM = Message(Role.SYSTEM, "S-zero.")
ASKS, ASKS_AGAIN = Message(Role.USER, "Q-one?"), Message(Role.USER, "Q-two?")
SAYS, SAYS_AGAIN = Message(Role.ASSISTANT, "A-one."), Message(Role.ASSISTANT, "A-two.")
THINKS = Message(Role.ASSISTANT, "A-one.", reasoning="R-one.")
THINKS_AGAIN = Message(Role.ASSISTANT, "A-two.", reasoning="R-two.")
CALLS = Message(Role.ASSISTANT, "", tool_calls=_calls("Oslo"))

PAIR = _probe("question and answer", ASKS, SAYS)
TWO_TURNS = _probe("two turns", SYSTEM, ASKS, SAYS, ASKS_AGAIN, SAYS_AGAIN)
REASONING = _probe("two turns with reasoning", ASKS, THINKS, ASKS_AGAIN, THINKS_AGAIN, shown=True)
CALL = _probe("tool call and result", ASKS, CALLS, _result("R-one"), SAYS, tools=True, shown=True)
WITH_SYSTEM = _probe("system message", SYSTEM, ASKS, SAYS, shown=True)
PROBES = (
    PAIR,
    WITH_SYSTEM,
    TWO_TURNS,
    REASONING,
    CALL,
    _probe("tool call without definitions", ASKS, CALLS, _result("R-one"), SAYS),
    _probe(
        "tool call, then another question",
        *(ASKS, CALLS, _result("R-one"), SAYS, ASKS_AGAIN, SAYS_AGAIN),
        tools=True,
    ),
    _probe(
        "reasoning before a tool call",
        *(ASKS, CALLS._replace(reasoning="R-one."), _result("R-one"), SAYS._replace(reasoning="R-two.")),
        tools=True,
    ),
    _probe(
        "text beside a tool call",
        *(ASKS, Message(Role.ASSISTANT, "A-one.", tool_calls=_calls("Oslo")), _result("R-one"), SAYS_AGAIN),
        tools=True,
    ),
    _probe(
        "two calls at once",
        ASKS,
        Message(Role.ASSISTANT, "", tool_calls=_calls("Oslo", "Rome")),
        *(_result("R-one"), _result("R-two", 2), SAYS),
        tools=True,
    ),
    _probe("empty answer", ASKS, Message(Role.ASSISTANT, "")),
    _probe("answer before any question", SAYS, ASKS, SAYS_AGAIN),
    _probe("two answers in a row", ASKS, SAYS, SAYS_AGAIN),
)
"""Texts are words that no template writes, so that they are found again in a rendering."""

PADDED = {
    Role.SYSTEM: " \n S-zero. \n ",
    Role.USER: " \n Q-one? \n ",
    Role.ASSISTANT: " \n A-one. \n ",
}
"""Texts with white space around them."""


def byte_vocabulary(text: str, *more: str) -> Tokenizer:
    """Bytes, and a token for everything in a template that looks like a special token."""
    spelled = [found.group() for pattern in (SPECIAL_LOOK, BRACKETS) for found in pattern.finditer(text)]
    return byte_tokenizer().with_added([name for name in dict.fromkeys([*more, *spelled]) if name])
