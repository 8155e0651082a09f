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
from typing import Any

import torch
import transformers

import chatmill
from chatmill.train.trainer import FitResult, fit

DATA = Path(__file__).parent / "data" / "conversations.jsonl"
LONGEST = 200
"""Characters of a conversation."""


def short_records() -> list[dict[str, Any]]:
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


def run(folder: Path, *, steps: int = 160) -> tuple[list[dict[str, Any]], FitResult, list[str]]:
    """Build, train, and ask every question; also what the tests run."""
    records = short_records()
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    recipe = {"sources": [{"path": str(chats)}], "tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}
    gates = {"max_lost_reasoning": None}  # ChatML shows no reasoning: the model learns the answers alone
    chatmill.build({**recipe, "gates": gates}, folder / "dataset", workers=0)

    tokenizer = chatmill.load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    config = {"batch_size": 2, "block_size": 512, "epoch_drop_last": False}
    loader = chatmill.GPTEpisodeDataLoader(config, tokenizer, folder / "dataset", use_loss_mask=True, pack=True)
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(sizes)
    result = fit(model, loader, steps=steps, learning_rate=1e-2, weight_decay=0.0, log_every=20, out=folder / "run")
    return records, result, [ask(model, tokenizer, record["messages"][0]) for record in records]


def ask(model: Any, tokenizer: Any, message: dict[str, str]) -> str:
    """Return the answer with the token at which the model stopped, if it did."""
    asked = chatmill.Conversation((chatmill.Message(chatmill.Role.USER, message["content"]),))
    tokens = chatmill.render_conversations([asked], "chatml", tokenizer, add_generation_prompt=True).tokens
    prompt = torch.tensor(tokens.ids.tolist())[None]
    stop = tokenizer.control("<|im_end|>")
    made = model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=stop, pad_token_id=stop)
    return str(tokenizer.decode(made[0, prompt.shape[1] :].tolist()))


def main() -> None:
    """Run in a folder (a temporary one by default) and print every question with its answer."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("chatmill.load").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        records, result, answers = run(folder)
        print(f"\n{result.outcome} after {result.step} steps, loss {result.loss:.4f}\n")
        for record, answer in zip(records, answers, strict=True):
            print(f"user       {record['messages'][0]['content']}\nassistant  {answer}\n")


if __name__ == "__main__":
    main()
