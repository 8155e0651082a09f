"""What templates read, ask and write, in small: names, values of a record by their paths, questions, tags."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.texts import Texts
from chatmill.render.jinja.expressions import Notes, Question, ask, evaluate, kind_of_value
from chatmill.render.jinja.message_fields import MessageFields
from chatmill.render.jinja.names import names_read
from chatmill.render.jinja.options import Expand, TemplateOptions, Thinking, Unproved
from chatmill.render.jinja.record_view import Arguments, Content, InputForm, RecordView
from chatmill.render.jinja.sandbox import PlainSandbox, _code_of
from chatmill.render.jinja.traced import RecordValue, Traced
from chatmill.render.jinja.tracing_sandbox import TracingSandbox, _hooked_code
from chatmill.render.model_template import JinjaSource, ModelTemplate, _names_read_by
from chatmill.render.record_keys import RecordKeys, contains
from chatmill.render.registry import find_template
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.chats import chat
from tests.render.jinja.at_hand import of_text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("{{ a }}", {"a"}),
        ("{% set a = b %}{{ a }}", {"b"}),
        ("{% if c %}{% set a = 1 %}{% else %}{% set a = 2 %}{% endif %}{{ a }}", {"c"}),
        ("{% if c %}{% set a = 1 %}{% elif d %}{% set a = 2 %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", {"c", "d"}),
        ("{% if c %}{% set a = 1 %}{% elif d %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", {"a", "c", "d"}),
        ("{% if c %}{% set a = 1 %}{% endif %}{{ a }}", {"a", "c"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% for x in xs %}{% set a = x %}{{ a }}{{ loop.index }}{% endfor %}", {"xs"}),
        ("{% for x in xs %}{% set a = x %}{% endfor %}{{ a }}", {"a", "xs"}),
        ("{% for x, y in xs if y and z %}{{ x }}{% else %}{{ w }}{% endfor %}", {"w", "xs", "z"}),
        ("{% macro f(x, y=d) %}{{ x }}{{ y }}{{ g(z) }}{% endmacro %}{% macro g(x) %}{% endmacro %}", {"d", "z"}),
        ("{% set a %}{{ b }}{% endset %}{{ a }}", {"b"}),
        ("{% set ns.a = b %}{% set ns = c %}{{ ns.d }}", {"b", "c"}),
        ("{% with a = b %}{{ a }}{% endwith %}{{ a }}", {"a", "b"}),
        ("{% generation %}{{ a }}{% endgeneration %}", {"a"}),
        ("{% filter upper %}{{ a }}{% endfilter %}", {"a"}),
        (find_template("qwen3").text, {"messages", "tools", "add_generation_prompt", "enable_thinking"}),
    ],
)
def test_names_that_are_read(text: str, read: set[str]) -> None:
    sandbox = PlainSandbox(None)
    assert names_read(sandbox.parse(text)) - set(sandbox.globals) == read


def test_other_dates_and_options_parse_and_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "{{ strftime_now('%Y') }} {{ who }}{% for m in messages %}<{{ m.content }}|compiled once>{% endfor %}"
    source = JinjaSource(name="t", text=text, path="t", stop_tokens=("|compiled once>",))
    for kept in (_code_of, _hooked_code, _names_read_by):
        kept.cache_clear()  # type: ignore[attr-defined]
    parsed: list[str] = []
    parse = PlainSandbox.parse
    monkeypatch.setattr(PlainSandbox, "parse", lambda self, text: parsed.append(text) or parse(self, text))
    talk = chat(("user", "q"), ("assistant", "a"))
    for who, year in (("x", 2025), ("y", 2026)):
        given = TemplateOptions(today=datetime.date(year, 1, 2), options={"who": who})
        template = ModelTemplate(source, byte_tokenizer(["|compiled once>"]), given)
        assert template.plain(talk, {"who": who}, 2, prompt=False).startswith(f"{year} {who}<q|")
        (document,) = template.text_documents(talk).documents
        assert "".join(span.text for span in document.spans).startswith(f"{year} {who}<")
    assert _code_of.cache_info().misses == _hooked_code.cache_info().misses == 1
    assert parsed == [text, text], "for the names that it reads, and for its loops"


def test_fingerprints_tell_options_apart_and_are_those_that_datasets_hold() -> None:
    given: list[dict[str, Any]] = [
        *({}, {"options": {"x": 1}}, {"expand": Expand.TREE}, {"unproved": Unproved.UNTRAINED}),
        *({"thinking": Thinking.AS_GIVEN}, {"last_turn_only": True}, {"whole_document": True}),
    ]
    text = "{% for m in messages %}{{ x }}{{ m.content }}<|im_end|>{% endfor %}"
    prints = [of_text(text, **options).fingerprint for options in given]
    prints += [of_text(text + " ").fingerprint, of_text(text, ("<|end|>",)).fingerprint]
    assert len(set(prints)) == len(prints)
    assert (prints[0][:16], prints[6][:16]) == ("594c75a0dee31a85", "f3999053f1cdbd8c")


TAGGED = (
    "{% set x = 'a' %}{% for m in messages %}{% generation %}{% set x = m %}{{ x }}{{ loop.last }}"
    "{% endgeneration %}{{ x }}{% endfor %}"
)


@pytest.mark.parametrize("sandbox", [PlainSandbox, TracingSandbox])
def test_what_is_set_in_a_tag_stays_in_it(sandbox: type[PlainSandbox]) -> None:
    environment = sandbox()
    assert environment.render(environment.template(TAGGED), {"messages": ["1", "2"]}) == "1Falsea2Truea"


WORDS = st.text("abz\n", max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=3)
CALLS = st.tuples(WORDS, OBJECTS.map(json.dumps), st.none() | WORDS).map(lambda call: ToolCall(*call))
MESSAGES = st.tuples(
    st.sampled_from(list(Role)),
    WORDS,
    st.none() | WORDS,
    st.none() | WORDS,
    st.lists(CALLS, max_size=2),
    st.fixed_dictionaries({}, optional={"plan": VALUES, "unread": VALUES}),
).map(lambda m: Message(m[0], m[1], reasoning=m[2], name=m[3], tool_calls=tuple(m[4]), extra=m[5]))
CONVERSATIONS = st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), st.lists(OBJECTS, max_size=2)).map(
    lambda pair: Conversation(tuple(pair[0]), tools=tuple(pair[1]))
)


def leaves(traced: Any, plain: Any) -> Iterator[tuple[Any, Any]]:
    """Traced values with the plain ones at the same places."""
    if isinstance(traced, Traced | RecordValue):
        yield traced, plain
    if isinstance(plain, dict):
        if isinstance(traced, MessageFields):  # read by name alone
            pairs = [((key, traced[key]), (key, value)) for key, value in plain.items()]
        else:
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
