"""The command line: `main` runs it; one module per command, and what they share.

Nothing is imported here: Ctrl-C during the imports, most of the time of a short command, is caught in `main`.
"""

import sys


def main() -> None:
    """Run the command line; a mistake in data, options or files ends in one message and no traceback."""
    try:
        import gc

        gc.set_threshold(100_000)  # what a command loads and makes holds few cycles: looking is a tenth of a short one
        from chatmill.cli.app import run_command

        status = run_command()
    except KeyboardInterrupt:
        # before `ended` in statuses.py, which does the same for a command that runs, or after it
        sys.stderr.write("Stopped.\n")
        status = 130
    sys.exit(status)
