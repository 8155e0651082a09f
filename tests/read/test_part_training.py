"""What a record says about the training of a part of a message is understood or refuses the record: never read past."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.part_training import speaks_of_training
from chatmill.errors import RecordError
from chatmill.read.record_shape import conversation_of
from chatmill.read.rows import read_rows
from chatmill.read.shapes import find_shape
from tests.read.three_ways import as_lines, batch_of

KEYS = ["train", "weight", "train_detail", "training_detail", "loss_mask", "Mask", "weights", "loss", "trainable"]
NOTHING = [None, "", [], {}]
VALUES = [False, True, 0, 0.5, "no", [0, 1], {"begin_offset": 0}]

Q = {"role": "user", "content": "q"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    asked = {**Q, "content": [PART]} if parts else Q  # a column of Arrow has one type
    return {"messages": [asked, {"role": "assistant", "content": list(parts) or "a", **more}]}


def step(**more: Any) -> dict[str, Any]:
    first = {"step_id": 1, "source": "user", "message": [PART] if "message" in more else "q"}
    return {
        "schema_version": "ATIF-v1.7",
        "trajectory_id": "t",
        "steps": [first, {"source": "agent", "message": "a", **more}],
    }


def is_understood(key: str, value: Any, place: str) -> bool:
    """Whether a text part says so in the form that is read."""
    if not place.endswith("]") or ("content[" not in place and "value[" not in place):
        return False
    return (key == "train" and isinstance(value, bool)) or (key == "weight" and type(value) in (int, float))


def places(key: str, value: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Records in which some part has a key: the shape, the record, and the place of the key."""
    more = {key: value}
    function = {**CALL["function"], **more}  # type: ignore[dict-item]
    tokens = {"prompt_token_ids": [1], "token_ids": [2]}
    weighed = said({**PART, **more})
    step_call = {"tool_call_id": "c", "function_name": "f", "arguments": "{}"}
    found = [
        ("openai", said({**PART, **more}), "messages[1].content[0]"),
        ("openai", said(PART, {**more, **PART}), "messages[1].content[1]"),
        ("openai", said({"type": "image_url", "image_url": {"url": "a.png"}, **more}), "messages[1].content[0]"),
        ("openai", said(tool_calls=[{**CALL, **more}]), "messages[1].tool_calls[0]"),
        ("openai", said(tool_calls=[{**CALL, "function": function}]), "messages[1].tool_calls[0].function"),
        ("openai", said(function_call=function), "messages[1].function_call"),
        ("harmony", {"messages_json": json.dumps(said({**PART, **more}))}, "messages_json.messages[1].content[0]"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": [{**PART, **more}]}]}, "conversations[0].value[0]"),
        ("anthropic", said({"type": "tool_use", "name": "f", "input": {}, **more}), "messages[1].content[0]"),
        (
            "anthropic",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "r", **more}]}]},
            "messages[0].content[0]",
        ),
        (
            "pairs",
            {"prompt": "q", "chosen": weighed["messages"][1:], "rejected": "b"},
            "chosen[0].content[0]",
        ),
        ("atif", step(message=[{**PART, **more}]), "steps[1].content[0]"),
        ("atif", step(**more), "steps[1]"),
        ("atif", step(tool_calls=[{**step_call, **more}]), "steps[1].tool_calls[0]"),
        ("atif", step(observation={"results": [{"content": "r", **more}]}), "steps[1].observation.results[0]"),
        ("calls", {"calls": [{**tokens, **more}]}, "calls[0]"),
    ]
    if key not in ("train", "weight"):
        found.append(("openai", said(**more), "messages[1]"))
        found.append(("sharegpt", {"conversations": [{"from": "gpt", "value": "a", **more}]}, "conversations[0]"))
    if isinstance(value, list):
        found.append(("calls", {**tokens, **more}, ""))
    return found


def three_ways(record: dict[str, Any], name: str) -> list[list[tuple[str, str]]]:
    """The errors of a record read as a line, as a row of Arrow, and by itself."""
    shape = find_shape(name)
    errors = [as_lines([record], shape)[1]]
    errors.append(read_rows(batch_of([record]), first=1, path="f", source="s", shape=shape)[1])
    try:
        conversation_of(record, shape)
        errors.append([])
    except RecordError as error:
        errors.append([error])
    return [[(error.code, error.path) for error in found] for found in errors]


@pytest.mark.parametrize("key", KEYS)
def test_a_part_that_says_how_it_is_trained_refuses_its_record_in_every_way_to_read_it(key: str) -> None:
    for value in VALUES:
        for shape, record, place in places(key, value):
            found = three_ways(record, shape)
            if is_understood(key, value, place) and "image_url" not in str(record) and "tool_" not in str(record):
                assert found == [[]] * 3, (shape, record)
                continue
            assert [[code for code, _ in errors] for errors in found] == [["part_training"]] * 3, (shape, record)
            path = f"{place}.{key}".lstrip(".")
            listed = f"{path}[0]" if key == "train_detail" and isinstance(value, list) else path
            assert all(errors[0][1] in (path, listed) for errors in found), (shape, record, found)


