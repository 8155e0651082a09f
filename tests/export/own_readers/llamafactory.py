"""Reads an export with LLaMA-Factory's own loader and collator; documents are told apart by its 4D mask."""

import sys
import types
from importlib.machinery import ModuleSpec

for name in ("torchaudio",):  # imported for audio, which there is none of; it has no build for every torch
    stub = types.ModuleType(name)
    stub.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = stub

import torch  # noqa: E402
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask  # noqa: E402
from llamafactory.data.loader import get_dataset  # noqa: E402
from llamafactory.data.template import TEMPLATES  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from tests.export.own_readers.documents import written  # noqa: E402
from tests.export.sets import cut  # noqa: E402

words = Tokenizer(models.WordLevel({"<pad>": 258}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="right")
arguments = types.SimpleNamespace(tokenized_path=sys.argv[1], streaming=False)
module = get_dataset(None, None, arguments, None, "sft", tokenizer)
rows = module["train_dataset"]
packed = "position_ids" in rows.column_names
collator = SFTDataCollatorWith4DAttentionMask(
    tokenizer=tokenizer, template=TEMPLATES["empty"], block_diag_attn=packed, label_pad_token_id=-100
)
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
