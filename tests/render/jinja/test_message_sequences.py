"""Conversations of unseen shapes are put together from messages: as the long way writes them, or found out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.render.bound import WrittenRecord
from chatmill.render.jinja.expressions import Question
from chatmill.render.jinja.labels import Span
from chatmill.render.jinja.message_sequences import MessageSequences
from chatmill.render.jinja.options import Expand, TemplateOptions, Traces
from chatmill.render.jinja.record_view import InputForm, RecordView
from chatmill.render.jinja.renderer import TraceError
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.turn_sequences import Counts, TextSequence
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.render.sequence_items import Ids, TextPart
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.render.reference import jinja
from tools.template_survey import bind_bytes

CALL = ToolCall("f", '{"a": 1}', "call00001")


def talk(rng: random.Random, turns: int) -> Conversation:
    """Turns with calls and results in random numbers, so that hardly any two talks have the same shape."""
    messages: list[Message] = [Message(Role.SYSTEM, "be")] if rng.random() < 0.3 else []
    for number in range(turns):
        messages.append(Message(Role.USER, f"q{number}"))
        for _ in range(rng.randint(0, 2)):
            calls = (CALL,) * rng.randint(1, 2)
            messages.append(Message(Role.ASSISTANT, rng.choice(["", "I look."]), tool_calls=calls))
            messages += [Message(Role.TOOL, f"r{rng.random()}", tool_call_id="call00001", name="f") for _ in calls]
        reasoning = rng.choice([None, "hm"])
        messages.append(
            Message(Role.ASSISTANT, f"a{number}", reasoning=reasoning, weight=rng.choice([None, None, 0.0]))
        )
    return Conversation(tuple(messages))


def talks(count: int, seed: int = 0) -> list[Conversation]:
    rng = random.Random(seed)
    return [talk(rng, rng.randint(1, 4)) for _ in range(count)]


def bound(name: str, **options: object) -> ModelTemplate:
    template = bind(name, byte_tokenizer(find_template(name).control_tokens), TemplateOptions(**options))  # type: ignore[arg-type]
    assert isinstance(template, ModelTemplate)
    return template


def items(written: WrittenRecord) -> list[list[Ids | TextPart]]:
    """The sequences of a record; fragments have texts of the record that they were made for."""
    return [
        [
            i._replace(text="") if isinstance(i, TextPart) and i.expression and i.expression[0] != "const" else i
            for i in sequence
        ]
        for sequence in written.sequences
    ]


@pytest.mark.parametrize(
    ("name", "expand", "least"),
    [
        ("qwen3_training", Expand.TURNS, 5),
        ("qwen2_5", Expand.NONE, 5),
        ("qwen3", Expand.NONE, 5),  # changes earlier turns, and trains them as they are
        ("glm4_5", Expand.TURNS, 5),
        ("qwen2_5", Expand.LAST, 0),  # trains other answers than the places of messages tell
        ("qwen3", Expand.TURNS, 0),  # changes earlier turns, which then have sequences of their own
    ],
)
def test_as_the_long_way_writes_it(name: str, expand: Expand, least: int) -> None:
    template, alone = bound(name, expand=expand), bound(name, expand=expand)
    given = talks(70 if least else 20)
    written = [template.write(one, by_messages=True) for one in given]
    wanted = [alone.write(one) for one in given]
    assert list(map(items, written)) == list(map(items, wanted))
    assert [one.counts for one in written] == [one.counts for one in wanted]
    made = template.put_together
    assert made >= least
    assert least or not made


WRITES_THE_NUMBER = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if messages|length > 9 %}!{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if messages|length > 8 %}!{% endif %}{% endif %}"""
"""What it writes for a message depends on how many there are, which no place of a message says."""


def chat(turns: int) -> Conversation:
    return Conversation(tuple(Message(r, f"{r}{n}") for n in range(turns) for r in (Role.USER, Role.ASSISTANT)))


def outcome(template: ModelTemplate, conversation: Conversation) -> object:
    """The sequences of a conversation, or why there are none."""
    try:
        return items(template.write(conversation, by_messages=True))
    except RecordError as error:
        return str(error)


def test_a_template_that_looks_further_is_followed() -> None:
    for order in ((3, 4, 5, 4, 6, 2), (5, 3, 6, 4), (1, 6, 1, 5)):
        template = bind_bytes("number", WRITES_THE_NUMBER)
        whole = bind_bytes("number", WRITES_THE_NUMBER, TemplateOptions(traces=Traces.WHOLE))
        for turns in order:
            assert outcome(template, chat(turns)) == outcome(whole, chat(turns))


