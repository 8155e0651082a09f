"""Reads an export with Levanter's own source, processor and dataset for the format `prebuilt`."""

import asyncio
import sys
from pathlib import Path

import numpy as np
from haliax import Axis
from levanter.data.dataset import ListAsyncDataset
from levanter.data.sharded_datasource import UrlDataSource
from levanter.data.text.datasets import PrebuiltLmDataset
from levanter.data.text.formats import PrebuiltLmDatasetFormat

from tests.export.own_readers.documents import written
from tests.export.sets import cut

PAD = 258
source = UrlDataSource([str(path) for path in sorted(Path(sys.argv[1]).glob("*.parquet"))])
form = PrebuiltLmDatasetFormat(loss_weights_key="loss_weights")
process = form.build_preprocessor(None)
rows = process([row for name in source.shard_names for row in source.open_shard_at_row(name, 0)])
dataset = PrebuiltLmDataset(
    ListAsyncDataset(rows),
    Axis("position", 6000),
    input_ids_key="input_ids",
    loss_weights_key="loss_weights",
    loss_weight_transform=None,
    block_cross_document_attention=False,
)
found = []
for example in asyncio.run(dataset.get_batch(range(len(rows)))):
    ids, weights = np.asarray(example.tokens).tolist(), np.asarray(example.loss_weight).tolist()
    assert len(ids) == 6000
    used = max(place + 1 for place, token in enumerate(ids) if token != PAD)
    labels = [-100, *(ids[place + 1] if weights[place] else -100 for place in range(used - 1))]
    assert not any(weights[used - 1 :])
    found += cut(ids[:used], labels, [0])
written(found)
