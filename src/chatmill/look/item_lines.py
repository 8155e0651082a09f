"""An item as lines of a terminal: header, document boundaries and coloured runs; reads without colour at 80 columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len, chop_cells
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
}
TRAINED_MARK = "\u258c"
ASCII_MARK = ">"
OPENS, CLOSES = "\u00ab", "\u00bb"
"""Around control tokens, and not around text that spells one."""
GUTTER = 12
"""Columns for the role and the mark."""
SPAN_COLOURS = {"analysis": "yellow", "final": "green"}

Piece = tuple[str, str]
"""Text and its style."""


def item_lines(
    view: ItemView, *, width: int = 80, most_lines: int = 0, show_ids: bool = False, ascii_only: bool = False
) -> Iterator[Text]:
    """The lines of one item, none wider than `width`: header, facts, and `document_lines`."""
    yield from (Text(line, style="bold") for line in _cut(view.header, width))
    if view.facts:
        yield from (Text(line, style="cyan") for line in _cut(visible(view.facts, mark_newlines=False), width))
    if view.problem:
        yield Text(f"!! {view.problem}", style="bold red")
    yield from document_lines(view, width=width, most_lines=most_lines, show_ids=show_ids, ascii_only=ascii_only)


def document_lines(
    view: ItemView, *, width: int = 80, most_lines: int = 0, show_ids: bool = False, ascii_only: bool = False
) -> Iterator[Text]:
    """The documents of an item, of rows with their boundaries.

    `most_lines` per message (0: all); the middle of a longer one is left out, and counted.
    """
    with_roles = view.item.kinds is not None or view.item.spans is not None
    for number, document in enumerate(view.documents):
        if view.name in ("block", "row"):
            yield from (Text(line, style="bright_black") for line in _cut(_boundary(number, document), width))
        speaker = None
        for group in _groups(document.runs):
            pieces = list(_pieces(view, group, with_roles, show_ids))
            lines = _fitted(pieces, width - (GUTTER if with_roles else 2), most_lines)
            same = speaker == (group[0].message, group[0].label)
            speaker = (group[0].message, group[0].label)
            gutter = _Gutter(
                label="" if same else group[0].label,
                colour=_colour(group[0]),
                roles=with_roles,
                mark=(ASCII_MARK if ascii_only else TRAINED_MARK)
                if group[0].trained and (with_roles or view.item.weights is not None)
                else "",
            )
            yield from gutter.before(lines)


def _boundary(number: int, document: DocumentView) -> str:
    trained = "" if document.trained is None else f", {document.trained} trained"
    known = "" if document.number is None else f" document {document.number}"
    known += "" if document.record_id is None else f" {visible(document.record_id, mark_newlines=False)}"
    last = document.start + len(document.ids) - 1
    return f"[{number}] tokens {document.start}-{last} ({len(document.ids)}{trained}){known}"


def _groups(runs: tuple[RunView, ...]) -> Iterator[list[RunView]]:
    """Neighbouring runs of one message (or span) that are all trained, or all not."""
    for _, group in groupby(runs, key=lambda run: (run.message, run.label, run.trained)):
        yield list(group)


def _pieces(view: ItemView, group: list[RunView], with_roles: bool, show_ids: bool) -> Iterator[Piece]:
    """The text of a group in styled pieces; control tokens look unlike text that spells one."""
    colour = _colour(group[0])
    style = f"{colour} dim" if with_roles and not group[0].trained else colour
    for run in group:
        for is_control, text in view.parts(run):
            if is_control:
                yield f"{OPENS}{visible(text)}{CLOSES}", f"{colour} reverse" if run.trained else "bold dim"
            else:
                yield visible(text, mark_newlines=with_roles).replace("\t", "   "), style
    if show_ids and view.decoder is not None:
        ids = " ".join(str(i) for run in group for i in run.ids.tolist())
        yield f"\n{ids}", "bright_black"


def _colour(run: RunView) -> str:
    if run.span is not None:
        return SPAN_COLOURS.get(run.label, "bright_black")
    return COLOURS[role_of(run.kind)] if run.kind is not None else "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gutter:
    """The left margin of the lines of a group."""

    label: str
    """Who speaks; empty where it was said above."""
    colour: str
    roles: bool
    """False: no roles are stored, and the margin is `| `."""
    mark: str
    """Of trained lines; else empty."""

    def before(self, lines: list[Text]) -> Iterator[Text]:
        """The lines with their gutter."""
        label = self.label
        for line in lines:
            out = Text()
            out.append(f"{label:<{GUTTER - 2}}" if self.roles else "", style=f"bold {self.colour}")
            out.append(
                f"{self.mark or (' ' if self.roles else '|')} ", style="bold green" if self.mark else "bright_black"
            )
            out.append_text(line)
            out.rstrip()
            yield out
            label = ""


def _fitted(pieces: list[Piece], width: int, most_lines: int) -> list[Text]:
    """Pieces cut into lines; the middle of more than `most_lines` is one line that counts what is left out."""
    plain = "".join(text for text, _ in pieces)
    begins: list[int] = []
    place = 0
    for text, _ in pieces:
        begins.append(place)
        place += len(text)
    spans = list(_line_spans(plain, width))
    if len(spans) > 1 and spans[-1][0] == spans[-1][1]:
        spans.pop()  # the newline at the end of a message does not make a line of its own
    head = tail = spans
    left_out = 0
    if most_lines and len(spans) > most_lines + 1:
        left_out = len(spans) - most_lines
        head, tail = spans[: (most_lines + 1) // 2], spans[len(spans) - most_lines // 2 :]
    lines = [_styled(plain, span, pieces, begins) for span in head]
    if left_out:
        lines.append(Text(f"... {left_out} lines left out ...", style="italic bright_black"))
        lines += [_styled(plain, span, pieces, begins) for span in tail]
    return lines


def _styled(plain: str, span: tuple[int, int], pieces: list[Piece], begins: list[int]) -> Text:
    """A stretch of the text with the styles of the pieces that it lies in."""
    first, last = span
    line = Text()
    at = max(0, bisect_right(begins, first) - 1)
    while at < len(pieces) and begins[at] < last:
        text, style = pieces[at]
        line.append(plain[max(first, begins[at]) : min(last, begins[at] + len(text))], style=style)
        at += 1
    return line


def _line_spans(text: str, width: int) -> Iterator[tuple[int, int]]:
    """First character and end of each line: cut at newlines, and to `width` columns where a good place is near."""
    begin = 0
    for line in text.split("\n"):
        yield from ((begin + first, begin + last) for first, last in _wrapped(line, width))
        begin += len(line) + 1


def _wrapped(line: str, width: int) -> Iterator[tuple[int, int]]:
    """The parts of one line, cut at spaces and before control tokens; wide characters count as two columns."""
    first = 0
    while len(line) - first > width or cell_len(line[first:]) > width:
        part = chop_cells(line[first : first + width + 1], width)[0]
        place = max(part.rfind(" ") + 1, part.rfind(OPENS))
        length = place if place > len(part) // 2 else max(1, len(part))
        yield first, first + length
        first += length
    yield first, len(line)


def _cut(text: str, width: int) -> list[str]:
    return [text[first:last].rstrip() for first, last in _line_spans(text, width)]
