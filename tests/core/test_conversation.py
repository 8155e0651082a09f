"""Messages of a record checked and normalised, the errors that name what does not fit, and conversations as columns."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core import message_parser as parser
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations, Sources
from chatmill.core.message_parser import ROLE_ALIASES, parse_messages
from chatmill.core.messages import MessageColumns
from chatmill.core.texts import OptionalTexts, TextJoiner, Texts
from chatmill.errors import ChatmillError, DataError, RecordError


def refused(items: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        parse_messages(items)
    return caught.value


def test_role_aliases_in_any_case_and_with_white_space() -> None:
    for alias, role in ROLE_ALIASES.items():
        for spelling in (alias, alias.upper(), f"  {alias.title()}\n"):
            assert parse_messages([{"role": spelling, "content": "x"}]) == (Message(role, "x"),)


ARGUMENTS = '{"b": 1,   "a": 1.0e0, "a": "\\u00e9"}'
OBJECT = {"city": "Zürich", "days": [1, 2]}
NAMES = {"name": "n", "channel": "final", "recipient": "functions.f", "content_type": "json", "tool_call_id": "c"}
PART = {"type": "system_content", "reasoning_effort": "High"}
AS_IT_IS = " \r\n<|im_end|>\u0000 e\u0301 \U0001f600 "


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"role": "user", "content": AS_IT_IS}, {"content": AS_IT_IS}),
        ({"content": [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}]}, {"content": "a b"}),
        ({"content": [{"type": "output_text", "text": "a"}, {"text": "no type"}]}, {"content": "ano type"}),
        ({"content": []}, {"content": ""}),
        ({"role": "system", "content": [PART]}, {"content": "", "structured": PART}),
        ({"role": "developer", "content": [PART | {"type": "developer_content"}]}, {"content": ""}),
        ({"tool_calls": [{"name": "f", "arguments": OBJECT}]}, [ToolCall("f", '{"city": "Zürich", "days": [1, 2]}')]),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ARGUMENTS}}]},
            [ToolCall("f", ARGUMENTS, "c")],
        ),
        ({"tool_calls": [{"function": {"name": "g"}}]}, [ToolCall("g", "{}")]),
        ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, [ToolCall("f", "{}")]),
        ({"reasoning_content": "r"}, {"reasoning": "r"}),
        ({"thinking": "x", "reasoning_content": "x"}, {"reasoning": "x"}),
        ({"reasoning_content": ""}, {"reasoning": ""}),
        ({"reasoning_content": None, "thinking": None}, {"reasoning": None}),
        ({}, {"weight": None, "extra": {}}),
        ({"weight": None, "train": None}, {"weight": None}),
        ({"weight": 2}, {"weight": 2.0}),
        ({"weight": 0.25}, {"weight": 0.25}),
        ({"train": True}, {"weight": 1.0}),
        ({"train": False, "weight": 3}, {"weight": 0.0}),
        ({"train": True, "weight": 3}, {"weight": 3.0}),
        ({"train": True, "weight": 0}, {"weight": 0.0}),
        (NAMES | {"tags": ["x"]}, NAMES | {"extra": {"tags": ["x"]}}),
    ],
)
def test_what_fields_of_a_message_become(fields: dict[str, Any], found: dict[str, Any] | list[ToolCall]) -> None:
    """Calls are given as a list; all else by name."""
    content = "" if isinstance(found, list) else "a"
    (message,) = parse_messages([{"role": "assistant", "content": content, **fields}])
    expected = {"content": "", "tool_calls": tuple(found)} if isinstance(found, list) else found
    assert {name: getattr(message, name) for name in expected} == expected


OK = {"role": "user", "content": "q"}


def called(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("items", "code", "path"),
    [
        ({"role": "user"}, "messages_type", ""),
        ([OK, ["role", "content"]], "message_type", "[1]"),
        ([OK, {"role": "moderator", "content": "x"}], "unknown_role", "[1].role"),
        ([{"role": "user"}], "null_content", "[0].content"),
        ([{"role": "system", "content": [{"type": "system_content"}] * 2}], "non_text_part", "[0].content[0].type"),
        *(
            ([{**OK, **fields}], code, f"[0]{path}")
            for fields, code, path in (
                ({"content": [{"type": "text"}]}, "bad_part", ".content[0].text"),
                ({"content": [{"type": "system_content"}]}, "bad_part", ".content[0].type"),
                ({"content": [{"text": "x"}, {"type": "video_url"}]}, "non_text_part", ".content[1].type"),
                ({"content": [{"type": ["text"]}]}, "non_text_part", ".content[0].type"),
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
                ({"weight": parser.MAX_WEIGHT * 2}, "bad_weight", ".weight"),
                ({"train": 1}, "bad_weight", ".train"),
                ({"name": 3}, "field_type", ".name"),
                ({"tool_call_id": 1}, "field_type", ".tool_call_id"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_code_and_path(items: Any, code: str, path: str) -> None:
    """More of them are in `tests/read/test_nasty.py`."""
    error = refused(items)
    assert (error.code, error.path) == (code, f"messages{path}")
    assert str(error).startswith(f"field messages{path}: ")


def test_errors_say_which_and_where() -> None:
    assert "U+DFFF at character 4" in str(refused([{"role": "user", "content": "bad \udfff"}]))
    assert (parser.is_encodable("\U0001f600"), parser.is_encodable("\ud83d")) == (True, False)
    assert "sharegpt" in str(refused([{"from": "human", "value": "x"}]))
    assert "unknown role 'pope'; known roles: assistant, bot" in str(refused([{"role": "pope", "content": "x"}]))


def test_record_errors_are_value_errors_and_travel_between_processes() -> None:
    error = RecordError("m", code="c", path="p", where="f:1", record_id="r")
    copy = pickle.loads(pickle.dumps(error))
    assert all(isinstance(copy, kind) for kind in (DataError, ValueError, ChatmillError))
    assert str(copy) == str(error) == "f:1, record 'r', field p: m"
    assert (copy.code, copy.path, copy.where, copy.record_id) == ("c", "p", "f:1", "r")
    assert str(RecordError("m", code="c")) == "m"


ANY_TEXT = st.text(st.characters(), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
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


@given(role=st.sampled_from(sorted(ROLE_ALIASES)) | ANY_TEXT, content=ANY_TEXT | st.none() | st.integers())
@settings(max_examples=150)
def test_the_short_way_for_plain_messages_equals_the_long_one(role: str, content: Any) -> None:
    item = {"role": role, "content": content}
    long = outcome(lambda: (parser.parse_message(item, "messages[0]", "role", "content", ROLE_ALIASES),))
    assert outcome(lambda: parse_messages([item])) == long


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
MAYBE = st.none() | TEXT
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=2)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
FULL = st.builds(
    Message,
    role=st.sampled_from(Role),
    content=TEXT,
    tool_calls=st.lists(st.builds(ToolCall, TEXT, TEXT, MAYBE, st.integers(0, 127)), max_size=2).map(tuple),
    weight=st.none() | st.floats(0, 1e30),
    structured=st.none() | OBJECTS,
    extra=OBJECTS,
    has_content=st.booleans(),
    token_ids=st.none() | IDS,
    prompt_token_ids=st.none() | IDS,
    logprobs=st.none() | st.lists(st.none() | st.floats(max_value=0, width=32), max_size=3).map(tuple),
    parts=st.just(()),
    **dict.fromkeys(
        ("reasoning", "tool_call_id", "name", "recipient", "channel", "content_type", "finish_reason"), MAYBE
    ),
)
PLAIN = st.tuples(st.sampled_from(Role), TEXT).map(lambda pair: Message(*pair))
CONVERSATIONS = st.builds(
    Conversation,
    st.lists(PLAIN | FULL, max_size=3).map(tuple),
    tools=st.lists(OBJECTS, max_size=2).map(tuple),
    rejected=st.just(()),
    margin=st.none() | st.floats(allow_nan=False, width=32),
    **dict.fromkeys(("id", "source", "where"), TEXT) | dict.fromkeys(("metadata", "options"), OBJECTS),
)


@settings(max_examples=400)
@given(st.lists(st.lists(CONVERSATIONS, max_size=4), min_size=1, max_size=3), st.data())
def test_batches_give_the_same_objects_joined_and_chosen(parts: list[list[Conversation]], data: st.DataObject) -> None:
    together = [item for part in parts for item in part]
    batches = list(map(Conversations.of, parts))
    assert list(map(list, batches)) == [batch[:] for batch in batches] == parts
    assert list(batches[0].keys) == [item.id or item.where for item in parts[0]]
    joined = Conversations.joined(batches)
    assert list(joined) == together
    chosen = data.draw(st.lists(st.integers(0, len(together) - 1), max_size=4)) if together else []
    taken = joined.take(np.array(chosen, dtype=np.int64))
    assert list(taken) == [together[i] for i in chosen]
    assert list(Conversations.joined([taken, joined])) == [*(together[i] for i in chosen), *together]


def test_columns_that_nobody_has_take_no_memory() -> None:
    columns = MessageColumns.of([Message(Role.USER, "x")] * 1000)
    for name in ("names", "tool_call_ids", "recipients", "channels", "content_types", "structured"):
        column = getattr(columns, name)
        assert (len(column), column.lengths.strides, column.starts.strides) == (1000, (0,), (0,)), name
        assert not column.present.any()
    assert columns.weights.strides == columns.extra.strides == (0,)
    assert np.isnan(columns.weights).all()
    plain = MessageColumns.plain(columns.roles, columns.contents)
    assert plain.objects(0, 1000) == columns.objects(0, 1000)
    assert plain.call_offsets.tolist() == columns.call_offsets.tolist()


def test_a_buffer_that_columns_share_is_joined_once() -> None:
    first, second = Texts.of(["ab", "c"]), Texts.of(["d", "é"])
    shared = OptionalTexts(first.data, first.starts, first.lengths)
    joiner = TextJoiner([first, shared, second])
    texts, more = joiner.join([first, second]), joiner.join([OptionalTexts.none(1), shared])
    assert list(texts) == ["ab", "c", "d", "é"]
    assert list(more) == [None, "ab", "c"]
    assert texts.data is more.data
    assert len(texts.data) == 6
    alone = TextJoiner([first, OptionalTexts.none(2)])
    assert alone.join([first]).data is first.data, "nothing is copied if there is one buffer"


def test_sources_are_named_once() -> None:
    found = Sources.of(["a", "b", "a", "c"], np.array([2, 1, 0, -1, 1]))
    assert found.names == ("a", "b", "c")
    assert [found[i] for i in range(5)] == ["a", "b", "a", "c", "b"]
    assert found.counts() == {"a": 2, "b": 2, "c": 1}
    assert found.take(np.array([1, 4])).counts() == {"b": 2}
    assert [found.take(np.array([3, 0]))[i] for i in (0, 1)] == ["c", "a"]
