"""Exports of a dataset to other layouts: written under a temporary name, renamed when whole, with a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.core.checksums import FileRecord, Hash
from chatmill.core.publish import storing
from chatmill.errors import ConfigError, FormatError, UnknownNameError, short_errors
from chatmill.export.registry import Target, find_target, holders
from chatmill.export.targets import ALONE, Export
from chatmill.load.model_needs import HybridModel, hybrid_model
from chatmill.pack.plan import Strategy
from chatmill.store.documents import open_dataset
from chatmill.store.episode_layout import beside, dataset_url, new_folder
from chatmill.store.kd import blend_arguments
from chatmill.store.model_ids import refuse_ids_beyond
from chatmill.store.named_paths import find_first
from chatmill.store.receipts import EXPORT_FORMAT, EXPORT_MANIFEST, EXPORT_VERSION, receipt_bytes, sealed
from chatmill.store.split import StoredDataset
from chatmill.store.tree_rows import RowsOfTrees
from chatmill.structs import SplitName, fits
from chatmill.tokenizer.hub_cache import model_folder

ABOUT = ("fingerprint", "package_version", "git_sha", "recipe", "inputs", "tokenizer", "template", "policy")
"""What an export keeps of its source's manifest."""
EXPAND = "expand"
"""The way to export trees as rows."""
SHARD_TOKENS = 250_000_000
"""Tokens of an exported shard, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What an export gives back."""

    directory: Path | str
    """A folder, or a URL."""
    to: str
    splits: Mapping[str, Mapping[str, int]]
    """Per split: rows, documents, tokens and trained tokens."""
    not_held: tuple[str, ...]
    """Sentences about what the target cannot hold, or was asked to leave out; empty when nothing is lost."""
    manifest: Mapping[str, Any]
    """The content of export.json."""
    config: str = ""
    """Lines for the config of the trainer that reads it; empty if there is no one place for them."""


@short_errors
def export_dataset(
    directory: str | Path,
    to: str | Callable[[Export], None],
    out: str | Path | None = None,
    *,
    split: str | None = None,
    max_length: int | None = None,
    packing_strategy: str = Strategy.BEST_FIT,
    shard_tokens: int | None = None,
    eod_id: int | None = None,
    trees: str | None = None,
    teacher: bool = False,
    model: Any = None,
) -> ExportResult:
    """Write a dataset as `to`: the name of a target (docs/commands/export.md), or a function that writes one.

    - `out` must not exist yet; default: the folder's name and that of the target, such as `built-hf`.
    - `split`: only this one.
    - `max_length`: pack into rows of so many tokens; a longer document is an error (a build has overflow policies).
      The packing strategy `alone` puts one document into each row.
    - `shard_tokens`: tokens of a file, at most; default 250 million, and one shard a split for megatron.
    - `eod_id`: megatron, olmo-core: this token, untrained, after every document that does not end in it.
    - `model`: an id that this model (a folder, or a number of embeddings) does not know is an error; default: the model
      whose tokenizer the dataset was built with, where its files say.
    - `trees`: "expand" writes the rows of trees, which every trainer can read; without it hf and parquet hold trees as
      `position_ids` and `ends`, and the others refuse them.
    - `teacher`: hf, parquet, axolotl: what a teacher says of the targets (`chatmill teacher add`), once it has
      answered for all documents.

    Tokens are copied about a million at a time. Nothing is at `out` before everything is.
    """
    target = find_target(to)
    source = open_dataset(directory, None if split is None else [split])
    for name in source.splits:
        if not fits(SplitName, name):
            raise FormatError(f"{source.directory}: {name!r} is no name for a split of an export: rename the folder")
    for documents in source.splits.values():
        refuse_ids_beyond(documents, source.about, model, source.directory)
    _refuse_unheld(source, target)
    source, cost = _rows_of_trees(source, target, trees)
    final = _out(source.directory, target.name, out)
    choices = {"eod_id": eod_id, "teacher": teacher or None}
    options = {name: value for name, value in choices.items() if value is not None}
    target.check(max_length, options)
    if shard_tokens is not None and shard_tokens < 1:
        raise ConfigError(f"shard_tokens is {shard_tokens}; it must be 1 or more")
    if max_length is None and packing_strategy not in (Strategy.BEST_FIT, ALONE):
        raise ConfigError(
            f"the packing strategy {packing_strategy!r} is for rows that are packed anew, and nothing says how long "
            "they are: give max_length (--max-length), or leave it out"
        )
    with new_folder(final, EXPORT_MANIFEST) as temporary:
        export = Export(
            source=source,
            folder=temporary,
            alone=split is not None,
            max_length=max_length,
            packing_strategy=packing_strategy,
            shard_tokens=shard_tokens or _shard_tokens(source, target.name),
            hybrid=hybrid_of(source, model),
        )
        if cost:
            export.say(cost)
        with storing(final, "write the export"):
            target.function(export, **options)
            manifest = _manifest(export, target, {"eod_id": None, **options})
            (temporary / EXPORT_MANIFEST).write_bytes(receipt_bytes(manifest))
    if target.name == "megatron" and any(counts["documents"] for counts in export.counts.values()):
        export.config += [blend_arguments(final)]
    return ExportResult(
        directory=final,
        to=target.name,
        splits=export.counts,
        not_held=tuple(export.not_held),
        manifest=manifest,
        config="\n".join(export.config).replace("{out}", str(final)),
    )


