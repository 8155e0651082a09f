"""Opens distillation sets to look at: a root, a split of one, or a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.errors import FormatError
from chatmill.look.items import LookSplit
from chatmill.look.stored_split import StoredSplit
from chatmill.store.documents import chosen_splits
from chatmill.store.kd import COLUMNS, TOKENS, find_kd_root, shard_prefixes
from chatmill.store.kd_documents import KDDocuments

ALIGNMENT = (
    "Marked tokens count in the loss: each is predicted at the position before it, which is where the files hold its "
    "mask and span."
)
"""What a reader must know of the two alignments."""


class KDFound(NamedTuple):
    """What a path holds: open splits, and what is known of the build."""

    splits: dict[str, LookSplit]
    about: dict[str, Any]
    """The manifest, with the tokenizer named as `decoder_for` reads it; empty for a bare split or shard."""


def is_kd(path: str | Path) -> bool:
    """Whether a path is a distillation set: its root, a split, or one of its shards (a prefix or a file)."""
    place = Path(path)
    if place.is_dir():
        return bool(shard_prefixes(place)) or any(shard_prefixes(sub) for sub in place.iterdir() if sub.is_dir())
    return _prefix_of(place) is not None


def open_kd(path: str | Path, splits: Sequence[str] | None = None) -> KDFound:
    """Open a root, the folder of a split, or one shard by its prefix or any of its files; `splits` chooses some."""
    place = Path(path)
    prefix = None if place.is_dir() else _prefix_of(place)
    if prefix is not None:
        found: dict[str, tuple[str, ...]] = {Path(prefix).parent.name: (prefix,)}
        about = _about(Path(prefix).parent.parent)
    elif place.is_dir() and (prefixes := shard_prefixes(place)):
        found, about = {place.resolve().name: prefixes}, _about(place.resolve().parent)
    elif place.is_dir():
        root = find_kd_root(place)
        found, about = dict(root.splits), _with_tokenizer(root.manifest)
    else:
        raise FormatError(f"{place}: no such folder or shard; give the folder that synth-kd wrote")
    return KDFound({name: StoredSplit(KDDocuments(found[name]), name) for name in chosen_splits(found, splits)}, about)


def _prefix_of(path: Path) -> str | None:
    """The token prefix of a shard, from that prefix, the shard's name, or one of its six files."""
    name = path.name.removesuffix(".bin").removesuffix(".idx")
    for column in COLUMNS:
        name = name.removesuffix(f"_{column}")
    prefix = path.with_name(f"{name}_{TOKENS}")
    return str(prefix) if Path(f"{prefix}.idx").is_file() else None


def _about(root: Path) -> dict[str, Any]:
    """What the folder above a split says, where it is a finished root."""
    try:
        return _with_tokenizer(find_kd_root(root).manifest)
    except FormatError:
        return {}


def _with_tokenizer(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as `decoder_for` reads it: an export speaks of its source, and `synth_kd_v1` is always o200k."""
    source = manifest.get("source")
    if isinstance(source, dict):
        return dict(source.get("about") or {})
    tokenizer = manifest.get("tokenizer")
    known = tokenizer if isinstance(tokenizer, dict) else {}
    return {**manifest, "tokenizer": {**known, "given_as": "o200k"}}
