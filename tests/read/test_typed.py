"""The fast path declines, or gives what the slow path gives: compiled or not, as an object and as columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.batch import ConversationBatch
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import RoleCode
from chatmill.core.texts import Texts
from chatmill.core.tools import listed_tools
from chatmill.errors import RecordError
from chatmill.read.files import decode_line
from chatmill.read.shapes import conversation_of, find_shape
from chatmill.read.typed import line_groups, read_batch, typed_conversation
from tests.core.native.mutations import mutated, real_lines, seeds


@pytest.fixture(scope="module", params=["compiled", "msgspec"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to make columns of lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATMILL_NATIVE", "1" if request.param == "compiled" else "0")
        yield request.param


def slowly(line: bytes, number: int, shape: str = "openai") -> Conversation | RecordError | None:
    if not line or line.isspace():
        return None
    raw = decode_line(line, f"f:{number}")
    try:
        if raw.error is not None:
            raise raw.error
        return conversation_of(raw.value, find_shape(shape), where=raw.where, source="s")
    except RecordError as error:
        return error


def bare(conversation: Any) -> Any:
    """Without what the fast path does not keep."""
    return conversation._replace(metadata={}) if isinstance(conversation, Conversation) else str(conversation)


def from_columns(batch: ConversationBatch, number: int) -> tuple[list[Message], list[bool]]:
    """The messages of a conversation as its columns have them, and which of them have names."""
    columns, messages = batch.messages, []
    places = range(int(batch.offsets[number]), int(batch.offsets[number + 1]))
    for place in places:
        calls = range(int(columns.call_offsets[place]), int(columns.call_offsets[place + 1]))
        assert columns.has_reasoning[place] or columns.reasoning[place] == ""
        messages.append(
            Message(
                Role[RoleCode(columns.roles[place]).name],
                columns.contents[place],
                columns.reasoning[place] if columns.has_reasoning[place] else None,
                tuple(ToolCall(columns.call_names[i], columns.call_arguments[i]) for i in calls),
            )
        )
    return messages, columns.named[places.start : places.stop].tolist()


def without_names(message: Message) -> Message:
    calls = tuple(call._replace(id=None) for call in message.tool_calls)
    return message._replace(tool_call_id=None, name=None, tool_calls=calls)


def same_as_slow(lines: list[bytes], shape: str = "openai", end: bytes = b"\n") -> np.ndarray:
    """Which conversations of these lines are in columns, after a comparison of everything with the slow path."""
    data = b"ahead\n" + b"".join(line + b"\n" for line in lines[:-1]) + b"".join(line + end for line in lines[-1:])
    stop = len(data)
    batch, errors = read_batch(data + b"behind", 6, stop, 11, "f", "s", lambda line, n: slowly(line, n, shape))
    numbers = range(11, 11 + len(lines))
    found = [slowly(line, number, shape) for line, number in zip(lines, numbers, strict=True)]
    wanted = [item for item in found if isinstance(item, Conversation)]
    assert list(map(str, errors)) == [str(item) for item in found if isinstance(item, RecordError)]
    assert len(batch) == len(wanted) == len(batch.offsets) - 1 == len(batch.in_columns) == len(batch.numbers)
    assert batch.offsets[-1] == len(batch.messages) == len(batch.messages.call_offsets) - 1
    assert list(batch.keys) == [item.id or item.where for item in wanted]
    assert isinstance(batch.keys, Texts) == (all(item.id for item in wanted) and bool(batch.in_columns.all()))
    assert batch.sources == [item.source for item in wanted]
    for number, item in enumerate(wanted):
        if batch.in_columns[number]:
            messages, named = from_columns(batch, number)
            assert messages == list(map(without_names, item.messages)), item
            assert named == [bool(message.tool_call_id or message.name) for message in item.messages]
            assert batch.tools[number] == listed_tools(item.tools)
        else:
            assert batch.offsets[number] == batch.offsets[number + 1]
            assert batch.tools[number] == ""
    assert list(map(bare, batch)) == list(map(bare, wanted))
    for line, item in zip(lines, found, strict=True):
        alone = typed_conversation(line, "f:1", "s")
        if alone is not None:
            assert isinstance(item, Conversation), item
            assert bare(alone) == bare(item._replace(where="f:1"))
    return batch.in_columns


@pytest.mark.parametrize("shape", ["openai", "harmony"])
def test_all_bundled_and_nasty_records(shape: str) -> None:
    lines = real_lines()
    in_columns = same_as_slow(lines, shape)
    assert in_columns.sum() > 0.9 * len(lines) > 10_000
    assert not in_columns.all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mutated_records(seed: int, way: str) -> None:
    lines = list(mutated(4000, seed))
    in_columns = same_as_slow(lines, end=b"")
    assert 200 < in_columns.sum() < 3000
    assert way == "msgspec" or all(same_as_slow(lines[i : i + 1]).shape for i in range(0, 4000, 7))


def test_every_ending_of_short_lines() -> None:
    """Bytes are looked at in words: so every remainder of a word must come up at the end of the data."""
    whole = [line for line in seeds() if len(line) < 400][:20]
    assert len(whole) == 20
    for line in whole:
        for end in range(len(line) + 1):
            for last in (b"", b"\n"):
                assert same_as_slow([line, line[:end]], end=last)[0]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.text(max_size=3)
    | st.sampled_from(["user", "assistant", "tool"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": st.text(max_size=3) | VALUES})},
    optional={"id": st.text(max_size=2) | VALUES, "type": st.just("function")},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "User", "human", "x"])},
    optional={
        "content": st.text(max_size=5) | VALUES,
        "reasoning_content": st.text(max_size=3) | VALUES,
        "tool_calls": st.none() | st.lists(CALLS, max_size=2) | VALUES,
        "tool_call_id": st.text(max_size=2) | VALUES,
        "name": st.text(max_size=2) | VALUES,
        "weight": VALUES,
        "channel": st.just("final"),
    },
)
RECORDS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=3) | VALUES},
    optional={
        "id": st.text(max_size=3) | VALUES,
        "source": st.text(max_size=3) | VALUES,
        "tools": st.lists(st.dictionaries(st.text(max_size=2), VALUES, max_size=2), max_size=2) | VALUES,
        "extra": VALUES,
        "messages_json": st.just('{"messages": [{"role": "user", "content": "other"}]}'),
    },
)


@settings(max_examples=400)
@given(st.lists(RECORDS, max_size=3), st.booleans(), st.sampled_from(["openai", "harmony"]))
def test_random_records(records: list[dict[str, Any]], escape: bool, shape: str) -> None:
    lines = [json.dumps(r, ensure_ascii=escape).encode("utf-8", errors="surrogatepass") for r in records]
    same_as_slow(lines, shape)


PLAIN = b'{"messages": [{"role": "user", "content": "hi"}]%s}'


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages": [{"role": "user", "content": "bad \\ud800 here"}]}',
        PLAIN % b', "x": "\xff"',
        PLAIN % b', "\xc3": 1',
        PLAIN % (b', "x": ' + b"9" * 4301),
        PLAIN % b', "messages": []',
        PLAIN % b', "y": "messages", "x": 1, "x": 2',
        PLAIN % b', "conversations": 1, "conversations": 2',
        PLAIN % b', "x": "conversations", "conversations": 1, "y": 1, "y": 2',
        PLAIN % b', "tools": [1]',
        PLAIN % b', "tools": {"a": 1}',
        PLAIN % b', "tools": "[]"',
        PLAIN % b', "source": ""',
        PLAIN % b"" + b" x",
        PLAIN % b', "x": [1,]',
        b"\xef\xbb\xbf" + PLAIN % b"",
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"id": "1"}',
        b"[]",
    ],
)
def test_what_is_declined(line: bytes) -> None:
    assert typed_conversation(line, "f:1", "s") is None
    assert same_as_slow([PLAIN % b', "id": "1"', line, PLAIN % b', "id": "2"']).sum() == 2


def test_a_harmony_row_with_its_messages_elsewhere() -> None:
    line = PLAIN % b', "messages_json": "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"other\\"}]}"'
    assert not same_as_slow([line], "harmony").any()


def test_nesting() -> None:
    for depth in (1, 90, 110, 2000):
        line = PLAIN % (b', "x": ' + b"[" * depth + b"]" * depth)
        assert depth > 100 or same_as_slow([line]).all()
        same_as_slow([line])
    same_as_slow([PLAIN % (b', "tools": [{"a": ' + b"[" * depth + b"]" * depth + b"}]") for depth in (1, 90, 110)])


def test_no_lines_and_blank_lines() -> None:
    assert len(same_as_slow([])) == 0
    assert len(same_as_slow([b"", b" ", b"\r", b"\x0c"])) == 0
    assert same_as_slow([b"", PLAIN % b"", b"", PLAIN % b', "id": "x"', b""], end=b"").tolist() == [True, True]


def test_tools_that_are_refused_late_leave_the_other_columns_in_order() -> None:
    lines = [PLAIN % (b', "id": "%d", "tools": [%s]' % (i, b"{}" if i % 3 else b"0")) for i in range(9)]
    assert same_as_slow(lines).sum() == 6


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"\n", b"a\n", b"abc\n", b"abcdefgh\n"]), max_size=8),
    st.sampled_from([b"", b"x", b"xyzxyz"]),
    st.integers(1, 12),
    st.none() | st.integers(0, 10),
)
def test_groups_of_lines(lines: list[bytes], last: bytes, max_bytes: int, max_lines: int | None) -> None:
    every = [*lines, *([last] if last else [])][:max_lines]
    groups = list(line_groups(b"".join(lines) + last, max_bytes, max_lines))
    assert [stop for _, stop, _ in groups[:-1]] == [start for start, _, _ in groups[1:]]
    data = b"".join(every)
    for start, stop, passed in groups:
        group = data[start:stop].splitlines(keepends=True)
        assert group
        assert every[passed : passed + len(group)] == group
        assert stop - start <= max_bytes or len(group) == 1
        assert stop == len(data) or stop - start + len(every[passed + len(group)]) > max_bytes
    assert sum(stop - start for start, stop, _ in groups) == len(data)
