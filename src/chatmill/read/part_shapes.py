"""Messages whose contents are typed parts, as Anthropic writes them, become plain messages.

A part that is a call, a result or reasoning becomes what an OpenAI message has for it. A part whose place among the
others matters and would be lost is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any

from chatmill.core.message_parser import mistyped
from chatmill.core.part_training import refuse_part_training
from chatmill.errors import RecordError

Item = Mapping[str, Any]
OWN_TYPES = ("tool_use", "tool_result", "thinking", "redacted_thinking")
"""Types of parts that nobody else has."""
_ORDER = {"thinking": 0, "tool_use": 2}
"""Where parts stand in an answer; all others are between these."""


def has_typed_parts(messages: object) -> bool:
    """Return whether a list of messages holds a part that Anthropic alone has."""
    return isinstance(messages, list) and any(
        part.get("type") in OWN_TYPES
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping)
    )


def plain_messages(message: Any, path: str) -> list[dict[str, Any]]:
    """Return what one message becomes, in OpenAI's form; `path` is its place, for errors."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return [message]  # for the checks that all messages go through
    for i, part in enumerate(content):  # a call or a result may become something that has no parts
        is_text = part.get("type", "text") == "text"
        refuse_part_training(part, f"{path}.content[{i}]", ("train", "weight") if is_text else ())
    if message.get("role") == "assistant":
        return [_answer(message, content, path)]
    plain: list[dict[str, Any]] = []
    for is_result, group in groupby(content, lambda part: part.get("type") == "tool_result"):
        parts = list(group)
        plain += map(_result, parts) if is_result else [{**message, "content": parts}]
    return plain or [message]


def plain_tool(tool: Any) -> Any:
    """Return a tool definition in OpenAI's form."""
    if not isinstance(tool, dict) or "input_schema" not in tool or "function" in tool:
        return tool
    function = {**_rest(tool, "input_schema", "cache_control", "type"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _answer(message: Item, parts: list[Item], path: str) -> dict[str, Any]:
    """Return a message with reasoning, texts and calls, in this order; parts in another one would lose theirs."""
    kinds = [str(part.get("type", "text")) for part in parts]
    steps = [_ORDER.get(kind, 1) for kind in kinds]
    for i, (before, step) in enumerate(pairwise(steps), 1):
        if step < before:
            raise RecordError(
                f"a part of type {kinds[i]!r} comes after one of type {'tool_use' if before == 2 else 'text'!r}, and "
                "chat templates write it before; split the message in two",
                code="bad_part",
                path=f"{path}.content[{i}]",
            )
    thoughts = [_thought(part, f"{path}.content[{i}]") for i, part in enumerate(parts) if steps[i] == 0]
    texts = [part for part, step in zip(parts, steps, strict=True) if step == 1]
    calls = [
        {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input", {})}
        for part, step in zip(parts, steps, strict=True)
        if step == 2
    ]
    answer = {**message, "content": texts or ([] if not calls else None)}
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    return answer | ({"tool_calls": calls} if calls else {})


def _result(part: Item) -> dict[str, Any]:
    content = part.get("content", "")
    result = {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": "" if content is None else content}
    return result | _rest(part, "type", "content", "tool_use_id", "cache_control")


def _thought(part: Item, path: str) -> str:
    text = part.get("thinking")
    if not isinstance(text, str):
        raise mistyped("the text of a part must be a string", text, code="bad_part", path=f"{path}.thinking")
    return text


def _rest(message: Item, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}
