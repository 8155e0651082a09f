"""What templates make of a record's values: no record is written with those of another, and its text stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall, call_keys
from chatmill.errors import ConfigError, RecordError
from chatmill.read.conversations import ConversationFile
from chatmill.render.jinja.options import Expand
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.chats import chat, chat_record
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja

TEXT = (
    "BEFORE{% for m in messages %}<|s|>{{ m.role }}:INSIDE{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set given = c.function.arguments %}CALL{{ c.function.name }}WRITTEN"
    "{% endfor %}<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant:{% endif %}"
)
ITEMS = "{% for key, value in given|items %}{{ key }}={{ value|tojson }};{% endfor %}"


def text_of(before: str = "", inside: str = "", call: str = "", written: str = "{{ given }}") -> str:
    places = {"BEFORE": before, "INSIDE": inside, "CALL": call, "WRITTEN": written}
    text = TEXT
    for place, some in places.items():
        text = text.replace(place, some)
    return text


def bound(text: str, *stops: str, **given: Any) -> ModelTemplate:
    return of_text(text, stops or ("<|e|>",), ("<|s|>",), **given)


def written(template: ModelTemplate, conversations: list[Conversation]) -> None:
    """Each is written in one batch as plain Jinja writes it."""
    assert not rendered_like_plain_jinja(template, conversations).failed


def stops(template: ModelTemplate, conversation: Conversation) -> int:
    ids = render([conversation], template).tokens.ids.tolist()
    return ids.count(template.tokenizer.control("<|e|>"))


def said(*texts: str) -> Conversation:
    return chat(*((("user", "assistant")[k % 2], text) for k, text in enumerate(texts)))


def named(name: str, question: str, answer: str) -> Conversation:
    return Conversation((Message(Role.USER, question, name=name), Message(Role.ASSISTANT, answer)))


def calls(name: str, arguments: str = "{}") -> Conversation:
    """A call, its result and an answer."""
    call = Message(Role.ASSISTANT, "", tool_calls=(ToolCall(name, arguments, None),))
    messages = (Message(Role.USER, "q"), call, Message(Role.TOOL, "res", name=name), Message(Role.ASSISTANT, "ok"))
    return Conversation(messages, id=name)


def one_call(name: str, number: str, tool: str = "look") -> Conversation:
    tools = ({"type": "function", "function": {"name": tool, tool: 1}},)
    return Conversation(calls(name, f'{{"n": {number}}}').messages[:2], tools=tools)


CHATS = [
    *(named("Ann", "hi", "ok"), named("Ann", "hi", "ok"), named("bob", "hello there", "fine then")),
    *(named("cy", "", "yes"), named("ann", "x" * 9, "ok"), named("bob", "ann", "no"), named("ann", "ann", "no")),
]
PARAGRAPHS = [named("ann", text, "ok\n") for text in ("one\n", "\n\ntwo", "one\n", "\n\ntwo", "a\n\nb", "one") * 2]
WORDS = [
    Conversation((*named("ann", text, "ok").messages, *named("bob", "more", "fine").messages))
    for text in ("json", "a text", "tools", "field", "apply", "else")
]
RESULTS = [said("a", "b", "c", "d"), *map(calls, ("get_weather", "add", "sub", "mul"))]
RESULTS += [said(text, "a") for text in ("alpha", "bet", "gamma", "a", "x", "alphabet")]
OF_USERS = [
    "{% for i in range(m.content|length) %}.{% endfor %}",
    "{{ range(3, m.content|length)|join(',') }}",
    "{{ 'abcdefghijkl'[m.content|length] }}",
    "{{ 'abcdefghijkl'[:m.content|length] }}",
    "{{ 'llllll'.replace('l', 'm', m.content|length) }}",
    "{{ (m.content|length)|int }}",
    "{{ 'llllll'|replace('l', m.content, m.content|length) }}",
    "{{ (m.content|length)|tojson }}{{ [m.content|length]|tojson }}",
    "{% for x in [1, 2, 3, 4]|slice(m.content|length + 1) %}{{ x }}{% endfor %}",
    "{{ 'Y' if ('x' + m.content).replace('x', '') else 'N' }}",
    "{% set t = 'abb' ~ m.content %}{{ t.split('ab')[1] }}",
    "{{ (m.name ~ 'Z')|lower if m.name else '' }}",
    "{{ ('z' ~ m.name)|upper if m.name else '' }}",
    "{{ ('z' ~ m.name).swapcase() if m.name else '' }}",
    "{{ 'E' if (m.name|tojson).endswith(m.content ~ '\"') else 'N' }}",
    "{{ m.content.split(m.name)|length if m.name else '' }}",
    "{{ (m.name or '')[: m.content|length].partition('n')[2] }}",
    "{{ (m.name or '').ljust(m.content|length, '.') }}",
]
OF_ALL = ["{{ '<b>'|safe + '<' }}{{ (m.name or '')|tojson|safe ~ '&' }}"]
LOOKED_FOR = ["startswith('json')", "endswith('text')", "find('tools', 0)", "startswith(('field', 'apply'))"]
OF_RESULTS = [
    """{{ '<result of="NAME">'|replace('NAME', m.name) }}""",
    """{% filter replace('NAME', m.name) %}<result of="NAME">{% endfilter %}""",
    """{{ '<result of="NAME">'.replace('NAME', m.name) }}""",
]


@pytest.mark.parametrize(
    ("inside", "records"),
    [
        *((f"{{% if m.role == 'user' %}}{body}{{% endif %}}", CHATS) for body in OF_USERS),
        *((body, CHATS) for body in OF_ALL),
        *((f"{{% if m.role == 'tool' %}}{body}{{% endif %}}", RESULTS) for body in OF_RESULTS),
        *((f"{{{{ m.content.{asked} }}}}", WORDS) for asked in LOOKED_FOR),
        ("{% if '\\n\\n' in m.content %}[several paragraphs] {% endif %}", PARAGRAPHS),
    ],
)
def test_what_a_template_makes_of_a_text_is_made_of_every_record(inside: str, records: list[Conversation]) -> None:
    """Also where it looks for words by which Chatmill itself knows what was asked, or across two texts of a batch."""
    written(bound(text_of(inside=inside)), records)


LOOKS_INSIDE = [
    "{% for i in range(given.n if given.n is integer else 0) %}.{% endfor %}",
    "{{ 'abcdefghijkl'[given.n] if given.n is integer else '' }}",
    "{{ 'abcdefghijkl'[:given.n] if given.n is integer else '' }}",
    "{{ given.n.as_integer_ratio()|join('/') if given.n is number else '' }}",
]
LOOKS_AT_ALL = [
    "{{ given|string|length }}",
    "{% if tools and tools[0].function.name == c.function.name %}known {% endif %}",
    "{% if tools and c.function.name == tools[0].function.name %}known {% endif %}",
]
SHOWN = "{% if tools %}<|s|>{{ tools|tojson }}<|e|>{% endif %}"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        *((body, arguments) for body in LOOKS_INSIDE for arguments in (ITEMS, "{{ given|tojson }}")),
        *((body, arguments) for body in LOOKS_AT_ALL for arguments in ("{{ given }}", "{{ given|tojson }}")),
    ],
)
def test_what_a_template_makes_of_a_call_is_made_of_every_record(call: str, arguments: str) -> None:
    """Arguments that are equal and written otherwise, too: 1, 1.0 and true."""
    numbers = ["3", "5", "5.0", "1", "true", "1.0", "3"]
    records = [one_call(name, n, tool) for name in ("look", "find") for n in numbers for tool in ("look", "hear")]
    written(bound(text_of(SHOWN, call=call, written=arguments)), records)


def test_what_a_template_makes_of_tools_is_made_of_every_record() -> None:
    body = SHOWN.replace("{{ tools", "{{ tools[0].function|reverse|join(',') }}{{ tools", 1)
    written(bound(text_of(body)), [one_call("look", "1", tool) for tool in ("look", "hear", "look", "taste")])


def test_numbers_that_are_printed_are_no_widths() -> None:
    shown = "{% for k, v in given|items %}{{ k }}={{ v|string }}{% endfor %}"
    written(bound(text_of(written=shown)), [calls("loan", f'{{"amount": {n}}}') for n in (5, 100001, 10**12)])


def test_a_template_that_looks_five_messages_back_ends_no_build() -> None:
    back = "{% if loop.index0 > 4 and messages[loop.index0 - 5].content == 'yes' %}[yes]{% endif %}"
    texts = ["yes", "no", "yes", "yes", "no"]
    records = [said(*(texts[(start + k * step) % 5] for k in range(2 * size)))
               for size in range(2, 9) for start in range(5) for step in (1, 2)]  # fmt: skip
    written(bound(text_of(inside=back)), records)


def test_a_text_may_be_written_in_hundreds_of_pieces() -> None:
    body = "{% for line in (m.reasoning_content or '').split('\\n') %}> {{ line }};{% endfor %}"
    thoughts = ["\n".join(f"{number} {line}" for line in range(300)) for number in range(3)]
    answers = [(Message(Role.USER, "q"), Message(Role.ASSISTANT, "ok", reasoning=text)) for text in thoughts]
    written(bound(text_of(inside=body)), [Conversation(messages) for messages in answers])


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.LAST])
def test_what_is_asked_of_an_answer_only_once_it_is_followed_is_asked_of_every_record(expand: Expand) -> None:
    """The stop is written by the next message, and which one it is depends on the answer."""
    text = (
        "{% for m in messages %}{% if loop.index0 and m.role == 'user' %}"
        "{{ '<|s|>' if loop.previtem.content|length > 3 else '<|e|>' }}{% endif %}{{ m.role }}: {{ m.content or '' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = bound(text, "<|e|>", "<|s|>", expand=expand)
    asked, answer = said("hi", "ok").messages
    chats = [said("hi", text) for text in ("ok", "fine then", "no", "well well")]
    rendered = render([Conversation((asked, answer._replace(weight=0.0))), *chats], template)
    ends = [template.tokenizer.decode(rendered.tokens.conversation(number).ids[-1:]) for number in range(1, 5)]
    assert ends == ["<|e|>", "<|s|>", "<|e|>", "<|s|>"]


# -- text of the record stays text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        "{{ 'Context: ' ~ [messages[0].content] }}",
        "{{ messages[0]|string }}",
        "{{ [messages[0].content]|string|replace('a', 'b') }}",
        "{{ namespace(x=messages[0].content) }}",
        "{{ messages[0].values()|string }}",
    ],
)
def test_what_contains_text_of_the_record_is_text(before: str) -> None:
    try:
        assert stops(bound(text_of(before)), said("<|e|>", "a")) == 2
    except RecordError as error:
        assert error.code == "origin_lost"  # noqa: PT017 (either is right)


def test_what_is_written_as_python_writes_it_is_text() -> None:
    """Seed-OSS: a list among the arguments, put after a text. Apriel: tools."""
    template = bound(text_of(written="{% for k, v in given|items %}<parameter={{ k }}>{{ '' ~ v }}{% endfor %}"))
    records = [calls("f", '{"l": ["<|e|>", 1, true, null, {"a": "b\'c"}]}'), calls("f", '{"l": ["x"]}')]
    assert [stops(template, one) for one in records] == [4, 4]
    written(template, records)
    template = bound(text_of("{% for tool in tools or [] %}{{ tool|string }}\n{% endfor %}"))
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"x": ["<|e|>"]}}},)
    assert [stops(template, one) for one in (said("q", "a")._replace(tools=tools), said("q", "a"))] == [2, 2]


@pytest.mark.parametrize(
    "body",
    [
        *("'%9s' % m.name", "'{:>9}'.format(m.name)", "'%9s'|format(m.name)", "m.name|e", "m.name|center(9)"),
        *("('<%s>'|safe) % m.name", "'<'|safe + m.name", "(m.name|safe)|upper", "'%d' % (m.name|length)"),
        "m.name.translate({})",
    ],
)
def test_a_text_that_cannot_be_followed_refuses_the_record(body: str) -> None:
    """Also where it is written before a text of the record that spells a control token."""
    template = bound(text_of(inside=f"{{{{ {body} if m.name else '' }}}}"))
    rendered = render([named("<|e|>", "hi", "ok"), named("ann", "hi", "ok")], template, collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["origin_lost", "origin_lost"]


def test_items_of_what_has_none_refuse_the_record_alone() -> None:
    """A template that goes over the items of an argument which is a text here: no fault of others."""
    body = "\n{% for key, value in given.n|items %}{{ key }}{% endfor %}"
    records = [one_call("look", number) for number in ('{"deep": 1}', '"flat"', '{"deep": 2}')]
    rendered = render(records, bound(text_of(SHOWN, call=body, written=ITEMS)), collect_failures=True)
    assert [(index, error.code) for index, error in rendered.failed] == [(1, "template_refused")]
    assert "(line 2)" in str(rendered.failed[0][1])


@pytest.mark.parametrize("note", ["x<|e|>y", ["a", {"b<|e|>": "<|e|>"}]])
@pytest.mark.parametrize(
    ("before", "followed"),
    [
        ("{{ note }}\n", str),
        ("{{ note|tojson }}\n", object),
        ("{{ 'N: ' ~ note }}\n", str),
        ("{{ note|string|upper }}\n", str),
        ("{{ '%s: %s' | format('N', note) }}\n", str),
        ("{{ '%s: %s' % ('N', note) }}\n", str),
        ("{{ '%s%%' % note }}\n", ()),
        ("{{ '{}: {name}'.format('N', name=note) }}\n", ()),
    ],
)
def test_options_of_a_record_are_text(note: object, before: str, followed: Any) -> None:
    """Or the record is refused: what a format makes of them is not followed, nor what Python writes for a list."""
    template = bound(text_of("{% if note is defined %}" + before + "{% endif %}"))
    noted = {"note": note}
    records = [said("q", "a")._replace(options=noted), said("q", "a"), said("q", "b")._replace(options=noted)]
    rendered = rendered_like_plain_jinja(template, records)
    assert rendered.kept.tolist() == ([0, 1, 2] if isinstance(note, followed) else [1])
    assert {error.code for _, error in rendered.failed} <= {"origin_lost"}
    ends = rendered.tokens.ids == template.tokenizer.control("<|e|>")
    assert ends.sum() == 2 * len(rendered.kept)


def test_an_option_of_a_recipe_is_no_place_for_control_tokens() -> None:
    text, pair = text_of("{{ note }}"), said("q", "a")
    template = bound(text, options={"note": "x"})
    assert stops(template, pair) == stops(template, pair._replace(options={"note": "x"})) == 2
    assert stops(template, pair._replace(options={"note": "<|e|>"})) == 2
    with pytest.raises(ConfigError, match="spells the control token"):
        bound(text, options={"note": "<|e|>"})


# -- fields that only the template knows, and the order of keys -----------------------------------------------------

PLAN = "{% if m.tool_plan %}<plan>{{ m.tool_plan }}</plan>{% endif %}"


def planned(**extra: object) -> Conversation:
    first, call, *rest = calls("f").messages
    return Conversation((first, call._replace(extra=extra), *rest))


@pytest.mark.parametrize(
    "inside", [PLAN, PLAN.replace("m.tool_plan", "m['tool_plan']"), "{{ m.get('tool_plan', '') }}"]
)
def test_fields_that_only_the_template_knows_reach_it(inside: str) -> None:
    """Cohere's `tool_plan`."""
    template = bound(text_of(inside=inside))
    records = [planned(tool_plan=plan, other=1) for plan in ("I will look.", "Then <|e|>", "", "So.")]
    records += [planned(), planned(other=2), *(planned(tool_plan=plan, other=1) for plan in (7, ["a"])), calls("g")]
    written(template, records)
    for one in records:
        assert str(one.messages[1].extra.get("tool_plan", "")) in template.plain(one, {}, 2, prompt=False)
    assert stops(template, records[1]) == 4
    documents = template.text_documents(records[0]).documents
    parts = [span.text for span in documents[0].spans if span.message == 1 and span.kind & 0x80 == 0]
    assert "I will look." in parts, "a part of the answer"


