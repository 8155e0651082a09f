"""Exports of a dataset to other layouts: written under a temporary name, renamed when whole, with a manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.compiler.publish import publish_folder, sha256_file, storing, temporary_folder
from chatmill.errors import ConfigError, FormatError
from chatmill.export.registry import Target, find_target
from chatmill.export.row_layout import ALONE
from chatmill.export.targets import Export
from chatmill.pack.overflow import Overflow
from chatmill.pack.plan import Strategy
from chatmill.store.documents import StoredDataset, open_dataset
from chatmill.store.kd_blend import BlendFiles, write_blend_arguments
from chatmill.store.model_ids import refuse_ids_beyond
from chatmill.store.names import is_split_name
from chatmill.store.receipts import EXPORT_FORMAT, EXPORT_MANIFEST, EXPORT_VERSION, receipt_bytes, sealed

ABOUT = ("fingerprint", "package_version", "git_sha", "recipe", "inputs", "tokenizer", "template", "policy")
"""What an export keeps of its source's manifest."""
SHARD_TOKENS = 250_000_000
"""Tokens of an exported shard, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What an export gives back."""

    directory: Path
    to: str
    splits: Mapping[str, Mapping[str, int]]
    """Per split: rows, documents, tokens and trained tokens."""
    not_held: tuple[str, ...]
    """Sentences about what the target cannot hold, or was asked to leave out; empty when nothing is lost."""
    manifest: Mapping[str, Any]
    """The content of export.json."""
    config: str = ""
    """Lines for the config of the trainer that reads it; empty where there is no one place for them."""
    blend: BlendFiles | None = None
    """Of an export to megatron: its shards as arguments for Megatron-LM, in two files beside the folder."""


def export_dataset(
    directory: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    split: str | None = None,
    max_length: int | None = None,
    packing_strategy: str = Strategy.BEST_FIT,
    overflow: str = Overflow.ERROR,
    pad_id: int | None = None,
    shard_tokens: int | None = None,
    kinds: bool = True,
    eod_id: int | None = None,
    record_ids: bool = False,
    hub: bool = False,
    model: Any = None,
) -> ExportResult:
    """Write a dataset as `to`: the name of a target (`chatmill export --list`), or a Python file that defines one.

    - `out` must not exist yet; default: the folder's name and that of the target, such as `built-hf`.
    - `split`: only this one.
    - `max_length`: pack into rows of so many tokens; `overflow` error, drop or cut is for longer documents. The
      packing strategy `alone` puts one document into each row.
    - `pad_id`: default as in the build. `kinds`: False leaves them out.
    - `shard_tokens`: tokens of a file, at most; default 250 million, and one shard a split for megatron.
    - `eod_id`: megatron, olmo-core: this token, untrained, behind every document that does not end in it.
    - `model`: an id that this model (a folder, or a number of embeddings) does not know is an error; default: the model
      whose tokenizer the dataset was built with, where its files say.
    - `record_ids`: megatron only: the record id of every document in `shard_NN_ids`; the others keep them anyway.
    - `hub`: hf only: Parquet files and a dataset card, for the Hugging Face Hub.

    Tokens are copied about a million at a time. Nothing is at `out` before everything is.
    """
    target = find_target(str(to))
    source = open_dataset(directory, None if split is None else [split])
    for name in source.splits:
        if not is_split_name(name):
            raise FormatError(f"{source.directory}: {name!r} is no name for a split of an export: rename the folder")
    for documents in source.splits.values():
        refuse_ids_beyond(documents, source.about, model)
    final = _out(source.directory, target.name, out)
    target.check(max_length=max_length, eod_id=eod_id, record_ids=record_ids, hub=hub)
    if shard_tokens is not None and shard_tokens < 1:
        raise ConfigError(f"shard_tokens is {shard_tokens}; it must be 1 or more")
    _refuse_idle(max_length, packing_strategy, overflow)
    temporary = temporary_folder(final)
    try:
        export = Export(
            source=source,
            folder=temporary,
            alone=split is not None,
            max_length=max_length,
            packing_strategy=packing_strategy,
            overflow=overflow,
            pad_id=_pad_id(source) if pad_id is None else pad_id,
            shard_tokens=shard_tokens or _shard_tokens(source, target.name),
            kinds=kinds,
            eod_id=eod_id,
            record_ids=record_ids,
            hub=hub,
        )
        with storing(final, "write the export"):
            target.run(export)
            manifest = _manifest(export, target)
            (temporary / EXPORT_MANIFEST).write_bytes(receipt_bytes(manifest))
        publish_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    blend = None
    if target.name == "megatron" and any(counts["documents"] for counts in export.counts.values()):
        with storing(final, "write the blend arguments beside"):
            blend = write_blend_arguments(final)
    return ExportResult(
        directory=final,
        to=target.name,
        splits=export.counts,
        not_held=tuple(export.not_held),
        manifest=manifest,
        config="\n".join(export.config).replace("{out}", str(final)),
        blend=blend,
    )


def _refuse_idle(max_length: int | None, packing_strategy: str, overflow: str) -> None:
    """A `ConfigError` for options of rows that are laid out anew, where nothing says how long these are."""
    if max_length is not None:
        return
    for name, value, idle in (
        ("packing strategy", packing_strategy, packing_strategy not in (Strategy.BEST_FIT, ALONE)),
        ("overflow policy", overflow, overflow != Overflow.ERROR),
    ):
        if idle:
            raise ConfigError(
                f"the {name} {value!r} is for rows that are packed anew, and nothing says how long they are: give "
                "max_length (--max-length), or leave it out"
            )


def _out(directory: Path, to: str, out: str | Path | None) -> Path:
    folder = directory.resolve()
    final = folder.with_name(f"{folder.name}-{to}") if out is None else Path(out)
    if final.exists():
        raise ConfigError(f"{final}: is there already; an export never writes into it: choose another --out")
    if folder in final.resolve().parents:
        raise ConfigError(f"{final}: lies inside the dataset {directory}; choose a folder beside it")
    return final


def _pad_id(source: StoredDataset) -> int:
    """That of the build; 0 where it is not known (padding is known by lengths, never by its id)."""
    return int(source.about.get("tokenizer", {}).get("pad_id", 0))


def _shard_tokens(source: StoredDataset, to: str) -> int:
    if to == "megatron":  # few large files serve it best: all of a split in one, each document with an added EOD
        return max(1, *(int((documents.lengths + 1).sum()) for documents in source.splits.values()))
    return SHARD_TOKENS


def _manifest(export: Export, target: Target) -> dict[str, Any]:
    """Which dataset this was made of, how, what it holds and what it could not; nothing of time or place."""
    source, folder = export.source, export.folder
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    options = ["max_length", "packing_strategy", "overflow", "pad_id", "shard_tokens", "kinds", "eod_id"]
    options += [name for name in ("record_ids", "hub") if getattr(export, name)]
    foreign = {} if target.sha256 is None else {"target_sha256": target.sha256}
    content = {
        "format": EXPORT_FORMAT,
        "format_version": EXPORT_VERSION,
        "package_version": __version__,
        "to": target.name,
        "options": {name: getattr(export, name) for name in options} | foreign,
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
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in files
        },
    }
    return sealed(content)
