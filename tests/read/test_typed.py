"""The typed fast path declines, or gives what the slow path gives."""

from __future__ import annotations

import gzip
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation
from chatmill.errors import RecordError
from chatmill.read.files import decode_line
from chatmill.read.shapes import conversation_of, find_shape
from chatmill.read.typed import typed_conversation
from tests.conftest import CONVERSATION_FILES, DATA


def slow_conversation(line: bytes) -> Conversation | RecordError:
    raw = decode_line(line, "f:1")
    try:
        if raw.error is not None:
            raise raw.error
        return conversation_of(raw.value, find_shape("openai"), where="f:1", source="s")._replace(metadata={})
    except RecordError as error:
        return error


def same_where_not_declined(line: bytes) -> bool:
    """Whether the fast path took the line; it must then equal the slow one."""
    quick = typed_conversation(line, "f:1", "s")
    if quick is None:
        return False
    assert quick._replace(metadata={}) == slow_conversation(line), line[:300]
    return True


def test_all_bundled_conversations() -> None:
    lines = [line for path in CONVERSATION_FILES for line in gzip.decompress(path.read_bytes()).splitlines()]
    taken = sum(map(same_where_not_declined, lines))
    assert taken > 0.9 * len(lines) > 10_000


def test_nasty_records() -> None:
    lines = gzip.decompress((DATA / "nasty.jsonl.gz").read_bytes()).splitlines()
    lines += (DATA / "nasty_raw.jsonl.bin").read_bytes().splitlines()
    taken = sum(map(same_where_not_declined, lines))
    assert 20 < taken < len(lines)


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
    },
)


@settings(max_examples=600, deadline=None)
@given(RECORDS, st.booleans())
def test_random_records(record: dict[str, Any], escape: bool) -> None:
    same_where_not_declined(json.dumps(record, ensure_ascii=escape).encode("utf-8", errors="surrogatepass"))


def test_lone_surrogates_are_declined() -> None:
    line = b'{"messages": [{"role": "user", "content": "bad \\ud800 here"}]}'
    assert typed_conversation(line, "f:1", "s") is None
    assert isinstance(slow_conversation(line), RecordError)
