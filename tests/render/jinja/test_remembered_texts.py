"""Texts from remembered turns are those of plain Jinja, for conversations of shapes that never repeat."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ConfigError, RecordError
from chatmill.render.jinja import remembered_texts
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.model_template import ModelTemplate
from tests.render.jinja.at_hand import bound, bundled, samples, text_of
from tests.render.jinja.test_random_templates import SETTINGS, bind, conversations, templates
from tools.template_survey import bind_bytes


def recombined(seed: int, count: int) -> list[Conversation]:
    """Conversations of which no two have the same shape, made of the exchanges of real ones."""
    rng = random.Random(seed)
    exchanges: list[list[Message]] = []
    tools = [one.tools for one in samples(4)]
    for conversation in samples(4):
        for message in conversation.messages:
            if message.role is Role.USER or not exchanges:
                exchanges.append([])
            exchanges[-1].append(message)
    made = []
    for number in range(count):
        chosen = [message for _ in range(rng.randint(1, 5)) for message in rng.choice(exchanges)]
        made.append(Conversation(tuple(chosen), tools=rng.choice(tools), id=f"{seed}-{number}"))
    return made


def differences(template: ModelTemplate, batch: list[Conversation], rng: random.Random) -> list[tuple[str | None, int]]:
    """The renderings of conversations, and of random beginnings of them, that are not plain Jinja's."""
    renderer, found = template._renderer({}), []
    for conversation in batch:
        view = RecordView(conversation, template.form)
        count = len(conversation.messages)
        for upto in sorted({count, *(rng.randint(1, count) for _ in range(3))}):
            for prompt in (False, True):
                try:
                    wanted = renderer.plain_if_any(view, upto, prompt)
                except RecordError:
                    continue
                if renderer.text(view, upto, prompt) != wanted:
                    found.append((conversation.id, upto))
    return found


@pytest.mark.parametrize("name", bundled())
def test_published_templates_write_unseen_shapes_from_turns_that_are_remembered(name: str) -> None:
    template = bound(name)
    batch = recombined(1, 12)
    assert differences(template, batch, random.Random(2)) == []
    texts = template._renderer({}).texts
    before = texts.runs
    assert differences(template, recombined(3, 6), random.Random(4)) == []
    assert texts.is_followed
    assert texts.runs > 0
    assert texts.runs - before <= 48  # at most: most renderings of the second batch have nothing new


def test_what_is_forgotten_is_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_texts, "MAX_WAYS", 40)
    template = bind_bytes("qwen3", text_of("llamacpp/Qwen-Qwen3-0.6B.jinja"))
    assert differences(template, recombined(5, 12), random.Random(6)) == []
    assert template._renderer({}).texts.runs > 24, "it forgets"
    assert template._renderer({}).texts.is_followed


def test_turns_of_tries_that_are_forgotten_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    template = bind_bytes("qwen3", text_of("llamacpp/Qwen-Qwen3-0.6B.jinja"))
    renderer, (conversation,) = template._renderer({}), recombined(7, 1)
    view = RecordView(conversation, template.form)
    for _ in range(3):  # the first learns
        renderer.text(view, len(conversation.messages), False)
    assert view.turns
    monkeypatch.setattr(remembered_texts, "MAX_WAYS", 0)
    renderer.text(view, 1, False)
    assert {table for table, _ in view.turns} <= set(map(id, renderer.texts._tries.tables.values()))


@SETTINGS
@given(source=templates(), batch=st.lists(conversations(), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_random_templates_have_the_text_of_plain_jinja(source: str, batch: list[Conversation], seed: int) -> None:
    try:
        template = bind(source)
    except ConfigError:
        return
    rng = random.Random(seed)
    order = [*batch, *batch]
    rng.shuffle(order)
    assert differences(template, order, rng) == []
