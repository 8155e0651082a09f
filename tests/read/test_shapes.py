"""Shapes of records: each one read, detected and refused with file, line, record id, field path and code."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import DataError, RecordError, UnknownNameError
from chatmill.read.conversations import ConversationFile, read_conversations
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import SHAPES, detect_shape, find_shape
from tests.compiler.builds import write_jsonl
from tests.read.three_ways import every_way

Q, A = Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
OPENAI = {"messages": TURNS}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
ALPACA = {"instruction": "q", "output": "a"}
PAIR = {"prompt": "q", "completion": "a"}
EXAMPLES = {
    "openai": OPENAI,
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "prompt_completion": PAIR,
    "harmony": {"messages_json": json.dumps(OPENAI)},
    "instruction_response": {"instruction": "q", "response": "a"},
    "question_answer": {"question": "q", "answer": "a"},
}
"""The same conversation in every shape."""
OTHERS = {"anthropic", "calls", "atif"}
"""Anthropic's is below, the others have files of their own."""


def read(record: Any, shape: str = "openai") -> Conversation:
    return conversation_of(record, find_shape(shape), where="f.jsonl:7", source="f")


def refused(record: Any, shape: str = "openai") -> RecordError:
    with pytest.raises(RecordError) as caught:
        read(record, shape)
    assert caught.value.where == "f.jsonl:7"
    assert str(caught.value).startswith("f.jsonl:7")
    return caught.value


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_each_shape_gives_the_same_conversation_and_keeps_the_rest(name: str) -> None:
    assert set(EXAMPLES) | OTHERS == set(SHAPES)
    options = {"enable_thinking": False}
    record = {**EXAMPLES[name], "id": "r1", "source": "s", "tools": [{"name": "f", "n": 10**300}], "n": 10**399}
    assert read({**record, "lang": None, "chat_template_kwargs": options}, name) == Conversation(
        (Q, A),
        id="r1",
        source="s",
        tools=({"name": "f", "n": 10**300},),
        where="f.jsonl:7",
        metadata={"n": 10**399, "lang": None},
        options=options,
    )
    assert read({**record, "chat_template_kwargs": None}, name).options == {}


def called(*calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, "", tool_calls=calls)


SYSTEM = {"type": "system_content", "reasoning_effort": "Low"}
HARMONY = [
    {"role": "system", "content": [SYSTEM]},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
    {"role": "assistant", "channel": "analysis", "content": "hm"},
    {"role": "assistant", "channel": "final", "content": "a"},
]
FROM_HARMONY = [
    *(Message(Role.SYSTEM, "", structured=SYSTEM), Q, Message(Role.ASSISTANT, "hm", channel="analysis")),
    A._replace(channel="final"),
]
WITH_CALLS = {
    "system": "s",
    "conversations": [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "1"},
        {"from": "Function_Call", "value": '[{"name": "g"}, {"name": "h", "arguments": "{ }"}]'},
        {"from": "tool", "value": "2"},
        {"from": "gpt", "value": "a", "weight": 0},
    ],
}
FROM_CALLS = [
    *(Message(Role.SYSTEM, "s"), Q, called(ToolCall("f", '{"x": 1}')), Message(Role.TOOL, "1")),
    *(called(ToolCall("g", "{}"), ToolCall("h", "{ }")), Message(Role.TOOL, "2"), A._replace(weight=0.0)),
]


@pytest.mark.parametrize(
    ("shape", "record", "messages"),
    [
        ("openai", {"messages": json.dumps(TURNS)}, [Q, A]),
        ("sharegpt", {"conversations": json.dumps(SHAREGPT["conversations"])}, [Q, A]),
        (
            "instruction_response",
            {"instruction": "q", "context": "c", "response": "a"},
            [Q._replace(content="q\nc"), A],
        ),
        ("sharegpt", WITH_CALLS, FROM_CALLS),
        ("harmony", {"messages": HARMONY}, FROM_HARMONY),
        ("harmony", {"messages_json": json.dumps({"messages": HARMONY})}, FROM_HARMONY),
    ],
)
def test_what_a_record_of_a_shape_becomes(shape: str, record: Any, messages: list[Message]) -> None:
    assert read({**record, "tools": '[{"name": "f"}]', "x": "y"}, shape) == Conversation(
        tuple(messages), tools=({"name": "f"},), where="f.jsonl:7", source="f", metadata={"x": "y"}
    )


