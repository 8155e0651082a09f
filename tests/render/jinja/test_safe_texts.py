"""`safe` and `escape`: the text is Jinja's, and text of a record never passes for text of the template."""

from __future__ import annotations

import pytest

from chatmill.render.jinja.expressions import Notes, root
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.traced import Traced, field, plain_text
from chatmill.render.jinja.tracing_sandbox import TracingSandbox

VALUE = 'a"<b>'
SOURCES = [
    *("{{ x|tojson|safe }}", "{{ (x|safe) + '<' }}", "{{ x|e }}", "{{ 'a<' ~ (x|safe) }}", "{{ x|escape + '<' }}"),
    *(
        "{{ '<' + (x|tojson|safe) }}",
        "{{ x + (x|safe) + x }}",
        "{{ (x|safe).replace('a', '<') }}",
        "{{ x|forceescape }}",
    ),
    *("{{ [x|safe, '<']|join }}", "{{ x|string|safe ~ '<' }}", "{{ x|tojson(indent=1)|safe + '<' }}"),
    *("{{ (x|safe) * 2 + '<' }}", "{{ x|safe|trim|upper }}", "{{ (x|safe)[1:] + '<' }}", "{{ '%s<'|safe % x }}"),
    *(
        "{% for c in x|safe %}{{ c + '<' }}{% endfor %}",
        "{{ (x|safe).split('<')|join('-') }}",
        "{{ x|safe|string + x }}",
    ),
    *("{% set y = x|safe %}{{ y }}{{ y|length }}", "{{ (x|safe)|replace('a', '<') }}", "{{ x|striptags }}"),
    "{% if x|safe == x and 'b' in (x|safe) and (x|safe) %}{{ x }}{% endif %}",
]


@pytest.mark.parametrize("source", SOURCES)
def test_the_text_is_that_of_jinja_and_has_an_origin(source: str) -> None:
    plain, tracing = PlainSandbox(), TracingSandbox()
    wanted = plain.render(plain.from_string(source), {"x": VALUE})
    found = tracing.render(tracing.from_string(source), {"x": field(VALUE, (0, "content"), Notes())})
    assert plain_text(found) == plain_text(wanted)
    assert isinstance(found, Traced), "text of the record is in it"
    assert sum(size for size, expression in found._atoms if expression is not None) >= 2


def test_a_text_that_is_only_called_safe_keeps_its_origin() -> None:
    tracing = TracingSandbox()
    found = tracing.render(tracing.from_string("<b>{{ x|tojson|safe }}"), {"x": field(VALUE, (0, "content"), Notes())})
    assert isinstance(found, Traced)
    assert {root(expression) for _, expression in found._atoms if expression} == {(0, "content")}


def test_safe_text_of_the_template_is_template_text() -> None:
    tracing = TracingSandbox()
    found = tracing.render(
        tracing.from_string("{{ '<b>'|safe + '<' }}{{ x }}"), {"x": field("y", (0, "content"), Notes())}
    )
    assert isinstance(found, Traced)
    assert [expression is None for _, expression in found._atoms] == [True, False]
