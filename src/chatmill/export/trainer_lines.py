"""Lines for the config of each trainer, by what is known of the rows that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

TRL_PACKED = "SFTConfig(padding_free=True, max_length=None)  # without padding_free documents see each other"
TRL_ALONE = "SFTConfig(max_length=None)  # rows have their length already"
TRAINER_PACKED = (
    "rows.map(chatmill.trainer_columns, batched=True), and "
    "Trainer(data_collator=chatmill.DataCollatorForCausalLM(tokenizer, model=model))"
)
TREE_LINES = (
    "collator = chatmill.DataCollatorForCausalLM(tokenizer, model=model)  # a model with sdpa, eager or flex_attention",
    "TRL: SFTTrainer(..., data_collator=collator, args=SFTConfig(remove_unused_columns=False, max_length=None))",
    "transformers: Trainer(..., data_collator=collator, args=TrainingArguments(remove_unused_columns=False))",
)
IMAGE_LINES = (
    "collator = chatmill.PictureCollator({collator}, {model}{images})",
    "transformers: Trainer(..., data_collator=collator, args=TrainingArguments(remove_unused_columns=False))",
)


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What the lines for a trainer depend on; `{out}` in a line stands for the folder of the export."""

    splits: tuple[str, ...]
    is_packed: bool
    """Whether a row holds several documents."""
    longest: int
    """Tokens of the longest document, at most."""
    row: int
    """Tokens of the longest row, at most, before a trainer pads it."""
    has_trees: bool = False
    has_images: bool = False
    has_pairs: bool = False
    """Whether there are pairs of a chosen and a rejected answer; else, for trainers of preferences, labels."""
    most_pixels: int | None = None
    """Of one image; None where no image is resized."""
    model: str = "MODEL_FOLDER"
    """Folder of the model, as the dataset names it."""
    image_folder: str = ""
    """Folder that the paths of images start from; empty where images are stored or have whole paths."""

    @property
    def main_split(self) -> str:
        """The split that a trainer trains on: `train`, or the first if there is no such split."""
        return "train" if "train" in self.splits else self.splits[0]


def hf_lines(facts: RowFacts) -> list[str]:
    """Write the lines for TRL and transformers, about a folder that holds everything."""
    if facts.has_trees:
        return list(TREE_LINES)
    if facts.has_images:
        inner = "tokenizer, model=model" if facts.is_packed else "tokenizer"
        collator = f"chatmill.DataCollatorForCausalLM({inner})"
        images = f", images={facts.image_folder!r}" if facts.image_folder else ""
        return [line.format(collator=collator, model=repr(facts.model), images=images) for line in IMAGE_LINES]
    if facts.is_packed:
        return [f"TRL: {TRL_PACKED}", f"transformers: {TRAINER_PACKED}"]
    return []


def trl_lines(facts: RowFacts) -> list[str]:
    """Write the arguments of TRL's SFTTrainer."""
    return [TRL_PACKED if facts.is_packed else TRL_ALONE]


def dpo_lines(facts: RowFacts) -> list[str]:
    """Write what TRL's DPOTrainer is told."""
    return [*_prepared("DPOTrainer"), "DPOConfig(max_length=None)"]


def kto_lines(facts: RowFacts) -> list[str]:
    """Write what TRL's KTOTrainer is told."""
    return [*_prepared("KTOTrainer"), 'KTOConfig(max_length=None, loss_type="apo_zero_unpaired")']


def _prepared(trainer: str) -> list[str]:
    """Write a trainer that takes rows as they are: TRL tokenizes every dataset that it is given."""
    return [
        f"class Ready{trainer}({trainer}):  # which tokenizes every dataset that it is given",
        "    def _prepare_dataset(self, dataset, *args): return dataset",
    ]


def reward_lines(facts: RowFacts) -> list[str]:
    """Write what TRL's RewardTrainer is told."""
    return ["RewardConfig(max_length=None)"]


