"""What the built-in templates show of a message, written down a second time: parts of text and control tokens.

`verify --deep` reads the tokens of every trained message against this: which bytes they spell, and which part each
token belongs to. A template of a user's own has no entry, and its texts are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import PARTS, Part
from chatmill.render import thinking
from chatmill.render.templates import chatml, harmony, llama3, markers, qwen3, token_native
from chatmill.tokenizer.protocol import Tokenizer


class Shown(NamedTuple):
    """One stretch of a message as a template shows it."""

    part: Part
    text: str
    is_control: bool = False
    """Whether it is one control token, named by `text`."""


View = Callable[[Conversation, int], list[Shown] | None]
"""What is shown of the message with this index; None where nothing is declared."""


def _between(opening: Mapping[Role, str], end: str) -> View:
    """A marker for each role, the content as it is, one end."""

    def view(conversation: Conversation, index: int) -> list[Shown]:
        message = conversation.messages[index]
        return [
            Shown(Part.HEADER, opening[message.role], True),
            Shown(Part.CONTENT, message.content),
            Shown(Part.TERMINATOR, end, True),
        ]

    return view


def _chatml(conversation: Conversation, index: int) -> list[Shown]:
    message = conversation.messages[index]
    return _im(message.role.value, [Shown(Part.CONTENT, message.content)])


def _im(role: str, own: Sequence[Shown]) -> list[Shown]:
    return [
        Shown(Part.HEADER, chatml.IM_START, True),
        Shown(Part.HEADER, f"{role}\n"),
        *own,
        Shown(Part.TERMINATOR, chatml.IM_END, True),
        Shown(Part.SEPARATOR, "\n"),
    ]


def _llama3(conversation: Conversation, index: int) -> list[Shown]:
    message = conversation.messages[index]
    return [
        Shown(Part.HEADER, llama3.HEADER, True),
        Shown(Part.HEADER, message.role.value),
        Shown(Part.HEADER, llama3.HEADER_END, True),
        Shown(Part.HEADER, "\n\n"),
        Shown(Part.CONTENT, message.content.strip()),
        Shown(Part.TERMINATOR, llama3.EOT, True),
    ]


def _qwen3(*, every_turn: bool) -> View:
    """A thinking block, the answer, the calls; the block in every turn, or after the last question only."""

    def view(conversation: Conversation, index: int) -> list[Shown] | None:
        message = conversation.messages[index]
        if message.role is Role.TOOL or (message.role is Role.SYSTEM and conversation.tools):
            return None
        if message.role is not Role.ASSISTANT:
            return _chatml(conversation, index)
        reasoning, content = _thoughts(message)
        answer, own = content, []
        if every_turn or _thinks(conversation, index, reasoning):
            inner, answer = reasoning.strip("\n"), content.lstrip("\n")
            own = [
                Shown(Part.REASONING, thinking.THINK, True),
                Shown(Part.REASONING, f"\n{inner}\n" if inner else "\n\n"),
                Shown(Part.REASONING, thinking.THINK_END, True),
                Shown(Part.REASONING, "\n\n"),
            ]
        own.append(Shown(Part.CONTENT, answer))
        for number, call in enumerate(message.tool_calls):
            written = f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
            own += [
                Shown(Part.TOOL_CALL, "\n" if number or content else ""),
                Shown(Part.TOOL_CALL, qwen3.CALL, True),
                Shown(Part.TOOL_CALL, written),
                Shown(Part.TOOL_CALL, qwen3.CALL_END, True),
            ]
        return _im("assistant", own)

    return view


def _thoughts(message: Message) -> tuple[str, str]:
    """Reasoning and content; a content that holds `</think>` brings its own where the message has none."""
    before, mark, _ = message.content.partition(thinking.THINK_END)
    if message.reasoning is not None or not mark:
        return message.reasoning or "", message.content
    reasoning = before.rstrip("\n").rpartition(thinking.THINK)[2].lstrip("\n")
    return reasoning, message.content.rpartition(thinking.THINK_END)[2].lstrip("\n")


def _thinks(conversation: Conversation, index: int, reasoning: str) -> bool:
    """Whether the published template shows the thinking block of this turn."""
    questions = [
        place
        for place, message in enumerate(conversation.messages)
        if message.role is Role.USER
        and not (message.content.startswith(qwen3.RESPONSE) and message.content.endswith(qwen3.RESPONSE_END))
    ]
    last = len(conversation.messages) - 1
    return index > (questions[-1] if questions else last) and (index == last or bool(reasoning))


class _Channel(NamedTuple):
    """One Harmony message of an assistant."""

    channel: str
    text: str
    name: str | None = None
    recipient: str | None = None
    content_type: str | None = None


def _harmony(conversation: Conversation, index: int) -> list[Shown] | None:
    """Analysis, the answer and one message for each call; only what opens the turn is a header."""
    message = conversation.messages[index]
    if message.role is not Role.ASSISTANT:
        return None
    opens = index == 0 or conversation.messages[index - 1].role is not Role.ASSISTANT
    written = list(_channels(message))
    last = index == len(conversation.messages) - 1
    shown: list[Shown] = []
    for number, one in enumerate(written):
        if one.channel == "analysis":
            own, ending = Part.REASONING, Part.REASONING
        elif one.recipient is not None:
            own, ending = Part.TOOL_CALL, Part.TERMINATOR
        else:
            own, ending = Part.CONTENT, Part.CONTENT if one.channel == "commentary" else Part.TERMINATOR
        first = Part.HEADER if opens and number == 0 else own
        rest = first if one.name is not None else own
        shown += [Shown(first, harmony.START, True), Shown(first, "assistant")]
        to = f" to={one.recipient}" if one.recipient not in (None, "all") else ""
        shown += [
            Shown(rest, f"{f':{one.name}' if one.name is not None else ''}{to}"),
            Shown(rest, harmony.CHANNEL, True),
            Shown(rest, one.channel),
            *_content_type(one.content_type, rest),
            Shown(rest, harmony.MESSAGE, True),
            Shown(own, one.text),
        ]
        if last and number == len(written) - 1 and one.channel == "final":
            end = harmony.RETURN
        else:
            end = harmony.CALL if one.recipient is not None else harmony.END
        shown.append(Shown(ending, end, True))
    return shown


def _channels(message: Message) -> list[_Channel]:
    written = [_Channel("analysis", message.reasoning)] if message.reasoning else []
    if message.content or not message.tool_calls:
        calls = message.tool_calls or message.recipient
        channel = message.channel or ("commentary" if calls else "final")
        written.append(_Channel(channel, message.content, message.name, message.recipient, message.content_type))
    for call in message.tool_calls:
        to = call.name if "." in call.name else f"functions.{call.name}"
        written.append(_Channel("commentary", call.arguments, None, to, "<|constrain|>json"))
    return written


def _content_type(content_type: str | None, part: Part) -> list[Shown]:
    if content_type is None:
        return []
    constrain = "<|constrain|>"
    if not content_type.startswith(constrain):
        return [Shown(part, f" {content_type}")]
    return [Shown(part, " "), Shown(part, constrain, True), Shown(part, content_type.removeprefix(constrain))]


VIEWS: Mapping[str, View] = {
    "token_native": _between(
        {Role.SYSTEM: token_native.SYS, Role.USER: token_native.USR, Role.ASSISTANT: token_native.ASST},
        token_native.EOT,
    ),
    "markers": _between(
        {Role.SYSTEM: markers.SYSTEM, Role.USER: markers.USER, Role.ASSISTANT: markers.ASSISTANT}, markers.END
    ),
    "chatml": _chatml,
    "llama3": _llama3,
    "qwen3": _qwen3(every_turn=False),
    "qwen3_training": _qwen3(every_turn=True),
    "harmony": _harmony,
}
"""Built-in templates and what they show of a message."""


def first_difference(
    shown: Sequence[Shown], ids: Sequence[int], kinds: Sequence[int], tokenizer: Tokenizer
) -> tuple[int, str] | None:
    """Where the tokens of a message stop being what is shown, and how; None when they are exactly that.

    A control token is one id. Text between control tokens is compared as bytes after the tokenizer's normalizer, and a
    token belongs to the part in which its first byte lies.
    """
    controls = set(tokenizer.control_ids.values())
    at = 0
    for is_control, stretch in groupby(shown, key=lambda one: one.is_control):
        items = list(stretch)
        if is_control:
            for one in items:
                if at == len(ids) or ids[at] != tokenizer.control(one.text):
                    return at, f"the control token {one.text} must stand here"
                if kinds[at] % PARTS != one.part:
                    return at, _wrong_part(kinds[at], one.part)
                at += 1
            continue
        prefixes = ["".join(one.text for one in items[: number + 1]) for number in range(len(items))]
        ends = [len(tokenizer.normalize(prefix).encode()) for prefix in prefixes]
        text, place = tokenizer.normalize(prefixes[-1]).encode(), 0
        while place < len(text):
            spelled = b"" if at == len(ids) or ids[at] in controls else tokenizer.token_bytes(ids[at])
            if not spelled or not text.startswith(spelled, place):
                rest = text[place : place + 60].decode("utf-8", errors="replace")
                return at, f"the text {rest!r} must stand here"
            part = next(one.part for one, end in zip(items, ends, strict=True) if place < end)
            if kinds[at] % PARTS != part:
                return at, _wrong_part(kinds[at], part)
            place, at = place + len(spelled), at + 1
    return None if at == len(ids) else (at, "the message must end here")


def _wrong_part(code: int, part: Part) -> str:
    return f"the token is labelled {Part(code % PARTS).name.lower()}, and the text says {part.name.lower()}"
