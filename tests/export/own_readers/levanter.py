"""Reads an export with Levanter's own source, processor and dataset for the format `prebuilt`."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from tests.export.isolation import Bounds, measured, model_of
from tests.export.own_readers.levanter_runners import stand_in_for_runners
from tests.export.sets import Document, cut, report

MODEL = model_of("qwen3")  # before the stand-ins below, which confuse transformers


stand_in_for_runners()

import numpy as np  # noqa: E402
from haliax import Axis  # noqa: E402
from levanter.data.dataset import ListAsyncDataset  # noqa: E402
from levanter.data.sharded_datasource import UrlDataSource  # noqa: E402
from levanter.data.text.datasets import PrebuiltLmDataset  # noqa: E402
from levanter.data.text.formats import PrebuiltLmDatasetFormat  # noqa: E402

PAD, END = 258, 260


def read(folder: Path, length: int) -> tuple[list[Document], dict[str, float]]:
    """Documents of a split, and how far those of its fullest row move each other's logits.

    Rows are packed where the folder is in one of the name `packed`.
    """
    packed = "packed" in folder.parts
    source = UrlDataSource([str(path) for path in sorted(folder.glob("*.parquet"))])
    process = PrebuiltLmDatasetFormat(loss_weights_key="loss_weights").build_preprocessor(None)
    rows = process([row for name in source.shard_names for row in source.open_shard_at_row(name, 0)])
    dataset = PrebuiltLmDataset(
        ListAsyncDataset(rows),
        Axis("position", length),
        input_ids_key="input_ids",
        loss_weights_key="loss_weights",
        loss_weight_transform=None,
        eos_id=END if packed else None,
        block_cross_document_attention=packed,
    )
    found: list[Document] = []
    fullest: tuple[Bounds, Any] = ([], None)
    for example in asyncio.run(dataset.get_batch(range(len(rows)))):
        ids, weights = np.asarray(example.tokens).tolist(), np.asarray(example.loss_weight).tolist()
        assert len(ids) == length
        used = max(place + 1 for place, token in enumerate(ids) if token != PAD)
        labels = [-100, *(ids[place + 1] if weights[place] else -100 for place in range(used - 1))]
        assert not any(weights[used - 1 :])
        starts = [0]
        if packed:
            segments = np.asarray(example.attn_mask.segment_ids[0])
            starts += (np.flatnonzero(np.diff(segments[:used])) + 1).tolist()
        found += cut(ids[:used], labels, starts)
        bounds = [(0, start, end) for start, end in zip(starts, [*starts[1:], used], strict=True)]
        fullest = max(fullest, (bounds, example), key=lambda one: len(one[0]))
    bounds, example = fullest
    ids = torch.tensor(np.asarray(example.tokens).tolist())[None]
    sees = torch.from_numpy(np.array(example.attn_mask.materialize_mask(length, length)))[None]
    positions = torch.arange(length)[None]  # as Levanter's models have them
    if packed:
        return found, measured(MODEL, ids, sees, positions, bounds)
    with torch.no_grad():
        mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[:, None]
        _, _, end = bounds[0]
        alone = MODEL(input_ids=ids[:, :end], use_cache=False).logits
        padded = MODEL(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return found, {"moved by padding": float((padded[:, :end] - alone).abs().max()), "seen": 1.0}


report(read)
