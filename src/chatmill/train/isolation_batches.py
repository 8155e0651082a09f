"""The batches of the isolation check: which documents a batch holds, one of them changed, and one alone.

A batch keeps the entries that the caller's batch has (positions, segment numbers, masks, sequence lengths), so that
the model is called in the caller's way in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_starts
from chatmill.errors import ConfigError
from chatmill.load.document_masks import flex_document_mask


@dataclass(slots=True, kw_only=True, eq=False)
class Document:
    """One document of a packed row, and what is measured for it; differences are the largest over all its logits."""

    row: int
    number: int
    """Counted from 0 in the row; the padding after the last document is one more."""
    start: int
    length: int
    moved: float = 0.0
    """How far its logits moved when another document of the row was changed; 0 when isolated."""
    moved_by: int | None = None
    """The document whose change moved it most; None where nothing moved."""
    alone: float = 0.0
    """How far its logits are from those of the document alone in a row."""

    @property
    def end(self) -> int:
        """One past its last token."""
        return self.start + self.length

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Select the document's part of values over (rows, tokens, ...)."""
        return values[self.row, self.start : self.end]


def find_documents(
    batch: Mapping[str, Any], ids: torch.Tensor, document_starts: Sequence[Any] | None
) -> list[list[Document]]:
    """Find the documents of every row; padding after the last counts as a document if the batch shows it."""
    count, width = ids.shape
    if document_starts is not None:
        checked = boundaries_from_starts(document_starts, np.full(count, width, dtype=np.int64))
        begins = np.zeros((count, width), dtype=np.bool_)
        begins[checked.rows, checked.starts] = True
    elif "seq_idx" in batch:
        begins = np.diff(batch["seq_idx"].cpu().numpy(), axis=1, prepend=-1) != 0
    elif "position_ids" in batch:
        begins = np.diff(batch["position_ids"].cpu().numpy(), axis=1, prepend=-2) != 1
    else:
        raise ConfigError(
            "where do documents begin? The batch has neither position_ids nor seq_idx: pass document_starts"
        )
    rows = []
    for row in range(count):
        starts = np.flatnonzero(begins[row]).tolist()
        borders = enumerate(pairwise([*starts, width]))
        rows.append([Document(row=row, number=n, start=a, length=b - a) for n, (a, b) in borders])
    return rows


def fresh_ids(ids: torch.Tensor, rows: list[list[Document]], *, vocabulary: int) -> NDArray[np.int64]:
    """Choose ids to write into a document: none that begins or ends one; those of the batch if they suffice.

    Ids of the batch are valid for any model; the width of the logits is the second guess.
    """
    edges = torch.stack([document.of(ids)[[0, -1]] for row in rows for document in row]).cpu().numpy()
    fresh = np.setdiff1d(ids.cpu().numpy(), edges)
    return fresh if len(fresh) > 1 else np.setdiff1d(np.arange(vocabulary), edges)


def changed_document(tokens: torch.Tensor, fresh: NDArray[np.int64], random: np.random.RandomState) -> torch.Tensor:
    """Replace every id except the first and last of a document of three or more.

    Those stay, and `fresh` holds none of them, so that a model which finds documents by BOS or EOS finds the same
    ones.
    """
    old = tokens.cpu().numpy()
    pick = random.randint(len(fresh), size=len(old))
    new = np.where(fresh[pick] == old, fresh[(pick + 1) % len(fresh)], fresh[pick])
    if len(new) > 2:
        new[[0, -1]] = old[[0, -1]]
    return torch.from_numpy(new).to(tokens)


def alone(batch: Mapping[str, Any], document: Document) -> dict[str, Any]:
    """Make a batch of one row that holds one document, with the same entries if possible."""
    ids, length = document.of(batch["input_ids"]), document.length
    row: dict[str, Any] = {"input_ids": ids[None]}
    for name, value in batch.items():
        if name == "use_cache":
            row[name] = value
        elif name == "position_ids":
            row[name] = torch.arange(length, device=ids.device)[None]
        elif name == "seq_idx":
            row[name] = torch.zeros_like(ids[None]).to(value)
        elif name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
            fixed = len(value) if value[-1] == value[-2] else 2
            row[name] = value.new_full((fixed,), length)
            row[name][0] = 0
        elif name in ("max_length_q", "max_length_k"):
            row[name] = length
        elif name == "max_seqlen":
            row[name] = torch.full_like(value, length)
        elif name in ("attention_mask", "document_mask"):
            row[name] = _mask_of(value, document)
    return row


def _mask_of(mask: Any, document: Document) -> Any:
    """Cut the document's part out of a mask."""
    if not isinstance(mask, torch.Tensor):  # a FlexAttention BlockMask
        return flex_document_mask(torch.zeros(1, document.length, dtype=torch.int64, device=mask.kv_indices.device))
    if mask.ndim == 4:
        span = slice(document.start, document.end)
        return mask[None, document.row if len(mask) > 1 else 0, :, span, span]
    return document.of(mask)[None]
