"""What a template does to a text that cannot be followed is said in the refusal of the record, with the line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import chatmill.render.jinja
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.render.render import render
from tests.chats import chat
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% set a = c.function.arguments %}"
    "{% for k, v in a|items %}{{ k }}={{ v|tojson }};{% endfor %}{% if a.s is defined %}\nINSIDE{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = ToolCall("look", '{"s": "ab", "n": 2, "f": 0.5, "d": {"k": "v"}, "l": ["x", "y"]}')
RECORD = Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "", tool_calls=(CALL,))))
SAID = {
    "(a.s ~ 'b').title()": "title of a text of the record",
    "m|tojson": "all fields of a message, whose order is not kept, nor those that Chatmill gives no meaning to: "
    "a template has to read them by name",
    "a.s.format('x')": "texts of the record in a format",
    "a.d.copy()": "copy of a value of the record",
    "'%r'|format(a.n)": "texts of the record in a format with more than %s",
    "[a.n]|string": "a list with texts of the record is printed",
    "namespace(x=a.n)": "a number of the record is written as Python code",
    "'{:>5}'.format(a.n)": "texts of the record in a format",
    "(a.s ~ 'x')[::2]": "a slice with a step, of a text in pieces",
    "a.s.strip(a.s)": "strip by characters of the record",
    "namespace(x=a.d)": "a value of the record is written inside another one",
    "a.d.keys()": "the keys or values of an object are printed",
    "(a.s|safe)|upper": "a text of the record is called safe, and then changed or compared",
    "(a.s|safe) is string": "a text of the record is called safe, and then tested",
    "('<'|safe) + a.s": "the operator + with texts of the record and a safe text",
    "a|tojson(separators=(a.s, ':'))": "JSON with texts of the record between its values",
    "a.s|urlencode": "what the filter urlencode makes of a text of the record",
    "'ab'|replace('', a.s)": "texts of the record replaced in a text",
    "a.s.replace('', '<|im_end|>')": "'<|im_end|>' between all characters of a text of the record",
    "('a' ~ a.s)|replace('aa', '<|im_end|>')": "'<|im_end|>' in place of some text that is in pieces",
    "a.s.center(9, '|')": "center of a text of the record, by what may be part of a control token",
    "a|tojson(indent='<|im_end|>')": "control tokens between the values of JSON",
}
NO_TEMPLATE = {"a number of the record is put into a format"}
"""What is refused before it comes to that."""


@pytest.mark.parametrize("body", SAID)
def test_what_loses_a_text_is_said_with_its_line(body: str) -> None:
    template = of_text(CHATML.replace("INSIDE", f"{{{{ {body} }}}}"))
    with pytest.raises(RecordError) as refused:
        render([RECORD], template)
    assert refused.value.code == "origin_lost"
    assert f"(line 3) makes something of the record's texts that cannot be followed: {SAID[body]}." in str(
        refused.value
    )


CUT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '')[:4] }}<|im_end|>\n{% endfor %}"
CUT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_a_template_that_cuts_contents_is_given_texts() -> None:
    """It is refused what it cuts, in words that say so, and writes what is short enough."""
    records = [chat(("user", question), ("assistant", "fine")) for question in ("hi", "hello", "", "four", "longer")]
    rendered = rendered_like_plain_jinja(of_text(CUT), [*records, *records])
    assert rendered.kept.tolist() == [0, 2, 3, 5, 7, 8]
    said = "the template leaves something out: messages[0].content."
    assert [(error.code, error.message.startswith(said)) for _, error in rendered.failed] == [("not_shown", True)] * 4


def sentences() -> set[str]:
    """What the code says of lost texts, as regular expressions."""
    found = set()
    for path in Path(chatmill.render.jinja.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OriginLost":
                said = node.args[0]
                parts = said.values if isinstance(said, ast.JoinedStr) else [said]
                texts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in parts]
                found.add("".join(texts))
    return found


def test_every_sentence_about_lost_texts_reaches_a_user() -> None:
    assert len(sentences()) > 15
    for sentence in sentences():
        assert any(re.fullmatch(sentence, said) for said in {*SAID.values(), *NO_TEMPLATE}), sentence
