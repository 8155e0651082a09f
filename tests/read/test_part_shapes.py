"""Contents of typed parts: Anthropic's become plain messages, and nothing loses its place."""

from __future__ import annotations

from typing import Any

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import detect_shape, find_shape
from tests.read.three_ways import every_way

CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}], "is_error": False}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    "messages": [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "so"}, CALL],
        },
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
}
PLAIN = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def read(record: Any, shape: str) -> Conversation:
    return conversation_of(record, find_shape(shape), where="f:1", source="s")


def refused(record: Any, shape: str) -> RecordError:
    with pytest.raises(RecordError) as caught:
        read(record, shape)
    return caught.value


def test_anthropic_calls_results_and_thinking() -> None:
    assert detect_shape([PLAIN, PLAIN, ANTHROPIC], "f").name == "anthropic", "one such record among plain ones"
    found, plain = every_way(find_shape("anthropic"), [ANTHROPIC, PLAIN], as_text="messages")
    assert found.messages == (
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.USER, "q"),
        Message(Role.ASSISTANT, "so", reasoning="hm", tool_calls=(ToolCall("f", '{"x": 1}', "c1"),)),
        Message(Role.TOOL, "2", tool_call_id="c1", extra={"is_error": False}),
        Message(Role.USER, "and?"),
        Message(Role.ASSISTANT, "a"),
    )
    assert found.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert plain.messages == read(PLAIN, "openai").messages


def test_a_call_alone_has_no_content() -> None:
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [CALL]}]}
    assert not read(record, "anthropic").messages[1].has_content


@pytest.mark.parametrize(
    ("parts", "code", "path"),
    [
        ([CALL, {"type": "text", "text": "x"}], "bad_part", "messages[2].content[1]"),
        ([{"type": "text", "text": "x"}, {"type": "thinking", "thinking": "y"}], "bad_part", "messages[2].content[1]"),
        ([{"type": "image", "source": {}}], "bad_image", "messages[2].content[0].source"),
        ([{"type": "redacted_thinking", "data": "x"}], "non_text_part", "messages[2].content[0].type"),
        ([{"type": "thinking", "thinking": 3}], "bad_part", "messages[2].content[0].thinking"),
        ([{**CALL, "input": 3}], "bad_tool_call", "messages[2].tool_calls[0].arguments"),
    ],
)
def test_an_anthropic_part_that_cannot_be_kept_is_refused(parts: list[Any], code: str, path: str) -> None:
    """The place is that of the item in the record: a result before it, which became two messages, does not count."""
    before = [{"role": "user", "content": "q"}, {"role": "user", "content": [RESULT, {"type": "text", "text": "x"}]}]
    error = refused({"messages": [*before, {"role": "assistant", "content": parts}]}, "anthropic")
    assert (error.code, error.path) == (code, path)