PROMPTS_BY_NUMBER = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}~{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if messages|length > 8 %}~{% endif %}{% endif %}"""
"""Whether the mark before an answer is part of its prompt depends on how many messages there are."""


def test_masks_that_places_do_not_decide_are_right() -> None:
    batch = [chat(turns) for turns in range(2, 20)]
    whole = bind_bytes("number", PROMPTS_BY_NUMBER, TemplateOptions(traces=Traces.WHOLE))
    wanted, found = render(batch, whole).tokens, render(batch, bind_bytes("number", PROMPTS_BY_NUMBER)).tokens
    assert np.array_equal(found.ids, wanted.ids)
    assert np.array_equal(found.kinds, wanted.kinds)


def test_prompts_are_compared_at_every_number_of_messages() -> None:
    text = PROMPTS_BY_NUMBER.replace("> 8", "> 10")
    template, whole = bind_bytes("number", text), bind_bytes("number", text, TemplateOptions(traces=Traces.WHOLE))
    for turns in (5, 6, 7, 4):
        assert items(template.write(chat(turns))) == items(whole.write(chat(turns)))


def test_a_record_that_is_written_unlike_those_of_its_shape_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    template = bind_bytes("number", WRITES_THE_NUMBER)
    template.write(chat(2))
    monkeypatch.setattr(PlainSandbox, "concat", lambda self, texts: "!".join(texts))
    with pytest.raises(TraceError, match="otherwise than other records of its shape"):
        template.write(chat(2))


WRITES_THE_CALLS_BEFORE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.index0 and messages[loop.index0 - 1].tool_calls|default([])|length > 1 %}!{% endif %}{{ m.content }}\
{% for call in m.tool_calls|default([]) %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""What it writes for a message depends on how many calls the one before it has."""


def test_the_outline_of_a_neighbour_is_not_enough() -> None:
    template, alone = (bind_bytes("calls", WRITES_THE_CALLS_BEFORE) for _ in range(2))
    given = talks(60, seed=3)
    assert [items(template.write(one, by_messages=True)) for one in given] == [items(alone.write(one)) for one in given]
    assert template.put_together >= 5, "whole shapes of neighbours decide it"


REFUSES_TWO_OF_A_ROLE = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_what_the_template_refuses_is_refused_also_where_every_place_is_known() -> None:
    template = bind_bytes("alternates", REFUSES_TWO_OF_A_ROLE)
    for turns in (1, 2, 3, 4):
        template.write(chat(turns), by_messages=True)
    user, answer = chat(1).messages
    for odd in ((user, answer, user, user, answer), (user, user, answer), (user, answer, answer)):
        with pytest.raises(RecordError, match="roles must alternate"):
            template.write(Conversation(odd), by_messages=True)
    assert items(template.write(chat(9), by_messages=True)) == items(
        bind_bytes("x", REFUSES_TWO_OF_A_ROLE).write(chat(9))
    )


