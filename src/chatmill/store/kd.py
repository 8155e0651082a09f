"""The root of a distillation set: its splits and shards, and their blend arguments for Megatron."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.core.publish import whole_file
from chatmill.errors import FormatError, UnknownNameError
from chatmill.store.kd_shard import TOKENS
from chatmill.store.mapped import file_size
from chatmill.store.megatron import MegatronIndex
from chatmill.store.receipts import MANIFEST, read_export, read_kd_manifest

MEGATRON_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class KDRoot:
    """A folder of splits with shards: what `chatmill synth-kd` wrote, or an export to megatron."""

    directory: Path
    manifest: Mapping[str, Any]
    """Its manifest.json (or export.json)."""
    splits: dict[str, tuple[str, ...]]
    """The token prefixes of each split, in order; splits without a document are left out."""


def find_kd_root(directory: str | os.PathLike[str]) -> KDRoot:
    """Look into a finished folder, without opening its shards; refuses one whose manifest is not there yet."""
    folder = Path(directory)
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder")
    splits = {
        split.name: prefixes
        for split in sorted(folder.iterdir(), key=_split_order)
        if split.is_dir() and not split.name.startswith(".") and (prefixes := shard_prefixes(split))
    }
    if not splits:
        raise FormatError(f"{folder}: holds no SPLIT/shard_NN_{TOKENS}.idx; give the folder that synth-kd wrote")
    manifest = read_kd_manifest(folder) if (folder / MANIFEST).is_file() else read_export(folder)
    if manifest is None:
        raise FormatError(
            f"{folder}: has shards but no {MANIFEST}, which is written last: the build is not finished; continue with "
            "chatmill synth-kd --resume"
        )
    _check_listed(folder, manifest)
    return KDRoot(directory=folder, manifest=manifest, splits=splits)


def _check_listed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """The files that a manifest lists (by shard, or flat in an export) are there, with the sizes that it says."""
    files = manifest.get("files")
    if files is None:
        shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
        files = {file["path"]: file for shard in shards for file in shard["files"]}
    for name, record in files.items():
        path, stated = folder / name, record["bytes"]
        size = file_size(path)
        if size != stated:
            raise FormatError(
                f"{path}: {size:,} bytes, but the manifest says {stated:,}: the file was cut or "
                "replaced after the build"
            )


class KDBlend(NamedTuple):
    """A blend as Megatron's configs take it: `(prefixes, weights)`."""

    prefixes: list[str]
    """The token prefixes of a split, one a shard."""
    weights: list[float]
    """Their tokens, so that every document is as likely as in one large shard."""


def synth_kd_blend(root: str | os.PathLike[str], split: str = "train") -> KDBlend:
    """The shards of a split for `blend_per_split` of a `GPTDatasetConfig`, weighted by their tokens.

    Weights need a number of samples; for exactly one epoch, or without a number, give `(blend.prefixes, None)`.
    Shards are not opened here beyond their sizes: the dataset checks them when it is built.
    """
    found = find_kd_root(root)
    if split not in found.splits:
        raise UnknownNameError("split", split, list(found.splits), "A split without documents has no shards.")
    prefixes = list(found.splits[split])
    return KDBlend(prefixes, [float(MegatronIndex.open(prefix).values) for prefix in prefixes])


def synth_kd_blends(root: str | os.PathLike[str]) -> list[KDBlend | None]:
    """`blend_per_split` of a `GPTDatasetConfig`: train, valid and test; None for a split without documents."""
    found = find_kd_root(root).splits
    names = ("train", "val" if "val" in found and "valid" not in found else "valid", "test")
    return [synth_kd_blend(root, split) if split in found else None for split in names]


def shard_prefixes(folder: Path) -> tuple[str, ...]:
    """The token prefixes in the folder of a split, by the number in their names."""
    found = [str(path.with_suffix("")) for path in folder.glob(f"*_{TOKENS}.idx")]
    return tuple(sorted(found, key=lambda prefix: (len(prefix), prefix)))


def _split_order(path: Path) -> tuple[int, str]:
    """Train before valid before whatever else."""
    return ("train", "valid").index(path.name) if path.name in ("train", "valid") else 2, path.name


class BlendFiles(NamedTuple):
    """Where the arguments are."""

    json: Path
    """For `--per-split-data-args-path`."""
    args: Path
    """`--train-data-path ... --valid-data-path ...`, a line each, quoted for a shell."""


def write_blend_arguments(root: str | os.PathLike[str]) -> BlendFiles:
    """Write `ROOT.blend.json` and `ROOT.blend.args`, in place of those that are there."""
    folder = Path(root).resolve()
    blends: dict[str, list[str] | None] = dict.fromkeys(MEGATRON_SPLITS)
    for split, blend in zip(MEGATRON_SPLITS, synth_kd_blends(folder), strict=True):
        if blend is not None:
            pairs = zip(blend.weights, blend.prefixes, strict=True)
            blends[split] = [text for weight, prefix in pairs for text in (f"{weight:.0f}", prefix)]
    lines = [f"--{split}-data-path {shlex.join(blend)}\n" for split, blend in blends.items() if blend is not None]
    files = BlendFiles(*(folder.with_name(f"{folder.name}.blend.{kind}") for kind in ("json", "args")))
    for path, text in ((files.json, json.dumps(blends, indent=1) + "\n"), (files.args, "".join(lines))):
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return files
