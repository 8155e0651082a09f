"""Control tokens that a template puts into contents are control tokens, as transformers has them, by whatever way."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ConfigError
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.chats import chat
from tests.render.jinja.at_hand import of_text

TOKENS = ("<|im_end|>", "<|im_start|>", "<|image|>")
CONTROLS = re.compile("|".join(map(re.escape, TOKENS)))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nINSIDE<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LITERALS = ("<|im_end|>", "<|image|>", "a<|image|>b", "<|im", "_end|>", "age|>", "<", "_", "X", "", " ", "|")
WAYS = """
{0}|replace('X', '{1}')
{0}.replace('X', '{1}')
{0}|replace(old='X', new='{1}')
{0}.replace('', '{1}')
{0}|replace('X', '{1}', 1)
{0}.replace('XX', '{1}')
{0}|replace('{1}', 'Y')
({0}|list)|join('{1}')
{0}.split('X')|join('{1}')
'{1}'.join({0}.split('X'))
({0} ~ '{1}')
('{1}' + {0})
'%s{1}' % {0}
'%s{1}'|format({0})
({0} or '{1}')
{0}|default('{1}', true)
{0}.join(('{1}', 'b'))
{0}|upper
[{0}]|map('replace', 'X', '{1}')|join
[{0}, 'b']|join('{1}')
{0}.center(6, '{1}')
{0}|center(5)
{0}.ljust(5, '{1}')
{0}.rjust(4, '{1}')
{0}.zfill(4)
{0}.expandtabs(3)
({0}|tojson)
{0}.strip()
'{1}X'.replace('X', {0})
{0}|trim('{1}')
'{1}'.join([{0}, {0}])
{0}|indent(2)
{0}|string
({0}*2)
[{0}]|tojson(separators=('{1}', ':'))
[{0}]|tojson(indent='{1}')
{0}|lower
{0}.lstrip('{1}')
{0}[1:]
{0}.partition('X')|join('{1}')
{0}.removeprefix('{1}')
{0}|capitalize
{0}.title()
{0}.split('{1}')[0]
('b' if 'X' in {0} else '{1}')
{0}|batch(2, '{1}')|map('join')|join
{0}.format('{1}')
{0}|e|safe
{0}|wordwrap(2, true, '{1}')
""".strip().splitlines()
"""Each makes a text of another one, {0}, with the help of a text of the template, {1}."""
AS_A_BLOCK = "{% set x %}{{ TEXT }}{% endset %}{{ x|replace('X', '<|image|>') }}"


@st.composite
def insides(draw: st.DrawFn) -> str:
    """What a template makes of a content, by some operations one after another, between texts of its own."""
    text = "(m.content or '')"
    for _ in range(draw(st.integers(1, 3))):
        way, literal = draw(st.sampled_from(WAYS)), draw(st.sampled_from(LITERALS))
        text = f"({way.replace('{0}', text).replace('{1}', literal)})"
    written = draw(st.sampled_from(("{{ TEXT }}", AS_A_BLOCK)))
    around = st.sampled_from(("", "<", "<|im", "e|>"))
    return draw(around) + written.replace("TEXT", text) + draw(around)


CONTENTS = st.text(alphabet="aXYb \n", max_size=5)
CHATS = st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=2)


def reference(text: str, template: ModelTemplate) -> list[int]:
    """The ids of a text as transformers encodes it: control tokens wherever they are."""
    ids: list[int] = []
    at = 0
    for match in CONTROLS.finditer(text):
        ids += [*text[at : match.start()].encode(), template.tokenizer.control(match.group())]
        at = match.end()
    return [*ids, *text[at:].encode()]


def compared(template: ModelTemplate, records: list[Conversation]) -> dict[int, str]:
    """Compare the ids of all records that are not refused with transformers'; return the codes of the others."""
    rendered = render(records, template, collect_failures=True)
    for place, index in enumerate(rendered.kept.tolist()):
        record = records[index]
        text = template.plain(record, {}, len(record.messages), prompt=False)
        assert rendered.tokens.conversation(place).ids.tolist() == reference(text, template), text
    return {index: error.code for index, error in rendered.failed}


@settings(max_examples=300)
@given(insides(), st.lists(CHATS, min_size=1, max_size=4))
@example("{{ m.content.join(('<|image|>', 'b')) }}{{ m.content }}", [[("1", "a")], [("", "b")]])
@example("{{ m.content|replace('XX', '<|im')|replace('X', 'age|>') }}", [[("XXX", "a")], [("1XX", "b")]])
@example("<|im{{ m.content }}age|>{{ m.content or '-' }}", [[("X", "a")], [("", "b")]])
def test_ids_are_those_of_transformers_whatever_a_template_does_to_contents(
    inside: str, chats: list[list[tuple[str, str]]]
) -> None:
    """No record spells a part of a control token: the template writes all there are."""
    try:
        template = of_text(CHATML.replace("INSIDE", inside), TOKENS[:1], TOKENS[1:])
    except ConfigError:
        return
    roles = (Role.USER, Role.ASSISTANT)
    records = [
        Conversation(tuple(Message(role, text) for pair in pairs for role, text in zip(roles, pair, strict=True)))
        for pairs in chats
    ]
    compared(template, [*records, *records])


NATURAL = [
    ("{{ m.content|replace('X', '<|image|>') }}", [("1X2", "a"), ("X", "b"), ("12", "c"), ("XX 2", "aXb")]),
    ("{{ m.content.replace('X', '<|image|>')|trim }}", [(" 1X2 ", "a "), (" X1", "b"), ("12", "c")]),
    ("{{ m.content.replace('X', '<|image|>').replace('Y', '<|im') }}", [("1X2Y", "a"), ("Y", "b"), ("YX", "c")]),
    (
        "{{ m.content.replace('X', '<|im') }}{% if 'X' in m.content %}age|>{% endif %}",
        [("X", "a"), ("1X", "b"), ("1", "c")],
    ),
]


@pytest.mark.parametrize(("inside", "texts"), NATURAL)
def test_records_with_what_is_replaced_are_built(inside: str, texts: list[tuple[str, str]]) -> None:
    """Known turns too, and what is replaced counts as shown."""
    template = of_text(CHATML.replace("INSIDE", inside), TOKENS[:1], TOKENS[1:])
    records = [chat(("user", question), ("assistant", answer)) for question, answer in texts]
    assert compared(template, [*records, *records]) == {}


def test_a_stop_inside_of_an_answer_ends_it() -> None:
    """What the template puts there is a stop like its own; text after it has no prompt, and the record is refused."""
    template = of_text(CHATML.replace("INSIDE", "{{ m.content|replace('X', '<|im_end|>') }}"), TOKENS[:1], TOKENS[1:])
    records = [chat(("user", "1X2"), ("assistant", "aX")), chat(("user", "1"), ("assistant", "aXb"))]
    assert compared(template, records) == {1: "goes_on_after_stop"}
