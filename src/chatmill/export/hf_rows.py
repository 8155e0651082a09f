"""Episodes as a `datasets.Dataset` of processed rows, as the trainers of the Hugging Face world read them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.publish import whole_file
from chatmill.errors import ConfigError, need
from chatmill.export.arrow_files import Columns, write_stream
from chatmill.export.export import hybrid_of
from chatmill.export.lossless import OTHER_WEIGHTS, TREE_COLUMNS, StoredColumns
from chatmill.export.row_layout import RowBatch
from chatmill.export.targets import ALONE, Export
from chatmill.load.teacher import TEACHER_COLUMNS
from chatmill.pack.plan import Strategy
from chatmill.store.documents import open_dataset
from chatmill.store.model_ids import refuse_ids_beyond

COLUMNS = {"input_ids", "labels", "loss_weights", "seq_lengths", *TREE_COLUMNS, "logprobs", *TEACHER_COLUMNS}
COLUMNS |= {"side", "margin", "images", "image_bytes"}
"""What a trainer may read of all that an export to hf holds."""


def to_hf_dataset(
    dataset: str | os.PathLike[str],
    split: str = "train",
    *,
    max_length: int | None = None,
    packed: bool = False,
    packing_strategy: str | None = None,
    teacher: bool = False,
    model: Any = None,
    arrow_file: str | os.PathLike[str] | None = None,
    pack: None = None,
) -> Any:
    """Return a `datasets.Dataset` with `input_ids` and `labels`, and with `packed=True` also `seq_lengths`.

    Rows of trees have `position_ids` and `ends` in place of `seq_lengths`: give the collator your model. Those of a
    model that takes pictures have them in `images` (and `image_bytes`), which `PictureCollator` reads.

    `labels` are the ids where the weight is above 0 (all of them without masks), -100 elsewhere and on the first
    token of each packed document. Weights other than 0 and 1 are in `loss_weights`, and a warning says so. Episodes
    longer than `max_length` (default: none is) are an error. Rows are packed with the length and `packing_strategy` of
    the build by default; where it did not pack, packing needs `max_length`.
    Of `seq_lengths` TRL (`padding_free=True`) and `DataCollatorForCausalLM(model=)` make the keys that a hybrid model
    reads; packed rows for one that nothing isolates are an error.
    With `teacher` tokens have the distributions of a teacher: `teacher_ids`, `teacher_logprobs` (lists of k, or empty)
    and `teacher_rest`, unshifted as labels are; `DataCollatorForCausalLM` makes tensors of them.
    An id without an embedding is an error; `model` is a model folder, a loaded model or config, or a number of
    embeddings (default: the model whose tokenizer the dataset was built with, where its files say).
    The rows are in dataset order. `arrow_file`: write there in constant memory and map it; else the table is held in
    memory. `pack` was the name of `packed` in 0.3.0.
    """
    if pack is not None:
        raise ConfigError("to_hf_dataset has no option 'pack' any more: it is 'packed', as in to_hf and to_torch")
    need("datasets", "giving a datasets.Dataset")
    import datasets
    import pyarrow as pa

    source = open_dataset(Path(dataset), [split])
    documents = source.splits[split]
    refuse_ids_beyond(documents, source.about, model, source.directory)
    stated = documents.plan
    if packed and documents.has_sides:
        raise ConfigError(f"{dataset} holds answers that people compared: each is a row of its own, so no packing")
    if packed and max_length is None and stated is None:
        raise ConfigError("packed=True needs max_length: the tokens of a packed row")
    strategy = packing_strategy or (Strategy.BEST_FIT if stated is None else stated.strategy)
    export = Export(
        source=source,
        folder=source.directory,
        alone=True,
        max_length=stated.capacity if packed and max_length is None and stated is not None else max_length,
        packing_strategy=strategy if packed else ALONE,
        shard_tokens=1,
        hybrid=hybrid_of(source, model),
    )
    stored, rows = StoredColumns(export, labels=True, teacher=teacher), export.rows()[split]
    margins = documents.facts("margin", np.arange(len(documents))) or []
    read = COLUMNS if any(margin is not None for margin in margins) else COLUMNS - {"margin"}

    def columns(batch: RowBatch) -> Columns:
        return {name: values for name, values in stored.of(batch).items() if name in read}

    if arrow_file is None:
        batches = [pa.RecordBatch.from_pydict(columns(batch)) for batch in export.batches(split, rows)]
        converted = datasets.Dataset(datasets.table.InMemoryTable(pa.Table.from_batches(batches)))
    else:
        with whole_file(Path(arrow_file)) as partial:
            write_stream(partial, export.batches(split, rows), columns)
        converted = datasets.Dataset.from_file(os.fspath(arrow_file))
    if export.lost[OTHER_WEIGHTS]:
        warnings.warn(f"{dataset}: {OTHER_WEIGHTS.format(export.lost[OTHER_WEIGHTS])}", UserWarning, stacklevel=2)
    return converted
