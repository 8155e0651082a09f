"""Random templates from what real ones are made of: traced, in bulk and by plain Jinja they give the same, for every
record, in any order and any chunks."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ConfigError, RecordError
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.render.jinja.at_hand import ids_alone, of_text
from tools.template_survey import survey

TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|u|>", "<|a|>")
SETTINGS = settings(
    max_examples=144, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def bind(source: str) -> ModelTemplate:
    return of_text(source, (), TOKENS)


def differences(template: ModelTemplate, batch: list[Conversation], rng: random.Random) -> list[tuple[str | None, int]]:
    """The renderings of conversations, and of random beginnings of them, that are not plain Jinja's."""
    renderer = template._renderer({})
    found: list[tuple[str | None, int]] = []
    for conversation in batch:
        view = RecordView(conversation, template.form)
        count = len(conversation.messages)
        for upto in sorted({count, *(rng.randint(1, count) for _ in range(3))}):
            for prompt in (False, True):
                try:
                    wanted = renderer.plain_if_any(view, upto, prompt)
                except RecordError:
                    continue
                written = renderer.render(view, upto, prompt)
                if (None if isinstance(written, Refusal) else written.text) != wanted:
                    found.append((conversation.id, upto))
    assert renderer.is_followed, "else it has noticed a difference, and writes every record as a whole"
    return found


Row = tuple[list[int], list[int], list[int]]


