"""A teacher's distributions on their way to a batch: tensors next to y, columns of rows, and grids of a collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError
from chatmill.store.teacher import Distributions, TeacherColumn

if TYPE_CHECKING:
    import torch

    from chatmill.label.policy import Policy
    from chatmill.load.row_buffer import LaidRows, RowBuffer
    from chatmill.store.episodes import EpisodeDataset

TEACHER_COLUMNS = ("teacher_ids", "teacher_logprobs", "teacher_rest")
Ints = NDArray[np.int64]


def whole_teacher(dataset: EpisodeDataset, policy: Policy | None = None) -> TeacherColumn:
    """The teacher column of a split, in which no document may be missing; other targets than the stored are refused."""
    if policy is not None:
        raise ConfigError(
            f"{dataset.folder}: the teacher has answered for the targets of the build, and policy {policy.name!r} at "
            "load has others: build with this policy, and ask the teacher again"
        )
    dataset.teacher.check_whole()
    return dataset.teacher


def _grids(teacher: Distributions, places: Ints, shape: tuple[int, ...]) -> tuple[NDArray[Any], ...]:
    """Ids, log-probabilities and rest mass at these places of a flat grid; 0, -inf and 0 elsewhere."""
    size, k = int(np.prod(shape)), teacher.ids.shape[1]
    ids, logprobs = np.zeros((size, k), dtype=np.int64), np.full((size, k), -np.inf, dtype=np.float32)
    rest = np.zeros(size, dtype=np.float32)
    ids[places], logprobs[places], rest[places] = teacher.ids, teacher.logprobs, teacher.rest
    return ids.reshape(*shape, k), logprobs.reshape(*shape, k), rest.reshape(shape)


def teacher_tensors(teacher: Distributions, laid: LaidRows, buffer: RowBuffer) -> dict[str, torch.Tensor]:
    """`TEACHER_COLUMNS` of a batch, aligned with y: no first token of a document has a distribution."""
    import torch

    begins = laid.slots * buffer.block_size + laid.starts - 1
    places = ranges(begins, laid.lengths)[teacher.at]
    grids = _grids(teacher, places, (buffer.batch_size, buffer.block_size))
    tensors = (torch.from_numpy(values).pin_memory() if buffer.pin else torch.from_numpy(values) for values in grids)
    return dict(zip(TEACHER_COLUMNS, tensors, strict=True))


def entry_lists(teacher: Distributions, tokens: int, values: NDArray[Any]) -> Any:
    """For each token the entries of its distribution, as an Arrow array of lists; empty where it has none."""
    import pyarrow as pa

    there = np.isfinite(teacher.logprobs)
    counts = np.zeros(tokens, dtype=np.int64)
    counts[teacher.at] = there.sum(axis=1)
    return pa.ListArray.from_arrays(pa.array(offsets_of(counts).astype(np.int32)), pa.array(values[there]))


def teacher_values(teacher: TeacherColumn, numbers: Ints, lengths: Ints) -> dict[str, Any]:
    """`TEACHER_COLUMNS` of documents, flat: a value for each token, of NumPy or Arrow."""
    top = teacher.gather(numbers, lengths)
    rest = np.zeros(int(lengths.sum()), dtype=np.float32)
    rest[top.at] = top.rest
    ids, logprobs = (entry_lists(top, len(rest), values) for values in (top.ids.astype(np.int32), top.logprobs))
    return dict(zip(TEACHER_COLUMNS, (ids, logprobs, rest), strict=True))


def teacher_grids(
    features: Sequence[Mapping[str, Any]], real: NDArray[np.bool_], most: int | None
) -> dict[str, NDArray[Any]]:
    """`TEACHER_COLUMNS` of features as (rows, tokens, k), unshifted; of each row at most the first `most` tokens."""
    ids, logprobs, rest = ([values for row in features for values in row[name][:most]] for name in TEACHER_COLUMNS)
    counts = np.array([len(values) for values in ids], dtype=np.int64)
    k, at = int(counts.max(initial=0)), np.flatnonzero(counts)
    teacher = Distributions(
        at,
        np.zeros((len(at), k), dtype=np.uint32),
        np.full((len(at), k), -np.inf, dtype=np.float32),
        np.asarray(rest, dtype=np.float32)[at],
    )
    inside = np.arange(k) < counts[at, None]
    teacher.ids[inside] = np.concatenate([np.empty(0, dtype=np.uint32), *(ids[place] for place in at.tolist())])
    teacher.logprobs[inside] = np.concatenate(
        [np.empty(0, dtype=np.float32), *(logprobs[place] for place in at.tolist())]
    )
    grids = _grids(teacher, np.flatnonzero(real)[at], real.shape)
    return dict(zip(TEACHER_COLUMNS, grids, strict=True))
