"""The bundled templates, with what their files say about them."""

from __future__ import annotations

from typing import Any

from chatmill.look.template_probes import spelled_tokens
from chatmill.render.jinja.stops import families_of
from chatmill.render.registry import HEADER, bundled_names, find_template


def bundled_templates() -> list[dict[str, Any]]:
    """Name, origin, licence, tokens, stops and policy of each.

    A build with `add_control_tokens` adds those tokens that the header of the file names.
    """
    return [_described(name) for name in bundled_names()]


def _described(name: str) -> dict[str, Any]:
    source = find_template(name)
    text = HEADER.sub("", source.text, count=1)
    tokens = source.control_tokens or tuple(spelled_tokens(text))
    stops = (*source.stop_tokens, *(stop for family in families_of(text) for stop in family.stops))
    return {
        "name": name,
        "origin": source.origin,
        "licence": source.licence,
        "control_tokens": list(dict.fromkeys(tokens)),
        "stop_tokens": list(dict.fromkeys(stops)),
        "default_policy": source.default_policy,
    }
