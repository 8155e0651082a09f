"""Packed rows to torch batches: padding, labels, and the document boundaries in the form each kernel reads.

The first torch import on the way from text to loss. Labels here are unshifted: a transformers model, or
`chatmill.core.shift`, moves them by one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.blocks import (
    Boundaries,
    DocumentSegments,
    boundaries_from_starts,
    boundaries_from_token,
    tree_grid,
    whole_rows,
)
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.special_ids import special_id
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, UnknownNameError, member, missing_extra
from chatmill.load.boundary_keys import Key, one_document_a_row
from chatmill.load.document_masks import dense_mask, flex_mask
from chatmill.load.model_needs import NO_TREES, needs_of, reads_trees
from chatmill.load.row_columns import (
    ENDS,
    LENGTHS,
    POSITIONS,
    STARTS,
    as_numpy,
    carried,
    check_lengths,
    integer_rows,
    masked,
    stated_boundaries,
)
from chatmill.load.teacher import TEACHER_COLUMNS, teacher_grids

try:
    import torch
except ImportError as error:
    raise missing_extra(error, "collating batches") or error from None


class RowPadding(StrEnum):
    """How wide the rows of a batch become; the names of transformers' `tokenizer.pad`."""

    LONGEST = "longest"
    """As wide as the longest row."""
    MAX_LENGTH = "max_length"
    """Always `max_length`."""
    DO_NOT_PAD = "do_not_pad"
    """Rows must be equally long."""


class MaskForm(StrEnum):
    """What `return_document_mask` gives."""

    DENSE = "dense"
    """A (B, 1, T, T) additive float tensor: 0 where a token may look, the lowest float elsewhere."""
    FLEX = "flex"
    """A FlexAttention `BlockMask`. It does not travel between processes: use it with `num_workers=0`."""


def get_pos_ids_for_packed_sequence(
    x: Any, token_id: int | None = None, document_starts: Any = None, eos: bool = True
) -> Any:
    """Positions `(B, T)` that count from 0 in every document of the packed ids `x` `(B, T)`.

    `document_starts` decides where it is given: one list per row, or an integer tensor padded with -1. Else a
    document begins after each `token_id` (`eos=True`), or at it (`eos=False`: a BOS). A tensor gives an int64
    tensor on the same device, a numpy array a numpy array.
    """
    ids = as_numpy(x)
    if ids.ndim != 2:
        raise DataError(f"x must be (rows, tokens), not of shape {tuple(ids.shape)}")
    rows, width = ids.shape
    if document_starts is not None:
        starts = as_numpy(document_starts) if hasattr(document_starts, "ndim") else document_starts
        boundaries = boundaries_from_starts(starts, np.full(rows, width, dtype=np.int64))
    elif token_id is not None:
        boundaries = boundaries_from_token(ids, token_id, after=eos)
    else:
        raise ConfigError("positions need document_starts, or the token_id that ends (or begins) a document")
    positions = boundaries.segments(width).position_ids
    return torch.from_numpy(positions).to(x.device) if isinstance(x, torch.Tensor) else positions


