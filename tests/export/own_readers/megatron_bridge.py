"""Reads an export with Megatron Bridge's own dataset class and its collate function."""

import itertools
import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

if not hasattr(typing, "override"):  # the package is for Python 3.12; its reader runs on 3.11
    vars(typing)["override"] = typing_extensions.override
ROOT = next(Path(path) / "megatron" / "bridge" for path in sys.path if (Path(path) / "megatron" / "bridge").is_dir())
for name in ("", "data", "data/packing", "data/datasets", "training", "training/tokenizers", "training/utils", "utils"):
    # The packages' own __init__ files import models, which need CUDA; the modules of the reader do not.
    package = types.ModuleType(".".join(["megatron.bridge", *name.split("/")]).rstrip("."))
    package.__path__ = [str(ROOT / name)]
    sys.modules[package.__name__] = package

from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset  # noqa: E402

from tests.export.isolation import measured, model_of, segments_of, spans, within  # noqa: E402
from tests.export.sets import Document, report  # noqa: E402

END = 999


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, and how far those of its fullest row move each other's logits."""
    dataset = GPTSFTPackedParquetDataset(
        str(folder),
        SimpleNamespace(eos_id=END),
        max_seq_length=length,
        pad_seq_length_to_mult=1,
        prompt_template="{text} {answer}",
    )
    found: list[Document] = []
    fullest: tuple[list[int], Any] = ([], None)
    for number in range(len(dataset)):
        item = dataset[number]
        dataset.validate_row(number, item["input_ids"], item["loss_mask"], item["seq_boundaries"][:-1])
        batch = dataset.collate_fn([item])
        tokens, labels, mask = (batch[name][0].tolist() for name in ("tokens", "labels", "loss_mask"))
        bounds = batch["cu_seqlens_q"][0].tolist()
        lengths = [end - start for start, end in itertools.pairwise(bounds) if end > start]
        fullest = max(fullest, (lengths, batch), key=lambda one: len(one[0]))
        for start, end in itertools.pairwise(bounds):
            if start == end:
                continue
            assert tokens[start + 1 : end] == labels[start : end - 1]
            assert batch["position_ids"][0][start:end].tolist() == list(range(end - start))
            places = tuple(place + 1 for place in range(end - start) if mask[start + place])
            found.append(((*tokens[start:end], labels[end - 1]), places))
    lengths, batch = fullest
    ids = batch["tokens"].clamp(max=319)  # padding is the end token, which the model does not know
    segments, _ = segments_of(lengths, ids.shape[1])
    moves = measured(model_of("qwen3"), ids, within(segments[None]), batch["position_ids"], spans(lengths))
    return found, moves


report(read)
