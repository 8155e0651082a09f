"""List the templates that come with Chatmill.

Examples:
    chatmill templates
    chatmill templates --json
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from chatmill.cli import options
from chatmill.console import plain_console
from chatmill.look.terminal import print_labelled


def command(as_json: Annotated[bool, options.JSON] = False) -> None:
    """Name, origin, licence, control tokens, stops and default policy of every bundled template."""
    from chatmill.render.registry import bundled_names

    entries = list(map(_described, bundled_names()))
    if as_json:
        typer.echo(json.dumps(entries, indent=1))
        return

    console = plain_console()
    for entry in entries:
        print_labelled(console, entry["name"], "", gutter=0)
        licence = f" ({entry['licence']})" if entry["licence"] else ""
        for label, value in (
            ("origin", entry["origin"] + licence),
            ("tokens", " ".join(entry["control_tokens"]) or "none"),
            ("stops", " ".join(entry["stop_tokens"])),
            ("policy", entry["default_policy"]),
        ):
            print_labelled(console, label, value, style="bright_black", indent=2, gutter=9)
    console.print()
    closing = "Use one with --template NAME. A model's own template needs no name: give the model's folder."
    print_labelled(console, "", closing, gutter=0)


def _described(name: str) -> dict[str, Any]:
    """Describe the file of a template; a build with `add_control_tokens` adds the tokens that its header names."""
    from chatmill.look.template_probes import spelled_tokens
    from chatmill.render.jinja.stops import families_of
    from chatmill.render.registry import HEADER, find_template

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
