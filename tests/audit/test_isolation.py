"""Packed documents that see each other in a model are found; what the model is not asked is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatmill import audit
from chatmill.errors import ConfigError
from tests.audit.sets import Row, bound_template, clean_rows, joined

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=bound_template("chatml").tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return hf.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def packed() -> list[Row]:
    return joined(clean_rows(bound_template("chatml"))[:6], 3, boundaries="position_ids")


def batches(rows: list[Row], *names: str) -> list[dict[str, Any]]:
    """A batch a row, with these columns."""
    whole = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return [{name: torch.tensor([row[name]]) for name in ("input_ids", "labels", *names)} for row in whole]


def test_positions_keep_documents_apart(model: Any, packed: list[Row]) -> None:
    report = audit(packed, bound_template("chatml"), isolation=model)
    assert report.findings == ()
    assert report.unknown == ()
    assert report.isolation == "isolated by position_ids, with the given model"


def test_without_a_model_it_is_unknown(packed: list[Row]) -> None:
    report = audit(packed, bound_template("chatml"))
    assert report.passed
    assert report.isolation == "not checked"
    assert any("--isolation" in sentence for sentence in report.unknown)


def test_rows_of_one_document_ask_nothing(model: Any) -> None:
    rows = clean_rows(bound_template("chatml"))
    assert audit(rows, bound_template("chatml")).unknown == ()
    assert audit(rows, bound_template("chatml"), isolation=model).isolation == "no row holds two documents"


def test_a_model_that_mixes_documents_is_found(packed: list[Row]) -> None:
    """A model that adds up everything before a token."""

    def mixes(batch: dict[str, Any]) -> Any:
        shown = torch.nn.functional.one_hot(batch["input_ids"], 600).double()
        return shown.cumsum(1)

    report = audit(packed, bound_template("chatml"), isolation=mixes)
    assert [finding.code for finding in report.findings] == ["documents_leak"]
    assert "called with position_ids" in report.findings[0].detail


def test_batches_are_tried_as_the_model_gets_them(model: Any, packed: list[Row]) -> None:
    bound = bound_template("chatml")
    assert audit(batches(packed, "position_ids"), bound, isolation=model).passed
    report = audit(batches(packed, "position_ids", "attention_mask"), bound, isolation=model)
    assert [finding.code for finding in report.findings] == ["documents_leak"]


def test_a_stored_mask_of_ones_may_or_may_not_be_passed(model: Any, packed: list[Row]) -> None:
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in packed]
    report = audit(rows, bound_template("chatml"), isolation=model)
    assert report.passed
    assert any("attention_mask of ones" in sentence for sentence in report.unknown)


def test_weights_and_random_weights_of_a_folder(model: Any, packed: list[Row], tmp_path: Path) -> None:
    from chatmill.auditor.isolation import check_documents
    from chatmill.auditor.open import open_tokenized

    model.save_pretrained(tmp_path)
    data = open_tokenized(packed)
    assert check_documents(data, "weights", tmp_path).words == "isolated by position_ids, with the model's weights"
    (tmp_path / "model.safetensors").unlink()
    assert "random weights" in check_documents(data, "random", tmp_path).words
    with pytest.raises(ConfigError, match="--isolation random"):
        check_documents(data, "weights", tmp_path)
    with pytest.raises(ConfigError, match="weights or random"):
        check_documents(data, "both", tmp_path)
