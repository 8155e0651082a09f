"""Conversations and their messages.

`Message` and `Conversation` are named tuples: immutable, and four times faster to make than frozen dataclasses, which
counts where millions of messages pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from chatmill.core.pictures import Picture
from chatmill.core.sides import Side
from chatmill.core.weight_spans import WeightSpan
from chatmill.core.words import counted

NOTHING: Mapping[str, Any] = {}
"""Shared by all objects without fields of a kind."""


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"

    __hash__ = str.__hash__  # an enum's own is Python code, and roles are looked up for every message


class ToolCall(NamedTuple):
    """One call that an assistant message makes."""

    name: str
    arguments: str
    """The argument text, verbatim. An object in the source is written as JSON (", " and ": ", no ASCII escapes)."""
    id: str | None = None
    order: int = 0
    """The order of its keys (see `call_order`), which templates show that write a call as JSON."""


CALL_KEYS = ("id", "type", "function")
ARGUMENTS_FIRST = 64


def call_order(keys: Iterable[str], of_function: Iterable[str]) -> int:
    """Return the order of a call's keys as a number, as messages.h has it: 0 for the usual one.

    Else the keys as digits in base 4, and a bit for a function whose arguments come first.
    """
    digits = [CALL_KEYS.index(key) + 1 for key in keys if key in CALL_KEYS]
    code = 0
    for digit in digits if digits != sorted(digits) else ():
        code = 4 * code + digit
    inner = [key for key in of_function if key in ("name", "arguments")]
    return code + ARGUMENTS_FIRST * (inner[:1] == ["arguments"])


@cache
def call_keys(order: int) -> tuple[tuple[str, ...], tuple[str, str]]:
    """Return the keys of a call and those of its function in an order; 0 is id, type, function and name, arguments."""
    digits = [order >> shift & 3 for shift in (4, 2, 0)]
    keys = [CALL_KEYS[digit - 1] for digit in digits if digit] or list(CALL_KEYS)
    if "function" not in keys:
        keys.append("function")
    if "type" not in keys:  # it is given to templates all the same
        keys.insert(keys.index("function"), "type")
    if "id" not in keys:
        keys.insert(0, "id")
    return tuple(keys), ("arguments", "name") if order & ARGUMENTS_FIRST else ("name", "arguments")


class Message(NamedTuple):
    """One message; `content` is the text as the source has it, "" if there is only a tool call, or `parts`."""

    role: Role
    content: str
    reasoning: str | None = None
    """Reasoning text that is separate from the content; None where the source has none ("" is kept)."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    weight: float | None = None
    """Weight of this message's tokens as targets: `weight`, or 0 for `train: false`; None where it says nothing."""
    structured: Mapping[str, Any] | None = None
    """A Harmony system or developer content object; its text form is made by the Harmony renderer."""
    extra: Mapping[str, Any] = NOTHING
    """Fields this library gives no meaning to."""
    has_content: bool = True
    """False where the content is null or missing, which some templates write otherwise than an empty one."""
    finish_reason: str | None = None
    """Why a model ended this answer; `length`: it did not, and no stop is trained."""
    token_ids: tuple[int, ...] | None = None
    """The tokens that a model sampled for this answer, which are taken as they are."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The tokens that the model was given for it."""
    logprobs: tuple[float | None, ...] | None = None
    """Log-probabilities of `token_ids`."""
    parts: tuple[str | Picture, ...] = ()
    """Texts and pictures in order, of a message that has pictures."""
    spans: tuple[WeightSpan, ...] = ()
    """Characters of its fields that have a weight of their own; none overlap, and `weight` is that of all others."""

    @property
    def pictures(self) -> list[Picture]:
        """Its pictures, in order."""
        return [part for part in self.parts if isinstance(part, Picture)]


class Conversation(NamedTuple):
    """Messages in order, with what the record says about them."""

    messages: tuple[Message, ...]
    id: str = ""
    source: str = ""
    tools: tuple[Any, ...] = ()
    """Tool definitions as decoded JSON."""
    where: str = ""
    """File and line or row, for error messages."""
    metadata: Mapping[str, Any] = NOTHING
    """Record fields this library gives no meaning to."""
    options: Mapping[str, Any] = NOTHING
    """Options for the chat template that this record asks for: its `chat_template_kwargs`."""
    side: Side = Side.NONE
    rejected: tuple[Message, ...] = ()
    """The messages of the other answer, where the record holds a pair; `sides` takes the two apart."""
    margin: float | None = None
    """By how much the chosen answer of a pair is better, if the record says so."""

    @property
    def sides(self) -> tuple[Conversation, ...]:
        """The documents of its record: the chosen and the rejected one of a pair, else the conversation itself."""
        if not self.rejected:
            return (self,)
        chosen = self._replace(rejected=(), side=Side.CHOSEN)
        return chosen, chosen._replace(messages=self.rejected, side=Side.REJECTED)

    def __repr__(self) -> str:
        """Return one line: what it is known by, and how its messages begin."""
        shown = [f"{message.role.value} {_beginning(message)!r}" for message in self.messages[:SHOWN_MESSAGES]]
        more = len(self.messages) - len(shown)
        name = self.id or self.where
        parts = [repr(name)] if name else []
        parts += [counted(len(self.messages), "message") + ": " + ", ".join(shown) + f", {more:,} more" * bool(more)]
        parts += [counted(len(self.tools), "tool")] if self.tools else []
        return f"Conversation({'; '.join(parts)})"


SHOWN_MESSAGES = 4
SHOWN_CHARACTERS = 40


def _beginning(message: Message) -> str:
    """Return the first characters of a message; of calls where it has no text."""
    text = message.content or ", ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
