"""The loader that a config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.load.config import DatasetMode, as_training_config
from chatmill.load.loader import BatchLoader


def make_loader(
    config: Any, dataset_dir: str | Path | None = None, tokenizer: Any = None, **options: Any
) -> BatchLoader:
    """A `GPTEpisodeDataLoader` for `dataset_mode` sft_episode, else a `GPTDataLoader`.

    `config` is a `TrainingConfig`, the path of an XML or YAML file, a mapping, or an object with the attributes;
    `options` are keyword arguments of the loader, such as `device`, `rank` or `prefetch`.
    """
    settings = as_training_config(config)
    if settings.dataset_mode is DatasetMode.SFT_EPISODE:
        from chatmill.load.episodes import GPTEpisodeDataLoader

        return GPTEpisodeDataLoader(settings, tokenizer, dataset_dir, **options)
    from chatmill.load.token_stream import GPTDataLoader

    return GPTDataLoader(settings, tokenizer, dataset_dir, **options)
