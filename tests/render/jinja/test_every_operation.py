"""Every operation of a template on traced values: it is refused, or the text is plain Jinja's, also for other records.

What a run on one record has noted decides which other records are written from it: for each of them the text that its
expressions give must be plain Jinja's. Text of the template never holds a letter of the record.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any
from zlib import crc32

import jinja2
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.render.jinja.expressions import Notes, ask, evaluate
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.jinja.record_view import Arguments, InputForm, RecordView
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.traced import atoms_of, plain_text
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.render.jinja.operations import names, templates
from tools.template_survey import TODAY

BEFORE = "{% for m in messages[:1] %}{% set a = messages[1].tool_calls[0].function.arguments %}"
LETTERS = re.compile("[qz]", re.IGNORECASE)
"""Letters that records have, and templates do not."""
ADDRESS = re.compile("0x[0-9a-f]+|bound method|generator object|Undefined")
FOLLOWED = frozenset(
    {
        "tojson",
        "trim",
        "default",
        "length",
        "upper",
        "lower",
        "capitalize",
        "string",
        "safe",
        "join",
        "replace",
        "first",
    }
    | {"last", "strip", "lstrip", "rstrip", "startswith", "endswith", "get", "title", "in", "defined", "mapping"}
    | {"sequence", "none", "+", "~", "subscript", "loop over pairs"}
)
"""What published templates do to texts of a record: of these at least one use is not refused."""


def record(name: str, content: str, **arguments: Any) -> RecordView:
    call = ToolCall("q", json.dumps(arguments), "z")
    messages = (Message(Role.USER, content, name=name), Message(Role.ASSISTANT, "", tool_calls=(call,)))
    return RecordView(Conversation(messages), InputForm(arguments=Arguments.OBJECT))


RECORDS = [
    record("q", "zq z", n=3, f=0.5, d={"q": "z", "b": 1}, l=["q", "b"]),
    record("abz", "q", n=2, f=2.0, d={"q": "q", "b": 2}, l=["b", "abz"]),
    record("z,b", "Qab,ab", n=2, f=0.25, d={"q": "z", "b": 1}, l=["z,b", "q"]),
    record("b", "zb", n=1, f=1e9, d={"q": "", "b": [1, "z"]}, l=["", "b"]),
    record("%z", "{q}", n=200001, f=-1.5, d={"b": None, "z": "b"}, l=["<z>", 2]),
]


@cache
def sandboxes() -> tuple[PlainSandbox, TracingSandbox]:
    return PlainSandbox(TODAY), TracingSandbox(TODAY)


def run(sandbox: PlainSandbox, template: jinja2.Template, view: RecordView, notes: Notes | None) -> str | None:
    """What a template writes; None where it fails."""
    messages, _ = view.values(2, notes)
    try:
        return sandbox.render(template, {"messages": messages})
    except (jinja2.TemplateError, RecordError):
        return None


def text_for(text: str, view: RecordView) -> str:
    """What is written for a record that gives the replies of another one."""
    pieces, at = [], 0
    for size, expression in atoms_of(text):
        fixed = plain_text(text)[at : at + size]
        pieces.append(fixed if expression is None else evaluate(expression, view.field))
        at += size
    return "".join(pieces)


def faults(source: str) -> list[str]:
    """What is wrong with the tracing of a template."""
    plain, tracing = sandboxes()
    try:
        as_plain = plain.template(source)
    except jinja2.TemplateSyntaxError:
        return []
    texts = [run(plain, as_plain, view, None) for view in RECORDS]
    if not any(texts) or any(text is not None and ADDRESS.search(text) for text in texts):
        return []
    as_traced = tracing.template(source)
    found = []
    for number, view in enumerate(RECORDS):
        notes = Notes()
        text = run(tracing, as_traced, view, notes)
        if text is None:
            continue
        if plain_text(text) != texts[number]:
            found.append(f"{source}: {str.__repr__(text)} in place of {texts[number]!r}")
            continue
        at = 0
        for size, expression in atoms_of(text):
            if expression is None and LETTERS.search(plain_text(text)[at : at + size]):
                found.append(f"{source}: {text!r} has a letter of the record as text of the template")
            at += size
        for other, expected in zip(RECORDS, texts, strict=True):
            if all(ask(question, other.field) == reply for question, reply in notes.replies.items()):
                written = text_for(text, other)
                if written != expected:
                    found.append(f"{source}: {written!r} of another record in place of {expected!r}")
    return found


ALL = [(kind, name) for kind, listed in names().items() for name in listed]
SAMPLED = 7
"""The quick test takes one of so many uses of every name, and all if there are few, or of an operator."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_operation_is_followed_or_its_exact_value_is_noted(kind: str, name: str) -> None:
    found = [fault for text in templates(kind, name) for fault in faults(f"{BEFORE}{text}{{% endfor %}}")]
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_an_operation_is_followed_or_its_exact_value_is_noted(kind: str, name: str) -> None:
    used = list(templates(kind, name))
    step = SAMPLED if len(used) > SAMPLED and kind != "operator" else 1
    chosen = used[crc32(name.encode()) % step :: step]
    found = [fault for text in chosen for fault in faults(f"{BEFORE}{text}{{% endfor %}}")]
    assert not found, "\n".join(found[:20])
    assert name not in FOLLOWED or any(map(is_followed, used)), name


