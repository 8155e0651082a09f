"""Numbers and comparisons that a template reads without asking: no record is written with those of another."""

from __future__ import annotations

from typing import Any

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.render.jinja.options import Expand
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja

MESSAGES = (
    "{%- for message in messages %}<|s|>{{ message.role }}:BODY{{ message.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant:{% endif %}"
)
CALLS = (
    "{%- if tools %}<|s|>{{ tools|tojson }}<|e|>{% endif %}{%- for message in messages %}<|s|>{{ message.role }}:"
    "{% for call in message.tool_calls or [] %}{% set given = call.function.arguments %}BODY"
    "{{ call.function.name }}WRITTEN{% endfor %}{{ message.content or '' }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant:{% endif %}"
)
ITEMS = "{% for key, value in given|items %}{{ key }}={{ value|tojson }};{% endfor %}"


def bound(text: str, *stops: str, **given: Any) -> ModelTemplate:
    return of_text(text, stops or ("<|e|>",), ("<|s|>",), **given)


def written(text: str, conversations: list[Conversation]) -> None:
    """Each is written in one batch as plain Jinja writes it."""
    assert not rendered_like_plain_jinja(bound(text), conversations).failed


def chat(name: str, question: str, answer: str) -> Conversation:
    return Conversation((Message(Role.USER, question, name=name), Message(Role.ASSISTANT, answer)))


CHATS = [
    *(chat("Ann", "hi", "ok"), chat("Ann", "hi", "ok"), chat("bob", "hello there", "fine then")),
    *(chat("cy", "", "yes"), chat("ann", "x" * 9, "ok"), chat("bob", "ann", "no"), chat("ann", "ann", "no")),
]


@pytest.mark.parametrize(
    "body",
    [
        "{% for i in range(message.content|length) %}.{% endfor %}",
        "{{ range(3, message.content|length)|join(',') }}",
        "{{ 'abcdefghijkl'[message.content|length] }}",
        "{{ 'abcdefghijkl'[:message.content|length] }}",
        "{{ 'llllll'.replace('l', 'm', message.content|length) }}",
        "{{ (message.content|length)|int }}",
        "{{ 'llllll'|replace('l', message.content, message.content|length) }}",
        "{{ (message.content|length)|tojson }}{{ [message.content|length]|tojson }}",
        "{% for x in [1, 2, 3, 4]|slice(message.content|length + 1) %}{{ x }}{% endfor %}",
        "{{ 'Y' if ('x' + message.content).replace('x', '') else 'N' }}",
        "{% set t = 'abb' ~ message.content %}{{ t.split('ab')[1] }}",
        "{{ (message.name ~ 'Z')|lower if message.name else '' }}",
        "{{ ('z' ~ message.name)|upper if message.name else '' }}",
        "{{ ('z' ~ message.name).swapcase() if message.name else '' }}",
        "{{ 'E' if (message.name|tojson).endswith(message.content ~ '\"') else 'N' }}",
        "{{ message.content.split(message.name)|length if message.name else '' }}",
        "{{ (message.name or '')[: message.content|length].partition('n')[2] }}",
        "{{ (message.name or '').ljust(message.content|length, '.') }}",
    ],
)
def test_what_a_template_makes_of_a_text_is_made_of_every_record(body: str) -> None:
    written(
        MESSAGES.replace("BODY", f"{{% if message.role == 'user' %}}{body}{{% endif %}}"),
        CHATS,
    )


def call(name: str, number: str, tool: str = "look") -> Conversation:
    calls = (ToolCall(name, f'{{"n": {number}}}', None),)
    tools = ({"type": "function", "function": {"name": tool, tool: 1}},)
    return Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "", tool_calls=calls)), tools=tools)


def test_what_a_template_makes_of_tools_is_made_of_every_record() -> None:
    body = "{{ tools[0].function|reverse|join(',') }}"
    text = CALLS.replace("BODY", "").replace("WRITTEN", "{{ given }}").replace("{{ tools", f"{body}{{{{ tools", 1)
    written(text, [call("look", "1", tool) for tool in ("look", "hear", "look", "taste")])


LOOKS_INSIDE = [
    "{% for i in range(given.n if given.n is integer else 0) %}.{% endfor %}",
    "{{ 'abcdefghijkl'[given.n] if given.n is integer else '' }}",
    "{{ 'abcdefghijkl'[:given.n] if given.n is integer else '' }}",
    "{{ given.n.as_integer_ratio()|join('/') if given.n is number else '' }}",
]
LOOKS_AT_ALL = [
    "{{ given|string|length }}",
    "{% if tools and tools[0].function.name == call.function.name %}known {% endif %}",
    "{% if tools and call.function.name == tools[0].function.name %}known {% endif %}",
]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        *((body, arguments) for body in LOOKS_INSIDE for arguments in (ITEMS, "{{ given|tojson }}")),
        *((body, arguments) for body in LOOKS_AT_ALL for arguments in ("{{ given }}", "{{ given|tojson }}")),
    ],
)
def test_what_a_template_makes_of_a_call_is_made_of_every_record(body: str, arguments: str) -> None:
    """Arguments that are equal and written otherwise, too: 1, 1.0 and true."""
    numbers = ["3", "5", "5.0", "1", "true", "1.0", "3"]
    text = CALLS.replace("BODY", body).replace("WRITTEN", arguments)
    written(text, [call(name, n, tool) for name in ("look", "find") for n in numbers for tool in ("look", "hear")])


