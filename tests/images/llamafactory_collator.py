"""A packed export of pictures through LLaMA-Factory's own collator, next to ours: one loss and one set of positions.

python -m tests.images.llamafactory_collator FOLDER
"""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

stub = types.ModuleType("torchaudio")  # imported for audio, which there is none of; it has no build for every torch
stub.__spec__ = ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = stub

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask  # noqa: E402
from llamafactory.data.template import TEMPLATES  # noqa: E402

import chatmill  # noqa: E402
from tests.images.model_folders import picture, processor_of  # noqa: E402
from tests.images.test_training import built_of, random_model  # noqa: E402

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
