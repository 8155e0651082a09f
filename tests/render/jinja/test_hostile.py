"""Hostile templates, each of which ends in one clear error, soon and in little memory; and hostile conversations: text
that spells special tokens stays text, in every field of a record, in bulk and one by one."""

# ruff: noqa: E501 (a template is one line)

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ChatmillError, ConfigError, RecordError
from chatmill.render.document_items import Ids
from chatmill.render.documents import TextDocument
from chatmill.render.jinja import sandbox
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.chats import chat
from tests.render.jinja.at_hand import bound, items_alone, of_text

CONVERSATION = chat(("user", "Hello, you."), ("assistant", "Hello."))
DOUBLING = (
    "{% set ns = namespace(t='xxxxxxxxxx') %}{% for i in range(40) %}{% set ns.t = DOUBLE %}{% endfor %}{{ ns.t }}"
)
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over record text": "{% for a in messages[0].content * 9000 %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "two macros that call each other": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for m in [messages] recursive %}{{ loop([m]) }}{% endfor %}",
    "a huge range": "{{ range(999999999999) | list }}",
    "a cycler in a loop": "{% set c = cycler(1, 2) %}{% for a in range(99999) %}{% for b in range(99999) %}{{ c.next() }}"
    "{% endfor %}{% endfor %}",
}
HUGE = {
    "doubling by +": DOUBLING.replace("DOUBLE", "ns.t + ns.t"),
    "doubling by ~": DOUBLING.replace("DOUBLE", "ns.t ~ ns.t"),
    "doubling of record text": DOUBLING.replace("DOUBLE", "ns.t + ns.t").replace("'xxxxxxxxxx'", "messages[0].content"),
    "doubling by join": DOUBLING.replace("DOUBLE", "[ns.t, ns.t] | join"),
    "doubling by the method join": DOUBLING.replace("DOUBLE", "''.join([ns.t, ns.t])"),
    "doubling by replace": DOUBLING.replace("DOUBLE", "ns.t.replace('x', 'xxxxxxxx')"),
    "doubling by the filter replace": DOUBLING.replace("DOUBLE", "ns.t | replace('x', 'xxxxxxxx')"),
    "doubling by format": DOUBLING.replace("DOUBLE", "'%s%s' % (ns.t, ns.t)"),
    "doubling by the filter format": DOUBLING.replace("DOUBLE", "'%s%s' | format(ns.t, ns.t)"),
    "doubling by the method format": DOUBLING.replace("DOUBLE", "'{0}{0}'.format(ns.t)"),
    "doubling by tojson": DOUBLING.replace("DOUBLE", "[ns.t, ns.t] | tojson"),
    "doubling by a set block": "{% set ns = namespace(t='xxxxxxxxxx') %}{% for i in range(40) %}{% set t %}{{ ns.t }}{{ ns.t }}"
    "{% endset %}{% set ns.t = t %}{% endfor %}{{ ns.t }}",
    "times": "{{ 'x' * 9999999999 }}",
    "times a number of many": "{{ 'x' * 99999 * 99999 }}",
    "a list times": "{{ [1] * 9999999999 }}",
    "times record text": "{{ messages[0].content * 9999999999 }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indent": "{{ 'x\ny' | indent(9999999999) }}",
    "a width in %": "{{ '%9999999999d' % 1 }}",
    "a starred width": "{{ '%*d' % (9999999999, 1) }}",
    "a width in format": "{{ '{:9999999999}'.format(1) }}",
    "a width in a nested format": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "a precision in %": "{{ '%.9999999999f' % 1.0 }}",
    "a width of a key in %": "{{ '%(a)9999999999s' % {'a': 1} }}",
    "a width after flags in %": "{{ '%-+ 09999999999d' % 1 }}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "powers of powers": "{% set ns = namespace(n=10) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "expandtabs": "{{ '\t\t'.expandtabs(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "tojson with an indent": "{{ [1] | tojson(indent=9999999999) }}",
    "a filling batch": "{{ [1] | batch(9999999999, 0) | list }}",
    "many slices": "{{ [1] | slice(9999999999) | list }}",
}
TRICKS = {
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by attr": "{{ ''|attr('__class__') }}",
    "the class by map": "{{ ['']|map(attribute='__class__')|list }}",
    "the class of record text": "{{ messages[0].content.__class__ }}",
    "the class by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "the class by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "inner things of traced text": "{{ messages[0].content._atoms }}{{ messages[0].content._notes.replies }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func.__globals__ }}",
    "globals of a namespace": "{{ namespace.__init__.__globals__ }}",
    "globals of cycler": "{{ cycler.__init__.__globals__ }}",
    "globals of joiner": "{{ joiner.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "lipsum as text": "{{ lipsum(5) }}",
    "a changed list": "{{ messages.append(messages[0]) }}",
    "a changed message": "{{ messages[0].update(role='system') }}",
    "a popped field": "{{ messages[0].pop('content') }}",
    "a cleared list": "{{ messages.clear() }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "the environment": "{{ self.__class__ }}{{ environment.globals }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}{{ x }}",
    "a parent": "{% extends '/etc/passwd' %}",
    "open": "{{ open('/etc/passwd').read() }}",
    "a namespace with inner names": "{% set n = namespace(__class__=1) %}{{ n.__class__ }}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
}


def failure(source: str) -> ChatmillError:
    """The one error of a template, bound and run in every way."""
    with pytest.raises(ChatmillError) as caught:
        of_text(source + "{{ messages[1].content }}<|e|>", ("<|e|>",)).write(CONVERSATION)
    return caught.value


def is_one_clear_line(error: ChatmillError) -> bool:
    return isinstance(error, RecordError | ConfigError) and "\n" not in str(error).strip() and len(str(error)) < 1000


@pytest.mark.parametrize("name", ENDLESS)
def test_no_template_runs_forever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer steps than there are, which is quicker; `test_a_hostile_template_is_one_error_in_bulk` takes all."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)
    assert is_one_clear_line(failure(ENDLESS[name]))


@pytest.mark.parametrize("name", HUGE)
def test_no_template_takes_all_memory(name: str) -> None:
    tracemalloc.start()
    try:
        error = failure(HUGE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert is_one_clear_line(error)
    assert peak < 1 << 30, f"{peak >> 20} MiB"


@pytest.mark.parametrize(
    "text", ["'**%s**' % 'bold'", "'**{}**'.format('bold')", "'id 1234567: **{}**'.format('bold')"]
)
def test_stars_and_numbers_beside_a_format_are_text(text: str) -> None:
    opens = "{{ " + text + " }}"
    template = of_text("{% for m in messages %}" + opens + "{{ m.content }}<|e|>{% endfor %}" + opens, ("<|e|>",))
    written = render([CONVERSATION], template, add_generation_prompt=True)
    assert template.tokenizer.decode(written.tokens.ids).endswith("**bold**")


@pytest.mark.parametrize("name", TRICKS)
def test_no_template_reaches_beyond_its_data(name: str) -> None:
    before = repr(CONVERSATION)
    try:
        template = of_text(TRICKS[name] + "|{{ messages[1].content }}<|e|>", ("<|e|>",))
        template.write(CONVERSATION)
        text = template.plain(CONVERSATION, {}, 2, prompt=False)
    except (RecordError, ConfigError):
        text = "|"
    # what is undefined prints as nothing, as everywhere in Jinja
    assert text.removesuffix("Hello.<|e|>") in ("|", "||"), text[:200]
    assert repr(CONVERSATION) == before


@pytest.mark.parametrize(
    "value",
    [
        "dict",
        "range",
        "messages[0].content.upper",
        "messages[0].get",
        "cycler('a')",
        "cycler('a').next",
        "messages|map(attribute='role')",
        "{'k': 1}.get",
        "'x'.upper",
        "'x'['upper']",
        "[1]|batch(1)",
        "{}|items",
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        *("{{ VALUE }}", "{{ VALUE ~ '' }}", "{{ [VALUE]|join }}", "{{ VALUE|string }}", "{{ VALUE|safe }}"),
        *("{{ [VALUE] }}", "{{ {'k': (VALUE,)} }}", "{{ 'x' ~ [VALUE] }}", "{{ namespace(k=VALUE) }}"),
    ],
)
def test_no_text_is_a_place_in_memory(value: str, form: str) -> None:
    """Python writes such a value as its address, which is another one in every build."""
    written = form.replace("VALUE", f"({value})")
    with pytest.raises(RecordError, match="has no text that is the same at every run"):
        of_text("{% for m in messages %}" + written + "{{ m.content }}<|e|>{% endfor %}", ("<|e|>",)).write(
            CONVERSATION
        )


@pytest.mark.parametrize("others", ["['x']", "('a',)", "{'c': 1}.keys()"])
@pytest.mark.parametrize("use", ["|join", "|list", "|first", "|length", ""])
def test_no_text_has_the_order_of_a_set(others: str, use: str) -> None:
    """It differs from process to process."""
    with pytest.raises(RecordError, match="a set has no order that is the same at every run"):
        of_text(
            "{{ ({'a': 1, 'b': 2}.keys() - " + others + ")" + use + " }}{{ messages[1].content }}<|e|>", ("<|e|>",)
        ).write(CONVERSATION)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1e999 - 1e999"])
def test_a_number_that_jinja_writes_as_a_name_costs_each_record_alone(number: str) -> None:
    """`inf` and `nan` are no names of Python: transformers fails on them, too."""
    text = "{% set n = NUMBER %}{% for m in messages %}<|im_start|>{{ m.content }}{{ n }}<|im_end|>{% endfor %}"
    template = of_text(text.replace("NUMBER", number))
    rendered = render([CONVERSATION, CONVERSATION], template, collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["template_refused"] * 2
    assert "NameError" in str(rendered.failed[0][1])


def test_a_deep_template_is_one_error() -> None:
    assert isinstance(failure("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"), RecordError | ConfigError)


@pytest.mark.parametrize("name", ["nested loops", "a macro that calls itself"])
def test_a_hostile_template_is_one_error_in_bulk(name: str) -> None:
    text = "{% if 'you.' in messages[0].content %}" + ENDLESS[name] + "{% endif %}{{ messages[1].content }}<|eos|>"
    rendered = render([CONVERSATION], of_text(text, ("<|eos|>",)), collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["template_refused"]
    assert "stopped" in str(rendered.failed[0][1])


# -- conversations -----------------------------------------------------------------------------------------------------

NAMES = [
    *("trl/qwen3.jinja", "axolotl/qwen_25.jinja", "llamacpp/GLM-4.6.jinja", "llamacpp/openai-gpt-oss-120b.jinja"),
    *("trl/llama3_1.jinja", "trl/gemma4_v5.jinja", "trl/cohere2.jinja", "vllm/tool_chat_template_mistral3.jinja"),
    *("llamacpp/deepseek-ai-DeepSeek-V3.2.jinja", "llamacpp/MiniMax-M1.jinja", "vllm/tool_chat_template_granite.jinja"),
]


def hostile(template: ModelTemplate, text: str) -> list[Conversation]:
    """Conversations that have a text in every field they can have it in."""
    arguments = json.dumps({text: text, "list": [text, {text: [text]}], "n": 1}, ensure_ascii=False)
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}},
                  "required": [text]}  # fmt: skip
    tools = ({"type": "function", "function": {"name": text, "description": text, "parameters": parameters}},)
    call = ToolCall(text, arguments, "callid001")
    system, user = Message(Role.SYSTEM, text), Message(Role.USER, f"a {text} b", name=text)
    plain, thinks = Message(Role.ASSISTANT, text), Message(Role.ASSISTANT, text, reasoning=f"{text} c {text}")
    calls = Message(Role.ASSISTANT, "", tool_calls=(call,), has_content=False)
    named = Message(Role.TOOL, text, tool_call_id="callid001", name=text)
    odd = call._replace(id=text)
    return [
        Conversation((user, plain), id="pair"),
        Conversation((system, user, thinks, user, plain), id="reasoning"),
        Conversation((user, calls, named, plain), id="calls", tools=tools),
        Conversation((system, user, calls._replace(reasoning=text), named, thinks), id="reasoned calls", tools=tools),
        Conversation(
            (user, calls._replace(tool_calls=(odd,)), named._replace(tool_call_id=text), plain), id="ids", tools=tools
        ),
    ]


def written_by_template(document: TextDocument, template: ModelTemplate) -> Counter[int]:
    """Special ids that template text alone spells."""
    pattern = template.rules.pattern
    assert pattern is not None
    texts, run = [], ""
    for span in document.spans:
        if span.expression is None and not span.breaks:
            run += span.text
        else:
            texts.append(run)
            run = span.text if span.expression is None else ""
    names = [name for text in [*texts, run] for name in pattern.findall(text)]
    return Counter(template.tokenizer.control(name) for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_come_from_the_template_alone(name: str) -> None:
    template = bound(name)
    accepted = 0
    for special in (" ".join(template.tokenizer.control_ids), *list(template.tokenizer.control_ids)[:3]):
        conversations = hostile(template, special)
        rendered = render(conversations, template, collect_failures=True)
        failed = {index for index, _ in rendered.failed}
        at = 0
        for index, conversation in enumerate(conversations):
            try:
                written = template.text_documents(conversation)
            except RecordError:
                assert index in failed
                continue
            accepted += 1
            for document, items in zip(written.documents, items_alone(written, template), strict=True):
                wanted = written_by_template(document, template)
                ids = [int(i) for i in rendered.tokens.conversation(at).ids if i >= 256]
                assert Counter(ids) == wanted, f"{conversation.id} in bulk"
                alone = [i for item in items if isinstance(item, Ids) for i in item.ids if i >= 256]
                assert Counter(alone) == wanted, f"{conversation.id} one by one"
                at += 1
        assert at == len(rendered.kept)
    assert accepted >= 4
