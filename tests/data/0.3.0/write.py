"""Write this folder anew: `python write.py` in a checkout of Chatmill 0.3.0, in its folder tests/data/0.3.0."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import chatmill

# Relative, so that no manifest names a folder of the machine that wrote it.
DATA = Path("..")


def write_inputs() -> None:
    """Take a few bundled conversations, and make four pairs of them."""
    lines = []
    for name in ("reason_tool_use", "mt_bench_ref", "gsm8k"):
        with gzip.open(DATA / "conversations" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            lines += [next(file) for _ in range(4)]
    Path("chats.jsonl").write_text("".join(lines), encoding="utf-8")

    pairs = []
    for index, line in enumerate(lines[-4:]):
        record = {
            "prompt": json.loads(line)["messages"][:1],
            "chosen": [{"role": "assistant", "content": f"The answer is {index}."}],
            "rejected": [{"role": "assistant", "content": "I do not know."}],
        }
        pairs.append(json.dumps(record))
    Path("pairs.jsonl").write_text("\n".join(pairs) + "\n", encoding="utf-8")


def write_builds() -> None:
    """Build rows per turn with a pack plan, trees, and pairs, all with Qwen3."""
    template = str(DATA / "templates/trl/qwen3.jinja")
    base = {"tokenizer": str(DATA / "tokenizers/qwen3"), "template": template}
    chats = {**base, "sources": [{"path": "chats.jsonl"}], "packing": {"max_length": 4096, "overflow": "drop"}}
    chatmill.build({**chats, "pack": {"length": 4096}}, Path("turns"), workers=0)
    chatmill.build({**chats, "expand": "tree"}, Path("trees"), workers=0)
    chatmill.build({**base, "preferences": "pairs", "sources": [{"path": "pairs.jsonl"}]}, Path("pairs"), workers=0)


def write_distillation_set() -> None:
    """Write a Megatron distillation set of a few rows."""
    chatmill.build_synth_kd(
        DATA / "synth_harmony", Path("synth_kd"), max_rows_per_shard=6, valid_fraction=0.3, workers=0
    )


def write_export_and_state() -> None:
    """Export the packed build, and save the state of a loader in its first epoch."""
    chatmill.export_dataset(Path("turns"), "hf", Path("turns-hf"))
    options = {"batch_size": 2, "block_size": 4096, "pad_token_id": 151643}
    loader = chatmill.GPTEpisodeDataLoader(options, None, Path("turns"), use_loss_mask=True)
    loader.get_batch("train")
    Path("loader_state.json").write_text(json.dumps(loader.state_dict(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for old in ("turns", "trees", "pairs", "synth_kd", "turns-hf"):
        shutil.rmtree(old, ignore_errors=True)
    write_inputs()
    write_builds()
    write_distillation_set()
    write_export_and_state()
