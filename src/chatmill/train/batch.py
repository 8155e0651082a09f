"""One batch as the trainer reads it, made of what loaders, collators and datasets give.

Labels, weights and spans are label-aligned: position `t` speaks of token `t + 1`. A weight other than 0 means "train".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chatmill.core.shift import IGNORE_INDEX, shift_left
from chatmill.errors import DataError
from chatmill.load.packed_batch import PackedBatch
from chatmill.train.attention import RowDocuments, documents_of_positions, documents_of_segments, whole_row_documents

SHAPES = "(x, y), (x, y, mask), a PackedBatch, or a mapping with input_ids or tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Tensors of one micro-batch on the device of the run, each (rows, width) where not said otherwise."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """The next token; -100 where the loader said that nothing is trained."""
    weights: torch.Tensor | None
    """How much each label counts; None: 1 wherever the label is not -100."""
    spans: torch.Tensor | None
    """Which span each label belongs to (1 reasoning, 2 answer, 0 neither); None: not known."""
    documents: RowDocuments


def as_batch(
    given: Any, device: torch.device, spans: torch.Tensor | None = None, *, vocabulary: int | None = None
) -> TrainBatch:
    """A batch of any known form on a device; `spans` (rows, width) where the form does not carry them.

    A mapping with `tokens` is one of Megatron's (labels already shifted), one with `input_ids` a collator's (not yet).
    An id at or above `vocabulary` is refused; batches that are on a GPU already are left to its own check.
    """
    if isinstance(given, TrainBatch):
        _refuse_ids_beyond(vocabulary, given.input_ids, given.labels)
        return given
    mask: torch.Tensor | None
    if isinstance(given, PackedBatch):
        x, y, mask = given.x, given.y, given.mask
        documents = documents_of_segments(given.segments, device, most=given.document_starts.shape[1])
    elif isinstance(given, Mapping):
        x, y, mask, documents = _of_mapping(given, device)
        spans = given.get("span_id")
    elif isinstance(given, tuple | list) and len(given) in (2, 3):
        x, y, mask = given if len(given) == 3 else (*given, None)
        documents = whole_row_documents(x.shape, device)
    else:
        count = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise DataError(f"a batch is {type(given).__name__}{count}; wanted {SHAPES}")
    _refuse_ids_beyond(vocabulary, x, y)
    return TrainBatch(
        input_ids=x.to(device, non_blocking=True),
        labels=y.to(device, non_blocking=True),
        weights=None if mask is None else mask.to(device, non_blocking=True),
        spans=None if spans is None else spans.to(device, non_blocking=True),
        documents=documents,
    )


def _of_mapping(
    given: Mapping[str, Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, RowDocuments]:
    """Ids, labels, mask and documents."""
    shifted = "tokens" in given
    ids = given.get("tokens" if shifted else "input_ids")
    if ids is None or "labels" not in given:
        raise DataError(f"a batch has the keys {', '.join(given)}; wanted labels with {SHAPES}")
    labels = given["labels"] if shifted else shift_left(given["labels"], IGNORE_INDEX)
    positions, numbers = given.get("position_ids"), given.get("seq_idx")
    if positions is None:
        documents = whole_row_documents(ids.shape, device)
    else:
        documents = documents_of_positions(positions.to(device), None if numbers is None else numbers.to(device))
    return ids, labels, given.get("loss_mask") if shifted else None, documents


def _refuse_ids_beyond(vocabulary: int | None, *values: torch.Tensor) -> None:
    """`DataError` for ids without an embedding."""
    for ids in values:
        if vocabulary is None or ids.device.type != "cpu" or not ids.numel():
            continue
        if (largest := int(ids.max())) >= vocabulary:
            raise DataError(
                f"the data has the id {largest:,}, and the model has {vocabulary:,} embeddings: they do not belong "
                "together. Build the data with the model's tokenizer and its own template, or set model.resize to "
                "true, which adds embeddings"
            )
