"""`model(**batch)` on what the collator gives: the loss of packed rows is that of their documents alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, DataError, UnknownNameError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.row_columns import trainer_columns
from tests.train.test_isolation import SOME, VOCABULARY, Special, model, rows


def documents() -> list[list[int]]:
    """The documents of the rows, each alone."""
    found = []
    for row in rows():
        ends = [*row["document_starts"][1:], len(row["input_ids"])]
        found += [row["input_ids"][a:b] for a, b in zip(row["document_starts"], ends, strict=True)]
    return found


@torch.no_grad()
def alone(called: Any, texts: list[list[int]]) -> float:
    """The mean loss over all targets of documents that are each in a row of their own."""
    total, count = 0.0, 0
    for ids in texts:
        if len(ids) > 1:
            logits = called(torch.tensor([ids]), use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
            count += len(ids) - 1
    return total / count


@pytest.mark.parametrize(("architecture", "attention"), SOME)
@pytest.mark.parametrize("options", [{}, {"return_flattened": True}, {"pad_to_multiple_of": 32}])
def test_the_loss_of_packed_rows_is_that_of_their_documents(
    architecture: str, attention: str, options: dict[str, Any]
) -> None:
    called = model(architecture, attention)
    wanted = alone(called, documents())
    batch = DataCollatorForCausalLM(Special(), model=called, **options)(rows())
    assert batch["attention_mask"].dtype == torch.float64
    with torch.no_grad():
        assert called(**batch).loss.item() == pytest.approx(wanted, abs=1e-5)
        plain = DataCollatorForCausalLM(Special(), **options)(rows())
        assert "attention_mask" not in plain
        assert called(**plain).loss.item() == pytest.approx(wanted, abs=1e-5), "without model, too"
        leaking = called(**{**plain, "use_cache": True}).loss.item()
        assert abs(leaking - wanted) > 1e-3, "with transformers' default cache it leaks"


def test_a_document_mask_is_there_under_the_name_that_models_read() -> None:
    batch = DataCollatorForCausalLM(Special(), return_document_mask=True)(rows())
    assert batch["attention_mask"] is batch["document_mask"] or torch.equal(
        batch["attention_mask"], batch["document_mask"]
    )
    called = model("Llama", dtype=torch.float32)
    with torch.no_grad():
        assert called(**batch).loss.item() == pytest.approx(alone(called, documents()), abs=1e-4)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_sliding_windows_stay_windows(architecture: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    make: Any = {"mistral": hf.MistralConfig, "gemma2": hf.Gemma2Config}[architecture]
    config = make(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
                  num_attention_heads=4, num_key_value_heads=2, sliding_window=4, initializer_range=0.5)  # fmt: skip
    called = hf.AutoModelForCausalLM.from_config(config).double().eval()
    batch = DataCollatorForCausalLM(Special(), model=called)(rows())
    assert (batch["use_cache"], "attention_mask" in batch) == (False, False)
    with torch.no_grad():
        assert called(**batch).loss.item() == pytest.approx(alone(called, documents()), abs=1e-5)


def test_flash_attention_reads_cumulative_lengths() -> None:
    batch = DataCollatorForCausalLM(Special(), model="flash_attention_2", return_flattened=True)(rows())
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 7, 8, 15, 24, 33, 44]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 11
    padded = DataCollatorForCausalLM(Special(), model="flash_attention_3")(rows())
    assert padded["cu_seq_lens_q"].tolist() == [0, 7, 8, 15, 24, 33, 44, 48]
    flex = DataCollatorForCausalLM(Special(), model="flex_attention")(rows())["attention_mask"]
    assert type(flex).__name__ == "BlockMask"
    arrays = DataCollatorForCausalLM(Special(), model="sdpa", return_tensors="np")(rows())
    assert isinstance(arrays["attention_mask"], np.ndarray)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("architecture", "as_dataset"), [("Llama", True), ("GPT2", False)])
def test_the_trainer_with_its_default_of_removing_columns(architecture: str, as_dataset: bool, tmp_path: Path) -> None:
    import datasets
    from transformers import Trainer, TrainingArguments

    called = copy.deepcopy(model(architecture))  # the Trainer changes it
    packed = datasets.Dataset.from_list(rows())
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[])
    assert arguments.remove_unused_columns

    def batch_of(given: Any, **options: Any) -> Any:
        collator = DataCollatorForCausalLM(Special(), model=called, **options)
        data = given if as_dataset else list(given)
        trainer = Trainer(model=called, args=arguments, train_dataset=data, data_collator=collator)
        return next(iter(trainer.get_train_dataloader()))

    batch = batch_of(packed.map(trainer_columns, batched=True))
    with torch.no_grad():
        assert called(**batch).loss.item() == pytest.approx(alone(called, documents()), abs=1e-5)
    with pytest.raises(ConfigError, match="remove_unused_columns=False"):
        batch_of(packed)


def test_trainer_columns_keep_masks_and_refuse_rows_without_documents() -> None:
    made = trainer_columns(
        {"input_ids": [[5, 6, 7], [8]], "document_starts": [[0, 2], [0]], "loss_mask": [[0, 1, 1], [1]]}
    )
    assert made == {
        "input_ids": [[5, 6, 7], [8]],
        "labels": [[-100, 6, 7], [8]],
        "position_ids": [[0, 1, 0], [0]],
    }
    with pytest.raises(UnknownNameError, match="document_starts"):
        trainer_columns({"input_ids": [[1]]})


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="sdpa"):
        DataCollatorForCausalLM(Special(), model="paged")
    with pytest.raises(ConfigError, match="see each other"):
        DataCollatorForCausalLM(Special(), model="sdpa", return_attention_mask=True)
    collator = DataCollatorForCausalLM(Special(), model="sdpa")
    with pytest.raises(DataError, match="row 1 do not count"):
        collator([{"input_ids": [4, 5], "position_ids": [0, 0]}, {"input_ids": [4, 5], "position_ids": [0, 2]}])
    with pytest.raises(ConfigError, match="neither document_starts nor seq_lengths nor position_ids"):
        collator([{"input_ids": [4, 5]}])
    plain = DataCollatorForCausalLM(Special(), model="sdpa", packed_sequences=False)([{"input_ids": [4, 5]}])
    assert sorted(plain) == ["input_ids", "labels"]
