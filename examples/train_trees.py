"""Trains a model on every turn of chats with reasoning, each turn after its real prompt, and each token once.

    python examples/train_trees.py [FOLDER]

On a GPU the model runs with FlexAttention; on a CPU, where that has no backward pass, with sdpa. Nothing else differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments  # in place of your model

import chatmill
from chatmill.store.episodes import EpisodeDataset

LENGTH = 800
ASKED = [("2+2", "4"), ("3+5", "8"), ("7+1", "8"), ("9-4", "5")]


def chats(count: int = 12) -> list[dict[str, Any]]:
    """Chats of four turns. Qwen3's template drops the reasoning of earlier answers when a user asks again."""
    found = []
    for number in range(count):
        messages = []
        for question, answer in ASKED[number % 4 :] + ASKED[: number % 4]:
            reasoning = f"The user asks for {question}. That is {answer}."
            messages.append({"role": "user", "content": f"What is {question}?"})
            messages.append({"role": "assistant", "content": f"It is {answer}.", "reasoning_content": reasoning})
        found.append({"id": f"chat-{number}", "messages": messages})
    return found


def run(folder: Path, *, steps: int = 12) -> dict[str, Any]:
    """Build the chats as trees, train on them, and say what it cost; also what the tests run."""
    source = folder / "chats.jsonl"
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats()), encoding="utf-8")
    recipe = {"sources": [{"path": str(source)}], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    sizes = {}
    for expand in ("none", "turns", "tree"):
        gates = {"max_lost_reasoning": None}  # whole conversations lose the reasoning of earlier answers
        chatmill.build({**recipe, "expand": expand, "gates": gates}, folder / expand, workers=0)
        sizes[expand] = EpisodeDataset(folder / expand).tokens

    rows = chatmill.to_hf_dataset(folder / "tree", max_length=LENGTH, packed=True)
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_implementation="flex_attention" if has_gpu else "sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    collator = chatmill.DataCollatorForCausalLM(
        chatmill.load_tokenizer("bytes"), model=model, padding="max_length", max_length=LENGTH
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "run"), max_steps=steps, per_device_train_batch_size=2, learning_rate=5e-3,
        logging_steps=steps, remove_unused_columns=False, use_cpu=not has_gpu, report_to=[], save_strategy="no",
        dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    before = loss_of(model, collator([rows[0]]))
    trainer.train()
    return {"tokens": sizes, "rows": len(rows), "loss": (before, loss_of(model, collator([rows[0]])))}


@torch.no_grad()
def loss_of(model: Any, batch: dict[str, Any]) -> float:
    """The mean loss over the targets of a batch."""
    there = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
    return float(model(**there).loss)


def main() -> None:
    """Run it, and print what it did."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="chatmill-trees-"))
    folder.mkdir(parents=True, exist_ok=True)
    done = run(folder)
    tokens = done["tokens"]
    for expand, about in (("none", "conversations"), ("turns", "rows per turn"), ("tree", "trees")):
        print(f"{about:<14} {tokens[expand]:>7,} tokens ({tokens[expand] / tokens['none']:.2f} times)")
    print(f"{done['rows']} packed rows; loss {done['loss'][0]:.2f} before, {done['loss'][1]:.2f} after")


if __name__ == "__main__":
    main()