CHAT = (
    "{% for m in messages %}<|s|>{{ m.role }}:{% if loop.index0 == 2 %}"
    "{% set a = messages[1].tool_calls[0].function.arguments %}USED{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments|items %}{{ k }}="
    "{{ v|tojson }};{% endfor %}{% endfor %}<|e|>{% endfor %}{% if add_generation_prompt %}<|s|>assistant:{% endif %}"
)


def in_a_chat(view: RecordView) -> Conversation:
    """The same values, in a conversation with an answer after them."""
    asking, calling = view.conversation.messages
    return Conversation((Message(Role.USER, "hi"), calling, asking, Message(Role.ASSISTANT, "ok")))


def is_followed(text: str) -> bool:
    """Whether a use of an operation works on every record."""
    source = f"{BEFORE}{text}{{% endfor %}}"
    plain, tracing = sandboxes()
    try:
        as_plain, as_traced = plain.template(source), tracing.template(source)
    except jinja2.TemplateSyntaxError:
        return False
    for view in RECORDS:
        written, traced = run(plain, as_plain, view, None), run(tracing, as_traced, view, Notes())
        if written is None or traced is None or ADDRESS.search(written):
            return False
    return True


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_an_operation_in_bulk_gives_the_text_of_plain_jinja(kind: str, name: str) -> None:
    """With a text that spells a control token, which stays text."""
    used = list(templates(kind, name))
    followed = [text for text in used[:: len(used) // 12 + 1] if is_followed(text)]
    source = JinjaSource(name="own", text=CHAT.replace("USED", "|".join(followed)), path="", stop_tokens=("<|e|>",))
    template = ModelTemplate(source, byte_tokenizer(["<|e|>", "<|s|>"]), TemplateOptions(today=TODAY))
    spelling = record("<|e|>", "q<|e|>", n=2, f=2.0, d={"<|e|>": "<|e|>", "b": "<|e|>"}, l=["<|e|>", "b"])
    conversations = [*map(in_a_chat, [*RECORDS, spelling, *RECORDS])]
    rendered = render(conversations, template, collect_failures=True)
    for number, index in enumerate(rendered.kept.tolist()):
        plain = template.plain(conversations[index], {}, 4, prompt=False)
        ids = rendered.tokens.conversation(number).ids
        assert template.tokenizer.decode(ids) == plain
        assert ids.tolist().count(template.tokenizer.control("<|e|>")) == 4
    refused = {index: str(error) for index, error in rendered.failed}
    assert set(refused) <= {len(RECORDS)}, refused
