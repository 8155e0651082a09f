"""Commands that are imported when they are used, and the layout of their help: panels, then examples to copy."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from chatmill.cli.statuses import Status, forget_output, usage_of
from chatmill.errors import UnknownNameError

LEFT = 28
"""Columns for the names of options and commands, at most."""
BEGIN = "Begin: chatmill inspect FILE, then chatmill init FILE, then chatmill build."


def help_of(docstring: str | None) -> tuple[str, list[str]]:
    """The text of a docstring, and the examples at its end, one a line."""
    text, _, examples = inspect.cleandoc(docstring or "").partition("\n\nExamples:\n")
    return text, [line.strip() for line in examples.splitlines()]


class LazyGroup(TyperGroup):
    """A group whose commands are imported only when they are run, completed or asked for their help."""

    entries: Mapping[str, tuple[str, str]] = {}
    """The group and the help of each command: the function `command` of a module, whose docstring is the rest."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the table."""
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command."""
        if cmd_name not in self.commands and cmd_name in self.entries:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; an unknown name is answered with close ones, imported or not."""
        name = args[0]
        if name not in self.entries and not name.startswith("-"):
            raise UnknownNameError("command", name, list(self.entries))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; one whose output nobody reads any more just ends."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            forget_output()
            raise typer.Exit(Status.PIPE) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The overview, on one screen: where to begin, and what there is by what one wants to do."""
        from rich.text import Text

        from chatmill.console import plain_console

        lines = [Text(usage_of(ctx), style="bold"), Text(), Text(self.help or ""), Text(BEGIN), Text()]
        before = ""
        for name, (group, words) in self.entries.items():
            shown = "" if group == before else group
            before = group
            lines.append(Text.assemble((f"{shown:<9}", "bold"), (f"{name:<15}", "cyan"), words))
        plain_console().print(Text("\n").join([*lines, Text(), Text(self.epilog or "")]))


class Command(TyperCommand):
    """A command with the help of its module's docstring."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, text, arguments, options, examples."""
        text, examples = help_of(self.help)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name, words = record
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                sections.setdefault(title, []).append((name.partition(" <")[0] if is_argument else name, words))
        _print_help(ctx, text, sections, examples)


def load_command(name: str) -> Any:
    """Import the module of a command, which has its name, and make it one of typer's."""
    module = importlib.import_module(f"chatmill.cli.{name.replace('-', '_')}")
    alone = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    alone.command(name, cls=Command, help=module.__doc__)(module.command)
    return typer.main.get_command(alone)


def _unwrapped(text: str) -> str:
    """Paragraphs as single lines, so that they wrap at the width of the terminal; lists stay as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(
        part if any(line.startswith((" ", "- ", "|")) for line in part.splitlines()) else " ".join(part.splitlines())
        for part in parts
    )


def _print_help(
    ctx: Any, text: str, sections: Mapping[str, Sequence[tuple[str, str]]], examples: Sequence[str]
) -> None:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from chatmill.console import plain_console, titled_panel

    console = plain_console()
    width = min(LEFT, max((len(name) for rows in sections.values() for name, _ in rows), default=0))
    shown: list[Any] = [Text(usage_of(ctx), style="bold"), Text(), Text(_unwrapped(text)), Text()]
    for title, rows in sections.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", width=width, overflow="fold")
        table.add_column()
        for name, words in rows:
            table.add_row(Text(name), Text(words))
        if table.row_count:
            shown.append(titled_panel(table, title, border_style="bright_black"))
    console.print(Group(*shown))
    console.print(Text("\nExamples", style="bold"))
    for line in examples:  # not wrapped by rich: an example is there to be copied
        console.print(Text(f"  {line}"), soft_wrap=True)
