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
        option("--branch", "N", "Of trees: the row of branch N alone, 0 for the trunk.", rich_help_panel="Datasets"),
    ] = None,
    record_id: Annotated[
        str | None, option("--id", "ID", "All items of one record.", rich_help_panel="Datasets")
    ] = None,
    random: Annotated[
        int | None, option("--random", "SEED", "Items drawn at random.", min=0, rich_help_panel="Datasets")
    ] = None,
) -> None:
    """Show some conversations of a file, or some items of a dataset."""
    from chatmill.look.dataset import is_dataset

    rendering = {"--template": template, "--policy": policy, "--shape": shape, "--set": settings}
    choosing = {
        "--split": split,
        "--episode": episode,
        "--row": row,
        "--branch": branch,
        "--id": record_id,
        "--random": random,
    }
    how: dict[str, Any] = {"examples": examples, "start": start, "most_lines": 0 if full else LINES, "ids": ids}
    if is_dataset(data):
        way_out = "is a dataset, which is shown as it is stored: remove {}, or give the conversations it was built from"
        _refuse(data, rendering, way_out)
        chosen = {"episode": episode, "row": row, "record_id": record_id, "random": random}
        _show_dataset(Path(data), tokenizer, split, chosen, branch=branch, as_json=as_json, **how)
        return
    _refuse(data, choosing, "holds conversations, which have no splits, rows or ids yet: remove {}, or build it first")
    from chatmill.cli.raw_files import show_conversations

    named = options.shape_of(shape)
    keys = {"tokenizer": tokenizer, "template": template, "policy": policy, **options.settings(settings)}
    show_conversations(data, keys, named, as_json=as_json, **how)


def _refuse(data: str, idle: dict[str, Any], words: str) -> None:
    if given := [name for name, value in idle.items() if value is not None]:
        raise ConfigError(f"{data} {words.format(', '.join(given))}")


def _show_dataset(
    path: Path,
    tokenizer: str | None,
    split: str | None,
    chosen: dict[str, Any],
    *,
    branch: int | None,
    examples: int,
    start: int,
    most_lines: int,
    ids: bool,
    as_json: bool,
) -> None:
    from chatmill.look.dataset import open_for_looking
    from chatmill.look.item_view import view_item
    from chatmill.look.terminal import Screen

    opened = open_for_looking(path, None, tokenizer=tokenizer)
    shown_split, items = opened.choose(split, start=start, examples=examples, **chosen)
    decoder = opened.decoder
    shown = items if branch is None else (item.row(branch) for item in items)
    views = (view_item(item, decoder, shown_split.layout.item) for item in shown)
    problems: list[str] = []
    if opened.decoder_problem and (decoder is not None or opened.about):
        typer.secho(opened.decoder_problem, fg="yellow", err=True)
    if as_json:
        for view in views:
            problems += [view.problem] if view.problem else []
            typer.echo(json.dumps(view.as_json(), ensure_ascii=False))
    else:
        screen = Screen()
        screen.show(_lines(screen.width, views, opened, shown_split, most_lines, ids, problems))
    if problems:
        raise typer.Exit(Status.FOUND)


def _lines(
    width: int,
    views: Iterator[ItemView],
    opened: LookDataset,
    split: LookSplit,
    most_lines: int,
    show_ids: bool,
    problems: list[str],
) -> Iterator[Text]:
    """What is printed, item by item; what is wrong with boundaries is noted in `problems`."""
    from chatmill.look.item_lines import item_lines
    from chatmill.look.splits import LookLayout

    if split.layout is LookLayout.KD:
        yield from (Text(line, style="dim") for line in textwrap.wrap(ALIGNMENT, width))
        yield Text()
    shown = 0
    for view in views:
        shown += 1
        problems += [view.problem] if view.problem else []
        yield from item_lines(view, width=width, most_lines=most_lines, show_ids=show_ids)
        yield Text()
    yield Text(_closing(shown, opened, split))


def _closing(shown: int, opened: LookDataset, split: LookSplit) -> str:
    """Such as `5 of 38 episodes of train shown.`, and what else there is."""
    several = len(opened.splits) > 1
    words = f"{shown:,} of {len(split):,} {split.layout.item}s{f' of {split.name}' if several else ''} shown."
    if several:
        words += f" Other splits: {', '.join(name for name in opened.splits if name != split.name)}."
    if opened.decoder is None:
        words += " Ids only: --tokenizer gives the text."
    return words
