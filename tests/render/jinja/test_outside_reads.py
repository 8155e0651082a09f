"""A turn that reads what is around its loop is written with that, and never with what another record has there.

Macros, methods, numbers and names of every kind reach the turns of a loop by other ways than messages do. Records of
two kinds, in mixed orders, are compared with transformers' own rendering.
"""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from chatmill.core.conversation import Conversation
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from chatmill.render.jinja.options import Expand
from chatmill.render.render import render
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja

CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments|tojson if c.function.arguments is not string else c.function.arguments }}"
    "</call>{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HAS_SYSTEM = "{% set has_system = messages[0].role == 'system' %}"


def loop_writing(in_tool: str, before_calls: str = "") -> str:
    """A ChatML loop that writes something before the contents of tool messages, and before the calls of answers."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{% if m.role == 'tool' %}"
        + in_tool
        + "{% endif %}{{ m.content or '' }}{% if m.tool_calls %}"
        + before_calls
        + CALLS
        + "{% endif %}<|im_end|>\n{% endfor %}"
        + PROMPT
    )


def by_system(some: str, other: str) -> str:
    return f"{some} if has_system else {other}"


AIMED = {
    "a variable named like our own": "{% set turn_sep = '!' if has_system else '?' %}||{{ turn_sep }}",
    "a variable that shadows a global": "{% set joiner = '!' if has_system else '?' %}||{{ joiner }}",
    "a macro defined twice": (
        "{% if has_system %}{% macro w(m) %}[T]{% endmacro %}{% else %}{% macro w(m) %}[N]{% endmacro %}{% endif %}"
        "||{{ w(m) }}"
    ),
    "a default of a macro": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m, p=x) %}{{ p }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro under another name": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m) %}{{ x }}{% endmacro %}{% set f = w %}||{{ f(m) }}"
    ),
    "a macro in an object": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m) %}{{ x }}{% endmacro %}"
        "{% set f = {'a': w} %}||{{ f.a(m) }}"
    ),
    "a macro in a namespace": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m) %}{{ x }}{% endmacro %}"
        "{% set ns = namespace(f=w) %}||{{ ns.f(m) }}"
    ),
    "a macro that another one is given": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m) %}{{ x }}{% endmacro %}"
        "{% macro apply(f, m) %}{{ f(m) }}{% endmacro %}||{{ apply(w, m) }}"
    ),
    "a macro in a loop of the template": (
        "{% set ns = namespace(f=none) %}{% for t in ['T', 'N'] %}{% if (t == 'T') == has_system %}"
        "{% macro w(m) %}{{ t }}{% endmacro %}{% set ns.f = w %}{% endif %}{% endfor %}||{{ ns.f(m) }}"
    ),
    "a macro that a macro has made": (
        "{% set ns = namespace(f=none) %}{% macro make(t) %}{% macro inner(m) %}[{{ t }}]{% endmacro %}"
        "{% set ns.f = inner %}{% endmacro %}{{ make('T' if has_system else 'N') }}||{{ ns.f(m) }}"
    ),
    "a macro that calls a macro": (
        "{% set x = 'T' if has_system else 'N' %}{% macro v() %}{{ x }}{% endmacro %}"
        "{% macro w(m) %}{{ v() }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that changes a namespace": (
        "{% set a = namespace(n='a') %}{% set b = namespace(n='b') %}{% set ns = a if has_system else b %}"
        "{% macro w(m) %}{% set ns.n = ns.n + '+' %}{{ a.n }}{{ b.n }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that reads before it assigns": (
        "{% set x = 'T' if has_system else 'N' %}"
        "{% macro w(m) %}{{ x }}{% set x = 'q' %}{{ x }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that is assigned in a branch": (
        "{% set x = 'T' if has_system else 'N' %}"
        "{% macro w(m) %}{% if m.content == 'r1' %}{% set x = 'q' %}{% endif %}{{ x }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that reads after a loop of its own": (
        "{% set x = 'T' if has_system else 'N' %}"
        "{% macro w(m) %}{% for x in 'ab' %}{{ x }}{% endfor %}{{ x }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro with a variable of its own": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m) %}{% set y = x %}{{ y }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that a call gives a body": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w() %}<{{ caller() }}>{% endmacro %}"
        "||{% call w() %}{{ x }}{{ m.role }}{% endcall %}"
    ),
    "a macro that reads a number of messages": (
        "{% set n = messages|length %}{% macro w(m) %}{{ 'T' if n > 5 else 'N' }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that reads an argument of the template": (
        "{% macro w(m) %}{{ 'T' if messages[0].role == 'system' else 'N' }}{% endmacro %}||{{ w(m) }}"
    ),
    "a macro that is shadowed in the loop": (
        "{% set x = 'T' if has_system else 'N' %}{% macro w(m) %}{{ x }}{% endmacro %}"
        "||{% set x = 'q' %}{{ w(m) }}{{ x }}"
    ),
    "a block": "{% set x = 'T' if has_system else 'N' %}||{% block b %}{{ x }}{% endblock %}",
    "a block with the names around it": (
        "{% set x = 'T' if has_system else 'N' %}||{% block b scoped %}{{ x }}{{ m.role }}{% endblock %}"
    ),
    "a block by its name": (
        "{% set x = 'T' if has_system else 'N' %}"
        "{% if false %}{% block b %}{{ x }}{% endblock %}{% endif %}||{{ self.b() }}"
    ),
    "join of a text": "{% set j = ('+' if has_system else '-').join %}||{{ j(['a', 'b', 'c']) }}",
    "format of a text": "{% set j = ('+%s' if has_system else '-%s').format %}||{{ j('a') }}",
    "split of a text": "{% set j = ('a+b' if has_system else 'c+d').split %}||{{ j('+')|join('|') }}",
    "replace of a text": "{% set j = ('a+b' if has_system else 'c+d').replace %}||{{ j('+', '-') }}",
    "get of an object": "{% set j = ({'k': 'T'} if has_system else {'k': 'N'}).get %}||{{ j('k') }}",
    "get of a message": "{% set j = messages[0].get %}||{{ 'T' if j('role') == 'system' else 'N' }}",
    "next of a cycler": "{% set j = cycler('1', '2').next if has_system else cycler('x', 'y').next %}||{{ j() }}",
    "a cycler": "{% set j = cycler('1', '2') if has_system else cycler('x', 'y') %}||{{ j.next() }}",
    "a joiner": "{% set j = joiner('+') if has_system else joiner('-') %}||{{ j() }}{{ j() }}",
    "a zero with a sign": "{% set z = -0.0 if has_system else 0.0 %}||{{ z }}",
    "zeros in a list": "{% set z = [-0.0] if has_system else [0.0] %}||{{ z }}",
    "numbers of two types": "{% set z = 1 if has_system else 1.0 %}||{{ z }}",
    "a number and a truth": "{% set z = 1 if has_system else true %}||{{ z }}",
    "keys of two types": "{% set z = {1: 'x'} if has_system else {true: 'x'} %}||{{ z|list|first }}",
    "keys that are numbers of two types": "{% set z = {1: 'x'} if has_system else {1.0: 'x'} %}||{{ z|list|first }}",
    "an order of keys": "{% set z = {'a': 1, 'b': 2} if has_system else {'b': 2, 'a': 1} %}||{{ z|list|join }}",
    "a list and a tuple": "{% set z = [1] if has_system else (1,) %}||{{ z }}",
    "caller": "{% set caller = 'T' if has_system else 'N' %}||{{ caller }}",
    "varargs": "{% set varargs = 'T' if has_system else 'N' %}||{{ varargs }}",
    "kwargs": "{% set kwargs = 'T' if has_system else 'N' %}||{{ kwargs }}",
    "kwargs of a macro": (
        "{% set kwargs = 'T' if has_system else 'N' %}"
        "{% macro w(m) %}{{ kwargs|length }}{{ varargs|length }}{% endmacro %}"
        "||{{ kwargs }}{{ w(m, 1, a=2) }}"
    ),
    "loop_1": "{% set loop_1 = 'T' if has_system else 'N' %}||{{ loop_1 }}",
    "once_": (
        "{% set once_ = 'T' if has_system else 'N' %}||{{ once_ }}{% if m.content == 'none' %}{% continue %}{% endif %}"
    ),
    "a namespace of names by id": (
        "{% set ns = namespace(names={}) %}||{{ ns.names[m.tool_call_id] }}"
        "||{% for c in m.tool_calls %}{% set ns.names = {c.id: c.function.name} %}{% endfor %}"
    ),
    "a namespace of names by id that grows": (
        "{% set ns = namespace(names={}) %}||{{ ns.names[m.tool_call_id] }}"
        "||{% for c in m.tool_calls %}{% set ns.names = dict(ns.names, **{c.id: c.function.name}) %}{% endfor %}"
    ),
    "a namespace in a list": (
        "{% set ns = namespace(k=none) %}||{% if ns.k %}{{ ns.k[0].x }}{% endif %}"
        "||{% set inner = namespace(x='T' if has_system else 'N') %}{% set ns.k = [inner] %}"
    ),
}
"""By what a turn reads it: what is before the loop, what is written in tool messages, and before calls."""


def template_of(name: str) -> str:
    before, in_tool, *before_calls = AIMED[name].split("||")
    return HAS_SYSTEM + before + loop_writing(in_tool, *before_calls)


def conversation(system: str | None, result: str | None, question: str = "q") -> list[dict[str, Any]]:
    """A chat with or without a system prompt and a tool call: this is what tells the two kinds apart."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": question})
    if result is not None:
        call = {"id": f"c{len(result)}", "type": "function", "function": {"name": "f", "arguments": {}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "f", "tool_call_id": call["id"], "content": result})
    messages.append({"role": "assistant", "content": "fine"})
    return messages


