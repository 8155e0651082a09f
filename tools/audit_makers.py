"""Makes one tokenised set with a tool, in the tool's own environment: `tools.audit_tools` starts it there.

    PYTHON -P tools/audit_makers.py TOOL JOB...

A JOB is a folder with `job.json` (what to do), `chats.jsonl` (conversations with `messages`) and `model/` (a tokenizer
with its chat template, and a config.json). The set goes to JOB/made: a folder of `datasets`, or `made.jsonl`. Nothing
of Chatmill is imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def axolotl(job: dict[str, Any], folder: Path) -> None:
    """`axolotl preprocess` with the strategy `chat_template`, as its command line runs it."""
    settings = {
        "base_model": str(folder / "model"),
        "tokenizer_config": str(folder / "model"),
        "chat_template": "tokenizer_default",
        "datasets": [
            {
                "path": str(folder / "chats.jsonl"),
                "ds_type": "json",
                "type": "chat_template",
                "field_messages": "messages",
                "roles_to_train": ["assistant"],
                "train_on_eos": "turn",
            }
        ],
        "eot_tokens": job["stops"],
        "train_on_inputs": False,
        "sequence_len": 1 << 17,
        "sample_packing": False,
        "dataset_prepared_path": str(folder / "made"),
        "output_dir": str(folder / "out"),
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": 1e-4,
        "special_tokens": {"pad_token": job["pad"]},
        "dataset_num_proc": 1,
        "dataset_processes": 1,
    }
    (folder / "config.yml").write_text(json.dumps(settings))
    program = [str(Path(sys.executable).with_name("axolotl")), "preprocess", str(folder / "config.yml")]
    subprocess.run(program, check=True, cwd=folder)


def llamafactory(job: dict[str, Any], folder: Path) -> None:
    """`get_dataset` for the stage `sft`, as its workflow calls it."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from transformers import AutoTokenizer, Seq2SeqTrainingArguments

    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    }
    about = {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": about}))
    data = DataArguments(
        dataset="chats",
        dataset_dir=str(folder),
        template=job["template"],
        cutoff_len=1 << 17,
        overwrite_cache=True,
        tokenized_path=str(folder / "made"),
        **job.get("arguments", {}),
    )
    model = ModelArguments(model_name_or_path=str(folder / "model"), cache_dir=str(folder / "cache"))
    training = Seq2SeqTrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to="none", do_train=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    template = get_template_and_fix_tokenizer(tokenizer, data)
    get_dataset(template, model, data, training, stage="sft", tokenizer=tokenizer)


def unsloth(job: dict[str, Any], folder: Path) -> None:
    """`train_on_responses_only` on texts that `apply_chat_template` wrote, as Unsloth's notebooks do it."""
    import unsloth  # noqa: F401, I001  it patches what is imported after it
    from unsloth.chat_templates import train_on_responses_only
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    mask = train_on_responses_only(None, tokenizer=tokenizer, return_function=True, **job.get("parts", {}))
    with (folder / "chats.jsonl").open(encoding="utf-8") as chats, (folder / "made.jsonl").open("w") as made:
        for line in chats:
            record = json.loads(line)
            text = tokenizer.apply_chat_template(record["messages"], tokenize=False, **record.get("options", {}))
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            labels = mask({"input_ids": [ids]})["labels"][0]
            made.write(json.dumps({"input_ids": ids, "labels": [int(one) for one in labels]}) + "\n")


MAKERS = {"axolotl": axolotl, "llamafactory": llamafactory, "unsloth": unsloth}


def main() -> None:
    """Make sets, and write down which versions made them."""
    tool, *folders = sys.argv[1:]
    names = (tool, "transformers", "datasets", "torch")
    for folder in map(Path, folders):
        MAKERS[tool](json.loads((folder / "job.json").read_text()), folder)
        (folder / "versions.json").write_text(json.dumps({name: version(name) for name in names}))


if __name__ == "__main__":
    main()
