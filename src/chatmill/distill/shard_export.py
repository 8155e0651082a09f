"""The export of one input shard: what its chunks became, in input order, as Megatron files, with a receipt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.chunk_output import RECEIPT, REJECTED
from chatmill.compiler.faults import fault_point
from chatmill.compiler.ledger import Ledger
from chatmill.compiler.publish import canonical_json, publish_folder, storing, temporary_folder, write_atomic
from chatmill.compiler.shards import join_rejected
from chatmill.core.harmony_ids import spans_of_kinds
from chatmill.core.shift import shift_left_ragged
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.export.megatron import MegatronShard
from chatmill.store.durable import Durability, sync_folder
from chatmill.store.episode_manifest import COLUMNS
from chatmill.store.episode_shard import EpisodeShard
from chatmill.store.names import is_inner_path
from chatmill.store.split import even_ranges
from chatmill.systems.synth_kd import KDSplit

QUARANTINE = "quarantine.jsonl"
"""In the dataset: the rows of all shards that could not be used."""
SLICE_TOKENS = 1 << 19
"""Tokens that are copied at a time: few enough to stay in the processor's cache while they are hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDExport:
    """The order to export one shard; small and picklable."""

    name: str
    """`shard_NN`."""
    parts: tuple[str, ...]
    """The folders of its chunks, in input order."""
    folder: str
    """Where the exported shard is published."""
    record_ids: bool

    @property
    def label(self) -> str:
        """The job in words."""
        return f"writing {self.name}"


def export_shard(job: KDExport) -> dict[str, Any]:
    """Write `{train,valid}/shard_NN_{tokens,lossmask,span}.{bin,idx}` and the quarantine file; gives the receipt."""
    temporary = temporary_folder(job.folder)
    try:
        with storing(job.folder):
            receipts = [json.loads((Path(part) / RECEIPT).read_bytes()) for part in job.parts]
            ledger = Ledger()
            for receipt in receipts:
                ledger.add(Ledger.from_json(receipt["ledger"]))
            result = {
                "shard": job.name,
                "splits": {split.value: _export_split(job, receipts, split, temporary) for split in KDSplit},
                "ledger": ledger.as_json(),
                "audited": sum(receipt["audited"] for receipt in receipts),
            }
            join_rejected(map(Path, job.parts), temporary / REJECTED)
            write_atomic(temporary / RECEIPT, canonical_json(result), step="export_receipt")
            # Every file in it is synced already, and the receipt has synced the folder: not a second time.
            publish_folder(temporary, job.folder, replace=True, step="export_folder", durability=Durability.SCRATCH)
            sync_folder(Path(job.folder).parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return result


def _export_split(job: KDExport, receipts: Sequence[dict[str, Any]], split: KDSplit, folder: Path) -> dict[str, Any]:
    """The datasets of a split; a split without rows has no files."""
    columns = [column for column in COLUMNS if column.name in ("kinds", *(("record_id",) if job.record_ids else ()))]
    parts = [
        EpisodeShard(Path(part) / split, columns)
        for part, receipt in zip(job.parts, receipts, strict=True)
        if split in receipt["splits"]
    ]
    result: dict[str, Any] = {"rows": 0, "tokens": 0, "span_tokens": [0, 0, 0], "files": {}}
    if not parts:
        return result
    shard, spans = MegatronShard(folder / split / job.name, record_ids=job.record_ids), np.zeros(3, dtype=np.int64)
    try:
        for part in parts:
            spans += _append(shard, part, record_ids=job.record_ids)
            fault_point("during_export")
        files = shard.finish()
    except BaseException:
        shard.discard()
        raise
    return {
        "rows": shard.documents,
        "tokens": shard.tokens,
        "span_tokens": spans.tolist(),
        "files": {f"{split}/{name}": asdict(record) for name, record in files.items()},
    }


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


def export_receipt(folder: Path) -> dict[str, Any]:
    """The receipt of a published shard; one that names files elsewhere is refused."""
    try:
        receipt: dict[str, Any] = json.loads((folder / RECEIPT).read_bytes())
        paths = [path for split in receipt["splits"].values() for path in split["files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder / RECEIPT} cannot be read: {error}; delete {folder} and resume") from None
    for path in paths:
        if not is_inner_path(path):
            raise FormatError(f"{folder / RECEIPT} names {path!r}, which is outside; delete {folder} and resume")
    return receipt
