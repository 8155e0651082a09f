"""Random templates from what real ones are made of: traced, in bulk and by plain Jinja they give the same."""

from __future__ import annotations

import json
from typing import Any

import jinja2
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ConfigError, RecordError
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.render.jinja.at_hand import of_text
from tests.render.one_by_one import ids_alone
from tools.template_survey import survey

TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|u|>", "<|a|>")
SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

TEXTS = st.one_of(
    st.sampled_from(["", " ", "a", "Hello.", " b \n", "x</think>y", "<think>t</think> u", "<|eos|>", "A", 'é<b>"q"']),
    st.text(alphabet='ab X\n</think>é"{}|', max_size=12),
)
CONTENTS = st.sampled_from(
    [
        *(
            "m.content",
            "m['content']",
            "m.content | trim",
            "m.content.strip()",
            "m.content | upper",
            "(m.content ~ '!')",
        ),
        *("m.content.split('</think>')[-1]", "m.content.split('</think>') | last | trim", "m.content | tojson"),
        *("m.content.replace('a', 'bb')", "m.content | replace('\\n', ' ')", "('<i>' + m.content)", "f(m.content)"),
        *("[m.role, m.content] | join(': ')", "m.content | default('-')", "m.content.lstrip('\\n')", "m.content[1:]"),
        *("m.get('name', 'nobody') ~ m.content", "m | tojson", "m.content | string", "m.content.rstrip() + ns.last"),
        "(m.reasoning_content | trim if m.reasoning_content is defined else '') ~ m.content",
    ]
)
CONDITIONS = st.sampled_from(
    [
        *("m.role == 'user'", "m.role != 'assistant'", "loop.first", "loop.last", "loop.index0 == 1", "m.content"),
        *("'</think>' in m.content", "m.content.startswith('<')", "m.content | length > 3", "m.content == 'a'"),
        *("m.role in ['user', 'system']", "ns.seen", "loop.index0 > ns.n", "m.reasoning_content is defined"),
        *("not m.content", "m.content is string", "loop.nextitem is defined", "tools", "add_generation_prompt"),
        "m.content | trim == ''",
    ]
)
LOOPS = st.sampled_from(["messages", "messages[::-1]", "messages[1:]", "messages if true", "loop_messages"])
LITERALS = st.sampled_from(["<|u|>", "<|a|>", "\n", "x ", "<b>", "</think>", "\n\n"])


@st.composite
def statements(draw: st.DrawFn, depth: int = 2) -> str:
    """A few statements of a loop's body."""
    made: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        what = draw(st.integers(0, 7 if depth else 3))
        if what <= 1:
            made.append("{{- " + draw(CONTENTS) + " }}")
        elif what == 2:
            made.append(draw(LITERALS))
        elif what == 3:
            made.append(draw(st.sampled_from(["{% set ns.seen = true %}", "{% set ns.n = loop.index0 %}"])))
        elif what == 4:
            inner, other = draw(statements(depth - 1)), draw(statements(depth - 1))
            made.append("{% if " + draw(CONDITIONS) + " %}" + inner + "{% else %}" + other + "{% endif %}")
        elif what == 5:
            first, second = draw(CONDITIONS), draw(CONDITIONS)
            inner = draw(statements(depth - 1))
            made.append("{% if " + first + " %}{% elif " + second + " %}" + inner + "{% endif %}")
        elif what == 6:
            made.append("{% set t %}" + draw(statements(depth - 1)) + "{% endset %}{{ t | trim }}")
        else:
            made.append("{%- for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments | tojson }}"
                        "{%- for k, v in (c.function.arguments.items() if c.function.arguments is mapping else []) %}"
                        "{{ k }}:{{ v }};{% endfor %}{% endfor %}")  # fmt: skip
    return "".join(made)


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A template that often looks like a chat template."""
    body, ending = draw(statements()), draw(st.sampled_from(["<|eos|>", "<|eos|>\n", "{{ eos_token }}", ""]))
    head = "{{ bos_token }}{% set ns = namespace(seen=false, n=0, last='') %}{% set loop_messages = messages %}"
    head += "{% macro f(x) %}({{ x | trim }}){% endmacro %}"
    if draw(st.booleans()):
        head += "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
        head += "{% set loop_messages = messages[1:] %}{% endif %}"
    if draw(st.booleans()):
        head += "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    loop = "{% for m in " + draw(LOOPS) + " %}<|{{ m.role[0] }}|>" + body + ending + "{% endfor %}"
    return head + loop + "{% if add_generation_prompt %}<|a|>{% endif %}"


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """A few messages of any kind."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(Message(Role.SYSTEM, draw(TEXTS)))
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message(Role.USER, draw(TEXTS), name=draw(st.sampled_from([None, "n", "<|u|>"]))))
        calls: tuple[ToolCall, ...] = ()
        if draw(st.integers(0, 3)) == 0:
            value: Any = draw(st.sampled_from(["v", 1, 2.5, None, True, ["<|a|>"], {"k": "w"}]))
            calls = (ToolCall(draw(st.sampled_from(["g", "<|eos|>"])), json.dumps({"a": value}), "i"),)
        reasoning = draw(st.one_of(st.none(), TEXTS))
        messages.append(Message(Role.ASSISTANT, draw(TEXTS), reasoning=reasoning, tool_calls=calls))
        if calls:
            messages.append(Message(Role.TOOL, draw(TEXTS), tool_call_id="i"))
    tools = draw(st.sampled_from([(), ({"type": "function", "function": {"name": "<|u|>", "x": [1, "é"]}},)]))
    return Conversation(tuple(messages), tools=tools)


def bind(source: str) -> ModelTemplate:
    return of_text(source, (), TOKENS)


def one_by_one(template: ModelTemplate, conversation: Conversation) -> list[list[int]] | str:
    """The ids of every document without plans, or the code of the refusal."""
    try:
        return ids_alone(conversation, template)
    except RecordError as error:
        return error.code


@SETTINGS
@given(source=templates(), batch=st.lists(conversations(), min_size=2, max_size=5))
def test_traced_text_is_the_text_of_plain_jinja(source: str, batch: list[Conversation]) -> None:
    template = bind(source)
    renderer = template._renderer({})
    for conversation in [*batch, *batch]:  # the second time from what is kept
        view = RecordView(conversation, template.form)
        for count in range(1, len(conversation.messages) + 1):
            for prompt in (False, True):
                try:
                    traced = renderer.render(view, count, prompt)
                    plain: str | None = renderer.plain(view, count, prompt)
                except jinja2.TemplateError:
                    plain = None
                assert (None if isinstance(traced, Refusal) else traced.text) == plain
    assert renderer.is_followed


@SETTINGS
@given(source=templates(), batch=st.lists(conversations(), min_size=2, max_size=5))
def test_bulk_is_one_by_one_and_every_answer_is_proved(source: str, batch: list[Conversation]) -> None:
    try:
        template = bind(source)
        rendered = render([*batch, *batch], template, collect_failures=True)
    except ConfigError:
        assume(False)
    codes = {index: error.code for index, error in rendered.failed}
    place = 0
    for index, conversation in enumerate([*batch, *batch]):
        wanted = one_by_one(bind(source), conversation)
        if isinstance(wanted, str):
            assert codes[index] == wanted
            continue
        assert index not in codes
        for ids in wanted:
            assert rendered.tokens.conversation(place).ids.tolist() == ids
            place += 1
        assert survey(template, [conversation]).failures == []
    assert place == len(rendered.kept)
    assert all(one.is_followed for one in template.store.renderers.values())
