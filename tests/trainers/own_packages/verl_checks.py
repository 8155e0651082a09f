"""The dataset class in verl: made by its own function, collated and divided by its own code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.workers.utils.losses import sft_loss

from chatmill.errors import ConfigError
from tests.export.isolation import bounds_of, model_of, moved
from tests.trainers.sets import obvious_loss, trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[3]


def made(dataset: Path, work: Path, split: str = "train", **options: Any) -> Any:
    """Make the dataset with the lines of the page."""
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    words = page.split("## verl")[1].split("```bash")[1].split("```")[0].replace("\\\n", " ").split()
    said = [word.replace("=./built", f"={dataset}") for word in words if word.startswith("data.")]
    defaults = {"data": {"pad_mode": "no_padding", "max_length": 1024, "max_token_len_per_gpu": 8192}}
    config = OmegaConf.merge(defaults, OmegaConf.from_dotlist(said), {"data": options}).data
    files = config.train_files if split == "train" else config.val_files
    return create_sft_dataset(files, config, tokenizer=None, processor=None, max_samples=options.get("max_samples", -1))


@pytest.mark.parametrize("fractional", [True, False])
def test_its_collator_and_loss_give_the_obvious_loss(fractional: bool, tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items(8, fractional=fractional))
    dataset = made(folder, tmp_path)
    assert type(dataset).__module__ == "chatmill.trainers.verl"
    rows = [pickle.loads(pickle.dumps(dataset))[number] for number in range(len(dataset))]
    batch = SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows)
    assert batch["loss_mask"].values().dtype == (torch.float32 if fractional else torch.int64)
    ids = batch["input_ids"].values()[None]
    positions = batch["position_ids"].values()[None]

    model = model_of("qwen3")
    given = {"position_ids": positions, "use_cache": False}
    with torch.no_grad():
        logits = model(input_ids=ids, **given).logits[0]
    rolled = torch.roll(ids[0], shifts=-1)
    log_probs = logits.log_softmax(-1).gather(-1, rolled[:, None])[:, 0]
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, batch["input_ids"].offsets())}
    data = TensorDict({"loss_mask": batch["loss_mask"]}, batch_size=[len(rows)])
    tu.assign_non_tensor(data, batch_num_tokens=data["loss_mask"].sum().item(), dp_size=1)
    loss, _ = sft_loss(None, output, data)
    wanted = weights_by_document(folder)
    apart = [row["input_ids"][None] for row in rows]
    assert float(loss) == pytest.approx(obvious_loss(model, apart, wanted), rel=1e-4)

    moves = moved(lambda changed: model(input_ids=changed, **given).logits, ids, bounds_of(ids.tolist(), set(wanted)))
    assert moves["moved"] < 1e-4
    assert moves["seen"] > 1e-2


def test_splits_and_limits(tmp_path: Path) -> None:
    folder = weighted_set(tmp_path / "set", weighted_items(8))
    assert len(made(folder, tmp_path, "val")) == 5
    assert len(made(folder, tmp_path, max_samples=3)) == 3
    for options, words in (
        ({"pad_mode": "right"}, "data.pad_mode is right"),
        ({"max_length": 4}, "data.max_length is 4: set it to"),
        ({"max_token_len_per_gpu": 4}, "data.max_token_len_per_gpu is 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            made(folder, tmp_path, **options)
    with pytest.raises(ConfigError, match="holds trees, and verl has no mask"):
        made(trees(tmp_path), tmp_path)
