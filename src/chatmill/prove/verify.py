"""Checks a built dataset: files and hashes, columns, ledger, tokenizer; and, deep, every record against its source."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from chatmill import __version__
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.inputs import InputFile
from chatmill.compiler.manifest import build_fingerprint
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.publish import canonical_json
from chatmill.compiler.recipe import Recipe, recorded_recipe
from chatmill.compiler.template_comparison import compare_with_own, other_own, sampled_inputs
from chatmill.core.ledger import Ledger
from chatmill.errors import ChatmillError, ConfigError, FormatError
from chatmill.label.presets import PRESETS, packaged_policies
from chatmill.prove.columns import ColumnCounts
from chatmill.prove.deep import DeepCheck
from chatmill.prove.files import check_files, stated_ledger
from chatmill.prove.inputs import check_inputs
from chatmill.prove.pack_plan import check_plans
from chatmill.prove.reference import reference_tokenizer
from chatmill.prove.report import Finding, OnProgress, VerifyReport
from chatmill.prove.stored import open_split
from chatmill.render.model_template import JinjaSource
from chatmill.render.registry import find_template, template_names
from chatmill.render.trust import TemplateTrust, UntrustedTemplateError, allowed_template
from chatmill.store.episode_layout import SPLITS
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.receipts import MANIFEST, read_manifest, seal_problem
from chatmill.tokenizer.tokenizer import Tokenizer

__all__ = ["Finding", "VerifyReport", "verify"]


class Rules(NamedTuple):
    """What tokens are made by, as it was when the dataset was built."""

    tokenizer: Tokenizer
    recipe: Recipe
    """With the template that may be run, which the user may have named."""
    not_run: str = ""
    """Why the template was not run; records cannot be derived then."""


def verify(
    directory: str | os.PathLike[str],
    deep: bool = False,
    sample: int | None = None,
    *,
    template: str | os.PathLike[str] | None = None,
    trust_template: str | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check the dataset in a folder; what is wrong is in the report, with the file, and the record where it is known.

    Shallow: every file of the manifest with size and hash, no others in the splits, index in range, columns aligned,
    packed rows against the planner, the ledger against the columns, the tokenizer against its fingerprint. `deep` reads
    the inputs again and derives every record by the slow reference path; with `sample` only so many of them, evenly
    spread, and the others by the fast path. A folder that is no dataset is a `FormatError`.

    A Python file that the manifest names as template is not run, and what needs it is not checked, unless `template`
    names the file again or `trust_template` is its sha256.
    """
    folder = Path(directory)
    if sample is not None and (sample < 1 or not deep):
        raise ConfigError("sample is a number of records, 1 or more, and goes with deep")
    manifest = _manifest(folder)
    book = VerifyReport(directory=folder, deep=deep, on_progress=on_progress)
    recipe = recorded_recipe(manifest)
    _check_recipe(manifest, book)
    check_files(folder, manifest["files"], book, "the manifest")
    _check_others(folder, manifest, book)
    trust = TemplateTrust(template=template, sha256=trust_template)
    rules = _check_rules(folder, recipe, manifest, trust, book)
    splits = _open_splits(folder, manifest, book)
    counts = _check_columns(folder, splits, manifest["tokenizer"]["vocab_size"], _bos_id(rules), book)
    padding = check_plans(folder, manifest, recipe, splits, book)
    ledger = _check_ledger(manifest, splits, counts, padding, book)
    _check_rejected(folder, ledger, book)
    _compare_own_template(recipe, manifest["inputs"], rules, book)
    if deep:
        _check_records(folder, manifest, splits, rules, sample, book)
    return book.ended()


def _compare_own_template(
    recipe: Recipe, inputs: Sequence[Mapping[str, Any]], rules: Rules | None, book: VerifyReport
) -> None:
    """Say how the template differs from the model's own, where another one was chosen: that is no mistake."""
    if rules is None or rules.not_run or other_own(recipe) is None:
        return
    sample = sampled_inputs(inputs)
    if not sample:
        book.unchecked.append("the model's own template, since the inputs are not here")
        return
    found = compare_with_own(rules.recipe, sample)
    if found is not None:
        book.compared.append(" ".join(found.sentences()))


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


def _check_recipe(manifest: Mapping[str, Any], book: VerifyReport) -> None:
    if problem := seal_problem(manifest):
        book.wrong(MANIFEST, problem)
    found = hashlib.sha256(canonical_json(manifest["recipe"])).hexdigest()
    if found != manifest["recipe_sha256"]:
        book.wrong(MANIFEST, f"the recipe in it was edited: its sha256 is {found}, not {manifest['recipe_sha256']}")
    if manifest["package_version"] != __version__:
        book.unchecked.append(f"built by chatmill {manifest.get('package_version')}, checked by {__version__}")


