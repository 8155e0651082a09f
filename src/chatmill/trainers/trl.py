"""TRL: its `SFTTrainer`, which reads a dataset of Chatmill, with weights and trees."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from chatmill.errors import ConfigError
from chatmill.trainers.hf import REAL, RowCollator, sum_of_weights
from chatmill.trainers.rows import WEIGHTS, SplitRows

try:
    import datasets
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.utils import add_fused_lm_head as add_fused_lm_head
except ImportError as error:
    raise ConfigError(
        f"chatmill.trainers.trl needs TRL 1.16 or later, whose trainer gives the loss of each token: {error}"
    ) from error

Address = str | os.PathLike[str]


class ChatmillSFTTrainer(SFTTrainer):
    """`SFTTrainer` on a dataset of Chatmill: nothing is tokenized, cut, packed or dropped again.

    `train_dataset` is a folder, a URL, or a recipe, which is built first. Rows are those of the build. With
    `packing=True` in `args` they are packed into `max_length` tokens where the build did not pack; a longer document
    is an error. `max_length` has no other meaning here.

    The loss of a step is `sum(weight * loss) / sum(weight)`.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        train_dataset: Address,
        eval_dataset: Address | None = None,
        processing_class: Any = None,
        **options: Any,
    ) -> None:
        """Open the dataset, and refuse what would change its rows.

        Args:
            model: As in TRL.
            args: TRL's `SFTConfig`.
            train_dataset: The dataset, of which the split `train` is read.
            eval_dataset: A dataset of which `val` is read; default: that one, if `args` ask for evaluation.
            processing_class: As in TRL.
            options: Other options of `SFTTrainer`.
        """
        given = self._given = SFTConfig() if args is None else args
        _refuse(given, options)
        train = _rows(train_dataset, "train", given, model)
        evaluation = eval_dataset
        if evaluation is None and str(getattr(given.eval_strategy, "value", given.eval_strategy)) != "no":
            evaluation = train_dataset
        validation = None if evaluation is None else _rows(evaluation, "val", given, model)
        if given.loss_type != "nll" and (train.has_weights or (validation is not None and validation.has_weights)):
            raise ConfigError(
                f"{train_dataset}: some tokens have another weight than 0 and 1, which loss_type {given.loss_type!r} "
                "has no place for: set loss_type='nll', or build with weights of 0 and 1"
            )

        super().__init__(
            model=model,
            args=_left_alone(given),
            data_collator=_unmade,
            train_dataset=_lazy(train),
            eval_dataset=None if validation is None else _lazy(validation),
            processing_class=processing_class,
            **options,
        )
        self.data_collator = RowCollator(self.processing_class, self.model, marks_tokens=True)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the split `val` of the dataset, or of another one."""
        if isinstance(eval_dataset, str | os.PathLike) and eval_dataset != "eval":
            eval_dataset = _lazy(_rows(eval_dataset, "val", self._given, self.model))
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the weighted loss; count the tokens without padding."""
        inputs = dict(inputs)
        tokens = self.accelerator.gather_for_metrics(inputs.pop(REAL).sum()).sum().item()
        weights = inputs.pop(WEIGHTS, None)
        mode = "train" if self.model.training else "eval"
        seen = self._total_train_tokens

        if weights is not None:
            model = _Weighted(model, weights, inputs["labels"], is_alone=num_items_in_batch is None)
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        # TRL adds up the attention mask, or takes the width of the batch
        self._total_train_tokens = seen + (int(tokens) if mode == "train" else 0)
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return found

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return what the loss of a step is divided by."""
        if batch_samples and WEIGHTS in batch_samples[0]:
            return sum_of_weights(self, batch_samples, device)
        return super()._get_num_items_in_batch(batch_samples, device)


class _Weighted:
    """A model whose log-probabilities of tokens are multiplied by their weights."""

    def __init__(self, model: Any, weights: torch.Tensor, labels: torch.Tensor, *, is_alone: bool) -> None:
        """`is_alone`: TRL divides by the number of labels, so that the mean over weights is made here."""
        self._model = model
        self._weights = weights[:, 1:]
        if is_alone:
            count = (labels[:, 1:] != -100).sum()
            self._weights = self._weights * count / self._weights.sum().clamp(min=torch.finfo(torch.float32).tiny)

    def __call__(self, **inputs: Any) -> Any:
        outputs = self._model(**inputs)
        if inputs.get("fused_lm_head"):
            outputs.log_probs = outputs.log_probs * self._weights
        return outputs


def _refuse(args: Any, options: dict[str, Any]) -> None:
    """Refuse options of TRL that make rows, or that the rows have no meaning for."""
    for name in ("data_collator", "formatting_func", "compute_loss_func"):
        if options.pop(name, None) is not None:
            raise ConfigError(f"{name} makes batches or losses of its own: with ChatmillSFTTrainer leave it out")
    for name in ("padding_free", "assistant_only_loss", "completion_only_loss", "label_smoothing_factor"):
        if getattr(args, name, None):
            raise ConfigError(
                f"{name} has no meaning for rows of Chatmill, which say what is trained and where documents begin: "
                "leave it out"
            )
    parallel = getattr(args, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        raise ConfigError("context and sequence parallelism drop the masks that keep documents apart: leave them out")


def _rows(dataset: Address, split: str, args: Any, model: Any) -> SplitRows:
    if not isinstance(dataset, str | os.PathLike):
        raise ConfigError(
            f"a dataset of Chatmill is named by its folder, its URL or its recipe, not by a {type(dataset).__name__}: "
            "for other datasets use TRL's own SFTTrainer"
        )
    length = args.max_length if args.packing else None
    rows = SplitRows(dataset, split, trainer="TRL", model=None if isinstance(model, str) else model)
    if length is not None and rows.source.splits[split].plan is None:
        return SplitRows(dataset, split, trainer="TRL", max_length=length, packed=True)
    return rows


def _left_alone(args: Any) -> Any:
    """Return the arguments with which TRL leaves rows as they are."""
    changed = copy.copy(args)
    changed.packing = False
    changed.max_length = None
    changed.remove_unused_columns = False
    changed.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return changed


def _lazy(rows: SplitRows) -> Any:
    """Return a `datasets.Dataset` that reads rows when they are asked for."""

    def read(numbers: dict[str, list[int]]) -> dict[str, list[Any]]:
        found = [rows[number] for number in numbers["row"]]
        return {name: [row[name] for row in found] for name in found[0]}

    return datasets.Dataset.from_dict({"row": range(len(rows))}).with_transform(read)


def _unmade(features: Any) -> Any:
    raise AssertionError("the collator is made when the model is known")
