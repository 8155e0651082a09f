"""The messages that openai-harmony is given for a conversation: the oracle of the template `harmony`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role

CHANNELS = ("analysis", "commentary", "final")


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
        raise ValueError(f"unknown channel {message.channel!r}")
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
        raise ValueError("a tool result needs a name")
    author = name if "." in name else f"functions.{name}"
    return HarmonyMessage(
        index, Role.TOOL, message.content, message.channel or "commentary", author, message.recipient or "assistant",
        message.content_type,
    )  # fmt: skip


def _tools_message(index: int, tools: tuple[Any, ...], instructions: str | None) -> HarmonyMessage:
    """A developer message with the tool definitions, and the instructions where the record has some."""
    described = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool definition needs a name")
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
        content["instructions"] = instructions
    return HarmonyMessage(index, Role.DEVELOPER, "", structured=content)
