"""Loads a model folder of transformers; nothing is downloaded, and no code of the folder runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError, need


def load_hf_model(
    folder: str | Path,
    *,
    dtype: str = "float32",
    attention: str | None = None,
    random_weights: bool = False,
    seed: int | None = None,
    way_out: str = "",
    reference_kernels: bool = False,
    pictures: bool = False,
) -> Any:
    """Load a causal language model with its weights, or with random ones (`seed`: default torch's global one).

    `attention` is an attention of transformers (default: the model's own). `way_out` is what an error about missing
    weights names. With `reference_kernels` recurrent layers run in plain PyTorch and keep documents apart. With
    `pictures` it is a model that sees them.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():  # before torch is imported, which takes seconds
        raise ConfigError(f"{folder} has no config.json: give a folder made by model.save_pretrained")
    need("transformers", "opening a transformers model", "train")
    import torch
    import transformers

    from chatmill.load.model_folder import LOCAL, NO_CODE, open_model_folder
    from chatmill.load.reference_kernels import with_reference_kernels

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if dtype == "float64":  # the product over groups of experts, which is the default, has none
        wanted["experts_implementation"] = "eager"
    if attention is not None:
        wanted["attn_implementation"] = attention
    hint = f" (without weights: {way_out})" if way_out and not random_weights else ""

    def load() -> Any:
        kind: Any = transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        if reference_kernels:
            config = config.get_text_config()
            kind = with_reference_kernels(kind._model_mapping[type(config)])
        if not random_weights:
            return kind.from_pretrained(folder, config=config, **LOCAL, **wanted)
        if seed is not None:
            torch.manual_seed(seed)
        return (
            kind._from_config(config, **wanted) if reference_kernels else kind.from_config(config, **NO_CODE, **wanted)
        )

    return open_model_folder(folder, load, hint)
