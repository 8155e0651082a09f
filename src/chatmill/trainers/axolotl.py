"""Axolotl: a plugin that gives its trainer the rows of a dataset, with weights and trees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from chatmill.errors import ConfigError
from chatmill.store.documents import open_dataset
from chatmill.trainers.hf import RowCollator, WeightsInLoss
from chatmill.trainers.rows import SplitRows
from chatmill.trainers.source import dataset_of

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as error:
    raise ConfigError(f"chatmill.trainers.axolotl needs axolotl 0.19 or later: {error}") from error

MAKES_ROWS = (
    "sample_packing",
    "eval_sample_packing",
    "pretraining_dataset",
    "streaming",
    "batch_flattening",
    "curriculum_sampling",
    "balance_labels",
    "group_by_length",
    "val_set_size",
    "rl",
    "reward_model",
    "process_reward_model",
    "trainer_cls",
)
"""Keys of a config that make, cut or order rows, or that are of another trainer."""
MAKES_LOSS = ("use_eaft", "use_dft", "orpo_alpha", "kd_trainer")
"""Keys of losses that have no place for weights."""


class ChatmillKeys(BaseModel):
    """What a config says below `chatmill`."""

    dataset: str
    """A folder, a URL, or a recipe, which is built first."""
    pack: bool = False
    """Whether documents are packed into `sequence_len` tokens where the build did not pack."""
    evaluate: bool = False
    """Whether the split `val` is evaluated."""

    model_config = {"extra": "forbid"}


class ChatmillArgs(BaseModel):
    """The key of a config that the plugin reads."""

    chatmill: ChatmillKeys


class ChatmillPlugin(BasePlugin):
    """`plugins: [chatmill.trainers.axolotl.ChatmillPlugin]` and `chatmill: {dataset: ./built}`."""

    def get_input_args(self) -> str:
        """Name the keys of the config."""
        return "chatmill.trainers.axolotl.ChatmillArgs"

    def register(self, cfg: Any) -> None:
        """Refuse keys that would make other rows; name the dataset as Axolotl's validation asks for it."""
        keys = _keys(cfg)
        for name in MAKES_ROWS:
            if cfg.get(name):
                raise ConfigError(f"{name} is for rows that Axolotl makes, and chatmill gives rows: leave {name} out")
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise ConfigError("context_parallel_size drops the masks that keep documents apart: leave it out")
        for name in ("datasets", "test_datasets"):
            named = cfg.get(name)
            if named and dict(named[0]) != _unread(keys):
                raise ConfigError(f"{name} would not be read: chatmill names the dataset, so leave {name} out")
        cfg["datasets"] = [_unread(keys)]
        if keys.evaluate:
            cfg["test_datasets"] = [_unread(keys)]
        cfg["val_set_size"] = 0
        cfg["remove_unused_columns"] = False

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any:
        """Give the rows; before training, build what is to be built."""
        from axolotl.common.datasets import TrainDatasetMeta

        keys = _keys(cfg)
        address = dataset_of(keys.dataset)
        source = open_dataset(address)
        is_packed = any(documents.plan is not None for documents in source.splits.values())
        length = cfg.sequence_len if keys.pack and not is_packed else None
        train = _rows(address, "train", length, cfg)
        validation = _rows(address, "val", length, cfg) if keys.evaluate else None
        return TrainDatasetMeta(train, validation, _steps(len(train), cfg))

    def get_trainer_cls(self, cfg: Any) -> Any:
        """Give the trainer that reads the rows."""
        from axolotl.core.trainers.base import AxolotlTrainer

        class ChatmillAxolotlTrainer(WeightsInLoss, AxolotlTrainer):
            """Axolotl's trainer with batches as the attention of the model reads them."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                collator = RowCollator(self.processing_class, self.model)
                self.data_collator = collator
                self.eval_data_collator = collator

        return ChatmillAxolotlTrainer


def _keys(cfg: Any) -> ChatmillKeys:
    said = cfg.get("chatmill")
    if not said:
        raise ConfigError("the plugin needs the dataset: chatmill: {dataset: ./built}")
    return ChatmillKeys(**dict(said))


def _unread(keys: ChatmillKeys) -> dict[str, Any]:
    """Name the dataset as validation asks for it."""
    return {"path": keys.dataset, "type": None}


def _rows(address: Any, split: str, length: int | None, cfg: Any) -> SplitRows:
    rows = SplitRows(address, split, trainer="Axolotl", max_length=length)
    longest = int(rows.lengths.max(initial=0))
    if longest > cfg.sequence_len:
        raise ConfigError(
            f"{address} has rows of up to {longest:,} tokens, and sequence_len is {cfg.sequence_len:,}: set it to "
            f"{longest}, or build shorter rows"
        )
    for name in _set_keys(cfg, MAKES_LOSS) if rows.has_weights else ():
        raise ConfigError(
            f"{address}: some tokens have another weight than 0 and 1, which {name} has no place for: leave it out, "
            "or build with weights of 0 and 1"
        )
    return rows


def _set_keys(cfg: Any, names: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if cfg.get(name))


def _steps(rows: int, cfg: Any) -> int:
    """Count the steps of all epochs, of which Axolotl makes its warmup; the last incomplete batch is dropped."""
    accumulation = cfg.gradient_accumulation_steps or 1
    ranks = cfg.world_size or 1
    batches = rows // (cfg.micro_batch_size * ranks)
    if batches == 0:
        raise ConfigError(
            f"{rows:,} rows do not fill one batch of {cfg.micro_batch_size:,} on {ranks:,} ranks: set "
            "micro_batch_size lower"
        )
    updates = math.ceil(batches / accumulation)
    return max(1, math.ceil(updates * cfg.num_epochs))
