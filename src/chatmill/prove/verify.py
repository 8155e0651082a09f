"""Checks a built dataset: files and hashes, columns, ledger, tokenizer; and, deep, every record against its source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.compiler.chunk_shards import CHUNKS
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe, recorded_recipe
from chatmill.errors import ChatmillError, ConfigError, FormatError, short_errors
from chatmill.label.presets import PRESETS
from chatmill.prove.columns import check_columns
from chatmill.prove.deep import check_records
from chatmill.prove.files import stated_ledger, verify_files
from chatmill.prove.inputs import missing_inputs
from chatmill.prove.reference import reference_tokenizer
from chatmill.prove.report import Finding, OnProgress, VerifyReport
from chatmill.read.places import is_elsewhere
from chatmill.render.registry import bundled_names, find_template
from chatmill.store.episode_layout import MANIFEST, SPLIT_MANIFEST, SPLITS, dataset_folder
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import read_manifest
from chatmill.store.teacher import FOLDER
from chatmill.tokenizer.tokenizer import Tokenizer

__all__ = ["Finding", "VerifyReport", "verify"]


@short_errors
def verify(
    directory: str | os.PathLike[str],
    deep: bool = False,
    sample: int | None = None,
    *,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check the dataset in a folder; what is wrong is in the report, with the file, and the record where it is known.

    Shallow: every file of the manifest with size and hash, no others in the splits, packed rows against the planner,
    the ledger against the columns, the tokenizer against its fingerprint. `deep` reads the inputs again and derives
    every record by the slow reference path, in `workers` processes (default: one for each core); with `sample` only
    those of so many chunks, evenly spread. A folder that is no dataset is a `FormatError`.
    """
    folder = dataset_folder(directory, whole=True)
    if sample is not None and (sample < 1 or not deep):
        raise ConfigError("sample is a number of chunks, 1 or more, and goes with deep")
    manifest = _manifest(folder)
    book = VerifyReport(directory=folder, deep=deep, on_progress=on_progress)
    files = manifest["files"]
    if not verify_files(folder, manifest, files, book, receipt=MANIFEST, said="the manifest", within=SPLITS):
        return book.ended()
    home, folder = _home(folder, manifest), folder.absolute()
    with chdir(home):
        recipe = recorded_recipe(manifest)
        if manifest["package_version"] != __version__:
            book.unchecked.append(f"built by chatmill {manifest['package_version']}, checked by {__version__}")
        tokenizer = _check_rules(recipe, manifest, book)
        splits = _open_splits(folder, manifest, book)
        vocab_size, bos_id = manifest["tokenizer"]["vocab_size"], _bos_id(recipe, tokenizer)
        for name, split in splits.items():
            book.progress(f"columns of {name}", 0, 0)
            check_columns(split, book, vocab_size=vocab_size, bos_id=bos_id)
            _check_rows(manifest, name, split, book)
            _check_teacher(folder, name, split, vocab_size, book)
        _check_ledger(manifest, len(splits), book)
        if deep:
            _check_records(folder, manifest, recipe, splits, tokenizer, sample, workers, book)
        return book.ended()


