"""The names that a template reads from outside: its options, and nothing that it sets itself."""

from __future__ import annotations

import pytest

from chatmill.render.jinja.names import names_read
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.registry import find_template


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("{{ a }}", {"a"}),
        ("{% set a = b %}{{ a }}", {"b"}),
        ("{% if c %}{% set a = 1 %}{% else %}{% set a = 2 %}{% endif %}{{ a }}", {"c"}),
        ("{% if c %}{% set a = 1 %}{% elif d %}{% set a = 2 %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", {"c", "d"}),
        ("{% if c %}{% set a = 1 %}{% elif d %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", {"a", "c", "d"}),
        ("{% if c %}{% set a = 1 %}{% endif %}{{ a }}", {"a", "c"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% for x in xs %}{% set a = x %}{{ a }}{{ loop.index }}{% endfor %}", {"xs"}),
        ("{% for x in xs %}{% set a = x %}{% endfor %}{{ a }}", {"a", "xs"}),
        ("{% for x, y in xs if y and z %}{{ x }}{% else %}{{ w }}{% endfor %}", {"w", "xs", "z"}),
        ("{% macro f(x, y=d) %}{{ x }}{{ y }}{{ g(z) }}{% endmacro %}{% macro g(x) %}{% endmacro %}", {"d", "z"}),
        ("{% set a %}{{ b }}{% endset %}{{ a }}", {"b"}),
        ("{% set ns.a = b %}{% set ns = c %}{{ ns.d }}", {"b", "c"}),
        ("{% with a = b %}{{ a }}{% endwith %}{{ a }}", {"a", "b"}),
        ("{% generation %}{{ a }}{% endgeneration %}", {"a"}),
        ("{% filter upper %}{{ a }}{% endfilter %}", {"a"}),
    ],
)
def test_names_that_are_read(text: str, read: set[str]) -> None:
    assert names_read(PlainSandbox(None).parse(text)) == read


def test_the_options_of_qwen3() -> None:
    sandbox = PlainSandbox(None)
    read = names_read(sandbox.parse(find_template("qwen3").text))  # type: ignore[union-attr]
    assert read - set(sandbox.globals) == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
