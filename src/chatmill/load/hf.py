"""Episodes as a `datasets.Dataset` of processed rows, as the trainers of the Hugging Face world read them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.publish import whole_file
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError, DataError, member, need
from chatmill.label.policy import Policy
from chatmill.load.config import LongEpisodes, TrainingConfig
from chatmill.load.episode_rows import EpisodeRows, check_long_episodes
from chatmill.load.model_needs import hybrid_model
from chatmill.load.pictures import row_pictures
from chatmill.load.teacher import TEACHER_COLUMNS, teacher_lists, teacher_types
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.model_ids import built_as, model_named, refuse_ids_beyond
from chatmill.store.split import even_ranges

BUILDS_HAVE_MORE = "`chatmill build` has more ways (drop_oldest_turns, windows)."
MAX_ID = 2**31 - 1
TREE_COLUMNS = ("position_ids", "ends")
"""What rows of trees have beside ids and labels."""
PICTURE_COLUMNS = ("images", "image_bytes")
"""What rows with pictures have beside them: `chatmill.PictureCollator` makes pixels of it."""
FACTS = ("side", "margin")
"""What rows of answers that people compared have."""
Columns = Mapping[str, tuple[NDArray[Any] | list[Any], NDArray[np.int64]]]
"""Values and the offsets of the rows in them, by the name of the column."""


def to_hf_dataset(
    dataset: EpisodeDataset | str | Path,
    split: str = "train",
    *,
    max_length: int | None = None,
    pack: bool = False,
    packing_strategy: str | None = None,
    shuffle: bool = False,
    seed: int = 1337,
    episode_min_tokens: int = 2,
    policy: Policy | str | None = None,
    overflow: str = LongEpisodes.ERROR,
    teacher: bool = False,
    model: Any = None,
    arrow_file: str | Path | None = None,
) -> Any:
    """A `datasets.Dataset` with `input_ids` and `labels`, and with `pack=True` also `seq_lengths`.

    Rows of trees have `position_ids` and `ends` in place of `seq_lengths`: give the collator your model. Those of a
    model that takes pictures have them in `images` (and `image_bytes`), which `PictureCollator` reads.

    `labels` are the ids where the weight is above 0 (all of them without masks), -100 elsewhere and on the first
    token of each packed document. Episodes longer than `max_length` (default: none is) are an error; `overflow` "cut"
    reads their first tokens, "drop" leaves them out, and a warning says what is lost. Rows are packed
    with the length and `packing_strategy` of the build by default; where it did not pack, packing needs `max_length`.
    Of `seq_lengths` TRL (`padding_free=True`) and `DataCollatorForCausalLM(model=)` make the keys that a hybrid model
    reads; packed rows for one that nothing isolates are an error.
    With `teacher` tokens have the distributions of a teacher: `teacher_ids`, `teacher_logprobs` (lists of k, or empty)
    and `teacher_rest`, unshifted as labels are; `DataCollatorForCausalLM` makes tensors of them.
    An id without an embedding is an error; `model` is a model folder, a loaded model or config, or a number of
    embeddings (default: the model whose tokenizer the dataset was built with, where its files say).
    The rows are in dataset order, or with `shuffle` in the order of epoch 0 of the loaders. `arrow_file`: write
    there in constant memory and map it; else the table is held in memory.
    """
    opened = dataset if isinstance(dataset, EpisodeDataset) else EpisodeDataset(dataset, split)
    about = built_as(opened)
    refuse_ids_beyond(opened, about, model)
    if pack and (hybrid := hybrid_model(model_named(about, model))) is not None:
        hybrid.refuse_packed()
    if pack and opened.has_sides:
        raise ConfigError(
            f"{opened.folder} holds answers that people compared: each is a row of its own, so no packing"
        )
    if pack and max_length is None:
        stated = opened.manifest.rows if opened.manifest else None
        if stated is None:
            raise ConfigError("pack=True needs max_length: the tokens of a packed row")
        max_length = stated.length
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
        policy=policy,
        overflow=member(LongEpisodes, "overflow", overflow, BUILDS_HAVE_MORE),
        teacher=teacher,
    )
    rows = EpisodeRows(opened, config)
    for sentence in rows.policy_losses():
        warnings.warn(f"{opened.folder}: {sentence}", UserWarning, stacklevel=2)
    check_long_episodes(rows, opened.folder, "max_length")
    names = ["input_ids", "labels", *(TREE_COLUMNS if opened.has_trees else ["seq_lengths"] if pack else [])]
    names += ["logprobs"] if opened.has_logprobs else []
    names += TEACHER_COLUMNS if teacher else []
    names += ["side"] if opened.has_sides else []
    margins = opened.facts("margin", np.arange(len(opened))) or []
    names += ["margin"] if any(margin is not None for margin in margins) else []
    names += [name for name in PICTURE_COLUMNS if name in opened.columns]
    return _dataset(_batches(rows, packed=pack), names, arrow_file=arrow_file)


def _batches(rows: EpisodeRows, *, packed: bool) -> Iterator[Columns]:
    """The rows in the order of epoch 0, about a million tokens at a time."""
    numbers, counts = rows.documents(0, rows.select(0, 0, rows.rows_of(0)))
    lengths, borders, fractions = np.minimum(rows.dataset.lengths[numbers], rows.width), offsets_of(counts), 0
    for first, last in even_ranges(np.diff(offsets_of(lengths)[borders])):
        mine = slice(borders[first], borders[last])
        stored, weights = rows.gather(numbers[mine], lengths[mine])
        ids, offsets = as_int32(stored, rows.dataset.split), offsets_of(lengths[mine])
        documents = borders[first : last + 1] - borders[first]
        if packed:  # the token before the first of a document belongs to another one
            weights[offsets[:-1]] = 0
        trees: dict[str, Any] = {}
        if rows.has_trees:
            branches = rows.dataset.branches(numbers[mine]).cut(lengths[mine])
            weights[branches.flat_starts(lengths[mine])] = 0
            positions, ends = branches.positions_and_ends(lengths[mine])
            in_row = offsets[:-1] - np.repeat(offsets[documents[:-1]], np.diff(documents))
            ends = ends + np.repeat(in_row, lengths[mine]).astype(np.int32)
            trees = {"position_ids": (positions, offsets[documents]), "ends": (ends, offsets[documents])}
        more: dict[str, Any] = {}
        if rows.dataset.has_logprobs:
            more["logprobs"] = (rows.logprobs(numbers[mine], lengths[mine]), offsets[documents])
        if "images" in rows.dataset.columns:
            shown = row_pictures(rows.dataset, numbers[mine], lengths[mine], documents)
            more |= {"images": (shown.lines, documents), "image_bytes": (shown.data, documents)}
        fractions += int(np.count_nonzero((weights != 0) & (weights != 1)))
        yield {
            "input_ids": (ids, offsets[documents]),
            "labels": (np.where(weights > 0, ids, np.int32(IGNORE_INDEX)), offsets[documents]),
            "seq_lengths": (lengths[mine], documents),
            **trees,
            **({} if rows.teacher is None else teacher_lists(rows.teacher, numbers[mine], lengths[mine], documents)),
            **{name: (rows.dataset.facts(name, numbers[mine]) or [], documents) for name in FACTS},
            **more,
        }
    if fractions:
        warnings.warn(
            f"{rows.dataset.folder}: {fractions:,} tokens have a weight other than 0 and 1; labels only say trained "
            "or not, so these weights are lost",
            UserWarning,
            stacklevel=3,
        )


def _dataset(batches: Iterator[Columns], names: Sequence[str], *, arrow_file: str | Path | None) -> Any:
    need("datasets", "giving a datasets.Dataset")
    import datasets
    import pyarrow as pa

    single = {"side": pa.string(), "margin": pa.float32(), "images": pa.string(), "image_bytes": pa.large_binary()}
    listed = [name for name in names if name not in single]
    floats = {"logprobs": pa.float32(), **teacher_types()}
    schema = lists(**{name: floats.get(name, pa.int32()) for name in listed})
    for name, kind in single.items():
        schema = schema.append(pa.field(name, kind)) if name in names else schema
    made = (record_batch(columns, schema) for columns in batches)
    if arrow_file is None:
        return datasets.Dataset(datasets.table.InMemoryTable(pa.Table.from_batches(list(made))))
    path = Path(arrow_file)
    with whole_file(path) as partial:
        write_stream(partial, schema, made)
    return datasets.Dataset.from_file(str(path))


def as_int32(ids: NDArray[np.uint32], split: str) -> NDArray[np.int32]:
    """Ids as trainers read them; those that int32 does not hold are refused."""
    if len(ids) and int(ids.max()) > MAX_ID:
        raise DataError(f"{split}: a token has the id {ids.max():,}; int32 holds ids up to {MAX_ID:,}")
    return ids.astype(np.int32)


def lists(**kinds: Any) -> Any:
    """A schema of list columns; each is named with the type of its values."""
    import pyarrow as pa

    return pa.schema([(name, pa.list_(kind)) for name, kind in kinds.items()])


def record_batch(columns: Columns, schema: Any) -> Any:
    """The columns of a schema: lists of values where its type is one, else a value a row."""
    import pyarrow as pa

    arrays = []
    for field in schema:
        values, offsets = columns[field.name]
        if pa.types.is_list(field.type):
            flat = values if isinstance(values, pa.Array) else pa.array(values, type=field.type.value_type)
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat))
        else:
            arrays.append(pa.array(values, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_stream(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    """Write record batches as an Arrow stream, which the datasets library maps."""
    import pyarrow as pa

    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
