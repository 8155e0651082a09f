"""Trains a small model on an export with Axolotl itself, by the lines that the export prints."""

import json
import sys
from pathlib import Path

import yaml
from axolotl.cli.train import do_cli

from tests.export.isolation import FirstForward, model_of, padding_tokenizer

if __name__ == "__main__":  # it starts processes that import this file
    told, documents = json.loads(Path(sys.argv[2]).read_text())
    work = Path(sys.argv[1]).parent
    model_of("qwen3").save_pretrained(work / "model")
    padding_tokenizer().save_pretrained(work / "model")
    config = {
        "base_model": str(work / "model"),
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "sdpa_varlen": False,  # a kernel for GPUs
        "optimizer": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
        "gradient_checkpointing": False,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "logging_steps": 1,
        "num_epochs": 1,
        "val_set_size": 0,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "dataset_prepared_path": str(work / "prepared"),
        "output_dir": str(work / "run"),
        "save_strategy": "no",
        "special_tokens": {"pad_token": "<pad>"},
    }
    lines = yaml.safe_load(told)
    lines.pop("test_datasets", None)
    (work / "config.yaml").write_text(yaml.safe_dump({**config, **lines}))
    first = FirstForward()
    do_cli(str(work / "config.yaml"))
    moves = first.moved({tuple(ids) for ids in documents})
    Path(sys.argv[1]).write_text(json.dumps({"losses": first.losses, "measured": moves}))
