"""The dataset and collator in NeMo Automodel's own loader, and its loss on a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from nemo_automodel.components.datasets.loader import DataloaderConfig, make_collate_fn, make_dataset_config
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

from chatmill.errors import ConfigError
from tests.export.isolation import bounds_of, model_of, moved, padding_tokenizer
from tests.trainers.sets import obvious_loss, trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[3]


def batches(dataset: Path, *, size: int = 2, attention: str = "sdpa", **options: Any) -> list[dict[str, torch.Tensor]]:
    """Make the batches of an epoch by the lines of the page."""
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    lines = yaml.safe_load(page.split("## NeMo Automodel")[1].split("```yaml")[1].split("```")[0])
    data = {**lines["dataset"], "dataset": str(dataset), **options}
    collate = {**lines["dataloader"]["collate_fn"], "attention": attention}
    loader = DataloaderConfig(
        dataset_config=make_dataset_config(data.pop("_target_"), data),
        collate_fn=make_collate_fn(collate.pop("_target_"), collate),
        batch_size=size,
    ).build(dp_rank=0, dp_world_size=1, tokenizer=padding_tokenizer())
    return list(loader)


def sum_of_losses(model: Any, batch: dict[str, torch.Tensor]) -> float:
    given = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits
    return float(MaskedCrossEntropy()(logits=logits, labels=batch["labels"]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_its_loss_is_the_obvious_one_and_documents_are_apart(attention: str, tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items(fractional=False))
    found = batches(folder, attention=attention, max_length=30)
    model = model_of("qwen3")
    model.set_attn_implementation(attention)
    wanted = weights_by_document(folder)
    arrived = [batch["input_ids"] for batch in found]
    assert sum(len(bounds_of(ids.tolist(), set(wanted))) for ids in arrived) == len(wanted)
    total = sum(sum_of_losses(model, batch) for batch in found)
    count = sum(int((batch["labels"] != -100).sum()) for batch in found)
    assert total / count == pytest.approx(obvious_loss(model, arrived, wanted), rel=1e-4)

    first = found[0]
    given = {"attention_mask": first["attention_mask"], "position_ids": first["position_ids"], "use_cache": False}
    spans = bounds_of(first["input_ids"].tolist(), set(wanted))
    moves = moved(lambda changed: model(input_ids=changed, **given).logits, first["input_ids"], spans)
    assert moves["moved"] < 1e-4
    assert moves["seen"] > 1e-2


def test_trees_train_as_their_rows_one_by_one(tmp_path: Path) -> None:
    from tests.load.test_trees import one_by_one

    folder = trees(tmp_path)
    model = model_of("qwen3")
    found = batches(folder, max_length=700, size=1)
    total, count = one_by_one(model, folder)
    assert sum(int((batch["labels"] != -100).sum()) for batch in found) == count
    assert sum(sum_of_losses(model, batch) for batch in found) == pytest.approx(total, rel=1e-4)


def test_weights_and_other_attention_are_refused(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    with pytest.raises(ConfigError, match="another weight than 0 and 1, and NeMo Automodel reads only trained or not"):
        batches(folder)
    plain = weighted_set(tmp_path / "plain", weighted_items(fractional=False))
    with pytest.raises(ConfigError, match="flash_attention_2"):
        batches(plain, attention="flash_attention_2")
