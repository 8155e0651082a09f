"""Small data and small transformers models for the tests of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.pack.stream import PackedStream, pack_post_training_stream
from tests.load.sets import Item, items, loader

PAD = 96


def small_items(count: int, *, seed: int = 0, fractional: bool = False) -> list[Item]:
    """Episodes of ids below 96, some of whose tokens are trained."""
    made = items(count, seed=seed, low=2, high=14, fractional=fractional)
    return [Item(ids=[(i * 7 + t * 3) % PAD for t, i in enumerate(item.ids)], weights=item.weights) for item in made]


def loader_over(directory: Path, **options: Any) -> GPTEpisodeDataLoader:
    return loader(directory, **{"batch_size": 4, "block_size": 16, "pad_token_id": PAD, **options})


IDS = {"system_id": 10, "user_id": 11, "assistant_id": 12, "end_id": 13, "eos_id": 0}


def numbered() -> PackedStream:
    """21 blocks that each train targets of their own."""
    return pack_post_training_stream([[11, n, 13, 12, n, 13] for n in range(20, 41)], block_size=7, **IDS)


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
