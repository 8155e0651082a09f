"""The bundled templates, with what their files say about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chatmill.look.template_probes import spelled_tokens
from chatmill.render.jinja.stops import families_of
from chatmill.render.registry import HEADER, bundled_names, find_template


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledTemplate:
    """A line of the list."""

    name: str
    origin: str
    licence: str
    control_tokens: tuple[str, ...]
    """Tokens that it writes; a build with `add_control_tokens` adds those that the header of the file names."""
    stop_tokens: tuple[str, ...]
    default_policy: str

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        found = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Labels and values for people."""
        yield "origin", f"{self.origin} ({self.licence})" if self.licence else self.origin
        yield "tokens", " ".join(self.control_tokens) or "none"
        yield "stops", " ".join(self.stop_tokens)
        yield "policy", self.default_policy


def bundled_templates() -> list[BundledTemplate]:
    """All of them."""
    return [_described(name) for name in bundled_names()]


def _described(name: str) -> BundledTemplate:
    source = find_template(name)
    text = HEADER.sub("", source.text, count=1)
    tokens = source.control_tokens or tuple(spelled_tokens(text))
    stops = (*source.stop_tokens, *(stop for family in families_of(text) for stop in family.stops))
    return BundledTemplate(
        name=name,
        origin=source.origin,
        licence=source.licence,
        control_tokens=tuple(dict.fromkeys(tokens)),
        stop_tokens=tuple(dict.fromkeys(stops)),
        default_policy=source.default_policy,
    )
