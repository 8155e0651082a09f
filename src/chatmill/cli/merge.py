"""Join the shares of a build that was made with --shard i/N.

Each share may run on another machine that sees the same folders.

Examples:
    chatmill build recipe.yaml --out data/built --shard 0/2
    chatmill build recipe.yaml --out data/built --shard 1/2
    chatmill merge data/built
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from chatmill.cli import options
from chatmill.cli.options import argument


def command(
    out: Annotated[Path, argument("DIR", "The folder that the shares were built into.")],
    template: Annotated[str | None, options.TEMPLATE] = None,
    trust_template: Annotated[str | None, options.TRUST_TEMPLATE] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Join all chunks into the dataset."""
    from chatmill.cli.build import show_result
    from chatmill.compiler.run import merge_build

    show_result(merge_build(out, template=template, trust_template=trust_template), as_json=as_json)
