"""Commands that are imported when they are used; their help is typer's, with examples to copy at its end."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from chatmill.errors import UnknownNameError

BEGIN = "Begin: chatmill inspect FILE, then chatmill init FILE, then chatmill build."


def help_of(docstring: str | None) -> tuple[str, list[str]]:
    """Split a docstring into its text and the examples at its end, one a line."""
    text, _, examples = inspect.cleandoc(docstring or "").partition("\n\nExamples:\n")
    return text, [line.strip() for line in examples.splitlines()]


class LazyGroup(TyperGroup):
    """A group whose commands are imported only when they are run, completed or asked for their help."""

    entries: Mapping[str, tuple[str, str]] = {}
    """The group and the help of each command: the function `command` of a module, whose docstring is the rest."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List all names, in the order of the table."""
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command."""
        if cmd_name not in self.commands and cmd_name in self.entries:
            self.commands[cmd_name] = _load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; an unknown name is answered with close ones, imported or not."""
        name = args[0]
        if name not in self.entries and not name.startswith("-"):
            raise UnknownNameError("command", name, list(self.entries))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the overview, on one screen: where to begin, and the commands by task."""
        lines = [ctx.get_usage(), "", self.help or "", BEGIN, ""]
        before = ""
        for name, (group, words) in self.entries.items():
            lines.append(f"{'' if group == before else group:<9}{name:<15}{words}")
            before = group
        typer.echo("\n".join([*lines, "", self.epilog or ""]))


class _Command(TyperCommand):
    """A command whose examples are not wrapped: they are there to be copied."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.get_params(ctx):
            # Their names say enough; typer adds <list[str]> to arguments and <bool> to --help.
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = _show_no_type  # type: ignore[attr-defined]
            elif "--help" in parameter.opts:
                parameter.metavar = ""
        whole, (text, examples) = self.help, help_of(self.help)
        self.help = "\n\n".join(" ".join(part.split("\n")) for part in text.replace("[", r"\[").split("\n\n"))
        super().format_help(ctx, formatter)
        self.help = whole
        typer.echo("\n".join(["Examples", *(f"  {line}" for line in examples), ""]))


def _show_no_type(ctx: Any) -> None:
    """Leave the column of types empty in the help of a parameter."""


def _load_command(name: str) -> Any:
    """Import the module of a command, which has its name, and make it one of typer's."""
    module = importlib.import_module(f"chatmill.cli.{name.replace('-', '_')}")
    alone = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    alone.command(name, cls=_Command, help=module.__doc__)(module.command)
    return typer.main.get_command(alone)
