"""Look at a dataset in the browser: plots, every item token by token, search, and two datasets side by side.

DATASET is what chatmill inspect takes; with a second one the differences are shown too. The server listens on this
machine alone unless --host says otherwise. The printed address has a random token, which every request must bring, so
that no other user of the machine can read along. Nothing is downloaded and nothing leaves the machine. Ctrl-C stops it.
With --save nothing is served: the overview and some items are written as one page to keep or send.

Examples:
    chatmill view data/built --open
    chatmill view data/built --save overview.html -n 12
    chatmill view data/monday data/tuesday
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill import __version__
from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import shown_count
from chatmill.errors import ConfigError

if TYPE_CHECKING:
    from chatmill.look.viewer.comparison import OnProgress

MOST_CHANGED = 500
"""Changed records that a comparison takes apart."""


def command(
    dataset: Annotated[Path, argument("DATASET", "Folder or file of the dataset.")],
    other: Annotated[
        Path | None, argument("DATASET2", "Another dataset, to see what differs.", show_default=False)
    ] = None,
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
    other = None if other is None else options.dataset_folder(other)
    if save is not None:
        if other is not None:
            raise ConfigError("--save writes the page of one dataset: give one")
        _save(dataset, save, split, tokenizer, count, as_json=as_json)
        return
    import sys

    from chatmill.look.viewer.opened import open_viewed
    from chatmill.look.viewer.pages import Viewer
    from chatmill.look.viewer.server import serve
    from chatmill.tokenizer.load import load_tokenizer

    paths = [path for path in (dataset, other) if path is not None]
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    opened = open_viewed(paths, split=split, tokenizer=loaded)
    compare = (lambda on_progress: _compare(paths[0], paths[1], on_progress)) if len(paths) == 2 else None

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

    serve(Viewer(opened, compare=compare), ready, host=host, port=port, use_token=not no_token)


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


def _compare(a: Path, b: Path, on_progress: OnProgress) -> dict[str, Any]:
    from chatmill.prove.compare.diff import diff_datasets

    return diff_datasets(a, b, show=MOST_CHANGED, on_progress=on_progress).as_json()
