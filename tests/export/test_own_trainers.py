"""Some steps of training on exports, by the trainers themselves and by the lines that the exports print.

Documents of the batch that arrived at the model move no other document's logits. TRL and transformers are installed
here; `make test-trainers` installs LLaMA-Factory and Axolotl into folders of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

import chatmill
from tests.export.isolation import FirstForward, model_of, padding_tokenizer
from tests.export.sets import built, documents_of
from tests.export.test_own_readers import LENGTHS, LONGEST, read_by

pytestmark = pytest.mark.trainers


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packing = {"max_length": LONGEST, "overflow": "cut"}
    return built(tmp_path_factory.mktemp("built") / "episodes", packing=packing)


def learns_and_isolates(losses: list[float], measured: dict[str, float]) -> None:
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert measured["moved"] < 1e-4, "a document moves another one's logits"
    assert measured["seen"] > 1e-2, "nothing moves, so nothing is proved"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["llamafactory", "axolotl"])
def test_a_trainer_of_its_own_environment_learns(name: str, length: int, dataset: Path, tmp_path: Path) -> None:
    packing = {"max_length": length} if name == "llamafactory" else {}
    told = chatmill.export_dataset(dataset, name, tmp_path / "out", **packing).config
    if name == "axolotl":  # which packs rows itself, as long as this says
        told = re.sub(r"sequence_len: \d+", f"sequence_len: {length}", told)
    (tmp_path / "told").write_text(json.dumps([told, [ids for ids, _ in documents_of(dataset)]]))
    found = read_by(name, f"{name}_training", tmp_path, str(tmp_path / "told"))
    learns_and_isolates(found["losses"], found["measured"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
@pytest.mark.parametrize("name", ["TRL", "transformers"])
def test_trl_and_transformers_learn(
    name: str, kind: str, length: int, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also models whose positions have several dimensions."""
    import transformers
    import trl

    lines = chatmill.export_dataset(dataset, "hf", tmp_path / "out", max_length=length).config
    rows = datasets.load_from_disk(str(tmp_path / "out"))["train"]
    rows = rows.select(sorted(range(len(rows)), key=lambda row: -len(rows[row]["seq_lengths"]))[:4])
    model, tokenizer = model_of(kind), padding_tokenizer()
    monkeypatch.setattr(transformers.Trainer, "training_step", transformers.Trainer.training_step)
    first = FirstForward()
    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
    options |= {"report_to": [], "save_strategy": "no", "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    if name == "TRL":
        config = re.search(r"^TRL: SFTConfig\((.*?)\)", lines, re.M)
        assert config is not None
        told = eval(f"dict({config[1]})")
        args = trl.SFTConfig(str(tmp_path / "run"), gradient_checkpointing=False, **options, **told)
        trainer = trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    else:
        mapped = re.search(r"^transformers: (rows\.map\(.*?\)), and Trainer\((.*)\)$", lines, re.M)
        assert mapped is not None
        names = {"chatmill": chatmill, "rows": rows, "tokenizer": tokenizer, "model": model}
        args = transformers.TrainingArguments(str(tmp_path / "run"), **options)
        given = eval(f"dict({mapped[2]})", names)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=eval(mapped[1], names), **given)
    trainer.train()
    learns_and_isolates(first.losses, first.moved({ids for ids, _ in documents_of(dataset)}))
