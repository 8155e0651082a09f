"""Reads an export with Megatron Bridge's own dataset class and its collate function."""

import itertools
import sys
import types
import typing
from pathlib import Path
from types import SimpleNamespace

import typing_extensions

if not hasattr(typing, "override"):  # the package is for Python 3.12; its reader runs on 3.11
    typing.override = typing_extensions.override
ROOT = next(Path(path) / "megatron" / "bridge" for path in sys.path if (Path(path) / "megatron" / "bridge").is_dir())
for name in ("", "data", "data/packing", "data/datasets", "training", "training/tokenizers", "training/utils", "utils"):
    # The packages' own __init__ files import models, which need CUDA; the modules of the reader do not.
    package = types.ModuleType(".".join(["megatron.bridge", *name.split("/")]).rstrip("."))
    package.__path__ = [str(ROOT / name)]
    sys.modules[package.__name__] = package

from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset  # noqa: E402

from tests.export.sets import written  # noqa: E402

END = 999
dataset = GPTSFTPackedParquetDataset(
    sys.argv[1],
    SimpleNamespace(eos_id=END),
    max_seq_length=6000,
    pad_seq_length_to_mult=1,
    prompt_template="{text} {answer}",
)
found = []
for number in range(len(dataset)):
    item = dataset[number]
    dataset.validate_row(number, item["input_ids"], item["loss_mask"], item["seq_boundaries"][:-1])
    batch = dataset.collate_fn([item])
    tokens, labels, mask = (batch[name][0].tolist() for name in ("tokens", "labels", "loss_mask"))
    bounds = batch["cu_seqlens_q"][0].tolist()
    for start, end in itertools.pairwise(bounds):
        if start == end:
            continue
        assert tokens[start + 1 : end] == labels[start : end - 1]
        assert batch["position_ids"][0][start:end].tolist() == list(range(end - start))
        places = tuple(place + 1 for place in range(end - start) if mask[start + place])
        found.append(((*tokens[start:end], labels[end - 1]), places))
written(found)
