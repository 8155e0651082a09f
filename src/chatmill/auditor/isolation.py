"""Whether the documents of packed rows see each other in a model: the isolation check, on rows of the audited set.

What a trainer passes to the model is known of batches alone. Of stored rows it is known that a trainer which keeps
documents apart makes positions of their boundaries; so that is how the model is called, without a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.findings import Found
from chatmill.auditor.tokenized import TokenizedSet
from chatmill.core.blocks import Segments, boundaries_from_starts
from chatmill.core.tokens import offsets_of
from chatmill.errors import ChatmillError, ConfigError, DataError

if TYPE_CHECKING:
    from chatmill.train.isolation import IsolationReport

Ints = NDArray[np.int64]
ROWS = 2
DOCUMENTS = 4
HEAD = 64
"""Tokens of a document that the model is run on."""
WAYS = ("weights", "random")


@dataclass(slots=True, kw_only=True)
class Isolation:
    """What is known about isolation."""

    words: str = ""
    """One line for the report; empty where nothing is packed."""
    found: Found | None = None
    unknown: str = ""


def check_documents(data: TokenizedSet, wanted: Any, folder: Any) -> Isolation:
    """Run the check; `wanted` is `weights` or `random` for the model of `folder`, a loaded model, or None."""
    if isinstance(wanted, str) and wanted not in WAYS:
        raise ConfigError(f"isolation is checked with {' or '.join(WAYS)}, or a loaded model, not {wanted!r}")
    rows = packed_rows(data)
    if not len(rows):
        return Isolation(words="" if wanted is None else "no row holds two documents")
    if wanted is None:
        told = "Whether documents of packed rows see each other in the model: --isolation weights (or random) shows it"
        return Isolation(words="not checked", unknown=told)
    from chatmill.train.hf_model import load_hf_model

    if isinstance(wanted, str):
        if not isinstance(folder, str | Path):
            raise ConfigError("the isolation check needs the folder of the model, or the loaded model as `isolation`")
        random = wanted == "random"
        way_out = "--isolation random"
        model = load_hf_model(folder, attention="sdpa", random_weights=random, seed=0, way_out=way_out)
        name = "random weights" if random else "the model's weights"
    else:
        model, name = wanted, "the given model"
    return _checked(data, rows, model, name)


def packed_rows(data: TokenizedSet) -> Ints:
    """The rows that hold two documents and more."""
    row = data.row_of(data.documents[:-1][data.filled])
    return np.flatnonzero(np.bincount(row, minlength=len(data)) > 1)


def _checked(data: TokenizedSet, rows: Ints, model: Any, name: str) -> Isolation:
    ways = _calls(data, rows)
    called, batch = next(iter(ways.items()))
    try:
        report = _run(model, batch)
        masked = _run(model, ways[MASKED]) if MASKED in ways and report.passed else None
    except ChatmillError as error:
        return Isolation(words="not known", unknown=f"Whether packed documents see each other: {error}")
    if not report.passed:
        wrong = {*report.leaking, *report.unlike_alone}
        detail = (
            f"With {name}, called with {called}: {len(wrong)} of the {len(report.documents)} documents that were tried "
            f"are not isolated; logits move by up to {max(report.moved, report.alone):.3g}"
        )
        starts, ends = data.offsets[:-1][rows], data.offsets[1:][rows]
        found = Found("documents_leak", starts, ends, len(data), detail)
        return Isolation(words=f"documents see each other, with {name}", found=found)
    if masked is not None and not masked.passed:
        told = (
            f"Whether the trainer passes the set's attention_mask of ones: with {name} documents see each other where "
            "it does, and do not where it passes position_ids alone"
        )
        return Isolation(words=f"isolated by {called}, with {name}", unknown=told)
    return Isolation(words=f"isolated by {called}, with {name}")


MASKED = "position_ids and the attention_mask of the set"


def _run(model: Any, batch: dict[str, Any]) -> IsolationReport:
    from chatmill.train.isolation import check_isolation

    starts = batch.pop("document_starts")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and int(batch["input_ids"].max()) >= size:
        raise DataError(f"the model has {size:,} ids, and the set id {int(batch['input_ids'].max()):,}")
    is_module = hasattr(model, "parameters")
    return check_isolation(model, batch, document_starts=starts, **({"use_cache": False} if is_module else {}))


def _calls(data: TokenizedSet, rows: Ints) -> dict[str, dict[str, Any]]:
    """What the model may be given, most likely first: heads of documents of some rows, cut to one width."""
    import torch

    from chatmill.load.document_masks import dense_document_mask

    ids, starts, segments = _tried(data, rows)
    base: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "document_starts": starts}
    positions = {"position_ids": torch.from_numpy(segments.position_ids)}
    mask = {"attention_mask": torch.ones_like(base["input_ids"])}
    if data.is_batches:  # the model gets what is there
        own = {name: value for name, value in (positions | mask).items() if name in data.inputs}
        if data.pair_mask:
            own["attention_mask"] = dense_document_mask(torch.from_numpy(segments.seq_idx))
        return {" and ".join(own) or "input_ids alone": base | own}
    ways = {"position_ids": base | positions}
    if "attention_mask" in data.inputs and data.boundaries != "attention_mask":
        ways[MASKED] = base | positions | mask
    return ways


def _tried(data: TokenizedSet, rows: Ints) -> tuple[Ints, list[Ints], Segments]:
    """Ids and documents of some rows, cut to the shortest; of the first alone where one would be left with one."""
    taken = [_heads(data, int(row)) for row in rows[:ROWS]]
    starts = [offsets_of(np.array([len(head) for head in heads]))[:-1] for heads in taken]
    ids = [data.ids[np.concatenate(heads)] for heads in taken]
    width = min(map(len, ids))
    if any(one[1] >= width for one in starts):
        ids, starts, width = ids[:1], starts[:1], len(ids[0])
    starts = [one[one < width] for one in starts]
    segments = boundaries_from_starts(starts, np.full(len(ids), width)).segments(width)
    return np.stack([row[:width] for row in ids]), starts, segments


def _heads(data: TokenizedSet, row: int) -> list[Ints]:
    """Places of the first tokens of the first documents of a row."""
    first, last = np.searchsorted(data.documents, data.offsets[row : row + 2]).tolist()
    numbers = first + np.flatnonzero(data.filled[first:last])[:DOCUMENTS]
    spans = zip(data.documents[numbers].tolist(), data.documents[numbers + 1].tolist(), strict=True)
    return [begin + np.flatnonzero(~data.padding[begin:end])[:HEAD] for begin, end in spans]
