"""On a CUDA device: three attention kernels read the same boundaries and give the same result, and none leaks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.document_masks import dense_document_mask, flex_document_mask
from chatmill.train.isolation import check_isolation
from tests.load.hybrids import ISOLATED, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY, HEADS, SIZE = 211, 4, 64


class Special:
    eos_token_id = pad_token_id = 2


def batch() -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, 500)).tolist()
    features = [
        {"input_ids": ids[0], "document_starts": [0, 128, 129, 300]},
        {"input_ids": ids[1][:450], "document_starts": [0, 77]},
    ]
    collator = DataCollatorForCausalLM(
        Special(), return_cu_seqlens=True, cu_seqlens_size=16, return_seq_idx=True, pad_to_multiple_of=128
    )
    return {name: value.cuda() if hasattr(value, "cuda") else value for name, value in collator(features).items()}


def attention_of(kernel: str) -> Any:
    """A batch to one attention layer's output (B, T, heads * size), as if these were logits."""
    torch.manual_seed(1)
    table = torch.randn(VOCABULARY, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)

    def run(batch: dict[str, Any]) -> torch.Tensor:
        rows, width = batch["input_ids"].shape
        x = table[batch["input_ids"]].view(rows, width, HEADS, SIZE)
        heads_first = x.transpose(1, 2)
        if kernel == "dense":
            mask = dense_document_mask(batch["seq_idx"], torch.bfloat16)
            out = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first, mask)
            out = out.transpose(1, 2)
        elif kernel == "flex":
            from torch.nn.attention.flex_attention import flex_attention

            compiled = torch.compile(flex_attention)
            mask = flex_document_mask(batch["seq_idx"])
            out = compiled(heads_first, heads_first, heads_first, block_mask=mask).transpose(1, 2)
        else:
            from torch.nn.attention.varlen import varlen_attn

            causal: dict[str, Any] = {"window_size": (-1, 0)}
            if "is_causal" in inspect.signature(varlen_attn).parameters:
                causal = {"is_causal": True}
            flat = x.reshape(rows * width, HEADS, SIZE)
            borders, longest = batch["cu_seqlens"], int(batch["max_seqlen"])
            out = varlen_attn(flat, flat, flat, borders, borders, longest, longest, **causal)
        return out.reshape(rows, width, HEADS * SIZE)

    return run


@pytest.mark.parametrize("kernel", ["dense", "flex", "varlen"])
def test_every_kernel_keeps_documents_apart(kernel: str) -> None:
    report = check_isolation(attention_of(kernel), batch())
    assert report.passed, str(report)
    assert report.moved == 0.0


def test_the_kernels_agree() -> None:
    made = batch()
    dense, flex, varlen = (attention_of(kernel)(made) for kernel in ("dense", "flex", "varlen"))
    torch.testing.assert_close(flex, dense, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(varlen, dense, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_qwen3_is_isolated_and_its_cache_is_not(dtype: torch.dtype) -> None:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
    )
    model = hf.Qwen3ForCausalLM(config).to("cuda", dtype).eval()
    report = check_isolation(model, batch(), use_cache=False)
    assert report.passed, str(report)
    assert not check_isolation(model, batch(), use_cache=True).passed


@pytest.mark.parametrize("kind", ISOLATED)
def test_the_kernels_of_a_hybrid_keep_documents_apart(kind: str) -> None:
    """With what is installed of causal_conv1d, mamba_ssm and flash-linear-attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, wide=True), dtype=torch.bfloat16).to("cuda").eval()
    ids = torch.randint(3, 101, (40,)).tolist()
    features = [{"input_ids": ids, "seq_lengths": [16, 24]}, {"input_ids": ids[::-1], "seq_lengths": [32, 8]}]
    made = DataCollatorForCausalLM(Special(), model=model)(features)
    try:
        report = check_isolation(model, made)
    except ValueError as error:
        if "apart without" not in str(error):
            raise
        pytest.skip(str(error))
    assert report.passed, str(report)
    assert not check_isolation(model, {name: made[name] for name in ("input_ids", "position_ids", "use_cache")}).passed
