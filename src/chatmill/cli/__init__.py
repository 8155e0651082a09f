"""The command line: one module per command, imported when it is used, in one typer app, and what they share."""

from __future__ import annotations

import sys
import warnings

import typer

from chatmill.cli.layout import Entry, LazyGroup, Panel
from chatmill.cli.statuses import ended, show_warning

COMMANDS = {
    "init": Entry(panel=Panel.BUILD, help="Look at files and write a commented recipe for them."),
    "build": Entry(panel=Panel.BUILD, help="Compile files of conversations into a dataset."),
    "export": Entry(panel=Panel.BUILD, help="Write a dataset in the format of a trainer."),
    "transcripts": Entry(panel=Panel.BUILD, help="Write conversations as marker transcripts."),
    "pack": Entry(panel=Panel.BUILD, help="Pack plain texts into rows of tokens."),
    "inspect": Entry(panel=Panel.LOOK, help="Show conversations or a dataset token by token."),
    "stats": Entry(panel=Panel.LOOK, help="Count and plot: lengths, trained shares, ledger."),
    "view": Entry(panel=Panel.LOOK, help="Look at a dataset in the browser."),
    "template": Entry(panel=Panel.LOOK, help="Show what a chat template does, what is proved."),
    "templates": Entry(panel=Panel.LOOK, help="List the bundled templates."),
    "verify": Entry(panel=Panel.PROVE, help="Check a dataset; --deep: against its sources."),
    "audit": Entry(panel=Panel.PROVE, help="Check token data that another pipeline made."),
    "diff": Entry(panel=Panel.PROVE, help="Show which records of two datasets differ, how."),
    "isolate": Entry(panel=Panel.PROVE, help="Check that packed documents stay apart."),
    "train": Entry(panel=Panel.TRAIN, help="Train a transformers model, in a small loop."),
    "teacher": Entry(panel=Panel.DISTILL, help="Ask a teacher model for likely tokens, add them."),
    "synth-harmony": Entry(panel=Panel.DISTILL, help="Turn rows of query and answer into conversations."),
    "synth-kd": Entry(panel=Panel.DISTILL, help="Build Megatron datasets for distillation."),
}
"""Name of each command, in the order of the overview; adding a command is adding a module and its line here."""


class _Commands(LazyGroup):
    """All commands of Chatmill."""

    entries = COMMANDS


app = typer.Typer(
    name="chatmill",
    cls=_Commands,
    help="Compile chats into the exact token data a trainer reads, and prove it right.",
    epilog="Options and examples: chatmill COMMAND --help. Also --version.",
    no_args_is_help=True,
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


def main() -> None:
    """Run the command line; a mistake in data, options or files ends in one message and no traceback."""
    warnings.showwarning = show_warning
    command = typer.main.get_command(app)
    sys.exit(ended(lambda: command.main(prog_name="chatmill", standalone_mode=False)))
