"""Harmony, the format of gpt-oss: `<|start|>author<|channel|>channel<|message|>content<|end|>`.

Headers, system and developer messages come from the official renderer and are cached; contents are encoded in bulk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import RecordError, TokenizerError
from chatmill.render.jinja.traced import note_exact, plain_text
from chatmill.render.official_harmony import render_message
from chatmill.render.template import KINDS_OF, Emitter, Template
from chatmill.tokenizer.tiktoken_file import HARMONY_NAMES
from chatmill.tokenizer.tokenizer import Tokenizer

START, MESSAGE, END, RETURN, CALL, CHANNEL = (
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|channel|>",
)
CHANNELS = ("analysis", "commentary", "final")
_ASSISTANT = KINDS_OF[Role.ASSISTANT]


class HarmonyMessage(NamedTuple):
    """One message of the format; an assistant message with reasoning and calls becomes several."""

    origin: int
    """Index of the message it comes from; -1 for a developer message made for tool definitions."""
    role: Role
    content: str
    channel: str | None = None
    name: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    structured: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The official library's form."""
        content = [dict(self.structured)] if self.structured is not None else [{"type": "text", "text": self.content}]
        fields = {name: getattr(self, name) for name in ("name", "channel", "recipient", "content_type")}
        return {"role": self.role.value, "content": content} | {k: v for k, v in fields.items() if v is not None}


class Header(NamedTuple):
    """Ids of one form of message: what opens it and what ends it."""

    start: tuple[int, ...]
    """`<|start|>assistant`, the generation prompt; for other roles the whole header."""
    rest: tuple[int, ...]
    """What follows up to `<|message|>`; empty for other roles."""
    end: tuple[int, ...]


