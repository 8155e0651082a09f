"""`tojson` on values of a record: the text is that of `json.dumps`, and every part of it knows where it is from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.traced import Traced, field, plain_text
from chatmill.render.jinja.traced_values import wrapped, written_as_json

RAW: dict[str, Any] = {
    "name": 'f\n"é',
    "n": {"b": [1, 2.5, None, True, {}], "a": "x"},
    "empty": [],
    "more": [[], {"z": "ü"}],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"indent": 4},
    {"indent": 0},
    {"indent": "\t"},
    {"separators": (",", ":")},
    {"sort_keys": True},
    {"indent": 2, "sort_keys": True, "separators": (" ,", " : ")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_containers_of_traced_values_are_written_as_json_writes_them(options: dict[str, Any], ascii_only: bool) -> None:
    notes = Notes()
    options = {"ensure_ascii": ascii_only, **options}
    traced = [wrapped(RAW, (1, "call", 0, "arguments"), notes), {"text": field("a\té", (0, "content"), notes)}, 7, "t"]
    found = written_as_json(traced, options)
    assert plain_text(found) == json.dumps([RAW, {"text": "a\té"}, 7, "t"], **options)
    assert isinstance(found, Traced)
    assert all(expression is None or expression[0] != "lost" for _, expression in found._atoms)
