"""The dataset and collator in NeMo Automodel's own loader, and its loss on a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from nemo_automodel.components.datasets.datum import collate_datums
from nemo_automodel.components.datasets.loader import DataloaderConfig, make_collate_fn, make_dataset_config
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from torch.nn.functional import cross_entropy

from chatmill.errors import ConfigError
from chatmill.trainers.automodel import Datums
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


@pytest.mark.parametrize("packed", [False, True])
def test_datums_have_the_weights_in_both_layouts(packed: bool, tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    datums = Datums(str(folder))
    wanted = weights_by_document(folder)
    assert {tuple(datum.input_ids.tolist()) for datum in datums} == set(wanted)

    # The loss of each document by the batch is that of the document run alone.
    model = model_of("qwen3")
    for first in range(0, len(datums), 8):
        chosen = [datums[number] for number in range(first, min(first + 8, len(datums)))]
        batch = collate_datums(chosen, packed=packed)
        weights = batch["weights"]
        assert bool(((batch["labels"] != -100) == (weights > 0)).all())
        lengths = [datum.seq_len for datum in chosen]
        rows = batch["input_ids"][0].split(lengths) if packed else batch["input_ids"]
        labels = batch["labels"][0].split(lengths) if packed else batch["labels"]
        shares = weights[0].split(lengths) if packed else weights
        total = 0.0
        divisor = 0.0
        arrived = []
        for ids, targets, share, length in zip(rows, labels, shares, lengths, strict=True):
            with torch.no_grad():
                logits = model(input_ids=ids[None, :length], use_cache=False).logits[0]
            losses = cross_entropy(logits, targets[:length], reduction="none", ignore_index=-100)
            total += float((losses * share[:length]).sum())
            divisor += float(share[:length].sum())
            arrived.append(ids[None, :length])
        assert total / divisor == pytest.approx(obvious_loss(model, arrived, wanted), rel=1e-4)

    with pytest.raises(ConfigError, match="holds trees, and NeMo Automodel has no mask"):
        Datums(str(trees(tmp_path)))


def test_the_page_makes_a_batch_of_datums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weighted_set(tmp_path / "built", weighted_items())
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("## NeMo Automodel")[1].split("```python")[1].split("```")[0], names)
    batch = names["batch"]
    assert batch["weights"].shape == batch["labels"].shape == batch["input_ids"].shape
    assert batch["weights"].dtype == torch.float32


def test_weights_and_other_attention_are_refused(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    with pytest.raises(ConfigError, match="another weight than 0 and 1, and NeMo Automodel reads only trained or not"):
        batches(folder)
    plain = weighted_set(tmp_path / "plain", weighted_items(fractional=False))
    with pytest.raises(ConfigError, match="flash_attention_2"):
        batches(plain, attention="flash_attention_2")