@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "completion"), ("instruction", "output")])
def test_the_reasoning_of_an_answer_in_a_column(names: tuple[str, str]) -> None:
    record = dict(zip(names, ("q", "a"), strict=True))
    shape = detect_shape([record], "f")
    some = [record | {"reasoning": "hm"}, record | {"reasoning": ""}, record | {"reasoning": None}]
    assert [one.messages[-1].reasoning for one in every_way(shape, some)] == ["hm", None, None]
    with pytest.raises(RecordError, match="both given and differ"):
        conversation_of(record | {"reasoning": "hm", "thinking": "no"}, shape)


CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
TEXT = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}], "is_error": False}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    "messages": [
        TURNS[0],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, TEXT, CALL]},
        {"role": "user", "content": [RESULT, TEXT]},
        {"role": "assistant", "content": [CALL]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
}


def test_anthropic_calls_results_and_thinking() -> None:
    assert detect_shape([OPENAI, OPENAI, ANTHROPIC], "f").name == "anthropic", "one such record among plain ones"
    found, plain = every_way(find_shape("anthropic"), [ANTHROPIC, OPENAI], as_text="messages")
    call = ToolCall("f", '{"x": 1}', "c1")
    assert found.messages == (
        *(Message(Role.SYSTEM, "Be brief."), Q, Message(Role.ASSISTANT, "x", reasoning="hm", tool_calls=(call,))),
        *(Message(Role.TOOL, "2", tool_call_id="c1", extra={"is_error": False}), Message(Role.USER, "x")),
        called(call)._replace(has_content=False),
    )
    assert found.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert plain.messages == (Q, A)


@pytest.mark.parametrize(
    ("parts", "code", "path"),
    [
        ([CALL, TEXT], "bad_part", "content[1]"),
        ([TEXT, {"type": "thinking", "thinking": "y"}], "bad_part", "content[1]"),
        ([{"type": "image", "source": {}}], "bad_image", "content[0].source"),
        ([{"type": "redacted_thinking", "data": "x"}], "non_text_part", "content[0].type"),
        ([{"type": "thinking", "thinking": 3}], "bad_part", "content[0].thinking"),
        ([{**CALL, "input": 3}], "bad_tool_call", "tool_calls[0].arguments"),
    ],
)
def test_an_anthropic_part_that_cannot_be_kept_is_refused(parts: list[Any], code: str, path: str) -> None:
    """The place is that of the item in the record: a result before it, which became two messages, does not count."""
    before = [TURNS[0], {"role": "user", "content": [RESULT, TEXT]}]
    error = refused({"messages": [*before, {"role": "assistant", "content": parts}]}, "anthropic")
    assert (error.code, error.path) == (code, f"messages[2].{path}")


LONE = {"type": "system_content", "model_identity": "\ud800"}
USER = '{"messages": [{"role": "user", "content": "%s"}]}'
TURN = "conversations[0]"


def turn(value: Any, speaker: str = "function_call") -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value}]}


