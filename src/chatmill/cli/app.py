"""All commands in one typer app: a module for each, imported when it is used."""

from __future__ import annotations

import gc
import warnings

import typer

from chatmill.cli.layout import LazyGroup
from chatmill.cli.statuses import ended, show_warning

COMMANDS = {
    "init": ("build", "Look at files and write a commented recipe for them."),
    "build": ("build", "Compile files of conversations into a dataset."),
    "export": ("build", "Write a dataset in the format of a trainer."),
    "transcripts": ("build", "Write conversations as marker transcripts."),
    "pack": ("build", "Pack plain texts into rows of tokens."),
    "capture": ("build", "Record the calls of agents, through a proxy."),
    "inspect": ("look", "Show conversations or a dataset token by token."),
    "stats": ("look", "Count and plot: lengths, trained shares, ledger."),
    "view": ("look", "Look at a dataset in the browser."),
    "template": ("look", "Show what a chat template does, what is proved."),
    "verify": ("prove", "Check a dataset; --deep: against its sources."),
    "audit": ("prove", "Check token data that another pipeline made."),
    "diff": ("prove", "Show which records of two datasets differ, how."),
    "isolate": ("prove", "Check that packed documents stay apart."),
    "train": ("train", "Train a transformers model, in a small loop."),
    "teacher": ("distill", "Ask a teacher model for likely tokens, add them."),
    "synth-harmony": ("distill", "Turn rows of query and answer into conversations."),
    "synth-kd": ("distill", "Build Megatron datasets for distillation."),
}
"""Group and help of each command, in the order of the overview; adding a command is adding a module and its line."""


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


def run_command() -> int:
    """Run the command that the process was started with; a mistake ends in one message and no traceback."""
    warnings.showwarning = show_warning
    command = typer.main.get_command(app)
    status = ended(lambda: command.main(prog_name="chatmill", standalone_mode=False))
    gc.freeze()  # the interpreter looks for cycles in all that is loaded before it ends: 0.2 s for nothing
    return status
