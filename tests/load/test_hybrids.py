"""Models with recurrent layers: which boundaries they read, by measurement, and batches that keep documents apart."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError
from chatmill.load.boundary_keys import HYBRIDS, WAYS, Key, Needs
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.model_needs import needs_of
from chatmill.load.packed_batch import PackedBatch
from chatmill.train.isolation import check_isolation
from chatmill.train.isolation_ways import collated
from tests.load.hybrids import ISOLATED, TINY, VOCABULARY, model, tiny_config
from tests.load.sets import Special

LENGTHS = [[7, 1, 12, 4], [9, 6]]
EXPERTS_ROUND = 1e-5
"""Routers of experts calculate in float32, whatever the model does."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are quicker so, most of all next to other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(3, VOCABULARY, (sum(n),), generator=generator), "seq_lengths": n} for n in LENGTHS
    ]


def documents() -> list[torch.Tensor]:
    return [part for row in rows() for part in torch.split(row["input_ids"], row["seq_lengths"])]


@torch.no_grad()
def alone(called: Any) -> torch.Tensor:
    """The logits of each document in a row of its own, one after the other."""
    return torch.cat([called(input_ids=ids[None], use_cache=False).logits[0] for ids in documents()])


def collator_of(called: Any, **options: Any) -> DataCollatorForCausalLM:
    return DataCollatorForCausalLM(Special(), model=called, **options)


FIRST_OF_A_WAY = list({keys: kind for kind, keys in reversed(HYBRIDS.items()) if kind in TINY}.values())
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in TINY if kind not in FIRST_OF_A_WAY]


@pytest.mark.parametrize("kind", [*FIRST_OF_A_WAY, *OTHERS])
def test_the_table_is_what_a_measurement_gives(kind: str) -> None:
    """The first of the ways, fewest keys first, with which documents do not see each other."""
    found = None
    for keys in sorted(WAYS, key=len):
        batch = collated(model(kind), rows(), Needs.of_recurrent(keys), 64)
        if Key.CU_SEQLENS in keys and "linear_num_key_heads" in TINY[kind]:  # they rename cu_seq_lens_q to cu_seqlens
            with pytest.raises(TypeError, match="multiple values"):
                check_isolation(model(kind), batch, max_probes=2)
            continue
        report = check_isolation(model(kind), batch, max_probes=2)
        if report.passed:
            assert report.moved == 0
            found = keys
            break
        assert report.moved > 1e-3, "it leaks where everybody sees it"
    assert found == HYBRIDS[kind]
    assert found is None or len(found) > 0, "position ids alone never do"


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", ISOLATED)
def test_packed_documents_equal_those_alone_in_float64(kind: str, training: bool) -> None:
    called = model(kind).train(training)
    batch = collator_of(called)(rows())
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache", *needs_of(called).names}  # type: ignore[union-attr]
    with torch.no_grad():
        packed, wanted = called(**batch).logits.flatten(0, 1), alone(called)
    called.eval()
    is_text = batch["labels"].flatten() != -100
    is_text |= (batch["position_ids"].flatten() == 0) & (batch["input_ids"].flatten() > 2)
    exact = EXPERTS_ROUND if "experts" in str(called) or "Router" in str(called) else 1e-9
    assert torch.allclose(packed[is_text], wanted, rtol=0, atol=exact)


@pytest.mark.parametrize("kind", ["jamba", "minimax"])
def test_a_model_that_nothing_isolates_gets_one_document_a_row(kind: str) -> None:
    called = model(kind)
    with pytest.raises(ConfigError, match=f"row 0 has 2 documents: {kind} .* one document into a row .*--pack alone"):
        collator_of(called)(rows()[1:])
    with pytest.raises(ConfigError, match=r"joins the rows: .*--pack alone"):
        collator_of(called, return_flattened=True)
    batch = collator_of(called)([{"input_ids": ids, "seq_lengths": [len(ids)]} for ids in documents()])
    with torch.no_grad():
        logits = called(**batch).logits
    packed = torch.cat([row[: len(ids)] for row, ids in zip(logits, documents(), strict=True)])
    assert torch.allclose(packed, alone(called), rtol=0, atol=EXPERTS_ROUND)


