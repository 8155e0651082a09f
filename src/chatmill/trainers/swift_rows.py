"""ms-swift: rows of a dataset in place of those that `swift sft` encodes, and the batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatmill.errors import ConfigError
from chatmill.trainers.hf import RowCollator
from chatmill.trainers.rows import WEIGHTS, SplitRows
from chatmill.trainers.source import split_of

try:
    from swift.pipelines.train.sft import SwiftSft
except ImportError as error:
    raise ConfigError(f"chatmill.trainers.ms_swift needs ms-swift 4.6 or later: {error}") from error

MAKES_ROWS = ("streaming", "cached_dataset", "cached_val_dataset", "packing", "padding_free", "split_dataset_ratio")
"""Options that make, cut or choose rows."""
OTHER_LOSSES = ("enable_channel_loss", "enable_dft_loss", "rlhf_type")


def give_rows() -> None:
    """Let `swift sft` read its `--dataset` as a dataset of Chatmill."""
    SwiftSft._prepare_dataset = _prepare_dataset


def _prepare_dataset(pipeline: Any) -> list[Any]:
    """Return the rows for training and validation, and set the collator that makes batches of them.

    ms-swift would encode each row twice, and give another row at random in place of one that fails.
    """
    args = pipeline.args
    _refuse(pipeline, args)
    train = _rows(args.dataset, args)
    validation = _rows(args.val_dataset, args) if args.val_dataset else None
    pipeline.template._data_collator = _Batches(pipeline.template.tokenizer, pipeline.model)
    return [train, validation]


class _Batches:
    """Makes batches for the trainer of ms-swift, which multiplies losses by `loss_scale`."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._collate = RowCollator(tokenizer, model)

    def __call__(self, rows: Sequence[Any], *, padding_to: int | None = None) -> dict[str, Any]:
        batch: dict[str, Any] = self._collate(rows)
        if WEIGHTS in batch:
            batch["loss_scale"] = batch.pop(WEIGHTS)
        return batch


def _refuse(pipeline: Any, args: Any) -> None:
    """Refuse options with which the rows would be others, or their boundaries and weights be lost."""
    for name in MAKES_ROWS:
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name} is for rows that ms-swift makes, and chatmill gives rows: leave it out (--packing: build "
                "with pack: {length: N})"
            )
    for name in OTHER_LOSSES:
        if getattr(args, name, None):
            raise ConfigError(f"--{name} has a loss of its own, which does not know these rows: leave it out")
    if args.task_type != "causal_lm":
        raise ConfigError(f"--task_type is {args.task_type}: these rows are for causal_lm")
    if getattr(args, "sequence_parallel_size", 1) > 1:
        raise ConfigError("--sequence_parallel_size drops the masks that keep documents apart: leave it out")
    if type(pipeline) is not SwiftSft:
        raise ConfigError(f"{type(pipeline).__name__} makes batches of another kind: use swift sft, or chatmill export")


def _rows(named: list[str], args: Any) -> SplitRows:
    if len(named) != 1 or "#" in named[0]:
        raise ConfigError(
            f"--dataset {' '.join(named)}: one dataset is read, whole, and named by its folder, its URL or its recipe"
        )
    address, split = split_of(named[0])
    rows = SplitRows(address, split, trainer="ms-swift")
    longest = int(rows.lengths.max(initial=0))
    if args.max_length is not None and longest > args.max_length:
        raise ConfigError(
            f"{address} has rows of up to {longest:,} tokens, and --max_length is {args.max_length:,}: set it to "
            f"{longest} or more, or build shorter rows"
        )
    return rows
