"""Look at a dataset in the browser: plots, every item token by token, and search.

DATASET is what chatmill inspect takes. The server listens on this
machine alone unless --host says otherwise. The printed address has a random token, which every request must bring, so
that no other user of the machine can read along. Nothing is downloaded and nothing leaves the machine. Ctrl-C stops it.
With --save nothing is served: the overview and some items are written as one page to keep or send.

Examples:
    chatmill view data/built --open
    chatmill view data/built --save overview.html -n 12
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import shown_count


def command(
    dataset: Annotated[Path, argument("DATASET", "Folder or file of the dataset.")],
    split: Annotated[str | None, options.SPLIT] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    host: Annotated[str, option("--host", "NAME", "Listen here.")] = "127.0.0.1",
    port: Annotated[
        int | None, option("--port", "N", "Port; 0: any; default: a free one from 8420 on.", min=0, max=65535)
    ] = None,
    no_token: Annotated[bool, flag("--no-token", "Let every user of this machine look, without a token.")] = False,
    open_browser: Annotated[bool, flag("--open", "Open the browser.")] = False,
    save: Annotated[Path | None, option("--save", "FILE", "Write the overview and some items as one page.")] = None,
    count: Annotated[int, option("--count -n", "N", "Items in the saved page.", min=0)] = 6,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Look at a dataset in the browser."""
    dataset = options.dataset_folder(dataset)
    if save is not None:
        _save(dataset, save, split, tokenizer, count, as_json=as_json)
        return
    import sys

    from chatmill.look.dataset import open_for_looking
    from chatmill.look.viewer.opened import open_splits
    from chatmill.look.viewer.pages import Viewer
    from chatmill.look.viewer.server import serve
    from chatmill.tokenizer.load import load_tokenizer

    loaded = load_tokenizer(tokenizer) if tokenizer else None
    look = open_for_looking(dataset, [split] if split else None, tokenizer=loaded)

    def ready(url: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": url}))
        else:
            typer.secho(url, bold=True)
            typer.echo("Ctrl-C stops the viewer.")
        sys.stdout.flush()
        if open_browser:
            import webbrowser

            webbrowser.open(url)

    serve(Viewer(open_splits(look)), ready, host=host, port=port, use_token=not no_token)


def _save(dataset: Path, out: Path, split: str | None, tokenizer: str | None, count: int, *, as_json: bool) -> None:
    from chatmill.look.dataset import open_for_looking
    from chatmill.look.pages import check_place, write_page
    from chatmill.look.viewer.overview import saved_page

    check_place(out)
    opened = open_for_looking(dataset, [split] if split else None, tokenizer=tokenizer)
    with shown_count(as_json) as show:
        page = saved_page(opened, items=count, version=__version__, progress=show and partial(show, "reading tokens"))
    write_page(out, page)
    size = len(page.encode())
    typer.echo(json.dumps({"page": str(out), "bytes": size}) if as_json else f"{out}: {size:,} bytes")
