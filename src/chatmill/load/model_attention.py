"""What the attention of a transformers model must be given so that packed documents do not see each other."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from chatmill.errors import ConfigError, UnknownNameError


class Reads(StrEnum):
    """The form in which an attention reads document boundaries."""

    DENSE_MASK = "dense_mask"
    """`attention_mask` (B, 1, T, T), additive, in the dtype of the model: eager and sdpa."""
    FLEX_MASK = "flex_mask"
    """`attention_mask` as a FlexAttention `BlockMask`."""
    VARLEN = "varlen"
    """`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`: FlashAttention."""
    POSITIONS = "positions"
    """`position_ids` alone and `use_cache=False`: models with sliding windows, whose masks transformers must make."""


KNOWN = {"eager": Reads.DENSE_MASK, "sdpa": Reads.DENSE_MASK, "flex_attention": Reads.FLEX_MASK}
FULL, WINDOWS = {"full_attention"}, {"sliding_attention", "chunked_attention"}


def attention_reads(model: Any) -> Reads:
    """What a model reads; `model` is a transformers model, its config, or the name of an attention implementation."""
    config = getattr(model, "config", model)
    name = config if isinstance(config, str) else getattr(config, "_attn_implementation", None)
    if isinstance(name, str) and "flash" in name:
        return Reads.VARLEN
    if name not in KNOWN:
        raise UnknownNameError("attention of the model", name, [*KNOWN, "flash_attention_2", "flash_attention_3"])
    reads = KNOWN[name]
    return Reads.POSITIONS if reads is not Reads.VARLEN and _has_windows(config) else reads


def _has_windows(config: Any) -> bool:
    """Whether some layers see a window only: one mask for all layers would undo it."""
    if isinstance(config, str):
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = set(getattr(text, "layer_types", None) or ())
    if layers - FULL - WINDOWS:
        raise ConfigError(
            f"the model has layers of {', '.join(sorted(layers - FULL))}, which carry a state from one document to the "
            "next whatever the mask: train it on rows of one document each"
        )
    if layers:
        return bool(layers & WINDOWS)
    return getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
