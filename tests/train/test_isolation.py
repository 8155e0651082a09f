"""The isolation check on small random transformers models: it passes when it should, and sees every leak."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.train.isolation import check_isolation
from tests.load.sets import Special
from tests.train.tiny import tiny_model

VOCABULARY = 97
SOME = [("Qwen3", "sdpa"), ("Llama", "eager"), ("GPT2", "sdpa"), ("GPT2", "eager")]


def rows() -> list[dict[str, Any]]:
    """Two packed rows, one of them shorter, so that padding is there; one document has a single token."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 24)).tolist()
    return [
        {"input_ids": ids[0], "document_starts": [0, 7, 8, 15]},
        {"input_ids": ids[1][:20], "document_starts": [0, 9]},
    ]


def collated(**options: Any) -> dict[str, Any]:
    return DataCollatorForCausalLM(Special(), **options)(rows())


@cache
def model(architecture: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    made = tiny_model(VOCABULARY, kind=architecture, initializer_range=0.5, attn_implementation=attention)
    return made.to(dtype).eval()


def masked(form: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> dict[str, Any]:
    """A batch with a 4D mask in a form of the additive one."""
    batch = collated(return_document_mask=True, **options)
    return batch | {"attention_mask": form(batch.pop("document_mask"))}


def called(name: str, dtype: torch.dtype = torch.float64) -> Callable[[dict[str, Any]], torch.Tensor]:
    """A plain callable from a batch to logits."""
    return lambda batch: (
        model(name, dtype=dtype)(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
    )


# ---- what isolates


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("architecture", "attention"), SOME)
def test_position_ids_without_mask_and_cache_isolate_and_a_4d_float_mask(
    architecture: str, attention: str, dtype: torch.dtype
) -> None:
    report = check_isolation(model(architecture, attention, dtype), collated())
    assert report.passed, str(report)
    assert report.moved == 0.0
    assert report.alone <= report.alone_tolerance < 1e-2, "eager attention takes its softmax in float32"
    assert report.leaking == report.unlike_alone == report.advice == ()
    documents = [(0, 0, 0, 7), (0, 1, 7, 1), (0, 2, 8, 7), (0, 3, 15, 9), (1, 0, 0, 9), (1, 1, 9, 11), (1, 2, 20, 4)]
    assert [(d.row, d.number, d.start, d.length) for d in report.documents] == documents
    for options in ({}, {"use_cache": True}):  # so does a mask
        masks = masked(lambda mask: mask.to(dtype))
        assert check_isolation(model(architecture, attention, dtype), masks, **options).passed


# ---- what leaks, pinned: the check must see it


@pytest.mark.parametrize(("architecture", "attention"), SOME)
@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("no positions", "give position_ids"),
        ("all-ones mask", "leave attention_mask out"),
        ("default cache", "use_cache=False"),
    ],
)
def test_what_lets_documents_see_each_other_is_found(
    architecture: str, attention: str, fault: str, advice: str
) -> None:
    batch, options = collated(), {"use_cache": fault == "default cache"}
    if fault == "all-ones mask":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if fault == "no positions":
        batch, options["document_starts"] = collated(packed_sequences=False), [row["document_starts"] for row in rows()]
    report = check_isolation(model(architecture, attention), batch, **options)
    assert not report.passed
    # Later documents see earlier ones; the first of a row never does.
    assert all(d.moved == 0 for d in report.documents if d.number == 0)
    later = [d for d in report.documents if d.number > 0]
    assert len(later) > 2
    assert all(d.moved > 1e-3 and d.alone > 1e-3 for d in later)
    assert all(d.moved_by is not None and d.moved_by < d.number for d in later)
    assert any(advice in line for line in report.advice)


@pytest.mark.parametrize("architecture", ["Qwen3", "GPT2"])
def test_a_4d_bool_mask_isolates_in_sdpa_and_fails_silently_in_eager(architecture: str) -> None:
    batch = masked(lambda mask: mask == 0)
    assert check_isolation(model(architecture, "sdpa"), batch, use_cache=False).passed
    report = check_isolation(model(architecture, "eager"), batch, use_cache=False)
    assert not report.passed
    assert report.moved > 1e-3
    assert any("additive float" in line for line in report.advice)


def test_positions_that_do_not_restart_are_seen_by_absolute_embeddings() -> None:
    """With the mask alone documents are apart, but learned positions are read at other places."""
    batch = masked(torch.Tensor.double, return_seq_idx=True) | {"position_ids": torch.arange(24).expand(2, -1)}
    report = check_isolation(model("GPT2"), batch, use_cache=False)
    assert not report.passed
    assert report.moved == 0.0
    assert report.alone > 1e-3
    assert any("positions do not restart" in line for line in report.advice)
    batch["attention_mask"] = batch["attention_mask"].float()
    relative = check_isolation(model("Llama", dtype=torch.float32), batch, use_cache=False)
    assert relative.passed, "rotary positions are relative, to the precision of their float32 angles"


# ---- rounding is no leak, and hides none


@pytest.mark.parametrize("leak", [1e-3, 1e-9, 1e-12])
def test_the_smallest_leak_is_a_leak(leak: float) -> None:
    def leaking(batch: dict[str, Any]) -> torch.Tensor:
        ids = batch["input_ids"].double()
        earlier = (ids.cumsum(1) / torch.arange(1, ids.shape[1] + 1))[..., None]
        return called("Llama")(batch) + leak * earlier

    report = check_isolation(leaking, collated())
    assert [(d.row, d.number) for d in report.leaking] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert leak / 100 < report.moved < 100 * leak


