"""What a record says about the training of a part of a message is not read past: the record is refused."""

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
            wanted = [("part_training", f"{place}.{key}".lstrip("."))]
            assert three_ways(record, shape) == [wanted] * 3, (shape, record)


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
        assert bool(first) == speaks_of_training(key)


def test_other_keys_of_parts_are_read_past() -> None:
    record = said({**PART, "cache_control": {"type": "ephemeral"}, "x": 1, "weight_version": "3"})
    assert three_ways(record, "openai") == [[]] * 3
