"""Reads an export with a teacher with Axolotl's own loader and KD collators, and takes its KD loss of random logits."""

import json
import sys
from pathlib import Path

import torch
from axolotl.integrations.kd.collator import DataCollatorForKD, KDBatchSamplerDataCollatorForSeq2Seq
from axolotl.integrations.kd.topk_logprob.forward_kl import loss
from axolotl.utils.data.shared import load_dataset_with_config
from axolotl.utils.data.utils import handle_long_seq_in_dataset
from axolotl.utils.data.wrappers import get_dataset_wrapper
from axolotl.utils.dict import DictDefault
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<pad>": 258}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="right")
config = DictDefault({"path": sys.argv[2], "type": None})
cfg = DictDefault({"sequence_len": 6000, "dataset_num_proc": 1, "min_sample_len": 2})
rows, _ = get_dataset_wrapper(config, None, cfg, None, load_dataset_with_config(config, use_auth_token=False))
rows = [dict(row) for row in handle_long_seq_in_dataset(rows, cfg.sequence_len, cfg)]
found = {}
for name, features in (("alone", rows), ("packed", [rows])):
    collator = (DataCollatorForKD if name == "alone" else KDBatchSamplerDataCollatorForSeq2Seq)(tokenizer)
    batch = collator([[dict(row) for row in one] if isinstance(one, list) else dict(one) for one in features])
    logits = torch.randn(*batch["input_ids"].shape, 261, generator=torch.Generator().manual_seed(0))
    target = [batch[f"target_{one}"] for one in ("token_ids", "logprobs", "mask")]
    entries = int(target[2].sum())
    found[name] = {
        "ids": batch["input_ids"].tolist(),
        "sum": float(loss(logits, *target)) * entries,
        "entries": entries,
    }
Path(sys.argv[1]).write_text(json.dumps(found))
