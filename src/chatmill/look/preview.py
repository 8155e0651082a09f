"""Conversations as coloured runs in the terminal: who speaks, what is control, and exactly what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from chatmill.core.kinds import RoleCode, kind_name, role_of, roles_of
from chatmill.core.tokens import Tokens
from chatmill.look.safe_text import visible as visible
from chatmill.tokenizer.protocol import Tokenizer

COLOURS = {
    RoleCode.NONE: "bright_black",
    RoleCode.SYSTEM: "magenta",
    RoleCode.DEVELOPER: "bright_magenta",
    RoleCode.USER: "cyan",
    RoleCode.ASSISTANT: "green",
    RoleCode.TOOL: "yellow",
}
TRAINED_MARK = "\u258c"
"""Stands at the left of every line that holds trained tokens."""
GUTTER = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring tokens of one kind, message and weight."""

    kind: int
    message: int
    weight: float
    ids: NDArray[np.int32]
    text: str
    """The decoded tokens."""

    @property
    def trained(self) -> bool:
        """Whether these tokens count as targets."""
        return self.weight > 0


def runs_of(tokens: Tokens, run_weights: NDArray[np.float32], tokenizer: Tokenizer) -> list[Run]:
    """The runs of one conversation (a batch of one), empty ones left out."""
    assert len(tokens) == 1
    runs: list[Run] = []
    for index, (kind, message, weight) in enumerate(
        zip(tokens.run_kinds.tolist(), tokens.run_messages.tolist(), run_weights.tolist(), strict=True)
    ):
        ids = tokens.ids[tokens.run_offsets[index] : tokens.run_offsets[index + 1]]
        if len(ids):
            runs.append(Run(kind=kind, message=message, weight=weight, ids=ids, text=tokenizer.decode(ids)))
    return runs


def runs_as_json(runs: list[Run]) -> list[dict[str, Any]]:
    """Runs for a script: kind, message index, weight, ids and text."""
    return [
        {
            "kind": kind_name(run.kind),
            "message": run.message,
            "weight": run.weight,
            "ids": run.ids.tolist(),
            "text": run.text,
        }
        for run in runs
    ]


class ConversationView:
    """One conversation, printable by rich: a gutter with role and trained mark, then the text."""

    def __init__(
        self, runs: list[Run], tokenizer: Tokenizer, *, show_ids: bool = False, max_characters: int | None = None
    ) -> None:
        """`max_characters` cuts the shown text of each run; None shows all."""
        self._lines = [
            line for group in _groups(runs) for line in _group_lines(group, tokenizer, show_ids, max_characters)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - GUTTER - 2)
        for role, trained, text in self._lines:
            colour = COLOURS[role]
            label = role.name.lower() if role is not RoleCode.NONE else ""
            for wrapped in text.wrap(console, width, no_wrap=False, tab_size=4):
                wrapped.rstrip()
                yield Segment(f"{label:<{GUTTER - 2}}", Style.parse(f"bold {colour}"))
                yield Segment(f"{TRAINED_MARK if trained else ' '} ", Style.parse("bold green"))
                yield from wrapped.render(console, end="\n")
                label = ""


Line = tuple[RoleCode, bool, Text]


def _groups(runs: list[Run]) -> Iterator[list[Run]]:
    """Neighbouring runs of one message that are all trained, or all not."""
    group: list[Run] = []
    for run in runs:
        if group and (run.message, run.trained, role_of(run.kind)) != (
            group[-1].message,
            group[-1].trained,
            role_of(group[-1].kind),
        ):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _group_lines(group: list[Run], tokenizer: Tokenizer, show_ids: bool, limit: int | None) -> Iterator[Line]:
    role, trained = role_of(group[0].kind), group[0].trained
    control_ids = set(tokenizer.control_ids.values())
    text = Text()
    style = COLOURS[role] if trained else f"{COLOURS[role]} dim"
    for run in group:
        for is_control, part in control_parts(run, control_ids, tokenizer):
            if is_control:
                text.append(f"\u00ab{visible(part)}\u00bb", style="bold reverse" if trained else "bold dim")
            else:
                shown = part if limit is None or len(part) <= limit else part[:limit]
                text.append(visible(shown), style=f"{style} underline" if trained else style)
                if len(shown) < len(part):
                    text.append(f" ... {len(part) - len(shown):,} more characters ...", style="italic bright_black")
    yield role, trained, text
    if show_ids:
        ids = np.concatenate([run.ids for run in group]).tolist()
        yield role, trained, Text(" ".join(map(str, ids)), style="bright_black")


def control_parts(run: Run, control_ids: set[int], tokenizer: Tokenizer) -> Iterator[tuple[bool, str]]:
    """The run as (is control token, text) parts; decoded in stretches, so that no character is torn apart."""
    is_control = np.isin(run.ids, list(control_ids))
    borders = np.flatnonzero(np.diff(is_control)) + 1
    for stretch in np.split(np.arange(len(run.ids)), borders):
        if is_control[stretch[0]]:
            for token in run.ids[stretch].tolist():
                yield True, tokenizer.decode([token])
        else:
            yield False, tokenizer.decode(run.ids[stretch])


def role_counts(kinds: NDArray[np.uint8], weights: NDArray[np.float32]) -> dict[str, dict[str, int]]:
    """Tokens and trained tokens per role; tokens of no message are `document`."""
    counts: dict[str, dict[str, int]] = {}
    roles = roles_of(kinds)
    for role in RoleCode:
        mine = roles == role
        if mine.any():
            name = "document" if role is RoleCode.NONE else role.name.lower()
            counts[name] = {"tokens": int(mine.sum()), "trained": int((weights[mine] > 0).sum())}
    return counts


def summary_table(counts: dict[str, dict[str, int]], title: str) -> Table:
    """Tokens and trained tokens per role, with the trained share drawn as a bar."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("role")
    table.add_column("tokens", justify="right")
    table.add_column("trained", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = {key: sum(count[key] for count in counts.values()) for key in ("tokens", "trained")}
    for name, count in [*counts.items(), ("all", total)]:
        share = count["trained"] / count["tokens"] if count["tokens"] else 0.0
        colour = COLOURS.get(RoleCode.__members__.get(name.upper(), RoleCode.NONE), "white")
        filled = round(share * 20)
        bar = Text("\u2588" * filled, style="green") + Text("\u2591" * (20 - filled), style="bright_black")
        table.add_row(
            Text(name, style=f"bold {colour}"), f"{count['tokens']:,}", f"{count['trained']:,}", f"{share:.1%}", bar
        )
    return table
