"""NeMo Automodel: the function that makes its dataset, the class that makes batches, and datums for own loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.trainers.rows import WEIGHTS, Row, SplitRows

ATTENTIONS = ("sdpa", "eager")


def rows(dataset: str, split: str = "train", max_length: int | None = None) -> SplitRows:
    """Open a split for `dataset._target_: chatmill.trainers.automodel.rows`.

    Args:
        dataset: A folder, a URL, or a recipe, which is built first.
        split: Name of the split.
        max_length: Tokens of a packed row, where the build did not pack.
    """
    return SplitRows(dataset, split, trainer="NeMo Automodel", max_length=max_length, has_weights=False)


class Datums:
    """The documents of a split as `Datum`s, one each, for `collate_datums` in a loop of your own.

    Targets and weights are shifted, as Automodel wants them, and weights are as they are stored. Its recipes read no
    datums.
    """

    def __init__(self, dataset: str, split: str = "train") -> None:
        """Open a split of a folder, a URL, or a recipe, which is built first."""
        try:
            from nemo_automodel.components.datasets.datum import Datum
        except ImportError as error:
            raise ConfigError(f"datums need a NeMo Automodel that has them (0.7.0 does): {error}") from error
        self._datum = Datum
        self.rows = SplitRows(dataset, split, trainer="NeMo Automodel", packed=False, has_trees=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        row = self.rows[number]
        ids = row["input_ids"]
        weights = row[WEIGHTS] if WEIGHTS in row else (row["labels"] >= 0).astype(np.float32)
        # The last token predicts nothing: it has a target, as a datum must, that weighs nothing.
        targets = np.append(ids[1:], 0)
        shifted = np.append(weights[1:], np.float32(0))
        inputs = {"target_tokens": torch.from_numpy(targets), "weights": torch.from_numpy(shifted)}
        return self._datum(input_ids=torch.from_numpy(ids), loss_fn_inputs=inputs)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


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
