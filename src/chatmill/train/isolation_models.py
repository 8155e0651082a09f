"""Loads a model for the isolation check; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError, MissingExtraError


def load_for_isolation(
    folder: Path,
    *,
    attention: str = "sdpa",
    dtype: str = "float32",
    random_weights: bool = False,
    way_out: str = "--random-weights",
) -> Any:
    """The model of a folder that transformers can load, with its weights or with random ones.

    `way_out` is what an error about missing weights names.
    """
    if not (folder / "config.json").is_file():  # before torch is imported, which takes seconds
        raise ConfigError(f"{folder} has no config.json: give a folder made by model.save_pretrained")
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "torch,hf", "checking a model") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    try:
        if random_weights:
            torch.manual_seed(0)
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            return transformers.AutoModelForCausalLM.from_config(config, **wanted).eval()
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, local_files_only=True, **wanted).eval()
    except (OSError, ValueError, ImportError) as error:
        hint = "" if random_weights else f" (without weights: {way_out})"
        raise ConfigError(f"transformers cannot load {folder}: {error}{hint}") from None
