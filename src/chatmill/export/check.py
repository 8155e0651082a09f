"""Checks an export: its receipt, and every file with the size and hash that the receipt has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from chatmill.errors import FormatError
from chatmill.prove.files import megatron_added, verify_files
from chatmill.prove.report import OnProgress, VerifyReport
from chatmill.store.episode_layout import MANIFEST
from chatmill.store.kd_shard import TOKENS, KDShard
from chatmill.store.receipts import EXPORT_MANIFEST, read_export

HF_CACHE = re.compile(r"(.*/)?cache-[^/]*\.arrow")
"""What `datasets` writes into a folder it has opened; it never reads such files as data."""


def is_export(folder: Path) -> bool:
    """Return whether a folder has the receipt of an export, and is no dataset of a build."""
    return (folder / EXPORT_MANIFEST).is_file() and not (folder / MANIFEST).is_file()


def verify_export(directory: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> VerifyReport:
    """Check the export in a folder; what is wrong is in the report. A folder without export.json is a `FormatError`.

    The hash of export.json itself, every file with its size and sha256, and no others.
    """
    folder = Path(directory)
    receipt = read_export(folder, check_seal=False)
    if receipt is None:
        raise FormatError(f"{folder} holds no export: {EXPORT_MANIFEST} is not there")
    book = VerifyReport(directory=folder, on_progress=on_progress)
    files = receipt["files"]
    if not verify_files(folder, receipt, files, book, receipt=EXPORT_MANIFEST, said=EXPORT_MANIFEST, added=_added):
        return book.ended()
    for prefix in sorted(name.removesuffix(".idx") for name in files if name.endswith(f"_{TOKENS}.idx")):
        try:
            KDShard.open(folder / prefix)
        except FormatError as error:
            book.wrong(prefix, str(error))
    if receipt["to"] == "megatron":
        book.compared.append("the datasets of each shard with each other, and the values of some documents")
    for split in receipt["splits"].values():
        book.counts["episodes"] += split["documents"]
        book.counts["tokens"] += split["tokens"]
        book.counts["trained_tokens"] += split["trained"]
    return book.ended()


def _added(folder: Path, names: list[str], book: VerifyReport) -> list[str]:
    """What `datasets` or Megatron has cached in a folder is no damage, nor are sidecars that fit."""
    caches = list(filter(HF_CACHE.fullmatch, names))
    book.unchecked += [f"{name}: a cache of the datasets library, no part of the export" for name in caches]
    return megatron_added(folder, [name for name in names if name not in caches], book)
