"""Trains a small model on an export with LLaMA-Factory itself, by the lines that the export prints."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from llamafactory.train.tuner import run_exp

from tests.export.isolation import FirstForward, model_of, padding_tokenizer

told, documents = json.loads(Path(sys.argv[2]).read_text())
work = Path(sys.argv[1]).parent
model_of("qwen3").save_pretrained(work / "model")
padding_tokenizer().save_pretrained(work / "model")
options: dict[str, Any] = {
    "model_name_or_path": str(work / "model"),
    "template": "empty",
    "dataset": "unused",  # asked for, not read beside tokenized_path
    "finetuning_type": "full",
    "do_train": True,
    "use_cpu": True,
    "flash_attn": "sdpa",
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "save_strategy": "no",
    "output_dir": str(work / "run"),
}
first = FirstForward()
run_exp({**options, **yaml.safe_load(told)})
moves = first.moved({tuple(ids) for ids in documents})
Path(sys.argv[1]).write_text(json.dumps({"losses": first.losses, "measured": moves}))
