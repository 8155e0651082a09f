"""`{% generation %}` has no effect on the text, and is a scope of its own, as in transformers."""

from __future__ import annotations

import pytest

from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.tracing_sandbox import TracingSandbox


class Marking(PlainSandbox):
    generation_marks = ("<", ">")


SOURCE = (
    "{% set x = 'a' %}{% for m in messages %}{% generation %}{% set x = m %}{{ x }}{{ loop.last }}"
    "{% endgeneration %}{{ x }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("sandbox", "wanted"),
    [(PlainSandbox, "1Falsea2Truea"), (TracingSandbox, "1Falsea2Truea"), (Marking, "<1False>a<2True>a")],
)
def test_what_is_set_in_a_tag_stays_in_it(sandbox: type[PlainSandbox], wanted: str) -> None:
    environment = sandbox()
    assert environment.render(environment.template(SOURCE), {"messages": ["1", "2"]}) == wanted
