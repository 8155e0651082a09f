"""verl: the dataset class of its SFT trainers, one document a row."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chatmill.errors import ConfigError
from chatmill.trainers.rows import WEIGHTS, SplitRows
from chatmill.trainers.source import split_of

NO_PADDING = "no_padding"


class ChatmillSFTDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`data.custom_cls.path=pkg://chatmill.trainers.verl data.custom_cls.name=ChatmillSFTDataset`.

    `data.train_files` names the dataset, or its split as `built/val`. verl packs the documents itself.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Open a split, as verl asks for it.

        Args:
            parquet_files: Address of the dataset.
            tokenizer: Not used: the dataset has ids.
            config: The node `data` of the config.
            processor: Not used.
            max_samples: Documents to read; -1: all.
        """
        config = {} if config is None else config
        pad_mode = str(getattr(config.get("pad_mode"), "value", config.get("pad_mode") or NO_PADDING))
        if pad_mode != NO_PADDING:
            raise ConfigError(f"data.pad_mode is {pad_mode}, for which verl has no loss: set it to {NO_PADDING}")
        address, split = split_of(_one_address(parquet_files))
        self.rows = SplitRows(address, split, trainer="verl", packed=False, has_trees=False)

        longest = int(self.rows.lengths.max(initial=0))
        for name in ("max_length", "max_token_len_per_gpu"):
            limit = config.get(name)
            if limit is not None and longest > limit:
                raise ConfigError(
                    f"{address} has documents of up to {longest:,} tokens, and data.{name} is {limit:,}: set it to "
                    f"{longest} or more, or build with a shorter --max-length"
                )
        self._count = len(self.rows) if max_samples < 0 else min(max_samples, len(self.rows))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return a document: its first token has mask 0, so that the shift of a whole batch crosses no document."""
        if not 0 <= number < self._count:
            raise IndexError(f"document {number} of {self._count:,}")
        row = self.rows[number]
        labels = torch.from_numpy(row["labels"])
        mask = torch.from_numpy(row[WEIGHTS]) if WEIGHTS in row else (labels >= 0).long()
        return {
            "input_ids": torch.from_numpy(row["input_ids"]),
            "position_ids": torch.arange(len(labels)),
            "loss_mask": mask,
        }


def _one_address(files: str | Sequence[str]) -> str:
    if isinstance(files, str | os.PathLike):
        return os.fspath(files)
    if len(files) != 1:
        raise ConfigError(f"{len(files)} datasets are named, and one is read: build them as sources of one recipe")
    return str(files[0])
