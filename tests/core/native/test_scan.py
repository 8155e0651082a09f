"""The scanner by itself: what it reads, what it declines, and that nothing outside of its range matters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.scan import Scanned, scan_lines, scan_texts
from chatmill.core.texts import OptionalTexts, Texts
from chatmill.core.tools import listed_tools
from chatmill.read.columns import scanner_names
from chatmill.read.shapes import find_shape
from tests.core.native.mutations import mutated
from tests.read.test_columns import same_as_slow

(OPENAI,) = scanner_names(find_shape("openai"))


def scanned(data: bytes, start: int = 0, stop: int | None = None) -> Scanned:
    return scan_lines(data, start, len(data) if stop is None else stop, OPENAI)


LINE = (
    b'{"id": "a\\u00e9", "n": -1.5e+3, "source": "s", "messages": [{"role": "system", "content": ""},'
    b' {"content": null, "role": "assistant", "reasoning_content": "", "tool_calls": [{"type": "function",'
    b' "function": {"arguments": "{\\"a\\": 1}", "name": "f"}}, {"function": {"name": "g", "arguments": ""}}]},'
    b' {"role": "tool", "content": "\\ud83d\\ude00 \xf0\x9f\x98\x80\\n", "tool_call_id": "1", "name": null}],'
    b' "tools": [ {"type": []} ] , "x": {"y": [true, false, null]}} \r\n'
)


def test_lines_have_their_places_and_sources_and_tools_are_kept_once() -> None:
    found = scanned(b"\n" + LINE + b"{}\n" + LINE)
    assert found.read.tolist() == [False, True, False, True]
    assert found.offsets.tolist() == [0, 0, 3, 3, 6]
    assert found.line_starts.tolist() == [0, 1, 1 + len(LINE), 4 + len(LINE)]
    assert found.line_stops.tolist() == [1, 1 + len(LINE), 4 + len(LINE), 4 + 2 * len(LINE)]
    assert found.sources.starts[1] == found.sources.starts[3]
    assert found.ids.data.tobytes().count(b"s") == 1, "a source that is known is not kept again"
    assert list(found.tools) == [None, '[ {"type": []} ]'] * 2
    assert list(found.listed) == [None, '\n{"type": []}'] * 2
    names = [f"s{i * i % 40}" for i in range(200)]
    assert same_as_slow([with_value(b'1, "source": "%s"' % name.encode()) for name in names]).all()
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(IndexError, match="no range of 3 bytes"):
            scanned(b"abc", start, stop)


def within(before: bytes, after: bytes) -> Callable[[bytes], bytes]:
    """What puts bytes into a line."""
    return lambda value: before + value + after


with_value = within(b'{"x": ', b', "messages": [{"role": "user", "content": "hi"}]}')
with_content = within(b'{"messages": [{"role": "user", "content": "', b'"}]}')
with_field = within(b'{"messages": [{"role": "user", "content": "hi", ', b"}]}")
with_call = within(b'{"messages": [{"role": "user", "tool_calls": [', b"]}]}")
with_parts = within(b'{"messages": [{"role": "user", "content": [', b"]}]}")
FUNCTION = b'{"name": "f", "arguments": "{}"}'
READ = [
    *map(with_value, [b"0", b"-0", b"-1.25", b"1E5", b"0.0e-1", b"[]", b"{}", b"[1, [2]]", b'{"x": {"x": 1, "y": 2}}']),
    *map(with_value, [b"true", b"false", b"null", b'""', b'"\\b\\f\\n\\r\\t\\/\\\\\\""', b"[" * 98 + b"]" * 98]),
    *map(with_content, ["\x7f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff".encode(), b"\\uFfFd\\u007f"]),
    *map(with_content, [b"\\ud800\\udc00", b"\\uDBFF\\uDFFF", b"x" * 40 + b"\\u0001"]),
    *map(with_field, [b'"name": ""', b'"tool_calls": []', b'"tool_calls" :null', b'"reasoning_content": null']),
    *map(with_call, [b'{"function": ' + FUNCTION + b"}", b'{"id": null, "function": ' + FUNCTION + b', "type": "x"}']),
    *map(with_field, [b'"weight": 0', b'"weight": null', b'"train": null', b'"thinking": "x"', b'"weight": 1234.5678']),
    *map(with_parts, [b"", b'{"text": "a", "x": {"x": 1, "y": 2}}', b'{"type": "text", "text": "a"} , {"text": "b"}']),
    with_call(b'{"function": {"name": "f", "arguments": [1, {"a": "b"}]}}'),
    with_call(b'{"index": 0, "function": {"strict": {"strict": true}, "name": "f", "arguments": ""}, "x": []}'),
    *map(with_field, [b'"": 1', b'"names": ""', b'"id": "m1", "at": {"id": [1.5, {"x": 1}]}, "x": null, "trai": 1']),
    *map(with_field, [b'"function_call": null', b'"images": [], "audios": null', b'"x": ' + b"[" * 96 + b"]" * 96]),
    b'\t {"messages":[{"role":"user","content":"hi"}],"":1,"messages_jso":1,"messages_json_":2}\r \t',
    b'{"id": null, "source": null, "tools": null, "messages": [{"role": "user", "content": "hi"}]}',
]
DECLINED = [
    *map(with_value, [b"", b"00", b"-", b".5", b"1.", b"1e", b"1e+", b"+1", b"0x1", b"nul", b"nulll", b"True", b"NaN"]),
    *map(with_value, [b"9" * 65, b"[1,]", b"[,1]", b"[1 2]", b"[", b"]", b"[}", b'{"a"}', b'{"a":}', b'{"a":1,}']),
    *map(with_value, [b'{"x": {"x": 1, "x": 2}}', b'[{"x": 1, "\\u0078": 2}]', b"1e100", b"-1E-0400", b"1e400"]),
    with_parts(b'{"text": "a", "x": 1, "x": 1}'),
    *map(with_value, [b"{1: 2}", b'{"a" 1}', b"[" * 100 + b"]" * 100, b'"\\ud800"', b'"\xff"', b'{"\xff": 1}', b"'a'"]),
    *map(with_content, [b"\\u0000", b"\x00", b"\x1f", b"\t", b"\\x", b"\\u12g4", b"\\u-123", b"\\ud800", b"\\udc00"]),
    *map(with_content, [b"\\ud800\\ud800", b"\\ud800x", b"\\ud800\\n", b'"', b"\\", b"\x80", b"\xc3", b"\xc0\x80"]),
    *map(with_content, [b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80"]),
    *map(with_content, [b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3(", b"\xe2(\x82", b"\xf0\x9f(\x98"]),
    *map(
        with_field,
        [b'"role": "user"', b'"content": "x"', b'"weight": -1', b'"nam\\u0065": "x"', b'"name": 1', b'"x": 1, "x": 1'],
    ),
    *map(with_field, [b'"tool_calls": {}', b'"tool_calls": [1]', b'"tool_calls": [{}]', b'"function_call": {}']),
    *map(
        with_field,
        [b'"\\u0078": 1', b'"loss_mask": 1', b'"Train_on": 1', b'"images": ["a"]', b'"x": nul', b'"x": {"a": 1,}'],
    ),
    *map(with_field, [b'"weight": 1e3', b'"weight": true', b'"weight": 1234567890123456', b'"train": 0']),
    *map(with_field, [b'"channel": 1', b'"thinking": "a", "reasoning_content": "a"', b'"train": tru', b'"weight": .5']),
    *map(with_field, [b'"weight": 1.']),
    *map(with_call, [b"", b'{"id": "1"}', b'{"function": {"name": "f"}}', b'{"function": {"arguments": "f"}}']),
    *map(with_call, [b'{"function": null}', b'{"function": ' + FUNCTION + b', "function": ' + FUNCTION + b"}"]),
    *map(with_call, [b'{"function": {"name": null, "arguments": ""}}', b'{"function": {"name": "f", "arguments": 1}}']),
    *map(
        with_call,
        [b'{"function": {"name": "f", "arguments": {"a": 1.5}}}', b'{"function": {"name": "f", "arguments"}}'],
    ),
    *map(with_call, [b'{"function": ' + FUNCTION + b', "mask": 1}', b'{"function": ' + FUNCTION + b', "id": 1}']),
    with_call(b'{"function": {"name": "f", "arguments": "", "x": 1, "x": 1}}'),
    *map(with_parts, [b"1", b"{}", b'{"type": "image", "text": "x"}', b'{"type": "text"}', b'{"text": null}', b'""']),
    *map(with_parts, [b'{"text": "a", "text": "b"}', b'{"type": "system_content"}', b'{"t\\u0065xt": "a"}']),
    *map(
        with_parts, [b'{"type": "developer_content"}, {"text": "x"}', b'{"text": "x"}, {"type": "developer_content"}']
    ),
    with_parts(b'{"type": null}'),
    *(b'{"messages": [%s]}' % one for one in (b"", b"{}", b'{"content": "hi"}', b'{"role": "user"}')),
    *(b'{"messages": [{"role": %s, "content": "hi"}]}' % role for role in (b'"User"', b'"us\\u0065r"', b"null")),
    *(b'{"messages": {}}', b'{"messages": null}', b"{}", b"[]", b"", b" "),
    *map(with_value, [b'1, "x": 2', b'1, "\\u0079": 2', b'1, "messages": 2', b'1, "id": 2.0', b'1, "id": -0']),
    *map(with_value, [b'1, "chat_template_kwargs": []', b'1, "chat_template_kwargs": {"a": 0.5}', b'1, "source": ""']),
    *map(with_value, [b'1, "id": "a", "id": "a"', b'1, "tools": {}', b'1, "tools": "[1]"']),
    with_value(b'1, "tools": [{"a": 1}], "id": 2.5'),
    *(with_value(b"1") + more for more in (b"x", b"{}", b"\x00", b"\x0c")),
    b"\xef\xbb\xbf" + with_value(b"1"),
    with_value(b"1, " + b", ".join(b'"k%d": 1' % i for i in range(64))),
]


@pytest.mark.parametrize("line", READ)
def test_read(line: bytes) -> None:
    assert same_as_slow([line]).all()
    assert same_as_slow([LINE[:-1], line, LINE[:-1]]).all()
    assert scanned(line).read.all(), "without a line feed"


@pytest.mark.parametrize("line", DECLINED)
def test_declined(line: bytes) -> None:
    assert not scanned(line).read.any()
    assert same_as_slow([LINE[:-1], line, LINE[:-1]]).tolist() == [True, False, True]
    found, twice = (texts_of(scanned(LINE + middle + LINE)) for middle in (line + b"\n", b""))
    assert found == twice, "nothing is left of the attempt"


def texts_of(found: Scanned) -> list[bytes]:
    return [getattr(found, name).data.tobytes() for name in ("ids", "sources", "listed", "options")]


def values(column: Any) -> Any:
    if isinstance(column, Texts | OptionalTexts):
        return list(column), column.lengths.tolist()
    return [str(value) for value in column.tolist()]  # a weight may be NaN


def columns(found: Scanned) -> dict[str, Any]:
    in_data = ("line_starts", "line_stops", "messages", "unused", "extras")
    names = [name for name in Scanned.__slots__ if name not in in_data]
    messages = {name: values(getattr(found.messages, name)) for name in found.messages.__slots__}
    texts = {name: values(getattr(found, name)) for name in names}
    extras = found.extras[["message", "length", "value_length", "holds"]].tolist()
    return texts | {"messages": messages, "unused": found.unused[:, ::2].tolist(), "extras": extras}


@cache
def alone(line: bytes) -> tuple[dict[str, Any], list[int]]:
    """What a line is scanned to with nothing around it."""
    found = scanned(line)
    return columns(found), found.line_starts.tolist()


@pytest.mark.parametrize("before", [b"", b"x", b'{"messages": "'])
@pytest.mark.parametrize("after", [b"", b'"', b"}", b"\n", b"\\", b"\xff" * 20])
def test_bytes_outside_of_the_range_do_not_matter(before: bytes, after: bytes) -> None:
    lines = [LINE, LINE.rstrip(), *list(mutated(40, 4))]
    assert sum(any(alone(line)[0]["read"]) for line in lines) > 8
    for line in lines:
        data = before + line + after
        found = scanned(data, len(before), len(before) + len(line))
        wanted, starts = alone(line)
        assert columns(found) == wanted
        assert (found.line_starts - len(before)).tolist() == starts
        assert columns(scanned(memoryview(data), len(before), len(before) + len(line))) == wanted


def with_tools(raw: bytes) -> Scanned:
    return scanned(LINE + b'{"tools": %s, "messages": [{"role": "user", "content": "hi"}]}' % raw)


TEXT = st.text(
    alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8
) | st.sampled_from(['"', "\\", "/", "\b\f\n\r\t", "\x1f\x7f", "é\u2028😀", "a" * 40 + '"'])
WITHOUT_FLOATS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400)
@given(
    st.lists(st.dictionaries(TEXT, WITHOUT_FLOATS, max_size=4), max_size=3),
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :  ")]),
)
def test_listed_tools_are_what_python_writes(tools: list[Any], escape: bool, separators: tuple[str, str]) -> None:
    found = with_tools(json.dumps(tools, ensure_ascii=escape, separators=separators).encode())
    assert found.listed[1] == listed_tools(tuple(tools))


LISTED = [
    *(b"[]", b"[ ]", b"[{}]", b'[{"a": 0, "b": -12, "c": [1, [], {}, "x"], "d": {"e": null, "f": [true, false]}}]'),
    *(b'[{"type":"function"},{"a":{"b":[{"c":1}]}}]', '[ {"é" : "漢\\u6f22\\n\\u001f\\u007f\\/ \\\\ \\""} ]'.encode()),
    *(b'[{"n": 123456789012345678901234567890}]', b'[{"": ""}, {"a": {"": 1}}]'),
    rb'[{"a": "\/\u002f\u0022\u005c\u001F\u000a\u00e9\ud83d\ude00"}]',
]
NOT_LISTED = [
    *(b'[{"a": 1.0}]', b'[{"a": 1e3}]', b'[{"a": -0}]', b"[1]", b'["x"]', b"[null]", b"[[]]"),
    b"[{" + b", ".join(b'"k%d": 1' % i for i in range(65)) + b"}]",
]


@pytest.mark.parametrize("raw", LISTED)
def test_listed(raw: bytes) -> None:
    found = with_tools(raw)
    assert list(found.listed) == ['\n{"type": []}', listed_tools(tuple(json.loads(raw)))]
    as_text = with_tools(json.dumps(raw.decode()).encode())
    assert list(as_text.listed) == list(found.listed)
    assert as_text.tools[1] is None


@pytest.mark.parametrize("raw", NOT_LISTED)
def test_what_python_must_decode(raw: bytes) -> None:
    found = with_tools(raw)
    assert found.read.all()
    assert found.listed[1] is None
    assert found.tools[1] == raw.decode()
    assert found.listed.data.tobytes() == b'\n{"type": []}', "nothing is left of the attempt"
    assert with_tools(json.dumps(raw.decode()).encode()).read.tolist() == [True, False]


@pytest.mark.parametrize("raw", [b'[{"a": 1, "a": 2}]', b'[{"a": 1, "\\u0061": 2}]', b'[{"x": {"a": 1, "a": 1}}]'])
def test_tools_with_a_key_twice_are_declined(raw: bytes) -> None:
    assert with_tools(raw).read.tolist() == [True, False]
    assert with_tools(json.dumps(raw.decode()).encode()).read.tolist() == [True, False]


def test_a_column_of_texts() -> None:
    texts = [b"", LINE.strip(), b"{}", with_value(b"1"), LINE, with_value(b"1") + b"\n" + with_value(b"2")]
    data = np.frombuffer(b"ahead" + b"".join(texts) + b"after", dtype=np.uint8)
    offsets = 5 + np.cumsum([0, *map(len, texts)])
    found = scan_texts(data, offsets, OPENAI)
    assert found.read.tolist() == [False, True, False, True, False, False], "a line feed is part of no text"
    assert found.offsets.tolist() == [0, 0, 3, 3, 4, 4, 4]
    assert list(found.ids) == [None, "aé", None, None, None, None]
    assert found.tools[1] == '[ {"type": []} ]'
    assert found.line_starts.tolist() == offsets[:-1].tolist()
    with pytest.raises(IndexError, match="offsets that do not rise"):
        scan_texts(data, np.array([0, len(data) + 1]), OPENAI)
