"""Boundaries as kernels and models read them; the loss of packed rows is that of their documents alone."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, UnknownNameError
from chatmill.load.collate import DataCollatorForCausalLM, get_pos_ids_for_packed_sequence
from chatmill.load.document_masks import dense_document_mask, ends_of, flex_document_mask, mask_mod
from chatmill.load.row_columns import trainer_columns
from tests.load.sets import Special
from tests.train.test_isolation import SOME, VOCABULARY, model, rows


def collated(**options: Any) -> dict[str, Any]:
    return DataCollatorForCausalLM(Special(), **options)(rows())


# ---- positions and masks


def test_positions_from_tokens() -> None:
    x = torch.tensor([[5, 6, 2, 2, 7, 8], [2, 5, 6, 7, 8, 2]])
    after = get_pos_ids_for_packed_sequence(x, token_id=2)
    assert after.tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert after.dtype == torch.int64
    at = get_pos_ids_for_packed_sequence(x, token_id=2, eos=False)
    assert at.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize(
    "starts",
    [
        [[0, 2, 4], [0]],
        [np.array([0, 2, 4]), np.array([0])],
        [torch.tensor([0, 2, 4]), torch.tensor([0])],
        torch.tensor([[0, 2, 4], [0, -1, -1]]),
        np.array([[0, 2, 4], [0, -1, -1]], dtype=np.int32),
    ],
    ids=["lists", "arrays", "tensors", "padded tensor", "padded array"],
)
def test_positions_from_starts(starts: Any) -> None:
    positions = get_pos_ids_for_packed_sequence(torch.full((2, 5), 2), token_id=2, document_starts=starts)
    assert positions.tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]


def test_positions_need_starts_or_a_token() -> None:
    x = torch.zeros(1, 4, dtype=torch.int64)
    for ids, options, says in (
        (x, {}, "document_starts, or the token_id"),
        (x, {"document_starts": [[0, 4]]}, "row 0: entry 1 is 4"),
        (x[0], {"token_id": 1}, r"not of shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=says):
            get_pos_ids_for_packed_sequence(ids, **options)


def test_the_flex_mask_is_a_block_mask() -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    features = [{"input_ids": list(range(300)), "document_starts": [0, 128, 200]}] * 2
    batch = DataCollatorForCausalLM(Special(), return_document_mask="flex", return_seq_idx=True)(features)
    assert isinstance(batch["document_mask"], BlockMask)
    assert batch["document_mask"].shape == (2, 1, 300, 300)
    # Blocks of 128: the first document fills block 0 and is unseen by the others; the rest is masked in part.
    assert batch["document_mask"].to_dense()[0, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    dense = create_mask(mask_mod(ends_of(batch["seq_idx"])), 2, 1, 300, 300, device="cpu")
    assert torch.equal(dense, dense_document_mask(batch["seq_idx"]) == 0)
    assert flex_document_mask(batch["seq_idx"]).shape == (2, 1, 300, 300)


def test_a_block_mask_is_made_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(_attn_implementation="flex_attention", model_type="llama")
    called = SimpleNamespace(config=config, device="cpu", dtype=torch.float32)
    assert collated(model=called)["attention_mask"].shape == (2, 1, 24, 24)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    with pytest.raises(ConfigError, match="does not travel between processes"):
        collated(model=called)


def test_each_attention_gets_its_form() -> None:
    batch = collated(model="flash_attention_2", return_flattened=True)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 7, 8, 15, 24, 33, 44]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 11
    assert collated(model="flash_attention_3")["cu_seq_lens_q"].tolist() == [0, 7, 8, 15, 24, 33, 44, 48]
    assert type(collated(model="flex_attention")["attention_mask"]).__name__ == "BlockMask"
    assert isinstance(collated(model="sdpa", return_tensors="np")["attention_mask"], np.ndarray)
    plain = DataCollatorForCausalLM(Special(), model="sdpa", packed_sequences=False)([{"input_ids": [4, 5]}])
    assert sorted(plain) == ["input_ids", "labels"]


# ---- losses


@torch.no_grad()
def loss_of(called: Any, batch: dict[str, Any]) -> float:
    return called(**batch).loss.item()


def alone(called: Any) -> Any:
    """The mean loss over all targets of the documents of the rows, each in a row of its own, to some digits."""
    total, count = 0.0, 0
    for row in rows():
        for ids in np.split(np.array(row["input_ids"]), row["document_starts"][1:]):
            text = torch.from_numpy(ids)[None]
            if len(ids) > 1:
                total += loss_of(called, {"input_ids": text, "labels": text, "use_cache": False}) * (len(ids) - 1)
                count += len(ids) - 1
    return pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(("architecture", "attention"), SOME)
@pytest.mark.parametrize("options", [{}, {"return_flattened": True}, {"pad_to_multiple_of": 32}])
def test_the_loss_of_packed_rows_is_that_of_their_documents(
    architecture: str, attention: str, options: dict[str, Any]
) -> None:
    called = model(architecture, attention)
    wanted = alone(called)
    batch, plain = collated(model=called, **options), collated(**options)
    assert batch["attention_mask"].dtype == torch.float64
    assert loss_of(called, batch) == wanted
    assert "attention_mask" not in plain
    assert loss_of(called, plain) == wanted, "without model, too"
    leaking = loss_of(called, {**plain, "use_cache": True})
    assert abs(leaking - wanted.expected) > 1e-3, "with transformers' default cache it leaks"


def test_a_document_mask_is_there_under_the_name_that_models_read() -> None:
    batch = collated(return_document_mask=True)
    assert torch.equal(batch["attention_mask"], batch["document_mask"])
    called = model("Llama", dtype=torch.float32)
    assert loss_of(called, batch) == pytest.approx(alone(called).expected, abs=1e-4)


@pytest.mark.parametrize("architecture", ["Mistral", "Gemma2"])
def test_sliding_windows_stay_windows(architecture: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    config = getattr(hf, f"{architecture}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, initializer_range=0.5,
    )  # fmt: skip
    called = hf.AutoModelForCausalLM.from_config(config).double().eval()
    batch = collated(model=called)
    assert (batch["use_cache"], "attention_mask" in batch) == (False, False)
    assert loss_of(called, batch) == alone(called)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("architecture", "as_dataset"), [("Llama", True), ("GPT2", False)])
def test_the_trainer_with_its_default_of_removing_columns(architecture: str, as_dataset: bool, tmp_path: Path) -> None:
    import datasets
    from transformers import Trainer, TrainingArguments

    called = copy.deepcopy(model(architecture))  # the Trainer changes it
    packed = datasets.Dataset.from_list(rows())
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to=[])
    assert arguments.remove_unused_columns

    def batch_of(given: Any) -> Any:
        collator = DataCollatorForCausalLM(Special(), model=called)
        data = given if as_dataset else list(given)
        trainer = Trainer(model=called, args=arguments, train_dataset=data, data_collator=collator)
        return next(iter(trainer.get_train_dataloader()))

    assert loss_of(called, batch_of(packed.map(trainer_columns, batched=True))) == alone(called)
    with pytest.raises(ConfigError, match="remove_unused_columns=False"):
        batch_of(packed)


def test_trainer_columns_keep_masks_and_refuse_rows_without_documents() -> None:
    packed = {"input_ids": [[5, 6, 7], [8]], "document_starts": [[0, 2], [0]], "loss_mask": [[0, 1, 1], [1]]}
    labels, positions = [[-100, 6, 7], [8]], [[0, 1, 0], [0]]
    assert trainer_columns(packed) == {"input_ids": packed["input_ids"], "labels": labels, "position_ids": positions}
    with pytest.raises(UnknownNameError, match="document_starts"):
        trainer_columns({"input_ids": [[1]]})
