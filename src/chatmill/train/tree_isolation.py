"""The isolation check of trees: that branches do not see each other, and that rows of trees train as rows alone.

Three things are shown on a user's own model, called with the batch that the collator makes for it:

1. The tokens of a branch are changed; the logits of every token that must not see them do not move.
2. Every row of a tree gives the logits that it gives alone.
3. The loss, and on request the gradients, are those of the rows one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.trees import rows_of_tree
from chatmill.errors import DataError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.train.isolation import ALONE_TOLERANCE, IsolationReport, PackedDocuments, measure, spread, still
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
    packed = _PackedTrees(model, batch, trees)
    rows = []
    for row, places, older in _rows(trees, device):
        targets = labels[row, places].clone()
        targets[:older] = IGNORE_INDEX  # an earlier row of the tree has these labels
        rows.append((packed.row_alone(row, places), targets[None]))
    with still(model):
        with torch.no_grad():
            report = measure(packed, max_probes=max_probes, seed=seed)
        loss, of_trees = _losses(model, [(batch, labels)], gradients)
        by_rows, of_rows = _losses(model, rows, gradients)
    trained = {"loss": abs(loss - by_rows) / max(abs(by_rows), 1e-12)}
    if of_trees is not None and of_rows is not None:
        trained["gradients"] = float((of_trees - of_rows).abs().max()) / float(of_rows.abs().max())
    return replace(report, trained=trained, trained_tolerance=ALONE_TOLERANCE[packed.dtype])


class _PackedTrees(PackedDocuments):
    """A batch of packed trees; its documents are stretches that the same tokens see."""

    def __init__(self, model: Any, batch: Mapping[str, Any], trees: Sequence[_Tree]) -> None:
        self._model = model
        self._batch = batch
        self._trees = trees
        self.dtype = torch.float32
        """That of the logits."""
        self._vocabulary = 0
        """Logits of a token."""
        self.rows = [[] for _ in batch["input_ids"]]
        self._tree_of: dict[Document, _Tree] = {}
        self._apart: dict[int, torch.Tensor] = {}
        """How far the tokens of a row are from those of the rows of its trees alone."""
        for tree in trees:
            row = self.rows[tree.row]
            cuts = np.union1d(tree.branches, np.flatnonzero(np.diff(tree.ends)) + 1)
            for first, last in pairwise([0, *cuts.tolist(), len(tree.ends)]):
                row.append(Document(row=tree.row, number=len(row), start=tree.start + first, length=last - first))
                self._tree_of[row[-1]] = tree

    def logits(self, changed: Mapping[int, Document], random: np.random.RandomState) -> Sequence[torch.Tensor]:
        """Compute the logits of each row, after changing one stretch of some rows."""
        ids = self._batch["input_ids"].clone()
        for probe in changed.values():
            steps = torch.from_numpy(random.randint(1, self._vocabulary, size=probe.length)).to(ids)
            ids[probe.row, probe.start : probe.end] = (probe.of(ids) + steps) % self._vocabulary  # others everywhere
        logits = self._model(**{**self._batch, "input_ids": ids}).logits
        self.dtype, self._vocabulary = logits.dtype, logits.shape[-1]
        return list(logits)

    def probes(self, row: int, most: int) -> list[Document]:
        """Choose stretches of each tree of a row."""
        chosen = []
        for _, stretches in groupby(self.rows[row], key=lambda document: self._tree_of[document].start):
            paths = list(stretches)
            chosen += [paths[place] for place in spread(len(paths), most)]
        return chosen

    def seen_behind(self, probe: Document) -> int:
        """Count the tokens behind a stretch that may see it."""
        tree = self._tree_of[probe]
        return tree.start + int(tree.ends[probe.start - tree.start]) - probe.end

    def row_alone(self, row: int, places: torch.Tensor) -> dict[str, Any]:
        """Make the batch of one row of a tree alone."""
        return {"input_ids": self._batch["input_ids"][row, places][None], "use_cache": False}

    def apart(self, document: Document, base: torch.Tensor) -> torch.Tensor:
        """Measure how far the logits of a stretch are from those in the rows of its tree, each alone."""
        if document.row not in self._apart:
            far = torch.zeros(len(base), dtype=base.dtype, device=base.device)
            for row, places, _ in _rows(self._trees, base.device):
                if row == document.row:
                    here = (self._model(**self.row_alone(row, places)).logits[0] - base[places]).abs().amax(-1)
                    far[places] = torch.maximum(far[places], here)
            self._apart[document.row] = far
        return self._apart[document.row][document.start : document.end]


def _trees(row: int, feature: Mapping[str, Any]) -> Iterator[_Tree]:
    """Find the trees of a row: each begins where no earlier token can be seen any more."""
    ends, positions = (np.asarray(feature[name], dtype=np.int64) for name in ("ends", "position_ids"))
    starts = np.flatnonzero(positions == 0)
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(ends)], strict=True):
        jumps = np.flatnonzero(np.diff(positions[first:last]) != 1) + 1
        yield _Tree(row=row, start=first, ends=ends[first:last] - first, branches=jumps)


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
