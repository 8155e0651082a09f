"""The launcher with LLaMA-Factory itself: weights and isolation of what its trainer is given, trees, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from chatmill.errors import ConfigError
from chatmill.trainers.llamafactory import main
from chatmill.trainers.rows import SplitRows
from tests.export.isolation import FirstForward, model_of, padding_tokenizer
from tests.load.sets import state_rows
from tests.trainers.sets import obvious_loss, trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[3]


def train(work: Path, dataset: Path, **options: Any) -> tuple[FirstForward, list[torch.Tensor]]:
    """Train with the lines of the page; return what arrived at the model, and the ids of all batches."""
    model_of("qwen3").save_pretrained(work / "model")
    padding_tokenizer().save_pretrained(work / "model")
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    lines = yaml.safe_load(page.split("## LLaMA-Factory")[1].split("```yaml")[1].split("```")[0])
    lines |= {"chatmill": str(dataset), "model_name_or_path": str(work / "model"), "use_cpu": True}
    lines |= {"flash_attn": "sdpa", "finetuning_type": "full", "max_steps": 1, "logging_steps": 1}
    lines |= {"learning_rate": 1e-2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    lines |= {"report_to": "none", "save_strategy": "no", "output_dir": str(work / "run")}
    step = transformers.Trainer.training_step
    first = FirstForward()
    noted = transformers.Trainer.training_step
    arrived: list[torch.Tensor] = []

    def keep(trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        arrived.append(inputs["input_ids"].clone())
        return noted(trainer, model, inputs, *more, **named)

    transformers.Trainer.training_step = keep
    try:
        main({**lines, **options})
    finally:
        transformers.Trainer.training_step = step
    return first, arrived


def test_weights_reach_the_loss_and_documents_are_apart(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    for split in ("train", "val"):
        state_rows(folder / split, 30)
    first, arrived = train(tmp_path, folder, eval_strategy="steps", eval_steps=1)
    assert len(arrived) == 2
    wanted = weights_by_document(folder)
    assert sum(first.losses) == pytest.approx(obvious_loss(model_of("qwen3"), arrived, wanted), rel=1e-4)
    moves = first.moved(set(wanted))
    assert moves["moved"] < 1e-4
    assert moves["seen"] > 1e-2


def test_trees_train_as_their_rows_one_by_one(tmp_path: Path) -> None:
    from tests.load.test_trees import one_by_one

    folder = trees(tmp_path)
    state_rows(folder / "train", 700)
    rows = len(SplitRows(folder, trainer="a test"))
    first, _ = train(tmp_path, folder, per_device_train_batch_size=rows, gradient_accumulation_steps=1)
    total, count = one_by_one(model_of("qwen3"), folder)
    assert first.losses == [pytest.approx(total / count, rel=1e-4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"neat_packing": True}, "neat_packing is for rows that LLaMA-Factory makes"),
        ({"stage": "dpo"}, "stage is dpo"),
        ({"cutoff_len": 5}, "cutoff_len is 5: set it to 11 or more"),
        ({"use_dft_loss": True}, "use_dft_loss has no place for weights"),
        ({"chatmill": ""}, "give a config and the dataset"),
    ],
)
def test_what_would_change_rows_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items())
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, folder, **options)


def test_the_command_says_what_is_missing_in_one_line() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "chatmill.trainers.llamafactory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: give a config and the dataset: train.yaml chatmill=./built"
    assert "Traceback" not in done.stderr