@pytest.mark.parametrize("coarse", [True, False])
def test_a_model_that_rounds_as_tf32_does_is_isolated_where_that_is_switched_on(
    coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded(batch: dict[str, Any]) -> torch.Tensor:
        logits = called("Llama", torch.float32)(batch)
        return logits + 1e-2 * torch.sin(1e3 * logits + logits.shape[1])

    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high" if coarse else "highest")
    report = check_isolation(rounded, collated())
    assert report.moved == 0
    assert report.passed is coarse
    assert any("float32" in advice for advice in report.advice) is not coarse


# ---- any callable, and guards


def test_a_callable_from_batch_to_logits() -> None:
    batch = collated(return_cu_seqlens=True, cu_seqlens_size=12, return_seq_idx=True, return_document_mask=True)
    seen: list[dict[str, Any]] = []

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        seen.append(batch)
        return called("Qwen3")(batch)

    assert check_isolation(logits, batch).passed
    alone = seen[-1]
    assert alone["input_ids"].shape == alone["position_ids"].shape == alone["seq_idx"].shape == (1, 4)
    assert alone["cu_seqlens"].tolist() == [0] + [4] * 11
    assert alone["max_seqlen"].item() == 4
    assert alone["document_mask"].shape == (1, 1, 4, 4)


def test_a_callable_that_reads_only_the_mask_of_each_kernel() -> None:
    """One attention layer by hand, with the FlexAttention rule and with the dense mask."""
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, 16, dtype=torch.float64)

    def attend(batch: dict[str, Any], **how: Any) -> torch.Tensor:
        x = table[batch["input_ids"]][:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, **how)[:, 0]

    def flex(batch: dict[str, Any]) -> torch.Tensor:
        index, each = torch.arange(batch["input_ids"].shape[1]), torch.arange(len(batch["input_ids"]))[:, None, None]
        mask = batch["document_mask"].mask_mod(each, torch.tensor(0), index[:, None], index[None, :])
        return attend(batch, attn_mask=mask[:, None])

    dense = collated(return_document_mask=True)
    assert check_isolation(lambda batch: attend(batch, attn_mask=batch["document_mask"].double()), dense).passed
    assert check_isolation(flex, collated(return_document_mask="flex")).passed
    assert not check_isolation(lambda batch: attend(batch, is_causal=True), dense).passed


def test_a_model_in_training_mode_is_still_while_checked() -> None:
    dropping = tiny_model(VOCABULARY, kind="GPT2").train()
    assert dropping.config.resid_pdrop > 0
    assert check_isolation(dropping, collated()).passed
    assert dropping.training
    with pytest.raises(ValueError, match="differ by"):
        check_isolation(lambda batch: dropping(batch["input_ids"]), collated())


def test_the_check_cannot_pass_without_seeing_anything() -> None:
    blind = torch.randn(2, 24, VOCABULARY)
    one_document = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    for given, batch, options, says in (
        (lambda batch: blind, collated(), {}, "did not move its own logits"),
        (model("GPT2"), one_document, {"document_starts": [[0]]}, "no row of the batch holds two documents"),
        (model("GPT2"), collated(packed_sequences=False), {}, "pass document_starts"),
        (model("GPT2"), {}, {}, "needs input_ids"),
        (lambda batch: torch.zeros(2, 3), collated(), {}, "logits have shape"),
        (called("Qwen3"), collated(), {"use_cache": False}, "use_cache: a plain callable"),
    ):
        with pytest.raises(ValueError, match=says):
            check_isolation(given, batch, **options)


def test_nan_logits_do_not_pass() -> None:
    batch = collated()
    ids = batch["input_ids"].clone()

    def broken_alone(given: dict[str, Any]) -> torch.Tensor:
        logits = called("Llama")(given)
        return logits * float("nan") if given["input_ids"].shape[1] < 24 else logits

    def broken_by_another(given: dict[str, Any]) -> torch.Tensor:
        """Alone a document is as it should be: only the movement shows it."""
        logits = called("Llama")(given)
        if given["input_ids"].shape == ids.shape and given["input_ids"][0, 1] != ids[0, 1]:
            logits = logits.index_fill(1, torch.tensor([ids.shape[1] - 1]), float("nan"))
        return logits

    assert not check_isolation(broken_alone, batch).passed
    report = check_isolation(broken_by_another, batch)
    assert not report.passed
    assert report.leaking
    assert all(math.isnan(document.moved) for document in report.leaking)
    assert not report.unlike_alone


def test_few_probes_still_reach_the_first_and_the_last_document() -> None:
    ids = torch.arange(3, 43)[None]
    features = [{"input_ids": ids[0].tolist(), "document_starts": list(range(0, 40, 2))}]
    changed: list[set[int]] = []

    def logits(batch: dict[str, Any]) -> torch.Tensor:
        if batch["input_ids"].shape[1] == 40:
            changed.append(set((batch["input_ids"] != ids).nonzero()[:, 1].tolist()))
        return called("Qwen3")(batch)

    report = check_isolation(logits, DataCollatorForCausalLM(Special())(features), max_probes=3)
    assert report.passed
    assert len(report.documents) == 20
    assert len(changed) == 2 + 3
    assert {0, 1, 38, 39} <= set().union(*changed)
