"""The plugin in Axolotl itself: weights and isolation of the batches that its trainer makes, trees, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from axolotl.cli.train import do_cli
from axolotl.integrations.base import PluginManager

from chatmill.errors import ConfigError
from tests.export.isolation import FirstForward, model_of, padding_tokenizer
from tests.trainers.sets import obvious_loss, trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[3]


def train(work: Path, dataset: Path, **options: Any) -> tuple[FirstForward, list[Any]]:
    """Train with the lines of the page; return what arrived at the model, and the ids of all batches."""
    model = model_of("qwen3")
    model.save_pretrained(work / "model")
    padding_tokenizer().save_pretrained(work / "model")
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    lines = yaml.safe_load(page.split("## Axolotl")[1].split("```yaml")[1].split("```")[0])
    lines["chatmill"] |= {"dataset": str(dataset), **options.pop("chatmill", {})}
    lines |= {"base_model": str(work / "model"), "use_cpu": True, "bf16": False, "fp16": False, "tf32": False}
    lines |= {"attn_implementation": "sdpa", "optimizer": "adamw_torch", "learning_rate": 1e-2, "num_epochs": 1}
    lines |= {"lr_scheduler": "constant", "gradient_checkpointing": False, "micro_batch_size": 2, "max_steps": 2}
    lines |= {"gradient_accumulation_steps": 2, "logging_steps": 1, "dataloader_num_workers": 0}
    lines |= {"output_dir": str(work / "run"), "save_strategy": "no", "special_tokens": {"pad_token": "<pad>"}}
    lines |= {"dataset_prepared_path": str(work / "prepared"), "sdpa_varlen": False}
    (work / "config.yaml").write_text(yaml.safe_dump({**lines, **options}))
    PluginManager.get_instance().plugins.clear()

    step = transformers.Trainer.training_step
    first = FirstForward()
    arrived: list[Any] = []
    noted = transformers.Trainer.training_step

    def keep(trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        arrived.append(inputs["input_ids"].clone())
        return noted(trainer, model, inputs, *more, **named)

    transformers.Trainer.training_step = keep
    try:
        do_cli(str(work / "config.yaml"))
    finally:
        transformers.Trainer.training_step = step
    return first, arrived


def test_weights_reach_the_loss_and_documents_are_apart(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    first, arrived = train(tmp_path, folder, sequence_len=30, chatmill={"evaluate": True}, max_steps=1, eval_steps=1)
    assert len(arrived) == 2
    assert "attention_mask" not in first.given or first.given["attention_mask"].ndim == 4
    wanted = weights_by_document(folder)
    assert sum(first.losses) == pytest.approx(obvious_loss(copy.deepcopy(model_of("qwen3")), arrived, wanted), rel=1e-4)
    moves = first.moved(set(wanted))
    assert moves["moved"] < 1e-4
    assert moves["seen"] > 1e-2


def test_trees_train_as_their_rows_one_by_one(tmp_path: Path) -> None:
    from chatmill.trainers.rows import SplitRows
    from tests.load.test_trees import one_by_one

    folder = trees(tmp_path)
    count_of_rows = len(SplitRows(folder, trainer="a test", max_length=700))
    options = {"micro_batch_size": count_of_rows, "gradient_accumulation_steps": 1, "max_steps": 1}
    first, _ = train(tmp_path, folder, sequence_len=700, **options)
    total, count = one_by_one(model_of("qwen3"), folder)
    assert first.losses == [pytest.approx(total / count, rel=1e-4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample_packing": True}, "sample_packing is for rows that Axolotl makes"),
        ({"datasets": [{"path": "x", "type": "alpaca"}]}, "datasets would not be read"),
        ({"chatmill": {"pack": False}, "use_dft": True}, "use_dft has no place for"),
        ({"sequence_len": 5, "chatmill": {"pack": False}}, "sequence_len is 5: set it to 11"),
    ],
)
def test_what_would_change_rows_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, folder, **{"sequence_len": 30, **options})
