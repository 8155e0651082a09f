"""The batches of the isolation check: which documents a batch holds, one of them alone, and one among filler.

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


def other_tokens(tokens: torch.Tensor, fresh: NDArray[np.int64], random: np.random.RandomState) -> torch.Tensor:
    """Replace every id."""
    old = tokens.cpu().numpy()
    pick = random.randint(len(fresh), size=len(old))
    new = fresh[pick]
    return torch.from_numpy(np.where(new == old, fresh[(pick + 1) % len(fresh)], new)).to(tokens)


def changed_document(tokens: torch.Tensor, fresh: NDArray[np.int64], random: np.random.RandomState) -> torch.Tensor:
    """Replace every id except the first and last of a document of three or more.

    Those stay, and `fresh` holds none of them, so that a model which finds documents by BOS or EOS finds the same
    ones.
    """
    new = other_tokens(tokens, fresh, random)
    if len(new) > 2:
        new[[0, -1]] = tokens[[0, -1]]
    return new


def alone(batch: Mapping[str, Any], document: Document) -> dict[str, Any]:
    """Make a batch of one row that holds one document, with the same entries if possible."""
    return _one_row(batch, document, document.of(batch["input_ids"]), [document.length], 0)


def among_filler(batch: Mapping[str, Any], document: Document, at: int) -> tuple[dict[str, Any], slice]:
    """Make a batch of one row as wide as the caller's, with the document at `at`; also its place in the row.

    Before and after it are copies of it, each a document by itself: no position is larger than one that the model
    has seen.
    """
    width, length = batch["input_ids"].shape[1], document.length
    tokens = document.of(batch["input_ids"])
    before, after = _pieces(at, length), _pieces(width - at - length, length)
    ids = torch.cat([tokens[:n] for n in [*before, length, *after]])
    return _one_row(batch, document, ids, [*before, length, *after], len(before)), slice(at, at + length)


def _pieces(total: int, most: int) -> list[int]:
    """Split `total` into lengths of at most `most`."""
    return [most] * (total // most) + [total % most] * (total % most > 0)


def _one_row(
    batch: Mapping[str, Any], document: Document, ids: torch.Tensor, lengths: list[int], index: int
) -> dict[str, Any]:
    """Make a batch of one row of documents with these lengths; `index` is the one that is measured."""
    sizes = torch.tensor(lengths, device=ids.device)
    segments = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), sizes)
    row: dict[str, Any] = {"input_ids": ids[None]}
    for name, value in batch.items():
        if name == "use_cache":
            row[name] = value
        elif name == "position_ids":
            row[name] = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
        elif name == "seq_idx":
            row[name] = segments.to(value)[None]
        elif name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
            ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
            # Longer than the caller's when the row has more documents than all of theirs had.
            fixed = len(value) if value[-1] == value[-2] else 0
            row[name] = value.new_full((max(fixed, len(ends)),), len(ids))
            row[name][: len(ends)] = ends
        elif name in ("max_length_q", "max_length_k"):
            row[name] = max(lengths)
        elif name == "max_seqlen":
            row[name] = torch.full_like(value, max(lengths))
        elif name in ("attention_mask", "document_mask"):
            row[name] = _mask(value, document, segments, index)
    return row


def _mask(mask: Any, document: Document, segments: torch.Tensor, index: int) -> Any:
    """Use the caller's mask inside the document; filler is causal and sees only itself."""
    if not isinstance(mask, torch.Tensor):  # a FlexAttention BlockMask
        return flex_document_mask(segments.to(mask.kv_indices.device)[None])
    place = torch.nonzero(segments == index)[:, 0].to(mask.device)
    if mask.ndim == 4:
        same = segments[:, None] == segments[None, :]
        allowed = (same & torch.ones_like(same).tril()).to(mask.device)
        pairs = torch.where(allowed, mask.amax(), mask.amin()).expand(1, mask.shape[1], -1, -1).clone()
        span = slice(document.start, document.end)
        inside = mask[document.row if len(mask) > 1 else 0, :, span, span]
        pairs[0, :, place[0] : place[-1] + 1, place[0] : place[-1] + 1] = inside
        return pairs
    filled = mask.new_ones(1, len(segments))
    filled[0, place] = document.of(mask)
    return filled
