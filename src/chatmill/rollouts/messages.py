"""Messages between OpenAI's form, which users have, and Chatmill's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.core.conversation import Conversation, Message, ToolCall, call_keys
from chatmill.core.message_parser import parse_messages


def conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any] | None = None
) -> Conversation:
    """Return messages in OpenAI's form as a conversation.

    Raises:
        RecordError: A message is not in that form.
    """
    parsed = parse_messages([dict(message) for message in messages])
    return Conversation(parsed, id="rollout", tools=tuple(tools or ()), options=dict(options or {}))


def openai_message(message: Message) -> dict[str, Any]:
    """Return an assistant's message in OpenAI's form."""
    found: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_openai_call(call) for call in message.tool_calls]
    return found


def _openai_call(call: ToolCall) -> dict[str, Any]:
    """Return a call; the order of its fields counts where templates write the object as it is."""
    fields = {"name": call.name, "arguments": call.arguments}
    keys, names = call_keys(call.order)
    values = {"id": call.id, "type": "function", "function": {name: fields[name] for name in names}}
    return {key: values[key] for key in keys}
