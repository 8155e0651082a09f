"""The export of one input shard: what its chunks became, in input order, as Megatron files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import spans_of_ids
from chatmill.core.publish import storing
from chatmill.core.shift import shift_left_ragged
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.export.megatron import MegatronShard
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.split import even_ranges
from chatmill.systems.synth_kd import KDSplit

SLICE_TOKENS = 1 << 19
"""Tokens that are copied at a time: few enough to stay in the processor's cache while they are hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDExport:
    """The order to export one shard; small and picklable."""

    name: str
    """`shard_NN`."""
    root: str
    """The folder of the dataset."""
    parts: Mapping[KDSplit, Sequence[str]]
    """The folders of its chunks with documents, in input order."""

    @property
    def label(self) -> str:
        """The job in words."""
        return f"writing {self.name}"


def export_shard(job: KDExport) -> dict[KDSplit, dict[str, Any]]:
    """Write `{train,valid}/shard_NN_{tokens,lossmask,span}.{bin,idx}`; what the manifest says of each split."""
    return {split: _export(job, split) for split in KDSplit}


def _export(job: KDExport, split: KDSplit) -> dict[str, Any]:
    if not job.parts[split]:
        return {"name": job.name, "rows": 0, "tokens": 0, "files": [], "span_tokens": [0, 0, 0]}
    prefix = Path(job.root, split, job.name)
    with storing(job.root, "write the dataset in"), MegatronShard(prefix) as shard:
        spans = np.sum([_append(shard, Path(part)) for part in job.parts[split]], axis=0)
    files = [{"path": f"{split}/{name}", **record.to_json()} for name, record in sorted(shard.files.items())]
    counts = {"rows": shard.documents, "tokens": shard.tokens, "files": files, "span_tokens": spans.tolist()}
    return {"name": job.name, **counts}


def _append(shard: MegatronShard, folder: Path) -> NDArray[np.int64]:
    """Copy what a chunk became; how many tokens each span has."""
    part = EpisodeShard(folder, {})
    lengths = part.index[:, 1].astype(np.int64)
    offsets, counts = offsets_of(lengths), np.zeros(3, dtype=np.int64)
    ids, mask = part.token_ids.view(np.int32), part.mask
    for first, last in even_ranges(lengths, SLICE_TOKENS):
        tokens, its_offsets = slice(int(offsets[first]), int(offsets[last])), offsets[first : last + 1] - offsets[first]
        spans = spans_of_ids(ids[tokens], its_offsets)
        if not np.array_equal(spans != 0, mask[tokens] != 0):
            raise FormatError(
                f"{folder}: what is trained is not what the assistant says: the build is wrong: report it"
            )
        span = shift_left_ragged(spans, its_offsets)
        shard.append(ids[tokens], lengths[first:last], span)
        analysis, final = (int(np.count_nonzero(span == number)) for number in (1, 2))
        counts += [len(span) - analysis - final, analysis, final]
    return counts
