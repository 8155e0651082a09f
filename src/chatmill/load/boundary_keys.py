"""What a transformers model must be given besides position ids, so that packed documents do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chatmill.core.blocks import DocumentSegments
from chatmill.load.document_masks import dense_mask, flex_mask


class Key(StrEnum):
    """A form in which a model reads document boundaries."""

    MASK = "attention_mask"
    """`attention_mask` (B, 1, T, T), additive, in the dtype of the model: attention of eager and sdpa."""
    BLOCK_MASK = "block_mask"
    """`attention_mask` as the `BlockMask` of FlexAttention."""
    CU_SEQ_LENS = "cu_seq_lens"
    """`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`: FlashAttention and gated delta rules."""
    SEQ_IDX = "seq_idx"
    """`seq_idx` (B, T) int32: short convolutions and the scan of Mamba 2."""
    CU_SEQLENS = "cu_seqlens"
    """`cu_seqlens`, the name that kernels of linear attention have: models that do not rename `cu_seq_lens_q`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What batches for a model have, besides `position_ids` and `use_cache: False`."""

    keys: frozenset[Key]
    one_row: bool = False
    """All documents are in one row, because kernels read lengths of one row only."""
    multiple: int = 1
    """Rows are a multiple of this many tokens, as kernels want them."""

    @classmethod
    def of_recurrent(cls, keys: frozenset[Key]) -> Needs:
        """Return those of a model with recurrent layers that read these keys."""
        one_row = bool(keys & {Key.CU_SEQ_LENS, Key.CU_SEQLENS})
        return cls(keys=keys, one_row=one_row, multiple=8 if Key.SEQ_IDX in keys else 1)

    @property
    def names(self) -> list[str]:
        """The entries of a batch."""
        varlen = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
        names = {Key.CU_SEQ_LENS: varlen, Key.BLOCK_MASK: ["attention_mask"]}
        return [name for key in Key if key in self.keys for name in names.get(key, [key.value])]

    def inputs(
        self, segments: DocumentSegments, dtype: Any = None, cu_seqlens_size: int | None = None, device: Any = None
    ) -> dict[str, Any]:
        """Name the boundaries as the model reads them: arrays, numbers, and masks as tensors.

        Masks are made on `device` (default: the CPU). A `BlockMask` works on that device only.
        """
        import torch

        inputs: dict[str, Any] = {}
        if Key.MASK in self.keys:
            inputs["attention_mask"] = dense_mask(torch.from_numpy(segments.ends).to(device), dtype or torch.float32)
        if Key.BLOCK_MASK in self.keys:
            inputs["attention_mask"] = flex_mask(torch.from_numpy(segments.ends).to(device))
        if Key.SEQ_IDX in self.keys:
            inputs["seq_idx"] = segments.seq_idx
        lengths, longest = segments.cu_seqlens(cu_seqlens_size), int(segments.max_seqlen)
        if Key.CU_SEQ_LENS in self.keys:
            inputs |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        if Key.CU_SEQLENS in self.keys:
            inputs["cu_seqlens"] = lengths
        return inputs


_GATED_DELTA = frozenset({Key.SEQ_IDX, Key.CU_SEQ_LENS})
_KIMI_DELTA = frozenset({Key.SEQ_IDX, Key.CU_SEQLENS})
_SCAN = frozenset({Key.SEQ_IDX})
HYBRIDS: dict[str, frozenset[Key] | None] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTA),
    "olmo_hybrid": _GATED_DELTA,
    **dict.fromkeys(("lfm2", "lfm2_moe", "nemotron_h", "bamba", "falcon_h1", "zamba2"), _SCAN),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KIMI_DELTA),
    "granitemoehybrid": frozenset({Key.MASK, Key.SEQ_IDX}),
    **dict.fromkeys(("jamba", "minimax"), None),
}
"""The fewest keys that isolate a model with recurrent layers, by its `model_type`; None: nothing does.

Measured with sdpa attention by a test, for each model (`tests/load/test_hybrids.py`)."""

BY_TRL = _GATED_DELTA
"""What the batches of TRL and of transformers' `DataCollatorWithFlattening` have."""

WAYS: tuple[frozenset[Key], ...] = (
    frozenset(),
    frozenset({Key.CU_SEQ_LENS}),
    _SCAN,
    _GATED_DELTA,
    _KIMI_DELTA,
    frozenset({Key.SEQ_IDX, Key.CU_SEQ_LENS, Key.CU_SEQLENS}),
    frozenset({Key.MASK}),
    frozenset({Key.MASK, Key.SEQ_IDX}),
)
"""Sets of keys that a model is tried with."""

WINDOWS = {"sliding_attention", "chunked_attention"}
STATELESS = {"full_attention", "attention", "moe", "mlp", "dense", "sparse"} | WINDOWS
"""Kinds of layers in which a mask keeps documents apart."""


def text_config(model: Any) -> Any:
    """Return the config of a model's language part; `model` may be that config itself."""
    config = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_hybrid(model: Any) -> bool:
    """Return whether some layers of a model carry a state from token to token, as far as it or its config says."""
    text = text_config(model)
    stateful = bool(getattr(model, "_is_stateful", False))
    return stateful or getattr(text, "model_type", None) in HYBRIDS or bool(layer_kinds(text) - STATELESS)


def one_document_a_row(model: Any) -> str:
    """Return the way out for a model that nothing isolates."""
    return (
        f"{getattr(text_config(model), 'model_type', type(model).__name__)} has layers that carry a state from one "
        "document to the next, and nothing that a batch can hold keeps documents apart in them: put one document into "
        "a row (chatmill export --pack alone, packed=False)"
    )


def layer_kinds(text: Any) -> set[str]:
    """Return what the layers of a model are, as its config says."""
    return {str(kind) for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}