def _check_others(folder: Path, manifest: Mapping[str, Any], book: VerifyReport) -> None:
    """No files in the splits that the manifest does not name, and no split that it does not know."""
    for split in SPLITS:
        for path in sorted((folder / split).rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in manifest["files"]:
                book.wrong(name, "not in the manifest; the build did not write it")


def _check_rules(
    folder: Path, recipe: Recipe, manifest: Mapping[str, Any], trust: TemplateTrust, book: VerifyReport
) -> Rules | None:
    """Tokenizer, template and policy are what they were; None where they are missing or a file has changed."""
    files = {
        "tokenizer": _file_of(recipe.tokenizer, ("o200k", "bytes")),
        "template": _file_of(os.fspath(trust.template or recipe.template), template_names()),
        "policy": _file_of(recipe.policy or "", ("", *PRESETS, *packaged_policies())),
    }
    for what, file in files.items():
        if file is not None and not file.exists():
            book.unchecked.append(f"the {what} file {file} is not here, so its fingerprint was not compared")
            return None
    try:
        named = allowed_template(recipe.template, trust, str(folder))
    except UntrustedTemplateError as error:
        book.unchecked.append(f"the template was not run, so its fingerprint was not compared: {error}")
        return _rules_without_template(recipe, manifest, str(error), book)
    runnable = structs.replace(recipe, template=named)
    try:
        tokenizer = reference_tokenizer(runnable)
        found = Pipeline(runnable, tokenizer).fingerprints
    except ChatmillError as error:
        blamed = next((str(file) for file in files.values() if file is not None), recipe.tokenizer)
        book.wrong(blamed, f"what the recipe names cannot be loaded any more: {error}")
        return None
    changed = [what for what in files if found[what] != manifest[what]["fingerprint"]]
    for what in changed:
        sentence = f"the {what} has changed since the build: its fingerprint is {found[what]}, the manifest says "
        if files[what] is not None or what == "tokenizer":
            book.wrong(str(files[what] or recipe.tokenizer), sentence + manifest[what]["fingerprint"])
        elif manifest["package_version"] == __version__:
            book.wrong(MANIFEST, sentence + manifest[what]["fingerprint"])
        else:
            book.unchecked.append(f"the {what} {manifest[what]['name']} is another version than the one of the build")
    same = [what for what in files if what not in changed]
    book.compared.append(f"{' and '.join(filter(None, (', '.join(same[:-1]), *same[-1:])))} with recorded fingerprints")
    if not changed:
        _check_fingerprint(recipe, manifest, found, book)
    is_changed = any(files[what] is not None or what == "tokenizer" for what in changed)
    return None if is_changed else Rules(tokenizer, runnable)


def _rules_without_template(
    recipe: Recipe, manifest: Mapping[str, Any], not_run: str, book: VerifyReport
) -> Rules | None:
    """The tokenizer, which needs no code of the template where the manifest lists its control tokens."""
    listed = manifest["tokenizer"].get("control_tokens")
    if listed is None and recipe.add_control_tokens:
        return None
    try:
        tokenizer = reference_tokenizer(recipe, listed)
    except ChatmillError as error:
        book.wrong(recipe.tokenizer, f"what the recipe names cannot be loaded any more: {error}")
        return None
    said = manifest["tokenizer"]["fingerprint"]
    if tokenizer.fingerprint != said:
        sentence = f"the tokenizer has changed since the build: its fingerprint is {tokenizer.fingerprint}, "
        book.wrong(recipe.tokenizer, f"{sentence}the manifest says {said}")
        return None
    book.compared.append("tokenizer with recorded fingerprint")
    return Rules(tokenizer, recipe, not_run)


def _file_of(name: str, known: Sequence[str]) -> Path | None:
    """The file that a name of the recipe stands for; None for the names that need none."""
    if name in known:
        return None
    path = Path(name)
    return path / "tokenizer.json" if (path / "tokenizer.json").is_file() else path


def _check_fingerprint(
    recipe: Recipe, manifest: Mapping[str, Any], found: Mapping[str, str], book: VerifyReport
) -> None:
    """The fingerprint of the build follows from what the manifest says went into it."""
    if manifest["package_version"] != __version__ or manifest["recipe"] != recipe.as_json():
        return  # of another version, which had other keys
    names = ("path", "source", "shape", "bytes", "sha256", "lines", "records")
    inputs = [InputFile(**{name: file[name] for name in names}, mtime_ns=0) for file in manifest["inputs"]]
    if build_fingerprint(recipe, inputs, found) != manifest["fingerprint"]:
        book.wrong(MANIFEST, "its recipe, inputs and fingerprint do not belong together: it was edited")


def _open_splits(folder: Path, manifest: Mapping[str, Any], book: VerifyReport) -> dict[str, EpisodeDataset]:
    """The splits that can be read; the others are findings."""
    splits: dict[str, EpisodeDataset] = {}
    for name, recorded in manifest["splits"].items():
        try:
            splits[name] = open_split(folder, name)
        except FormatError as error:
            book.wrong(name, f"the split cannot be read: {error}")
            continue
        split = splits[name]
        for key, found in (("episodes", len(split)), ("tokens", split.tokens)):
            if recorded.get(key, found) != found:
                book.wrong(MANIFEST, f"says {recorded[key]:,} {key} in {name}; {found:,} are there")
    return splits


def _bos_id(rules: Rules | None) -> int | None:
    if rules is None:
        return None
    if rules.not_run:
        return rules.tokenizer.bos_id
    source = find_template(rules.recipe.template)
    own = source.named_tokens.get("bos_token", "") if isinstance(source, JinjaSource) else ""
    return rules.tokenizer.control_ids.get(own, rules.tokenizer.bos_id)


def _check_columns(
    folder: Path, splits: Mapping[str, EpisodeDataset], vocab_size: int, bos_id: int | None, book: VerifyReport
) -> ColumnCounts:
    counts = ColumnCounts()
    for name, split in splits.items():
        book.progress(f"columns of {name}", 0, 0)
        for finding in counts.count(split, name, vocab_size=vocab_size, bos_id=bos_id):
            book.found(replace(finding, file=Path(finding.file).relative_to(folder).as_posix()))
    book.counts.update(
        {
            "episodes": counts.episodes,
            "tokens": counts.tokens,
            "trained_tokens": counts.trained,
            "trained_turns": counts.turns,
            "trained_turns_without_trained_terminator": counts.unended_turns,
            "double_bos": counts.double_bos,
        }
    )
    return counts


def _check_ledger(
    manifest: Mapping[str, Any],
    splits: Mapping[str, EpisodeDataset],
    counts: ColumnCounts,
    padding: int | None,
    book: VerifyReport,
) -> Ledger | None:
    """The ledger balances, and says what the columns say."""
    ledger = stated_ledger(manifest, book)
    if ledger is None:
        return None
    if len(splits) < len(manifest["splits"]):
        book.unchecked.append("the ledger was not compared with the columns, since a split cannot be read")
        return ledger
    accounts: list[tuple[str, int, int]] = [
        ("tokens stored", ledger.stored - ledger.padding, counts.tokens),
        ("tokens of padding", ledger.padding, ledger.padding if padding is None else padding),
        ("trained tokens", ledger.total("trained"), counts.trained),
        ("episodes", ledger.total_notes("episodes"), counts.episodes),
    ]
    for name, found, column in (("source", counts.trained_of_source, 0), ("role", counts.trained_of_role, 1)):
        if found:
            said = {key[column] for key in ledger.tokens}
            for one in sorted(said | set(found)):
                trained = sum(n for key, n in ledger.tokens.items() if key[column] == one and key[2] == "trained")
                accounts.append((f"trained tokens of the {name} {one}", trained, found[one]))
    for name, said_count, found_count in accounts:
        if said_count != found_count:
            book.wrong(MANIFEST, f"its ledger says {said_count:,} {name}; the files have {found_count:,}")
    book.compared.append("the ledger with itself and with the columns")
    return ledger


def _check_rejected(folder: Path, ledger: Ledger | None, book: VerifyReport) -> None:
    path = folder / REJECTED
    lines = 0
    if path.is_file():
        with path.open("rb") as file:
            lines = sum(1 for _ in file)
    if ledger is not None and lines != ledger.total_records("quarantined"):
        said = ledger.total_records("quarantined")
        book.wrong(REJECTED, f"has {lines:,} records; the ledger says that {said:,} were quarantined")


def _check_records(
    folder: Path, manifest: Mapping[str, Any], splits: Mapping[str, EpisodeDataset],
    rules: Rules | None, sample: int | None, book: VerifyReport,
) -> None:  # fmt: skip
    """The deep part, where what it needs is there."""
    not_derived = "the records were not derived again"
    if rules is None:
        book.blocked = f"{not_derived}: tokenizer, template or policy of the build are missing or have changed"
    elif rules.not_run:
        book.blocked = f"{not_derived}: {rules.not_run}"
    elif not splits:
        book.blocked = f"{not_derived}: no split can be read"
    else:
        book.blocked = check_inputs(manifest["inputs"], book)
    if book.blocked or rules is None:
        return
    try:
        DeepCheck(folder, manifest, rules.recipe, splits, book).run(rules.tokenizer, sample)
    except ChatmillError as error:
        book.blocked = f"{not_derived}: {error}"
