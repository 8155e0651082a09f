"""The columns by which trainers know what is trained and where documents begin: the one table, and how to read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import Boundaries
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of, segment_sums
from chatmill.errors import ConfigError, DataError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Column = tuple[NDArray[Any], Ints]
"""Flat values of a column of lists, and one more offset than there are rows."""

IDS = ("input_ids", "tokens", "token_ids")
LABELS = ("labels", "label_ids")
MASKS = ("assistant_masks", "assistant_mask", "completion_mask", "loss_mask")
WEIGHTS = ("weights", "loss_weights")
STARTS = ("document_starts", "seq_start_id")
OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
"""Offsets of documents, as attention of variable length takes them."""
LISTED = ("document_starts", "seq_lengths", *OFFSETS, "seq_start_id")
"""Lists of documents per row; the first that is there counts."""
ALIGNED = (*LABELS, *MASKS, *WEIGHTS, "attention_mask", "seq_idx", "position_ids")
BOUNDARIES = (*LISTED, "attention_mask", "seq_idx", "position_ids")
"""Columns that say where documents begin."""
KNOWN = (*IDS, *ALIGNED, *LISTED)
"""Columns that mean something here; all others are left alone."""
ABSENT = -1
"""Fills up lists of offsets that are shorter than others of their batch."""
SURE = 0.98
"""Share of labels that must agree with shifted ids before they count as shifted."""
SHIFT_ROWS = 1000
"""Rows at the beginning of a set that show whether its labels are shifted."""


@dataclass(frozen=True, kw_only=True)
class TrainerRows:
    """Rows of token ids as a trainer reads them. Weights are token-aligned: `weights[t]` is that of `ids[t]`."""

    ids: Ints
    offsets: Ints
    """One more than there are rows."""
    weights: NDArray[Any] | None
    """uint8 or float32, above 0 for targets; None: the set has no labels, mask or weights."""
    mask_name: str
    """The columns that `weights` is from."""
    shift: int
    """Labels at t are the ids at t + shift."""
    wrong_labels: Ints
    """Places whose label is neither ignored nor the id."""
    padding: Bools
    """Tokens after the end of their row, or before its beginning."""
    documents: Ints
    """Offsets of all documents; every value of `offsets` is among them."""
    boundaries: str
    """The column that the documents are from; empty if rows are all that is known."""
    wrong_boundaries: Ints
    """Rows whose boundaries do not fit their length: each is one document."""
    hidden: Ints
    """Tokens inside of a document that the attention mask hides, as if they were padding."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def trained(self) -> Bools | None:
        """Which tokens are targets."""
        return None if self.weights is None else np.asarray(self.weights > 0)

    @cached_property
    def bounds(self) -> tuple[Ints, Ints]:
        """First and last + 1 token of each document that is no padding; equal if all of it is."""
        live = np.append(np.flatnonzero(~self.padding), len(self.ids))
        at = np.searchsorted(live, self.documents)
        filled = at[1:] > at[:-1]
        begins = np.where(filled, live[at[:-1]], self.documents[:-1])
        ends = np.where(filled, live[np.maximum(at[1:] - 1, 0)] + 1, self.documents[:-1])
        return begins, ends

    @cached_property
    def filled(self) -> Bools:
        """Which documents are more than padding."""
        begins, ends = self.bounds
        return ends > begins

    @property
    def packed_rows(self) -> Ints:
        """The rows that hold two documents and more."""
        row = self.row_of(self.documents[:-1][self.filled])
        return np.flatnonzero(np.bincount(row, minlength=len(self)) > 1)

    def document_of(self, places: Ints) -> Ints:
        """Find the documents of tokens."""
        return np.searchsorted(self.documents, places, side="right") - 1

    def row_of(self, places: Ints) -> Ints:
        """Find the rows of tokens."""
        return np.searchsorted(self.offsets, places, side="right") - 1


def ids_column(names: Collection[str]) -> str:
    """Find the column of token ids."""
    column = next((name for name in IDS if name in names), None)
    if column is None:
        raise DataError(
            f"no column of token ids: there are {', '.join(sorted(names)) or 'none'}, and ids are called "
            f"{', '.join(IDS)}. Is this the set before it was tokenised?"
        )
    return column


def weight_columns(names: Collection[str], mask: str | None = None) -> list[str]:
    """Return the columns that say what is trained; a token counts if all of them say so, as in TRL.

    Labels decide alone, but for weights next to them. `mask` names the one column to read instead.
    """
    if mask is not None:
        if mask not in names:
            raise ConfigError(f"no column {mask!r} in the set: there are {', '.join(sorted(names))}")
        return [mask]
    labels = [name for name in LABELS if name in names][:1]
    return [*(labels or [name for name in MASKS if name in names]), *(name for name in WEIGHTS if name in names)]


