"""Token data as a trainer reads it: flat ids, which of them are targets, rows and the documents inside rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of, segment_sums
from chatmill.errors import ConfigError, DataError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Column = tuple[NDArray[np.generic], Ints]
"""Flat values of a column of lists, and one more offset than there are rows."""

IDS = ("input_ids", "tokens", "token_ids")
LABELS = ("labels", "label_ids")
MASKS = ("assistant_masks", "assistant_mask", "completion_mask", "loss_mask", "loss_weights")
OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
"""Offsets of documents, as attention of variable length takes them."""
LISTED = ("seq_lengths", *OFFSETS, "seq_start_id")
KNOWN = (*IDS, *LABELS, *MASKS, *LISTED, "position_ids", "attention_mask")
"""Columns that mean something here; all others are left alone."""
ABSENT = -1
"""Fills up lists of offsets that are shorter than others of their batch."""
SURE = 0.98
"""Share of labels that must agree with shifted ids before they count as shifted."""


@dataclass(frozen=True, kw_only=True)
class TokenizedSet:
    """Rows of token ids. Masks are token-aligned: `trained[t]` says whether `ids[t]` is a target."""

    ids: Ints
    offsets: Ints
    """One more than there are rows."""
    trained: Bools | None
    """None: the set has no labels and no mask."""
    mask_name: str
    """The columns that `trained` is from."""
    shift: int
    """Labels at t are the ids at t + shift."""
    wanted_shift: int
    """What the trainer takes: 0 where it shifts labels itself, as transformers does, and else 1."""
    wrong_labels: Ints
    """Places whose label is neither ignored nor the id."""
    padding: Bools
    """Tokens behind the end of their row, or before its beginning."""
    documents: Ints
    """Offsets of all documents; every value of `offsets` is among them."""
    boundaries: str
    """The column that the documents are from; empty where rows are all that is known."""
    wrong_boundaries: Ints
    """Rows whose boundaries do not fit their length."""
    inputs: frozenset[str] = frozenset()
    """The columns there are."""
    is_batches: bool = False
    """The rows are those of batches, so the model is called with these columns."""
    pair_mask: bool = False
    """The attention mask of the batches is over pairs of tokens."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def bounds(self) -> tuple[Ints, Ints]:
        """First and last + 1 token of each document that is no padding; equal where all of it is."""
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

    def document_of(self, places: Ints) -> Ints:
        """The documents of tokens."""
        return np.searchsorted(self.documents, places, side="right") - 1

    def row_of(self, places: Ints) -> Ints:
        """The rows of tokens."""
        return np.searchsorted(self.offsets, places, side="right") - 1