def _home(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the folder that the build ran in, if the inputs are only there; else this one."""
    names = [file["path"] for file in manifest["inputs"] if not is_elsewhere(file["path"])]
    home = next((folder / seen["from"] for seen in manifest["scanned"] if "from" in seen), folder).absolute()
    is_home = not all(map(os.path.exists, names)) and all((home / name).exists() for name in names)
    return home if is_home else Path()


def _manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder")
    manifest = read_manifest(folder, check_seal=False)
    if manifest is None:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise FormatError(
            f"{folder} holds no dataset that a build has finished: {MANIFEST}, which is written last, is not there "
            f"(found: {there})"
        )
    return manifest


def _check_rules(recipe: Recipe, manifest: Mapping[str, Any], book: VerifyReport) -> Tokenizer | None:
    """Return the tokenizer; None if tokenizer, template or policy is missing, or has changed."""
    files = {
        "tokenizer": _file_of(recipe.tokenizer, ("o200k", "bytes")),
        "template": _file_of(recipe.template, bundled_names()),
        "policy": _file_of(recipe.policy or "", ("", *PRESETS)),
    }
    for rule, file in files.items():
        if file is not None and not file.exists():
            book.unchecked.append(
                f"the {rule} file {file} is not here, so its fingerprint was not compared: "
                f"a link of that name, here or beside the dataset, is enough (ln -s YOURS {file})"
            )
            return None
    try:
        tokenizer = reference_tokenizer(recipe)
        fingerprints = Pipeline(recipe, tokenizer).fingerprints
    except ChatmillError as error:
        blamed = next((str(file) for file in files.values() if file is not None), recipe.tokenizer)
        book.wrong(blamed, f"what the recipe names cannot be loaded any more: {error}")
        return None
    changed = [rule for rule in files if fingerprints[rule] != manifest[rule]["fingerprint"]]
    for rule in changed:
        sentence = (
            f"the {rule} has changed since the build: its fingerprint is {fingerprints[rule]}, the manifest says "
        )
        book.wrong(str(files[rule] or MANIFEST), sentence + manifest[rule]["fingerprint"])
    same = [rule for rule in files if rule not in changed]
    book.compared.append(f"{' and '.join(filter(None, (', '.join(same[:-1]), *same[-1:])))} with recorded fingerprints")
    return None if changed else tokenizer


def _file_of(name: str, files: Sequence[str]) -> Path | None:
    """Return the file that a name of the recipe stands for; None for the names that need none."""
    if name in files:
        return None
    path = Path(name)
    return path / "tokenizer.json" if (path / "tokenizer.json").is_file() else path


def _open_splits(folder: Path, manifest: Mapping[str, Any], book: VerifyReport) -> dict[str, EpisodeDataset]:
    """Return the splits that can be read; the others are findings."""
    splits: dict[str, EpisodeDataset] = {}
    for name, recorded in manifest["splits"].items():
        try:
            split = EpisodeDataset(folder, name)
            for shard in split.shards:
                for column, spec in split.columns.items():  # looking at one checks its size
                    _ = shard.offsets(column) if spec.offsets_file else shard.column(column)
            counts = {"episodes": len(split), "tokens": int(split.lengths.sum())}
        except FormatError as error:
            book.wrong(name, f"the split cannot be read: {error}")
            continue
        splits[name] = split
        for key, count in counts.items():
            if recorded.get(key, count) != count:
                book.wrong(MANIFEST, f"says {recorded[key]:,} {key} in {name}; {count:,} are there")
    return splits


def _bos_id(recipe: Recipe, tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    bos = find_template(recipe.template).named_tokens.get("bos_token", "")
    return tokenizer.control_ids.get(bos, tokenizer.bos_id)


def _check_rows(manifest: Mapping[str, Any], name: str, split: EpisodeDataset, book: VerifyReport) -> None:
    """Plan the rows of a split again."""
    try:
        rows = split.plan
    except FormatError as error:
        book.wrong(f"{name}/{SPLIT_MANIFEST}", str(error))
        return
    if rows is None:
        return
    book.counts["rows"] += len(rows)
    book.counts["padding"] += rows.padding
    recorded = manifest["splits"][name]
    for key, count in (("rows", len(rows)), ("padding", rows.padding), ("lower_bound", rows.lower_bound)):
        if recorded.get(key) != count:
            book.wrong(MANIFEST, f"says {recorded.get(key)} {key} in {name}; the planner gives {count:,}")
    book.compared.append(f"the counts of {len(rows):,} packed rows of {name} with those that the planner makes")


def _check_ledger(manifest: Mapping[str, Any], splits: int, book: VerifyReport) -> None:
    """Check that the ledger balances, and says what the columns say."""
    ledger = stated_ledger(manifest, book)
    if ledger is None:
        return
    if splits < len(manifest["splits"]):
        book.unchecked.append("the ledger was not compared with the columns, since a split cannot be read")
        return
    for name, said, key in (
        ("tokens stored", ledger.in_documents, "tokens"),
        ("tokens of padding", ledger.padding, "padding"),
        ("trained tokens", ledger.total("trained"), "trained_tokens"),
        ("episodes", ledger.total_notes("episodes"), "episodes"),
    ):
        if said != book.counts[key]:
            book.wrong(MANIFEST, f"its ledger says {said:,} {name}; the files have {book.counts[key]:,}")
    book.compared.append("the ledger with itself and with the columns")


def _check_teacher(folder: Path, name: str, split: EpisodeDataset, vocab_size: int, book: VerifyReport) -> None:
    """Check that what a teacher says belongs to the stored ids and targets."""
    try:
        for path, problem in split.teacher.problems(vocab_size):
            book.wrong(path.relative_to(folder).as_posix(), problem)
    except FormatError as error:
        book.wrong(f"{FOLDER}/{name}", str(error))
        return
    if split.teacher.parts:
        coverage = split.teacher.coverage()
        book.counts["teacher_distributions"] += coverage["distributions"]
        book.compared.append(
            f"{coverage['distributions']:,} distributions of a teacher with the ids and targets of "
            f"{coverage['answered']:,} of {coverage['documents']:,} documents of {name}"
        )


def _check_records(
    folder: Path, manifest: Mapping[str, Any], recipe: Recipe, splits: Mapping[str, EpisodeDataset],
    tokenizer: Tokenizer | None, sample: int | None, workers: int | None, book: VerifyReport,
) -> None:  # fmt: skip
    """Run the deep part, if what it needs is there."""
    not_derived = "the records were not derived again"
    if tokenizer is None:
        book.blocked = f"{not_derived}: tokenizer, template or policy of the build are missing or have changed"
    elif len(splits) < len(manifest["splits"]):
        book.blocked = f"{not_derived}: a split cannot be read"
    elif missing := missing_inputs(manifest["inputs"]):
        book.blocked = f"{not_derived}: {missing}"
    if book.blocked or tokenizer is None:
        return
    try:
        check_records(folder, manifest, recipe, tokenizer.backend.name, splits, sample, workers, book)
    except FormatError as error:
        book.wrong(CHUNKS, str(error))
        book.blocked = f"{not_derived}: {CHUNKS} is wrong"
    except ChatmillError as error:
        book.blocked = f"{not_derived}: {error}"