def read_columns(
    columns: Mapping[str, Column],
    *,
    mask: str | None = None,
    pad_id: int | None = None,
    shift: int | None = None,
    mask_shift: int = 0,
    first: int = 0,
) -> TrainerRows:
    """Read the rows of some columns.

    Args:
        columns: The columns by their names.
        mask: The one column that says what is trained. Default: found by its name.
        pad_id: Padding at the ends of rows without an attention mask.
        shift: How far labels are ahead of the ids, where the rows are some of a set for which it is known.
        mask_shift: How far masks and weights are ahead.
        first: Number of the first row, for errors.
    """
    name = ids_column(columns)
    ids, offsets = columns[name][0].astype(np.int64), columns[name][1]
    if len(ids) and int(ids.min()) < 0:
        at = int(np.flatnonzero(ids < 0)[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise DataError(f"row {first + row}: {name} holds {int(ids[at])}, which is no token id")
    names = weight_columns(columns, mask)
    for other in dict.fromkeys((*ALIGNED, *names)):
        if other in columns and not np.array_equal(columns[other][1], offsets):
            sizes, theirs = np.diff(offsets), np.diff(columns[other][1])
            row = int(np.flatnonzero(sizes != theirs)[0]) if len(sizes) == len(theirs) else 0
            raise DataError(f"row {first + row}: {other} and {name} have different lengths")
    padding = _padding(ids, offsets, columns, pad_id)
    documents, boundaries, wrong = _documents(offsets, columns, padding)
    hidden = _hidden_inside(ids, documents, padding, pad_id) if "attention_mask" in columns else ids[:0]
    padding[hidden] = False
    weights, shift, wrong_labels = _weights(ids, offsets, columns, names, padding, shift, mask_shift)
    if boundaries:
        padding |= _filling(ids, offsets, documents, None if weights is None else np.asarray(weights > 0))
    return TrainerRows(
        ids=ids,
        offsets=offsets,
        weights=weights,
        mask_name=" and ".join(names),
        shift=shift,
        wrong_labels=wrong_labels,
        padding=padding,
        documents=documents,
        boundaries=boundaries,
        wrong_boundaries=wrong,
        hidden=hidden,
    )


def _weights(
    ids: Ints,
    offsets: Ints,
    columns: Mapping[str, Column],
    names: list[str],
    padding: Bools,
    shift: int | None,
    mask_shift: int,
) -> tuple[NDArray[Any] | None, int, Ints]:
    """Combine the weights of all columns; also return the shift of labels, and labels that are not ids of the row."""
    weights: list[NDArray[Any]] = []
    moved, wrong = 0, np.empty(0, dtype=np.int64)
    for name in names:
        values = columns[name][0]
        if name in LABELS:
            moved = label_shift(ids, offsets, values, padding) if shift is None else shift
            values = np.asarray(values != IGNORE_INDEX)
            if moved:
                values = np.roll(values & _inside(offsets, moved, len(ids)), moved)
            else:
                wrong = np.flatnonzero(values & (columns[name][0] != ids))
        elif mask_shift:
            values = np.roll(np.where(_inside(offsets, mask_shift, len(ids)), values, 0), mask_shift)
        weights.append(values.astype(np.uint8 if values.dtype in (np.bool_, np.uint8) else np.float32))
    if len(weights) < 2:
        return (weights[0] if weights else None), moved, wrong
    every = np.all([values > 0 for values in weights], axis=0)
    factors = [values for values in weights if values.dtype != np.uint8]
    return (every.astype(np.uint8) if not factors else np.prod(factors, axis=0) * every), moved, wrong


def label_shift(ids: Ints, offsets: Ints, labels: NDArray[Any], padding: Bools) -> int:
    """Guess how far labels are ahead of the ids: 1 or -1 if nearly all labels of the first rows agree, else 0."""
    rows = min(len(offsets) - 1, SHIFT_ROWS)
    size = int(offsets[rows])
    ids, labels, padding, offsets = ids[:size], labels[:size], padding[:size], offsets[: rows + 1]
    targets = np.asarray(labels != IGNORE_INDEX)
    same = int((targets & (labels == ids)).sum())
    if same == int(targets.sum()):
        return 0
    for shift in (1, -1):
        counted = targets & _inside(offsets, shift, size) & ~padding
        agree = int((counted & (labels == np.roll(ids, -shift))).sum())
        if agree > SURE * int(counted.sum()) and agree > same:
            return shift
    return 0


def _inside(offsets: Ints, shift: int, tokens: int) -> Bools:
    """Places whose neighbour, `shift` ahead, is in the same row."""
    inside = np.ones(tokens, dtype=np.bool_)
    filled = np.diff(offsets) > 0
    inside[offsets[1:][filled] - 1 if shift == 1 else offsets[:-1][filled]] = False
    return inside


def _padding(ids: Ints, offsets: Ints, columns: Mapping[str, Column], pad_id: int | None) -> Bools:
    """Padding by the attention mask, or else the pad tokens at the ends of rows."""
    if "attention_mask" in columns:
        hidden: Bools = columns["attention_mask"][0] == 0
        return hidden
    others = offsets_of(ids != pad_id)  # tokens before each place that are no pad token
    if pad_id is None or not others[-1]:
        return np.zeros(len(ids), dtype=np.bool_)
    before, until = (np.repeat(others[at], np.diff(offsets)) for at in (offsets[:-1], offsets[1:]))
    ends: Bools = (others[1:] == before) | (others[:-1] == until)
    return ends


def _hidden_inside(ids: Ints, documents: Ints, padding: Bools, pad_id: int | None) -> Ints:
    """Find the tokens that are padding by the mask and have tokens of their document on both sides.

    Where the pad token has an id of its own, such tokens with this id are padding.
    """
    live = np.flatnonzero(~padding)
    places = np.flatnonzero(padding if pad_id is None else padding & (ids != pad_id))
    at = np.searchsorted(live, places)
    inside = (at > 0) & (at < len(live))
    places = places[inside]
    before = live[at[inside] - 1]
    after = live[at[inside]]
    document = np.searchsorted(documents, places, side="right")
    is_before_inside = np.searchsorted(documents, before, side="right") == document
    is_after_inside = np.searchsorted(documents, after, side="right") == document
    hidden: Ints = places[is_before_inside & is_after_inside]
    return hidden


def _filling(ids: Ints, offsets: Ints, documents: Ints, trained: Bools | None) -> Bools:
    """Tokens of last documents of packed rows that are one id over and over and no targets: they fill the row up.

    Collators do so with a token that may also be the eos, and give each token of it position 0.
    """
    first, last = documents[:-1], documents[1:]
    if not len(first):
        return np.zeros(len(ids), dtype=np.bool_)
    changes = offsets_of(ids[1:] != ids[:-1])
    fills = (changes[last - 1] == changes[first]) & ~np.isin(first, offsets)
    if trained is not None:
        fills &= segment_sums(trained, documents) == 0
    row = np.searchsorted(offsets, first, side="right") - 1
    final = np.full(len(offsets) - 1, -1, dtype=np.int64)
    np.maximum.at(final, row[~fills], np.flatnonzero(~fills))
    fills &= np.arange(len(fills)) > final[row]
    return np.repeat(fills, last - first)


def _documents(offsets: Ints, columns: Mapping[str, Column], padding: Bools) -> tuple[Ints, str, Ints]:
    """Offsets of documents, the column they are from, and rows whose boundaries cannot be right."""
    none = np.empty(0, dtype=np.int64)
    listed = next((name for name in LISTED if name in columns), None)
    if listed is not None:
        values, bounds = columns[listed][0].astype(np.int64), columns[listed][1]
        if len(bounds) != len(offsets):
            raise DataError(f"{listed} has {len(bounds) - 1:,} rows, and the set {len(offsets) - 1:,}")
        return _listed_documents(offsets, listed, values, bounds)
    if "attention_mask" in columns:
        numbers = columns["attention_mask"][0].astype(np.int64)
        if int(numbers.max(initial=0)) > 1:  # axolotl numbers the documents of a row
            return np.union1d(np.flatnonzero(np.diff(numbers)) + 1, offsets), "attention_mask", none
    if "seq_idx" in columns:
        numbers = columns["seq_idx"][0].astype(np.int64)
        return np.union1d(np.flatnonzero(np.diff(numbers)) + 1, offsets), "seq_idx", none
    if "position_ids" in columns:
        starts = np.flatnonzero(columns["position_ids"][0] == 0)
        starts = starts[~padding[starts]]  # collators fill positions of padding with anything
        return np.union1d(starts, offsets), "position_ids", none
    return np.unique(offsets), "", none


def _listed_documents(offsets: Ints, name: str, values: Ints, bounds: Ints) -> tuple[Ints, str, Ints]:
    """Read documents from lists of lengths, starts or offsets per row; a row without a list is one document."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(bounds))
    sizes = np.diff(offsets)
    if name == "seq_lengths":
        before = offsets_of(values)
        totals = np.diff(before[bounds])
        wrong = np.union1d(np.flatnonzero(totals > sizes), rows[values < 0])  # less is padding after the last document
        starts = before[1:] - before[bounds[:-1]][rows] + offsets[rows]  # where the next one starts
    else:
        there = values != ABSENT
        values, rows = values[there], rows[there]
        starts = values + offsets[rows]
        wrong = np.unique(rows[(values < 0) | (values > sizes[rows])])
        if name in STARTS:
            boundaries = Boundaries(starts=values, counts=np.bincount(rows, minlength=len(sizes)), lengths=sizes)
            broken = [boundaries.rows[at] for at, _ in boundaries.broken()]
            wrong = np.unique(np.concatenate([wrong, *broken, np.flatnonzero(boundaries.without_start)]))
    usable = ~np.isin(rows, wrong)
    return np.union1d(starts[usable], offsets), name, wrong