def _refuse_unheld(source: StoredDataset, target: Target) -> None:
    """A trainer would see placeholders alone of pictures, and train rejected answers as others."""
    splits, holds = source.splits.values(), target.holds
    if "pictures" not in holds and any(documents.has_pictures for documents in splits):
        raise ConfigError(
            f"{source.directory} holds pictures, and {target.name} has no place for them; {holders('pictures')} hold "
            "them. --to hf prints the collator with which TRL's trainers and those of transformers make their pixels"
        )
    if "pairs" not in holds and any(documents.has_sides for documents in splits):
        raise ConfigError(
            f"{source.directory} holds answers that people compared (preferences: pairs), and {target.name} would "
            f"train the rejected ones too; {holders('pairs')} hold both"
        )


def _rows_of_trees(source: StoredDataset, target: Target, trees: str | None) -> tuple[StoredDataset, str]:
    """Return what is exported of a dataset of trees, and a sentence about its cost; others are left as they are."""
    if trees not in (None, EXPAND):
        raise UnknownNameError("way to export trees", trees, [EXPAND])
    is_held = trees is None and "trees" in target.holds
    with_trees = [documents for documents in source.splits.values() if documents.has_trees]
    if trees is not None and not with_trees:
        raise ConfigError(f"{source.directory} holds no trees: leave out --trees")
    if is_held or not with_trees:
        return source, ""
    if any(documents.has_sides for documents in with_trees):
        raise ConfigError(
            f"{source.directory} holds pairs of answers as trees, in which beginnings that both answers share are "
            f"trained once: build rows for {target.name} with --expand turns"
        )
    if trees is None:
        raise ConfigError(
            f"{source.directory} holds trees, and {target.name} has no place for them: --trees expand writes their "
            f"rows, with shared beginnings repeated; {holders('trees')} hold trees"
        )
    apart = {
        name: RowsOfTrees(documents_of) if documents_of.has_trees else documents_of
        for name, documents_of in source.splits.items()
    }
    before, after = (
        sum(int(documents_of.lengths.sum()) for documents_of in splits.values()) for splits in (source.splits, apart)
    )
    sentence = f"trees are expanded to rows: {after:,} tokens in place of {before:,} ({after / before:.2f} times)"
    return replace(source, splits=apart), sentence


def hybrid_of(source: StoredDataset, model: Any) -> HybridModel | None:
    """Return the model that is named, or whose tokenizer the dataset was built with, if it has recurrent layers."""
    named = source.about.get("recipe", {}).get("tokenizer") if model is None or str(model).isdigit() else model
    if model is None and isinstance(named, str):
        named = find_first(named, source.directory)
    return hybrid_model(model_folder(named) if isinstance(named, str | Path) else named)


def _out(directory: Path, to: str, out: str | Path | None) -> Path | str:
    """Return the new folder, or its URL."""
    if out is not None and (url := dataset_url(out)) is not None:
        return url
    folder = directory.resolve()
    final = beside(folder, f"{folder.name}-{to}") if out is None else Path(out)
    if final.exists():
        raise ConfigError(f"{final}: is there already; an export never writes into it: choose another --out")
    if folder in final.resolve().parents:
        raise ConfigError(f"{final}: lies inside the dataset {directory}; choose a folder next to it")
    return final


def _shard_tokens(source: StoredDataset, to: str) -> int:
    if to == "megatron":  # few large files serve it best: all of a split in one, each document with an added EOD
        return max(1, *(int((documents.lengths + 1).sum()) for documents in source.splits.values()))
    return SHARD_TOKENS


def _manifest(export: Export, target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return which dataset this was made of, how, what it holds and what it could not; nothing of time or place."""
    source, folder = export.source, export.folder
    records = dict(export.hashed)
    for path in folder.rglob("*"):
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in records:
            records[name] = FileRecord.of_file(path, Hash.SHA256)
    shared = ("max_length", "packing_strategy", "pad_id", "shard_tokens")
    content = {
        "format": EXPORT_FORMAT,
        "format_version": EXPORT_VERSION,
        "package_version": __version__,
        "to": target.name,
        "options": {**{name: getattr(export, name) for name in shared}, **options},
        "source": {
            "name": source.directory.resolve().name,
            "fingerprint": source.fingerprint,
            "layout": {
                name: "episodes" if documents.plan is None else "rows" for name, documents in source.splits.items()
            },
            "about": {name: source.about[name] for name in ABOUT if name in source.about},
        },
        "splits": export.counts,
        "not_held": export.not_held,
        "files": {name: record.to_json() for name, record in sorted(records.items())},
    }
    return sealed(content)