def axolotl_lines(facts: RowFacts) -> list[str]:
    """Write keys of Axolotl's config."""
    lines: list[str] = []
    for split, key in (("train", "datasets"), ("val", "test_datasets")):
        if split in facts.splits:
            lines += [f"{key}:", f"  - path: {{out}}/{split}", "    type:"]
    return [*lines, f"sequence_len: {facts.longest}  # or more; Axolotl drops longer documents", "sample_packing: true"]


def llamafactory_lines(facts: RowFacts) -> list[str]:
    """Write keys of LLaMA-Factory's config."""
    lines = ["stage: sft", "tokenized_path: {out}", f"cutoff_len: {facts.row}"]
    if facts.is_packed:
        lines += ["neat_packing: true"]
    if facts.has_images:
        # It would resize images else, and their tokens would be others.
        lines += [f"image_max_pixels: {facts.most_pixels}", "image_min_pixels: 1"]
    return lines


def llamafactory_pair_lines(facts: RowFacts) -> list[str]:
    """Write keys of LLaMA-Factory's config for answers that people compared."""
    stage = "dpo  # or rm" if facts.has_pairs else "kto"
    return [f"stage: {stage}", "tokenized_path: {out}", f"cutoff_len: {facts.longest}"]


def megatron_bridge_lines(facts: RowFacts) -> list[str]:
    """Write arguments of Megatron Bridge's dataset config."""
    data = [f'    packed_{split}_data_path="{{out}}/{split}",' for split in ("train", "val") if split in facts.splits]
    return [
        "# arguments of GPTSFTDatasetConfig",
        f"seq_length={facts.row},",
        "enable_offline_packing=True,",
        "offline_packing_specs=PackedSequenceSpecs(",
        f"    packed_sequence_size={facts.row},",
        *data,
        '    packed_metadata_path="{out}/packed_metadata.json",',
        "),",
    ]


def skyrl_lines(facts: RowFacts) -> list[str]:
    """Write keys of SkyRL's config."""
    lines = [f'pretokenized_dataset_paths: ["{{out}}/{facts.main_split}"]  # SkyRL 0.4.0 or later']
    if "val" in facts.splits:
        lines += ['eval_pretokenized_dataset_paths: ["{out}/val"]']
    return [*lines, f"max_length: {facts.longest}  # or more; SkyRL cuts longer documents"]


def levanter_lines(facts: RowFacts) -> list[str]:
    """Write Levanter's config."""
    validation = ['        validation_urls: ["{out}/val/*.parquet"]'] if "val" in facts.splits else []
    return [
        "data:",
        f"  block_cross_document_attention: {'true' if facts.is_packed else 'false'}",
        "  components:",
        "    chats:",
        "      source:",
        "        type: url",
        f'        train_urls: ["{{out}}/{facts.main_split}/*.parquet"]',
        *validation,
        "      format:",
        "        type: prebuilt",
        "        loss_weights_key: loss_weights",
        f"train_seq_len: {facts.row}",
    ]


def torchtitan_lines(facts: RowFacts) -> list[str]:
    """Write lines of torchtitan's config."""
    lines = [
        "from chatmill.torchtitan import ChatmillDataLoader",
        f'dataloader=ChatmillDataLoader.Config(dataset_path="{{out}}/{facts.main_split}")',
        f"training.seq_len = {facts.row}  # main branch: training.max_context_length",
    ]
    if facts.is_packed:
        lines += ["# attention: flex or varlen. torchtitan gives sdpa no mask, and documents would see each other"]
    return lines


TRAINER_LINES: Mapping[str, Callable[[RowFacts], list[str]]] = {
    "hf": hf_lines,
    "trl": trl_lines,
    "trl-dpo": dpo_lines,
    "trl-kto": kto_lines,
    "trl-reward": reward_lines,
    "axolotl": axolotl_lines,
    "llamafactory": llamafactory_lines,
    "megatron-bridge": megatron_bridge_lines,
    "skyrl": skyrl_lines,
    "levanter": levanter_lines,
    "torchtitan": torchtitan_lines,
}
"""Of the exports whose lines are known before the data is."""