def several(count: int, *arguments: Any) -> list[list[dict[str, Any]]]:
    return [conversation(*arguments) for _ in range(count)]


ORDERS = {
    "system first": [
        *(conversation("abc", "r1"), conversation("abc", "r2"), *several(2, None, None)),
        *(conversation(None, f"r{k}") for k in range(6)),
        *(conversation("abd", f"r{k}") for k in range(3)),
    ],
    "system later": [
        *(conversation(None, "r1"), conversation(None, "r2"), *several(2, "abc", None)),
        *(conversation("abc", f"r{k}") for k in range(6)),
        conversation("zed", "r"),
    ],
    "mixed": [
        conversation(("abc", None, "zed")[k % 3], f"r{k}" if k % 5 in (0, 3) else None, "qa"[k % 2]) for k in range(40)
    ],
}


def written_by_transformers(text: str, messages: list[dict[str, Any]]) -> str | None:
    """What transformers writes, or None where the template fails."""
    try:
        (rendered,), _ = render_jinja_template([messages], chat_template=text)
    except (jinja2.TemplateError, TypeError):
        return None
    return str(rendered)


def records_of(conversations: list[list[dict[str, Any]]]) -> list[Conversation]:
    shape = find_shape("openai")
    return [conversation_of({"messages": m, "id": f"r{k}"}, shape) for k, m in enumerate(conversations)]


