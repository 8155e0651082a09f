"""The command line: one module per command, loaded into one typer app."""

from __future__ import annotations

import importlib
import sys

import typer

COMMANDS = ("preview", "init", "build", "merge", "verify", "diff", "export", "inspect", "transcripts", "isolate")
"""Each is a module of this package with a function `command`."""

app = typer.Typer(
    name="chatmill",
    help="Compile chat conversations into the exact token data a trainer reads, and prove that it is right.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from chatmill import __version__

        typer.echo(f"chatmill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options that come before a command."""


for _name in COMMANDS:
    _module = importlib.import_module(f"chatmill.cli.{_name}")
    app.command(_name, help=_module.__doc__)(_module.command)


def main() -> None:
    """Run the command line; a mistake in data or options ends in one panel and exit status 2, no traceback."""
    from chatmill.errors import ChatmillError

    try:
        app()
    except ChatmillError as error:
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text

        Console(stderr=True).print(Panel(Text(str(error)), title=type(error).__name__, border_style="red"))
        sys.exit(3 if type(error).__name__ == "GateError" else 2)
