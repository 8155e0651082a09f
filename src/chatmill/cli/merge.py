"""Join the shares of a build that was made with --shard i/N.

Example: chatmill merge data/built
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[Path, typer.Argument(help="The folder that the shares were built into.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Join all chunks into the dataset."""
    from chatmill.build.run import merge_build
    from chatmill.cli.build import show_result

    show_result(merge_build(out), as_json=as_json)
