"""TRL's trainer on a dataset of Chatmill: the loss of a step is that of an obvious loop, and documents are apart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chatmill.errors import ConfigError
from tests.export.isolation import FirstForward, bounds_of, model_of, padding_tokenizer
from tests.trainers.sets import QUIET, obvious_loss, trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings(*QUIET)


def trainer_on(dataset: Path, work: Path, model: Any, **options: Any) -> Any:
    from trl import SFTConfig

    from chatmill.trainers.trl import ChatmillSFTTrainer

    more = {name: options.pop(name) for name in ("data_collator", "eval_dataset") if name in options}
    given = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": []}
    given |= {"save_strategy": "no", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1}
    given |= {"gradient_checkpointing": False, "disable_tqdm": True}
    args = SFTConfig(str(work / "run"), **{**given, **options})
    tokenizer = padding_tokenizer()
    return ChatmillSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer, **more)


@pytest.mark.parametrize("packed", [True, False])
def test_weights_reach_the_loss_over_accumulated_batches(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    model = model_of("qwen3")
    before = copy.deepcopy(model)
    options = {"packing": True, "max_length": 30} if packed else {}
    options |= {"gradient_accumulation_steps": 3, "eval_strategy": "no", "max_steps": 1}
    trainer = trainer_on(folder, tmp_path, model, eval_dataset=folder, **options)
    monkeypatch.setattr(transformers.Trainer, "training_step", transformers.Trainer.training_step)
    first = FirstForward()
    arrived: list[torch.Tensor] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: arrived.append(given["input_ids"].clone()), with_kwargs=True
    )
    evaluated = trainer.evaluate()["eval_loss"]
    seen = len(arrived)
    weights = weights_by_document(folder, "val")
    assert evaluated == pytest.approx(obvious_loss(before, arrived, weights), rel=1e-4)
    trainer.train()
    hook.remove()

    wanted = weights_by_document(folder)
    batches = arrived[seen:]
    assert len(batches) == 3
    log = trainer.state.log_history
    logged = next(entry for entry in log if "loss" in entry)
    assert logged["loss"] == pytest.approx(obvious_loss(before, batches, wanted), rel=1e-4)
    real = sum(last - start for ids in batches for _, start, last in bounds_of(ids.tolist(), set(wanted)))
    assert logged["num_tokens"] == real
    if packed:
        moves = first.moved(set(wanted))
        assert moves["moved"] < 1e-4
        assert moves["seen"] > 1e-2


def test_trees_train_as_their_rows_one_by_one(tmp_path: Path) -> None:
    from tests.load.test_trees import one_by_one

    folder = trees(tmp_path)
    model = model_of("qwen3")
    total, count = one_by_one(copy.deepcopy(model), folder)
    trainer = trainer_on(folder, tmp_path, model, packing=True, max_length=700, num_train_epochs=1, max_steps=1)
    rows = len(trainer.train_dataset)
    trainer.args.gradient_accumulation_steps = 1
    trainer.args.per_device_train_batch_size = rows
    trainer._train_batch_size = rows
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["loss"] == pytest.approx(total / count, rel=1e-4)
    assert logged["num_tokens"] > 0, "the sum of an additive mask is no number of tokens"


def test_what_would_change_rows_is_refused(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    for options, words in (
        ({"padding_free": True, "max_length": None}, "padding_free has no meaning"),
        ({"data_collator": print}, "data_collator makes batches"),
        ({"loss_type": "dft"}, "loss_type 'dft' has no place for"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer_on(folder, tmp_path, model_of("qwen3"), **options)


def test_the_lines_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weighted_set(tmp_path / "built", weighted_items())
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    code = page.split("## TRL")[1].split("```python")[1].split("```")[0]
    names: dict[str, Any] = {"model": model_of("qwen3"), "tokenizer": padding_tokenizer()}
    exec(code, names)
    assert names["trainer"].state.global_step == 2
