"""Show the items of a dataset: tokens, documents, text and exactly what is trained.

DATASET is a folder of episodes (from chatmill build or export), one split of it, a
distillation set, or packed rows: a .parquet or .arrow file, a folder of them, or a folder made by
Dataset.save_to_disk. Exit status 1 when a block's boundaries cannot be right.

Examples:
    chatmill inspect data/built --random --seed 3
    chatmill inspect data/built --id gsm8k-00012
    chatmill inspect packed --block 7 --tokenizer ./Qwen3-0.6B
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.cli.statuses import Status

if TYPE_CHECKING:
    from chatmill.look.dataset import LookDataset
    from chatmill.look.item_view import ItemView
    from chatmill.look.items import LookSplit
    from chatmill.look.terminal import Screen


LINES = 20
"""Lines of a message that are shown without --lines."""


def command(
    dataset: Annotated[Path, argument("DATASET", "Folder or file of the dataset.")],
    split: Annotated[str | None, options.SPLIT] = None,
    episode: Annotated[int | None, option("--episode", "N", "Episode N, also of packed rows.")] = None,
    record_id: Annotated[str | None, option("--id", "ID", "All items of one record.")] = None,
    row: Annotated[int | None, option("--row --block", "N", "Packed row N.")] = None,
    random: Annotated[bool, flag("--random", "Items drawn at random.")] = False,
    seed: Annotated[int, option("--seed", "N", "Seed of --random.", min=0)] = 0,
    examples: Annotated[int, option("--examples -n", "N", "How many items to show.", min=1)] = 5,
    start: Annotated[int, option("--start", "N", "The first item to show.", min=0)] = 0,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    lines: Annotated[int, option("--lines", "N", "Lines per message; 0 shows all.", min=0)] = LINES,
    ids: Annotated[bool, flag("--ids", "Show the token ids too.")] = False,
    no_pager: Annotated[bool, flag("--no-pager", "Never page, even in a terminal.")] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Show some items of a dataset."""
    from chatmill.look.choose import choose
    from chatmill.look.dataset import open_for_looking
    from chatmill.look.item_view import view_item
    from chatmill.look.terminal import Screen

    opened = open_for_looking(dataset, None, tokenizer=tokenizer)
    shown_split, items = choose(
        opened, episode=episode, row=row, record_id=record_id, random=random, seed=seed, split_name=split, start=start,
        examples=examples,
    )  # fmt: skip
    decoder = opened.decoder
    views = (view_item(item, decoder, opened.layout.item) for item in items)
    problems: list[str] = []
    if opened.decoder_problem and (decoder is not None or opened.about):
        typer.secho(opened.decoder_problem, fg="yellow", err=True)
    if as_json:
        for view in views:
            problems += [view.problem] if view.problem else []
            typer.echo(json.dumps(view.as_json(), ensure_ascii=False))
    else:
        screen = Screen(paged=not no_pager)
        screen.show(_lines(screen, views, opened, shown_split, lines, ids, problems))
    if problems:
        raise typer.Exit(Status.FOUND)


def _lines(
    screen: Screen,
    views: Iterator[ItemView],
    opened: LookDataset,
    split: LookSplit,
    most_lines: int,
    show_ids: bool,
    problems: list[str],
) -> Iterator[Text]:
    """What is printed, item by item; what is wrong with boundaries is noted in `problems`."""
    from chatmill.look.item_lines import item_lines
    from chatmill.look.items import LookLayout
    from chatmill.look.kd import ALIGNMENT

    if split.layout is LookLayout.KD:
        yield from (Text(line, style="dim") for line in textwrap.wrap(ALIGNMENT, screen.width))
        yield Text()
    shown = 0
    for view in views:
        shown += 1
        problems += [view.problem] if view.problem else []
        yield from item_lines(
            view, width=screen.width, most_lines=most_lines, show_ids=show_ids, ascii_only=screen.ascii_only
        )
        yield Text()
    yield Text(_closing(shown, opened, split))


def _closing(shown: int, opened: LookDataset, split: LookSplit) -> str:
    """Such as `5 of 38 episodes of train shown.`, and what there is beside them."""
    several = len(opened.splits) > 1
    words = f"{shown:,} of {len(split):,} {split.layout.item}s{f' of {split.name}' if several else ''} shown."
    if several:
        words += f" Other splits: {', '.join(name for name in opened.splits if name != split.name)}."
    if opened.decoder is None:
        words += " Ids only: --tokenizer gives the text."
    return words