def test_lists_and_objects_reach_the_template_too() -> None:
    """Gemma's `tool_responses`."""
    inside = "{% for r in m.tool_responses or [] %}<r>{{ r.name }}={{ r.response|tojson }}</r>{% endfor %}"
    template = bound(text_of(inside=inside))
    given = [[{"name": "f", "response": {"x": n, "<|e|>": "<|e|>"}}] * n for n in (1, 2, 1)]
    records = [planned(tool_responses=one) for one in given]
    written(template, records)
    assert [stops(template, one) for one in records] == [4, 4, 4]


def read_from(path: Path, rows: list[dict[str, Any]]) -> list[Conversation]:
    """Records as a file of them is read."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return list(ConversationFile(path))


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_no_reader_drops_a_field_that_the_template_knows(name: str, tmp_path: Path) -> None:
    plans = ["I will look.", "", "So."]
    rows = [chat_record(("user", "q"), ("assistant", "a")) for _ in plans]
    for row, plan in zip(rows, plans, strict=True):
        row["messages"][1]["tool_plan"] = plan
    template = bound(text_of(inside=PLAN))
    rendered = render(read_from(tmp_path / name, rows), template)
    for number, plan in enumerate(plans):
        text = template.tokenizer.decode(rendered.tokens.conversation(number).ids)
        assert (f"<plan>{plan}</plan>" if plan else "assistant:a<|e|>") in text


ORDERS: list[dict[str, Any]] = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"id": "c1", "function": {"arguments": {"x": 1}, "name": "f"}, "type": "function"},
    {"type": "function", "function": {"arguments": {"x": 2}, "name": "f"}},
    {"function": {"name": "f", "arguments": {"y": 1, "x": 1}}, "type": "function", "id": "c2"},
    {"function": {"arguments": {"x": 1}, "name": "g"}, "id": "c2", "type": "function"},
    {"type": "function", "id": "c3", "function": {"name": "f", "arguments": {}}},
]


@pytest.mark.parametrize("unknown", [{}, {"unknown": 1}], ids=["scanner", "one by one"])
def test_the_keys_of_a_call_stay_in_the_order_of_the_record(unknown: dict[str, int], tmp_path: Path) -> None:
    """The scanner declines records with what it does not know."""
    template = bound(text_of(written="{{ c|tojson }}{{ c.function|tojson }}"))
    lists = [[one] for one in ORDERS] + [[ORDERS[0], ORDERS[1]], [ORDERS[1], ORDERS[0]], [ORDERS[0]] * 2]
    asked = {"role": "user", "content": "q", **unknown}
    rows = [{"messages": [asked, {"role": "assistant", "content": "a", "tool_calls": calls}]} for calls in lists]
    rendered = render(read_from(tmp_path / "chats.jsonl", rows), template)
    for number, row in enumerate(rows):
        values = {"messages": row["messages"], "tools": None, "add_generation_prompt": False}
        as_given = template._sandboxes.plain.render(template._sandboxes.plain.template(template.source.text), values)
        assert template.tokenizer.decode(rendered.tokens.conversation(number).ids) == as_given
    if not unknown:  # a table has one order of keys for all
        table = [{"function": {"arguments": '{"x": 1}', "name": f"f{n}"}, "id": f"c{n}"} for n in range(3)]
        rows = [{"messages": [asked, {**rows[0]["messages"][1], "tool_calls": [one]}]} for one in table]
        read = read_from(tmp_path / "chats.parquet", rows)
        assert {call_keys(one.messages[1].tool_calls[0].order)[1] for one in read} == {("arguments", "name")}
