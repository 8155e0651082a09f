"""List what can be named: templates, policies, shapes and export targets, those of installed packages too.

Examples:
    chatmill list
    chatmill list policies --json
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.options import argument
from chatmill.console import plain_console, plain_table


class Kind(StrEnum):
    """What is listed."""

    TEMPLATES = "templates"
    POLICIES = "policies"
    SHAPES = "shapes"
    EXPORTS = "exports"


class ListedName(NamedTuple):
    """A line of the list."""

    kind: str
    name: str
    origin: str
    """`chatmill`, or the package that adds it."""


def command(
    kinds: Annotated[
        list[Kind] | None, argument("[KIND]...", "templates, policies, shapes, exports; else all.")
    ] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Print a table of names with their origin."""
    found = [one for kind in kinds or Kind for one in named(kind)]
    if as_json:
        typer.echo(json.dumps([one._asdict() for one in found]))
        return

    table = plain_table("kind", "name", "from")
    for one in found:
        table.add_row(*map(Text, one))
    plain_console(soft_wrap=True).print(table)


def named(kind: Kind) -> list[ListedName]:
    """All names of one kind: those of Chatmill, then those of packages. No code of a package is run."""
    from chatmill.core.packages import additions
    from chatmill.export.registry import GROUP, TARGETS
    from chatmill.label.presets import PRESETS, packaged_policies
    from chatmill.read.shapes import SHAPES, packaged_shapes
    from chatmill.render.registry import bundled_names, packaged_templates

    own, packaged = {
        Kind.TEMPLATES: (bundled_names(), packaged_templates),
        Kind.POLICIES: (PRESETS, packaged_policies),
        Kind.SHAPES: (SHAPES, packaged_shapes),
        Kind.EXPORTS: (TARGETS, lambda: additions(GROUP, "export target", TARGETS)),
    }[kind]
    found = [ListedName(kind, name, "chatmill") for name in own]
    return [*found, *(ListedName(kind, name, addition.origin) for name, addition in packaged().items())]
