"""Renders the rows of a distillation dataset again with openai-harmony, and compares every document with its row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill import __version__
from chatmill.compiler.ledger import Ledger
from chatmill.core.shift import shift_left
from chatmill.core.tokens import offsets_of
from chatmill.distill.accounts import enter_tokens, role_tokens
from chatmill.distill.audit import first_difference
from chatmill.distill.manifest import KDConfig, kd_fingerprint, library_version
from chatmill.distill.rows import BulkRows, KDBatch
from chatmill.distill.shard_export import QUARANTINE
from chatmill.distill.shards import KDInput, Shard, ShardRows, read_input, shard_batches
from chatmill.errors import ChatmillError, FormatError, RecordError
from chatmill.prove.report import Finding, Notebook
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


def check_rows(folder: Path, manifest: Mapping[str, Any], sample: int | None, book: Notebook) -> None:
    """Render the input again and compare; with `sample` so many rows with openai-harmony, the others by the fast path.

    What is missing for that is the `blocked` of the report.
    """
    try:
        source = _same_input(manifest, book)
        named = manifest["tokenizer"]["path"]
        vocabulary, _ = vocabulary_file(None if named == BUNDLED else named)
        if not book.blocked:
            _Check(folder, manifest, vocabulary, book).run(source, sample)
    except ChatmillError as error:
        book.blocked = f"{NOT_DERIVED}: {error}"


def _same_input(manifest: Mapping[str, Any], book: Notebook) -> KDInput:
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


class _Documents:
    """The documents of one shard in one split, taken in order."""

    def __init__(self, prefix: Path, *, record_ids: bool) -> None:
        self._shard = KDShard.open(prefix)
        self._offsets = offsets_of(self._shard.tokens.lengths.astype(np.int64))
        self.names = self._shard.record_ids() if record_ids else None
        self.next = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def columns(self, number: int) -> dict[str, NDArray[Any]]:
        """The values of a document."""
        place = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        return {column: self._shard.files[column].array[place] for column in (TOKENS, LOSSMASK, SPAN)}


class _Check:
    """One pass over the input beside one over the dataset."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], vocabulary: Path, book: Notebook) -> None:
        self._folder, self._manifest, self._book = folder, manifest, book
        self._vocabulary = vocabulary
        self._official, self._encoding = OfficialRows(vocabulary), encoding(vocabulary)
        self._threshold = valid_threshold(manifest["config"]["valid_fraction"])
        self._ledger = Ledger()
        self._refused = _refused(folder / QUARANTINE)

    def run(self, source: KDInput, sample: int | None) -> None:
        """Compare everything."""
        total = sum(shard.taken for shard in source.shards)
        chosen = None if sample is None or sample >= total else {i * total // sample for i in range(sample)}
        fast_path = None if chosen is None else BulkRows(self._vocabulary)
        done = 0
        for number, shard in enumerate(source.shards):
            splits = self._open(number, shard)
            for rows in shard_batches(shard, 0, shard.taken):
                self._book.progress("rows", done, total)
                fast = None if fast_path is None else fast_path.render(rows.usable)
                for place, made in enumerate(self._rendered(rows, fast, done, chosen)):
                    self._row(shard, rows, place, made, splits)
                done += len(rows.ids)
            for split, documents in splits.items():
                if documents.next < len(documents):
                    over = len(documents) - documents.next
                    self._book.wrong(f"{split}/{shard.name}", f"has {over:,} documents more than its input gives")
        for row in (self._refused - Counter()).elements():
            self._book.wrong(QUARANTINE, f"has a row that the input does not give, or twice: {row}")
        self._compare_ledger()
        fast_rows = self._book.counts["records_by_fast_path"]
        more = f", {fast_rows:,} more by the fast path" if fast_rows else ""
        slow_rows = self._book.counts["records_derived"]
        self._book.compared.append(f"{slow_rows:,} rows rendered again by openai-harmony{more}; the ledger as a whole")

    def _open(self, number: int, shard: Shard) -> dict[KDSplit, _Documents]:
        opened = {}
        for split in KDSplit:
            if self._manifest["splits"][split]["shards"][number]["rows"]:
                prefix = self._folder / split / f"{shard.name}_{TOKENS}"
                opened[split] = _Documents(prefix, record_ids=bool(self._manifest["config"].get("record_ids")))
        return opened

    def _rendered(
        self, rows: ShardRows, fast: KDBatch | None, first: int, chosen: set[int] | None
    ) -> list[RenderedRow | RecordError]:
        """Every row as it must be, or why it cannot be used."""
        known: dict[int, RenderedRow | RecordError] = {}
        if fast is not None:
            offsets = offsets_of(fast.lengths).tolist()
            for number, place in enumerate(fast.rows.tolist()):
                own = slice(offsets[number], offsets[number + 1])
                known[place] = RenderedRow(fast.ids[own], fast.spans[own])
            known |= dict(fast.failed)
        found: list[RenderedRow | RecordError] = []
        for place in range(len(rows.ids)):
            if not rows.ids.raw(place):
                found.append(RecordError("the row has no synth_id", code="no_synth_id", path="synth_id"))
                continue
            if chosen is not None and first + place not in chosen:
                self._book.counts["records_by_fast_path"] += 1
                found.append(known[place])
                continue
            self._book.counts["records_derived"] += 1
            try:
                found.append(self._official.render(rows.texts.raw(place)))
            except RecordError as error:
                found.append(error)
        return found

    def _row(
        self,
        shard: Shard,
        rows: ShardRows,
        place: int,
        made: RenderedRow | RecordError,
        splits: Mapping[KDSplit, _Documents],
    ) -> None:
        self._ledger.records[shard.name, "read", ""] += 1
        where, name = rows.where(place), rows.id_text(place)
        if isinstance(made, RecordError):
            self._ledger.records[shard.name, "quarantined", made.code] += 1
            key = (shard.name, rows.first + place + 1, made.code)
            if not self._refused[key]:
                sentence = f"lacks a row that cannot be used: {made.message} ({made.code})"
                self._book.found(Finding(file=QUARANTINE, message=sentence, record=name, where=where))
            self._refused[key] -= 1
            return
        self._ledger.records[shard.name, "built", ""] += 1
        self._ledger.notes[shard.name, "episodes"] += 1
        tokens = role_tokens(made.ids, np.array([0, len(made.ids)]))
        enter_tokens(self._ledger, shard.name, tokens, int(np.count_nonzero(made.spans[1:])))
        split = KDSplit.VALID if is_valid(rows.ids.raw(place) or b"", self._threshold) else KDSplit.TRAIN
        documents, file = splits.get(split), f"{split}/{shard.name}"
        if documents is None or documents.next >= len(documents):
            message = "must have a document of this row, and ends before it"
            self._book.found(Finding(file=file, message=message, record=name, where=where))
            return
        number, documents.next = documents.next, documents.next + 1
        stored = documents.columns(number)
        span = shift_left(made.spans)
        expected: dict[str, NDArray[Any]] = {TOKENS: made.ids, SPAN: span, LOSSMASK: (span > 0).astype(np.uint8)}
        for column, values in expected.items():
            at = first_difference(stored[column], values)
            if at is not None:
                around = slice(max(0, at - CONTEXT), at + CONTEXT)
                self._book.found(
                    Finding(
                        file=f"{file}_{column}.bin",
                        message=_sentence(stored[column], values, at),
                        split=split.value,
                        episode=number,
                        token=at,
                        record=name,
                        where=where,
                        stored=self._encoding.decode(stored[TOKENS][around].tolist()) if column == TOKENS else "",
                        derived=self._encoding.decode(made.ids[around].tolist()) if column == TOKENS else "",
                    )
                )
        if documents.names is not None and documents.names[number] != name:
            message = f"the record id is {documents.names[number]!r} where {name!r} must be"
            self._book.found(Finding(file=f"{file}_ids.bin", message=message, episode=number, where=where))

    def _compare_ledger(self) -> None:
        """The ledger of the manifest is the one that the rows give."""
        if "ledger" not in self._manifest:
            return
        try:
            stated = Ledger.from_json(self._manifest["ledger"])
        except (FormatError, ValueError) as error:
            self._book.wrong(MANIFEST, f"its ledger cannot be read: {error}")
            return
        for what in ("tokens", "records", "notes"):
            said, found = getattr(stated, what), getattr(self._ledger, what)
            for key in sorted(set(said) | set(found)):
                if said[key] != found[key]:
                    name = "/".join(filter(None, key))
                    self._book.wrong(
                        MANIFEST, f"its ledger says {said[key]:,} {what} {name}; the input gives {found[key]:,}"
                    )


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
