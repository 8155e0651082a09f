"""Tokenizes records whose messages have parts with weights, by Axolotl's own strategy for chat templates."""

import json
import sys
from pathlib import Path

from axolotl.prompt_strategies.chat_template import load
from axolotl.utils.dict import DictDefault
from transformers import AutoTokenizer

out, records, vocabulary, template = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(vocabulary)
text = Path(template).read_text()
cfg = DictDefault({"sequence_len": 100_000, "train_on_inputs": False, "eot_tokens": ["<|im_end|>"]})
cfg["chat_template"], cfg["chat_template_jinja"] = "jinja", text
settings = {"message_field_training": "train", "message_field_training_detail": "train_detail", "train_on_eos": "turn"}
strategy = load(tokenizer, cfg, {**settings, "roles_to_train": ["assistant"], "chat_template_jinja": text})
found = []
for line in Path(records).read_text().splitlines():
    row = strategy.tokenize_prompt({"messages": json.loads(line)["messages"]})
    found.append([list(row["input_ids"]), [label != -100 for label in row["labels"]]])
Path(out).write_text(json.dumps(found))
