"""Convert content blocks of Anthropic's API to OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatmill.read.agents.answer_parts import AnswerParts
from chatmill.read.agents.branches import Lacking, PlainMessage

PICTURES = ("image",)


def add_answer_blocks(parts: AnswerParts, blocks: object) -> None:
    """Add the content blocks of an answer to its parts."""
    if isinstance(blocks, str):
        parts.add_text(blocks)
        return
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, Mapping):
            continue
        kind = block.get("type")
        if kind == "text":
            parts.add_text(str(block.get("text") or ""))
        elif kind == "thinking":
            parts.add_reasoning(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking":
            parts.add_reasoning("")
        elif kind == "tool_use":
            parts.add_call(block.get("id"), block.get("name"), block.get("input"))
        else:
            # Tools that the server runs have no place in a conversation with a client's tools.
            parts.lacks.add(f"{kind} blocks")
            parts.doubt = parts.doubt or f"a block of type {kind}"


def user_messages(content: object, lacks: Lacking) -> list[PlainMessage]:
    """Split a user message into results of tools and texts."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[PlainMessage] = []
    texts: list[Any] = []
    for block in content if isinstance(content, list) else ():
        if isinstance(block, str):
            block = {"type": "text", "text": block}
        if not isinstance(block, Mapping):
            continue
        if block.get("type") == "tool_result":
            _close(messages, texts)
            messages.append(tool_result(block, lacks))
        elif block.get("type") == "text" or block.get("type") in PICTURES:
            texts.append(plain_part(block))
        else:
            lacks.add(f"{block.get('type')} blocks")
    _close(messages, texts)
    return messages


def tool_result(block: Mapping[str, Any], lacks: Lacking) -> PlainMessage:
    """Convert the block of a tool result to a message."""
    message: PlainMessage = {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id"),
        "content": result_content(block.get("content"), lacks),
    }
    if block.get("is_error") is True:
        message["is_error"] = True
    return message


def result_content(content: object, lacks: Lacking) -> Any:
    """Convert the content of a result.

    Returns a text, or parts for a content with pictures.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if isinstance(part, Mapping) and (part.get("type") == "text" or part.get("type") in PICTURES):
            parts.append(plain_part(part))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            lacks.add(f"{kind} parts of results")
    return join_texts(parts)


def plain_part(block: Mapping[str, Any]) -> Any:
    """Remove the fields for caching and citations from a part."""
    return {key: value for key, value in block.items() if key in ("type", "text", "source", "image_url")}


def join_texts(parts: Sequence[Any]) -> Any:
    """Join parts into one text if all are texts."""
    if all(part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text") or "") for part in parts)
    return list(parts)


def _close(messages: list[PlainMessage], texts: list[Any]) -> None:
    """Make a user message of the parts so far."""
    if texts:
        messages.append({"role": "user", "content": join_texts(texts)})
        texts.clear()
