"""Reads an export of pairs or labels with LLaMA-Factory's own loader and collators."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from llamafactory.data.collator import KTODataCollatorWithPadding, PairwiseDataCollatorWithPadding
from llamafactory.data.loader import get_dataset
from llamafactory.data.template import TEMPLATES

from tests.export.isolation import padding_tokenizer

tokenizer = padding_tokenizer()
arguments = SimpleNamespace(tokenized_path=sys.argv[2], streaming=False)
rows = get_dataset(None, None, arguments, None, "sft", tokenizer)["train_dataset"]
kind = KTODataCollatorWithPadding if "kto_tags" in rows.column_names else PairwiseDataCollatorWithPadding
collator = kind(tokenizer=tokenizer, template=TEMPLATES["empty"], label_pad_token_id=-100)
batch = collator([dict(row) for row in rows])
names = ("input_ids", "attention_mask", "labels")
kept = [name for name in (*names, *(f"kl_{name}" for name in names), "kto_tags") if name in batch]
Path(sys.argv[1]).write_text(json.dumps({name: batch[name].tolist() for name in kept}))