@pytest.mark.parametrize(
    "body",
    [
        *("'%9s' % message.name", "'{:>9}'.format(message.name)", "'%9s'|format(message.name)", "message.name|e"),
        *("('<%s>'|safe) % message.name", "'<'|safe + message.name", "(message.name|safe)|upper"),
        *("message.name|center(9)", "'%d' % (message.name|length)", "message.name.translate({})"),
    ],
)
def test_a_text_that_cannot_be_followed_refuses_the_record(body: str) -> None:
    """Also where it is written before a text of the record that spells a control token."""
    template = bound(MESSAGES.replace("BODY", f"{{{{ {body} if message.name else '' }}}}"))
    rendered = render([chat("<|e|>", "hi", "ok"), chat("ann", "hi", "ok")], template, collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["origin_lost", "origin_lost"]


def test_a_text_that_is_only_called_safe_is_followed() -> None:
    body = "{{ '<b>'|safe + '<' }}{{ (message.name or '')|tojson|safe ~ '&' }}"
    written(MESSAGES.replace("BODY", body), CHATS)


def test_items_of_what_has_none_refuse_the_record_alone() -> None:
    """A template that goes over the items of an argument which is a text here: no fault of others."""
    template = bound(
        CALLS.replace("BODY", "\n{% for key, value in given.n|items %}{{ key }}{% endfor %}").replace("WRITTEN", ITEMS)
    )
    records = [call("look", '{"deep": 1}'), call("look", '"flat"'), call("look", '{"deep": 2}')]
    rendered = render(records, template, collect_failures=True)
    assert [(index, error.code) for index, error in rendered.failed] == [(1, "template_refused")]
    assert "(line 2)" in str(rendered.failed[0][1])


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.LAST])
def test_what_is_asked_of_an_answer_only_once_it_is_followed_is_asked_of_every_record(expand: Expand) -> None:
    """The stop is written by the next message, and which one it is depends on the answer."""
    text = (
        "{% for m in messages %}{% if loop.index0 and m.role == 'user' %}"
        "{{ '<|s|>' if loop.previtem.content|length > 3 else '<|e|>' }}{% endif %}{{ m.role }}: {{ m.content or '' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = bound(text, "<|e|>", "<|s|>", expand=expand)
    asked, answer = chat("ann", "hi", "ok").messages
    chats = [chat("ann", "hi", text) for text in ("ok", "fine then", "no", "well well")]
    rendered = render([Conversation((asked, answer._replace(weight=0.0))), *chats], template)
    ends = [template.tokenizer.decode(rendered.tokens.conversation(number).ids[-1:]) for number in range(1, 5)]
    assert ends == ["<|e|>", "<|s|>", "<|e|>", "<|s|>"]


def test_what_a_text_contains_does_not_depend_on_the_text_before_it() -> None:
    body = "{% if '\\n\\n' in message.content %}[several paragraphs] {% endif %}"
    paragraphs = ["one\n", "\n\ntwo", "one\n", "\n\ntwo", "a\n\nb", "one"]
    written(MESSAGES.replace("BODY", body), [chat("ann", text, "ok\n") for text in paragraphs * 2])


@pytest.mark.parametrize(
    "asked", ["startswith('json')", "endswith('text')", "find('tools', 0)", "startswith(('field', 'apply'))"]
)
def test_words_that_a_template_looks_for_are_only_words(asked: str) -> None:
    """Also those by which Chatmill itself knows what was asked."""
    body = f"{{{{ message.content.{asked} }}}}"
    texts = ["json", "a text", "tools", "field", "apply", "else"]
    chats = [Conversation((*chat("ann", text, "ok").messages, *chat("bob", "more", "fine").messages)) for text in texts]
    written(MESSAGES.replace("BODY", body), chats)


def test_a_text_may_be_written_in_hundreds_of_pieces() -> None:
    body = "{% for line in (message.reasoning_content or '').split('\\n') %}> {{ line }};{% endfor %}"
    thoughts = ["\n".join(f"{number} {line}" for line in range(300)) for number in range(3)]
    answers = [(Message(Role.USER, "q"), Message(Role.ASSISTANT, "ok", reasoning=text)) for text in thoughts]
    written(MESSAGES.replace("BODY", body), [Conversation(messages) for messages in answers])
