"""Reads an export with LLaMA-Factory's own loader and collators: conversations, pairs or labels.

Packed documents are told apart by the 4D mask.
"""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

stub = types.ModuleType("torchaudio")  # imported for audio, which there is none of; it has no build for every torch
stub.__spec__ = ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = stub

import torch  # noqa: E402
from llamafactory.data.collator import (  # noqa: E402
    KTODataCollatorWithPadding,
    PairwiseDataCollatorWithPadding,
    SFTDataCollatorWith4DAttentionMask,
)
from llamafactory.data.loader import get_dataset  # noqa: E402
from llamafactory.data.template import TEMPLATES  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from tests.export.sets import cut, written  # noqa: E402

words = Tokenizer(models.WordLevel({"<pad>": 258}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="right")
arguments = types.SimpleNamespace(tokenized_path=sys.argv[1], streaming=False)
rows = get_dataset(None, None, arguments, None, "sft", tokenizer)["train_dataset"]
options = {"tokenizer": tokenizer, "template": TEMPLATES["empty"], "label_pad_token_id": -100}
if {"kto_tags", "chosen_input_ids"} & set(rows.column_names):
    kind = KTODataCollatorWithPadding if "kto_tags" in rows.column_names else PairwiseDataCollatorWithPadding
    batch = kind(**options)([dict(row) for row in rows])
    names = ("input_ids", "attention_mask", "labels")
    kept = [name for name in (*names, *(f"kl_{name}" for name in names), "kto_tags") if name in batch]
    Path(sys.argv[2]).write_text(json.dumps({name: batch[name].tolist() for name in kept}))
    sys.exit()
packed = "position_ids" in rows.column_names
collator = SFTDataCollatorWith4DAttentionMask(**options, block_diag_attn=packed)
found = []
for first in range(0, len(rows), 2):
    batch = collator([dict(rows[i]) for i in range(first, min(first + 2, len(rows)))])
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        if packed:
            seen = mask[0] == 0
            used = int(seen.any(dim=1).sum())
            firsts = seen[:used].int().argmax(dim=1)
            starts = torch.unique(firsts).tolist()
        else:
            used, starts = int(mask.sum()), [0]
        found += cut(ids[:used].tolist(), labels[:used].tolist(), starts)
written(found)
