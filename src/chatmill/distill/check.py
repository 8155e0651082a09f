"""Checks a finished distillation dataset: files and hashes, alignment of the three datasets, values and counts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.canonical import canonical_json
from chatmill.core.harmony_ids import EOD, START, VOCAB_SIZE
from chatmill.core.kinds import RoleCode
from chatmill.core.ledger import Ledger
from chatmill.core.tokens import offsets_of
from chatmill.distill.accounts import differences, enter_tokens, role_tokens
from chatmill.distill.deep import check_rows
from chatmill.distill.shard_export import QUARANTINE
from chatmill.errors import ConfigError, FormatError
from chatmill.prove.files import megatron_added, stated_ledger, verify_files
from chatmill.prove.report import Finding, OnProgress, VerifyReport
from chatmill.store.kd import LOSSMASK, RECORD_IDS, SPAN, SPAN_NAMES, TOKENS, KDShard
from chatmill.store.kd_rules import ShardRules
from chatmill.store.receipts import KD_SCHEMA, MANIFEST, manifest_kind, read_kd_manifest, seal_problem
from chatmill.systems.synth_kd import KDSplit

SLICE_DOCUMENTS = 4096


def is_synth_kd(folder: Path) -> bool:
    """Whether a folder has the manifest of a distillation dataset."""
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
    openai-harmony; with `sample` only so many of them, evenly spread, and the others by the fast path.
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
    if problem := seal_problem(manifest):
        book.wrong(MANIFEST, problem)
    config = hashlib.sha256(canonical_json(manifest["config"])).hexdigest()
    if config != manifest["config_hash"]:
        book.wrong(MANIFEST, f"its config and config_hash do not belong together: the sha256 of the config is {config}")
    listed = _listed(manifest)
    verify_files(folder, listed, book, receipt=MANIFEST, said="the manifest", added=megatron_added)
    found = Ledger()
    for split in KDSplit:
        _check_split(folder, split, manifest["splits"][split], found, book)
    book.compared.append("tokens, lossmask and span at every position, and all counts with the manifest")
    stated = _check_ledger(folder, manifest, found, book)
    if deep:
        check_rows(folder, manifest, stated, sample, book)
    return book.ended()


def _listed(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """All files that the manifest names."""
    entries = [file for split in KDSplit for shard in manifest["splits"][split]["shards"] for file in shard["files"]]
    if manifest["failed"]["file"] is not None:
        entries.append(manifest["failed"]["file"])
    return {str(entry["path"]): entry for entry in entries}


def _check_ledger(folder: Path, manifest: Mapping[str, Any], found: Ledger, book: VerifyReport) -> Ledger | None:
    """The ledger balances, and says of every shard and role what the files hold; None: there is none to be read."""
    if "ledger" not in manifest:
        book.unchecked.append("there is no ledger: an older version of Chatmill built this")
        return None
    stated = stated_ledger(manifest, book)
    if stated is None:
        return None
    for stating, count in differences(stated, found, ("tokens",)):
        book.wrong(MANIFEST, f"its ledger says {stating}; the files have {count:,}")
    aside, path = stated.total_records("quarantined"), folder / QUARANTINE
    lines = path.read_bytes().count(b"\n") if path.is_file() else 0
    if not aside == lines == manifest["failed"]["rows"]:
        rows = manifest["failed"]["rows"]
        book.wrong(QUARANTINE, f"has {lines:,} rows; the ledger says that {aside:,} were put aside, `failed` {rows:,}")
    book.compared.append("the ledger with itself and with the files")
    return stated


def _check_split(folder: Path, split: KDSplit, recorded: Mapping[str, Any], ledger: Ledger, book: VerifyReport) -> None:
    """The shards of a split, and their sums; their tokens go into the ledger."""
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
        counts, roles = _check_values(opened, split, name, book)
        enter_tokens(ledger, shard["name"], roles, int(counts[1:].sum()))
        if any(Path(file["path"]).name == f"{shard['name']}_{RECORD_IDS}.idx" for file in shard["files"]):
            try:
                opened.record_ids()
            except (FormatError, UnicodeDecodeError) as error:
                book.wrong(name, f"record ids: {error}")
        for what, found, stated in (
            ("rows", len(opened), shard["rows"]),
            ("tokens", opened.tokens.values, shard["tokens"]),
        ):
            if found != stated:
                book.wrong(name, f"{found:,} {what}, the manifest says {stated:,}")
        rows, tokens, spans = rows + len(opened), tokens + opened.tokens.values, spans + counts
    totals: dict[str, Any] = {
        "rows": rows, "tokens": tokens, "trained_tokens": int(spans[1:].sum()),
        "span_tokens": {str(span): int(count) for span, count in enumerate(spans)},
    }  # fmt: skip
    for what, value in totals.items():
        if recorded[what] != value:
            book.wrong(MANIFEST, f"{split}: {what} is {recorded[what]}, but the files hold {value}")
    book.counts["episodes"] += rows
    book.counts["tokens"] += tokens
    book.counts["trained_tokens"] += totals["trained_tokens"]


def _check_values(
    shard: KDShard, split: KDSplit, name: str, book: VerifyReport
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every value of a shard; how many tokens each span and each role has."""
    counts, roles = np.zeros(len(SPAN_NAMES), dtype=np.int64), np.zeros(len(RoleCode), dtype=np.int64)
    rules = ShardRules(eod=EOD, harmony=True)
    ids, mask, span = (shard.files[column].array for column in (TOKENS, LOSSMASK, SPAN))
    for first, tokens, ends in _slices(shard):
        own_ids, own_mask, own_span = ids[tokens], mask[tokens], span[tokens]
        begins = np.zeros(len(own_ids), dtype=np.bool_)
        begins[np.append(0, ends[:-1] + 1)] = True
        broken = {
            "an id outside of the vocabulary": (own_ids < 0) | (own_ids >= VOCAB_SIZE),
            "a document does not begin with <|start|>": begins & (own_ids != START),
            **rules.broken(own_ids, own_mask, own_span, ends),
        }
        for message, wrong in broken.items():
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                document = int(np.searchsorted(ends, at))
                start = int(ends[document - 1]) + 1 if document else 0
                book.found(
                    Finding(
                        file=name,
                        message=f"{message} ({int(wrong.sum()):,} positions)",
                        split=split.value,
                        episode=first + document,
                        token=at - start,
                    )
                )
        counts += np.bincount(np.minimum(own_span, 2), minlength=len(counts))
        roles += role_tokens(own_ids, np.append(0, ends + 1))
    return counts, roles


def _slices(shard: KDShard) -> Iterator[tuple[int, slice, NDArray[np.int64]]]:
    """The first document of each slice, its values, and where its documents end in them (the last position)."""
    before = 0
    for first in range(0, len(shard), SLICE_DOCUMENTS):
        offsets = offsets_of(shard.tokens.lengths[first : first + SLICE_DOCUMENTS])
        yield first, slice(before, before + int(offsets[-1])), offsets[1:] - 1
        before += int(offsets[-1])