REFUSES_LONG_CHATS = """{% if messages|length > 8 %}{{ raise_exception('too long') }}{% endif %}\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_refusals_that_no_place_decides_do_not_end_a_build() -> None:
    template = bind_bytes("short", REFUSES_LONG_CHATS)
    for long in (5, 6, 7, 8, 9):
        for turns in (1, 2, 3, 4):  # every place of a long chat is known, again and again
            template.write(chat(turns), by_messages=True)
        with pytest.raises(RecordError, match="too long"):
            template.write(chat(long), by_messages=True)


def test_an_answer_far_behind_changes_earlier_ones() -> None:
    """gpt-oss shows the reasoning of calls until an answer without calls follows, however far behind."""
    shared, whole = (
        bind_bytes("gptoss", jinja("gptoss"), TemplateOptions(today=date(2026, 1, 2), traces=traces))
        for traces in (Traces.SHARED, Traces.WHOLE)
    )
    call = Message(Role.ASSISTANT, "", reasoning="hm", tool_calls=(CALL,))
    asked, result, said = (
        Message(Role.USER, "q"),
        Message(Role.TOOL, "r", tool_call_id="call00001"),
        chat(1).messages[1],
    )
    for count in (1, 2, 3, 4, 5):
        ways = ((), (said,), (said, asked), (said, asked, call, result), (asked, call, result, said))
        for end in ways:
            one = Conversation((asked, *(call, result) * count, *end))
            assert outcome(shared, one) == outcome(whole, one)


# -- lessons by themselves ---------------------------------------------------------------------------------------------

Asked = dict[Question, object]


def learn(book: MessageSequences, conversation: Conversation, mark: str, asked: Asked | None = None) -> None:
    view = RecordView(conversation, InputForm())
    book.learn(view, view.shape(), [sequence_of(conversation, mark)], counts_of(conversation), asked or {})


def sequence_of(conversation: Conversation, mark: str) -> TextSequence:
    spans = [
        span
        for k, message in enumerate(conversation.messages)
        for span in (Span(mark, None, 1, k), Span(message.content, ("field", (k, "content")), 2, k))
    ]
    return TextSequence(tuple(spans), trained(conversation))


def trained(conversation: Conversation) -> tuple[int, ...]:
    return tuple(k for k, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT)


def counts_of(conversation: Conversation) -> Counts:
    return Counts(len(trained(conversation)), 0, 0, 0)


def composed(book: MessageSequences, conversation: Conversation) -> Sequence[str] | None:
    view = RecordView(conversation, InputForm())
    found = book.compose(view, view.shape())
    return None if found is None else [span.text for span in found.sequence.spans]


def test_a_longer_talk_of_known_messages() -> None:
    book = MessageSequences()
    for turns in (1, 2, 3, 4):
        learn(book, chat(turns), ">")
    assert composed(book, chat(9)) == [span.text for span in sequence_of(chat(9), ">").spans]


def test_an_unknown_place_is_not_guessed() -> None:
    book = MessageSequences()
    learn(book, chat(1), ">")
    assert composed(book, chat(2)) is None


def test_other_answers_need_a_lesson_of_their_own() -> None:
    book = MessageSequences()
    question: Question = ("contains", ("field", (1, "content")), "</think>")
    learn(book, chat(1), ">", {question: False})
    assert composed(book, chat(1)) is not None
    thinking = chat(1)._replace(messages=(chat(1).messages[0], Message(Role.ASSISTANT, "</think>x")))
    assert composed(book, thinking) is None
    learn(book, thinking, "#", {question: True})
    assert book.is_sound
    assert composed(book, chat(1)) is None, "an answer of the next message counts: what was learned before is void"
    for _ in range(2):  # neighbours count by their shapes, and then by their answers
        learn(book, chat(1), ">", {question: False})
        learn(book, thinking, "#", {question: True})
    assert composed(book, thinking) == ["#", chat(1).messages[0].content, "#", "</think>x"]
    assert composed(book, chat(1)) == [span.text for span in sequence_of(chat(1), ">").spans]


def test_lessons_that_contradict_each_other_end_the_method() -> None:
    book = MessageSequences()
    for mark in "># ":
        learn(book, chat(1), mark)
        assert book.is_sound, "shapes and answers of neighbours may tell them apart"
    learn(book, chat(1), ">")
    assert not book.is_sound
    assert composed(book, chat(1)) is None


def test_a_text_that_is_empty_is_told_from_one_that_is_not() -> None:
    book = MessageSequences()
    content: Question = ("filled", ("field", (1, "content")))
    learn(book, chat(1), ">")
    silent = chat(1)._replace(messages=(chat(1).messages[0], Message(Role.ASSISTANT, "")))
    view = RecordView(silent, InputForm())
    found = book.compose(view, view.shape())
    assert found is not None
    assert found.replies[content] is False, "the sequence lacks that text: it is no sequence for others"
    assert [span.text for span in found.sequence.spans] == [">", "user0", ">"]
    sequence = sequence_of(silent, ">")
    sequence = sequence._replace(spans=tuple(span for span in sequence.spans if span.text))
    book.learn(view, view.shape(), [sequence], counts_of(silent), {content: False})
    assert composed(book, chat(1)) is not None, "a sequence without an empty text does not contradict one that shows it"


@pytest.mark.parametrize("wrong", ["order", "several", "far", "sequences", "unstable", "untrained"])
def test_what_cannot_be_taken_apart_teaches_nothing(wrong: str) -> None:
    book, one = MessageSequences(), chat(2)
    view = RecordView(one, InputForm())
    sequence, counts, asked = sequence_of(one, ">"), counts_of(one), {}
    sequences = [sequence]
    if wrong == "order":
        sequences = [sequence._replace(spans=tuple(reversed(sequence.spans)))]
    elif wrong == "several":
        asked = {("same", ("field", (0, "content")), ("field", (1, "content"))): True}
    elif wrong == "far":
        sequences = [sequence._replace(spans=(*sequence.spans, Span("x", ("field", (0, "content")), 2, 3)))]
    elif wrong == "sequences":
        sequences = [sequence, sequence]
    elif wrong == "unstable":
        counts = counts._replace(unstable=1)
    else:
        counts = counts._replace(untrained=1)
    book.learn(view, view.shape(), sequences, counts, asked)
    assert book.is_sound
    assert composed(book, one) is None
