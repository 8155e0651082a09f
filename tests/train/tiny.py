"""Small data and small transformers models for the tests of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.token_stream import make_loader
from tests.load.sets import Item, items

PAD = 96


def small_items(count: int, *, seed: int = 0, fractional: bool = False) -> list[Item]:
    """Episodes of ids below 96, some of whose tokens are trained."""
    made = items(count, seed=seed, low=2, high=14, fractional=fractional)
    return [Item(ids=[(i * 7 + t * 3) % PAD for t, i in enumerate(item.ids)], weights=item.weights) for item in made]


def loader_over(directory: Path, **options: Any) -> GPTEpisodeDataLoader:
    settings = {
        "batch_size": 4,
        "block_size": 16,
        "dataset_mode": "sft_episode",
        "pad_token_id": PAD,
        "use_loss_mask": True,
    }
    made = make_loader(settings | options, directory)
    assert isinstance(made, GPTEpisodeDataLoader)
    return made


def tiny_model(vocab_size: int = 97, *, kind: str = "Llama", **sizes: Any) -> Any:
    """A model of a few thousand weights, the same every time."""
    import transformers as hf

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": vocab_size}
    config = getattr(hf, f"{kind}Config")(**small | sizes)
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class StopAfter:
    """Wraps `get_batch` of a loader so that this process gets a signal while a batch is handed out."""

    def __init__(self, loader: Any, batches: int, number: int) -> None:
        self._get, self._left, self._number = loader.get_batch, batches, number
        loader.get_batch = self

    def __call__(self, split: str = "train") -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        return self._get(split)
