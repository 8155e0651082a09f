"""The isolation check of trees: that branches do not see each other, and that rows of trees train as rows alone.

Three things are shown on a user's own model, called with the batch that the collator makes for it:

1. The tokens of a branch are changed; the logits of every token that must not see them do not move.
2. Every row of a tree gives the logits that it gives alone.
3. The loss, and on request the gradients, are those of the rows one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.trees import rows_of_tree
from chatmill.errors import DataError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.train.isolation import ALONE_TOLERANCE, IsolationReport, alone_tolerance, note_movement, spread, still
from chatmill.train.isolation_batches import Document
from chatmill.train.losses import token_losses

Ints = NDArray[np.int64]


class _Tree(NamedTuple):
    """One tree of a packed row."""

    row: int
    start: int
    ends: Ints
    """Of its tokens, counted in it."""
    branches: Ints
    """Where its branches begin."""


def check_trees(
    model: Any, features: Sequence[Mapping[str, Any]], *, max_probes: int = 8, gradients: bool = False, seed: int = 0
) -> IsolationReport:
    """Check rows of trees (`input_ids`, `labels`, `position_ids` and `ends`) on a transformers model.

    The documents of the report are stretches of trunks and branches that the same tokens see. At most `max_probes` of
    each tree are changed. The model is called in eval mode.
    """
    trees = [tree for row, feature in enumerate(features) for tree in _trees(row, feature)]
    if not any(len(tree.branches) for tree in trees):
        raise DataError("no tree of these rows has a branch, so there is nothing to keep apart: take other rows")
    special = SimpleNamespace(pad_token_id=0, eos_token_id=None)  # padding is seen by nothing
    device = next(model.parameters()).device
    batch: dict[str, Any] = DataCollatorForCausalLM(special, model=model)(features)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    labels = batch.pop("labels")
    random = np.random.RandomState(seed)
    with still(model):
        with torch.no_grad():
            base = model(**batch).logits
            documents = _moved(model, batch, base, trees, max_probes, random)
            rows, apart = [], torch.zeros(base.shape[:2], dtype=base.dtype, device=device)
            for row, places, older in _rows(trees, device):
                alone = {"input_ids": batch["input_ids"][row, places][None], "use_cache": False}
                far = (model(**alone).logits[0] - base[row, places]).abs().amax(-1)
                apart[row, places] = torch.maximum(apart[row, places], far)
                targets = labels[row, places].clone()
                targets[:older] = IGNORE_INDEX  # an earlier row of the tree has these labels
                rows.append((alone, targets[None]))
            for document in documents:
                document.alone = float(document.of(apart).max())
        loss, of_trees = _losses(model, [(batch, labels)], gradients)
        by_rows, of_rows = _losses(model, rows, gradients)
    trained = {"loss": abs(loss - by_rows) / max(abs(by_rows), 1e-12)}
    if of_trees is not None and of_rows is not None:
        trained["gradients"] = float((of_trees - of_rows).abs().max()) / float(of_rows.abs().max())
    return IsolationReport(
        documents=tuple(documents),
        moved_tolerance=torch.finfo(base.dtype).eps * max(1.0, float(base.abs().max())),
        alone_tolerance=alone_tolerance(base),
        trained=trained,
        trained_tolerance=ALONE_TOLERANCE[base.dtype],
    )


def _trees(row: int, feature: Mapping[str, Any]) -> Iterator[_Tree]:
    """Find the trees of a row: each begins where no earlier token can be seen any more."""
    ends, positions = (np.asarray(feature[name], dtype=np.int64) for name in ("ends", "position_ids"))
    starts = np.flatnonzero(positions == 0)
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(ends)], strict=True):
        jumps = np.flatnonzero(np.diff(positions[first:last]) != 1) + 1
        yield _Tree(row=row, start=first, ends=ends[first:last] - first, branches=jumps)


def _moved(
    model: Any, batch: Mapping[str, Any], base: torch.Tensor, trees: Sequence[_Tree], most: int, random: Any
) -> list[Document]:
    """Stretches that the same tokens see, with the largest movement of each by a change of one that it must not see."""
    rows: dict[int, list[Document]] = {}
    probes: list[tuple[_Tree, Document]] = []
    for tree in trees:
        paths: list[Document] = []
        row = rows.setdefault(tree.row, [])
        cuts = np.union1d(tree.branches, np.flatnonzero(np.diff(tree.ends)) + 1)
        for first, last in pairwise([0, *cuts.tolist(), len(tree.ends)]):
            number = len(row) + len(paths)
            paths.append(Document(row=tree.row, number=number, start=tree.start + first, length=last - first))
        row += paths
        probes += [(tree, paths[place]) for place in spread(len(paths), most)]
    for tree, probe in probes:
        ids = batch["input_ids"].clone()
        steps = torch.from_numpy(random.randint(1, base.shape[-1], size=probe.length)).to(ids)
        ids[tree.row, probe.start : probe.end] = (probe.of(ids) + steps) % base.shape[-1]  # another id everywhere
        moved = (model(**{**batch, "input_ids": ids}).logits[tree.row] - base[tree.row]).abs().amax(-1)
        moved[probe.end : tree.start + int(tree.ends[probe.start - tree.start])] = 0  # these may see what was changed
        note_movement(rows[tree.row], probe, moved)
    return [document for row in rows.values() for document in row]


def _rows(trees: Sequence[_Tree], device: torch.device) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield the rows of trees: packed row, places in it, and how many of these an earlier row of the tree has."""
    for tree in trees:
        for path, older in rows_of_tree(tree.ends, tree.branches):
            yield tree.row, torch.from_numpy(path + tree.start).to(device), older


def _losses(
    model: Any, batches: Sequence[tuple[dict[str, Any], torch.Tensor]], gradients: bool
) -> tuple[float, torch.Tensor | None]:
    """Sum the losses over all targets, and compute the gradients of the sum."""
    total = 0.0
    model.zero_grad()
    for batch, labels in batches:
        with torch.set_grad_enabled(gradients):
            loss = token_losses(model(**batch).logits[:, :-1], labels[:, 1:]).sum()
            if gradients:
                loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    if not gradients:
        return total, None
    grads = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return total, grads
