"""The scanner by itself: what it reads, what it declines, and that nothing outside of its range matters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.kinds import RoleCode
from chatmill.core.native.scan import Scanned, count_lines, scan_lines
from chatmill.core.tools import listed_tools
from tests.core.native.mutations import mutated, real_lines


def scanned(data: bytes, start: int = 0, stop: int | None = None) -> Scanned:
    found = scan_lines(data, start, len(data) if stop is None else stop)
    if found is None:
        pytest.skip("the compiled part is not there (test_library tells whether it should be)")
    return found


def text(found: Scanned, column: str, number: int) -> str | None:
    start, length = getattr(found, f"{column}_starts")[number], getattr(found, f"{column}_lengths")[number]
    return None if length < 0 else found.text[start : start + length].tobytes().decode()


LINE = (
    b'{"id": "a\\u00e9", "n": -1.5e+3, "source": "s", "messages": [{"role": "system", "content": ""},'
    b' {"content": null, "role": "assistant", "reasoning_content": "", "tool_calls": [{"type": "function",'
    b' "function": {"arguments": "{\\"a\\": 1}", "name": "f"}}, {"function": {"name": "g", "arguments": ""}}]},'
    b' {"role": "tool", "content": "\\ud83d\\ude00 \xf0\x9f\x98\x80\\n", "tool_call_id": "1", "name": null}],'
    b' "tools": [ {"type": []} ] , "x": {"y": [true, false, null]}} \r\n'
)


def test_every_column() -> None:
    found = scanned(b"\n" + LINE + b"{}\n" + LINE)
    assert found.read.tolist() == [False, True, False, True]
    assert found.message_offsets.tolist() == [0, 0, 3, 3, 6]
    assert found.line_starts.tolist() == [0, 1, 1 + len(LINE), 4 + len(LINE)]
    assert found.line_stops.tolist() == [1, 1 + len(LINE), 4 + len(LINE), 4 + 2 * len(LINE)]
    assert [text(found, "id", line) for line in range(4)] == [None, "aé", None, "aé"]
    assert [text(found, "source", line) for line in range(4)] == [None, "s", None, "s"]
    assert found.source_starts[1] == found.source_starts[3]
    assert found.text.tobytes().count(b"s") == 1, "a source that is known is not kept again"
    start, length = found.tools_starts[3], found.tools_lengths[3]
    assert (b"\n" + LINE + b"{}\n" + LINE)[start : start + length] == b'[ {"type": []} ]'
    assert found.tools_lengths.tolist() == [-1, length, -1, length]
    assert found.roles.tolist() == [RoleCode.SYSTEM, RoleCode.ASSISTANT, RoleCode.TOOL] * 2
    assert [text(found, "content", m) for m in range(3, 6)] == ["", None, "😀 😀\n"]
    assert [text(found, "reasoning", m) for m in range(3, 6)] == [None, "", None]
    assert found.named.tolist() == [False, False, True] * 2
    assert found.call_offsets.tolist() == [0, 0, 2, 2, 2, 4, 4]
    assert [text(found, "name", call) for call in range(4)] == ["f", "g"] * 2
    assert [text(found, "argument", call) for call in range(4)] == ['{"a": 1}', ""] * 2


@pytest.mark.parametrize("role", list(RoleCode)[1:])
def test_roles(role: RoleCode) -> None:
    line = json.dumps({"messages": [{"role": role.name.lower(), "content": "x"}]}).encode()
    assert scanned(line).roles.tolist() == [role]


def with_value(value: bytes) -> bytes:
    return b'{"x": ' + value + b', "messages": [{"role": "user", "content": "hi"}]}'


def with_content(content: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + content + b'"}]}'


def with_field(field: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "hi", ' + field + b"}]}"


def with_call(call: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "tool_calls": [' + call + b"]}]}"


FUNCTION = b'{"name": "f", "arguments": "{}"}'
READ = [
    *map(with_value, [b"0", b"-0", b"-1.25", b"1E5", b"0.0e-1", b"[]", b"{}", b"[1, [2]]", b'{"x": {"x": 1, "x": 2}}']),
    *map(with_value, [b"true", b"false", b"null", b'""', b'"\\b\\f\\n\\r\\t\\/\\\\\\""', b"[" * 98 + b"]" * 98]),
    *map(with_content, ["\x7f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff".encode(), b"\\uFfFd\\u007f"]),
    *map(with_content, [b"\\ud800\\udc00", b"\\uDBFF\\uDFFF", b"x" * 40 + b"\\u0001"]),
    *map(with_field, [b'"name": ""', b'"tool_calls": []', b'"tool_calls" :null', b'"reasoning_content": null']),
    *map(with_call, [b'{"function": ' + FUNCTION + b"}", b'{"id": null, "function": ' + FUNCTION + b', "type": "x"}']),
    b'\t {"messages":[{"role":"user","content":"hi"}],"":1,"messages_jso":1,"messages_json_":2}\r \t',
    b'{"id": null, "source": null, "tools": null, "messages": [{"role": "user", "content": "hi"}]}',
]
DECLINED = [
    *map(with_value, [b"", b"00", b"-", b".5", b"1.", b"1e", b"1e+", b"+1", b"0x1", b"nul", b"nulll", b"True", b"NaN"]),
    *map(with_value, [b"9" * 65, b"[1,]", b"[,1]", b"[1 2]", b"[", b"]", b"[}", b'{"a"}', b'{"a":}', b'{"a":1,}']),
    *map(with_value, [b"{1: 2}", b'{"a" 1}', b"[" * 100 + b"]" * 100, b'"\\ud800"', b'"\xff"', b'{"\xff": 1}', b"'a'"]),
    *map(with_content, [b"\\u0000", b"\x00", b"\x1f", b"\t", b"\\x", b"\\u12g4", b"\\u-123", b"\\ud800", b"\\udc00"]),
    *map(with_content, [b"\\ud800\\ud800", b"\\ud800x", b"\\ud800\\n", b'"', b"\\", b"\x80", b"\xc3", b"\xc0\x80"]),
    *map(with_content, [b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80"]),
    *map(with_content, [b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3(", b"\xe2(\x82", b"\xf0\x9f(\x98"]),
    *map(
        with_field, [b'"role": "user"', b'"content": "x"', b'"weight": 1', b'"nam\\u0065": "x"', b'"name": 1', b'"": 1']
    ),
    *map(
        with_field,
        [b'"tool_calls": {}', b'"tool_calls": [1]', b'"tool_calls": [{}]', b'"thinking": "x"', b'"names": ""'],
    ),
    *map(with_call, [b"", b'{"id": "1"}', b'{"function": {"name": "f"}}', b'{"function": {"arguments": "f"}}']),
    *map(with_call, [b'{"function": null}', b'{"function": ' + FUNCTION + b', "function": ' + FUNCTION + b"}"]),
    *map(
        with_call, [b'{"function": {"name": null, "arguments": ""}}', b'{"function": {"name": "f", "arguments": {}}}']
    ),
    *map(with_call, [b'{"function": ' + FUNCTION + b', "x": 1}', b'{"function": ' + FUNCTION + b', "id": 1}']),
    b'{"messages": [{"role": "User", "content": "hi"}]}',
    b'{"messages": [{"role": "us\\u0065r", "content": "hi"}]}',
    b'{"messages": [{"role": null, "content": "hi"}]}',
    b'{"messages": [{"content": "hi"}]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{}]}',
    b'{"messages": []}',
    b'{"messages": {}}',
    b'{"messages": null}',
    b"{}",
    b"[]",
    b"",
    b" ",
    with_value(b'1, "x": 2'),
    with_value(b'1, "\\u0079": 2'),
    with_value(b'1, "messages": 2'),
    with_value(b'1, "id": 2'),
    with_value(b'1, "id": "a", "id": "a"'),
    with_value(b'1, "source": ""'),
    with_value(b'1, "tools": {}'),
    with_value(b'1, "tools": "[]"'),
    with_value(b'1, "messages_json": "{}"'),
    with_value(b"1") + b"x",
    with_value(b'1, "tools": [{"a": 1}], "id": 2'),
    with_value(b"1") + b"{}",
    with_value(b"1") + b"\x00",
    with_value(b"1") + b"\x0c",
    b"\xef\xbb\xbf" + with_value(b"1"),
    with_value(b"1, " + b", ".join(b'"k%d": 1' % i for i in range(64))),
]


@pytest.mark.parametrize("line", READ)
def test_read(line: bytes) -> None:
    for data in (line, line + b"\n", LINE + line + b"\n" + LINE):
        assert scanned(data).read.all()
    content = json.loads(line)["messages"][0].get("content")
    assert text(scanned(LINE + line), "content", 3) == content


@pytest.mark.parametrize("line", DECLINED)
def test_declined(line: bytes) -> None:
    assert not scanned(line).read.any()
    found = scanned(LINE + line + b"\n" + LINE)
    assert found.read.tolist() == [True, False, True]
    assert_same(scanned(LINE + LINE), found, but_for_line=1)


def assert_same(wanted: Scanned, found: Scanned, but_for_line: int) -> None:
    """A declined line leaves nothing behind in the columns of messages, calls and texts."""
    for name in (
        "text",
        "listed",
        "roles",
        "named",
        "call_offsets",
        "content_starts",
        "content_lengths",
        "argument_starts",
    ):
        np.testing.assert_array_equal(getattr(wanted, name), getattr(found, name), err_msg=name)
    for name in ("id_starts", "source_starts", "source_lengths", "tools_lengths"):
        kept = np.delete(getattr(found, name), but_for_line)
        np.testing.assert_array_equal(getattr(wanted, name), kept, err_msg=name)


def columns(found: Scanned) -> dict[str, Any]:
    names = [name for name in Scanned.__slots__ if name not in ("line_starts", "line_stops", "tools_starts")]
    return {name: getattr(found, name).tolist() for name in names}


@pytest.mark.parametrize("before", [b"", b"x", b'{"messages": "'])
@pytest.mark.parametrize("behind", [b"", b'"', b"}", b"\n", b"\\", b"\xff" * 20])
def test_bytes_outside_of_the_range_do_not_matter(before: bytes, behind: bytes) -> None:
    lines = [LINE, LINE.rstrip(), *list(mutated(300, 4))]
    assert sum(scanned(line).read.any() for line in lines) > 50
    for line in lines:
        data = before + line + behind
        found = scanned(data, len(before), len(before) + len(line))
        assert columns(found) == columns(scanned(line))
        assert (found.line_starts - len(before)).tolist() == scanned(line).line_starts.tolist()
        assert columns(scanned(memoryview(data), len(before), len(before) + len(line))) == columns(found)


def with_tools(raw: bytes) -> Scanned:
    return scanned(LINE + b'{"tools": %s, "messages": [{"role": "user", "content": "hi"}]}' % raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=3), st.booleans(), st.booleans())
def test_listed_tools_are_what_python_writes(tools: list[Any], escape: bool, compact: bool) -> None:
    raw = json.dumps(tools, ensure_ascii=escape, separators=(",", ":") if compact else None).encode()
    found = with_tools(raw)
    if found.read[1] and found.listed_lengths[1] >= 0:
        start, length = found.listed_starts[1], found.listed_lengths[1]
        assert found.listed[start : start + length].tobytes().decode() == listed_tools(tuple(tools))


LISTED = [
    *(b"[]", b"[ ]", b"[{}]", b'[{"a": 0, "b": -12, "c": [1, [], {}, "x"], "d": {"e": null, "f": [true, false]}}]'),
    *(b'[{"type":"function"},{"a":{"b":[{"c":1}]}}]', '[ {"é" : "漢\\u6f22\\n\\u001f\\u007f\\/ \\\\ \\""} ]'.encode()),
    *(b'[{"n": 123456789012345678901234567890}]', b'[{"": ""}, {"a": {"": 1}}]'),
]
NOT_LISTED = [
    *(b'[{"a": 1.0}]', b'[{"a": 1e3}]', b'[{"a": -0}]', b'[{"a": 1, "a": 2}]', b'[{"a": 1, "\\u0061": 2}]', b"[1]"),
    *(b'["x"]', b"[null]", b"[[]]", b'[{"x": {"a": 1, "a": 1}}]'),
    b"[{" + b", ".join(b'"k%d": 1' % i for i in range(65)) + b"}]",
]


@pytest.mark.parametrize("raw", LISTED)
def test_listed(raw: bytes) -> None:
    found = with_tools(raw)
    start, length = found.listed_starts[1], found.listed_lengths[1]
    assert length >= 0
    assert found.listed[start : start + length].tobytes().decode() == listed_tools(tuple(json.loads(raw)))
    assert found.listed[:start].tobytes() == b'\n{"type": []}'


@pytest.mark.parametrize("raw", NOT_LISTED)
def test_what_python_must_decode(raw: bytes) -> None:
    found = with_tools(raw)
    assert found.read.all()
    assert found.listed_lengths[1] == -1
    assert found.tools_lengths[1] == len(raw)
    assert found.listed.tobytes() == b'\n{"type": []}', "nothing is left of the attempt"


def test_many_sources_are_told_apart() -> None:
    names = [f"s{i * i % 40}" for i in range(200)]
    data = b"\n".join(with_value(b'1, "source": "%s"' % name.encode()) for name in names)
    assert [text(scanned(data), "source", line) for line in range(200)] == names


def test_lines_together_are_lines_alone() -> None:
    lines = [*real_lines()[::40], *mutated(500, 5)]
    together = scanned(b"\n".join(lines))
    assert len(together.read) == len(lines) == count_lines(b"\n".join(lines), 0, len(b"\n".join(lines)))
    assert 200 < together.read.sum() < len(lines)
    for number, line in enumerate(lines):
        alone = scanned(line + b"\n")
        assert alone.read.tolist() == [together.read[number]]
        assert alone.message_offsets[-1] == np.diff(together.message_offsets)[number]
        for place in range(len(alone.roles)):
            assert text(alone, "content", place) == text(
                together, "content", int(together.message_offsets[number]) + place
            )


@pytest.mark.parametrize(("data", "lines"), [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"\n\na", 3)])
def test_counts_of_lines(data: bytes, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_lines(b"\n" + data + b"\n", 1, 1 + len(data)) == lines
    monkeypatch.setenv("CHATMILL_NATIVE", "0")
    assert count_lines(b"\n" + data + b"\n", 1, 1 + len(data)) == lines
    assert scan_lines(data, 0, len(data)) is None


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4)])
def test_a_range_that_is_none(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="no range of 3 bytes"):
        scanned(b"abc", start, stop)
