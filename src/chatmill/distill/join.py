"""Joins the parts of one shard, in input order, into its Megatron files; published whole, with a receipt."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.compiler.faults import fault_point
from chatmill.compiler.publish import canonical_json, publish_folder, storing, temporary_folder, write_atomic
from chatmill.distill.parts import QUARANTINE, RECEIPT, checked_slices, part_receipt
from chatmill.distill.shards import Shard, shard_ids
from chatmill.errors import FormatError
from chatmill.store.durable import Durability, sync_folder
from chatmill.store.kd import LOSSMASK, RECORD_IDS, SPAN, TOKENS
from chatmill.store.megatron import MegatronWriter
from chatmill.systems.synth_kd import Split, is_valid

DTYPES: dict[str, np.dtype[Any]] = {TOKENS: np.dtype("<i4"), LOSSMASK: np.dtype("u1"), SPAN: np.dtype("u1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class KDJoin:
    """The order to join one shard; small and picklable."""

    name: str
    """`shard_NN`."""
    parts: tuple[str, ...]
    """The folders of its parts, in input order."""
    folder: str
    """Where the joined shard is published."""
    ids_of: Shard | None = None
    """The input shard, where the record id of every document is stored."""
    valid_threshold: int = 0

    @property
    def label(self) -> str:
        """The job in words."""
        return f"joining {self.name}"


def join_shard(job: KDJoin) -> dict[str, Any]:
    """Write `{train,valid}/shard_NN_{tokens,lossmask,span}.{bin,idx}` and the quarantine file; gives the receipt."""
    temporary = temporary_folder(job.folder)
    try:
        with storing(job.folder):
            receipts = [part_receipt(Path(part)) for part in job.parts]
            splits = {split.value: _join_split(job, receipts, split, temporary) for split in Split}
            receipt = {"shard": job.name, "splits": splits, **_totals(receipts)}
            _join_quarantine(job, temporary)
            write_atomic(temporary / RECEIPT, canonical_json(receipt), step="join_receipt")
            # Every file in it is synced already, and the receipt has synced the folder: not a second time.
            publish_folder(temporary, job.folder, replace=True, step="join_folder", durability=Durability.SCRATCH)
            sync_folder(Path(job.folder).parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return receipt


def _totals(receipts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for receipt in receipts:
        for code, count in receipt["reasons"].items():
            reasons[code] = reasons.get(code, 0) + count
    return {"audited": sum(receipt["audited"] for receipt in receipts), "reasons": dict(sorted(reasons.items()))}


def _join_split(job: KDJoin, receipts: Sequence[dict[str, Any]], split: Split, folder: Path) -> dict[str, Any]:
    """The three datasets of a split; a split without rows has no files."""
    parts = [
        (Path(part), receipt["splits"][split])
        for part, receipt in zip(job.parts, receipts, strict=True)
        if split in receipt["splits"]
    ]
    result: dict[str, Any] = {"rows": 0, "tokens": 0, "span_tokens": [0, 0, 0], "files": {}}
    if not parts:
        return result
    (folder / split).mkdir()
    if job.ids_of is not None:
        result["files"] |= _write_ids(job, job.ids_of, split, folder, sum(counts["rows"] for _, counts in parts))
    with ExitStack() as stack:
        writers = {
            column: stack.enter_context(MegatronWriter(folder / split / f"{job.name}_{column}", dtype))
            for column, dtype in DTYPES.items()
        }
        for part, counts in parts:
            _append_part(writers, part, split, counts)
            fault_point("during_join")
        for writer in writers.values():
            for kind, record in writer.finish().items():
                result["files"][f"{split}/{writer.paths[kind].name}"] = asdict(record)
    for _, counts in parts:
        result["rows"] += counts["rows"]
        result["tokens"] += counts["tokens"]
        result["span_tokens"] = [a + b for a, b in zip(result["span_tokens"], counts["span_tokens"], strict=True)]
    return result


def _write_ids(job: KDJoin, shard: Shard, split: Split, folder: Path, rows: int) -> dict[str, Any]:
    """The record ids of the documents of a split, read from the input again, without the rows that failed."""
    failed = {
        json.loads(line)["row"] - 1
        for part in job.parts
        if (Path(part) / QUARANTINE).exists()
        for line in (Path(part) / QUARANTINE).read_bytes().splitlines()
    }
    with MegatronWriter(folder / split / f"{job.name}_{RECORD_IDS}", np.uint8) as writer:
        for first, ids in shard_ids(shard):
            chosen = [
                row_id
                for row, row_id in enumerate(ids, start=first)
                if row_id and row not in failed and is_valid(row_id, job.valid_threshold) == (split is Split.VALID)
            ]
            lengths = np.array([len(row_id) for row_id in chosen], dtype=np.int64)
            writer.append(np.frombuffer(b"".join(chosen), dtype=np.uint8), lengths)
        if writer.documents != rows:
            raise FormatError(f"{shard.path}: {writer.documents:,} record ids for {rows:,} documents of {split.value}")
        records = writer.finish()
    return {f"{split}/{writer.paths[kind].name}": asdict(record) for kind, record in records.items()}


def _append_part(writers: dict[str, MegatronWriter], part: Path, split: Split, counts: dict[str, Any]) -> None:
    """Copy a part behind what is there, and compare what was read with what its receipt says."""
    for piece in checked_slices(part, split, counts):
        writers[TOKENS].append(piece.tokens, piece.lengths)
        writers[SPAN].append(piece.span, piece.lengths)
        writers[LOSSMASK].append((piece.span != 0).view(np.uint8), piece.lengths)


def _join_quarantine(job: KDJoin, folder: Path) -> None:
    found = [Path(part) / QUARANTINE for part in job.parts if (Path(part) / QUARANTINE).exists()]
    if found:
        with (folder / QUARANTINE).open("wb") as out:
            for path in found:
                with path.open("rb") as file:
                    shutil.copyfileobj(file, out)
            out.flush()
            os.fsync(out.fileno())