def rows_of(template: ModelTemplate, chunks: list[list[Conversation]]) -> dict[str, list[Row] | str]:
    """What every record becomes, by its id: the ids, kinds and messages of its rows, or why it is refused."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        rendered = render(chunk, template, collect_failures=True)
        found |= {str(chunk[index].id): error.code for index, error in rendered.failed}
        for place, index in enumerate(rendered.kept.tolist()):
            row = rendered.tokens.conversation(place)
            columns = (row.ids.tolist(), row.kinds.tolist(), row.messages.tolist())
            found.setdefault(str(chunk[index].id), []).append(columns)
    return found


def rows_noted(source: str, chunks: list[list[Conversation]]) -> dict[str, list[Row] | str]:
    """The same of a fresh template, also when it knows all of them, with nothing that its notes missed."""
    template = bind(source)
    found = rows_of(template, chunks)
    if len(chunks) == 1:
        assert rows_of(template, chunks) == found
    assert all(one.is_followed for one in template.store.renderers.values())
    return found


def alone(conversation: Conversation, template: ModelTemplate) -> list[list[int]] | str:
    """The ids of a record without plans, or the code of its refusal."""
    try:
        return ids_alone(conversation, template)
    except RecordError as error:
        return error.code


def same_one_by_one(rows: dict[str, list[Row] | str], batch: list[Conversation], template: ModelTemplate) -> None:
    for one in batch:
        found = rows[str(one.id)]
        assert alone(one, template) == (found if isinstance(found, str) else [ids for ids, _, _ in found])


# -- conversations --------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from(["", " ", "a", "Hello.", " b \n", "x</think>y", "<think>t</think> u", "<|eos|>", "A", 'é<b>"q"']),
    st.text(alphabet='ab X\n</think>é"{}|', max_size=12),
)


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


BATCHES = st.lists(conversations(), min_size=2, max_size=6).map(
    lambda batch: [one._replace(id=str(number)) for number, one in enumerate(batch)]
)


# -- templates of statements ----------------------------------------------------------------------------------------

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
        *("m.get('name', 'nobody') ~ m.content", "m.content | string", "m.content.rstrip() + ns.last"),
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


# -- templates of loops with scans, state, neighbours and counters --------------------------------------------------

SCANS = st.sampled_from(
    [
        "",
        "{% for s in messages[::-1] %}{% set i = (messages|length - 1) - loop.index0 %}{% if ns.search and "
        "s.role == 'user' %}{% set ns.search = false %}{% set ns.last = i %}{% endif %}{% endfor %}",
        "{% for s in messages %}{% if s.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
        "{% for s in messages if s.role == 'tool' %}{% set ns.n = ns.n + 1 %}{% endfor %}",
    ]
)
ITEMS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};"
)
STEPS = [
    "{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}[{{ ns.n }}]{% endif %}",
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}!{% endif %}",
    "{% if loop.previtem is defined and loop.previtem.role == m.role %}+{% endif %}",
    "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}>{% endif %}",
    "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}~{% endif %}",
    "{% if loop.index0 > ns.last %}R{% endif %}",
    "{% if loop.last %}L{% elif loop.first %}F{% endif %}",
    "{% set ns.t = m.content %}{% set ns.t = ns.t ~ '.' %}{{ ns.t }}",
    "{{ ns.t }}{% set ns.t = m.role %}",
    "{{ ns.t }}{% set ns.t = m.content | trim %}",
    "{% set ns.seen = -1 %}{% for k in range(loop.index0 + 1, messages|length) %}{% if messages[k].role == "
    "'assistant' %}{% set ns.seen = k %}{% endif %}{% endfor %}{% if ns.seen > loop.index0 %}x{% endif %}",
    "{% set here = loop.index0 %}{% for e in messages %}{% if loop.index0 < here and e.role == 'user' %}"
    "{{ e.content | trim }},{% endif %}{% endfor %}",
    "{% for k in range(loop.index0) %}{{ messages[k].role[0] }}{% endfor %}",
    "{% if messages[0].role == 'system' %}S{% endif %}",
    "{% if messages[-1].role == m.role %}E{% endif %}",
    "{{ f(m.content) }}",
    "{% if m.role == 'tool' %}{% continue %}{% endif %}",
    "{% if loop.index0 > 5 %}{% break %}{% endif %}",
    "{% set ns.roles = ns.roles + [m.role] %}{{ ns.roles | length }}",
    "{% if m == messages[-1] %}={% endif %}",
    "{% if loop.previtem is defined and loop.previtem.name is defined %}N{% endif %}",
    "{% if loop.previtem is defined and loop.previtem.tool_calls %}{{ loop.previtem.tool_calls | length }}{% endif %}",
    "{% if messages[loop.index0 + 2:] | length > 0 %}M{% endif %}",
    "{% if messages[1:] | length > 4 %}M{% endif %}{% for e in messages[:2] %}{{ e.role[0] }}{% endfor %}",
    "{% if messages[1:-1] | length > 4 %}M{% endif %}{{ messages[1:][loop.index0].role }}",
    "{{ messages[1:][1:] | length }}{{ messages[1:][1:-1] | length }}{{ messages[:-1][:-1] | length }}",
    "{% if ns.none is undefined %}U{% endif %}{{ ns.u }}{% set ns.u = m.nothing %}",
    "{{ m.content[0] }}{{ m.content[-2] }}",
    "{% for k in ns.roles %}{{ messages[k].role[0] }}{% endfor %}"
    "{% set ns.roles = range(0, loop.index0, 2 if m.content == 'a' else 1) %}",
    "{% for k in range(0, messages | length, 2) %}{{ messages[k].role[0] }}{{ '=' if loop.index0 == k }}{% endfor %}",
    "{% for k in range(messages | length) %}{{ loop.previtem }}{% endfor %}",
    "{{ messages[ns.n].content }}{% if m.role == 'user' %}{% set ns.n = loop.index0 %}{% endif %}",
    "{{ ns.t }}" + ITEMS + "{% set ns.t = v %}{% endfor %}{% endfor %}",
    "{{ messages[-1].content }}",
    "{% if messages[0].content in m.content %}B{% endif %}",
    ITEMS + "{% if v is true %}!{% endif %}{% endfor %}{% endfor %}",
    "{% if m.tool_calls and m.tool_calls | length > 1 and m.tool_calls[1].function.name == 'g' %}G{% endif %}",
]
WALKS = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% for m in messages[1:] %}",
        "{% for m in messages | reverse %}",
        "{% for m in messages if m.role != 'system' %}",
        "{% for k in range(messages | length) %}{% set m = messages[k] %}",
    ]
)
HEAD = (
    "{{ bos_token }}{% set ns = namespace(search=true, last=0, n=0, t='', seen=-1, roles=[]) %}"
    "{% set outer = 'o' %}{% macro f(x) %}{{ outer }}{{ x | trim }}{{ ns.n }}{% endmacro %}"
)
BODY_END = "{{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"


@st.composite
def looping_templates(draw: st.DrawFn) -> str:
    """A chat template with scans, state, neighbours and counters."""
    body = (
        "".join(draw(st.lists(st.sampled_from(STEPS), max_size=3)))
        + "{{ "
        + draw(CONTENTS.filter(lambda one: "ns.last" not in one))
    )
    body += " }}" + "".join(draw(st.lists(st.sampled_from(STEPS), max_size=2)))
    walk = draw(WALKS)
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}"
    loop = walk + "<|{{ m.role[0] }}|>" + body + calls + "<|eos|>{% endfor %}"
    return HEAD + draw(SCANS) + loop + "{% if add_generation_prompt %}<|a|>{% endif %}"


# -- what they all have in common ------------------------------------------------------------------------------------

ANY = templates() | looping_templates()


@SETTINGS
@given(source=ANY, batch=BATCHES, seed=st.integers(0, 9))
def test_traced_text_is_the_text_of_plain_jinja(source: str, batch: list[Conversation], seed: int) -> None:
    try:
        template = bind(source)
    except ConfigError:
        assume(False)
    rng = random.Random(seed)
    order = [*batch, *batch]  # the second time from what is kept
    rng.shuffle(order)
    assert differences(template, order, rng) == []


@SETTINGS
@given(source=ANY, batch=BATCHES, seed=st.integers(0, 9))
def test_rows_are_the_same_one_by_one_and_in_any_order_and_chunks(
    source: str, batch: list[Conversation], seed: int
) -> None:
    try:
        together = rows_noted(source, [batch])
    except ConfigError:
        assume(False)
    shuffled = list(batch)
    random.Random(seed).shuffle(shuffled)
    cut = 1 + seed % (len(batch) - 1)
    assert rows_noted(source, [shuffled[:cut], shuffled[cut:]]) == together
    template = bind(source)
    same_one_by_one(together, batch, template)
    assert survey(template, batch).failures == []


@cache
def chats_for_steps() -> list[Conversation]:
    """Chats that differ in all that the steps read."""
    rng, chats = random.Random(1), list[Conversation]()
    for number in range(16):
        messages = []
        for _ in range(rng.randint(1, 3)):
            name, texts = rng.choice([None, "n"]), [rng.choice(["a", "ab", "b", "hi"]) for _ in range(3)]
            arguments = [json.dumps({"a": rng.choice([True, False, None, 1, "x"])}) for _ in range(rng.randint(0, 2))]
            calls = tuple(ToolCall(rng.choice(["f", "g"]), one, "i") for one in arguments)
            messages += [Message(Role.USER, texts[0], name=name), Message(Role.ASSISTANT, texts[1], tool_calls=calls)]
            messages += [Message(Role.TOOL, texts[2], tool_call_id="i")] * len(calls)
        chats.append(Conversation((*messages, Message(Role.ASSISTANT, "end")), id=str(number)))
    return chats


@pytest.mark.parametrize("step", STEPS)
def test_each_step_alone_has_the_text_of_plain_jinja(step: str) -> None:
    """In one batch, and in beginnings, of which none is run twice."""
    chats, source = chats_for_steps(), HEAD + "{% for m in messages %}<|{{ m.role[0] }}|>" + step + BODY_END
    template = bind(source)
    renderer = template._renderer({})
    assert differences(template, chats[:6], random.Random(2)) == []
    runs = renderer.runs
    assert differences(template, chats[:6], random.Random(2)) == []
    assert renderer.runs == runs
    same_one_by_one(rows_noted(source, [chats]), chats, template)
