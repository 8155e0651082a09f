"""Checks a finished distillation dataset: files and hashes, alignment of the three datasets, values and counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from chatmill import __version__
from chatmill.distill.audit import QUARANTINE, RowRange, differences
from chatmill.distill.input_shards import read_input
from chatmill.distill.manifest import KDConfig, kd_fingerprint, library_version
from chatmill.distill.run import refused_rows
from chatmill.errors import ChatmillError, ConfigError, FormatError
from chatmill.prove.files import megatron_added, stated_ledger, verify_files
from chatmill.prove.report import Finding, OnProgress, VerifyReport
from chatmill.store.episode_layout import MANIFEST
from chatmill.store.kd_shard import SPAN, SPAN_NAMES, TOKENS, KDShard
from chatmill.store.receipts import KD_SCHEMA, manifest_kind, read_kd_manifest
from chatmill.systems.synth_kd import BUNDLED, KDSplit, valid_threshold, vocabulary_file

SLICE_DOCUMENTS = 4096
NOT_DERIVED = "the rows were not rendered again"


def is_synth_kd(folder: Path) -> bool:
    """Return whether a folder has the manifest of a distillation dataset."""
    return manifest_kind(folder) == KD_SCHEMA


def verify_synth_kd(
    root: str | os.PathLike[str],
    deep: bool = False,
    sample: int | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check the dataset in a folder; what is wrong is in the report. A folder without its manifest is a `FormatError`.

    Every file with its size and sha256, no others; the three datasets of a shard with the same documents; each document
    ends in one EOD; ids in the vocabulary; `lossmask == (span > 0)` at every position, spans 0 to 2, the last 0; rows,
    tokens and tokens per span as the manifest says; the ledger. `deep` reads the input again and renders every row with
    openai-harmony; with `sample` only so many of them, evenly spread.
    """
    if sample is not None and (sample < 1 or not deep):
        raise ConfigError("sample is a number of records, 1 or more, and goes with deep")
    folder = Path(root)
    manifest = read_kd_manifest(folder, check_seal=False)
    if manifest is None:
        raise FormatError(
            f"{folder} holds no finished distillation dataset: {MANIFEST}, which is written last, is not there"
        )
    book = VerifyReport(directory=folder, deep=deep, on_progress=on_progress)
    entries = [file for split in KDSplit for shard in manifest["splits"][split]["shards"] for file in shard["files"]]
    entries += [manifest["failed"]["file"]] if manifest["failed"]["file"] else []
    files = {entry["path"]: entry for entry in entries}
    if not verify_files(folder, manifest, files, book, receipt=MANIFEST, said="the manifest", added=megatron_added):
        return book.ended()
    for split in KDSplit:
        _check_split(folder, split, manifest["splits"][split], book)
    book.compared.append("tokens, lossmask and span at every position, and all counts with the manifest")
    stated, stored = stated_ledger(manifest, book), book.counts["tokens"]
    if stated is not None and stated.stored != stored:
        book.wrong(MANIFEST, f"its ledger says {stated.stored:,} tokens; the files have {stored:,}")
    book.compared.append("the ledger with itself and with the files")
    if deep:
        try:
            _check_rows(folder, manifest, sample, book)
        except ChatmillError as error:
            book.blocked = f"{NOT_DERIVED}: {error}"
    return book.ended()


