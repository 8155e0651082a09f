"""Small conversations, written as pairs of role and text."""

from __future__ import annotations

from typing import Any

from chatmill.core.conversation import Conversation, Message, Role


def chat(*turns: tuple[str, str], **extra: Any) -> Conversation:
    return Conversation(tuple(Message(Role(role), text) for role, text in turns), **extra)


def chat_record(*turns: tuple[str, str], **extra: Any) -> dict[str, Any]:
    """The same as a record of the shape openai."""
    return {"messages": [{"role": role, "content": text} for role, text in turns], **extra}
