"""What the trainers that are made of transformers' `Trainer` share: batches of rows, and what weights divide by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chatmill.errors import ConfigError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.train.losses import token_losses
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


class WeightsInLoss:
    """What makes a `Trainer` whose model computes its own loss weigh its tokens; a base class in front of it."""

    def compute_loss(
        self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute `sum(weight * loss)`, divided by what the step is divided by."""
        if WEIGHTS not in inputs:
            given = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return super().compute_loss(model, inputs, **given)  # type: ignore[misc]

        inputs = dict(inputs)
        weights = inputs.pop(WEIGHTS)[:, 1:]
        labels = inputs.pop("labels")[:, 1:]
        outputs = model(**inputs)
        if getattr(outputs, "aux_loss", None) is not None:
            raise ConfigError(
                "the model adds a loss of its own (output_router_logits), for which weights have no share: turn it "
                "off, or build with weights of 0 and 1"
            )
        divisor = weights.sum() if num_items_in_batch is None else num_items_in_batch
        losses = token_losses(outputs.logits[:, :-1], labels) * weights
        loss = losses.sum() / torch.as_tensor(divisor).clamp(min=torch.finfo(torch.float32).tiny)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes / self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: torch.device) -> Any:
        """Return what the loss of a step is divided by."""
        if batch_samples and WEIGHTS in batch_samples[0]:
            return sum_of_weights(self, batch_samples, device)
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
