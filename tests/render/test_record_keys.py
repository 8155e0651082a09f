"""What keys answer for all messages at once is what the template would be answered for each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.conversations import Conversations
from chatmill.core.texts import Texts
from chatmill.render.jinja.expressions import Question, ask
from chatmill.render.jinja.record_view import Arguments, InputForm, RecordView
from chatmill.render.record_keys import RecordKeys, contains

CHARACTERS = st.sampled_from(["", " ", "\n", "\u2003", "\x85", "x", "é", "<think>", "<", "\0"])
TEXTS = st.lists(CHARACTERS, max_size=4).map("".join)
STRIPS = st.tuples(st.sampled_from(["strip", "lstrip", "rstrip"]), st.sampled_from([None, "\n", "x", " \n\u2003"]))
FORM = InputForm(arguments=Arguments.STRING)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    expression: Any = ("field", (0, draw(st.sampled_from(["content", "reasoning"]))))
    for name, characters in draw(st.lists(STRIPS, max_size=2)):
        expression = ("apply", name, (characters,), expression)
    what = draw(st.sampled_from(["filled", "contains", "equals", "startswith", "endswith"]))
    if what == "filled":
        return ("filled", expression)
    part = draw(TEXTS)
    return (what, expression, part) if what in ("contains", "equals") else ("method", expression, what, (part,))


@settings(max_examples=400)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), st.lists(questions(), min_size=1, max_size=4))
def test_answers_of_a_batch_are_those_of_each_record(texts: list[tuple[str, str]], asked: list[Question]) -> None:
    conversations = [
        Conversation((Message(Role.ASSISTANT, content, reasoning=reasoning),)) for content, reasoning in texts
    ]
    keys = RecordKeys(FORM)
    assert keys.learn(tuple(asked))
    found = list(keys._replies(Conversations.of(conversations)))
    wanted = list(dict.fromkeys(asked))
    assert len(found) == len(wanted)
    for question, answers in zip(wanted, found, strict=True):
        views = [RecordView(conversation, FORM) for conversation in conversations]
        assert answers.tolist() == [bool(ask(question, view.field)) for view in views], question


@pytest.mark.parametrize("part", ["a", "aa", "ab", "aba", "aaa"])
def test_a_part_across_two_texts_hides_none_of_the_second(part: str) -> None:
    """`\n\n` in a text that begins with it, after one that ends with a line feed."""
    for texts in itertools.product(["", "a", "aa", "aba", "baaa"], repeat=3):
        assert contains(Texts.of(texts), part.encode()).tolist() == [part in text for text in texts]