def _check_rows(folder: Path, manifest: Mapping[str, Any], sample: int | None, book: VerifyReport) -> None:
    """Render the rows of the input again with openai-harmony, and compare every document with its row."""
    said, named = manifest["input"], manifest["tokenizer"]["path"]
    source = read_input(said["path"])
    listed = [said["shards"], *(manifest["splits"][split]["shards"] for split in KDSplit)]
    if any(len(shards) != len(source.shards) for shards in listed):
        raise FormatError(
            f"{MANIFEST} lists {', '.join(sorted({str(len(shards)) for shards in listed}))} shards, {said['path']} has "
            f"{len(source.shards)}: the input has changed since the build, or the manifest was edited"
        )
    source = source.taking([shard["rows_used"] for shard in said["shards"]])
    vocabulary, _ = vocabulary_file(None if named == BUNDLED else named)
    versions = (manifest["package_version"], manifest["renderer"]["version"])
    config = KDConfig(**{name: value for name, value in manifest["config"].items() if name in KDConfig.__slots__})
    if versions != (__version__, library_version()):
        book.unchecked.append(f"built by chatmill {versions[0]} with openai-harmony {versions[1]}: other versions")
    elif kd_fingerprint(config, source) != manifest["fingerprint"]:
        book.wrong(said["path"], "the input has changed since the build, or the manifest's fingerprint was edited")
        book.blocked = f"{NOT_DERIVED}: the input is not that of the build"
        return
    total, before = sum(shard.taken for shard in source.shards), 0
    chosen = np.ones(total, dtype=np.bool_)
    if sample is not None and sample < total:
        chosen[:] = False
        chosen[[number * total // sample for number in range(sample)]] = True
    refused = refused_rows(folder / QUARANTINE)
    for number, shard in enumerate(source.shards):
        book.progress("rows", before, total)
        rows = RowRange(
            root=str(folder),
            name=shard.name,
            path=shard.path,
            start=0,
            stop=shard.taken,
            documents=dict.fromkeys(KDSplit, 0),
            refused=frozenset(refused[shard.path]),
            threshold=valid_threshold(config.valid_fraction),
            vocabulary=str(vocabulary),
        )
        for finding in differences(rows, chosen[before : before + shard.taken]):
            book.found(finding)
        stored = sum(manifest["splits"][split]["shards"][number]["rows"] for split in KDSplit)
        if stored != shard.taken - len(rows.refused):
            gives = f"{shard.taken:,} rows without {len(rows.refused):,}"
            book.wrong(shard.name, f"{stored:,} documents, but its input gives {gives} that were put aside")
        before += shard.taken
    book.counts["records_derived"] += int(np.count_nonzero(chosen))
    book.compared.append(f"{int(np.count_nonzero(chosen)):,} of {total:,} rows rendered again by openai-harmony")


def _check_split(folder: Path, split: KDSplit, recorded: Mapping[str, Any], book: VerifyReport) -> None:
    """Check every value of the shards of a split, and their sums."""
    spans = np.zeros(len(SPAN_NAMES), dtype=np.int64)
    rows = tokens = 0
    for shard in recorded["shards"]:
        prefix = folder / split / f"{shard['name']}_{TOKENS}"
        name = prefix.relative_to(folder).as_posix()
        if not shard["rows"]:
            if shard["files"]:
                book.wrong(MANIFEST, f"{name}: has files, but no rows")
            continue
        try:
            opened = KDShard.open(prefix)
        except FormatError as error:
            book.wrong(name, str(error))
            continue
        for first in range(0, len(opened), SLICE_DOCUMENTS):
            last = min(first + SLICE_DOCUMENTS, len(opened))
            for message, episode, token, count in opened.problems(first, last, strict=True):
                said = f"{message} ({count:,} positions)"
                book.found(Finding(file=name, message=said, split=split.value, episode=episode, token=token))
            span = opened.values(SPAN)[opened.place(first).start : opened.place(last - 1).stop]
            spans += np.bincount(np.minimum(span, 2), minlength=len(spans))
        for field, held_count in (("rows", len(opened)), ("tokens", opened.tokens.values)):
            if held_count != shard[field]:
                book.wrong(name, f"{held_count:,} {field}, the manifest says {shard[field]:,}")
        rows, tokens = rows + len(opened), tokens + opened.tokens.values
    totals: dict[str, Any] = {
        "rows": rows, "tokens": tokens, "trained_tokens": int(spans[1:].sum()),
        "span_tokens": {str(span): int(count) for span, count in enumerate(spans)},
    }  # fmt: skip
    for field, value in totals.items():
        if recorded[field] != value:
            book.wrong(MANIFEST, f"{split}: {field} is {recorded[field]}, but the files hold {value}")
    book.counts["episodes"] += rows
    book.counts["tokens"] += tokens
    book.counts["trained_tokens"] += totals["trained_tokens"]
