"""NeMo Automodel: the function that makes its dataset, and the class that makes batches of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.trainers.rows import Row, SplitRows

ATTENTIONS = ("sdpa", "eager")


def rows(dataset: str, split: str = "train", max_length: int | None = None) -> SplitRows:
    """Open a split for `dataset._target_: chatmill.trainers.automodel.rows`.

    Args:
        dataset: A folder, a URL, or a recipe, which is built first.
        split: Name of the split.
        max_length: Tokens of a packed row, where the build did not pack.
    """
    return SplitRows(dataset, split, trainer="NeMo Automodel", max_length=max_length, has_weights=False)


class RowBatches:
    """Makes batches for `dataloader.collate_fn`: labels are shifted, and a 4D mask keeps documents apart.

    `attention` is that of the model: sdpa takes a mask of bools, and eager attention would add one to its scores and
    see everything.
    """

    def __init__(self, tokenizer: Any, attention: str) -> None:
        if attention not in ATTENTIONS:
            raise UnknownNameError(
                "attention",
                attention,
                list(ATTENTIONS),
                "Others read no 4D mask: use rows of one document each there, without this class.",
            )
        self._is_bool = attention == "sdpa"
        self._collate = DataCollatorForCausalLM(tokenizer, return_document_mask=True)

    def __call__(self, features: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return ids, shifted labels, positions, and the mask."""
        if not isinstance(features[0]["input_ids"], np.ndarray):
            raise ConfigError(
                "the rows are not those of chatmill.trainers.automodel.rows: set packed_sequence_size to 0, with which "
                "Automodel does not pack them again"
            )
        batch = self._collate(features)
        labels = torch.full_like(batch["labels"], IGNORE_INDEX)
        labels[:, :-1] = batch["labels"][:, 1:]
        mask = batch["attention_mask"]
        return {
            "input_ids": batch["input_ids"],
            "labels": labels,
            "position_ids": batch["position_ids"].long(),
            "attention_mask": mask == 0 if self._is_bool else mask,
        }
