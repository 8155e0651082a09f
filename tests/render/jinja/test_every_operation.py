"""Every operation of a template on traced values: it is refused, or the text is plain Jinja's, also for other records.

What a run on one record has noted decides which other records are written from it: for each of them the text that its
expressions give must be plain Jinja's. Text of the template never holds a letter of the record. Operations come from
the environment that templates run in: a new filter, test, method or global is among them by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any
from zlib import crc32

import jinja2
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.render.jinja.control_names import ControlNames
from chatmill.render.jinja.expressions import Notes, ask, evaluate
from chatmill.render.jinja.record_view import Arguments, InputForm, RecordView
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.traced import atoms_of, plain_text
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from tests.render.jinja.at_hand import of_text, rendered_like_plain_jinja
from tools.template_survey import TODAY

TEXTS = {"T": "m.name", "U": "m.content", "X": "(m.name ~ m.content)", "S": "(m.name|safe)"}
NUMBERS = {"N": "a.n", "F": "a.f", "C": "(m.content|length)"}
HOLDERS = {"D": "a.d", "L": "a.l", "K": "[m.name, m.content]", "M": "m"}
OF_RECORD = TEXTS | NUMBERS | HOLDERS
PLAIN = {"p": "'ab,b'", "n": "2", "l": "['b', 'a']", "d": "{'b': 'a'}"}
FEW = ("m.name", "m.content", "a.n", "'b'", "2")
"""What an operation is given besides the value it belongs to."""
PAIRS = (("'b'", "m.name"), ("m.name", "'b'"), ("2", "m.name"), ("'b'", "a.n"), ("m.name", "m.content"), ("a.n", "'b'"))
PAIRS = (*PAIRS, ("'b'", "'b'"), ("9", "'b'"))
NAMED = {
    "attr": ["'upper'"], "map": ["'upper'", "'replace', 'b', m.name", "attribute=m.name", "'length'"],
    "select": ["'in', m.name", "'eq', m.name"], "reject": ["'in', m.name"], "selectattr": ["'d', 'in', m.name"],
    "rejectattr": ["'d', 'in', m.name"], "join": ["d=m.name", "m.name, attribute='d'"], "sum": ["start=a.n"],
    "replace": ["old='b', new=m.name", "'b', m.name, 1", "'b', m.name, a.n", "'', m.name"], "trim": ["chars=m.name"],
    "tojson": ["indent=a.n", "separators=(m.name, ':')", "indent=m.name", "sort_keys=a.n"],
    "default": ["m.name, true"], "batch": ["2, m.name"], "slice": ["2, m.name"], "format": ["m.name, a.n", "m"],
    "dictsort": ["by='value'"], "groupby": ["'d'"], "round": ["1, 'floor'"],
}  # fmt: skip
"""More of it, where a name is known to take more."""


def of_filters(name: str) -> Iterator[str]:
    """One filter."""
    given = ["", *FEW, *map(", ".join, PAIRS), *NAMED.get(name, ())]
    for value, arguments in product([*OF_RECORD.values(), *PLAIN.values()], given):
        yield f"{value}|{name}({arguments})"
    if name == "format":
        yield from (f"'{form}'|format({x})" for form in ("%s", "%d", "<%5s>", "%r") for x in OF_RECORD.values())
        yield from ("'%(name)s'|format(**m)", "'%(x)s'|format(x=m.name)", "'%s %s'|format(m.name, [m.name])")


def of_tests(name: str) -> Iterator[str]:
    """One test."""
    values = [*NUMBERS.values(), *HOLDERS.values()] if name == "sameas" else [*OF_RECORD.values(), *PLAIN.values()]
    for value in values:  # which texts are one object is for Python to say
        yield f"{value} is {name}"
        yield from (f"{value} is {name}({one})" for one in [*FEW, "a.l", "[m.name]", "a.d"])


def of_methods(name: str) -> Iterator[str]:
    """Everything that has a method or an attribute of this name, and it alone."""
    given = ["", *FEW, *map(", ".join, PAIRS), "[m.name, m.content]", "a.l", "a.d", "sep=m.name", "x=m.name"]
    owners = {
        str: [*TEXTS.values(), "'ab,b'"], int: ["a.n", "(m.content|length)", "2"], float: ["a.f", "0.5"],
        list: ["a.l", "[m.name, m.content]", "['b', 'a']"], dict: ["a.d", "m", "{'b': 'a'}"], tuple: ["(m.name, 2)"],
        range: ["range(3)"],
    }  # fmt: skip
    for value in [value for kind, values in owners.items() if hasattr(kind, name) for value in values]:
        yield f"{value}.{name}"
        yield from (f"{value}.{name}({arguments})" for arguments in given)
    if name.startswith("format"):
        forms = ("{}", "{0} {x}", "{:>5}", "{0[name]}", "{0.name}", "{!r}", "{x}", "{x[name]}")
        values = ("m.name, x=m.content", "m, x=m", "[m.name], x=a.l", "a.n, x=a.d", "namespace(name=m.name), x=m")
        yield from (f"'{form}'.{name}({given})" for form, given in product(forms, values))
        yield from (f"'{form}'.format_map({given})" for form, given in product(forms, ("{'x': m.name}", "{'x': m}")))


def of_globals(name: str) -> Iterator[str]:
    """One global function or class."""
    given = ["", *FEW, *map(", ".join, PAIRS), "m", "a.d", "x=m.name", "[m.name, a.n]", "'%Y ' ~ m.name"]
    given.append("'x' ~ [m.name]")
    for arguments in given:
        yield f"{name}({arguments})"
        yield from (f"{name}({arguments}).{used}" for used in ("next()", "current", "x", "fromkeys(m.name)"))
        yield f"[{name}({arguments})]|map('string')|join"
    yield f"{name}.fromkeys(m.name, m.content)"


BINARY = ("+", "-", "*", "/", "//", "%", "**", "~", "and", "or")
COMPARED = ("==", "!=", "<", "<=", ">", ">=", "in", "not in")


def of_operators(name: str) -> Iterator[str]:
    """One operator, or another piece of the language."""
    values = [*OF_RECORD.values(), *PLAIN.values()]
    if name in (*BINARY, *COMPARED):
        yield from (f"{one} {name} {other}" for one, other in product(values, values))
    if name in COMPARED:
        for one, other in product(("m.name", "a.n", "'b'"), ("m.content", "'ab,b'", "a.l")):
            yield from (f"{one} {name} {other} {second} {third}" for second, third in (("!=", "'x'"), ("in", "a.d")))
            yield f"'b' in {one} {name} {other}"
    if name == "unary":
        yield from (f"{sign}{one}" for sign, one in product(("-", "+", "not "), values))
    if name == "subscript":
        yield from (f"({one})[{other}]" for one, other in product(values, [*values, "'upper'", "'name'", "-1"]))
    if name == "slice":
        borders = ("a.n", "m.content|length", "1", "-1", "m.name")
        for one, border in product([one for one in values if one != "2"], borders):
            yield from (f"({one})[{border}:]", f"({one})[:{border}]", f"({one})[::{border}]", f"({one})[0:{border}:2]")
    if name == "choice":
        yield from (f"'x' if {one} else {other}" for one, other in product(values, values[:3]))
    if name == "print":
        yield from values
        yield from (f"[{one}, ({one},), {{'k': {one}}}]" for one in values)
        yield from (f"namespace(x={one})" for one in values)
        yield from ("m.items()", "m.values()", "a.d.items()", "a.d.keys()", "a.d.values()", "dict(m).keys()", "loop")


BLOCKS = {
    "filter block": "{% filter replace('NAME', m.name) %}<NAME>{% endfilter %}",
    "filter of a block": "{% filter upper %}{{ m.name }}{% endfilter %}",
    "set block": "{% set x %}{{ m.name }}{{ a.n }}{% endset %}{{ x|length }}{{ x }}",
    "filtered set block": "{% set x | replace('NAME', m.name) %}NAME{% endset %}{{ x }}",
    "macro": "{% macro f(x, y=1) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(m.name, a.n, m, k=a.d) }}",
    "call block": "{% macro f() %}{{ caller(m.name) }}{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
    "loop over a text": "{% for c in m.name %}{{ loop.index }}{{ c }}{% endfor %}",
    "loop over a list": "{% for c in a.l %}{{ loop.length }}{{ c }}{{ loop.cycle(m.name, a.n) }}{% endfor %}",
    "loop over an object": "{% for c in a.d %}{{ c }}{% else %}none{% endfor %}",
    "loop over pairs": "{% for k, v in a.d|items %}{{ k }}{{ v }}{% endfor %}",
    "loop with a test": "{% for c in a.l if c != m.name %}{{ c }}{% endfor %}",
    "changed": "{% for c in [m.name, m.content, m.content] %}{{ loop.changed(c) }}{% endfor %}",
    "neighbours": "{% for c in a.l %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "loop over a number": "{% for c in range(a.n) %}.{% endfor %}",
    "condition": "{% if m.name %}a{% elif a.n %}b{% else %}c{% endif %}",
    "namespace": "{% set n = namespace(t='') %}{% set n.t = n.t ~ [m.name] %}{{ n.t }}{{ n }}",
    "with": "{% with x = [m.name] %}{{ x }}{% endwith %}",
    "block": "{% block x %}{{ messages[0].name }}{% endblock %}{{ self.x() }}",
    "json": "{{ [m, a, []]|tojson(indent=4) }}{{ a|tojson(indent='\t') }}{{ [a.d, 7]|tojson(separators=(',', ':')) }}",
    "sorted json": "{{ [m]|tojson(sort_keys=true) }}{{ a|tojson(indent=2, sort_keys=true, separators=(' ,', ':')) }}",
    "json of pairs": "{{ [{1: m.name, 'b': [a.l]}]|tojson }}{{ {none: m, 'x': [a.d]}|tojson(indent=1) }}",
    "ascii json": "{{ [m, a]|tojson(indent=0, ensure_ascii=true) }}{{ [m, a]|tojson(ensure_ascii=false) }}",
    "error": "{% if a.n %}{{ raise_exception('no ' ~ [m.name]) }}{% endif %}",
}  # fmt: skip
"""Statements."""


def names() -> dict[str, list[str]]:
    """All names of the environment by kind."""
    environment = PlainSandbox()
    kinds = (str, list, dict, tuple, int, float, bool)
    return {
        "filter": sorted(set(environment.filters) - {"random"}),  # it gives what nobody can compare
        "test": sorted(environment.tests),
        "method": sorted({name for kind in kinds for name in dir(kind) if not name.startswith("_")}),
        "global": sorted(environment.globals),
        "operator": [*BINARY, *COMPARED, "unary", "subscript", "slice", "choice", "print"],
        "block": list(BLOCKS),
    }


def templates(kind: str, name: str) -> Iterator[str]:
    """Template texts that use one name."""
    if kind == "block":
        yield BLOCKS[name]
        return
    made = {
        "filter": of_filters, "test": of_tests, "method": of_methods, "global": of_globals, "operator": of_operators,
    }[kind](name)  # fmt: skip
    yield from ("{{ " + expression + " }}" for expression in made)


# -- running them ------------------------------------------------------------------------------------------------------

BEFORE = "{% for m in messages[:1] %}{% set a = messages[1].tool_calls[0].function.arguments %}"
TOGETHER = 24
"""Uses of a name that are compiled as one template, of which a run takes one: compiling takes longer than running."""
LETTERS = re.compile("[qz]", re.IGNORECASE)
"""Letters that records have, and templates do not."""
ADDRESS = re.compile("0x[0-9a-f]+|bound method|generator object|Undefined")
FOLLOWED = {
    *("tojson", "trim", "default", "length", "upper", "lower", "capitalize", "string", "safe", "join", "replace"),
    *("first", "last", "strip", "lstrip", "rstrip", "startswith", "endswith", "get", "title", "in", "defined"),
    *("mapping", "sequence", "none", "+", "~", "subscript", "loop over pairs"),
}
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
    record("%z", '{q}\n"é', n=200001, f=-1.5, d={"b": None, "z": "ü", "c": {}}, l=["<z>", 2, True, []]),
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


@pytest.mark.parametrize("sampled", [12, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, listed in names().items() for name in listed])
def test_an_operation_is_followed_or_its_exact_value_is_noted(kind: str, name: str, sampled: int) -> None:
    """Of one in `sampled` uses of every name, and of all if there are few."""
    used = list(templates(kind, name))
    step = 1 if len(used) <= sampled else sampled
    found = [fault for use in uses_of(used[crc32(name.encode()) % step :: step]) for fault in faults(use)]
    assert not found, "\n".join(found[:20])
    assert name not in FOLLOWED or any(map(is_followed, uses_of(used))), name


CONTROL = "\N{GREEK CAPITAL LETTER OMEGA}"
"""A control token that no record spells."""


def with_control(texts: list[str]) -> Iterator[str]:
    """Uses in which the template writes a control token in place of one of its texts."""
    for text in texts:
        for found in re.finditer("'b'", text):
            yield f"{text[: found.start()]}'{CONTROL}'{text[found.end() :]}"


@pytest.mark.parametrize("sampled", [12, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, listed in names().items() for name in listed])
def test_a_control_token_of_the_template_is_never_text_of_the_record(kind: str, name: str, sampled: int) -> None:
    """Whatever puts it there: it would be written as text, where transformers writes the token."""
    used = list(with_control(list(templates(kind, name))))
    step = 1 if len(used) <= sampled else sampled
    for use in uses_of(used[crc32(name.encode()) % step :: step]):
        for view in RECORDS:
            at, text = 0, use.written(view, Notes(ControlNames([CONTROL]))) or ""
            for size, expression in atoms_of(text):
                piece = plain_text(text)[at : at + size]
                assert expression is None or CONTROL not in piece, (use.text, piece, expression)
                at += size


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