@pytest.mark.parametrize(
    ("shape", "record", "code", "path"),
    [
        ("openai", None, "record_type", ""),
        ("openai", {"conversation": []}, "missing_field", "messages"),
        ("openai", {"messages": "[{"}, "invalid_json", "messages"),
        ("sharegpt", {"conversations": "hello"}, "messages_type", "conversations"),
        ("openai", {**OPENAI, "id": True}, "id_type", "id"),
        ("openai", {**OPENAI, "id": "\ud800"}, "lone_surrogate", "id"),
        ("openai", {**OPENAI, "source": ["x"]}, "field_type", "source"),
        ("openai", {**OPENAI, "tools": "[{"}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": {"name": "f"}}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": [{"at": date(2026, 1, 1)}]}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": "1" * 5000}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": [{"name": "f", "limit": 10**5000}]}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": [{"name": "\ud800"}]}, "lone_surrogate", "tools"),
        ("openai", {**OPENAI, "tools": '[{"name": "\\ud800"}]'}, "lone_surrogate", "tools"),
        ("openai", {**OPENAI, "tools": "[" * 5000}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "chat_template_kwargs": ["enable_thinking"]}, "bad_options", "chat_template_kwargs"),
        ("openai", {**OPENAI, "chat_template_kwargs": {1: 2}}, "bad_options", "chat_template_kwargs"),
        ("openai", {**OPENAI, "chat_template_kwargs": {"a": b"x"}}, "bad_options", "chat_template_kwargs"),
        ("openai", {**OPENAI, "chat_template_kwargs": {"a": "\ud800"}}, "lone_surrogate", "chat_template_kwargs"),
        ("sharegpt", {"messages_": []}, "missing_field", "conversations"),
        ("sharegpt", turn("x", "judge"), "unknown_role", f"{TURN}.from"),
        ("sharegpt", turn(None, "gpt"), "null_content", f"{TURN}.value"),
        ("sharegpt", turn("[3]"), "bad_tool_call", f"{TURN}.tool_calls[0]"),
        ("sharegpt", turn("[" * 5000), "bad_tool_call", f"{TURN}.value"),
        ("sharegpt", turn("1" * 5000), "bad_tool_call", f"{TURN}.value"),
        ("sharegpt", {**SHAREGPT, "system": 5}, "missing_field", "system"),
        ("alpaca", {"instruction": "x"}, "missing_field", "output"),
        ("alpaca", {"instruction": 3, "output": "x"}, "missing_field", "instruction"),
        ("alpaca", {**ALPACA, "output": "\udc00"}, "lone_surrogate", "output"),
        ("alpaca", {**ALPACA, "history": [["a", "b"], ["a"]]}, "bad_history", "history[1]"),
        ("alpaca", {**ALPACA, "history": ["ab"]}, "bad_history", "history[0]"),
        ("alpaca", {**ALPACA, "history": 5}, "bad_history", "history"),
        ("alpaca", {**ALPACA, "history": [["a", "\ud800"]]}, "lone_surrogate", "history[0][1]"),
        ("prompt_completion", {"prompt": "x"}, "missing_field", "completion"),
        ("prompt_completion", {"prompt": [], "completion": []}, "no_messages", "prompt"),
        ("prompt_completion", {"prompt": TURNS, "completion": "x"}, "missing_field", "prompt"),
        ("prompt_completion", {"prompt": TURNS, "completion": [1]}, "message_type", "completion[0]"),
        ("harmony", {"messages_json": 5}, "missing_field", "messages_json"),
        ("harmony", {"messages_json": "{"}, "invalid_json", "messages_json"),
        ("harmony", {"messages_json": "[]"}, "missing_field", "messages_json"),
        ("harmony", {"messages_json": '{"messages": 1, "messages": []}'}, "duplicate_key", "messages_json"),
        ("harmony", {"messages_json": '"\ud800"'}, "lone_surrogate", "messages_json"),
        ("harmony", {"messages": [{"role": "system", "content": [LONE]}]}, "lone_surrogate", "messages[0].content[0]"),
        ("harmony", {"messages_json": USER % "\\ud800"}, "lone_surrogate", "messages_json.messages[0].content"),
    ],
)
def test_what_does_not_fit_its_shape(shape: str, record: Any, code: str, path: str) -> None:
    error = refused(record, shape)
    assert (error.code, error.path) == (code, path)


def test_an_error_names_the_record_and_what_there_is() -> None:
    error = refused({"id": "r9", "messages": [{"role": "user", "content": 5}]})
    assert error.record_id == "r9"
    assert str(error).startswith("f.jsonl:7, record 'r9', field messages[0].content: ")
    assert "it has: text, label" in str(refused({"text": 1, "label": 2}))


