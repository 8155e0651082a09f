"""The export of one input shard: what its chunks became, in input order, as Megatron files, with a receipt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_output import RECEIPT, REJECTED, rejected_files
from chatmill.core.checksums import FileRecord
from chatmill.core.harmony_ids import spans_of_kinds
from chatmill.core.ledger import Ledger
from chatmill.core.publish import join_files
from chatmill.core.shift import shift_left_ragged
from chatmill.core.tokens import offsets_of
from chatmill.distill.outputs import OutputJob, publish_output
from chatmill.export.megatron import MegatronShard
from chatmill.store.episode_manifest import COLUMNS
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.split import even_ranges
from chatmill.systems.synth_kd import KDSplit

QUARANTINE = "quarantine.jsonl"
"""In the dataset: the rows of all shards that could not be used."""
SLICE_TOKENS = 1 << 19
"""Tokens that are copied at a time: few enough to stay in the processor's cache while they are hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDExport(OutputJob):
    """The order to export one shard, by its name, `shard_NN`."""

    parts: tuple[str, ...]
    """The folders of its chunks, in input order."""
    record_ids: bool


def export_shard(job: KDExport) -> dict[str, Any]:
    """Write `{train,valid}/shard_NN_{tokens,lossmask,span}.{bin,idx}` and the quarantine file; gives the receipt."""
    return publish_output(job, lambda folder: _export(job, folder))


def _export(job: KDExport, folder: Path) -> dict[str, Any]:
    receipts = [json.loads((Path(part) / RECEIPT).read_bytes()) for part in job.parts]
    ledger = Ledger()
    for receipt in receipts:
        ledger.add(Ledger.from_json(receipt["ledger"]))
    splits: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for split in KDSplit:
        splits[split.value], written = _export_split(job, receipts, split, folder)
        files |= {f"{split}/{name}": record.to_json() for name, record in written.items()}
    join_files(rejected_files(map(Path, job.parts)), folder / REJECTED)
    audited = sum(receipt["audited"] for receipt in receipts)
    return {"splits": splits, "files": files, "ledger": ledger.as_json(), "audited": audited}


def _export_split(
    job: KDExport, receipts: Sequence[dict[str, Any]], split: KDSplit, folder: Path
) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """Write the datasets of a split: what they hold, and their files; a split without rows has none."""
    columns = [column for column in COLUMNS if column.name in ("kinds", *(("record_id",) if job.record_ids else ()))]
    parts = [
        EpisodeShard(Path(part) / split, columns)
        for part, receipt in zip(job.parts, receipts, strict=True)
        if split in receipt["splits"]
    ]
    if not parts:
        return {"rows": 0, "tokens": 0, "span_tokens": [0, 0, 0]}, {}
    spans = np.zeros(3, dtype=np.int64)
    with MegatronShard(folder / split / job.name, record_ids=job.record_ids) as shard:
        for part in parts:
            spans += _append(shard, part, record_ids=job.record_ids)
    return {"rows": shard.documents, "tokens": shard.tokens, "span_tokens": spans.tolist()}, shard.files


def _append(shard: MegatronShard, part: EpisodeShard, *, record_ids: bool) -> NDArray[np.int64]:
    """Copy what a chunk became; how many tokens each span has."""
    lengths = part.index[:, 1].astype(np.int64)
    offsets, counts = offsets_of(lengths), np.zeros(3, dtype=np.int64)
    ids, kinds = part.token_ids.view(np.int32), part.column("kinds")
    for first, last in even_ranges(lengths, SLICE_TOKENS):
        tokens = slice(int(offsets[first]), int(offsets[last]))
        span = shift_left_ragged(spans_of_kinds(kinds[tokens]), offsets[first : last + 1] - offsets[first])
        names = part.texts("record_id", first, last) if record_ids else None
        shard.append(ids[tokens], lengths[first:last], span, names)
        analysis, final = (int(np.count_nonzero(span == number)) for number in (1, 2))
        counts += [len(span) - analysis - final, analysis, final]
    return counts
