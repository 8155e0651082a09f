"""What the trainers that are made of transformers' `Trainer` share: batches of rows, and what weights divide by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.trainers.rows import WEIGHTS

REAL = "is_token"
"""1 for tokens and 0 for padding."""


class RowCollator(DataCollatorForCausalLM):
    """Makes a batch of `SplitRows` as the attention of a model reads it.

    Besides what the model reads it holds `loss_weights` where the rows have them, and `is_token` if asked for: the
    trainer takes them out.
    """

    float_columns = (WEIGHTS, REAL)

    def __init__(self, tokenizer: Any, model: Any, *, marks_tokens: bool = False) -> None:
        """`marks_tokens`: give `is_token`."""
        super().__init__(tokenizer, model=model)
        self._marks_tokens = marks_tokens

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        """Return the batch as a dict."""
        if self._marks_tokens:
            features = [{**row, REAL: np.ones(len(row["input_ids"]), dtype=np.float32)} for row in features]
        return super().__call__(features)


def sum_of_weights(trainer: Any, batches: Sequence[Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """Add up the weights of all batches of a step, on all ranks if the trainer averages over their tokens."""
    sums = [batch[WEIGHTS].sum(dtype=torch.float64) for batch in batches]
    total: torch.Tensor = torch.stack(sums).sum().to(device, torch.float32)
    if trainer.args.average_tokens_across_devices and trainer.args.world_size > 1:
        total = trainer.accelerator.gather(total).sum()
    ranks_alike = int(trainer.get_tp_size())
    return total / ranks_alike
