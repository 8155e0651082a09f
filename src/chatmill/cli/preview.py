"""Show conversations as coloured tokens, with what would be trained."""

import typer


def command() -> None:
    """Placeholder until the renderer stands."""
    raise typer.Exit
