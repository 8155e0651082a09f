"""Checking and normalising the messages of one record: what is accepted, and which error names what is not."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Message, Role, ToolCall
from chatmill.core.message_parser import (
    MAX_WEIGHT,
    ROLE_ALIASES,
    checked_text,
    is_encodable,
    parse_message,
    parse_messages,
)
from chatmill.errors import ChatmillError, DataError, RecordError


def one(**fields: Any) -> Message:
    return parse_messages([{"role": "assistant", **fields}])[0]


def refused(items: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        parse_messages(items)
    return caught.value


# --- roles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", sorted(ROLE_ALIASES))
def test_role_aliases_in_any_case_and_with_white_space(alias: str) -> None:
    for spelling in (alias, alias.upper(), f"  {alias.title()}\n"):
        (message,) = parse_messages([{"role": spelling, "content": "x"}])
        assert message.role is ROLE_ALIASES[alias]


# --- accepted ------------------------------------------------------------------------------------------------------


def test_a_plain_message_is_role_and_content_as_they_are() -> None:
    text = " \r\n<|im_end|>\u0000 e\u0301 \U0001f600 "
    assert parse_messages([{"role": "user", "content": text}]) == (Message(Role.USER, text),)


ARGUMENTS = '{"b": 1,   "a": 1.0e0, "a": "\\u00e9"}'
OBJECT = {"city": "Zürich", "days": [1, 2]}
NAMES = {"name": "n", "channel": "final", "recipient": "functions.f", "content_type": "json", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"content": [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}]}, {"content": "a b"}),
        ({"content": [{"type": "output_text", "text": "a"}, {"text": "no type"}]}, {"content": "ano type"}),
        ({"content": []}, {"content": ""}),
        ({"tool_calls": [{"name": "f", "arguments": OBJECT}]}, [ToolCall("f", '{"city": "Zürich", "days": [1, 2]}')]),
        (
            {"tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": ARGUMENTS}}]},
            [ToolCall("f", ARGUMENTS, "c1")],
        ),
        ({"tool_calls": [{"function": {"name": "g"}}]}, [ToolCall("g", "{}")]),
        ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, [ToolCall("f", "{}")]),
        ({"reasoning_content": "r"}, {"reasoning": "r"}),
        ({"thinking": "t"}, {"reasoning": "t"}),
        ({"thinking": "x", "reasoning_content": "x"}, {"reasoning": "x"}),
        ({"reasoning_content": ""}, {"reasoning": ""}),
        ({"reasoning_content": None, "thinking": None}, {"reasoning": None}),
        ({}, {"weight": None, "extra": {}}),
        ({"weight": None, "train": None}, {"weight": None}),
        ({"weight": 0}, {"weight": 0.0}),
        ({"weight": 2}, {"weight": 2.0}),
        ({"weight": 0.25}, {"weight": 0.25}),
        ({"train": True}, {"weight": 1.0}),
        ({"train": False}, {"weight": 0.0}),
        ({"train": False, "weight": 3}, {"weight": 0.0}),
        ({"train": True, "weight": 3}, {"weight": 3.0}),
        ({"train": True, "weight": 0}, {"weight": 0.0}),
        (NAMES | {"tags": ["x"]}, NAMES | {"extra": {"tags": ["x"]}}),
    ],
)
def test_what_fields_of_a_message_become(fields: dict[str, Any], found: dict[str, Any] | list[ToolCall]) -> None:
    """Calls are given as a list; all else by name."""
    message = one(**{"content": "" if isinstance(found, list) else "a", **fields})
    expected = {"content": "", "tool_calls": tuple(found)} if isinstance(found, list) else found
    assert {name: getattr(message, name) for name in expected} == expected


@pytest.mark.parametrize(("role", "kind"), [("system", "system_content"), ("developer", "developer_content")])
def test_harmony_content_is_kept_as_it_is(role: str, kind: str) -> None:
    part = {"type": kind, "reasoning_effort": "High"}
    (message,) = parse_messages([{"role": role, "content": [part]}])
    assert (message.content, message.structured) == ("", part)


# --- refused -------------------------------------------------------------------------------------------------------

OK = {"role": "user", "content": "q"}


def called(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("items", "code", "path"),
    [
        ("user: hi", "messages_type", ""),
        (None, "messages_type", ""),
        ({"role": "user"}, "messages_type", ""),
        ([], "no_messages", ""),
        ([OK, "hi"], "message_type", "[1]"),
        ([OK, None], "message_type", "[1]"),
        ([OK, ["role", "content"]], "message_type", "[1]"),
        ([{"content": "x"}], "missing_role", "[0].role"),
        ([{"from": "human", "value": "x"}], "missing_role", "[0].role"),
        ([{"role": 7, "content": "x"}], "role_type", "[0].role"),
        ([{"role": None, "content": "x"}], "role_type", "[0].role"),
        ([OK, {"role": "moderator", "content": "x"}], "unknown_role", "[1].role"),
        ([{"role": "user"}], "null_content", "[0].content"),
        ([{"role": "system", "content": [{"type": "system_content"}] * 2}], "non_text_part", "[0].content[0].type"),
        *(
            ([{**OK, **fields}], code, f"[0]{path}")
            for fields, code, path in (
                ({"content": None}, "null_content", ".content"),
                ({"content": 42}, "content_type", ".content"),
                ({"content": {"text": "x"}}, "content_type", ".content"),
                ({"content": ["x"]}, "bad_part", ".content[0]"),
                ({"content": [{"type": "text"}]}, "bad_part", ".content[0].text"),
                ({"content": [{"type": "system_content"}]}, "bad_part", ".content[0].type"),
                ({"content": [{"text": "x"}, {"type": "video_url"}]}, "non_text_part", ".content[1].type"),
                ({"content": [{"type": ["text"]}]}, "non_text_part", ".content[0].type"),
                ({"content": "a\udc00"}, "lone_surrogate", ".content"),
                ({"content": [{"text": "\ud800"}]}, "lone_surrogate", ".content[0].text"),
                ({"reasoning_content": "\ud800"}, "lone_surrogate", ".reasoning_content"),
                ({"name": "\ud800"}, "lone_surrogate", ".name"),
                ({"reasoning_content": 5}, "reasoning_type", ".reasoning_content"),
                ({"thinking": "a", "reasoning_content": "b"}, "reasoning_twice", ".thinking"),
                ({"tool_calls": {"name": "f"}}, "bad_tool_call", ".tool_calls"),
                ({"tool_calls": ["f"]}, "bad_tool_call", ".tool_calls[0]"),
                ({"tool_calls": [{"function": {"name": 3}}]}, "bad_tool_call", ".tool_calls[0]"),
                (called(arguments=3), "bad_tool_call", ".tool_calls[0].function.arguments"),
                (called(arguments="\ud800"), "lone_surrogate", ".tool_calls[0].function.arguments"),
                ({"tool_calls": [{"name": "f", "arguments": None}]}, "bad_tool_call", ".tool_calls[0].arguments"),
                ({"tool_calls": [{"name": "f", "id": 3}]}, "field_type", ".tool_calls[0].id"),
                ({"function_call": "f"}, "bad_tool_call", ".function_call"),
                ({"function_call": {"name": "f"}, "tool_calls": [{"name": "f"}]}, "bad_tool_call", ""),
                ({"weight": True}, "bad_weight", ".weight"),
                ({"weight": -0.5}, "bad_weight", ".weight"),
                ({"weight": math.nan}, "bad_weight", ".weight"),
                ({"weight": 10**400}, "bad_weight", ".weight"),
                ({"weight": MAX_WEIGHT * 2}, "bad_weight", ".weight"),
                ({"train": 1}, "bad_weight", ".train"),
                ({"name": 3}, "field_type", ".name"),
                ({"tool_call_id": 1}, "field_type", ".tool_call_id"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_code_and_path(items: Any, code: str, path: str) -> None:
    error = refused(items)
    assert (error.code, error.path) == (code, f"messages{path}")
    assert str(error).startswith(f"field messages{path}: ")


def test_errors_say_which_and_where() -> None:
    assert "U+DFFF at character 4" in str(refused([{"role": "user", "content": "bad \udfff"}]))
    assert checked_text("\U0001f600", "x") == "\U0001f600"
    assert (is_encodable("\U0001f600"), is_encodable("\ud83d")) == (True, False)
    assert "sharegpt" in str(refused([{"from": "human", "value": "x"}]))
    assert "unknown role 'moderator'; known roles: assistant, bot" in str(
        refused([{"role": "moderator", "content": "x"}])
    )


def test_record_errors_are_value_errors_and_travel_between_processes() -> None:
    error = RecordError("m", code="c", path="p", where="f:1", record_id="r")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, DataError)
    assert isinstance(copy, ValueError)
    assert isinstance(copy, ChatmillError)
    assert str(copy) == str(error) == "f:1, record 'r', field p: m"
    assert (copy.code, copy.path, copy.where, copy.record_id) == ("c", "p", "f:1", "r")
    assert str(RecordError("m", code="c")) == "m"


# --- properties ----------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["role", "content", "weight", "train", "tool_calls", "function_call", "reasoning_content", "thinking", "name"]
PARTS = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image", 3, []]), "text": VALUES})
CALLS = st.fixed_dictionaries({}, optional={"id": VALUES, "name": VALUES, "arguments": VALUES, "function": VALUES})
ITEMS = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "Assistant", "tool"]), "content": VALUES | st.lists(PARTS, max_size=2)},
        optional={"tool_calls": st.lists(CALLS, max_size=2), "function_call": CALLS},
    ),
)


def outcome(parse: Any) -> tuple[Any, tuple[str, str, str] | None]:
    """What parsing gives, or the error it raises."""
    try:
        return parse(), None
    except RecordError as error:
        return None, (error.code, error.path, error.message)


@given(items=st.lists(ITEMS, max_size=3) | VALUES)
@settings(max_examples=400)
def test_anything_at_all_gives_messages_or_a_record_error(items: Any) -> None:
    messages, error = outcome(lambda: parse_messages(items))
    if error is not None:
        assert error[0]
        assert error[1].startswith("messages")
        return
    assert len(messages) == len(items)
    for message in messages:
        assert isinstance(message.role, Role)
        message.content.encode()
        json.dumps([call.arguments for call in message.tool_calls], ensure_ascii=False).encode()


@given(role=st.sampled_from(sorted(ROLE_ALIASES)) | TEXT, content=TEXT | st.none() | st.integers())
@settings(max_examples=150)
def test_the_short_way_for_plain_messages_equals_the_long_one(role: str, content: Any) -> None:
    item = {"role": role, "content": content}
    long = outcome(lambda: (parse_message(item, "messages[0]", "role", "content", ROLE_ALIASES),))
    assert outcome(lambda: parse_messages([item])) == long
