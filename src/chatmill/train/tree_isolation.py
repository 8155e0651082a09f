"""The isolation check of trees: that branches do not see each other, and that rows of trees train as rows alone.

Three things are shown on a user's own model, called with the batch that the collator makes for it:

1. The tokens of a branch are changed; the logits of every token that must not see them do not move.
2. Every row of a tree gives the logits that it gives alone.
3. The loss, and on request the gradients, are those of the rows one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.trees import rows_of_tree
from chatmill.errors import DataError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.train.isolation import ALONE_TOLERANCE, spread, still
from chatmill.train.losses import token_losses

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeReport:
    """The result of `check_trees`; differences are the largest ones, absolute, or relative where that is said."""

    trees: int
    branches: int
    rows: int
    moved: float
    """How far logits moved of tokens that do not see what was changed; 0 when branches are isolated."""
    moved_tolerance: float
    alone: float
    """How far the logits of a row in its tree are from those of the row alone."""
    alone_tolerance: float
    loss: float
    """Difference of the loss from that of rows alone, relative."""
    gradients: float | None
    """The same of the gradients, relative to the largest; None where they were not asked for."""
    tolerance: float
    """Of loss and gradients."""

    @property
    def passed(self) -> bool:
        """Whether trees train as their rows do."""
        close = [self.loss, *([] if self.gradients is None else [self.gradients])]
        return (
            self.moved <= self.moved_tolerance
            and self.alone <= self.alone_tolerance
            and all(one <= self.tolerance for one in close)
        )

    def __str__(self) -> str:
        verdict = "trees train as their rows do" if self.passed else "NOT ISOLATED"
        lines = [
            f"{verdict}: {self.trees} trees, {self.branches} branches, {self.rows} rows",
            f"  moved by another branch    {self.moved:.3g}  (tolerance {self.moved_tolerance:.3g})",
            f"  unlike the row alone       {self.alone:.3g}  (tolerance {self.alone_tolerance:.3g})",
            f"  loss, relative             {self.loss:.3g}  (tolerance {self.tolerance:.3g})",
        ]
        if self.gradients is not None:
            lines.append(f"  gradients, relative        {self.gradients:.3g}  (tolerance {self.tolerance:.3g})")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """One tree of a packed row."""

    row: int
    start: int
    ends: Ints
    """Of its tokens, counted in it."""
    branches: Ints
    """Where its branches begin."""

    @property
    def end(self) -> int:
        """One past its last token in the row."""
        return self.start + len(self.ends)


def check_trees(
    model: Any, features: Sequence[Mapping[str, Any]], *, max_probes: int = 8, gradients: bool = False, seed: int = 0
) -> TreeReport:
    """Check rows of trees (`input_ids`, `labels`, `position_ids` and `ends`) on a transformers model.

    At most `max_probes` branches of each tree are changed. The model is called in eval mode.
    """
    trees = [tree for row, feature in enumerate(features) for tree in _trees(row, feature)]
    branches = sum(len(tree.branches) for tree in trees)
    if not branches:
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
            moved = _moved(model, batch, base, trees, max_probes, random)
            alone = max(_unlike_alone(model, batch, base, tree) for tree in trees)
        loss, of_trees = _losses(model, [(batch, labels)], gradients)
        by_rows, of_rows = _losses(model, _rows(batch, labels, trees), gradients)
    scale = max(1.0, float(base.abs().max()))
    tolerance = ALONE_TOLERANCE[base.dtype]
    largest = float(of_rows.abs().max()) if of_rows is not None else 1.0
    difference = None if of_trees is None or of_rows is None else float((of_trees - of_rows).abs().max()) / largest
    return TreeReport(
        trees=len(trees),
        branches=branches,
        rows=len(trees) + branches,
        moved=moved,
        moved_tolerance=torch.finfo(base.dtype).eps * scale,
        alone=alone,
        alone_tolerance=max(tolerance, ALONE_TOLERANCE[torch.float32]) * scale,
        loss=abs(loss - by_rows) / max(abs(by_rows), 1e-12),
        gradients=difference,
        tolerance=max(tolerance, ALONE_TOLERANCE[torch.float32]),
    )


def _trees(row: int, feature: Mapping[str, Any]) -> Iterator[_Tree]:
    """The trees of a row: each begins where no earlier token can be seen any more."""
    ends, positions = (np.asarray(feature[name], dtype=np.int64) for name in ("ends", "position_ids"))
    starts = np.flatnonzero(positions == 0)
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(ends)], strict=True):
        jumps = np.flatnonzero(np.diff(positions[first:last]) != 1) + 1
        yield _Tree(row=row, start=first, ends=ends[first:last] - first, branches=jumps)


def _moved(
    model: Any, batch: Mapping[str, Any], base: torch.Tensor, trees: Sequence[_Tree], most: int, random: Any
) -> float:
    """The largest movement of tokens that do not see a branch that was changed."""
    moved = 0.0
    highest = int(base.shape[-1])
    for tree in trees:
        borders = [0, *tree.branches.tolist(), len(tree.ends)]
        for number in spread(len(borders) - 1, most):
            first, last = borders[number], borders[number + 1]
            ids = batch["input_ids"].clone()
            fresh = torch.from_numpy(random.randint(0, highest, size=last - first)).to(ids)
            ids[tree.row, tree.start + first : tree.start + last] = fresh
            logits = model(**{**batch, "input_ids": ids}).logits[tree.row]
            sees = np.zeros(ids.shape[1], dtype=np.bool_)  # any token that was changed
            for place in range(first, last):
                sees[tree.start + place : tree.start + int(tree.ends[place])] = True
            blind = torch.from_numpy(~sees).to(base.device)
            if blind.any():
                moved = max(moved, float((logits[blind] - base[tree.row][blind]).abs().max()))
    return moved


def _unlike_alone(model: Any, batch: Mapping[str, Any], base: torch.Tensor, tree: _Tree) -> float:
    found = 0.0
    for path, _ in rows_of_tree(tree.ends, tree.branches):
        place = torch.from_numpy(path + tree.start).to(base.device)
        alone = model(input_ids=batch["input_ids"][tree.row, place][None], use_cache=False).logits[0]
        found = max(found, float((alone - base[tree.row, place]).abs().max()))
    return found


def _rows(
    batch: Mapping[str, Any], labels: torch.Tensor, trees: Sequence[_Tree]
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The rows of trees, each alone, with the labels that no earlier row of its tree has."""
    for tree in trees:
        for path, older in rows_of_tree(tree.ends, tree.branches):
            place = torch.from_numpy(path + tree.start).to(labels.device)
            own = labels[tree.row, place].clone()
            own[:older] = IGNORE_INDEX
            yield {"input_ids": batch["input_ids"][tree.row, place][None], "use_cache": False}, own[None]


def _losses(
    model: Any, batches: Iterator[tuple[dict[str, Any], torch.Tensor]] | list[Any], gradients: bool
) -> tuple[float, torch.Tensor | None]:
    """The sum of the losses over all targets, and the gradients of it."""
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
    found = torch.cat([one.grad.flatten().double() for one in model.parameters() if one.grad is not None])
    model.zero_grad()
    return total, found
