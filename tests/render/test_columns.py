"""Rendering from the columns of a batch gives what rendering conversation by conversation gives."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import Conversations, keys_of, record_key, sources_of
from chatmill.errors import RecordError
from chatmill.read.columns import Lines, read_lines
from chatmill.read.files import decode_line
from chatmill.read.shapes import conversation_of, find_shape
from chatmill.render.by_columns import column_conversations
from chatmill.render.registry import bind
from chatmill.render.render import Rendered, render
from chatmill.tokenizer.byte_level import ByteTokenizer
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import unpacked

OPENAI = find_shape("openai")
TEMPLATES = ("qwen3_training", "qwen3", "chatml", "llama3", "markers", "token_native")


@pytest.fixture(scope="module", params=["compiled", "python"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to make columns of lines, and to copy ranges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATMILL_NATIVE", "1" if request.param == "compiled" else "0")
        yield request.param


def slowly(line: bytes, number: int) -> Conversation | RecordError | None:
    if not line.strip():
        return None
    raw = decode_line(line, f"f:{number}")
    try:
        if raw.error is not None:
            raise raw.error
        return conversation_of(raw.value, OPENAI, where=raw.where, source="s")
    except RecordError as error:
        return error


def both_ways(lines: list[bytes]) -> tuple[Conversations, list[Conversation]]:
    data = b"".join(line.rstrip(b"\n") + b"\n" for line in lines)
    batch, errors = read_lines(data, Lines(0, len(data), 1, data.count(b"\n")), path="f", source="s", shape=OPENAI)
    one_by_one = [slowly(line, number) for number, line in enumerate(lines, 1)]
    conversations = [found for found in one_by_one if isinstance(found, Conversation)]
    assert [str(error) for error in errors] == [str(e) for e in one_by_one if isinstance(e, RecordError)]
    assert [c._replace(metadata={}) for c in batch] == [c._replace(metadata={}) for c in conversations]
    assert list(keys_of(batch)) == list(map(record_key, conversations))
    assert list(sources_of(batch)) == [c.source for c in conversations]
    return batch, conversations


def assert_equal(found: Rendered, wanted: Rendered) -> None:
    for name in ("ids", "offsets", "run_offsets", "run_kinds", "run_messages", "conversation_runs", "message_offsets"):
        np.testing.assert_array_equal(getattr(found.tokens, name), getattr(wanted.tokens, name), err_msg=name)
    np.testing.assert_array_equal(found.tokens.message_weights, wanted.tokens.message_weights)
    np.testing.assert_array_equal(found.kept, wanted.kept)
    np.testing.assert_array_equal(found.stripped, wanted.stripped)
    assert [(i, str(e)) for i, e in found.failed] == [(i, str(e)) for i, e in wanted.failed]


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_bundled_source(template: str) -> None:
    tokenizer = with_control_tokens(load_tokenizer(str(unpacked("qwen3"))), bind_class(template).control_tokens)
    bound = bind(template, tokenizer)
    seen = 0
    for path in CONVERSATION_FILES:
        batch, conversations = both_ways(gzip.decompress(path.read_bytes()).splitlines()[:120])
        assert_equal(render(batch, bound, collect_failures=True), render(conversations, bound, collect_failures=True))
        seen += len(batch)
    assert seen > 500


TEXT = st.sampled_from(
    ["", "a", "\n", "\nx", "x\n", "</think>", "<think>r</think>\n\nok", "é́\n", "hello there\n\n", "\u2003é \u00a0"]
) | st.lists(st.sampled_from(["<think>", "</think>", "\n", "é", "a", " ", "<th", "ink>"]), max_size=6).map("".join)
USER_TEXT = TEXT | st.sampled_from(["<tool_response>x</tool_response>", "<tool_response>", "<x"])
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}),
    min_size=1,
    max_size=3,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": USER_TEXT},
    optional={
        "reasoning_content": st.none() | TEXT,
        "tool_calls": CALLS,
        "tool_call_id": st.just("1"),
        "weight": st.sampled_from([0, 0.5, 1]),
        "channel": st.just("final"),
    },
)
RECORDS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=5)},
    optional={"tools": st.lists(st.just({"name": "f"}), max_size=2), "id": st.text(max_size=2), "source": TEXT},
)


@pytest.fixture(scope="module")
def bound() -> dict[str, Any]:
    names = TEMPLATES
    controls = sorted({token for name in names for token in bind_class(name).control_tokens})
    tokenizer = ByteTokenizer(controls)
    return {name: bind(name, tokenizer) for name in names}


def bind_class(name: str) -> Any:
    from chatmill.render.registry import find_template

    return find_template(name)


@settings(max_examples=300, deadline=None)
@given(records=st.lists(RECORDS | st.just(None), max_size=6), template=st.sampled_from(TEMPLATES))
def test_random_batches(records: list[Any], template: str, bound: dict[str, Any]) -> None:
    lines = [b"\n" if record is None else json.dumps(record).encode() for record in records]
    batch, conversations = both_ways(lines)
    wanted = render(conversations, bound[template], collect_failures=True)
    assert_equal(render(batch, bound[template], collect_failures=True), wanted)


@settings(max_examples=100, deadline=None)
@given(records=st.lists(RECORDS, min_size=1, max_size=4), chosen=st.lists(st.integers(0, 3), max_size=5))
def test_chosen_conversations(records: list[Any], chosen: list[int], bound: dict[str, Any]) -> None:
    batch, conversations = both_ways([json.dumps(record).encode() for record in records])
    places = [number for number in chosen if number < len(batch)]
    taken = batch.take(np.array(places, dtype=np.int64))
    wanted = [conversations[number] for number in places]
    assert [c._replace(metadata={}) for c in taken] == [c._replace(metadata={}) for c in wanted]
    for template in bound.values():
        assert_equal(render(taken, template, collect_failures=True), render(wanted, template, collect_failures=True))


def test_most_conversations_are_written_from_columns() -> None:
    lines = [line for path in CONVERSATION_FILES for line in gzip.decompress(path.read_bytes()).splitlines()[:100]]
    batch, _ = both_ways(lines)
    template = bind("qwen3", ByteTokenizer(bind_class("qwen3").control_tokens))
    assert column_conversations(batch, template).mean() > 0.95