@dataclass(slots=True, kw_only=True)
class _PadOptions:
    """The options of `tokenizer.pad` that the collator takes; what it cannot do is refused, not ignored."""

    padding: Any = RowPadding.LONGEST
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    return_attention_mask: bool = False
    padding_side: str = "right"

    def __post_init__(self) -> None:
        padding = {True: "longest", False: "do_not_pad"}.get(self.padding, self.padding)
        self.padding = member(RowPadding, "padding", getattr(padding, "value", padding))  # transformers has an enum
        if self.return_tensors not in ("pt", "np"):
            raise UnknownNameError("return_tensors", self.return_tensors, ["pt", "np"])
        if self.padding_side != "right":
            raise ConfigError(f"padding_side is {self.padding_side!r}; padding is on the right")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length is {self.max_length}; a row holds at least one token")

    def width(self, lengths: NDArray[np.int64]) -> int:
        """Tokens per row of the batch."""
        longest = int(lengths.max(initial=0))
        if self.padding is RowPadding.DO_NOT_PAD and (lengths != longest).any():
            raise DataError(f"padding is off, but rows have {lengths.min()} to {longest} tokens: use padding='longest'")
        if self.padding is RowPadding.MAX_LENGTH:
            assert self.max_length is not None
            over = np.flatnonzero(lengths > self.max_length)
            if len(over):
                raise DataError(
                    f"row {over[0]} has {lengths[over[0]]} tokens, more than max_length {self.max_length}: "
                    "pass truncation=True to cut, or pack into shorter blocks"
                )
            longest = self.max_length
        multiple = self.pad_to_multiple_of or 1
        return -(-longest // multiple) * multiple


class DataCollatorForCausalLM:
    """Makes one batch of a list of features with `input_ids` and, for packed rows, `document_starts` or `seq_lengths`.

    Padding is on the right and is known by length, so a real EOS that equals PAD keeps its label. No
    `attention_mask` unless `return_attention_mask=True`: transformers isolates packed documents by position
    ids only when no mask is given and there is no cache, so `use_cache: False` is next to them, and `model(**batch)`
    keeps documents apart in sdpa and eager attention. With `model` the batch carries what the attention of that model
    reads.

    - `packed_sequences`: None: `position_ids` exactly when the features carry `document_starts`, `seq_lengths` (as
      `to_hf_dataset` gives them) or `position_ids`; True: always (without them a document ends at the EOS id);
      False: never, boundaries are ignored.
    - `mask_document_starts`: no label on the first token of a document that follows another one.
    - `return_flattened`: all rows one after the other, without padding, as one row.
    - `return_cu_seqlens` (with `cu_seqlens_size` entries), `return_seq_idx`, `return_document_mask` (True or
      "dense": additive float; "flex": a FlexAttention BlockMask): the same boundaries for other kernels.
    - `model`: a transformers model, its config, or the name of its attention ("sdpa", "eager", "flash_attention_2",
      "flex_attention"). Features must then carry boundaries: one of these three columns. A model with recurrent layers
      gets what these read too, all documents in one row and in multiples of 8 tokens where its kernels want it so; one
      that nothing isolates takes rows of one document. Rows of trees (`position_ids` and `ends`) need it, or
      `return_document_mask`: nothing but a mask keeps branches apart.
    - `logprobs` of the features (see `to_hf_dataset`) are a tensor next to the labels: unshifted, 0 on padding.
    - `pad_kwargs`: `padding`, `max_length`, `pad_to_multiple_of`, `return_tensors`, `return_attention_mask`.

    Features may bring `labels` (unshifted) or `loss_mask` (1 = train); a token is a target where all of
    these, and `mask_document_starts`, allow it.
    """

    float_columns: tuple[str, ...] = ("logprobs",)
    """Columns of features that the batch has too: unshifted, 0 on padding."""

    def __init__(
        self,
        tokenizer: Any,
        truncation: bool = False,
        ignore_index: int = IGNORE_INDEX,
        input_name: str = "input_ids",
        labels_name: str | None = "labels",
        packed_sequences: bool | None = None,
        mask_document_starts: bool = True,
        return_flattened: bool = False,
        return_cu_seqlens: bool = False,
        cu_seqlens_size: int | None = None,
        return_seq_idx: bool = False,
        return_document_mask: bool | str = False,
        model: Any = None,
        **pad_kwargs: Any,
    ) -> None:
        self.eos_id = special_id(tokenizer, "eos")
        pad_id = special_id(tokenizer, "pad")
        self.pad_id = next(i for i in (pad_id, self.eos_id, 0) if i is not None)
        self.truncation = truncation
        self.ignore_index = ignore_index
        self.input_name = input_name
        self.labels_name = labels_name
        self.packed_sequences = packed_sequences
        self.mask_document_starts = mask_document_starts
        self.return_flattened = self._rows_are_documents = return_flattened
        self.return_cu_seqlens = return_cu_seqlens
        self.cu_seqlens_size = cu_seqlens_size
        self.return_seq_idx = return_seq_idx
        form = MaskForm.DENSE if return_document_mask is True else return_document_mask
        self.document_mask = member(MaskForm, "document mask", form) if form else None
        self._warned = False
        self._pad = _pad_options(tokenizer, pad_kwargs, truncation=truncation)
        self._as_torch = self._pad.return_tensors == "pt"
        self._model_given = model is not None
        self._needs = None if model is None else needs_of(model)
        self._refused = one_document_a_row(model) if self._model_given and self._needs is None else None
        self._dtype = getattr(model, "dtype", None) or torch.float32
        self._reads_trees = model is None or reads_trees(model)
        has_blocks = self._needs is not None and Key.BLOCK_MASK in self._needs.keys
        self._on_device = model if has_blocks and hasattr(model, "device") else None
        """The model on whose device block masks are made: what they read does not move with them."""
        if self._needs is not None and packed_sequences is not False:
            self.return_flattened = return_flattened or self._needs.one_row
            multiple = math.lcm(self._pad.pad_to_multiple_of or 1, self._needs.multiple)
            self._pad = replace(self._pad, pad_to_multiple_of=multiple)
        self._check_options()

    def _check_options(self) -> None:
        if self.return_flattened and self._pad.padding is RowPadding.MAX_LENGTH:
            raise ConfigError(
                "all documents in one row (return_flattened=True, or a model whose kernels want it so) is the form "
                "without padding, so padding='max_length' has no meaning: leave it out (pad_to_multiple_of "
                "still rounds the one row up)"
            )
        shows_boundaries = self.return_cu_seqlens or self.return_seq_idx or self.document_mask
        if self.return_flattened and self.packed_sequences is False and not shows_boundaries:
            raise ConfigError(
                "return_flattened=True joins the rows, and with packed_sequences=False nothing would say "
                "where they meet: leave packed_sequences=None, or ask for cu_seqlens, seq_idx or a mask"
            )
        if self._model_given and self._pad.return_attention_mask:
            raise ConfigError(
                "return_attention_mask=True is a mask of padding alone, with which packed documents see each other: "
                "leave it out where model is given"
            )
        if self._refused is not None and self.return_flattened:
            raise ConfigError(f"return_flattened=True joins the rows: {self._refused}")
        if self.document_mask is MaskForm.FLEX and not self._as_torch:
            raise ConfigError("a FlexAttention mask exists for torch only: use return_tensors='pt'")

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        """Return the batch as a dict, or `(inputs, labels)` with `labels_name=None`."""
        if not features:
            raise DataError("an empty list of features makes no batch")
        rows = integer_rows(features, self.input_name if carried(features, self.input_name) else "input_ids")
        targets = self._targets(features, rows)
        boundaries, position_ids_on = self._boundaries(features, rows)
        trees = self._trees(features) if carried(features, ENDS) else None
        if self._refused is not None and (boundaries.counts > 1).any():
            row = int(np.flatnonzero(boundaries.counts > 1)[0])
            raise ConfigError(f"row {row} has {boundaries.counts[row]} documents: {self._refused}")
        most = self._pad.max_length if self.truncation else None
        if most is not None:
            rows, targets = [row[:most] for row in rows], [row[:most] for row in targets]
            boundaries = boundaries.cut(most)
            trees = trees and ([np.minimum(row[:most], most) for row in trees[0]], [row[:most] for row in trees[1]])
        if self.return_flattened:
            if trees:
                before = np.repeat(offsets_of(boundaries.lengths)[:-1], boundaries.lengths)
                trees = [np.concatenate(trees[0]) + before], [np.concatenate(trees[1])]
            boundaries = boundaries.joined()

        width = self._pad.width(boundaries.lengths)
        segments = boundaries.segments(width)
        if trees:
            segments = replace(segments, trees=tree_grid(*trees, segments))
        real = np.arange(width) < boundaries.lengths[:, None]
        labels = _grid(targets, real, self.ignore_index)
        if self.mask_document_starts:
            labels.reshape(-1)[boundaries.later_documents(width)] = self.ignore_index

        batch: dict[str, Any] = {self.input_name: _grid(rows, real, self.pad_id)}
        if self.labels_name is not None:
            batch[self.labels_name] = labels
        if position_ids_on:
            # With a cache, which is the default, transformers does not read documents from positions.
            batch |= {"position_ids": segments.position_ids, "use_cache": False}
        if self._pad.return_attention_mask:
            batch["attention_mask"] = real.astype(np.int64)
        batch |= self._kernel_forms(segments)
        for name in self.float_columns:
            if carried(features, name):
                values = [as_numpy(feature[name])[:most] for feature in features]
                check_lengths(name, values, rows)
                batch[name] = _grid(values, real, 0, np.float32)
        if all(carried(features, name) for name in TEACHER_COLUMNS):
            batch |= teacher_grids(features, real, most)
        if self._needs is not None and position_ids_on:
            batch |= self._needs.inputs(segments, self._dtype, self.cu_seqlens_size, self._device())
        batch = {name: self._finished(value) for name, value in batch.items()}
        return batch if self.labels_name is not None else (batch, self._finished(labels))

    def _device(self) -> Any:
        """Return where masks are made: on the CPU, but for block masks."""
        if self._on_device is None:
            return None
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigError(
                "a FlexAttention BlockMask does not travel between processes: collate in the training process "
                "(dataloader_num_workers=0)"
            )
        return self._on_device.device

    def _finished(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not self._as_torch:
            return value.float().numpy()
        return torch.from_numpy(value) if self._as_torch and isinstance(value, np.ndarray) else value

    def _trees(self, features: Sequence[Mapping[str, Any]]) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """Ends and positions of rows of trees, for a model that can read them."""
        if self.packed_sequences is False:
            raise ConfigError("packed_sequences=False ignores boundaries, and the rows are trees: leave it out")
        if not self._reads_trees:
            raise ConfigError(NO_TREES)
        if not self._model_given and self.document_mask is None:
            raise ConfigError(
                "the rows are trees (they carry ends), and nothing but a mask keeps their branches apart: give the "
                "collator your model (model=model), or ask for the mask (return_document_mask)"
            )
        if self.return_cu_seqlens or self.return_seq_idx:
            raise ConfigError("cu_seqlens and seq_idx say where documents begin, and branches of trees are none")
        return integer_rows(features, ENDS), integer_rows(features, POSITIONS)

    def _boundaries(
        self, features: Sequence[Mapping[str, Any]], rows: list[NDArray[np.int64]]
    ) -> tuple[Boundaries, bool]:
        """Return the documents of the rows before any cut, and whether the batch gets position ids."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        first = next((name for name in (ENDS, STARTS, LENGTHS, POSITIONS) if carried(features, name)), None)
        if self.packed_sequences is False:
            return whole_rows(lengths), False
        if first is not None:
            names = (ENDS, POSITIONS) if first == ENDS else (first,)
            return stated_boundaries({name: integer_rows(features, name) for name in names}, rows), True
        if self.packed_sequences is None and self._model_given and not self._rows_are_documents:
            raise ConfigError(
                "a model is given, but the features carry neither document_starts nor seq_lengths nor position_ids, so "
                "packed documents would see each other. transformers' Trainer removes the first two: map the rows with "
                "trainer_columns, or set remove_unused_columns=False. Rows of one document each: packed_sequences=False"
            )
        if self.packed_sequences is None:
            # Rows that are joined into one must not see each other, so positions say where each begins.
            return whole_rows(lengths), self.return_flattened
        if self.eos_id is None:
            raise ConfigError(
                "packed_sequences=True, but the features carry no document_starts and the tokenizer has no "
                "EOS id to find documents by: pack with block_tokenize_fn, or leave packed_sequences=None"
            )
        boundaries = boundaries_from_token(rows, self.eos_id, after=True)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the features carry no document_starts, so a document ends at each EOS id {self.eos_id}: this batch "
                f"has {len(boundaries.starts)} documents in {len(rows)} rows. A chat vocabulary whose EOS ends every "
                "message is cut at every message: pack with block_tokenize_fn, which stores the starts",
                UserWarning,
                stacklevel=3,
            )
        return boundaries, True

    def _targets(self, features: Sequence[Mapping[str, Any]], rows: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Unshifted labels per row: the features' own or the ids, `ignore_index` where a `loss_mask` is 0."""
        name = self.labels_name if self.labels_name and carried(features, self.labels_name) else "labels"
        targets = rows
        if carried(features, name):
            targets = integer_rows(features, name)
            check_lengths(name, targets, rows)
        if carried(features, "loss_mask"):
            masks = [as_numpy(feature["loss_mask"]) for feature in features]
            targets = masked(targets, masks, rows, self.ignore_index)
        return targets

    def _kernel_forms(self, segments: DocumentSegments) -> dict[str, Any]:
        forms: dict[str, Any] = {}
        if self.return_cu_seqlens:
            forms["cu_seqlens"] = segments.cu_seqlens(self.cu_seqlens_size)
            forms["max_seqlen"] = np.array(segments.max_seqlen, dtype=np.int32)
        if self.return_seq_idx:
            forms["seq_idx"] = segments.seq_idx
        if self.document_mask is MaskForm.FLEX:
            forms["document_mask"] = flex_mask(torch.from_numpy(segments.ends))
        elif self.document_mask is MaskForm.DENSE:
            forms["document_mask"] = dense_mask(torch.from_numpy(segments.ends)).numpy()
        if self.document_mask is not None and not self._pad.return_attention_mask:
            # no model reads document_mask, and none complains about it
            forms["attention_mask"] = forms["document_mask"]
        return forms


def _pad_options(tokenizer: Any, pad_kwargs: dict[str, Any], *, truncation: bool) -> _PadOptions:
    names = [field.name for field in fields(_PadOptions)]
    for name in pad_kwargs:
        if name not in names:
            raise UnknownNameError("collator option", name, sorted(names))
    options = _PadOptions(**pad_kwargs)
    if options.max_length is not None or not (truncation or options.padding is RowPadding.MAX_LENGTH):
        return options
    limit = getattr(tokenizer, "model_max_length", None)
    if limit is None or limit > 10**9:  # transformers writes a huge number if there is none
        raise ConfigError("truncation=True and padding='max_length' need max_length: this tokenizer declares no limit")
    return replace(options, max_length=int(limit))


def _grid(
    rows: list[NDArray[Any]], real: NDArray[np.bool_], fill: int, dtype: type[np.generic] = np.int64
) -> NDArray[Any]:
    """Return the rows' values where `real` is True, in order, and `fill` elsewhere."""
    grid = np.full(real.shape, fill, dtype=dtype)
    grid[real] = np.concatenate(rows)
    return grid
