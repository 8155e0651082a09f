"""Templates that take more than there is: each does one operation at its bound. Run as a program, it tries them.

    python -m tests.render.jinja.greedy plain 1000000 [NAME ...]

Every template runs in a process of its own (a fork, which takes no time) that has 1 GB of memory for data.
"""

# ruff: noqa: E501 (a template is one line)

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import jinja2

MEMORY, SECONDS = 1 << 30, 5
"""Bytes that a process has for all of its data."""
LONG = "('xy\n' * 6000000)"
"""A text of 18 million characters."""
MANY = "(range(99999)|list)"


def kept(made: str, first: str = "[]") -> str:
    """A template that keeps what it makes in each turn."""
    return f"{{% set ns = namespace(l={first}) %}}{{% for i in range(99999) %}}{{% set ns.l = ns.l + [{made}] %}}{{% endfor %}}"


def repeated(use: str, before: str = "", times: int = 99999) -> str:
    """A template that does something in each turn of a loop."""
    return f"{before}{{% for i in range({times}) %}}{use}{{% endfor %}}"


def set_to(value: str) -> str:
    return f"{{% set t = {value} %}}"


def doubled(use: str, levels: int = 34) -> str:
    """A template with a list that holds a list twice, and so on."""
    return (
        f"{{% set ns = namespace(l=['a', 'b']) %}}{{% for i in range({levels}) %}}{{% set ns.l = [ns.l, ns.l] %}}{{% endfor %}}"
        + use.replace("L", "ns.l")
    )


def tupled(use: str, levels: int = 34) -> str:
    """The same with tuples, which can be keys."""
    return doubled(use, levels).replace("[", "(").replace("]", ")")


def deep(use: str) -> str:
    """A template with a tuple in a tuple, 90,000 times."""
    return (
        "{% set ns = namespace(l=('a',)) %}{% for i in range(90000) %}{% set ns.l = (ns.l,) %}{% endfor %}"
        + use.replace("L", "ns.l")
    )


