"""A packed export of pictures through LLaMA-Factory's own collator, next to ours: one loss and one set of positions.

python -m tests.images.llamafactory_collator FOLDER PACKAGES

PACKAGES has LLaMA-Factory, and older packages beside it: transformers' own pictures need the installed ones.
"""

import sys
from pathlib import Path

sys.path.append(sys.argv[2])

import datasets
import torch
import transformers
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
from llamafactory.data.template import TEMPLATES

import chatmill
from tests.images.model_folders import picture, processor_of
from tests.images.test_training import built_of, random_model

folder = Path(sys.argv[1])
shown = {"a.png": picture(64, 200), "b.jpg": picture(120, 70, "JPEG"), "c.png": picture(1000, 900)}
data = built_of(folder, shown, store_images=True)
chatmill.export_dataset(data, "llamafactory", folder / "out", max_length=2048)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
processor = processor_of(folder / "model", "qwen3_vl")
processor.video_processor = object()  # asked for, not used
processor.image_max_pixels, processor.image_min_pixels = 178956970, 1  # as the export prints
model = random_model("qwen3_vl", tokenizer.get_vocab())
theirs = SFTDataCollatorWith4DAttentionMask(
    tokenizer=tokenizer, template=TEMPLATES["qwen3_vl"], model=model, processor=processor, block_diag_attn=True,
    label_pad_token_id=-100, compute_dtype=torch.float32,
)([dict(datasets.load_from_disk(str(folder / "out"))["train"][0])])  # fmt: skip
row = chatmill.to_hf_dataset(data, max_length=2048, packed=True)[0]
collator = chatmill.PictureCollator(chatmill.DataCollatorForCausalLM(tokenizer, model=model), folder / "model", folder)
ours, used = collator([row]), len(row["input_ids"])
assert torch.equal(ours["input_ids"][0, :used], theirs["input_ids"][0, :used])
assert torch.equal(ours["position_ids"][1:, 0, :used], theirs["position_ids"][-3:, 0, :used])
assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
with torch.no_grad():
    losses = [model(**batch, **more).loss.item() for batch, more in ((ours, {}), (theirs, {"use_cache": False}))]
assert abs(losses[0] - losses[1]) < 1e-5, losses
print("equal")
