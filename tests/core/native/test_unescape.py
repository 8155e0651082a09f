"""Bodies of JSON strings are read as Python reads them, or declined."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.native.unescape import unescaped

PIECES = [
    *(
        b"a",
        b"plain text of some length, ",
        b"\\n",
        b'\\"',
        b"\\\\",
        b"\\/",
        b"\\u00e9",
        b"\\ud83d\\ude00",
        "é".encode(),
    ),
    *(
        "漢字".encode(),
        "😀".encode(),
        b"\\u0041",
        b"\\ud800",
        b"\\u0000",
        b"\\x",
        b"\\u12",
        b'"',
        b"\\",
        b"\n",
        b"\x1f",
    ),
    *(b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\x7f"),
]
BODIES = st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join), max_size=6)


def by_python(body: bytes) -> str | None:
    """What the string says; None for what has no UTF-8 form, and for an escaped NUL, which is always declined."""
    try:
        said = json.loads(b'"' + body + b'"')
        said.encode()
    except (ValueError, UnicodeError):
        return None
    return None if "\0" in said else said


@settings(max_examples=500)
@given(bodies=BODIES, behind=st.sampled_from([b"}]}", b'", "x"]}  ']))
def test_bodies_are_read_as_python_reads_them(bodies: list[bytes], behind: bytes) -> None:
    data, starts = b"", []
    for body in bodies:
        starts.append(len(data) + 1)
        data += b'"' + body + b'"'
    stops = [start + len(body) for start, body in zip(starts, bodies, strict=True)]
    found = unescaped(data + behind, np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64))
    if found is None:
        pytest.skip("the compiled part is not there (test_library tells whether it should be)")
    texts, read = found
    wanted = [by_python(body) for body in bodies]
    assert [text if ok else None for text, ok in zip(texts, read, strict=True)] == wanted
    assert texts.data.tobytes().decode() == "".join(text for text in wanted if text is not None)


def test_ranges_outside_of_the_data_and_without_a_quote_behind_are_declined() -> None:
    starts = np.array([1, 1, -1, 5, 3, 0], dtype=np.int64)
    stops = np.array([3, 4, 2, 4, 9, 3], dtype=np.int64)
    found = unescaped(b'"ab"c', starts, stops)
    if found is None:
        pytest.skip("the compiled part is not there (test_library tells whether it should be)")
    assert found[1].tolist() == [True, False, False, False, False, False]