class Harmony(Template):
    """The training render of openai-harmony without dropping of analysis; needs the o200k vocabulary."""

    name = "harmony"
    control_tokens = (START, MESSAGE, END, RETURN, CALL, CHANNEL)
    stop_tokens = (RETURN, CALL, END)
    has_channels = True
    writes_tool_calls = True
    prefix_stable = False
    default_policy = "assistant"
    declares = (
        "Contents as they are. Reasoning becomes a message in the analysis channel, a tool call one in the commentary "
        "channel; an assistant message without a channel is final, or commentary where it makes calls. The last final "
        "message ends in <|return|> and every earlier one in <|end|>."
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Check that the vocabulary is the one the official renderer speaks."""
        super().__init__(tokenizer)
        if (tokenizer.control(START), tokenizer.control(CALL)) != (200006, 200012):
            raise TokenizerError(
                f"template 'harmony' needs the o200k Harmony vocabulary (<|start|> = 200006); tokenizer "
                f"{tokenizer.name!r} has other ids. Use the tokenizer 'o200k'."
            )
        self._return = self.literal(RETURN)
        self._generation = self.literal(START, "assistant")

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write every message in order."""
        messages = list(harmony_messages(conversation))
        has_tools = any(_has_function_tools(m.structured) for m in messages)
        before: Role | None = None
        for number, message in enumerate(messages):
            out.message(message.origin)
            if message.structured is not None:
                self._emit_structured(message, has_tools, out)
            elif message.role is Role.ASSISTANT:
                self._emit_assistant(message, before is not Role.ASSISTANT, number == len(messages) - 1, out)
            else:
                kinds = KINDS_OF[message.role]
                header = _header(message._replace(origin=0, content=""))
                out.put(header.start, kinds.header)
                out.text(message.content, kinds.content)
                out.put(header.end, kinds.terminator)
            before = message.role

    def emit_generation_prompt(self, conversation: Conversation, out: Emitter) -> None:
        """`<|start|>assistant`."""
        out.put(self._generation, _ASSISTANT.header)

    def _emit_assistant(self, message: HarmonyMessage, opens_turn: bool, last: bool, out: Emitter) -> None:
        """The model itself writes channel and recipient, and opens the further messages of its turn."""
        header = _header(message._replace(origin=0, content=""))
        if message.channel == "analysis":
            own = ending = _ASSISTANT.reasoning
        elif message.recipient is not None:
            own, ending = _ASSISTANT.tool_call, _ASSISTANT.terminator
        elif message.channel == "commentary":
            own = ending = _ASSISTANT.content
        else:
            own, ending = _ASSISTANT.content, _ASSISTANT.terminator
        out.put(header.start, _ASSISTANT.header if opens_turn else own)
        out.put(header.rest, own)
        out.text(message.content, own)
        out.put(self._return if last and message.channel == "final" else header.end, ending)

    def _emit_structured(self, message: HarmonyMessage, has_tools: bool, out: Emitter) -> None:
        kinds = KINDS_OF[message.role]
        header, content, end = _structured(json.dumps(message.to_dict()), has_tools)
        out.put(header, kinds.header)
        out.put(content, kinds.content)
        out.put(end, kinds.terminator)


@lru_cache(maxsize=4096)
def _header(message: HarmonyMessage) -> Header:
    """The header of a message, and what ends it; `message` has no content."""
    ids = tuple(render_message(message.to_dict()))
    split = 2 if message.role is Role.ASSISTANT and message.name is None else len(ids) - 1
    return Header(ids[:split], ids[split:-1], ids[-1:])


@lru_cache(maxsize=4096)
def _structured(message: str, has_tools: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The header, the content and the end of a message with Harmony's own content, given as JSON."""
    ids = tuple(render_message(json.loads(message), has_function_tools=has_tools))
    body = ids.index(HARMONY_NAMES[MESSAGE]) + 1
    return ids[:body], ids[body:-1], ids[-1:]


def harmony_messages(conversation: Conversation) -> Iterator[HarmonyMessage]:
    """The messages of the format, in order; raises `RecordError` for what it cannot express."""
    pending_tools = conversation.tools
    call_names: dict[str, str] = {}
    for index, message in enumerate(conversation.messages):
        if pending_tools and message.role is Role.DEVELOPER and message.structured is None:
            yield _tools_message(index, pending_tools, message.content)
            pending_tools = ()
            continue
        if pending_tools and message.role not in (Role.SYSTEM, Role.DEVELOPER):
            yield _tools_message(-1, pending_tools, None)
            pending_tools = ()
        if message.role is Role.ASSISTANT:
            yield from _assistant_messages(index, message)
            call_names.update({call.id: call.name for call in message.tool_calls if call.id})
        elif message.role is Role.TOOL:
            yield _tool_message(index, message, call_names)
        else:
            yield HarmonyMessage(
                index, message.role, message.content, message.channel, message.name, message.recipient,
                message.content_type, message.structured,
            )  # fmt: skip
    if pending_tools:
        yield _tools_message(-1, pending_tools, None)


def _assistant_messages(index: int, message: Message) -> Iterator[HarmonyMessage]:
    if message.channel is not None and message.channel not in CHANNELS:
        raise RecordError(
            f"unknown channel {message.channel!r}; Harmony has: {', '.join(CHANNELS)}",
            code="unknown_channel",
            path=f"messages[{index}].channel",
        )
    if message.reasoning:
        yield HarmonyMessage(index, Role.ASSISTANT, message.reasoning, "analysis")
    if message.content or not message.tool_calls:
        channel = message.channel or ("commentary" if message.tool_calls or message.recipient else "final")
        yield HarmonyMessage(
            index,
            Role.ASSISTANT,
            message.content,
            channel,
            message.name,
            message.recipient,
            message.content_type,
        )
    for call in message.tool_calls:
        recipient = call.name if "." in call.name else f"functions.{call.name}"
        yield HarmonyMessage(index, Role.ASSISTANT, call.arguments, "commentary", None, recipient, "<|constrain|>json")


def _tool_message(index: int, message: Message, call_names: Mapping[str, str]) -> HarmonyMessage:
    name = message.name or call_names.get(message.tool_call_id or "")
    if name is None:
        raise RecordError(
            "a tool result needs a 'name', or a 'tool_call_id' that an earlier call has",
            code="tool_without_name",
            path=f"messages[{index}].name",
        )
    author = name if "." in name else f"functions.{name}"
    return HarmonyMessage(
        index, Role.TOOL, message.content, message.channel or "commentary", author, message.recipient or "assistant",
        message.content_type,
    )  # fmt: skip


def _tools_message(index: int, tools: tuple[Any, ...], instructions: str | None) -> HarmonyMessage:
    """A developer message with the tool definitions, and the instructions where the record has some."""
    described = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("a tool definition needs a 'name'", code="bad_tool", path=f"tools[{number}]")
        described.append(
            {
                "name": function["name"],
                "description": function.get("description") or "",
                "parameters": function.get("parameters"),
            }
        )
    content: dict[str, Any] = {
        "type": "developer_content",
        "tools": {"functions": {"name": "functions", "description": None, "tools": described}},
    }
    if instructions is not None:
        note_exact(instructions)  # the official renderer writes it, and what it does cannot be followed
        content["instructions"] = plain_text(instructions)
    return HarmonyMessage(index, Role.DEVELOPER, "", structured=content)


def _has_function_tools(structured: Mapping[str, Any] | None) -> bool:
    tools = (structured or {}).get("tools") or {}
    return bool((tools.get("functions") or {}).get("tools"))


TEMPLATE = Harmony