def differences(text: str, conversations: list[list[dict[str, Any]]], expand: Expand) -> list[str]:
    """The rows that transformers does not write: for the whole record, or with `turns` for its first messages."""
    template = of_text(text, expand=expand)
    records = records_of(conversations)
    rendered = render(records, template, collect_failures=True)
    wrong: list[str] = []
    for index, error in rendered.failed:
        is_refused_alike = (
            error.code == "template_refused" and written_by_transformers(text, conversations[index]) is None
        )
        if not is_refused_alike and error.code != "prompt_not_in_history":
            wrong.append(f"record {index} is refused: {error}")
    for place, index in enumerate(rendered.kept.tolist()):
        row = template.tokenizer.decode(rendered.tokens.conversation(place).ids)
        messages = conversations[index]
        shortest = len(messages) if expand is Expand.NONE else 1
        wanted = [written_by_transformers(text, messages[:count]) for count in range(shortest, len(messages) + 1)]
        if expand is Expand.NONE:
            is_equal = row == wanted[0]
        else:
            is_equal = any(one is not None and one.startswith(row.removesuffix("\n")) for one in wanted)
        if not is_equal:
            wrong.append(f"record {index}: {row!r} where transformers writes {wanted[-1]!r}")
    return wrong


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", AIMED)
def test_a_turn_is_written_with_what_its_own_record_has_around_the_loop(name: str, order: str) -> None:
    assert differences(template_of(name), ORDERS[order], Expand.NONE) == []
    if order == "mixed":
        assert differences(template_of(name), ORDERS[order], Expand.TURNS) == []


@pytest.mark.parametrize("reading", ["'T' if p is mapping else 'N'", "'T' if p is float else 'N'", "p is sequence"])
def test_a_value_of_tools_that_has_another_type_is_another_value(reading: str) -> None:
    text = "{% set p = tools[0].p %}{{ tools|tojson }}" + loop_writing("{{ " + reading + " }}")
    template, records = of_text(text, expand=Expand.NONE), []
    values: list[Any] = [{"a": 1}, ["a"], 1, 1.0, "a", None, True]
    for k, value in enumerate([*values, *values[::-1]]):
        record = {"messages": conversation(None, "r1"), "tools": [{"name": "f", "p": value}], "id": f"r{k}"}
        records.append(conversation_of(record, find_shape("openai")))
    assert not rendered_like_plain_jinja(template, records).failed


# -- random ones ----------------------------------------------------------------------------------------------------

