"""Conversations as columns: objects become columns and are the same objects again, with every field."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations, Sources
from chatmill.core.messages import MessageColumns
from chatmill.core.texts import OptionalTexts, TextJoiner, Texts

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
MAYBE = st.none() | TEXT
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=2)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(Role),
    content=TEXT,
    reasoning=MAYBE,
    tool_calls=st.lists(st.builds(ToolCall, TEXT, TEXT, MAYBE, st.integers(0, 127)), max_size=2).map(tuple),
    tool_call_id=MAYBE,
    name=MAYBE,
    recipient=MAYBE,
    channel=MAYBE,
    content_type=MAYBE,
    weight=st.none() | st.floats(0, 1e30),
    structured=st.none() | OBJECTS,
    extra=OBJECTS,
    has_content=st.booleans(),
    finish_reason=MAYBE,
    token_ids=st.none() | IDS,
    prompt_token_ids=st.none() | IDS,
    logprobs=st.none() | st.lists(st.none() | st.floats(max_value=0, width=32), max_size=3).map(tuple),
    parts=st.just(()),
)
PLAIN = st.tuples(st.sampled_from(Role), TEXT).map(lambda pair: Message(*pair))
CONVERSATIONS = st.builds(
    Conversation,
    st.lists(PLAIN | MESSAGES, max_size=3).map(tuple),
    id=TEXT,
    source=TEXT,
    tools=st.lists(OBJECTS, max_size=2).map(tuple),
    where=TEXT,
    metadata=OBJECTS,
    options=OBJECTS,
    rejected=st.just(()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(CONVERSATIONS, max_size=4))
def test_objects_are_the_same_again(conversations: list[Conversation]) -> None:
    batch = Conversations.of(conversations)
    assert list(batch) == conversations
    assert batch[:] == conversations
    assert list(batch.keys) == [item.id or item.where for item in conversations]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(CONVERSATIONS, max_size=3), min_size=1, max_size=3), st.data())
def test_batches_are_joined_and_chosen_from(parts: list[list[Conversation]], data: st.DataObject) -> None:
    together = [item for part in parts for item in part]
    joined = Conversations.joined([Conversations.of(part) for part in parts])
    assert list(joined) == together
    chosen = data.draw(st.lists(st.integers(0, len(together) - 1), max_size=4)) if together else []
    taken = joined.take(np.array(chosen, dtype=np.int64))
    assert list(taken) == [together[i] for i in chosen]
    assert list(Conversations.joined([taken, joined])) == [*(together[i] for i in chosen), *together]


def test_columns_that_nobody_has_take_no_memory() -> None:
    columns = MessageColumns.of([Message(Role.USER, "x")] * 1000)
    for name in ("names", "tool_call_ids", "recipients", "channels", "content_types", "structured"):
        column = getattr(columns, name)
        assert (len(column), column.lengths.strides, column.starts.strides) == (1000, (0,), (0,)), name
        assert not column.present.any()
    assert columns.weights.strides == columns.extra.strides == (0,)
    assert np.isnan(columns.weights).all()
    plain = MessageColumns.plain(columns.roles, columns.contents)
    assert plain.objects(0, 1000) == columns.objects(0, 1000)
    assert plain.call_offsets.tolist() == columns.call_offsets.tolist()


def test_a_buffer_that_columns_share_is_joined_once() -> None:
    first, second = Texts.of(["ab", "c"]), Texts.of(["d", "é"])
    shared = OptionalTexts(first.data, first.starts, first.lengths)
    joiner = TextJoiner([first, shared, second])
    texts, more = joiner.join([first, second]), joiner.join([OptionalTexts.none(1), shared])
    assert list(texts) == ["ab", "c", "d", "é"]
    assert list(more) == [None, "ab", "c"]
    assert texts.data is more.data
    assert len(texts.data) == 6
    alone = TextJoiner([first, OptionalTexts.none(2)])
    assert alone.join([first]).data is first.data, "nothing is copied if there is one buffer"


def test_sources_are_named_once() -> None:
    found = Sources.of(["a", "b", "a", "c"], np.array([2, 1, 0, -1, 1]))
    assert found.names == ("a", "b", "c")
    assert [found[i] for i in range(5)] == ["a", "b", "a", "c", "b"]
    assert found.counts() == {"a": 2, "b": 2, "c": 1}
    assert found.take(np.array([1, 4])).counts() == {"b": 2}
    assert [found.take(np.array([3, 0]))[i] for i in (0, 1)] == ["c", "a"]
