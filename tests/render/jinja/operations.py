"""Everything that a template can do with a value, generated from the environment that templates run in.

A new filter, test, method or global is in these lists by itself. `CASES` has expressions for each of them, on values of
a record and on plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from chatmill.render.jinja.sandbox import PlainSandbox

TEXTS = {"T": "m.name", "U": "m.content", "X": "(m.name ~ m.content)", "S": "(m.name|safe)"}
NUMBERS = {"N": "a.n", "F": "a.f", "C": "(m.content|length)"}
HOLDERS = {"D": "a.d", "L": "a.l", "K": "[m.name, m.content]", "M": "m"}
OF_RECORD = TEXTS | NUMBERS | HOLDERS
PLAIN = {"p": "'ab,b'", "n": "2", "l": "['b', 'a']", "d": "{'b': 'a'}"}
FEW = ("m.name", "m.content", "a.n", "'b'", "2")
"""What an operation is given besides the value it belongs to."""
PAIRS = (("'b'", "m.name"), ("m.name", "'b'"), ("2", "m.name"), ("'b'", "a.n"), ("m.name", "m.content"), ("a.n", "'b'"))
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
    given = [
        "",
        *FEW,
        *map(", ".join, PAIRS),
        "m",
        "a.d",
        "x=m.name",
        "[m.name, a.n]",
        "'%Y ' ~ m.name",
        "'x' ~ [m.name]",
    ]
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
        for one, border in product(
            [one for one in values if one != "2"], ("a.n", "m.content|length", "1", "-1", "m.name")
        ):
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
