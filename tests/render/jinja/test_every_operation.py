"""Every operation of a template on traced values: it is refused, or the text is plain Jinja's, also for other records.

What a run on one record has noted decides which other records are written from it: for each of them the text that its
expressions give must be plain Jinja's. Text of the template never holds a letter of the record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import jinja2
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.render.jinja.expressions import Notes, ask, evaluate
from chatmill.render.jinja.record_view import Arguments, InputForm, RecordView
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.traced import atoms_of, plain_text
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja
from tests.render.jinja.operations import names, templates
from tools.template_survey import TODAY

BEFORE = "{% for m in messages[:1] %}{% set a = messages[1].tool_calls[0].function.arguments %}"
TOGETHER = 24
"""Uses of a name that are compiled as one template, of which a run takes one: compiling takes longer than running."""
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


@dataclass(frozen=True, slots=True)
class Use:
    """One use of an operation, compiled without and with tracing; `number` chooses it among those of its template."""

    text: str
    plain: jinja2.Template
    traced: jinja2.Template
    number: int

    def written(self, view: RecordView, notes: Notes | None = None) -> str | None:
        """What it writes for a record, traced if there are notes to take; None where it fails."""
        messages, _ = view.values(2, notes)
        sandbox, template = [*zip(sandboxes(), (self.plain, self.traced), strict=True)][notes is not None]
        try:
            return sandbox.render(template, {"messages": messages, "number": self.number})
        except (jinja2.TemplateError, RecordError):
            return None


def uses_of(texts: list[str], together: int = TOGETHER) -> Iterator[Use]:
    """Those that Jinja can compile."""
    for begin in range(0, len(texts), together):
        some = texts[begin : begin + together]
        chosen = "".join(f"{{% elif number == {number} %}}{text}" for number, text in enumerate(some))
        source = f"{BEFORE}{{% if number < 0 %}}{chosen}{{% endif %}}{{% endfor %}}"
        try:
            plain, traced = (sandbox.template(source) for sandbox in sandboxes())
        except jinja2.TemplateSyntaxError:
            if len(some) > 1:
                yield from uses_of(some, (len(some) + 1) // 2)
            continue
        yield from (Use(text, plain, traced, number) for number, text in enumerate(some))


def text_for(text: str, view: RecordView) -> str:
    """What is written for a record that gives the replies of another one."""
    pieces, at = [], 0
    for size, expression in atoms_of(text):
        fixed = plain_text(text)[at : at + size]
        pieces.append(fixed if expression is None else evaluate(expression, view.field))
        at += size
    return "".join(pieces)


def faults(use: Use) -> list[str]:
    """What is wrong with the tracing of a use."""
    texts = [use.written(view) for view in RECORDS]
    if not any(texts) or any(text is not None and ADDRESS.search(text) for text in texts):
        return []
    found = []
    for number, view in enumerate(RECORDS):
        notes = Notes()
        text = use.written(view, notes)
        if text is None:
            continue
        if plain_text(text) != texts[number]:
            found.append(f"{use.text}: {str.__repr__(text)} in place of {texts[number]!r}")
            continue
        at = 0
        for size, expression in atoms_of(text):
            if expression is None and LETTERS.search(plain_text(text)[at : at + size]):
                found.append(f"{use.text}: {text!r} has a letter of the record as text of the template")
            at += size
        for other, expected in zip(RECORDS, texts, strict=True):
            if all(ask(question, other.field) == reply for question, reply in notes.replies.items()):
                written = text_for(text, other)
                if written != expected:
                    found.append(f"{use.text}: {written!r} of another record in place of {expected!r}")
    return found


ALL = [(kind, name) for kind, listed in names().items() for name in listed]
SAMPLED = 12
"""The quick test takes one of so many uses of every name, and all if there are few."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_operation_is_followed_or_its_exact_value_is_noted(kind: str, name: str) -> None:
    found = [fault for use in uses_of(list(templates(kind, name))) for fault in faults(use)]
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_an_operation_is_followed_or_its_exact_value_is_noted(kind: str, name: str) -> None:
    used = list(templates(kind, name))
    step = 1 if len(used) <= SAMPLED else SAMPLED
    found = [fault for use in uses_of(used[crc32(name.encode()) % step :: step]) for fault in faults(use)]
    assert not found, "\n".join(found[:20])
    assert name not in FOLLOWED or any(map(is_followed, uses_of(used))), name


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


def is_followed(use: Use) -> bool:
    """Whether a use of an operation works on every record."""
    for view in RECORDS:
        written = use.written(view)
        if written is None or ADDRESS.search(written) or use.written(view, Notes()) is None:
            return False
    return True


@pytest.mark.parametrize("kind", names())
def test_operations_in_bulk_give_the_text_of_plain_jinja(kind: str) -> None:
    """With a text that spells a control token, which stays text."""
    spelling = record("<|e|>", "q<|e|>", n=2, f=2.0, d={"<|e|>": "<|e|>", "b": "<|e|>"}, l=["<|e|>", "b"])
    conversations = [*map(in_a_chat, [*RECORDS, spelling, *RECORDS])]
    used = [list(templates(kind, name)) for name in names()[kind]]
    followed = [use.text for texts in used for use in uses_of(texts[:: len(texts) // 8 + 1]) if is_followed(use)]
    assert len(followed) >= 5
    for begin in range(0, len(followed), TOGETHER):
        text = CHAT.replace("USED", "|".join(followed[begin : begin + TOGETHER]))
        template = of_text(text, ("<|e|>",), ("<|s|>",))
        rendered = rendered_like_plain_jinja(template, conversations)
        assert not rendered.failed
        for number in range(len(conversations)):
            ids = rendered.tokens.conversation(number).ids
            assert ids.tolist().count(template.tokenizer.control("<|e|>")) == 4
