"""The scanner declines, or gives what reading one by one gives: for every shape, compiled or not."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_by_source
from chatmill.core.native.scan import count_lines, scan_lines
from chatmill.errors import RecordError
from chatmill.read.columns import Lines, line_groups, read_lines, scanner_names
from chatmill.read.files import decode_line, read_records
from chatmill.read.record_shape import Shape, conversation_or_error
from chatmill.read.shapes import find_shape
from tests.conftest import CONVERSATION_FILES
from tests.core.native.mutations import SCANNED, mutated, real_lines, seeds
from tests.oracles import in_each_way
from tests.read.three_ways import KEPT, bare, sharegpt


def slowly(line: bytes, number: int, shape: Shape) -> list[Conversation | RecordError]:
    if not line or line.isspace():
        return []
    return [conversation_or_error(one, shape, "s") for one in shape.embedded(decode_line(line, f"f:{number}"))]


def same_as_slow(lines: list[bytes], shape: str | Shape = "openai", end: bytes = b"\n") -> np.ndarray:
    """Which of these lines were scanned after a comparison of everything."""
    named = shape if isinstance(shape, Shape) else find_shape(shape)
    data = b"ahead\n" + b"".join(line + b"\n" for line in lines[:-1]) + b"".join(line + end for line in lines[-1:])
    stop = len(data)
    given = Lines(6, stop, 11, count_lines(data, 6, stop))
    batch, errors = read_lines(data + b"after", given, before="f:", source="s", shape=named, kept=KEPT)
    numbers = range(11, 11 + len(lines))
    found = [item for line, number in zip(lines, numbers, strict=True) for item in slowly(line, number, named)]
    wanted = [item for item in found if isinstance(item, Conversation)]
    assert list(map(str, errors)) == [str(item) for item in found if isinstance(item, RecordError)]
    assert len(batch) == len(wanted) == len(batch.offsets) - 1 == len(batch.wheres)
    assert batch.offsets[-1] == len(batch.messages) == len(batch.messages.call_offsets) - 1
    assert batch.messages.call_offsets[-1] == len(batch.messages.call_names) == len(batch.messages.call_ids)
    assert list(batch.keys) == [item.id or item.where for item in wanted]
    assert [batch.sources[i] for i in range(len(batch))] == [item.source for item in wanted]
    assert list(map(bare, batch)) == list(map(bare, wanted))
    assert batch.unused == unused_by_source(wanted)
    (names,) = scanner_names(named)
    scanned = scan_lines(data, 6, stop, names)
    return scanned.read


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["openai", "harmony", "sharegpt"])
def test_all_bundled_and_nasty_records(shape: str, every: int) -> None:
    """One of so many of the bundled records; `make test-slow` takes all."""
    lines = real_lines()
    assert len(lines) > 10_000
    lines = lines[-1000:] + lines[:-1000:every]  # the nasty ones are at the end
    if shape == "sharegpt":
        records = (raw.value for path in CONVERSATION_FILES for raw in islice(read_records(path), None, None, every))
        lines = [json.dumps(sharegpt(record), ensure_ascii=False).encode() for record in records]
    scanned = same_as_slow(lines, shape)
    assert scanned.mean() > {"sharegpt": 0.8}.get(shape, 0.9 if every == 1 else 0.7)
    assert not scanned.all()


@pytest.mark.parametrize("shape", sorted(SCANNED))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mutated_records(seed: int, shape: str) -> None:
    lines = list(mutated(4000 if shape == "openai" else 2000, seed, shape))
    scanned = same_as_slow(lines, shape, end=b"")
    least = 10 if find_shape(shape).typed_parts else 50  # contents that are parts are left to the slow way
    assert least < scanned.sum() < 3000
    assert all(same_as_slow(lines[i : i + 1], shape).shape for i in range(0, len(lines), 17))


@pytest.mark.parametrize("shape", sorted(SCANNED))
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_every_ending_of_short_lines(shape: str, count: int) -> None:
    """Bytes are looked at in words: so every remainder of a word must come up at the end of the data."""
    short = (line for line in seeds(shape) if len(line) < 400)
    if count == 1:
        short = (line for line in short if same_as_slow([line], shape).all())
    scanned = 0
    for line in islice(short, count):
        for end in range(len(line) + 1):
            for last in (b"", b"\n") if end % 8 == 0 or count > 1 else (b"",):
                scanned += int(same_as_slow([line, line[:end]], shape, end=last)[0])
    assert scanned > 50 * count


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["user", "assistant", "tool"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
TEXTS = st.text(max_size=3) | VALUES
UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("x", "prefix", "timestamp", "id"), VALUES),
    **dict.fromkeys(("images", "function_call", "loss_mask", "weight_version"), st.none() | VALUES),
}
"""Fields of messages, calls and parts that mean nothing, or nothing unless there is something in them."""
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": TEXTS}, optional={"strict": VALUES})},
    optional={"id": TEXTS, "type": st.just("function"), "index": VALUES, "train_on": st.none() | VALUES},
)
FIELDS = {
    **UNKNOWN,
    **dict.fromkeys(("role", "content", "from", "value"), VALUES),
    **dict.fromkeys(("reasoning_content", "tool_call_id", "name"), TEXTS),
    **dict.fromkeys(("recipient", "content_type"), st.text(max_size=2)),
    "thinking": st.text(max_size=2) | st.none(),
    "tool_calls": st.none() | st.lists(CALLS, max_size=2) | VALUES,
    "weight": VALUES | st.sampled_from([0, 1, 0.5, 0.1, 2.25, 1e-3, 123456789.125, 1e31, 0.30000000000000004]),
    "train": st.booleans() | VALUES,
    "channel": st.sampled_from(["final", ""]) | VALUES,
}
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "output_text", "system_content", "developer_content", "image"])},
    optional={"text": TEXTS, "x": VALUES, "mask": st.none() | VALUES},
)
CONTENTS = st.text(max_size=5) | st.lists(PARTS | st.fixed_dictionaries({"text": st.text()}), max_size=2) | VALUES


def messages(role: str, content: str, roles: list[str], contents: Any = CONTENTS) -> st.SearchStrategy[Any]:
    given_roles = st.sampled_from([*roles, "User", "x", " user"])
    fields = {**FIELDS, content: contents}
    del fields[role]
    return st.lists(st.fixed_dictionaries({role: given_roles}, optional=fields), max_size=3)


OPENAI = messages("role", "content", ["user", "assistant", "tool", "system", "developer", "human"])
SHAREGPT = messages("from", "value", ["human", "gpt", "observation", "function_call", "system", "user"])
NESTED = st.fixed_dictionaries({"messages": OPENAI | VALUES}, optional={"id": VALUES, "x": VALUES})
OBJECTS = st.dictionaries(st.text(max_size=2), VALUES, max_size=2)
COMMON = {
    "id": TEXTS | st.integers(),
    "source": TEXTS,
    "tools": st.lists(OBJECTS, max_size=2) | VALUES,
    "chat_template_kwargs": OBJECTS | VALUES,
    "label": st.booleans() | VALUES,
    **dict.fromkeys(("extra", "timestamp", "weights"), VALUES),
}
ANTHROPIC_PARTS = PARTS | st.fixed_dictionaries(
    {"type": st.sampled_from(["tool_use", "tool_result", "thinking"])},
    optional={"input": VALUES, **dict.fromkeys(("id", "name", "tool_use_id", "content", "thinking"), TEXTS)},
)
IN_PARTS = messages("role", "content", ["user", "assistant", "tool"], TEXTS | st.lists(ANTHROPIC_PARTS, max_size=3))

TURNED = COMMON | {
    **dict.fromkeys(("input", "context", "system"), TEXTS),
    **dict.fromkeys(("thinking", "reasoning_content"), st.none() | TEXTS),
    "history": st.just([]) | VALUES | st.lists(st.lists(st.text(max_size=2), min_size=2, max_size=2), max_size=2),
    "image": st.none() | VALUES,
}
SAID = st.text(max_size=4) | TEXTS | OPENAI


RECORDS = {
    "alpaca": st.fixed_dictionaries({"instruction": SAID}, optional=TURNED | {"output": SAID}),
    "instruction_response": st.fixed_dictionaries({"instruction": SAID, "response": SAID}, optional=TURNED),
    "anthropic": st.fixed_dictionaries({"messages": IN_PARTS | VALUES}, optional=COMMON | {"system": CONTENTS}),
    "openai": st.fixed_dictionaries({"messages": OPENAI | VALUES}, optional=COMMON | {"messages_json": st.just("{}")}),
    "harmony": st.fixed_dictionaries(
        {},
        optional=COMMON | {"messages": OPENAI, "messages_json": NESTED.map(json.dumps) | st.text(max_size=3) | VALUES},
    ),
    "sharegpt": st.fixed_dictionaries(
        {}, optional=COMMON | {"conversations": SHAREGPT | VALUES, "messages": SHAREGPT, "system": TEXTS}
    ),
}


@pytest.mark.parametrize("shape", sorted(SCANNED))
@settings(max_examples=90)
@given(data=st.data(), escape=st.booleans(), compact=st.booleans(), backwards=st.booleans())
def test_random_records(shape: str, data: st.DataObject, escape: bool, compact: bool, backwards: bool) -> None:
    records = data.draw(st.lists(RECORDS[shape], max_size=3))
    if backwards:
        records = [dict(reversed(record.items())) for record in records]
    separators = (",", ":") if compact else None
    lines = [json.dumps(r, ensure_ascii=escape, separators=separators).encode(errors="surrogatepass") for r in records]
    in_each_way(lambda: same_as_slow(lines, shape))


PLAIN = b'{"messages": [{"role": "user", "content": "hi"}]%s}'


@settings(max_examples=60)
@given(data=st.data(), backwards=st.booleans())
def test_random_records_of_a_field_map(data: st.DataObject, backwards: bool) -> None:
    """Messages of several turns, one of them of three fields, under names that mean something else elsewhere."""
    shape = find_shape({"user": ["ask+label+image", "more"], "assistant": ["say", "prompt"], "system": "messages"})
    names = [key for _, keys in shape.turns for key in keys]
    fields = dict.fromkeys([*names, "messages"], SAID)
    records = data.draw(st.lists(st.fixed_dictionaries({}, optional=COMMON | fields), max_size=3))
    if backwards:
        records = [dict(reversed(record.items())) for record in records]
    lines = [json.dumps(record).encode() for record in records]
    in_each_way(lambda: same_as_slow(lines, shape))


def test_questions_and_answers_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b'{"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [], "text": 1}'
    monkeypatch.setattr("chatmill.read.columns.conversation_or_error", None)
    batch, errors = read_lines(line, Lines(0, len(line), 1, 1), before="f:", source="s", shape=find_shape("alpaca"))
    assert errors == []
    assert [message.content for message in batch[0].messages] == ["s", "i\nx", "o"]
    assert batch.unused == {("s", "text"): 1}


def test_a_harmony_row_with_messages_twice() -> None:
    line = PLAIN % b', "messages_json": "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"other\\"}]}"'
    assert not same_as_slow([line], "harmony").any()


def test_nesting() -> None:
    for depth in (1, 90, 110, 2000):
        line = PLAIN % (b', "x": ' + b"[" * depth + b"]" * depth)
        assert depth > 100 or same_as_slow([line]).all()
        same_as_slow([line])
    for key in (b"tools", b"chat_template_kwargs"):
        values = [b'{"a": ' + b"[" * depth + b"]" * depth + b"}" for depth in (1, 90, 110)]
        same_as_slow([PLAIN % (b', "%s": %s' % (key, b"[%s]" % v if key == b"tools" else v)) for v in values])


def test_no_lines_blank_lines_and_tools_that_are_refused_late() -> None:
    assert len(same_as_slow([])) == 0
    assert not same_as_slow([b"", b" ", b"\r", b"\x0c"]).any()
    same_as_slow([b"", PLAIN % b"", b"", PLAIN % b', "id": "x"', b""], end=b"")
    same_as_slow([PLAIN % (b', "id": "%d", "tools": [%s]' % (i, b"{}" if i % 3 else b"0")) for i in range(9)])


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"\n", b"a\n", b"abc\n", b"abcdefgh\n"]), max_size=8),
    st.sampled_from([b"", b"x", b"xyzxyz"]),
    st.lists(st.integers(1, 12), min_size=9, max_size=9),
    st.none() | st.integers(0, 10),
)
def test_groups_of_lines(lines: list[bytes], last: bytes, sizes: list[int], max_lines: int | None) -> None:
    every = [*lines, *([last] if last else [])][:max_lines]
    groups = list(line_groups(b"".join(lines) + last, iter(sizes), 5, max_lines))
    assert [group.stop for group in groups[:-1]] == [group.start for group in groups[1:]]
    data = b"".join(every)
    for (start, stop, number, count), max_bytes in zip(groups, sizes, strict=False):
        group, passed = data[start:stop].splitlines(keepends=True), number - 5
        assert group
        assert every[passed : passed + len(group)] == group
        assert len(group) == count
        assert stop - start <= max_bytes or len(group) == 1
        assert stop == len(data) or stop - start + len(every[passed + len(group)]) > max_bytes
    assert sum(group.stop - group.start for group in groups) == len(data)
