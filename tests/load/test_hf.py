"""Episodes as a datasets.Dataset, and a real step of TRL's SFTTrainer on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.errors import ConfigError, DataError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.train.isolation import check_isolation
from tests.load.hybrids import model as hybrid
from tests.load.sets import Item, items, write_set

VOCABULARY = 64


def test_rows_are_episodes_with_labels(tmp_path: Path) -> None:
    train = items(9)
    write_set(tmp_path, train, shards=2)
    dataset = to_hf_dataset(tmp_path)
    assert dataset.column_names == ["input_ids", "labels"]
    assert dataset["input_ids"][:] == [item.ids for item in train]
    wanted = [[t if w else -100 for t, w in zip(item.ids, item.weights, strict=True)] for item in train]
    assert dataset["labels"][:] == wanted
    write_set(tmp_path / "plain", train, mask=None)
    assert to_hf_dataset(tmp_path / "plain")["labels"][:] == [item.ids for item in train], (
        "without masks all are labels"
    )


def test_packed_rows_carry_the_lengths_of_their_documents(tmp_path: Path) -> None:
    train = items(40, high=9)
    write_set(tmp_path, train)
    dataset = to_hf_dataset(tmp_path, max_length=20, pack=True)
    assert dataset.column_names == ["input_ids", "labels", "seq_lengths"]
    by_first = {item.ids[0]: item for item in train}
    seen = []
    for row in dataset:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 20
        at = 0
        for length in row["seq_lengths"]:
            item = by_first[row["input_ids"][at]]
            seen.append(item.ids[0])
            assert row["input_ids"][at : at + length] == item.ids
            pairs = zip(item.ids, [0, *item.weights[1:]], strict=True)
            assert row["labels"][at : at + length] == [t if w else -100 for t, w in pairs]
            at += length
    assert sorted(seen) == [item.ids[0] for item in train]


def test_an_arrow_file_holds_the_same_rows(tmp_path: Path) -> None:
    write_set(tmp_path, items(30))
    options: dict[str, Any] = {"max_length": 24, "pack": True}
    mapped = to_hf_dataset(tmp_path, arrow_file=tmp_path / "rows.arrow", **options)
    assert mapped[:] == to_hf_dataset(tmp_path, **options)[:]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_labels_cannot_hold_is_said(tmp_path: Path) -> None:
    write_set(tmp_path, items(5, fractional=True), mask="<f4")
    with pytest.warns(UserWarning, match="another weight than 0 and 1, which is in the column loss_weights"):
        assert "loss_weights" in to_hf_dataset(tmp_path).column_names
    with pytest.raises(ConfigError, match="max_length"):
        to_hf_dataset(tmp_path, pack=True)


def test_an_id_that_int32_does_not_hold_is_refused(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path, "train") as writer:
        writer.append([5, 2**31 + 7], [1, 1])
    with pytest.raises(DataError, match="2,147,483,655; int32 holds ids up to 2,147,483,647"):
        to_hf_dataset(tmp_path)


# --- a real SFTTrainer -------------------------------------------------------------------------------------------


def small_set(directory: Path) -> list[Item]:
    rng = np.random.RandomState(4)
    train = []
    for _ in range(24):
        length = int(rng.randint(4, 10))
        ids = rng.randint(1, VOCABULARY - 2, length).tolist()
        train.append(Item(ids=ids, weights=(rng.rand(length) < 0.6).astype(int).tolist()))
    write_set(directory / "set", train)
    return train


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1,
        bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def one_step(
    directory: Path, dataset: Any, *, padding_free: bool, model: Any = None, collator: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Train one step with TRL; returns the model and what arrived at its forward."""
    from trl import SFTConfig, SFTTrainer

    model = llama() if model is None else model
    args = SFTConfig(
        output_dir=str(directory / "out"), padding_free=padding_free, max_length=None, max_steps=1,
        per_device_train_batch_size=3, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, remove_unused_columns=collator is None,
    )  # fmt: skip
    arrived: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: arrived.append(dict(kwargs)), with_kwargs=True)
    given = {"train_dataset": dataset, "data_collator": collator, "processing_class": tokenizer()}
    SFTTrainer(model=model, args=args, **given).train()
    hook.remove()
    assert len(arrived) == 1
    return model.eval(), arrived[0]


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Logits of a batch as TRL hands it over, without its fused loss (which turns the cache off as here)."""
    loss_only = {"labels", "shift_labels", "fused_lm_head", "num_items_in_batch"}
    with torch.no_grad():
        return model(**{k: v for k, v in batch.items() if k not in loss_only} | {"use_cache": False}).logits


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trl_trains_on_packed_rows_and_keeps_documents_apart(tmp_path: Path) -> None:
    small_set(tmp_path)
    dataset = to_hf_dataset(tmp_path / "set", max_length=24, pack=True)
    rows = {tuple(row["input_ids"]): row for row in dataset}
    assert len(rows) == len(dataset) > 4

    model, batch = one_step(tmp_path, dataset, padding_free=True)
    flat = batch["input_ids"][0].tolist()
    labels, lengths, at = [], [], 0
    while at < len(flat):  # which rows arrived, in which order
        row = next(r for ids, r in rows.items() if tuple(flat[at : at + len(ids)]) == ids)
        labels += row["labels"]
        lengths += row["seq_lengths"]
        at += len(row["input_ids"])
    assert batch["labels"][0].tolist() == labels
    assert sum(v != -100 for v in labels) > 10
    assert batch["position_ids"][0].tolist() == [i for n in lengths for i in range(n)]
    assert len(lengths) > 5

    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    first, second = lengths[0], lengths[0] + lengths[1]
    changed["input_ids"][0, first:second] = (changed["input_ids"][0, first:second] + 7) % (VOCABULARY - 2)
    moved = (logits(model, batch) - logits(model, changed)).abs().amax(-1)[0]
    assert float(moved[first:second].max()) > 1e-3
    assert float(moved[:first].max()) == 0
    assert float(moved[second:].max()) == 0


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("kind", "by_trl"), [("qwen3_5_text", True), ("kimi_linear", False)])
def test_trl_gives_a_hybrid_what_the_recipe_says(kind: str, by_trl: bool, tmp_path: Path) -> None:
    """TRL's own batch where it has all keys, and else our collator in its trainer."""
    small_set(tmp_path)
    dataset = to_hf_dataset(tmp_path / "set", max_length=24, pack=True)
    for collated in (False, True):
        model = copy.deepcopy(hybrid(kind, torch.float32))
        collator = DataCollatorForCausalLM(tokenizer(), model=model) if collated else None
        options = {"padding_free": collator is None, "model": model, "collator": collator}
        model, batch = one_step(tmp_path, dataset, **options)
        loss_only = {"labels", "shift_labels", "fused_lm_head", "num_items_in_batch"}
        batch = {name: value for name, value in batch.items() if name not in loss_only} | {"use_cache": False}
        report = check_isolation(model, batch, max_probes=2)
        assert len(report.documents) > 5
        assert report.passed == (collated or by_trl), str(report)
