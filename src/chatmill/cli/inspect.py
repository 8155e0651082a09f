"""Show conversations or items of a dataset as tokens, with exactly what is trained.

DATA is a file, folder or URL of conversations (- for standard input), which are read, rendered and labelled as
chatmill build would; or a dataset, shown as it is stored: what chatmill build, export or synth-kd wrote, one split of
it, or rows of token ids: .parquet and .arrow files, or a folder made by Dataset.save_to_disk.
Exit status 1 if the boundaries of a row cannot be right.

Examples:
    chatmill inspect chats.jsonl
    chatmill inspect chats.jsonl -t ./Qwen3-0.6B -n 2 --set date=2026-01-31
    chatmill inspect data/built --random 3
    chatmill inspect data/built --id gsm8k-00012
    chatmill inspect packed.parquet --row 7 --tokenizer ./Qwen3-0.6B
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.cli.statuses import Status
from chatmill.errors import ConfigError

if TYPE_CHECKING:
    from chatmill.look.dataset import LookDataset
    from chatmill.look.item_view import ItemView
    from chatmill.look.splits import LookSplit


ALIGNMENT = (
    "Marked tokens count in the loss: each is predicted at the position before it, which is where the files hold its "
    "mask and span."
)
"""What a reader of a distillation set must know of the two alignments."""
LINES = 20
"""Lines of a message that are shown without --full."""


def command(
    data: Annotated[str, argument("DATA", "Conversations, or a dataset.")],
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    examples: Annotated[int, option("--examples -n", "N", "How many to show.", min=1)] = 5,
    start: Annotated[int, option("--start", "N", "The first one to show, from 0.", min=0)] = 0,
    full: Annotated[bool, options.FULL] = False,
    ids: Annotated[bool, flag("--ids", "Show the token ids too.")] = False,
    as_json: Annotated[bool, options.JSON] = False,
    template: Annotated[str | None, options.grouped(options.TEMPLATE, "Conversations")] = None,
    policy: Annotated[str | None, options.grouped(options.POLICY, "Conversations")] = None,
    shape: Annotated[list[str] | None, options.grouped(options.SHAPE, "Conversations")] = None,
    settings: Annotated[list[str] | None, options.grouped(options.SET, "Conversations")] = None,
    split: Annotated[str | None, options.grouped(options.SPLIT, "Datasets")] = None,
    episode: Annotated[
        int | None, option("--episode", "N", "Episode N, also of packed rows.", rich_help_panel="Datasets")
    ] = None,
    row: Annotated[int | None, option("--row", "N", "Packed row N.", rich_help_panel="Datasets")] = None,
    branch: Annotated[
        int | None,
        option("--branch", "N", "For trees: the row of branch N alone, 0 for the trunk.", rich_help_panel="Datasets"),
    ] = None,
    record_id: Annotated[
        str | None, option("--id", "ID", "All items of one record.", rich_help_panel="Datasets")
    ] = None,
    random: Annotated[
        int | None, option("--random", "SEED", "Items drawn at random.", min=0, rich_help_panel="Datasets")
    ] = None,
) -> None:
    """Show some conversations of a file, or some items of a dataset."""
    from chatmill.look.dataset import is_dataset, open_for_looking
    from chatmill.look.item_view import view_item
    from chatmill.look.terminal import screen, show
    from chatmill.read.folders import is_readable

    rendering = {"--template": template, "--policy": policy, "--shape": shape, "--set": settings}
    choosing = {"--split": split, "--episode": episode, "--row": row, "--branch": branch, "--id": record_id}
    most_lines = 0 if full else LINES
    if not is_readable(data):
        data = str(options.dataset_folder(Path(data)))
    if not is_dataset(data):
        from chatmill.cli.raw_files import show_conversations

        words = "holds conversations, which have no splits, rows or ids yet: remove {}, or build it first"
        _refuse(data, {**choosing, "--random": random}, words)
        keys = {"tokenizer": tokenizer, "template": template, "policy": policy, **options.settings(settings)}
        how: dict[str, Any] = {"examples": examples, "start": start, "most_lines": most_lines, "ids": ids}
        show_conversations(data, keys, options.shape_of(shape), as_json=as_json, **how)
        return
    words = "is a dataset, which is shown as it is stored: remove {}, or give the conversations it was built from"
    _refuse(data, rendering, words)
    opened = open_for_looking(data, tokenizer=tokenizer)
    shown_split, chosen = opened.choose(
        split, episode=episode, row=row, record_id=record_id, random=random, start=start, examples=examples
    )
    if opened.decoder_problem and (opened.decoder is not None or opened.about):
        typer.secho(opened.decoder_problem, fg="yellow", err=True)
    problems: list[str] = []

    def views() -> Iterator[ItemView]:
        """Yield the views one at a time; note wrong boundaries."""
        for item in chosen:
            problems.extend([item.problem] if item.problem else [])
            yield view_item(item if branch is None else item.row(branch), opened.decoder, shown_split.layout.item)

    if as_json:
        for view in views():
            typer.echo(json.dumps(view.as_json(), ensure_ascii=False))
    else:
        console = screen()
        show(console, _lines(console.width, views(), opened, shown_split, most_lines, ids))
    if problems:
        raise typer.Exit(Status.FOUND)


def _refuse(data: str, idle: dict[str, Any], words: str) -> None:
    if names := [name for name, value in idle.items() if value is not None]:
        raise ConfigError(f"{data} {words.format(', '.join(names))}")


def _lines(
    width: int, views: Iterator[ItemView], opened: LookDataset, split: LookSplit, most_lines: int, show_ids: bool
) -> Iterator[Text]:
    """Yield what is printed, item by item, and how many of how many were shown."""
    from chatmill.look.item_lines import item_lines
    from chatmill.look.splits import LookLayout

    if split.layout is LookLayout.KD:
        yield from (Text(line, style="dim") for line in textwrap.wrap(ALIGNMENT, width))
        yield Text()
    shown = 0
    for view in views:
        shown += 1
        yield from item_lines(view, width=width, most_lines=most_lines, show_ids=show_ids)
        yield Text()
    several = len(opened.splits) > 1
    words = f"{shown:,} of {len(split):,} {split.layout.item}s{f' of {split.name}' if several else ''} shown."
    if several:
        words += f" Other splits: {', '.join(name for name in opened.splits if name != split.name)}."
    yield Text(words + ("" if opened.decoder is not None else " Ids only: --tokenizer gives the text."))
