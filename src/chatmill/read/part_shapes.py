"""Messages whose contents are typed parts, as Anthropic and LLaMA-Factory v1 write them, become plain messages.

A part that is a call, a result or reasoning becomes what an OpenAI message has for it. A part whose place among the
others matters and would be lost is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from chatmill.core.conversation import TEXT_PARTS, mistyped
from chatmill.errors import RecordError
from chatmill.read.files import json_inside

Item = Mapping[str, Any]


class PartForm(NamedTuple):
    """One way to write contents as parts."""

    messages: Callable[[Any, str], list[dict[str, Any]]]
    """What one message becomes, in OpenAI's form; the text is its path, for errors."""
    is_part: Callable[[Item], bool]
    """Whether a part of a content is one that this form alone has."""
    reasoning_type: str
    reasoning_key: str
    """The type of parts with reasoning, and where their text is."""
    call_types: tuple[str, ...]
    calls: Callable[[Item, str], list[Any]]
    """The types of parts with calls, and the calls of one."""
    tool: Callable[[Any], Any] = lambda tool: tool
    """A tool definition in OpenAI's form."""

    def fits(self, messages: object) -> bool:
        """Whether a list of messages holds a part that this form alone has."""
        return isinstance(messages, list) and any(
            self.is_part(part)
            for message in messages
            if isinstance(message, Mapping) and isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part, Mapping)
        )


def _is_list(content: object) -> TypeGuard[list[Any]]:
    """Whether a content is a list of objects; anything else is for the checks that all messages go through."""
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)


def _rest(message: Item, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def _anthropic(message: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(message, dict) or not _is_list(message.get("content")):
        return [message]
    if message.get("role") == "assistant":
        return [_answer(message, message["content"], path, ANTHROPIC)]
    found: list[dict[str, Any]] = []
    texts: list[Item] = []
    for i, part in enumerate(message["content"]):
        if part.get("type") != "tool_result":
            texts.append(part)
            continue
        if texts:
            found.append({**_rest(message, "content"), "content": texts})
            texts = []
        found.append(_anthropic_result(part, f"{path}.content[{i}]"))
    if texts or not found:
        found.append({**_rest(message, "content"), "content": texts})
    return found


def _answer(message: Item, parts: list[Item], path: str, form: PartForm) -> dict[str, Any]:
    """A message with reasoning, texts and calls, in this order; parts in another one would lose theirs."""
    thoughts: list[str] = []
    texts: list[Item] = []
    calls: list[Any] = []
    for i, part in enumerate(parts):
        kind, place = part.get("type", "text"), f"{path}.content[{i}]"
        if kind in form.call_types:
            calls += form.calls(part, place)
        elif calls:
            raise _misplaced(kind, form.call_types[0], place)
        elif kind == form.reasoning_type:
            if texts:
                raise _misplaced(kind, "text", place)
            thoughts.append(_text(part, form.reasoning_key, place))
        else:
            texts.append(part)
    answer = {**_rest(message, "content"), "content": texts or ([] if not calls else None)}
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    return answer | ({"tool_calls": calls} if calls else {})


def _anthropic_calls(part: Item, path: str) -> list[Any]:
    return [{"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input", {})}]


def _anthropic_result(part: Item, path: str) -> dict[str, Any]:
    content = part.get("content", "")
    found = {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": "" if content is None else content}
    return found | _rest(part, "type", "content", "tool_use_id", "cache_control")


def _anthropic_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or "input_schema" not in tool or "function" in tool:
        return tool
    function = {**_rest(tool, "input_schema", "cache_control", "type"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _llamafactory(message: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(message, dict):
        return [message]
    found = _rest(message, "content", "loss_weight")
    if "loss_weight" in message:
        if message.get("weight") not in (None, message["loss_weight"]):
            differ = "'weight' and 'loss_weight' are both given and differ; keep one"
            raise RecordError(differ, code="bad_weight", path=f"{path}.weight")
        found["weight"] = message["loss_weight"]
    content = message.get("content")
    if not _is_list(content):
        return [{**found, "content": content}]
    parts = [_text_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    return [_answer(found, parts, path, LLAMAFACTORY_V1)]


def _text_part(part: Item, path: str) -> Item:
    """A part with a text as OpenAI has it; others as they are."""
    if part.get("type", "text") in list(TEXT_PARTS) and "value" in part:
        return {"type": "text", "text": _text(part, "value", path)}
    return part


def _llamafactory_calls(part: Item, path: str) -> list[Any]:
    """The calls of a part: an object or a list of them, or the JSON of either."""
    value = part.get("value")
    if isinstance(value, str):
        try:
            value = json_inside(value)
        except ValueError as error:
            raise RecordError(f"the call is not JSON: {error}", code="bad_tool_call", path=f"{path}.value") from None
    return value if isinstance(value, list) else [value]


def _text(part: Item, key: str, path: str) -> str:
    text = part.get(key)
    if not isinstance(text, str):
        raise mistyped("the text of a part must be a string", text, code="bad_part", path=f"{path}.{key}")
    return text


def _misplaced(kind: object, before: str, path: str) -> RecordError:
    return RecordError(
        f"a part of type {kind!r} comes after one of type {before!r}, and chat templates write it before; split the "
        "message in two",
        code="bad_part",
        path=path,
    )


ANTHROPIC = PartForm(
    messages=_anthropic,
    is_part=lambda part: part.get("type") in ("tool_use", "tool_result", "thinking", "redacted_thinking"),
    reasoning_type="thinking",
    reasoning_key="thinking",
    call_types=("tool_use",),
    calls=_anthropic_calls,
    tool=_anthropic_tool,
)
LLAMAFACTORY_V1 = PartForm(
    messages=_llamafactory,
    is_part=lambda part: "type" in part and "value" in part,
    reasoning_type="reasoning",
    reasoning_key="value",
    call_types=("tool_call", "tool_calls"),
    calls=_llamafactory_calls,
)
