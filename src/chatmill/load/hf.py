"""Episodes as a `datasets.Dataset` of processed rows, as the trainers of the Hugging Face world read them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.whole_file import whole_file
from chatmill.errors import ConfigError, MissingExtraError, member
from chatmill.label.policy import Policy
from chatmill.load.config import Planning, TrainingConfig
from chatmill.load.long_episodes import LongEpisodes, check_long_episodes
from chatmill.load.rows import EpisodeRows, PackedEpisodeRows, episode_rows
from chatmill.load.stage import Stage
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.model_ids import built_as, refuse_ids_beyond
from chatmill.store.pack_plan import read_pack_plan

BUILDS_HAVE_MORE = "`chatmill build` has more ways (drop_oldest_turns, windows)."
TOKENS_AT_A_TIME = 1 << 20


def to_hf_dataset(
    dataset: EpisodeDataset | str | Path,
    split: str = "train",
    *,
    max_length: int | None = None,
    pack: bool = False,
    packing_strategy: str | None = None,
    planning: str = Planning.AUTO,
    shuffle: bool = False,
    seed: int = 1337,
    episode_min_tokens: int = 2,
    policy: Policy | str | None = None,
    overflow: str = LongEpisodes.ERROR,
    model: Any = None,
    arrow_file: str | Path | None = None,
) -> Any:
    """A `datasets.Dataset` with `input_ids` and `labels`, and with `pack=True` also `seq_lengths`.

    `labels` are the ids where the weight is above 0 (all of them without masks), -100 elsewhere and on the first
    token of each packed document. Episodes longer than `max_length` (default: none is) are an error; `overflow` "cut"
    reads their first tokens, "drop" leaves them out, and a warning says what is lost. Rows are packed by the
    plan beside the episodes where it has that length and `packing_strategy` (default: its own), else here; without a
    plan, packing needs `max_length`. `planning="epoch"` leaves a plan aside.
    An id without an embedding is an error; `model` is a model folder, a loaded model or config, or a number of
    embeddings (default: the model whose tokenizer the dataset was built with, where its files say).
    The rows are in dataset order, or with `shuffle` in the order of epoch 0 of the loaders. `arrow_file`: write
    there in constant memory and map it; else the table is held in memory.
    """
    opened = dataset if isinstance(dataset, EpisodeDataset) else EpisodeDataset(dataset, split)
    wanted = member(Planning, "planning", planning)
    refuse_ids_beyond(opened, built_as(opened), model)
    if pack and max_length is None:
        stored = None if wanted is Planning.EPOCH else read_pack_plan(opened.folder, opened.lengths)
        if stored is None:
            raise ConfigError("pack=True needs max_length: the tokens of a packed row")
        max_length = stored.length
    if max_length is not None and max_length < 2:
        raise ConfigError(f"max_length is {max_length}; a row has 2 tokens or more")
    width = max(2, int(opened.lengths.max())) if max_length is None else max_length
    config = TrainingConfig(
        batch_size=1,
        block_size=width - 1,
        epoch_shuffle=shuffle,
        epoch_seed=seed,
        use_loss_mask=True,
        episode_min_tokens=episode_min_tokens,
        pack=pack,
        packing_strategy=packing_strategy,
        planning=wanted,
        policy=policy,
        overflow=member(LongEpisodes, "overflow", overflow, BUILDS_HAVE_MORE),
    )
    rows = episode_rows(opened, config)
    for sentence in rows.policy_losses():
        warnings.warn(f"{opened.folder}: {sentence}", UserWarning, stacklevel=2)
    check_long_episodes(rows, opened.folder, "max_length")
    return _dataset(_batches(rows), arrow_file)


def _batches(rows: EpisodeRows) -> Iterator[dict[str, tuple[NDArray[Any], NDArray[np.int64]]]]:
    """Columns as (flat values, offsets), about a million tokens at a time."""
    at_a_time = max(1, TOKENS_AT_A_TIME // rows.width)
    stage = Stage(at_a_time, rows.width - 1, pad_id=0, weights=rows.weight_dtype, pin=False)
    assert stage.weights is not None
    fractions = 0
    for first in range(0, rows.rows_of(0), at_a_time):
        chosen = rows.select(0, first, at_a_time)
        stage.clear()
        laid = rows.lay(stage, 0, chosen, np.arange(len(chosen)))
        tokens = np.bincount(laid.slots, weights=laid.lengths, minlength=len(chosen)).astype(np.int64)
        places = ranges(np.arange(len(chosen)) * rows.width, tokens)
        ids = stage.ids.reshape(-1)[places].astype(np.int32)
        weights = stage.weights.reshape(-1)[places]
        fractions += int(np.count_nonzero((weights != 0) & (weights != 1)))
        columns = {
            "input_ids": (ids, offsets_of(tokens)),
            "labels": (np.where(weights > 0, ids, np.int32(IGNORE_INDEX)), offsets_of(tokens)),
        }
        if isinstance(rows, PackedEpisodeRows):
            counts = np.bincount(laid.slots, minlength=len(chosen))
            columns["seq_lengths"] = (laid.lengths.astype(np.int32), offsets_of(counts))
        yield columns
    if fractions:
        warnings.warn(
            f"{rows.dataset.folder}: {fractions:,} tokens have a weight other than 0 and 1; labels only say trained "
            "or not, so these weights are lost",
            UserWarning,
            stacklevel=3,
        )


def _dataset(
    batches: Iterator[dict[str, tuple[NDArray[Any], NDArray[np.int64]]]], arrow_file: str | Path | None
) -> Any:
    try:
        import datasets
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError("datasets", "hf", "giving a datasets.Dataset") from error

    def record_batches() -> Iterator[Any]:
        for columns in batches:
            arrays = [pa.ListArray.from_arrays(pa.array(o.astype(np.int32)), pa.array(v)) for v, o in columns.values()]
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))

    if arrow_file is None:
        return datasets.Dataset(datasets.table.InMemoryTable(pa.Table.from_batches(list(record_batches()))))
    path = Path(arrow_file)
    stream = record_batches()
    first = next(stream)
    with whole_file(path) as partial, partial.open("wb") as file, pa.ipc.new_stream(file, first.schema) as writer:
        writer.write_batch(first)
        for batch in stream:
            writer.write_batch(batch)
    return datasets.Dataset.from_file(str(path))
