"""From a file of conversations to a model that answers one of them and stops, on a CPU, in about a minute.

    python examples/train_tiny.py [FOLDER]

The model learns a dozen short conversations by heart: enough to see that what is trained is what was meant.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch

import chatmill
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.render.registry import bind
from chatmill.train.generate import Sampling
from chatmill.train.gpt import GPT, GPTConfig
from chatmill.train.prompt import Reply, ask
from chatmill.train.trainer import FitResult

DATA = Path(__file__).parent / "data" / "conversations.jsonl"
LONGEST = 200
"""Characters of a conversation."""


def short_records() -> list[dict[str, object]]:
    """Conversations of one question and one answer that are short enough to learn quickly."""
    records = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    kept = []
    for record in records:
        messages = record["messages"]
        plain = [m["role"] for m in messages] == ["user", "assistant"] and not any(
            m.get("tool_calls") for m in messages
        )
        if plain and sum(len(m["content"]) for m in messages) <= LONGEST:
            kept.append(record)
    return kept


def run(folder: Path, *, steps: int = 160) -> tuple[list[dict[str, object]], FitResult, list[Reply]]:
    """Build, train, and ask every question; also what the tests run."""
    records = short_records()
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    recipe = {"sources": [{"path": str(chats)}], "tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}
    chatmill.build(recipe, folder / "dataset", workers=0)

    tokenizer = chatmill.load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    config = {"batch_size": 2, "block_size": 512, "dataset_mode": "sft_episode", "epoch_drop_last": False}
    loader = GPTEpisodeDataLoader(config, tokenizer, folder / "dataset", use_loss_mask=True, pack=True)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, layers=2, hidden=64, heads=4, kv_heads=2))
    result = model.fit(loader, steps=steps, learning_rate=1e-2, weight_decay=0.0, log_every=20, out=folder / "run")

    template = bind("chatml", tokenizer)
    sampling = Sampling(max_new_tokens=64)
    answers = [ask(model, template, record["messages"][:1], sampling=sampling) for record in records]  # type: ignore[index]
    return records, result, answers


def main() -> None:
    """Run in a folder (a temporary one by default) and print question, answer and how it ended."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("chatmill.load").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        records, result, answers = run(folder)
        print(f"\n{result.outcome} after {result.step} steps, loss {result.loss:.4f}\n")
        for record, answer in zip(records, answers, strict=True):
            question = record["messages"][0]["content"]  # type: ignore[index]
            print(f"user       {question}\nassistant  {answer.text}   [{answer.stop or 'did not stop'}]\n")


if __name__ == "__main__":
    main()
