"""List the templates that come with Chatmill.

Examples:
    chatmill templates
    chatmill templates --json
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from chatmill.cli import options
from chatmill.console import plain_console
from chatmill.look.labelled import print_labelled


def command(as_json: Annotated[bool, options.JSON] = False) -> None:
    """Name, origin, licence, control tokens, stops and default policy of every bundled template."""
    from chatmill.look.template_list import bundled_templates

    entries = bundled_templates()
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
