"""The plugin in ms-swift itself: its `sft` trains on rows of a dataset, with weights, and refuses what makes others."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from swift import sft_main

from chatmill.errors import ConfigError
from chatmill.store.episode_layout import SPLITS
from chatmill.trainers.rows import SplitRows
from tests.export.isolation import FirstForward, bounds_of, model_of, padding_tokenizer
from tests.load.sets import state_rows
from tests.trainers.sets import obvious_loss, trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[3]


def words_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    text = page.split("## ms-swift")[1].split("```bash")[1].split("```")[0]
    return text.replace("\\\n", " ").split("swift sft")[1].split()


def train(work: Path, dataset: Path, **options: Any) -> tuple[FirstForward, list[torch.Tensor]]:
    """Run the command of the page; return what arrived at the model, and the ids of all batches."""
    model_of("qwen3").save_pretrained(work / "model")
    padding_tokenizer().save_pretrained(work / "model")
    printed = subprocess.run(
        [sys.executable, "-m", "chatmill.trainers.ms_swift"], capture_output=True, text=True, check=True
    )
    said = " ".join(words_of_the_page()).replace('"$(python -m chatmill.trainers.ms_swift)"', printed.stdout.strip())
    said = said.replace("./built", str(dataset)).replace("./model", str(work / "model"))
    given = {"use_cpu": True, "torch_dtype": "float32", "tuner_type": "full", "model_type": "qwen3", "max_steps": 2}
    given |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
    given |= {"output_dir": str(work / "run"), "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
    given |= {
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "attn_impl": "sdpa",
        "template": "qwen3",
        **options,
    }
    words = said.split() + [
        text
        for name, value in given.items()
        for text in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    step = transformers.Trainer.training_step
    first = FirstForward()
    noted = transformers.Trainer.training_step
    arrived: list[torch.Tensor] = []

    def keep(trainer: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        arrived.append(inputs["input_ids"].clone())
        return noted(trainer, model, inputs, *more, **named)

    transformers.Trainer.training_step = keep
    try:
        sft_main(words)
    finally:
        transformers.Trainer.training_step = step
    return first, arrived


def packed(folder: Path, length: int = 30) -> Path:
    for split in SPLITS:
        state_rows(folder / split, length)
    return folder


def test_weights_reach_the_loss_and_documents_are_apart(tmp_path: Path) -> None:
    folder = packed(weighted_set(tmp_path / "set", weighted_items()))
    first, arrived = train(tmp_path, folder)
    wanted = weights_by_document(folder)
    ids = arrived[0]
    spans = bounds_of(ids.tolist(), set(wanted))
    assert len(spans) > 4
    documents = [weights_by_document(folder)[tuple(ids[row, begin:end].tolist())] for row, begin, end in spans]
    count = sum(weight > 0 for document in documents for weight in document)
    total = sum(weight for document in documents for weight in document)
    mean = obvious_loss(copy.deepcopy(model_of("qwen3")), [ids], wanted)
    assert first.losses[0] == pytest.approx(mean * total / count, rel=1e-4), (
        "it divides by the number of trained tokens"
    )
    moves = first.moved(set(wanted))
    assert moves["moved"] < 1e-4
    assert moves["seen"] > 1e-2


def test_trees_train_as_their_rows_one_by_one(tmp_path: Path) -> None:
    from tests.load.test_trees import one_by_one

    folder = trees(tmp_path)
    state_rows(folder / "train", 700)
    rows = len(SplitRows(folder, trainer="a test"))
    first, _ = train(tmp_path, folder, per_device_train_batch_size=rows, max_steps=1)
    total, count = one_by_one(model_of("qwen3"), folder)
    assert first.losses == [pytest.approx(total / count, rel=1e-4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_channel_loss": True}, "--enable_channel_loss has a loss of its own"),
        ({"max_length": 20}, "--max_length is 20: set it to"),
        ({"streaming": True}, "--streaming is for rows"),
    ],
)
def test_what_would_change_rows_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = packed(weighted_set(tmp_path / "set", weighted_items()))
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, folder, **options)
