"""The fast way to read the common form of a record: JSON decoded straight into typed fields.

Anything else (another role spelling, a null content, an unknown field in a message, any mistake) is declined, and the
slow path of `read.files` and `read.shapes` reads it, with its checks and its errors. Where this way does not decline,
both give the same conversation, but for the metadata, which this one does not keep.
"""

from __future__ import annotations

import msgspec

from chatmill.core.conversation import Conversation, Message, Role, ToolCall


class _Function(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Record(msgspec.Struct):
    messages: list[_Message]
    id: str | None = None
    source: str | None = None
    tools: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_Record).decode
_tools = msgspec.json.Decoder(list[dict[str, object]] | None).decode
_new = tuple.__new__
_REST = Message(Role.USER, "")[6:]
_TOOLS_KEPT = 1024
_KNOWN_TOOLS: dict[bytes, tuple[object, ...]] = {}


def typed_conversation(line: bytes, where: str, source: str) -> Conversation | None:
    """The conversation of one line of JSONL in the OpenAI or Harmony shape; None when the slow path must read it."""
    if line.count(b'"messages"') != 1:
        return None
    try:
        record = _decode(line)
        tools = _tool_definitions(record.tools) if record.tools is not None else ()
    except (ValueError, RecursionError):
        return None
    if not record.messages or record.source == "":
        return None
    messages: list[Message] = []
    for item in record.messages:
        content, calls = item.content, item.tool_calls
        if calls:
            made = tuple([ToolCall(call.function.name, call.function.arguments, call.id) for call in calls])
            fields = (item.role, content or "", item.reasoning_content, made, item.tool_call_id, item.name)
        elif content is None:
            return None
        else:
            fields = (item.role, content, item.reasoning_content, (), item.tool_call_id, item.name)
        messages.append(_new(Message, fields + _REST))
    return Conversation(tuple(messages), record.id or "", record.source or source, tools, where)


def _tool_definitions(raw: msgspec.Raw) -> tuple[object, ...]:
    """The decoded tools; records of one source repeat them, so the last ones are kept."""
    key = bytes(raw)
    found = _KNOWN_TOOLS.get(key)
    if found is None:
        if len(_KNOWN_TOOLS) >= _TOOLS_KEPT:
            _KNOWN_TOOLS.clear()
        found = _KNOWN_TOOLS[key] = tuple(_tools(key) or ())
    return found
