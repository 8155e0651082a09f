"""The bundled templates, with what their files say about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from chatmill.look.template_probes import spelled_tokens
from chatmill.render.jinja.stops import families_of
from chatmill.render.model_template import JinjaSource
from chatmill.render.registry import HEADER, bundled_names, find_template, packaged_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledTemplate:
    """A line of the list."""

    name: str
    kind: str
    """`jinja` or `python`."""
    origin: str
    licence: str
    control_tokens: tuple[str, ...]
    """Tokens that it writes; a build with `add_control_tokens` adds those that the header of the file names."""
    stop_tokens: tuple[str, ...]
    default_policy: str
    declares: str

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
    """All of them, and those of installed packages behind them."""
    packaged = packaged_templates()
    own = [_described(name) for name in bundled_names()]
    return [*own, *(replace(_described(name), origin=addition.origin) for name, addition in packaged.items())]


def _described(name: str) -> BundledTemplate:
    source = find_template(name)
    tokens, stops = source.control_tokens, source.stop_tokens
    origin, licence = "written for Chatmill", "Apache-2.0" if name in bundled_names() else ""
    if isinstance(source, JinjaSource):
        origin, licence = source.origin, source.licence
        text = HEADER.sub("", source.text, count=1)
        tokens = tokens or tuple(spelled_tokens(text))
        stops = (*stops, *(stop for family in families_of(text) for stop in family.stops))
    return BundledTemplate(
        name=name,
        kind="jinja" if isinstance(source, JinjaSource) else "python",
        origin=origin,
        licence=licence,
        control_tokens=tuple(dict.fromkeys(tokens)),
        stop_tokens=tuple(dict.fromkeys(stops)),
        default_policy=source.default_policy,
        declares=source.declares,
    )
