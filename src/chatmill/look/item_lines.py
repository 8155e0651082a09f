"""An item as lines of a terminal: header, document boundaries and coloured runs; reads without colour at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich import get_console
from rich.text import Text

from chatmill.core.kinds import RoleCode, role_of
from chatmill.look.item_view import DocumentView, ItemView, RunView
from chatmill.look.safe_text import visible

COLOURS = {
    RoleCode.NONE: "bright_black",
    RoleCode.SYSTEM: "magenta",
    RoleCode.DEVELOPER: "bright_magenta",
    RoleCode.USER: "cyan",
    RoleCode.ASSISTANT: "green",
    RoleCode.TOOL: "yellow",
    RoleCode.IMAGE: "blue",
}
TRAINED_MARK = "\u258c"
OPENS, CLOSES = "\u00ab", "\u00bb"
"""Around control tokens, and not around text that spells one."""
GUTTER = 12
"""Columns for the role and the mark."""
INDENT = "  "
"""Before the lines of branches."""
SPAN_COLOURS = {"analysis": "yellow", "final": "green"}


def item_lines(view: ItemView, *, width: int = 80, most_lines: int = 0, show_ids: bool = False) -> Iterator[Text]:
    """Yield the lines of an item, none wider than `width`: header, facts, and `document_lines`."""
    yield from _fitted(Text(view.header, style="bold"), width, 0)
    if view.facts:
        yield from _fitted(Text(visible(view.facts, mark_newlines=False), style="cyan"), width, 0)
    if view.item.problem:
        yield Text(f"!! {view.item.problem}", style="bold red")
    yield from document_lines(view, width=width, most_lines=most_lines, show_ids=show_ids)


def document_lines(view: ItemView, *, width: int = 80, most_lines: int = 0, show_ids: bool = False) -> Iterator[Text]:
    """Yield the lines of an item's documents; rows show their boundaries.

    `most_lines` per message (0: all); the middle of a longer one is left out, and counted.
    """
    with_roles = view.item.kinds is not None or view.item.spans is not None
    for number, document in enumerate(view.documents):
        if view.name in ("block", "row"):
            yield from _fitted(Text(_boundary(number, document), style="bright_black"), width, 0)
        speaker = None
        branches = {branch.start: branch for branch in view.branches}
        indent = ""
        for group in _groups(document.runs):
            if group[0].start in branches:
                words = f"\u2514 {branches[group[0].start].words}"
                yield from _fitted(Text(words, style="bright_black"), width, 0)
                indent, speaker = INDENT, None
            text = _text(view, group, with_roles, show_ids)
            lines = _fitted(text, width - (GUTTER if with_roles else 2) - len(indent), most_lines)
            first = group[0]
            label = "" if speaker == (first.message, first.label) else first.label
            speaker = (first.message, first.label)
            marked = first.trained and (with_roles or view.item.weights is not None)
            mark = TRAINED_MARK if marked else ""
            for line in _with_gutter(lines, label, _colour(first), mark, with_roles):
                yield Text(indent) + line


def _boundary(number: int, document: DocumentView) -> str:
    trained = "" if document.trained is None else f", {document.trained} trained"
    label = "" if document.number is None else f" document {document.number}"
    label += "" if document.record_id is None else f" {visible(document.record_id, mark_newlines=False)}"
    last = document.start + len(document.ids) - 1
    return f"[{number}] tokens {document.start}-{last} ({len(document.ids)}{trained}){label}"


def _groups(runs: tuple[RunView, ...]) -> Iterator[list[RunView]]:
    """Group neighbouring runs of one message (or span) that have one weight, or none."""
    for _, group in groupby(runs, key=lambda run: (run.message, run.label, run.trained, run.weight or 0)):
        yield list(group)


def _text(view: ItemView, group: list[RunView], with_roles: bool, show_ids: bool) -> Text:
    """Style the text of a group; a control token looks unlike text that spells it."""
    colour = _colour(group[0])
    style = f"{colour} dim" if with_roles and not group[0].trained else colour
    shown = Text()
    for run in group:
        for is_control, text in view.parts(run):
            if is_control:
                shown.append(f"{OPENS}{visible(text)}{CLOSES}", f"{colour} reverse" if run.trained else "bold dim")
            else:
                shown.append(visible(text, mark_newlines=with_roles).replace("\t", "   "), style)
    weight = group[0].weight
    if weight and weight != 1:
        shown.append(f" ×{weight:.3g}", "bright_black")
    if show_ids and view.decoder is not None:
        ids = " ".join(str(i) for run in group for i in run.ids.tolist())
        shown.append(f"\n{ids}", "bright_black")
    return shown


def _colour(run: RunView) -> str:
    if run.span is not None:
        return SPAN_COLOURS.get(run.label, "bright_black")
    return COLOURS[role_of(run.kind)] if run.kind is not None else "default"


def _with_gutter(lines: list[Text], label: str, colour: str, mark: str, with_roles: bool) -> Iterator[Text]:
    """Put a margin before the lines of a group: who speaks, on the first line, and the mark of trained lines.

    Without roles the margin of lines that are not trained is `| `.
    """
    for line in lines:
        out = Text()
        out.append(f"{label:<{GUTTER - 2}}" if with_roles else "", style=f"bold {colour}")
        out.append(f"{mark or (' ' if with_roles else '|')} ", style="bold green" if mark else "bright_black")
        out.append_text(line)
        out.rstrip()
        yield out
        label = ""


def _fitted(text: Text, width: int, most_lines: int) -> list[Text]:
    """Wrap a text; the middle of more than `most_lines` becomes one line that counts what is left out."""
    lines = list(text.wrap(get_console(), width, overflow="fold"))
    for line in lines:
        line.rstrip()
    if len(lines) > 1 and not lines[-1]:
        lines.pop()  # the newline at the end of a message does not make a line of its own
    if not most_lines or len(lines) <= most_lines + 1:
        return lines
    left_out = Text(f"... {len(lines) - most_lines} lines left out ...", style="italic bright_black")
    return [*lines[: (most_lines + 1) // 2], left_out, *lines[len(lines) - most_lines // 2 :]]
