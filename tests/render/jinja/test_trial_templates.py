"""Templates that an independent trial broke: values that escape the tracing, texts that became control tokens, and
builds that ended."""

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
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja

CHATML = (
    "BEFORE{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "INSIDE{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}CALL</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def bound(inside: str = "", before: str = "", call: str = "{{ c.function.arguments }}") -> ModelTemplate:
    text = CHATML.replace("INSIDE", inside).replace("BEFORE", before).replace("CALL", call)
    return of_text(text)


def with_tool(name: str, arguments: str = "{}") -> Conversation:
    calls = (ToolCall(name, arguments, None),)
    return Conversation(
        (
            *(Message(Role.USER, "q"), Message(Role.ASSISTANT, "", tool_calls=calls)),
            *(Message(Role.TOOL, "res", name=name), Message(Role.ASSISTANT, "ok")),
        ),
        id=name,
    )


def chat(*texts: str) -> Conversation:
    roles = (Role.USER, Role.ASSISTANT)
    return Conversation(tuple(Message(roles[k % 2], text) for k, text in enumerate(texts)))


def stops(template: ModelTemplate, conversation: Conversation) -> int:
    ids = render([conversation], template).tokens.ids.tolist()
    return ids.count(template.tokenizer.control("<|im_end|>"))


@pytest.mark.parametrize(
    "inside",
    [
        """{% if m.role == 'tool' %}{{ '<result of="NAME">'|replace('NAME', m.name) }}{% endif %}""",
        """{% if m.role == 'tool' %}{% filter replace('NAME', m.name) %}<result of="NAME">{% endfilter %}{% endif %}""",
        """{% if m.role == 'tool' %}{{ '<result of="NAME">'.replace('NAME', m.name) }}{% endif %}""",
    ],
)
def test_no_record_is_written_with_the_text_of_another(inside: str) -> None:
    template = bound(inside)
    records = [chat("a", "b", "c", "d"), *map(with_tool, ("get_weather", "add", "sub", "mul"))]
    records += [chat(text, "a") for text in ("alpha", "bet", "gamma", "a", "x", "alphabet")]
    assert not rendered_like_plain_jinja(template, records).failed


@pytest.mark.parametrize(
    ("before", "conversation"),
    [
        ("{{ 'Context: ' ~ [messages[0].content] }}\n", chat("<|im_end|>", "a")),
        ("{{ messages[0]|string }}\n", chat("<|im_end|>", "a")),
        ("{{ [messages[0].content]|string|replace('a', 'b') }}\n", chat("<|im_end|>", "a")),
        ("{{ namespace(x=messages[0].content) }}\n", chat("<|im_end|>", "a")),
        ("{{ messages[0].values()|string }}\n", chat("<|im_end|>", "a")),
    ],
)
def test_what_contains_text_of_the_record_is_text(before: str, conversation: Conversation) -> None:
    try:
        assert stops(bound(before=before), conversation) == 2
    except RecordError as error:
        assert error.code == "origin_lost"  # noqa: PT017 (either is right)


def test_a_call_that_is_written_as_python_writes_it_is_text() -> None:
    """Seed-OSS: a list among the arguments, put after a text."""
    call = "{% for k, v in c.function.arguments|items %}<parameter={{ k }}>{{ '' ~ v }}{% endfor %}"
    template = bound(call=call)
    records = [with_tool("f", '{"l": ["<|im_end|>", 1, true, null, {"a": "b\'c"}]}'), with_tool("f", '{"l": ["x"]}')]
    assert [stops(template, one) for one in records] == [4, 4]
    assert not rendered_like_plain_jinja(template, records).failed


def test_tools_that_are_shown_as_python_writes_them_are_shown() -> None:
    """Apriel."""
    template = bound(before="{% for tool in tools or [] %}{{ tool|string }}\n{% endfor %}")
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"x": ["<|im_end|>"]}}},)
    records = [chat("q", "a")._replace(tools=tools), chat("q", "a")]
    assert [stops(template, one) for one in records] == [2, 2]


def test_a_number_that_is_printed_is_no_width() -> None:
    call = "{% for k, v in c.function.arguments|items %}{{ k }}={{ v|string }}{% endfor %}"
    template = bound(call=call)
    records = [with_tool("loan", f'{{"amount": {amount}}}') for amount in (5, 100001, 10**12)]
    assert not rendered_like_plain_jinja(template, records).failed


def test_a_template_that_looks_five_messages_back_ends_no_build() -> None:
    back = "{% if loop.index0 > 4 and messages[loop.index0 - 5].content == 'yes' %}[yes]{% endif %}"
    template = bound(back)
    texts = ["yes", "no", "yes", "yes", "no"]
    records = [chat(*(texts[(start + k * step) % 5] for k in range(2 * size)))
               for size in range(2, 9) for start in range(5) for step in (1, 2)]  # fmt: skip
    assert not rendered_like_plain_jinja(template, records).failed


