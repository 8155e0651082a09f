"""Compare two datasets: which records changed in ids or labels, and how.

Exit status: 0 when all records are equal, 1 when some differ, 2 when the two cannot be compared.

Examples:
    chatmill diff data/monday data/tuesday -n 3
    chatmill diff data/monday data/tuesday --json | jq .counts
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.rule import Rule
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.console import plain_console, plain_table
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from chatmill.prove.compare.changes import Line
    from chatmill.prove.compare.diff import ChangedRecord, DatasetDiff

WORDS = {
    "equal": "equal",
    "ids": "ids changed",
    "weights": "only weights changed",
    "kinds": "only kinds changed",
    "only_in_a": "only in A",
    "only_in_b": "only in B",
}
"""What is counted, by the name of the change."""
LONGEST = 600
"""Characters of a run that are shown without --full."""


def command(
    a: Annotated[Path, argument("A", "Folder of a dataset.")],
    b: Annotated[Path, argument("B", "Folder of the other dataset.")],
    show: Annotated[int, option("--count -n --show", "N", "How many changed records to show.", min=0)] = 5,
    full: Annotated[bool, options.FULL] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Compare two datasets."""
    from chatmill.prove.compare.diff import diff_datasets

    diff = diff_datasets(options.dataset_folder(a), options.dataset_folder(b), show=show)
    if as_json:
        typer.echo(json.dumps(diff.as_json()))
    else:
        console = plain_console(soft_wrap=True)
        _print_manifest(console, diff)
        _print_counts(console, diff)
        for record in diff.shown:
            _print_record(console, diff, record, None if full else LONGEST)
        _print_end(console, diff)
    if not diff.equal:
        raise typer.Exit(1)


def _print_manifest(console: Console, diff: DatasetDiff) -> None:
    console.print(Text.assemble(("- A ", "bold red"), str(diff.a)))
    console.print(Text.assemble(("+ B ", "bold green"), str(diff.b)))
    if diff.manifest:
        console.print("\nThe manifests differ in:", style="bold")
    for key, *values in diff.manifest:
        console.print(Text(f"  {key}"))
        for sign, value, style in zip("-+", values, ("red", "green"), strict=True):
            shown = value if isinstance(value, str) else "(none)" if value is None else json.dumps(value)
            console.print(Text(f"  {sign} {shown}", style=style))
    for note in diff.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    console.print()


def _print_counts(console: Console, diff: DatasetDiff) -> None:
    table = plain_table("", right=("A", "B", "B - A"))
    for name, old, new in zip(diff.totals_a._fields, diff.totals_a, diff.totals_b, strict=True):
        table.add_row(name, f"{old:,}", f"{new:,}", f"{new - old:+,}" if new != old else "0")
    console.print(table)
    console.print()
    counts = plain_table(right=("",))
    counts.show_header = False
    counts.add_column("")
    by_name = {str(change): count for change, count in diff.counts.items()}
    for name, words in WORDS.items():
        counts.add_row(f"{by_name[name]:,}", words, style="" if by_name[name] else "bright_black")
    if diff.moved:
        counts.add_row(f"{diff.moved:,}", "of these in another split")
    console.print(counts)


def _print_record(console: Console, diff: DatasetDiff, record: ChangedRecord, limit: int | None) -> None:
    places = [f"{place[0]} {place[1]:,}" for place in (record.place_a, record.place_b) if place is not None]
    sides = [side for side in (record.a, record.b) if side.records]
    parts = [
        visible(record.record_id or "(no record id)"),
        "in another split" if record.change == "equal" else WORDS[record.change],
        _arrow(places),
        f"{_arrow([f'{side.tokens:,}' for side in sides])} tokens",
        f"{_arrow([f'{side.trained:,}' for side in sides])} trained",
    ]
    console.print()
    console.print(Rule(Text(" \u00b7 ".join(parts)), align="left"))
    for line in record.lines:
        if line.sign == " ":
            console.print(Text(f"  ... {line.tokens:,} equal tokens ...", style="bright_black"))
        else:
            _print_line(console, line, _body(diff, line, limit))


def _arrow(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else " \u2192 ".join(values)


def _print_line(console: Console, line: Line, body: Text) -> None:
    """Print a run: sign, kind, trained mark, tokens; each line of a longer text has the sign."""
    from chatmill.core.kinds import RoleCode, kind_name, role_of
    from chatmill.look.item_lines import COLOURS, TRAINED_MARK

    label = "tokens" if line.kind is None else kind_name(line.kind)
    label += "" if line.weight in (0, 1) else f" x{line.weight:g}"
    style = COLOURS[RoleCode.NONE if line.kind is None else role_of(line.kind)]
    mark = TRAINED_MARK if line.weight > 0 else " "
    body.stylize_before(f"{style} underline" if line.weight > 0 else style)
    for part in body.split("\n"):
        gutter = f"{line.sign} {label:<22} {mark} "
        console.print(Text.assemble((gutter, "bold red" if line.sign == "-" else "bold green"), part))
        label = ""


def _body(diff: DatasetDiff, line: Line, limit: int | None) -> Text:
    """Decode a run, or show its ids if there is no tokenizer; long parts are cut."""
    from chatmill.look.decoder import Decoder, text_of

    tokenizer = diff.decoder(line)
    parts = [(False, text_of(line.ids, None))] if tokenizer is None else Decoder(tokenizer).parts(line.ids)
    text = Text()
    for is_control, part in parts:
        if is_control:
            text.append(f"\u00ab{visible(part)}\u00bb", style="bold")
        elif limit is None or len(part) <= limit:
            text.append(visible(part))
        else:
            text.append(visible(f"{part[:limit]} ... {len(part) - limit:,} more characters ..."))
    return text


def _print_end(console: Console, diff: DatasetDiff) -> None:
    console.print()
    if diff.equal:
        console.print("All records are equal.", style="bold green")
        return
    rest = diff.differing - len(diff.shown)
    hint = f"; {rest:,} of them are not shown (--count)" if rest else ""
    plural = " differs" if diff.differing == 1 else "s differ"
    console.print(f"{diff.differing:,} record{plural}{hint}.", style="bold red")