@pytest.mark.parametrize("value", NOTHING)
@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_says_nothing_refuses_nothing(key: str, value: Any) -> None:
    for shape, record, _ in places(key, value):
        found = three_ways(record, shape)
        assert not any(code == "part_training" for errors in found for code, _ in errors), record


@given(st.sampled_from([*KEYS, "weight_version", "t", "trai", "masK", "lossé", "é"]) | st.text(max_size=6))
def test_the_scanner_and_python_agree_about_what_speaks_of_training(key: str) -> None:
    """A key in a part is passed over by both or refused by both, in whatever letters."""
    if key in ("type", "text"):
        return
    for shape, record, _ in places(key, 1)[:2]:
        first, _, last = three_ways(record, shape)
        assert first == last
        assert bool(first) == (speaks_of_training(key) and key != "weight")


def test_other_keys_of_parts_are_counted_by_name() -> None:
    record = said({**PART, "cache_control": {"type": "ephemeral"}, "x": 1, "weight_version": "3", "none": None})
    assert three_ways(record, "openai") == [[]] * 3
    found = as_lines([record], find_shape("openai"))[0]
    assert {name for _, name in found.unused} == {
        f"messages[].content[].{k}" for k in ("cache_control", "x", "weight_version")
    }


def spans(record: dict[str, Any]) -> list[tuple[str, int, int, float]]:
    message = conversation_of(record, find_shape("openai")).messages[1]
    return [(span.field, span.begin, span.end, span.weight) for span in message.spans]


def test_parts_with_weights_are_characters_of_the_joined_text() -> None:
    parts = [{**PART, "text": "ab", "train": False}, {**PART, "text": "cd"}, {**PART, "text": "é", "weight": 0.5}]
    assert spans(said(*parts)) == [("content", 0, 2, 0.0), ("content", 4, 5, 0.5)]
    assert spans(said(PART, reasoning_content=parts)) == [("reasoning", 0, 2, 0.0), ("reasoning", 4, 5, 0.5)]
    message = conversation_of(said(*parts, weight=2), find_shape("openai")).messages[1]
    assert (message.content, message.weight) == ("abcdé", 2)
    assert conversation_of(said(*parts), find_shape("openai")).messages[1].weight == 1, "it says what is trained"
    assert conversation_of(said({**PART, "train": True}), find_shape("openai")).messages[1].weight == 1
    assert spans(said(*parts, train=False)) == [], "a message that is not trained has no part that is"


def detail(*entries: tuple[int, int, bool], field: str | None = None) -> list[dict[str, Any]]:
    more = {} if field is None else {"field": field}
    return [{"begin_offset": a, "end_offset": b, "train": train, **more} for a, b, train in entries]


def test_train_detail_counts_the_last_character_and_trains_nothing_between() -> None:
    record = said(train_detail=detail((1, 2, True), (4, 5, True), (6, 6, False)))
    record["messages"][1]["content"] = "abcdefgh"
    assert spans(record) == [("content", 0, 1, 0.0), ("content", 3, 4, 0.0), ("content", 6, 8, 0.0)]
    record = said(reasoning="abc", train_detail=detail((0, 1, True), field="reasoning"))
    assert spans(record) == [("reasoning", 2, 3, 0.0)]
    function = {"name": "f", "arguments": '{"a": 1}', "train_detail": detail((0, 4, True))}
    assert spans(said(tool_calls=[{**CALL, "function": function}])) == [("arguments", 5, 8, 0.0)]


WRONG: dict[str, dict[str, Any]] = {
    "overlap": said(train_detail=detail((0, 0, True), (0, 0, False))),
    "beyond the text": said(train_detail=detail((0, 1, True))),
    "begins late": said(train_detail=detail((1, 0, True))),
    "negative": said(train_detail=detail((-1, 0, True))),
    "no offset": said(train_detail=[{"begin_offset": 0, "train": True}]),
    "not a number": said(train_detail=[{"begin_offset": 0, "end_offset": 0.0, "train": True}]),
    "train is a number": said(train_detail=[{"begin_offset": 0, "end_offset": 0, "train": 1}]),
    "another key": said(train_detail=[{"begin_offset": 0, "end_offset": 0, "train": True, "weight": 2}]),
    "no such field": said(train_detail=detail((0, 0, True), field="name")),
    "no reasoning": said(train_detail=detail((0, 0, True), field="reasoning")),
    "twice": said({**PART, "train": True}, train_detail=detail((0, 0, True))),
    "sampled": said({**PART, "train": False}, token_ids=[1]),
    "an object's arguments": said(
        tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}, "train_detail": detail((0, 0, True))}}]
    ),
    "images": said({**PART, "train": False}, {"type": "image_url", "image_url": {"url": "a.png"}}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed_has_one_reason(case: str) -> None:
    with pytest.raises(RecordError) as refused:
        conversation_of(WRONG[case], find_shape("openai"))
    assert refused.value.code == "part_training"
