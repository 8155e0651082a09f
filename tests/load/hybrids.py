"""Tiny configs of the architectures whose layers carry a state, and models of them with random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from chatmill.load.boundary_keys import HYBRIDS
from chatmill.load.reference_kernels import with_reference_kernels

VOCABULARY = 101
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MIXED = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
KIMI = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None,
    "num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    **MIXED, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LAYERS, **DELTA, **MIXED, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**LAYERS, **DELTA},
    "qwen3_5_moe_text": {**LAYERS, **DELTA, **MIXED, "shared_expert_intermediate_size": 24},
    "olmo_hybrid": {**LAYERS, **DELTA},
    "lfm2": {**CONVOLUTIONS, "block_multiple_of": 16},
    "lfm2_moe": {**CONVOLUTIONS, **MIXED, "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "expand": 2,
        "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24, "num_experts_per_tok": 2,
    },
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2},
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 8,
        "chunk_size": 16, "adapter_rank": 8, "num_mem_blocks": 1, "num_key_value_heads": 4,
    },
    "kimi_linear": {**LAYERS, **KIMI},
    "bailing_hybrid": {**LAYERS, **KIMI},
    "granitemoehybrid": {**LAYERS, **MAMBA, **EXPERTS, "shared_intermediate_size": 24},
    "jamba": {
        "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_dt_rank": 8,
    },
    "minimax": {**LAYERS, **EXPERTS, "block_size": 16},
}  # fmt: skip


ISOLATED = [kind for kind in TINY if HYBRIDS[kind] is not None]


def tiny_config(kind: str, *, wide: bool = False) -> Any:
    """The config of an architecture; `wide`: with dimensions that fast kernels know (64 in a head, 16 in a group)."""
    from transformers import AutoConfig

    given = {**COMMON, **TINY[kind]}
    if wide:
        scaled = ("hidden_size", "intermediate_size", "dim", "rank", "d_head", "d_state", "state_size", "d_ssm")
        given = {
            name: 8 * value if name.endswith(scaled) and "kernel" not in name else value
            for name, value in given.items()
            if value is not None
        }
    return AutoConfig.for_model(kind, **given)


def write(folder: str | Path) -> None:
    """A model folder, without weights, of each."""
    for kind in TINY:
        tiny_config(kind).save_pretrained(Path(folder) / kind)


@cache
def model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model with random weights and reference kernels; its experts are those that know float64."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(kind)
    made = with_reference_kernels(AutoModelForCausalLM._model_mapping[type(config)])
    return made._from_config(config, experts_implementation="eager", attn_implementation="sdpa").to(dtype).eval()
