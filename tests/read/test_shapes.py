"""Shapes of records: each one read, detected and refused with file, line, record id, field path and code."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError, UnknownNameError
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import SHAPES, detect_shape, find_shape
from tests.read.shape_examples import ALPACA, EXAMPLES, OPENAI, PAIR, SHAREGPT, A, Q
from tests.read.three_ways import every_way

PART_SHAPES = {"anthropic"}
"""Their records are in test_part_shapes.py."""


def read(record: Any, shape: str = "openai") -> Conversation:
    return conversation_of(record, find_shape(shape), where="f.jsonl:7", source="f")


def refused(record: Any, shape: str = "openai") -> RecordError:
    with pytest.raises(RecordError) as caught:
        read(record, shape)
    assert caught.value.where == "f.jsonl:7"
    assert str(caught.value).startswith("f.jsonl:7")
    return caught.value


# --- each shape ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_each_shape_gives_the_same_conversation_and_keeps_the_rest(name: str) -> None:
    options = {"enable_thinking": False}
    record = {**EXAMPLES[name], "id": "r1", "source": "s", "tools": [{"name": "f"}], "score": 0.5, "lang": None}
    assert read({**record, "chat_template_kwargs": options}, name) == Conversation(
        (Q, A),
        id="r1",
        source="s",
        tools=({"name": "f"},),
        where="f.jsonl:7",
        metadata={"score": 0.5, "lang": None},
        options=options,
    )
    assert read({**record, "chat_template_kwargs": None}, name).options == {}
    assert set(EXAMPLES) | PART_SHAPES | {"calls", "atif"} == set(SHAPES)


@pytest.mark.parametrize("shape", ["openai", "sharegpt"])
def test_messages_as_a_text_of_json(shape: str) -> None:
    key, items = next(iter(EXAMPLES[shape].items()))
    assert read({key: json.dumps(items)}, shape).messages == (Q, A)
    assert refused({key: "[{"}, shape).code == "invalid_json"
    assert refused({key: "hello"}, shape).code == "messages_type"


def test_the_context_of_an_instruction_is_joined_to_it() -> None:
    record = {"instruction": "q", "context": "c", "response": "a", "category": "x"}
    assert read(record, "instruction_response").messages == (Message(Role.USER, "q\nc"), A)


@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "completion"), ("instruction", "output")])
def test_the_reasoning_of_an_answer_in_a_column(names: tuple[str, str]) -> None:
    record = dict(zip(names, ("q", "a"), strict=True))
    shape = detect_shape([record], "f")
    some = [record | {"reasoning": "hm"}, record | {"reasoning": ""}, record | {"reasoning": None}]
    assert [one.messages[-1].reasoning for one in every_way(shape, some)] == ["hm", None, None]
    twice = record | {"reasoning": "hm", "thinking": "no"}
    with pytest.raises(RecordError, match="both given and differ"):
        conversation_of(twice, shape)


def test_sharegpt_with_system_field_tools_and_calls() -> None:
    record = {
        "system": "s",
        "tools": '[{"name": "f"}]',
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "Function_Call", "value": '[{"name": "g"}, {"name": "h", "arguments": "{ }"}]'},
            {"from": "tool", "value": "2"},
            {"from": "gpt", "value": "a", "weight": 0},
        ],
    }
    conversation = read(record, "sharegpt")
    assert conversation.tools == ({"name": "f"},)
    assert conversation.messages == (
        Message(Role.SYSTEM, "s"),
        Q,
        Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", '{"x": 1}'),)),
        Message(Role.TOOL, "1"),
        Message(Role.ASSISTANT, "", tool_calls=(ToolCall("g", "{}"), ToolCall("h", "{ }"))),
        Message(Role.TOOL, "2"),
        Message(Role.ASSISTANT, "a", weight=0.0),
    )


def test_harmony_dicts_and_rows() -> None:
    messages = [
        {"role": "system", "content": [{"type": "system_content", "reasoning_effort": "Low"}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "channel": "analysis", "content": "hm"},
        {"role": "assistant", "channel": "final", "content": "a"},
    ]
    expected = (
        Message(Role.SYSTEM, "", structured={"type": "system_content", "reasoning_effort": "Low"}),
        Q,
        Message(Role.ASSISTANT, "hm", channel="analysis"),
        Message(Role.ASSISTANT, "a", channel="final"),
    )
    assert read({"messages": messages}, "harmony").messages == expected
    row = read({"messages_json": json.dumps({"messages": messages}), "synth_id": "x"}, "harmony")
    assert row.messages == expected
    assert row.metadata == {"synth_id": "x"}


# --- refused -------------------------------------------------------------------------------------------------------

LONE = {"type": "system_content", "model_identity": "\ud800"}
USER = '{"messages": [{"role": "user", "content": "%s"}]}'


def call(value: str) -> dict[str, Any]:
    return {"conversations": [{"from": "function_call", "value": value}]}


@pytest.mark.parametrize(
    ("shape", "record", "code", "path"),
    [
        ("openai", None, "record_type", ""),
        ("openai", {"conversation": []}, "missing_field", "messages"),
        ("openai", {"messages": []}, "no_messages", "messages"),
        ("openai", {"messages": "x"}, "messages_type", "messages"),
        ("openai", {"messages": [{"role": "user", "content": None}]}, "null_content", "messages[0].content"),
        ("openai", {**OPENAI, "id": True}, "id_type", "id"),
        ("openai", {**OPENAI, "id": "\ud800"}, "lone_surrogate", "id"),
        ("openai", {**OPENAI, "source": ["x"]}, "field_type", "source"),
        ("openai", {**OPENAI, "tools": "[{"}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": {"name": "f"}}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "tools": [{"at": date(2026, 1, 1)}]}, "bad_tools", "tools"),
        ("openai", {**OPENAI, "chat_template_kwargs": ["enable_thinking"]}, "bad_options", "chat_template_kwargs"),
        ("openai", {**OPENAI, "chat_template_kwargs": {1: 2}}, "bad_options", "chat_template_kwargs"),
        ("openai", {**OPENAI, "chat_template_kwargs": {"a": b"x"}}, "bad_options", "chat_template_kwargs"),
        ("openai", {**OPENAI, "chat_template_kwargs": {"a": "\ud800"}}, "lone_surrogate", "chat_template_kwargs"),
        ("openai", {**OPENAI, "tools": [{"name": "\ud800"}]}, "lone_surrogate", "tools"),
        ("openai", {**OPENAI, "tools": '[{"name": "\\ud800"}]'}, "lone_surrogate", "tools"),
        ("openai", {**OPENAI, "tools": "[" * 5000}, "invalid_json", ""),
        ("sharegpt", {"messages_": []}, "missing_field", "conversations"),
        ("sharegpt", {"conversations": [{"from": "judge", "value": "x"}]}, "unknown_role", "conversations[0].from"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "null_content", "conversations[0].value"),
        ("sharegpt", call("[3]"), "bad_tool_call", "conversations[0].tool_calls[0]"),
        ("sharegpt", call("[" * 5000), "invalid_json", ""),
        ("sharegpt", call("1" * 5000), "bad_tool_call", "conversations[0].value"),
        ("openai", {**OPENAI, "tools": "1" * 5000}, "bad_tools", "tools"),
        ("sharegpt", {**SHAREGPT, "system": 5}, "missing_field", "system"),
        ("alpaca", {"instruction": "x"}, "missing_field", "output"),
        ("alpaca", {"instruction": 3, "output": "x"}, "missing_field", "instruction"),
        ("alpaca", {**ALPACA, "output": "\udc00"}, "lone_surrogate", "output"),
        ("alpaca", {**ALPACA, "history": [["a"]]}, "bad_history", "history[0]"),
        ("alpaca", {**ALPACA, "history": [["a", "b"], "ab"]}, "bad_history", "history[1]"),
        ("alpaca", {**ALPACA, "history": 5}, "bad_history", "history"),
        ("alpaca", {**ALPACA, "history": [["a", "\ud800"]]}, "lone_surrogate", "history[0][1]"),
        ("prompt_completion", {"prompt": "x"}, "missing_field", "completion"),
        ("prompt_completion", {"prompt": [], "completion": []}, "no_messages", "prompt"),
        ("prompt_completion", {"prompt": OPENAI["messages"], "completion": "x"}, "missing_field", "prompt"),
        ("prompt_completion", {"prompt": OPENAI["messages"], "completion": [1]}, "message_type", "completion[0]"),
        ("harmony", {"messages_json": 5}, "missing_field", "messages_json"),
        ("harmony", {"messages_json": "{"}, "invalid_json", "messages_json"),
        ("harmony", {"messages_json": "[]"}, "missing_field", "messages_json"),
        ("harmony", {"messages_json": '{"messages": 1, "messages": []}'}, "duplicate_key", "messages_json"),
        ("harmony", {"messages_json": '"\ud800"'}, "lone_surrogate", "messages_json"),
        ("harmony", {"messages": [{"role": "system", "content": [LONE]}]}, "lone_surrogate", "messages[0].content[0]"),
        ("openai", {**OPENAI, "tools": [{"name": "f", "limit": 10**5000}]}, "bad_tools", "tools"),
        ("harmony", {"messages_json": USER % "\\ud800"}, "lone_surrogate", "messages_json.messages[0].content"),
    ],
)
def test_what_does_not_fit_its_shape(shape: str, record: Any, code: str, path: str) -> None:
    error = refused(record, shape)
    assert (error.code, error.path) == (code, path)


def test_an_error_names_the_record() -> None:
    error = refused({"id": "r9", "messages": [{"role": "user", "content": 5}]})
    assert error.record_id == "r9"
    assert str(error).startswith("f.jsonl:7, record 'r9', field messages[0].content: ")


def test_a_missing_field_says_what_there_is() -> None:
    assert "it has: text, label" in str(refused({"text": 1, "label": 2}))


def test_big_integers_in_tools_and_metadata_are_kept() -> None:
    conversation = read({**OPENAI, "tools": [{"name": "f", "limit": 10**300}], "n": 10**399})
    assert conversation.tools[0]["limit"] == 10**300
    assert conversation.metadata["n"] == 10**399


# --- detection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_each_shape_is_detected(name: str) -> None:
    assert detect_shape([EXAMPLES[name]], "f").name == name


@pytest.mark.parametrize(
    ("records", "name"),
    [
        ([{"messages": [{"role": "assistant", "channel": "final", "content": "a"}]}], "harmony"),
        ([{"messages": [{"role": "system", "content": [{"type": "system_content"}]}]}], "harmony"),
        ([{"messages": [{"role": "user", "content": "what is page_content in x_content?"}]}], "openai"),
        ([{"messages": [{"role": "user", "content": [{"type": "text", "text": "_content"}]}]}], "openai"),
        ([{"messages": SHAREGPT["conversations"]}], "sharegpt"),
        ([{**OPENAI, "prompt": "x", "completion": "y"}], "openai"),
        ([3, None, ALPACA], "alpaca"),
        ([PAIR, PAIR, OPENAI], "prompt_completion"),
        ([{"messages": []}], "openai"),
        ([{"messages": json.dumps(OPENAI["messages"])}], "openai"),
        ([{"conversations": OPENAI["messages"]}], "openai"),
        ([{"conversations": json.dumps(SHAREGPT["conversations"])}], "sharegpt"),
        ([{"messages": json.dumps([{"role": "assistant", "channel": "final", "content": "a"}])}], "harmony"),
    ],
)
def test_detection_by_what_most_records_fit(records: list[Any], name: str) -> None:
    assert detect_shape(records, "f").name == name


@pytest.mark.parametrize(("records", "found"), [([{"text": "x"}], "the first record has: text"), ([3], "none of them")])
def test_a_shape_that_cannot_be_told_lists_the_names(records: list[Any], found: str) -> None:
    with pytest.raises(RecordError, match=found) as caught:
        detect_shape(records, "f.jsonl")
    assert caught.value.code == "unknown_shape"
    assert "openai, alpaca, prompt_completion, instruction_response" in str(caught.value)


def test_an_unknown_shape_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'sharegpt'\?"):
        find_shape("share_gpt")


# --- properties ----------------------------------------------------------------------------------------------------

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
        conversation = conversation_of(record, SHAPES[name], where="f:1")
    except RecordError as error:
        outcome: Any = error
    else:
        outcome = conversation
    assert outcome.where == "f:1"
    assert isinstance(outcome, RecordError) or outcome.messages
