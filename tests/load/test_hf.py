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
from tests.train.tiny import tiny_model

VOCABULARY = 64


def labels_of(item: Item, *, packed: bool) -> list[int]:
    weights = [0, *item.weights[1:]] if packed else item.weights
    return [token if weight else -100 for token, weight in zip(item.ids, weights, strict=True)]


def test_rows_are_episodes_with_labels(tmp_path: Path) -> None:
    train = items(9)
    write_set(tmp_path, train, shards=2)
    dataset = to_hf_dataset(tmp_path)
    assert dataset.column_names == ["input_ids", "labels"]
    assert dataset["input_ids"][:] == [item.ids for item in train]
    assert dataset["labels"][:] == [labels_of(item, packed=False) for item in train]
    write_set(tmp_path / "plain", train, mask=None)
    assert to_hf_dataset(tmp_path / "plain")["labels"][:] == [item.ids for item in train], "without masks all are"


def test_packed_rows_carry_the_lengths_of_their_documents(tmp_path: Path) -> None:
    train = items(40, high=9)
    write_set(tmp_path, train)
    dataset = to_hf_dataset(tmp_path, max_length=20, packed=True)
    assert dataset.column_names == ["input_ids", "labels", "seq_lengths"]
    by_first = {item.ids[0]: item for item in train}
    seen = []
    for row in dataset:
        held = [by_first[i] for i in row["input_ids"] if i in by_first]
        seen += [item.ids[0] for item in held]
        assert row["seq_lengths"] == [len(item.ids) for item in held]
        assert row["input_ids"] == [i for item in held for i in item.ids]
        assert row["labels"] == [label for item in held for label in labels_of(item, packed=True)]
        assert len(row["input_ids"]) <= 20
    assert sorted(seen) == sorted(by_first)
    mapped = to_hf_dataset(tmp_path, max_length=20, packed=True, arrow_file=tmp_path / "rows.arrow")
    assert mapped[:] == dataset[:]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_labels_cannot_hold_is_said(tmp_path: Path) -> None:
    write_set(tmp_path, items(5, fractional=True), mask="<f4")
    with pytest.warns(UserWarning, match="another weight than 0 and 1, which is in the column loss_weights"):
        assert "loss_weights" in to_hf_dataset(tmp_path).column_names
    with pytest.raises(ConfigError, match="max_length"):
        to_hf_dataset(tmp_path, packed=True)
    for pack in (True, False):
        with pytest.raises(ConfigError, match="no option 'pack' any more: it is 'packed'"):
            to_hf_dataset(tmp_path, max_length=9, pack=pack)  # type: ignore[arg-type]
    with EpisodeWriter(tmp_path / "large", "train") as writer:
        writer.append([5, 2**31 + 7], [1, 1])
    with pytest.raises(DataError, match="2,147,483,655; int32 holds ids up to 2,147,483,647"):
        to_hf_dataset(tmp_path / "large")


# --- a real SFTTrainer -------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> Any:
    rng = np.random.RandomState(4)
    train = []
    for _ in range(24):
        length = int(rng.randint(4, 10))
        ids = rng.randint(1, VOCABULARY - 2, length).tolist()
        train.append(Item(ids=ids, weights=(rng.rand(length) < 0.6).astype(int).tolist()))
    write_set(tmp_path / "set", train)
    return to_hf_dataset(tmp_path / "set", max_length=24, packed=True)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


LOSS_ONLY = {"labels", "shift_labels", "fused_lm_head", "num_items_in_batch"}
QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def one_step(directory: Path, dataset: Any, model: Any, collator: Any = None) -> tuple[Any, dict[str, Any]]:
    """Train one step with TRL; returns the model and what arrived at its forward; without its fused loss."""
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(directory / "out"), padding_free=collator is None, max_length=None, max_steps=1,
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


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as TRL hands it over, without its fused loss (which turns the cache off as here)."""
    return {name: value for name, value in batch.items() if name not in LOSS_ONLY} | {"use_cache": False}


@QUIET
def test_trl_trains_on_packed_rows_and_keeps_documents_apart(tmp_path: Path, packed: Any) -> None:
    rows = {tuple(row["input_ids"]): row for row in packed}
    assert len(rows) == len(packed) > 4
    special = {"pad_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1, "bos_token_id": None}
    model, batch = one_step(tmp_path, packed, tiny_model(VOCABULARY, **special))
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
    with torch.no_grad():
        before, after = (model(**inputs_of(one)).logits for one in (batch, changed))
    moved = (before - after).abs().amax(-1)[0]
    assert float(moved[first:second].max()) > 1e-3
    assert float(moved[:first].max()) == 0
    assert float(moved[second:].max()) == 0


@QUIET
@pytest.mark.parametrize(("kind", "by_trl"), [("qwen3_5_text", True), ("kimi_linear", False)])
def test_trl_gives_a_hybrid_what_the_recipe_says(kind: str, by_trl: bool, tmp_path: Path, packed: Any) -> None:
    """TRL's own batch where it has all keys, and else our collator in its trainer."""
    for is_collated in (False, True):
        model = copy.deepcopy(hybrid(kind, torch.float32))
        collator = DataCollatorForCausalLM(tokenizer(), model=model) if is_collated else None
        model, batch = one_step(tmp_path, packed, model, collator)
        report = check_isolation(model, inputs_of(batch), max_probes=2)
        assert len(report.documents) > 5
        assert report.passed == (is_collated or by_trl), str(report)
