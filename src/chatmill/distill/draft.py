"""A batch of rows on its way: what they are made of, collected in any order, and the columns that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.distill.stencil import NOTHING, Filled
from chatmill.errors import RecordError
from chatmill.systems.synth_kd import Rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class KDBatch:
    """Rendered rows in flat columns: those that could be rendered, in input order."""

    ids: NDArray[np.int32]
    """With an EOD at the end of each row."""
    spans: NDArray[np.uint8]
    """Token-aligned span ids."""
    lengths: NDArray[np.int64]
    """Tokens of each row."""
    rows: NDArray[np.int64]
    """The place of each row in what was given."""
    official: frozenset[int]
    """The places of rows that the official library rendered whole."""
    failed: tuple[tuple[int, RecordError], ...]
    """The places of rows that cannot be used, and why."""


class RowsInOrder(NamedTuple):
    """The rows of a draft in input order."""

    places: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    counts: NDArray[np.int64]
    """Messages of each row."""
    forms: NDArray[np.int64]
    """Of each message."""
    texts: NDArray[np.int64]
    """The number of each message's text in the draft."""


class Draft:
    """A batch on its way: what its rows are made of. First come those that a stencil has filled, then the others."""

    def __init__(self, filled: Filled = NOTHING, prefix: int = 0, forms: tuple[int, ...] = ()) -> None:
        """Rows of one prefix and these forms."""
        self.filled = filled
        self._filled_prefix, self._filled_forms = prefix, forms
        self.places: list[int] = []
        self.prefixes: list[int] = []
        self.counts: list[int] = []
        self.forms: list[int] = []
        self.texts: list[str] = []
        """Those of the rows that were decoded."""
        self.rendered: dict[int, Rendered] = {}
        """Rows that are finished."""
        self.failed: list[tuple[int, RecordError]] = []

    def add(self, places: Sequence[int], prefix: int, forms: Sequence[int], texts: Sequence[str]) -> None:
        """Rows of one prefix and of the same forms, with the texts of their messages."""
        self.places += places
        self.prefixes += [prefix] * len(places)
        self.counts += [len(forms)] * len(places)
        self.forms += [*forms] * len(places)
        self.texts += texts

    def in_order(self) -> RowsInOrder:
        """All rows that are to be laid out."""
        count = len(self.filled.places)
        counts = np.array([len(self._filled_forms)] * count + self.counts, dtype=np.int64)
        forms = np.array([*self._filled_forms] * count + self.forms, dtype=np.int64)
        prefixes = np.array([self._filled_prefix] * count + self.prefixes, dtype=np.int64)
        places = np.concatenate([self.filled.places, np.array(self.places, dtype=np.int64)])
        order = np.argsort(places)
        messages = ranges(offsets_of(counts)[:-1][order], counts[order])
        return RowsInOrder(places[order], prefixes[order], counts[order], forms[messages], messages)


def with_rendered(batch: KDBatch, rendered: dict[int, Rendered]) -> KDBatch:
    """Finished rows put between the rows of a batch; they are rare, so this may copy."""
    offsets = offsets_of(batch.lengths)
    pieces: dict[int, Rendered] = dict(rendered)
    for number, place in enumerate(batch.rows.tolist()):
        own = slice(int(offsets[number]), int(offsets[number + 1]))
        pieces[place] = Rendered(batch.ids[own], batch.spans[own])
    places = sorted(pieces)
    return KDBatch(
        ids=np.concatenate([pieces[place].ids for place in places]),
        spans=np.concatenate([pieces[place].spans for place in places]),
        lengths=np.array([len(pieces[place].ids) for place in places], dtype=np.int64),
        rows=np.array(places, dtype=np.int64),
        official=batch.official,
        failed=batch.failed,
    )
