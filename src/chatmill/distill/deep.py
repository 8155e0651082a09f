"""Renders the rows of a distillation dataset again with openai-harmony, and compares every document with its row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill import __version__
from chatmill.core.ledger import Ledger
from chatmill.core.shift import shift_left
from chatmill.core.tokens import first_difference
from chatmill.distill.accounts import account, differences
from chatmill.distill.chunk import refusals
from chatmill.distill.input_shards import KDInput, Shard, ShardRows, read_input, shard_batches
from chatmill.distill.manifest import KDConfig, kd_fingerprint, library_version
from chatmill.distill.rows import NO_ROWS, BulkRows, KDBatch, with_official
from chatmill.distill.shard_export import QUARANTINE
from chatmill.errors import ChatmillError
from chatmill.prove.report import Finding, VerifyReport
from chatmill.render.official_harmony import encoding
from chatmill.store.kd import LOSSMASK, SPAN, TOKENS, KDShard
from chatmill.store.receipts import MANIFEST
from chatmill.systems.synth_kd import (
    BUNDLED,
    KDSplit,
    OfficialRows,
    RenderedRow,
    is_valid,
    valid_threshold,
    vocabulary_file,
)

CONTEXT = 8
"""Tokens that are shown on both sides of the first difference."""
NOT_DERIVED = "the rows were not rendered again"


def check_rows(
    folder: Path, manifest: Mapping[str, Any], stated: Ledger | None, sample: int | None, book: VerifyReport
) -> None:
    """Render the input again and compare; with `sample` so many rows with openai-harmony, the others by the fast path.

    `stated` is the ledger of the manifest, if it has one. What is missing for that is the `blocked` of the report.
    """
    try:
        source = _same_input(manifest, book)
        named = manifest["tokenizer"]["path"]
        vocabulary, _ = vocabulary_file(None if named == BUNDLED else named)
        if not book.blocked:
            _Check(folder, manifest, vocabulary, book).run(source, stated, sample)
    except ChatmillError as error:
        book.blocked = f"{NOT_DERIVED}: {error}"


def _same_input(manifest: Mapping[str, Any], book: VerifyReport) -> KDInput:
    """The input, which must be that of the build."""
    config, said = manifest["config"], manifest["input"]
    known = {name: config[name] for name in KDConfig.__dataclass_fields__ if name in config}
    found = read_input(said["path"], max_rows=config["max_rows"], max_rows_per_shard=config["max_rows_per_shard"])
    used = [shard["rows_used"] for shard in said["shards"]]
    if len(used) != len(found.shards):
        book.blocked = f"{NOT_DERIVED}: {said['path']} has {len(found.shards)} shards, the build had {len(used)}"
        return found
    source = replace(found, shards=tuple(replace(s, taken=rows) for s, rows in zip(found.shards, used, strict=True)))
    versions = (manifest["package_version"], manifest["renderer"]["version"])
    if versions != (__version__, library_version()):
        book.unchecked.append(f"built by chatmill {versions[0]} with openai-harmony {versions[1]}: other versions")
    elif kd_fingerprint(KDConfig(**known), source) != manifest["fingerprint"]:
        book.wrong(said["path"], "the input has changed since the build, or the manifest's fingerprint was edited")
        book.blocked = f"{NOT_DERIVED}: the input is not that of the build"
    return source


@dataclass(slots=True, kw_only=True)
class _Documents:
    """The documents of one shard in one split, taken in order."""

    shard: KDShard
    names: list[str] | None
    """Their record ids, where these are stored."""
    next: int = 0


class _Check:
    """One pass over the input beside one over the dataset."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], vocabulary: Path, book: VerifyReport) -> None:
        self._folder, self._manifest, self._book = folder, manifest, book
        self._vocabulary = vocabulary
        self._official, self._encoding = OfficialRows(vocabulary), encoding(vocabulary)
        self._threshold = valid_threshold(manifest["config"]["valid_fraction"])
        self._ledger = Ledger()
        self._refused = _refused(folder / QUARANTINE)

    def run(self, source: KDInput, stated: Ledger | None, sample: int | None) -> None:
        """Compare everything; `stated` is the ledger of the manifest."""
        total = sum(shard.taken for shard in source.shards)
        chosen = None if sample is None or sample >= total else {i * total // sample for i in range(sample)}
        fast_path = None if chosen is None else BulkRows(self._vocabulary)
        done = 0
        for number, shard in enumerate(source.shards):
            splits = self._open(number, shard)
            for rows in shard_batches(shard, 0, shard.taken):
                self._book.progress("rows", done, total)
                slow = [place for place in range(len(rows.ids)) if chosen is None or done + place in chosen]
                self._compare(shard, rows, self._rendered(rows, slow, fast_path), splits)
                done += len(rows.ids)
            for split, documents in splits.items():
                over = len(documents.shard) - documents.next
                if over:
                    self._book.wrong(f"{split}/{shard.name}", f"has {over:,} documents more than its input gives")
        for row in (self._refused - Counter()).elements():
            self._book.wrong(QUARANTINE, f"has a row that the input does not give, or twice: {row}")
        for stating, count in (
            () if stated is None else differences(stated, self._ledger, ("tokens", "records", "notes"))
        ):
            self._book.wrong(MANIFEST, f"its ledger says {stating}; the input gives {count:,}")
        fast_rows = self._book.counts["records_by_fast_path"]
        more = f", {fast_rows:,} more by the fast path" if fast_rows else ""
        slow_rows = self._book.counts["records_derived"]
        self._book.compared.append(f"{slow_rows:,} rows rendered again by openai-harmony{more}; the ledger as a whole")

    def _open(self, number: int, shard: Shard) -> dict[KDSplit, _Documents]:
        opened = {}
        for split in KDSplit:
            if self._manifest["splits"][split]["shards"][number]["rows"]:
                stored = KDShard.open(self._folder / split / f"{shard.name}_{TOKENS}")
                names = stored.record_ids() if self._manifest["config"].get("record_ids") else None
                opened[split] = _Documents(shard=stored, names=names)
        return opened

    def _rendered(self, rows: ShardRows, slow: list[int], fast_path: BulkRows | None) -> KDBatch:
        """Every row as it must be: those at the places `slow` by openai-harmony, the others by the fast path."""
        usable, named = rows.usable, rows.ids.lengths > 0
        self._book.counts["records_derived"] += int(np.count_nonzero(named[slow]))
        if fast_path is None:
            return with_official(NO_ROWS, usable, slow, self._official)
        self._book.counts["records_by_fast_path"] += int(np.count_nonzero(np.delete(named, slow)))
        others = fast_path.render(usable.without(np.array(slow, dtype=np.int64)))
        picked = set(slow)
        failed = tuple(failure for failure in others.failed if failure[0] not in picked)
        return with_official(replace(others, failed=failed), usable, slow, self._official)

    def _compare(self, shard: Shard, rows: ShardRows, batch: KDBatch, splits: Mapping[KDSplit, _Documents]) -> None:
        """Compare the next documents with rows that follow each other."""
        account(self._ledger, shard.name, batch, len(rows.ids))
        for place, error in refusals(batch, rows):
            self._ledger.records[shard.name, "quarantined", error.code] += 1
            key = (shard.name, rows.first + place + 1, error.code)
            if not self._refused[key]:
                sentence = f"lacks a row that cannot be used: {error.message} ({error.code})"
                found = Finding(file=QUARANTINE, message=sentence, record=error.record_id, where=error.where)
                self._book.found(found)
            self._refused[key] -= 1
        for place, made in batch.documents():
            split = KDSplit.VALID if is_valid(rows.ids.raw(place) or b"", self._threshold) else KDSplit.TRAIN
            documents, file = splits.get(split), f"{split}/{shard.name}"
            where, name = rows.where(place), rows.id_text(place)
            if documents is None or documents.next >= len(documents.shard):
                message = "must have a document of this row, and ends before it"
                self._book.found(Finding(file=file, message=message, record=name, where=where))
                continue
            self._compare_document(documents, split, made, file, where, name)
            documents.next += 1

    def _compare_document(
        self, documents: _Documents, split: KDSplit, made: RenderedRow, file: str, where: str, name: str
    ) -> None:
        number = documents.next
        ids, mask, stored_span = documents.shard.document(number)
        span = shift_left(made.spans)
        for column, stored, values in (
            (TOKENS, ids, made.ids),
            (SPAN, stored_span, span),
            (LOSSMASK, mask, (span > 0).astype(np.uint8)),
        ):
            at = first_difference(stored, values)
            if at is not None:
                around = slice(max(0, at - CONTEXT), at + CONTEXT)
                self._book.found(
                    Finding(
                        file=f"{file}_{column}.bin",
                        message=_sentence(stored, values, at),
                        split=split.value,
                        episode=number,
                        token=at,
                        record=name,
                        where=where,
                        stored=self._encoding.decode(ids[around].tolist()) if column == TOKENS else "",
                        derived=self._encoding.decode(made.ids[around].tolist()) if column == TOKENS else "",
                    )
                )
        if documents.names is not None and documents.names[number] != name:
            message = f"the record id is {documents.names[number]!r} where {name!r} must be"
            self._book.found(Finding(file=f"{file}_ids.bin", message=message, episode=number, where=where))


def _sentence(stored: NDArray[Any], expected: NDArray[Any], at: int) -> str:
    if len(stored) != len(expected):
        return f"{len(stored):,} tokens are there where {len(expected):,} must be"
    return f"{stored[at]} is there where {expected[at]} must be"


def _refused(path: Path) -> Counter[tuple[str, int, str]]:
    """How often each row is listed as one that cannot be used: shard, row and code."""
    counts: Counter[tuple[str, int, str]] = Counter()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    counts[str(entry["shard"]), int(entry["row"]), str(entry["code"])] += 1
                except (ValueError, KeyError, TypeError):
                    counts["", 0, "a line that cannot be read"] += 1
    return counts
