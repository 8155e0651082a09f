"""Tool definitions written anew by the scanner are what Python writes of what it decodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.scan import scan_lines
from chatmill.core.tools import listed_tools
from chatmill.read.columns import scanner_names
from chatmill.read.shapes import find_shape

(OPENAI,) = scanner_names(find_shape("openai"))
TEXT = st.text(
    alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8
) | st.sampled_from(['"', "\\", "/", "\b\f\n\r\t", "\x1f\x7f", "é\u2028😀", "a" * 40 + '"'])
WITHOUT_FLOATS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXT
VALUES = st.recursive(
    WITHOUT_FLOATS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
TOOLS = st.lists(st.dictionaries(TEXT, VALUES, max_size=4), max_size=3)


def listed(tools: bytes) -> str | None:
    """What the scanner writes for a list as it stands in a record; None where it leaves the list to Python."""
    line = b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + tools + b', "id": "1"}'
    found = scan_lines(line, 0, len(line), OPENAI)
    assert found.read[0]
    assert found.tools[0] == tools.decode()
    return found.listed[0]


@settings(max_examples=400)
@given(tools=TOOLS, ascii_=st.booleans(), compact=st.booleans(), indent=st.booleans())
def test_every_way_to_write_the_same_tools(tools: list[Any], ascii_: bool, compact: bool, indent: bool) -> None:
    separators = (",", ":") if compact else (" ,\t", " :  ") if indent else None
    written = json.dumps(tools, ensure_ascii=ascii_, separators=separators).encode()
    assert listed(written) == listed_tools(tuple(tools))


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (
            rb'[{"a": "\/\u002f\u0022\u005c\u001F\u000a\u00e9\ud83d\ude00"}]',
            '\n{"a": "//\\"\\\\\\u001f\\n\u00e9\U0001f600"}',
        ),
        (rb"[ { } , {} ]", "\n{}\n{}"),
        (rb"[]", ""),
        (rb'[{"n": [0, -1, 12345678901234567890]}]', '\n{"n": [0, -1, 12345678901234567890]}'),
    ],
)
def test_forms(raw: bytes, wanted: str) -> None:
    assert listed(raw) == wanted == listed_tools(tuple(json.loads(raw)))


@pytest.mark.parametrize(
    "value",
    [b"1.0", b"1e5", b"-0", b"-0.0", b"1E400", b'{"a": 1, "a": 2}', b'{"a": 1, "\\u0061": 2}', b"[" * 90 + b"]" * 90],
)
def test_what_python_may_write_in_another_way_is_left_to_it(value: bytes) -> None:
    found = listed(b'[{"x": ' + value + b"}]")
    assert found is None or found == listed_tools(({"x": json.loads(value)},))
    assert found is None or value.startswith(b"[")


def test_elements_that_are_no_objects_are_left_to_python() -> None:
    for raw in (b"[1]", b"[[]]", b'["a"]', b"[{}, null]"):
        assert listed(raw) is None
