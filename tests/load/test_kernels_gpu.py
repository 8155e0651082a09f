"""On a CUDA device: three attention kernels read the same boundaries and give the same result, and none leaks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.document_masks import dense_document_mask, flex_document_mask
from chatmill.train.isolation import check_isolation
from tests.load.hybrids import ISOLATED, tiny_config
from tests.load.sets import Special
from tests.train.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY, HEADS, SIZE = 211, 4, 64


def on_the_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if hasattr(value, "cuda") else value for name, value in batch.items()}


def batch() -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, 500)).tolist()
    features = [
        {"input_ids": ids[0], "document_starts": [0, 128, 129, 300]},
        {"input_ids": ids[1][:450], "document_starts": [0, 77]},
    ]
    forms = {"return_cu_seqlens": True, "cu_seqlens_size": 16, "return_seq_idx": True}
    return on_the_device(DataCollatorForCausalLM(Special(), pad_to_multiple_of=128, **forms)(features))


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


def test_every_kernel_keeps_documents_apart_and_they_agree() -> None:
    made = batch()
    for kernel in ("dense", "flex", "varlen"):
        report = check_isolation(attention_of(kernel), made)
        assert report.passed, str(report)
        assert report.moved == 0.0
        torch.testing.assert_close(attention_of(kernel)(made), attention_of("dense")(made), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_qwen3_is_isolated_and_its_cache_is_not(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.2}
    model = tiny_model(VOCABULARY, kind="Qwen3", **sizes).to("cuda", dtype).eval()
    report = check_isolation(model, batch(), use_cache=False)
    assert report.passed, str(report)
    assert not check_isolation(model, batch(), use_cache=True).passed


def hybrid(kind: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind, wide=True), dtype=dtype).to("cuda")


def rows() -> list[dict[str, Any]]:
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": ids, "seq_lengths": [16, 24]}, {"input_ids": ids[::-1], "seq_lengths": [32, 8]}]


@contextmanager
def skipped_without_kernels() -> Iterator[None]:
    """With what is installed of causal_conv1d, mamba_ssm and flash-linear-attention."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # the second: fla refuses its backward pass with Triton 3.4 to 3.7.0
        if "apart without" not in str(error) and "Triton" not in str(error):
            raise
        pytest.skip(str(error))


def check_kernels(model: Any) -> None:
    """They keep documents apart, and positions alone do not."""
    made = on_the_device(DataCollatorForCausalLM(Special(), model=model)(rows()))
    with skipped_without_kernels():
        report = check_isolation(model, made)
    assert report.passed, str(report)
    assert report.moved == 0
    assert not check_isolation(model, {name: made[name] for name in ("input_ids", "position_ids", "use_cache")}).passed


@pytest.mark.parametrize("kind", ISOLATED)
def test_the_kernels_of_a_hybrid_keep_documents_apart(kind: str) -> None:
    check_kernels(hybrid(kind, torch.bfloat16).eval())


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_with_images_hands_boundaries_to_its_text_part(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = tiny_config(f"{kind}_text", wide=True).to_dict()
    sizes = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=sizes)
    torch.manual_seed(0)
    check_kernels(AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).to("cuda").eval())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h"])
def test_the_gradient_of_packed_rows_is_that_of_their_documents(kind: str) -> None:
    """In bfloat16, so up to its rounding: a leak is as large as the gradient itself."""
    model = hybrid(kind, torch.bfloat16).train()
    cut = [(row["input_ids"], row["seq_lengths"][0]) for row in rows()]
    documents = [{"input_ids": part, "seq_lengths": [len(part)]} for ids, n in cut for part in (ids[:n], ids[n:])]
    packed, plain = DataCollatorForCausalLM(Special(), model=model), DataCollatorForCausalLM(Special())
    leaking = on_the_device({name: packed(rows())[name] for name in ("input_ids", "labels", "position_ids")})
    found = []
    with skipped_without_kernels():
        for batches in ([packed(rows())], [plain([one]) for one in documents], [leaking]):
            model.zero_grad()
            for batch in batches:
                given = on_the_device(batch)
                labels = given.pop("labels")[:, 1:].flatten()
                logits = model(**given | {"use_cache": False}).logits[:, :-1].float().flatten(0, 1)
                torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").backward()
            found.append(torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]))
    together, alone, leaked = found
    assert float((together - alone).norm() / alone.norm()) < 0.1
    assert float((leaked - alone).norm() / alone.norm()) > 0.3
