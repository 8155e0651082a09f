"""Convert items of the Responses API to chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from chatmill.read.agents.answer_parts import AnswerParts
from chatmill.read.agents.branches import Lacking, PlainMessage

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
ANSWER_ITEMS = (
    "reasoning",
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "web_search_call",
    "file_search_call",
    "computer_call",
    "code_interpreter_call",
    "image_generation_call",
    "tool_search_call",
    "mcp_call",
)


def is_answer_item(item: Mapping[str, Any]) -> bool:
    """Check for an item of the model."""
    kind = item.get("type", "message")
    return kind in ANSWER_ITEMS or (kind == "message" and item.get("role") == "assistant")


def add_answer_item(parts: AnswerParts, item: Mapping[str, Any]) -> None:
    """Add one item of an answer to its parts."""
    match item.get("type", "message"):
        case "message":
            content = item_content(item.get("content"), parts.lacks)
            if not isinstance(content, str):
                parts.doubt = parts.doubt or "an answer that is no text"
                content = ""
            parts.add_text(content, is_own_message=True)
        case "reasoning":
            parts.add_reasoning(_reasoning_text(item, parts.lacks))
        case "function_call":
            if item.get("namespace"):
                parts.lacks.add("namespaces of calls")
            parts.add_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        case "custom_tool_call":
            parts.add_custom_call(item.get("call_id"), item.get("name"), item.get("input"))
        case "local_shell_call":
            action = json.dumps(item.get("action"), ensure_ascii=False)
            parts.add_custom_call(item.get("call_id") or item.get("id"), "local_shell", action)
        case kind:
            parts.lacks.add(f"{kind} items")
            parts.doubt = parts.doubt or f"an item of type {kind}"


def other_message(item: Mapping[str, Any], lacks: Lacking) -> PlainMessage | None:
    """Convert an item of others than the model to a message.

    Returns None for items without a place in a conversation.
    """
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item_content(item.get("content"), lacks)}
    if kind in OUTPUTS:
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id") or item.get("id"),
            "content": item_content(item.get("output"), lacks),
        }
    lacks.add(f"{kind} items")
    return None


def item_content(content: object, lacks: Lacking) -> Any:
    """Convert the content of an item.

    Returns a text, or parts for a content with pictures.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind in (*TEXT_PARTS, "refusal") and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif kind == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            lacks.add(f"{kind} parts")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def plain_tools(tools: object) -> list[Any] | None:
    """Convert flat function tools to OpenAI's chat form.

    Tools of other types stay unchanged.
    """
    if not isinstance(tools, list):
        return None
    plain: list[Any] = []
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" not in tool:
            function = {key: value for key, value in tool.items() if key != "type" and value is not None}
            plain.append({"type": "function", "function": function})
        else:
            plain.append(tool)
    return plain


def _reasoning_text(item: Mapping[str, Any], lacks: Lacking) -> str:
    """Return the reasoning, or else its summary.

    Another model may have written the summary.
    """
    content = _joined(item.get("content"), "")
    if content:
        return content
    summary = _joined(item.get("summary"), "\n\n")
    if summary:
        lacks.add("reasoning itself, in place of its summary")
    return summary


def _joined(parts: object, between: str) -> str:
    if not isinstance(parts, Iterable) or isinstance(parts, str):
        return ""
    texts = [str(part.get("text") or "") for part in parts if isinstance(part, Mapping)]
    return between.join(text for text in texts if text)
