"""Opens a model from a folder: a checkpoint of this package, a run's folder, or a folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from chatmill.errors import ConfigError
from chatmill.train.attention import Attention
from chatmill.train.checkpoint import MODEL_SIZES, STATE, checkpoints, find_checkpoint
from chatmill.train.foreign_model import load_foreign
from chatmill.train.gpt import GPT, GPTConfig


def open_model(
    folder: str | Path,
    *,
    attention: Attention | str = Attention.AUTO,
    dtype: torch.dtype = torch.float32,
    random_weights: bool = False,
) -> Any:
    """A `GPT` with its weights, or a `ForeignModel`, on the CPU.

    `random_weights` reads the sizes alone. `dtype` is that of a transformers model.
    """
    path = Path(folder)
    if not (path / MODEL_SIZES).is_file() and not (path / STATE).is_file() and checkpoints(path):
        path = find_checkpoint(path)
    if not (path / MODEL_SIZES).is_file():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path} holds no model: neither {MODEL_SIZES} (a checkpoint of Chatmill, or the folder of a run with "
                "checkpoints) nor config.json (a folder of transformers)"
            )
        return load_foreign(path, dtype=dtype, random_weights=random_weights)
    model = GPT(GPTConfig.from_json(json.loads((path / MODEL_SIZES).read_bytes())), attention=attention)
    if not random_weights:
        model.load_weights(path)
    return model
