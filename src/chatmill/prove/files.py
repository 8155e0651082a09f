"""What a receipt says of a dataset or an export: its files with sizes and hashes, no others, and a balanced ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chatmill.core.checksums import FileRecord
from chatmill.core.ledger import Ledger
from chatmill.core.publish import file_digest
from chatmill.errors import FormatError
from chatmill.prove.report import VerifyReport
from chatmill.store.episode_layout import MANIFEST, fetch_again, stored_problems
from chatmill.store.kd import check_added
from chatmill.store.receipts import seal_problem

Added = Callable[[Path, list[str], VerifyReport], list[str]]
"""Given files that no receipt names, those which are damage; the others are explained in the report."""


def verify_files(
    folder: Path,
    content: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    book: VerifyReport,
    *,
    receipt: str,
    said: str,
    within: Sequence[str] = (".",),
    added: Added = lambda folder, names, book: names,
) -> bool:
    """Check that every listed file is there, with its size and hash, and no others: of a dataset or an export.

    `receipt` is the file with this content that lists them, `said` what it is called in sentences, `within` the folders
    that may hold nothing else. Whether the receipt is as it was written: if not, no more is compared with it.
    """
    problem = seal_problem(content)
    if problem:
        book.wrong(receipt, f"{problem}. Its files alone were compared with it")
    _check_hashes(folder, files, book, said)
    for name, problem in stored_problems(folder, within).items():
        book.wrong(name, problem)
    present = {
        path.relative_to(folder).as_posix() for part in within for path in (folder / part).rglob("*") if _is_file(path)
    }
    for name in added(folder, sorted(present - {*files, receipt}), book):
        book.wrong(name, f"not in {said}; it was added later")
    return not problem


def _is_file(path: Path) -> bool:
    """Return whether it is a file, or a link to anything."""
    return path.is_symlink() or not path.is_dir()


def _check_hashes(folder: Path, files: Mapping[str, Mapping[str, Any]], book: VerifyReport, said: str) -> None:
    total = sum(record["bytes"] for record in files.values())
    records = {name: FileRecord.from_json(record) for name, record in files.items()}
    changed: dict[str, FileRecord] = {}
    for name, record in records.items():
        book.progress("files", book.counts["bytes_hashed"], total)
        path = folder / name
        if not path.is_file():
            book.wrong(name, f"missing; {said} names it")
        else:
            found = FileRecord(bytes=path.stat().st_size, digest=file_digest(path, record.hash), hash=record.hash)
            if found != record and fetch_again(path):  # it was damaged on this machine's disk
                found = record
            book.counts["bytes_hashed"] += found.bytes
            if found != record:
                changed[name] = found
        book.counts["files"] += 1
    for name, found in changed.items():
        book.wrong(name, _difference(name, found, records, changed, said))
    book.compared.append(f"{len(files)} files with the sizes and hashes of {said}")


def _difference(
    name: str, found: FileRecord, records: Mapping[str, FileRecord], changed: Mapping[str, FileRecord], said: str
) -> str:
    """Say how a file differs: it is another one of the files, or has bytes that none of them has."""
    record = records[name]
    same = [other for other, theirs in records.items() if theirs == found]
    swapped = next((other for other in same if changed.get(other) == record), None)
    if swapped is not None:
        return f"was swapped with {swapped}: each of the two holds the bytes of the other one"
    if same and found.bytes:
        return f"was replaced: it holds the bytes of {same[0]}, and its own are not here"
    was = f"{said} says {record.bytes:,} bytes with {record.digest}"
    return f"was changed: it has {found.bytes:,} bytes with the {found.hash} {found.digest}, {was}"


def stated_ledger(manifest: Mapping[str, Any], book: VerifyReport) -> Ledger | None:
    """Return the ledger of a manifest, which must balance; None where it cannot be read, which is a finding."""
    try:
        ledger = Ledger.from_json(manifest["ledger"])
    except (FormatError, ValueError) as error:
        book.wrong(MANIFEST, f"its ledger cannot be read: {error}")
        return None
    for problem in ledger.imbalance():
        book.wrong(MANIFEST, f"its ledger does not balance: {problem}")
    return ledger


def megatron_added(folder: Path, names: list[str], book: VerifyReport) -> list[str]:
    """Megatron's index cache, and sidecars that were added later and fit the tokens, are no damage."""
    wrong, sidecars, cache = check_added(folder, names)
    for name, problem in wrong.items():
        if problem:
            book.wrong(name, problem)
    if cache:
        book.unchecked.append(f"{cache[0]}: Megatron's index cache ({len(cache):,} files), no part of the dataset")
    for name in sidecars:
        if name not in wrong:
            book.unchecked.append(f"{name}: a sidecar that was added later; it fits the tokens, its values are its own")
    return [name for name, problem in wrong.items() if not problem]
