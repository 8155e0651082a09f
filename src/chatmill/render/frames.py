"""Frames: what stands around one text of a template, as fixed runs; a table of them is made once per template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import Texts

KIND_BITS = 6
KIND_MASK = (1 << KIND_BITS) - 1
"""A run of a frame is one integer: for a literal `~literal` above these bits (so it is negative), and the kind in them;
for a part of the frame's text the kind alone."""


class Frame(NamedTuple):
    """What stands around one text: a handle into a `FrameTable`, and the text it puts around that text."""

    number: int
    head: str
    """Fixed text that is encoded together with the text that follows; "" for none."""
    tail: str = ""
    """Fixed text that is encoded together with the text before it; "" for none."""


class FrameTable:
    """The literals and frames of one template, made when it is bound to a tokenizer."""

    def __init__(self) -> None:
        """An empty table."""
        self.literals: list[list[int]] = []
        self.frames: list[tuple[int, ...]] = []
        """The runs of each frame."""
        self.heads: list[str] = []
        self.tails: list[str] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def literal(self, ids: Sequence[int]) -> int:
        """Keep a fixed sequence of ids; its handle."""
        self.literals.append(list(ids))
        return len(self.literals) - 1

    def add(self, runs: tuple[int, ...], head: str = "", tail: str = "") -> int:
        """Keep a frame; its number."""
        self.frames.append(runs)
        self.heads.append(head)
        self.tails.append(tail)
        return len(self.frames) - 1

    @property
    def texts_around(self) -> tuple[NDArray[np.bool_], Texts, Texts]:
        """Of every frame: whether it has a place for a text, and the head and the tail of that text."""
        has_text = np.array([any(run >= 0 for run in runs) for runs in self.frames], dtype=np.bool_)
        return has_text, Texts.of(self.heads), Texts.of(self.tails)

    def number(self, runs: tuple[int, ...]) -> int:
        """The number of a frame without a head, kept once however often it is asked for."""
        found = self._numbers.get(runs)
        if found is None:
            found = self._numbers[runs] = self.add(runs)
        return found


def literal_run(literal: int, kind: int) -> int:
    """A literal as a run of this kind."""
    return (~literal << KIND_BITS) | kind
