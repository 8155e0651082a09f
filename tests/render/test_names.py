"""The names that a template reads from outside: its options, and nothing that it sets itself."""

from __future__ import annotations

from pathlib import Path

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


def test_a_comment_is_a_header_where_it_says_so(tmp_path: Path) -> None:
    header = "{#-\nlicence: MIT\ntokens: <|im_start|> <|im_end|>\nstops: <|im_end|>\n-#}\n"
    file = tmp_path / "mine.jinja"
    file.write_text(f"{header}{{{{ messages[0].content }}}}")
    assert not find_template(file).control_tokens, "a comment that somebody wrote for people"
    file.write_text(file.read_text().replace("licence: MIT", "chatmill: template\nlicence: MIT\neos: <|im_end|>"))
    found = find_template(file)
    assert found.control_tokens == ("<|im_start|>", "<|im_end|>")
    assert found.stop_tokens == ("<|im_end|>",)
    assert (found.licence, found.named_tokens) == ("MIT", {"eos_token": "<|im_end|>"})
