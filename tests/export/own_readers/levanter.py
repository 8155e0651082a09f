"""Reads an export with Levanter's own source, processor and dataset for the format `prebuilt`."""

import asyncio
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class Anything:
    """Stands for whatever is imported from the runners of cluster jobs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class Runners(MetaPathFinder, Loader):
    """Levanter imports the runners of its cluster jobs, which start servers; its reader does not use them."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("fray", "zephyr", "iris") else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: type(name, (Anything,), {})  # type: ignore[method-assign]


sys.meta_path.insert(0, Runners())

import numpy as np  # noqa: E402
from haliax import Axis  # noqa: E402
from levanter.data.dataset import ListAsyncDataset  # noqa: E402
from levanter.data.sharded_datasource import UrlDataSource  # noqa: E402
from levanter.data.text.datasets import PrebuiltLmDataset  # noqa: E402
from levanter.data.text.formats import PrebuiltLmDatasetFormat  # noqa: E402

from tests.export.sets import cut, written  # noqa: E402

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
