"""How a command ends: its exit status, and an error as one line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from enum import IntEnum

from chatmill.errors import ChatmillError, missing_extra


class Status(IntEnum):
    """Exit statuses of all commands; `docs/commands/index.md` lists them."""

    DONE = 0
    """It is done, and a check found nothing."""
    FOUND = 1
    """It is done, and a check found something: a difference, a leak, a wrong boundary."""
    MISTAKE = 2
    """A mistake in data, options, recipe or files, or a disk that failed; said in one message."""
    GATE = 3
    """A gate of the recipe was not kept; nothing is published."""
    BUG = 70
    """An error that Chatmill did not expect: a traceback, worth a report."""
    INTERRUPTED = 130
    """Ctrl-C."""
    PIPE = 141
    """The reader of the output went away, as in `chatmill inspect FILE | head`."""
    TERMINATED = 143
    """SIGTERM; `train` saves a checkpoint first."""


AT_END = contextlib.ExitStack()
"""What the command that runs now has changed in this process; taken back when it has ended."""


def ended(run: Callable[[], object]) -> int:
    """Run a command and give its exit status; a user's mistakes are reported without a traceback."""
    with AT_END:
        return _ended(run)


def _ended(run: Callable[[], object]) -> int:
    try:
        status = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    except (BrokenPipeError, SystemExit) as stop:
        # typer and rich end a program whose output is closed with 1, which is another status here
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        # nobody reads the output any more: what is still buffered goes nowhere, or Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.PIPE
    except Exception as error:
        return _report(error)
    if status == Status.INTERRUPTED:
        sys.stderr.write("Stopped.\n")
    return status if isinstance(status, int) else Status.DONE


def _report(error: Exception) -> Status:
    """Say what is wrong, in one message unless it is a bug, and give the status of it."""
    from chatmill.core.machine_limits import FREE_MEMORY, is_out_of_memory

    if isinstance(error, ChatmillError):
        from chatmill.compiler.gates import GateError

        show(type(error).__name__, str(error))
        return Status.GATE if isinstance(error, GateError) else Status.MISTAKE
    missing = missing_extra(error, "this command")
    message = getattr(error, "format_message", None)  # mistakes on the command line, as typer finds them
    if is_out_of_memory(error):
        show("MemoryError", f"There is not enough memory: {FREE_MEMORY}.")
    elif isinstance(error, OSError):
        show(type(error).__name__, _sentence(error))
    elif missing is not None:
        show(type(missing).__name__, str(missing))
    elif message is not None:
        _show_usage(error, message())
    else:
        _show_bug(error)
        return Status.BUG
    return Status.MISTAKE


def show(title: str, message: str, *, before: str = "") -> None:
    """Print one line that is never wrapped, for logs and grep; it is red on a terminal."""
    import typer

    from chatmill.look.safe_text import visible

    message = visible(message, mark_newlines=False)  # names and ids come from data
    typer.secho(f"{before}chatmill: {title}: {message}", fg="red", err=True)


def show_warning(message: Warning | str, *_: object, **place: object) -> None:
    """Say what a warning is about, in one line."""
    sys.stderr.write(f"chatmill: Warning: {message}\n")


def _sentence(error: OSError) -> str:
    from chatmill.core.publish import WAYS_OUT

    where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error) or type(error).__name__
    way_out = WAYS_OUT.get(error.errno or 0, "")
    return f"{where + ': ' if where else ''}{reason}{'; ' if way_out else ''}{way_out}"


def _show_usage(error: Exception, message: str) -> None:
    """Report a mistake on the command line: the usage, what is wrong, and where the help is."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, which is printed already
        return
    if context is None:
        show("Usage", message)
        return
    show("Usage", f"{message.rstrip('.')}. Help: {context.command_path} --help", before=f"{context.get_usage()}\n")


def _show_bug(error: Exception) -> None:
    import traceback

    from chatmill import __version__

    traceback.print_exception(error)
    show(
        "Bug",
        f"Chatmill {__version__} did not expect this {type(error).__name__}. Please report it with the lines above.",
    )