NAMES = ("turn_sep", "joiner", "dict", "cycler", "range", "loop_1", "once_", "caller", "varargs", "kwargs", "x", "loop")
CONDITIONS = ("messages[0].role == 'system'", "messages[0].content == 'abc'", "messages[0].content|length > 1")
VALUES = ("'T'", "'N'", "1", "1.0", "true", "0.0", "-0.0", "[0.0]", "[-0.0]", "{1: 'v'}", "{true: 'v'}", "none", "(1,)")
HOLDERS = {
    "{% set f = w %}": "f",
    "{% set f = {'k': w} %}": "f.k",
    "{% set f = [w, w] %}": "f[1]",
    "{% set f = namespace(k=w) %}": "f.k",
    "{% macro f(m) %}{{ w(m) }}{% endmacro %}": "f",
    "{% set f = w if true else w %}": "f",
    "": "w",
}
MACROS = (
    "{% macro w(m) %}{{ NAME }}{% endmacro %}",
    "{% macro w(m, p=NAME) %}{{ p }}{{ p is string }}{% endmacro %}",
    "{% macro w(m) %}{% set own = NAME %}{{ own }}{% endmacro %}",
    "{% macro w(m) %}{{ NAME }}{% set NAME = 'own' %}{{ NAME }}{% endmacro %}",
    "{% macro w(m) %}{% if m.role == 'tool' %}{% set NAME = 'own' %}{% endif %}{{ NAME }}{% endmacro %}",
    "{% macro w(m) %}{% for NAME in 'ab' %}{{ NAME }}{% endfor %}{{ NAME }}{% endmacro %}",
    "{% macro v(m) %}{{ NAME }}{% endmacro %}{% macro w(m) %}{{ v(m) }}{% endmacro %}",
    "{% macro w(m) %}{{ m.role }}{% for n in [1] %}{{ NAME }}{% endfor %}{% endmacro %}",
    "{% if CONDITION %}{% macro w(m) %}[A]{% endmacro %}{% else %}{% macro w(m) %}[B]{% endmacro %}{% endif %}",
)
METHODS = (
    "{% set NAME = ('+' if CONDITION else '-').join %}||{{ NAME(['a', 'b']) }}",
    "{% set NAME = ('a+b' if CONDITION else 'c+d').split %}||{{ NAME('+')|join('|') }}",
    "{% set NAME = ('a+%s' if CONDITION else 'c+%s').format %}||{{ NAME('+') }}",
    "{% set NAME = messages[0].get %}||{{ NAME('role') }}",
    "{% set NAME = cycler('1', '2') if CONDITION else cycler('x', 'y') %}||{{ NAME.next() }}",
)


@st.composite
def carriers(draw: st.DrawFn) -> str:
    """How a value that depends on the record reaches a turn: what is before the loop, and how the turn reads it."""
    name, condition = draw(st.sampled_from(NAMES)), draw(st.sampled_from(CONDITIONS))
    way = draw(st.integers(0, 5))
    if way == 0:
        carried = draw(st.sampled_from(METHODS))
    else:
        some, other = draw(st.sampled_from(VALUES)), draw(st.sampled_from(VALUES))
        carried = f"{{% set NAME = {some} if CONDITION else {other} %}}"
        if way == 1:
            carried += "||{{ NAME }}"
        else:
            holder = draw(st.sampled_from(sorted(HOLDERS)))
            carried += draw(st.sampled_from(MACROS)) + holder + "||{{ " + HOLDERS[holder] + "(m) }}"
    return carried.replace("NAME", name).replace("CONDITION", condition)


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A ChatML loop that reads a value at one of three places."""
    before, reading = draw(carriers()).split("||")
    place = draw(st.integers(0, 2))
    if place == 0:
        return before + loop_writing(reading)
    if place == 1:
        return before + loop_writing("", reading)
    inside = "{% for n in messages %}{% if n.role == 'tool' %}" + reading + "{% endif %}{% endfor %}"
    return before + loop_writing(inside)


KINDS = st.tuples(
    st.sampled_from([None, "abc", "zed"]), st.sampled_from([None, "r1", "r2"]), st.sampled_from(["q", "a"])
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=templates(),
    kinds=st.lists(KINDS, min_size=6, max_size=14),
    expand=st.sampled_from([Expand.NONE, Expand.TURNS]),
)
def test_no_way_to_a_turn_takes_another_records_value(text: str, kinds: list[tuple[Any, ...]], expand: Expand) -> None:
    assert differences(text, [conversation(*kind) for kind in kinds], expand) == []
