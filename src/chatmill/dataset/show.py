"""How a dataset and one of its conversations look in a notebook and at a prompt."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.console import plain_console
from chatmill.core.kinds import kind_name
from chatmill.core.ledger import LEFT_OUT, Ledger
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.words import counted
from chatmill.look.decoder import Decoder
from chatmill.look.items import Item
from chatmill.look.ledger import losses
from chatmill.look.safe_text import visible

MOST_TOKENS = 4096
"""Tokens of an episode that a notebook shows."""


class ShownEpisode:
    """One conversation as it is trained: its tokens, what is a target, and its text in colour."""

    def __init__(self, item: Item, decoder: Decoder | None, place: str = "") -> None:
        """`place`: where its record is, as Python counts it; default: its record id."""
        self._item, self._decoder, self._place = item, decoder, place

    @property
    def index(self) -> int:
        """Its number in its split."""
        return self._item.number

    @property
    def ids(self) -> NDArray[np.integer]:
        """Token ids; not to be written to."""
        return self._item.ids

    @property
    def weights(self) -> NDArray[Any]:
        """How much each token counts as a target; 0: it is context."""
        weights = self._item.weights
        return np.ones(len(self._item), dtype=np.uint8) if weights is None else weights

    @property
    def labels(self) -> NDArray[np.int64]:
        """The ids where a token is a target, -100 elsewhere: as Hugging Face's trainers have them, not shifted."""
        return np.where(self._item.is_trained, self._item.ids.astype(np.int64), IGNORE_INDEX)

    @property
    def kinds(self) -> list[str] | None:
        """What each token is, such as `assistant.content`; None where kinds are not stored."""
        return None if self._item.kinds is None else [kind_name(code) for code in self._item.kinds.tolist()]

    @property
    def record_id(self) -> str | None:
        """The id of its record, or the record's place where it has none."""
        return self._item.record_id

    @property
    def source(self) -> str | None:
        """The source of its record."""
        return self._item.source

    @property
    def trained(self) -> int:
        """Tokens that are targets."""
        return self._item.trained

    @property
    def text(self) -> str:
        """All tokens as text, control tokens spelled out."""
        return "" if self._decoder is None else self._decoder.text(self._item.ids)

    def __len__(self) -> int:
        return len(self._item)

    @property
    def _title(self) -> str:
        facts = [f"episode {self.index:,} of {self._item.split}", self._place or self.record_id]
        facts += [
            f"{len(self):,} tokens",
            f"{self.trained:,} trained",
            f"source {self.source}" if self.source else None,
        ]
        return visible(" · ".join(filter(None, facts)), mark_newlines=False)

    def __repr__(self) -> str:
        """Coloured in a terminal; what is trained has a bar, and control tokens are in «»."""
        from chatmill.look.item_lines import document_lines  # rich takes its time
        from chatmill.look.item_view import view_item
        from chatmill.look.terminal import width_of

        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        width = width_of(sys.stdout)
        console = plain_console(file=io.StringIO(), width=width, colour=colour)
        console.print(self._title)
        for line in document_lines(view_item(self._item, self._decoder, "episode"), width=width):
            console.print(line, soft_wrap=True)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        from chatmill.look.item_view import view_item
        from chatmill.look.pages import page_of

        view = view_item(self._item, self._decoder, "episode")
        messages = [said for _, _, shown in view.window(0, MOST_TOKENS) for said in shown]
        notes = [f"{len(self) - MOST_TOKENS:,} more tokens"] if len(self) > MOST_TOKENS else []
        shown = {"view": view, "messages": messages, "visible": visible}
        return page_of("notebook.html", title=self._title, notes=notes, **shown)


class Summary:
    """A build in a few lines: what was read, what came out of it, and what was left out and why."""

    def __init__(self, manifest: Mapping[str, Any], trained: Mapping[str, int]) -> None:
        """`trained` has the trained tokens of each split."""
        ledger = Ledger.from_json(manifest["ledger"])
        read, built = ledger.total_records("read"), ledger.total_records("built")
        left = ledger.reasons(*LEFT_OUT).total()
        self.headline = f"Dataset: {counted(read, 'record')} read, {built:,} built, {left:,} left out"
        self.splits = [
            (name, entry["episodes"], entry["tokens"], trained[name], trained[name] / max(1, entry["tokens"]))
            for name, entry in manifest["splits"].items()
        ]
        """Name, episodes, tokens, trained tokens and their share."""
        self.losses = losses(ledger)
        self.cost = ledger.cost_of_turns()
        packing = manifest["recipe"]["packing"]
        names = {"model": manifest["tokenizer"]["given_as"], "template": manifest["template"]["name"]}
        parts = [f"{what} {name}" for what, name in (names | {"policy": manifest["policy"]["name"]}).items()]
        if packing["max_length"] is None:
            parts.append("no max_length")
        else:
            parts += [f"max_length {packing['max_length']:,}", f"overflow {packing['overflow']}"]
        self.origin = ", ".join(parts)

    def text(self) -> str:
        """Write the summary for a terminal."""
        lines = [self.headline]
        for name, episodes, tokens, trained, share in self.splits:
            counts = f"{counted(episodes, 'episode')}, {tokens:,} tokens, {trained:,} trained ({share:.1%})"
            lines.append(f"  {visible(name)}: {counts}")
        lines += [f"  {visible(loss.words, mark_newlines=False)}: {loss.count:,}" for loss in self.losses]
        lines += [f"  {self.cost}"] if self.cost else []
        return "\n".join([*lines, f"  {visible(self.origin, mark_newlines=False)}"])

    def html(self, *notes: str) -> str:
        """Write the summary for a notebook; `notes` come last."""
        from chatmill.look.pages import page_of

        rows = [(loss.words, loss.count) for loss in self.losses]
        head = ("split", "episodes", "tokens", "trained", "share")
        tables = [(head, self.splits), *([((), rows)] if rows else [])]
        return page_of("notebook.html", title=self.headline, tables=tables, notes=[self.origin, *notes])
