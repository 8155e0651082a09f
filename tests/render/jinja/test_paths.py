"""Every value that a template is given of a record: its path gives the value, and its text is the record's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.render.jinja.expressions import Notes, evaluate, kind_of_value
from chatmill.render.jinja.record_view import Arguments, Content, InputForm, RecordView
from chatmill.render.jinja.traced import RecordValue, Traced

WORDS = st.text("abz\n", max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(WORDS, JSON, max_size=3)
CALLS = st.tuples(WORDS, OBJECTS.map(json.dumps), st.none() | WORDS).map(lambda call: ToolCall(*call))
MESSAGES = st.tuples(
    st.sampled_from(list(Role)),
    WORDS,
    st.none() | WORDS,
    st.none() | WORDS,
    st.lists(CALLS, max_size=2),
    st.fixed_dictionaries({}, optional={"plan": JSON, "unread": JSON}),
).map(lambda m: Message(m[0], m[1], reasoning=m[2], name=m[3], tool_calls=tuple(m[4]), extra=m[5]))
CONVERSATIONS = st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), st.lists(OBJECTS, max_size=2)).map(
    lambda pair: Conversation(tuple(pair[0]), tools=tuple(pair[1]))
)


def leaves(traced: Any, plain: Any) -> Iterator[tuple[Any, Any]]:
    """Traced values with the plain ones at the same places."""
    if isinstance(traced, Traced | RecordValue):
        yield traced, plain
    if isinstance(plain, dict):
        pairs = list(zip(traced.items(), plain.items(), strict=True))
        for (key, value), (plain_key, plain_value) in pairs:
            yield from leaves(key, plain_key)
            yield from leaves(value, plain_value)
    elif isinstance(plain, list):
        for one, other in zip(traced, plain, strict=True):
            yield from leaves(one, other)
    else:
        assert traced == plain


@pytest.mark.parametrize("arguments", list(Arguments))
@pytest.mark.parametrize("content", list(Content))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversation=CONVERSATIONS)
def test_a_path_gives_the_value_that_a_template_was_given(
    conversation: Conversation, arguments: Arguments, content: Content
) -> None:
    form = InputForm(arguments=arguments, content=content, more_fields=frozenset({"plan"}))
    view, count = RecordView(conversation, form), len(conversation.messages)
    plain, traced = view.values(count, None), view.values(count, Notes())
    for value, expected in leaves(list(traced), list(plain)):
        if isinstance(value, Traced):
            ((_, expression),) = value._atoms
            assert expression is not None
            assert evaluate(expression, view.field) == expected
        else:
            assert view.field(value._path) == expected
            assert kind_of_value(expected) == type(expected).__name__
    for message, given_message in zip(conversation.messages, plain[0], strict=True):
        assert [call.get("id") for call in given_message.get("tool_calls", [])] == [c.id for c in message.tool_calls]
