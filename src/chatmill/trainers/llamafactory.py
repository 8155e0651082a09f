"""LLaMA-Factory: a launcher of its SFT training on rows of a dataset, since its config names no code of others.

torchrun --nproc-per-node 8 -m chatmill.trainers.llamafactory train.yaml chatmill=./built
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from chatmill.errors import ChatmillError, ConfigError
from chatmill.trainers.hf import RowCollator, WeightsInLoss
from chatmill.trainers.rows import SplitRows

try:
    from llamafactory.hparams.parser import read_args
    from llamafactory.train.sft import workflow
    from llamafactory.train.tuner import run_exp
except ImportError as error:
    raise ConfigError(f"chatmill.trainers.llamafactory needs llamafactory 0.9.5 or later: {error}") from error

KEY = "chatmill"
MAKES_ROWS = (
    "dataset",
    "eval_dataset",
    "tokenized_path",
    "packing",
    "neat_packing",
    "streaming",
    "val_size",
    "predict_with_generate",
    "use_ray",
)
"""Keys that make or choose rows, or that start processes in which this module is not."""
OTHER_LOSSES = ("use_asft_loss", "use_dft_loss", "use_eaft_loss")


def main(given: Mapping[str, Any] | None = None) -> None:
    """Train by a config of LLaMA-Factory that names the dataset in `chatmill`; default: the command line's."""
    said = read_args() if given is None else dict(given)
    if not isinstance(said, dict) or not said.get(KEY):
        raise ConfigError("give a config and the dataset: train.yaml chatmill=./built")
    config = dict(said)
    address = str(config.pop(KEY))
    if config.get("stage", "sft") != "sft":
        raise ConfigError(f"stage is {config['stage']}, and these rows are for sft")
    for name in MAKES_ROWS:
        if config.get(name):
            raise ConfigError(f"{name} is for rows that LLaMA-Factory makes, and chatmill gives rows: leave {name} out")

    evaluates = config.get("do_eval") or str(config.get("eval_strategy", "no")) != "no"
    found = {"train_dataset": _rows(address, "train", config)}
    config["dataset"] = KEY  # it asks for a name, and reads nothing by it
    if evaluates:
        found["eval_dataset"] = _rows(address, "val", config)
        config["eval_dataset"] = KEY
    with _given(found):
        run_exp(config)


def _rows(address: str, split: str, config: Mapping[str, Any]) -> SplitRows:
    rows = SplitRows(address, split, trainer="LLaMA-Factory")
    longest = int(rows.lengths.max(initial=0))
    limit = config.get("cutoff_len")
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{address} has rows of up to {longest:,} tokens, and cutoff_len is {limit:,}: set it to {longest} or "
            "more, or build shorter rows"
        )
    for name in OTHER_LOSSES:
        if rows.has_weights and config.get(name):
            raise ConfigError(f"{name} has no place for weights other than 0 and 1, which {address} has: leave it out")
    return rows


class _given:  # noqa: N801 - used as a function
    """Put rows, batches and the weighted loss into LLaMA-Factory's SFT training, for as long as it runs."""

    def __init__(self, found: dict[str, SplitRows]) -> None:
        class WeightedTrainer(WeightsInLoss, workflow.CustomSeq2SeqTrainer):
            """Its trainer, with weights."""

        def get_dataset(*_: Any, **__: Any) -> dict[str, SplitRows]:
            return found

        def collator(*, tokenizer: Any, model: Any, **_: Any) -> RowCollator:
            return RowCollator(tokenizer, model)

        self._names: dict[str, Callable[..., Any]] = {
            "get_dataset": get_dataset,
            "SFTDataCollatorWith4DAttentionMask": collator,
            "CustomSeq2SeqTrainer": WeightedTrainer,
        }

    def __enter__(self) -> None:
        self._before = {name: getattr(workflow, name) for name in self._names}
        for name, ours in self._names.items():
            setattr(workflow, name, ours)

    def __exit__(self, *_: Any) -> None:
        for name, theirs in self._before.items():
            setattr(workflow, name, theirs)


if __name__ == "__main__":
    try:
        main()
    except ChatmillError as error:
        sys.exit(f"error: {error}")