@pytest.mark.parametrize(
    ("records", "name"),
    [
        *(([record], name) for name, record in EXAMPLES.items()),
        ([{"messages": HARMONY[:1]}], "harmony"),
        ([{"messages": HARMONY[3:]}], "harmony"),
        ([{"messages": json.dumps(HARMONY[3:])}], "harmony"),
        ([{"messages": [{"role": "user", "content": "what is page_content in x_content?"}]}], "openai"),
        ([{"messages": [{"role": "user", "content": [{"type": "text", "text": "_content"}]}]}], "openai"),
        ([{"messages": SHAREGPT["conversations"]}], "sharegpt"),
        ([{**OPENAI, "prompt": "x", "completion": "y"}], "openai"),
        ([3, None, ALPACA], "alpaca"),
        ([PAIR, PAIR, OPENAI], "prompt_completion"),
        ([{"messages": []}], "openai"),
        ([{"messages": json.dumps(TURNS)}], "openai"),
        ([{"conversations": TURNS}], "openai"),
        ([{"conversations": json.dumps(SHAREGPT["conversations"])}], "sharegpt"),
    ],
)
def test_detection_by_what_most_records_fit(records: list[Any], name: str) -> None:
    assert detect_shape(records, "f").name == name


@pytest.mark.parametrize(("record", "found"), [({"text": "x"}, "the first record has: text"), (3, "none of them")])
def test_a_shape_that_cannot_be_told_is_an_error_of_the_file(tmp_path: Path, record: Any, found: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [json.dumps(record)])
    errors: list[RecordError] = []
    with pytest.raises(RecordError, match=found) as caught:
        list(read_conversations(path, on_error=errors.append))
    assert (caught.value.code, caught.value.where, errors) == ("unknown_shape", str(path), [])
    assert "openai, alpaca, prompt_completion, instruction_response" in str(caught.value)


def test_a_file_states_its_shape_and_gives_its_conversations(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "talks.en.jsonl", [SHAREGPT, {**SHAREGPT, "source": "own", "id": "x"}])
    file = ConversationFile(path)
    assert file.shape.name == "sharegpt"
    first, second = file
    assert (first.messages, first.where, first.source) == ((Q, A), f"{path}:1", "talks")
    assert (second.where, second.source, second.id) == (f"{path}:2", "own", "x")
    assert list(file) == [first, second], "a file can be read again"
    assert next(iter(ConversationFile(path, source="given"))).source == "given"
    both = write_jsonl(tmp_path / "a.jsonl", [{**OPENAI, **PAIR}])
    assert next(read_conversations(both)).metadata == PAIR
    assert next(read_conversations(both, shape="prompt_completion")).metadata == OPENAI, "a named shape wins"
    with pytest.raises(UnknownNameError):
        next(read_conversations(both, shape="chat"))
    assert [one.id for one in read_conversations([path, str(both)])] == ["", "x", ""]
    with pytest.raises(DataError, match="no input files"):
        next(read_conversations([]))


def test_a_file_with_no_readable_record_has_no_shape_and_no_conversation(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["{", "{"])
    with pytest.raises(RecordError, match=r"a\.jsonl:1: not JSON"):
        list(read_conversations(path))
    errors: list[RecordError] = []
    assert list(read_conversations([path, write_jsonl(tmp_path / "b.jsonl", [])], on_error=errors.append)) == []
    assert len(errors) == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(set().union(*(shape.fields for shape in SHAPES.values())))


@given(record=VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES), name=st.sampled_from(sorted(SHAPES)))
@settings(max_examples=200)
def test_any_record_gives_a_conversation_or_a_record_error(record: Any, name: str) -> None:
    try:
        outcome: Any = conversation_of(record, SHAPES[name], where="f:1")
    except RecordError as error:
        outcome = error
    assert outcome.where == "f:1"
    assert isinstance(outcome, RecordError) or outcome.messages