def from_columns(
    columns: Mapping[str, Column],
    *,
    mask: str | None = None,
    pad_id: int | None = None,
    shifted: bool = False,
    is_batches: bool = False,
    pair_mask: bool = False,
) -> TokenizedSet:
    """Make a set of its columns.

    `mask` names the column that says what is trained, where it is not the usual one. `pad_id` is padding at the ends
    of rows without an attention mask. With `shifted`, labels that are shifted already are as they should be.
    The attention mask of batches with a `pair_mask` has the numbers of documents, and 0 for padding.
    """
    name = next((one for one in IDS if one in columns), None)
    if name is None:
        raise DataError(
            f"no column of token ids: there are {', '.join(sorted(columns)) or 'none'}, and ids are called "
            f"{', '.join(IDS)}. Is this the set before it was tokenised?"
        )
    ids, offsets = columns[name][0].astype(np.int64), columns[name][1]
    if not len(ids):
        raise DataError("the set holds no tokens")
    if int(ids.min()) < 0:
        at = int(np.flatnonzero(ids < 0)[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise DataError(f"row {row}: {name} holds {int(ids[at])}, which is no token id")
    if mask is not None and mask not in columns:
        raise ConfigError(f"no column {mask!r} in the set: there are {', '.join(sorted(columns))}")
    for other in dict.fromkeys((*LABELS, *MASKS, "attention_mask", "position_ids", *filter(None, [mask]))):
        if other in columns and not np.array_equal(columns[other][1], offsets):
            sizes, theirs = np.diff(offsets), np.diff(columns[other][1])
            row = int(np.flatnonzero(sizes != theirs)[0]) if len(sizes) == len(theirs) else 0
            raise DataError(f"row {row}: {other} and {name} have different lengths")
    padding = _padding(ids, offsets, columns, pad_id)
    documents, boundaries, wrong = _documents(offsets, columns, padding)
    trained, mask_name, shift, wrong_labels = _trained(ids, offsets, columns, mask, padding)
    if boundaries:
        padding |= _filling(ids, offsets, documents, trained)
    return TokenizedSet(
        ids=ids,
        offsets=offsets,
        trained=trained,
        mask_name=mask_name,
        shift=shift,
        wanted_shift=int(shifted),
        wrong_labels=wrong_labels,
        padding=padding,
        documents=documents,
        boundaries=boundaries,
        wrong_boundaries=wrong,
        inputs=frozenset(columns),
        is_batches=is_batches,
        pair_mask=pair_mask,
    )


def next_to(labelled: Bools, offsets: Ints) -> Bools:
    """A mask that speaks at t of the token at t + 1, made to speak of the token at t."""
    inside = labelled.copy()
    inside[offsets[1:] - 1] = False
    return np.roll(inside, 1)


def _trained(
    ids: Ints, offsets: Ints, columns: Mapping[str, Column], mask: str | None, padding: Bools
) -> tuple[Bools | None, str, int, Ints]:
    """What is trained, by which columns, how far labels are shifted, and labels that are no ids of the row."""
    none = np.empty(0, dtype=np.int64)
    label = next((one for one in LABELS if one in columns and mask in (None, one)), None)
    if label is None:
        names = [mask] if mask is not None else [one for one in MASKS if one in columns]
        if not names:
            return None, "", 0, none
        chosen = np.ones(len(ids), dtype=np.bool_)
        for one in names:  # TRL trains what all of them name
            chosen &= columns[one][0] > 0  # type: ignore[operator]
        return chosen, " and ".join(names), 0, none
    values = columns[label][0].astype(np.int64)
    targets = values != IGNORE_INDEX
    wrong = targets & (values != ids)
    if not wrong.any():
        return targets, label, 0, none
    for shift in (1, -1):
        moved = np.roll(ids, -shift)
        inside = np.ones(len(ids), dtype=np.bool_)
        filled = np.diff(offsets) > 0
        inside[offsets[1:][filled] - 1 if shift == 1 else offsets[:-1][filled]] = False
        counted = targets & inside & ~padding
        agree = int((counted & (values == moved)).sum())
        if agree > SURE * int(counted.sum()) and agree > int((targets & ~wrong).sum()):
            trained = np.roll(targets & inside, shift)
            return trained, label, shift, none
    return targets, label, 0, np.flatnonzero(wrong)


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


def _filling(ids: Ints, offsets: Ints, documents: Ints, trained: Bools | None) -> Bools:
    """Tokens of last documents of packed rows that are one id over and over and no targets: they fill the row up.

    Collators do so with a token that may also be the eos, and give each token of it position 0.
    """
    first, last = documents[:-1], documents[1:]
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
    for name in LISTED:
        if name in columns:
            values, bounds = columns[name][0].astype(np.int64), columns[name][1]
            if len(bounds) != len(offsets):
                raise DataError(f"{name} has {len(bounds) - 1:,} rows, and the set {len(offsets) - 1:,}")
            return _listed_documents(offsets, name, values, bounds)
    if "attention_mask" in columns:
        numbers = columns["attention_mask"][0].astype(np.int64)
        if int(numbers.max()) > 1:  # axolotl numbers the documents of a row
            return np.union1d(np.flatnonzero(np.diff(numbers)) + 1, offsets), "attention_mask", none
    if "position_ids" in columns:
        starts = np.flatnonzero(columns["position_ids"][0] == 0)
        starts = starts[~padding[starts]]  # collators fill positions of padding with anything
        return np.union1d(starts, offsets), "position_ids", none
    return offsets, "", none


def _listed_documents(offsets: Ints, name: str, values: Ints, bounds: Ints) -> tuple[Ints, str, Ints]:
    """Documents by lists of lengths, starts or offsets per row."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(bounds))
    sizes = np.diff(offsets)
    if name == "seq_lengths":
        before = offsets_of(values)
        totals = np.diff(before[bounds])
        wrong = np.union1d(np.flatnonzero(totals > sizes), rows[values < 0])  # less is padding behind the last document
        starts = before[1:] - before[bounds[:-1]][rows] + offsets[rows]  # where the next one starts
    else:
        there = values != ABSENT
        values, rows = values[there], rows[there]
        starts = values + offsets[rows]
        wrong = np.unique(rows[(values < 0) | (values > sizes[rows])])
    usable = ~np.isin(rows, wrong)
    return np.union1d(starts[usable], offsets), name, wrong