def test_batches_are_as_the_kernels_want_them() -> None:
    scan = collator_of(model("nemotron_h"))(rows())
    assert scan["input_ids"].shape == scan["seq_idx"].shape == (2, 24), "rows, in multiples of 8"
    assert scan["seq_idx"].dtype == torch.int32
    assert scan["seq_idx"][1].tolist() == [0] * 9 + [1] * 6 + [2] * 9
    delta = collator_of(model("qwen3_5_text"), pad_to_multiple_of=12)(rows())
    assert delta["input_ids"].shape == delta["seq_idx"].shape == (1, 48), "one row, in multiples of 8 and 12"
    assert delta["cu_seq_lens_q"].tolist() == [0, 7, 8, 20, 24, 33, 39, 48]
    assert delta["cu_seq_lens_q"].dtype == torch.int32
    assert (delta["max_length_q"], delta["max_length_k"]) == (12, 12)
    kimi = collator_of(model("kimi_linear"))(rows())
    assert kimi["cu_seqlens"].tolist() == [0, 7, 8, 20, 24, 33, 39, 40]
    assert "cu_seq_lens_q" not in kimi
    assert collator_of(model("granitemoehybrid"))(rows())["attention_mask"].shape == (2, 1, 24, 24)
    for wrong in (
        {"padding": "max_length", "max_length": 64},
        {"padding_side": "left"},
        {"return_attention_mask": True},
    ):
        with pytest.raises(ConfigError):
            collator_of(model("qwen3_5_text"), **wrong)
    with pytest.raises(ConfigError, match="neither document_starts nor seq_lengths"):
        collator_of(model("qwen3_5_text"))([{"input_ids": [4, 5]}])
    assert sorted(collator_of(model("qwen3_5_text"), packed_sequences=False)(rows())) == ["input_ids", "labels"]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "granitemoehybrid", "jamba"])
def test_batches_of_the_loaders_give_the_same(kind: str) -> None:
    x, starts = torch.zeros(2, 24, dtype=torch.int64), torch.full((2, 4), -1)
    for row, given in enumerate(rows()):
        x[row, : len(given["input_ids"])] = given["input_ids"]
        starts[row, : len(LENGTHS[row])] = torch.tensor([0, *LENGTHS[row][:-1]]).cumsum(0)
    batch = PackedBatch.of((x, x, x.float(), starts), np.array([24, 15]))
    called = model(kind)
    if HYBRIDS[kind] is None:
        with pytest.raises(ConfigError, match="--pack alone"):
            batch.inputs(called)
        return
    assert check_isolation(called, batch.inputs(called), max_probes=2).passed
    with torch.no_grad():
        logits = called(**batch.inputs(called)).logits.flatten(0, 1)
    assert torch.allclose(logits[:39], alone(called), rtol=0, atol=EXPERTS_ROUND), "padding is after the last row"


def test_flash_attention_reads_lengths_beside_what_the_recurrent_layers_read() -> None:
    for kind, more in (("nemotron_h", set()), ("kimi_linear", {Key.CU_SEQLENS}), ("granitemoehybrid", set())):
        config = tiny_config(kind)
        config._attn_implementation = "flash_attention_2"
        assert needs_of(config).keys == {Key.SEQ_IDX, Key.CU_SEQ_LENS} | more  # type: ignore[union-attr]


def test_an_unknown_hybrid_is_refused_until_its_keys_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    known = HYBRIDS["qwen3_5_text"]
    assert known is not None
    monkeypatch.delitem(HYBRIDS, "qwen3_5_text")
    called = model("qwen3_5_text")
    with pytest.raises(ConfigError, match=r"qwen3_5_text has layers .* chatmill isolate MODEL .*packed"):
        collator_of(called)
    batch = DataCollatorForCausalLM(Special(), model=Needs.of_recurrent(known))(rows())
    assert check_isolation(called, batch).passed


@pytest.mark.parametrize("kind", [kind for kind in ISOLATED if kind != "lfm2"])
def test_reference_kernels_give_what_transformers_gives_without_kernels(kind: str) -> None:
    """On a document alone, in training and without: the kernels of transformers in plain torch are float32."""
    from transformers import AutoModelForCausalLM

    reference = copy.deepcopy(model(kind)).float()
    plain = AutoModelForCausalLM.from_config(reference.config, experts_implementation="eager").float()
    plain.load_state_dict(reference.state_dict())
    ids = documents()[2][None]
    for training in (False, True):
        with torch.no_grad():
            wanted = plain.train(training)(input_ids=ids, use_cache=False).logits
            made = reference.train(training)(input_ids=ids, use_cache=False).logits
        assert torch.allclose(made, wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


PAGES = Path(__file__).parents[2] / "docs" / "upstream"


@pytest.mark.slow  # what they show is in transformers, of a pinned version
@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_reproduction_for_transformers_prints_what_its_page_says(page: Path) -> None:
    kinds = ("python", "text")
    (script,), (printed,) = (re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL) for kind in kinds)
    assert len(script.splitlines()) <= 40
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == printed