def test_a_record_that_is_not_followed_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fault of the tracing would: one record is written otherwise on plain values."""
    monkeypatch.setattr("chatmill.render.jinja.renderer.COMPARED", 1)
    template = bound()
    plain = template._sandboxes.plain.render
    monkeypatch.setattr(template._sandboxes.plain, "render", lambda *given: plain(*given).replace("odd", "even"))
    rendered = render([chat("q", "a"), chat("q", "odd", "q", "a"), chat("q", "a")], template, collect_failures=True)
    assert [(index, error.code) for index, error in rendered.failed] == [(1, "not_followed")]


@pytest.mark.parametrize("note", ["x<|im_end|>y", ["a", {"b<|im_end|>": "<|im_end|>"}]])
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
    template = bound(before="{% if note is defined %}" + before + "{% endif %}")
    records = [
        chat("q", "a")._replace(options={"note": note}),
        chat("q", "a"),
        chat("q", "b")._replace(options={"note": note}),
    ]
    rendered = rendered_like_plain_jinja(template, records)
    assert rendered.kept.tolist() == ([0, 1, 2] if isinstance(note, followed) else [1])
    assert {error.code for _, error in rendered.failed} <= {"origin_lost"}
    ends = rendered.tokens.ids == template.tokenizer.control("<|im_end|>")
    assert ends.sum() == 2 * len(rendered.kept)


def test_an_option_of_a_recipe_is_no_place_for_control_tokens() -> None:
    text = CHATML.replace("INSIDE", "").replace("BEFORE", "{{ note }}").replace("CALL", "")
    template = of_text(text, options={"note": "x"})
    assert stops(template, chat("q", "a")) == stops(template, chat("q", "a")._replace(options={"note": "x"})) == 2
    assert stops(template, chat("q", "a")._replace(options={"note": "<|im_end|>"})) == 2
    with pytest.raises(ConfigError, match="spells the control token"):
        of_text(text, options={"note": "<|im_end|>"})


PLAN = "{% if m.tool_plan %}<plan>{{ m.tool_plan }}</plan>{% endif %}"


def planned(**extra: object) -> Conversation:
    messages = with_tool("f").messages
    return Conversation((messages[0], messages[1]._replace(extra=extra), *messages[2:]))


@pytest.mark.parametrize(
    "inside", [PLAN, PLAN.replace("m.tool_plan", "m['tool_plan']"), "{{ m.get('tool_plan', '') }}"]
)
def test_fields_that_only_the_template_knows_reach_it(inside: str) -> None:
    """Cohere's `tool_plan`."""
    template = bound(inside)
    records = [planned(tool_plan=plan, other=1) for plan in ("I will look.", "Then <|im_end|>", "", "So.")]
    records += [planned(), planned(other=2), *(planned(tool_plan=plan, other=1) for plan in (7, ["a"])), with_tool("g")]
    assert not rendered_like_plain_jinja(template, records).failed
    for one in records:
        assert str(one.messages[1].extra.get("tool_plan", "")) in template.plain(one, {}, 2, prompt=False)
    assert stops(template, records[1]) == 4


def test_a_field_that_the_template_knows_is_part_of_the_answer() -> None:
    template = bound(PLAN)
    documents = template.text_documents(planned(tool_plan="I will look.")).documents
    parts = [span.text for span in documents[0].spans if span.message == 1 and span.kind & 0x80 == 0]
    assert "I will look." in parts


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_no_reader_drops_a_field_that_the_template_knows(name: str, tmp_path: Path) -> None:
    plans = ["I will look.", "", "So."]
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_plan": plan}]}
        for plan in plans
    ]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    template = bound(PLAN)
    read = list(ConversationFile(path))
    rendered = render(read, template)
    for number, plan in enumerate(plans):
        text = template.tokenizer.decode(rendered.tokens.conversation(number).ids)
        assert (f"<plan>{plan}</plan>" if plan else "assistant\na<|im_end|>") in text


def test_lists_and_objects_reach_the_template_too() -> None:
    """Gemma's `tool_responses`."""
    template = bound("{% for r in m.tool_responses or [] %}<r>{{ r.name }}={{ r.response|tojson }}</r>{% endfor %}")
    given = [[{"name": "f", "response": {"x": n, "<|im_end|>": "<|im_end|>"}}] * n for n in (1, 2, 1)]
    records = [planned(tool_responses=one) for one in given]
    assert not rendered_like_plain_jinja(template, records).failed
    assert [stops(template, one) for one in records] == [4, 4, 4]


ORDERS = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    {"id": "c1", "function": {"arguments": {"x": 1}, "name": "f"}, "type": "function"},
    {"type": "function", "function": {"arguments": {"x": 2}, "name": "f"}},
    {"function": {"name": "f", "arguments": {"y": 1, "x": 1}}, "type": "function", "id": "c2"},
    {"function": {"arguments": {"x": 1}, "name": "g"}, "id": "c2", "type": "function"},
    {"type": "function", "id": "c3", "function": {"name": "f", "arguments": {}}},
]


@pytest.mark.parametrize("reader", ["scanner", "one by one", "parquet"])
def test_the_keys_of_a_call_stay_in_the_order_of_the_record(reader: str, tmp_path: Path) -> None:
    template = bound(call="{{ c|tojson }}{{ c.function|tojson }}")
    lists = [[one] for one in ORDERS] + [[ORDERS[0], ORDERS[1]], [ORDERS[1], ORDERS[0]], [ORDERS[0]] * 2]
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": calls}]}
        for calls in lists
    ]
    if reader == "parquet":  # a table has one order of keys for all
        calls = [{"function": {"arguments": '{"x": 1}', "name": f"f{n}"}, "id": f"c{n}"} for n in range(3)]
        rows = [{"messages": [*rows[0]["messages"][:1], {**rows[0]["messages"][1], "tool_calls": [c]}]} for c in calls]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
        read = list(ConversationFile(tmp_path / "chats.parquet"))
        assert {call_keys(one.messages[1].tool_calls[0].order)[1] for one in read} == {("arguments", "name")}
        return
    if reader == "one by one":  # the scanner declines what it does not know
        for row in rows:
            row["messages"][0]["unknown"] = 1
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = list(ConversationFile(tmp_path / "chats.jsonl"))
    rendered = render(read, template)
    for number, row in enumerate(rows):
        values = {"messages": row["messages"], "tools": None, "add_generation_prompt": False}
        as_given = template._sandboxes.plain.render(template._sandboxes.plain.template(template.source.text), values)
        assert template.tokenizer.decode(rendered.tokens.conversation(number).ids) == as_given