MEMORY_TAKERS = {
    "indent of many lines": "{{ ('x\n' * 30000)|indent(99999) }}",
    "indent by a long text": "{{ ('x\n' * 30000)|indent('y' * 90000) }}",
    "indent by a width by name": "{{ ('x\n' * 30000)|indent(first=true, width=90000) }}",
    "method join with a long separator": "{{ ('y' * 90000).join(range(99999)|map('string')) }}",
    "method join of a list with a long separator": "{{ ('y' * 90000).join(range(99999)|map('string')|list) }}",
    "method join of a text with a long separator": "{{ ('y' * 90000).join('x' * 90000) }}",
    "translate": "{{ ('x' * 600000).translate({120: 'y' * 90000}) }}",
    "format with widths of five digits": "{{ ('{0:99999}' * 100000).format(1) }}",
    "format with wide fields of a namespace": "{{ ('{0.t}' * 10000).format(namespace(t='y' * 90000)) }}",
    "format_map of a long text": "{{ ('{t}' * 10000).format_map({'t': 'y' * 90000}) }}",
    "format with a precision": "{{ ('{0:.99999f}' * 10000).format(1.5) }}",
    "map center": "{{ range(99999)|map('string')|map('center', 99999)|join }}",
    "map center to a list": "{{ range(99999)|map('string')|map('center', 99999)|list|length }}",
    "doubling a list by +": "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l|length }}",
    "doubling a list by *": "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l * 9 %}{% endfor %}{{ ns.l|length }}",
    "doubling a list by sum": "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l]|sum(start=[]) %}{% endfor %}{{ ns.l|length }}",
    "many long texts kept": kept("'x' * 900000 ~ i"),
    "many long texts of other letters kept": kept("'\U0001f600' * 900000 ~ i"),
    "many long texts written": repeated("{{ t }}", set_to("'x' * 60000000")),
    "many long texts written in a macro": "{% macro f(t) %}"
    + repeated("{{ t }}")
    + "{% endmacro %}{{ f('x' * 60000000) }}",
    "many ranges kept": kept("range(99999)|list"),
    "many ranges sorted and kept": kept("range(99999)|sort"),
    "many slices kept": kept("t[1:]", "['x' * 900000]").replace("{% for", "{% set t = 'x' * 9000000 %}{% for", 1),
    "many objects kept": kept("{'a': i, 'b': [i], 'c': {}, 'd': (i,)}"),
    "many chained objects": "{% set ns = namespace(l={}) %}{% for i in range(99999) %}{% for j in range(99) %}{% set ns.l = {'a': ns.l} %}{% endfor %}{% endfor %}",
    "many macros kept": "{% set ns = namespace(l={}) %}{% for i in range(99999) %}{% for j in range(99) %}{% macro f() %}{% endmacro %}{% set ns.l = [ns.l, f] %}{% endfor %}{% endfor %}",
    "many namespaces kept": "{% set ns = namespace(l={}) %}{% for i in range(99999) %}{% for j in range(99) %}{% set ns.l = namespace(l=ns.l) %}{% endfor %}{% endfor %}",
    "many split texts kept": kept("('x y ' * 90000).split()"),
    "a split text": "{{ " + LONG + ".split()|length }}",
    "a text split at every letter": "{{ " + LONG + ".split('x')|length }}",
    "lines of a long text": "{{ " + LONG + ".splitlines()|length }}",
    "letters of a long text": "{{ " + LONG + "|list|length }}",
    "tojson with an indent, deep": doubled("{{ L|tojson(indent=90000) }}", 12),
    "tojson with an indent, wide": "{{ " + MANY + "|tojson(indent=90000) }}",
    "tojson with an indent by a text": "{{ " + MANY + "|tojson(indent='y' * 90000) }}",
    "tojson with long separators": "{{ " + MANY + "|tojson(separators=('y' * 90000, ':')) }}",
    "tojson of signs": "{{ ('\u0001' * 60000000)|tojson }}",
    "tojson in ASCII": "{{ ('\U0001f600' * 30000000)|tojson(ensure_ascii=true) }}",
    "wordwrap with a long wrapstring": "{{ ('x ' * 90000)|wordwrap(1, wrapstring='y' * 90000) }}",
    "join with a long separator": "{{ " + MANY + "|join('y' * 90000) }}",
    "join by an attribute": "{{ ([{'a': 'y' * 900000}] * 90000)|join(attribute='a') }}",
    "% with widths of five digits": "{{ ('%99999d' * 90000) % ((1,) * 90000) }}",
    "% with a long text by name": "{{ ('%(a)s' * 90000) % {'a': 'y' * 90000} }}",
    "the filter format with widths": "{{ ('%99999d' * 9)|format(1, 1, 1, 1, 1, 1, 1, 1, 1) * 900 }}",
    "urlencode again and again": "{% set ns = namespace(t='%' * 900) %}{% for i in range(99) %}{% set ns.t = ns.t|urlencode %}{% endfor %}",
    "escape again and again": "{% set ns = namespace(t='&' * 900) %}{% for i in range(99) %}{% set ns.t = (ns.t|e) ~ '' %}{% endfor %}",
    "forceescape again and again": "{% set ns = namespace(t='&' * 900) %}{% for i in range(99) %}{% set ns.t = ns.t|forceescape %}{% endfor %}",
    "safe texts joined": "{{ ('&'|e).join(['&' * 900000] * 9000) }}",
    "a safe text and a long one": repeated("{{ ('&'|e) + t }}", set_to("'&' * 9000000")),
    "xmlattr": "{{ {'a': '&' * 60000000}|xmlattr }}",
    "replace by a long text": "{{ ('x' * 600000)|replace('x', 'y' * 90000) }}",
    "method replace by a long text": "{{ ('x' * 600000).replace('x', 'y' * 90000) }}",
    "replace of nothing": "{{ ('x' * 600000).replace('', 'y' * 90000) }}",
    "replace in a list": "{{ (['x'] * 60000)|replace('x', 'y' * 90000) }}",
    "expandtabs": "{{ ('\t' * 90000).expandtabs(90000) }}",
    "a list times": "{{ ([1] * 90000) * 90000 }}",
    "a tuple times": "{{ ((1,) * 90000) * 90000 }}",
    "truncate with a long end": repeated(
        "{{ 'x'|truncate(1, true, '', 0) ~ t|truncate(99999, false, 'y' * 99999) }}", set_to("'x' * 60000000")
    ),
    "title of a long text": "{{ ('x ' * 30000000)|title }}",
    "upper of letters that become three": "{{ ('\u0390' * 30000000)|upper }}",
    "wordcount": "{{ ('x ' * 30000000)|wordcount }}",
    "a filling slice": "{{ range(99999)|map('string')|slice(99999, 0)|list }}" * 99,
    "batches kept": kept("range(99999)|batch(2)|list"),
    "groups kept": kept("range(99999)|groupby('real')"),
    "dictsort kept": kept("d|dictsort").replace(
        "{% for",
        "{% set d = dict(range(99999)|map('string')|map('list')|map('batch', 2)|map('first')|map('first')|map('upper')|map('center', 2)|map('list')|list) %}{% for",
        1,
    ),
    "dict copies kept": kept("dict(t)", "[]").replace(
        "{% for",
        "{% set t = dict(range(99999)|map('string')|map('center', 9)|map('batch', 5)|map('list')|map('map', 'join')|map('list')|list) %}{% for",
        1,
    ),
    "filter block": "{% filter indent(99999) %}{% for i in range(9999) %}x\n{% endfor %}{% endfilter %}",
    "a set block": "{% set t %}" + repeated("{{ 'x' * 90000 }}") + "{% endset %}{{ t }}",
    "a sum of lists": "{{ (range(99999)|map('string')|map('list'))|sum(start=[])|length }}",
    "a sum of tuples": "{{ ([(1,)] * 99999)|sum(start=())|length }}",
    "filter blocks that replace": "{% filter replace('x', 'xxxxxxxxxx') %}" * 20 + "x" + "{% endfilter %}" * 20,
    "record text joined to itself": "{% set ns = namespace(t=messages[0].content) %}"
    + repeated("{% set ns.t = ns.t ~ ns.t %}", times=60),
}
SHARED = {
    name: doubled(use)
    for name, use in {
        "written": "{{ L }}", "written with ~": "{{ 'x' ~ L }}", "compared": "{{ L == (L + []) }}",
        "compared with another": "{% set a = [L, L] %}{% set b = [L, L] %}{{ a == b }}", "ordered": "{{ [L, 1] < [L, 2] }}",
        "compared in a chain": "{{ [L, 1] == [L, 1] == [L, 1] }}",
        "sort": "{{ [[L, 2], [L, 1]]|sort }}", "in": "{{ [L, 1] in [[L, 2], [L, 3]] }}", "not in": "{{ [L, 1] not in [[L, 2], [L, 3]] }}",
        "the test in": "{{ [L, 1] is in [[L, 2], [L, 3]] }}", "the test eq": "{{ [L, 1] is eq([L, 2]) }}",
        "the method index": "{{ [[L, 2], 1].index([L, 1]) }}", "the method count": "{{ [[L, 2], 1].count([L, 1]) }}",
        "%": "{{ '%s' % [L] }}", "% as code": "{{ '%r' % [L] }}", "format": "{{ '{}'.format(L) }}", "format as code": "{{ '{!r}'.format(L) }}",
        "format_map": "{{ '{a}'.format_map({'a': L}) }}", "the filter format": "{{ '%s'|format(L) }}",
        "upper": "{{ L|upper }}", "lower": "{{ L|lower }}", "capitalize": "{{ L|capitalize }}", "title": "{{ L|title }}", "string": "{{ L|string }}",
        "urlencode": "{{ L|urlencode }}", "trim": "{{ L|trim }}", "replace": "{{ L|replace('a', 'b') }}", "center": "{{ L|center(9) }}",
        "escape": "{{ L|e }}", "forceescape": "{{ L|forceescape }}", "safe": "{{ L|safe }}", "striptags": "{{ L|striptags }}", "wordcount": "{{ L|wordcount }}",
        "urlize": "{{ L|urlize }}", "xmlattr": "{{ {'a': L}|xmlattr }}", "float": "{{ L|float }}",
        "raise_exception": "{{ raise_exception(L) }}", "pprint": "{{ L|pprint }}", "tojson": "{{ L|tojson }}", "tojson with an indent": "{{ L|tojson(indent=1) }}",
        "join": "{{ L|join }}", "join of it": "{{ [L, 1]|join(',') }}", "min": "{{ [[L, 2], [L, 1]]|min }}", "max": "{{ [[L, 2], [L, 1]]|max }}",
        "sum": "{{ L|sum(start=[]) }}{{ [L]|string }}", "a namespace": "{{ namespace(a=L) }}", "an object": "{{ {'a': L} }}", "values of an object": "{{ {'a': L}.values() }}",
        "pairs of an object": "{{ {'a': L}.items() }}", "changed": "{% for i in [1, 2] %}{{ loop.changed([L, i]) }}{% endfor %}", "a macro": "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(L) }}",
        "a set block": "{% set t %}{{ L }}{% endset %}{{ t }}", "dictsort by value": "{{ {'a': [L, 1], 'b': [L, 2]}|dictsort(by='value') }}",
        "groupby": "{{ [{'k': [L, 1]}, {'k': [L, 2]}]|groupby('k') }}",
    }.items()
} | {
    f"{name}, of tuples": tupled(use)
    for name, use in {
        "a key": "{% set d = {L: 1} %}", "a key that is looked up": "{{ {'a': 1}[L] }}", "get": "{{ {'a': 1}.get(L) }}", "in an object": "{{ L in {'a': 1} }}",
        "unique": "{{ (L, L)|unique|list|length }}", "groupby": "{{ ({'k': L}, {'k': L})|groupby('k') }}", "dict": "{{ dict(((L, 1),)) }}", "keys taken away": "{{ {'a': 1}.keys() - (L, ) }}",
        "map": "{{ ({'a': 1}, {})|map(attribute=L)|list }}", "a namespace of pairs": "{{ namespace(((L, 1),)) }}", "a test": "{{ L is filter }}",
    }.items()
} | {
    f"{name}, deep": deep(use)
    for name, use in {
        "written": "{{ L }}", "a key": "{% set d = {L: 1} %}", "compared": "{% set a = (L, 1) %}{% set b = (L, 2) %}{{ a == b }}", "tojson": "{{ L|tojson }}", "unique": "{{ (L, L)|unique|list|length }}",
    }.items()
}  # fmt: skip
SLOW = {
    "lists made in a loop": repeated("{{ (range(99999)|list)|length }}", times=300),
    "slices": repeated("{% set a = t[:-1] %}", set_to(MANY)),
    "slices of a text": repeated("{% set a = t[1:] %}", set_to("'x' * 9000000")),
    "sort": repeated("{% set a = t|sort %}", set_to(MANY)),
    "sort of long texts": repeated("{% set a = t|sort %}", set_to("('x' * 90000 ~ ' ') * 90") + set_to("t.split()")),
    "groupby": repeated("{% set a = t|groupby('real') %}", set_to(MANY)),
    "unique": repeated("{% set a = t|unique|list %}", set_to(MANY)),
    "dictsort": repeated(
        "{% set a = t|dictsort %}",
        "{% set t = dict(range(9999)|map('string')|map('center', 9)|map('batch', 5)|map('list')|map('map', 'join')|map('list')|list) %}",
    ),
    "sum": repeated("{% set a = t|sum %}", set_to(MANY)),
    "min": repeated("{% set a = t|min %}", set_to(MANY)),
    "reverse": repeated("{% set a = t|reverse|first %}", set_to("range(99999)|map('string')|list")),
    "batch": repeated("{% set a = t|batch(99)|list %}", set_to(MANY)),
    "slice": repeated("{% set a = t|slice(9)|list %}", set_to(MANY)),
    "map": repeated("{% set a = t|map('upper')|list %}", set_to(MANY)),
    "map of an attribute": repeated("{% set a = t|map(attribute='real')|list %}", set_to(MANY)),
    "select": repeated("{% set a = t|select('eq', 1)|list %}", set_to(MANY)),
    "selectattr": repeated("{% set a = t|selectattr('real')|list %}", set_to(MANY)),
    "a search in a long text": repeated("{% if 'xyz' in t %}{% endif %}", set_to(LONG)),
    "a search for a long text": repeated(
        "{% if p in t %}{% endif %}", set_to("'x' * 29999") + "{% set p = 'x' * 45 ~ 'y' ~ 'x' * 45 %}"
    ),
    "find": repeated("{% set a = t.find('xyz') %}", set_to(LONG)),
    "rfind": repeated("{% set a = t.rfind(p) %}", set_to(LONG) + "{% set p = 'y' ~ 'x' * 900 %}"),
    "count": repeated("{% set a = t.count('q') %}", set_to(LONG)),
    "split at what is not there": repeated("{% set a = t.split('q') %}", set_to(LONG)),
    "rsplit": repeated("{% set a = t.rsplit('q', 1) %}", set_to(LONG)),
    "partition": repeated("{% set a = t.partition('q') %}", set_to(LONG)),
    "replace of what is not there": repeated("{% set a = t.replace('q', 'r') %}", set_to(LONG)),
    "startswith of a long text": repeated("{% set a = t.startswith(t) %}", set_to(LONG)),
    "strip": repeated("{% set a = t.strip('xy\n') %}", set_to(LONG)),
    "isalpha": repeated("{% set a = t.isalpha() %}", set_to("'\u4e00' * 9000000")),
    "the test lower": repeated("{% set a = t is lower %}", set_to("'x' * 9000000")),
    "lower": repeated("{% set a = t|lower %}", set_to(LONG)),
    "comparing long texts": repeated(
        "{% if t == u %}{% endif %}", set_to("'x' * 20000000 ~ 'a'") + "{% set u = 'x' * 20000000 ~ 'b' %}"
    ),
    "ordering long texts": repeated(
        "{% if t < u %}{% endif %}", set_to("'x' * 20000000 ~ 'a'") + "{% set u = 'x' * 20000000 ~ 'b' %}"
    ),
    "comparing long lists": repeated("{% if t == u %}{% endif %}", set_to(MANY) + "{% set u = range(99999)|list %}"),
    "a search in a long list": repeated("{% if 'x' in t %}{% endif %}", set_to(MANY)),
    "a search in a range": repeated("{% if 'x' in range(99999) %}{% endif %}"),
    "index in a long list": repeated("{% if t.index(99998) %}{% endif %}", set_to(MANY)),
    "urlize": "{{ ('www.x.org/a?b@c.de ' * 900000)|urlize }}",
    "striptags": "{{ ('<!---->' * 90000)|striptags }}",
    "striptags of tags": "{{ ('<x>' * 900000)|striptags }}",
    "wordwrap": "{{ ('x' * 9000000)|wordwrap(2) }}",
    "wordwrap of words": "{{ ('xy ' * 3000000)|wordwrap(9) }}",
    "urlencode": "{{ ('\u4e00' * 9000000)|urlencode }}",
    "pprint": "{{ ('xy ' * 9000000)|pprint }}",
    "pprint of a list": "{{ " + MANY + "|pprint }}" + "{{ [" + MANY + "] * 99|pprint }}",
    "translate": repeated("{% set a = t.translate({120: 'y'}) %}", set_to("'x' * 900000")),
    "strftime with a long form": "{{ strftime_now('%Y %c ' * 900000) }}",
    "strftime again and again": repeated("{{ strftime_now('%c' * 400) }}"),
    "a set block in a loop": repeated("{% set t %}{{ i }}{% endset %}") * 99,
    "a set block in two loops": "{% for j in range(99999) %}"
    + repeated("{% set t %}{{ i }}{% endset %}")
    + "{% endfor %}",
    "call blocks": "{% macro f() %}{{ caller() }}{% endmacro %}{% for j in range(99999) %}"
    + repeated("{% call f() %}{{ i }}{% endcall %}")
    + "{% endfor %}",
    "a macro": "{% macro f(a) %}{{ a }}{% endmacro %}{% for j in range(99999) %}"
    + repeated("{{ f(i) }}")
    + "{% endfor %}",
    "a block": "{% for j in range(99) %}"
    + repeated("{{ self.b() }}")
    + "{% endfor %}{% block b %}"
    + "{% set a = 1 %}" * 900
    + "{% endblock %}",
    "a long body": repeated("{% if i == 1 %}{% set a = i + 1 %}{% endif %}" * 900),
    "nested loops with a test": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "nested loops that are left": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99) %}{% break %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop over a filter": "{% for a in range(99999) %}{% for b in range(99999)|map('string') %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
    "filters in a loop": "{% for a in range(99999) %}" + repeated("{{ i|string|trim|upper|lower }}") + "{% endfor %}",
    "methods in a loop": "{% for a in range(99999) %}" + repeated("{{ 'x'.upper().lower().strip() }}") + "{% endfor %}",
    "comparisons in a loop": "{% for a in range(99999) %}"
    + repeated("{% if i == a and a < i or i in [a] %}{% endif %}")
    + "{% endfor %}",
    "record text in a loop": "{% for a in range(99999) %}"
    + repeated("{% if messages[0].content == 'x' ~ i or 'y' in messages[0].content %}{% endif %}")
    + "{% endfor %}",
    "record text changed again and again": "{% set ns = namespace(t=messages[0].content) %}"
    + repeated("{% set ns.t = ns.t.strip('q') %}"),
    "record text cut again and again": "{% set ns = namespace(t=messages[0].content * 90000) %}"
    + repeated("{% set ns.t = ns.t[1:] %}"),
    "record text doubled": "{% set ns = namespace(t=messages[0].content) %}"
    + repeated("{% set ns.t = ns.t + ns.t %}", times=30),
    "a long text in a list of long texts": "{% set l = ['x' * 9000000 ~ 'a'] * 9000 %}{{ ('x' * 9000000 ~ 'b') in l }}",
    "startswith many texts": repeated("{% set a = t.startswith(('x' * 89999 ~ 'y',) * 9999) %}", set_to("'x' * 90000")),
    "join of a list of numbers": repeated("{% set a = t|join %}", set_to(MANY)),
    "replace in a list": repeated("{% set a = t|replace('1', '2') %}", set_to(MANY)),
    "trim of a list": repeated("{% set a = t|trim %}", set_to(MANY)),
    "record text added": "{% set ns = namespace(t='') %}" + repeated("{% set ns.t = ns.t + messages[0].content %}"),
    "numbers doubled by +": "{% set ns = namespace(n=1) %}{% for a in range(99) %}"
    + repeated("{% set ns.n = ns.n + ns.n %}")
    + "{% endfor %}",
    "numbers doubled by -": "{% set ns = namespace(n=1) %}{% for a in range(99) %}"
    + repeated("{% set ns.n = ns.n - -ns.n %}")
    + "{% endfor %}",
    "a number of another base": "{% set a = ('f' * 9000000)|int(0, 16) %}{{ a // 7 }}",
    "round to many places": repeated("{{ 1.5|round(99999, 'floor') }}"),
    "many arguments": repeated("{{ f(*t) }}", set_to(MANY) + "{% macro f() %}{{ varargs|length }}{% endmacro %}"),
    "many arguments by name": repeated(
        "{{ dict(**t) }}",
        "{% set t = dict(range(9999)|map('string')|map('center', 9)|map('batch', 5)|map('list')|map('map', 'join')|map('list')|list) %}",
    ),
}
SOURCES = {
    "5 MB of text": "x" * 5_000_000,
    "5 MB of code": "{{ x }}" * 700_000,
    "4,000 ifs": "".join(f"{{% if x == {n} %}}" for n in range(4_000)) + "{% endif %}" * 4_000,
    "20,000 ifs one after another": "{% if x %}y{% endif %}" * 20_000,
    "20,000 elifs": "{% if x %}" + "{% elif y %}" * 20_000 + "{% endif %}",
    "5,000 elifs that set": "{% if x %}"
    + "".join(f"{{% elif y == {n} %}}{{% set a{n} = 1 %}}" for n in range(5_000))
    + "{% endif %}",
    "50,000 terms": "{{ " + " + ".join(["x"] * 50_000) + " }}",
    "50,000 joined terms": "{{ " + " ~ ".join(["x"] * 50_000) + " }}",
    "50,000 items": "{{ [" + ", ".join(["x"] * 50_000) + "] }}",
    "many constants": "{{ 'x'|center(99999)|replace(' ', 'yyyyyyyyy')|upper }}" * 300,
}
GROUPS = {"memory": MEMORY_TAKERS, "lists": SHARED, "time": SLOW, "sources": SOURCES}
ALL = {f"{group}: {name}": text for group, templates in GROUPS.items() for name, text in templates.items()}


def outcome(name: str, kind: str) -> dict[str, Any]:
    """Run one template in this process; say how it ended."""
    from datetime import date

    from chatmill.core.conversation import Conversation, Message, Role
    from chatmill.render.jinja.expressions import Notes
    from chatmill.render.jinja.limits import LimitError
    from chatmill.render.jinja.record_view import InputForm, RecordView
    from chatmill.render.jinja.sandbox import PlainSandbox
    from chatmill.render.jinja.tracing_sandbox import TracingSandbox

    conversation = Conversation((Message(Role.USER, "h"), Message(Role.ASSISTANT, "Hello.")))
    messages, _ = RecordView(conversation, InputForm()).values(2, None if kind == "plain" else Notes())
    sandbox = (PlainSandbox if kind == "plain" else TracingSandbox)(date(2026, 1, 1))
    try:
        text = sandbox.render(sandbox.template(ALL[name]), {"messages": messages, "x": "v", "y": ""})
    except LimitError as error:
        return {"ended": "limit", "said": str(error)}
    except jinja2.TemplateError as error:
        return {"ended": "error", "said": f"{type(error).__name__}: {error}"[:200]}
    return {"ended": "text", "said": str(len(text))}


def tried(name: str, kind: str) -> dict[str, Any]:
    """Run one template in a fork; also say the CPU seconds and the megabytes that it took."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            os.write(writing, json.dumps({"before": before}).encode() + b"\n")
            os.write(writing, json.dumps(outcome(name, kind)).encode())
            code = 0
        except BaseException as error:
            os.write(writing, json.dumps({"ended": "crash", "said": f"{type(error).__name__}: {error}"[:200]}).encode())
        finally:
            os._exit(code)
    os.close(writing)
    _, status, used = os.wait4(child, 0)
    with os.fdopen(reading) as pipe:
        first, *said = pipe.read().splitlines()
    found = json.loads(said[0]) if said else {"ended": "killed", "said": f"status {status}"}
    megabytes = (used.ru_maxrss - json.loads(first)["before"]) / 1024
    return found | {"seconds": used.ru_utime + used.ru_stime, "megabytes": megabytes}


def main(kind: str, steps: int, names: list[str]) -> None:
    """Try templates, and print a line of JSON for each."""
    from chatmill.render.jinja import sandbox

    sandbox.MAX_STEPS = steps
    outcome("sources: 5 MB of text", kind)  # imports, which are not what is measured
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for name in names or list(ALL):
        print(json.dumps({"name": name, "kind": kind} | tried(name, kind)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
