"""Reads an export of pairs, or of labels, with LLaMA-Factory's own loader and collators."""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

for name in ("torchaudio",):  # imported for audio, which there is none of; it has no build for every torch
    stub = types.ModuleType(name)
    stub.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = stub

from llamafactory.data.collator import KTODataCollatorWithPadding, PairwiseDataCollatorWithPadding  # noqa: E402
from llamafactory.data.loader import get_dataset  # noqa: E402
from llamafactory.data.template import TEMPLATES  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

words = Tokenizer(models.WordLevel({"<pad>": 258}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="right")
arguments = types.SimpleNamespace(tokenized_path=sys.argv[1], streaming=False)
rows = get_dataset(None, None, arguments, None, "rm", tokenizer)["train_dataset"]
is_kto = "kto_tags" in rows.column_names
collator = (KTODataCollatorWithPadding if is_kto else PairwiseDataCollatorWithPadding)(
    tokenizer=tokenizer, template=TEMPLATES["empty"], label_pad_token_id=-100
)
batch = collator([dict(row) for row in rows])
names = ("input_ids", "attention_mask", "labels")
found = {
    name: batch[name].tolist() for name in (*names, *(f"kl_{name}" for name in names), "kto_tags") if name in batch
}
Path(sys.argv[2]).write_text(json.dumps(found))
