"""A distillation set: its splits and shards, read as any other dataset, and their blend arguments for Megatron.

On disk mask and span are label-aligned: position `t` is that of token `t + 1`, and the last one of a document is 0.
So the values of all documents, moved by one, are those of the tokens; only the first token of a document has none.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from chatmill.core.canonical import canonical_json
from chatmill.core.harmony_ids import EOD, kinds_of_spans
from chatmill.core.tokens import offsets_of
from chatmill.errors import FormatError
from chatmill.store.episode_layout import MANIFEST, dataset_folder, dataset_url
from chatmill.store.kd_shard import COLUMNS, LOSSMASK, SPAN, TOKENS, KDShard
from chatmill.store.mapped import file_size
from chatmill.store.megatron import MegatronIndex
from chatmill.store.receipts import read_export, read_kd_manifest
from chatmill.store.split import Ints, Split, StoredDataset, TokenColumns, chosen_splits

MEGATRON_SPLITS = ("train", "valid", "test")
NO_SHARDS = "A split without documents has no shards."
_SAID = ("package_version", "git_sha", "fingerprint", "created_unix_s", "schema_version", "ledger")
"""What the manifest of a distillation dataset says as that of a build does."""
O200K_FINGERPRINT = "121b20d1a306b5380b3a56876fa683ecc17e49547161f4a2f3b439b4b2b7ddb3"
"""That of the one tokenizer of these datasets, whose vocabulary file is fixed."""
_CACHE = re.compile(rf"[^/]+/[^/]+_{TOKENS}/cache/.+")
_FILE = re.compile(r"([^/]+/shard_\d{2,})_([a-z][a-z0-9_]*)\.(?:bin|idx)")


class KDRoot(NamedTuple):
    """A folder of splits with shards: what `chatmill synth-kd` wrote, or an export to megatron."""

    manifest: Mapping[str, Any]
    """Its manifest.json (or export.json)."""
    splits: dict[str, tuple[str, ...]]
    """The token prefixes of each split, in order; splits without a document are left out."""


def find_kd_root(directory: str | os.PathLike[str]) -> KDRoot:
    """Look into a finished folder, without opening its shards; refuses one whose manifest is not there yet."""
    folder = dataset_folder(directory)
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
    return KDRoot(manifest, splits)


def _check_listed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Check that the files a manifest lists (by shard, or flat in an export) are there, with the sizes it says."""
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
    """Return the shards of a split for `blend_per_split` of a `GPTDatasetConfig`, weighted by their tokens.

    Weights need a number of samples; for exactly one epoch, or without a number, give `(blend.prefixes, None)`.
    Shards are not opened here beyond their sizes: the dataset checks them when it is built. Those of a root at a URL
    are URLs.
    """
    splits = find_kd_root(root).splits
    chosen_splits(splits, [split], NO_SHARDS)
    prefixes = list(splits[split])
    weights = [float(MegatronIndex.open(prefix).values) for prefix in prefixes]
    if (url := dataset_url(root)) is not None:  # under the same names on all machines
        prefixes = [f"{url.rstrip('/')}/{split}/{os.path.basename(prefix)}" for prefix in prefixes]
    return KDBlend(prefixes, weights)


def local_prefix(prefix: str) -> str:
    """Return the prefix of a shard on this machine: for a URL in the cache, whose files are fetched on demand."""
    if dataset_url(prefix) is None:
        return prefix
    root, split, name = prefix.rsplit("/", 2)
    return str(dataset_folder(root) / split / name)


def synth_kd_blends(root: str | os.PathLike[str]) -> list[KDBlend | None]:
    """`blend_per_split` of a `GPTDatasetConfig`: train, valid and test; None for a split without documents."""
    splits = find_kd_root(root).splits
    names = ("train", "val" if "val" in splits and "valid" not in splits else "valid", "test")
    return [synth_kd_blend(root, split) if split in splits else None for split in names]


def shard_prefixes(folder: Path) -> tuple[str, ...]:
    """Return the token prefixes in the folder of a split, by the number in their names."""
    prefixes = [str(path.with_suffix("")) for path in folder.glob(f"*_{TOKENS}.idx")]
    return tuple(sorted(prefixes, key=lambda prefix: (len(prefix), prefix)))


def _split_order(path: Path) -> tuple[int, str]:
    """Train before valid before whatever else."""
    return ("train", "valid").index(path.name) if path.name in ("train", "valid") else 2, path.name


def blend_arguments(root: str | os.PathLike[str]) -> str:
    """Return the shards as arguments of Megatron-LM, `--train-data-path` and so on: a line each, quoted for a shell."""
    home = dataset_url(root) or Path(root).resolve()
    lines = []
    for split, blend in zip(MEGATRON_SPLITS, synth_kd_blends(home), strict=True):
        if blend is not None:
            pairs = zip(blend.weights, blend.prefixes, strict=True)
            words = [text for weight, prefix in pairs for text in (f"{weight:.0f}", prefix)]
            lines.append(f"--{split}-data-path {shlex.join(words)}")
    return "\n".join(lines)


class _TokenAligned:
    """Label-aligned values of a shard, as those of its tokens; made for each slice."""

    def __init__(self, values: NDArray[np.uint8], convert: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
        self._values, self._made = values, convert

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: slice) -> NDArray[np.uint8]:
        start, stop, _ = place.indices(len(self))
        if start or stop <= start:
            return self._made(self._values[start - 1 : stop - 1] if stop > start else self._values[:0])
        return self._made(np.concatenate([np.zeros(1, dtype=np.uint8), self._values[: stop - 1]]))


class KDDocuments(Split):
    """The documents of one split, shard after shard."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Open the shards; what does not fit together is a `FormatError`."""
        self.shards: list[KDShard] = [KDShard.open(prefix) for prefix in prefixes]
        self.episode_offsets = offsets_of(np.array([len(shard) for shard in self.shards]))
        self.has_masks = self.has_kinds = True

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of every document."""
        return np.concatenate([shard.tokens.lengths for shard in self.shards]).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash over those of the shards."""
        return hashlib.sha256("".join(shard.fingerprint() for shard in self.shards).encode()).hexdigest()

    def shard_columns(self, shard: int) -> TokenColumns:
        """Ids, weights and kinds of a whole shard; the latter two are made for the slices that are read."""
        values = self.shards[shard].values
        ids = values(TOKENS)
        return TokenColumns(
            ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint32),
            cast(Any, _TokenAligned(values(LOSSMASK), lambda mask: mask)),
            cast(Any, _TokenAligned(values(SPAN), kinds_of_spans)),
        )

    def facts(self, name: str, numbers: Ints) -> list[Any] | None:
        """Return the shard as `source`; nothing else is stored of records."""
        return [self.shards[shard].name for shard in self.locate(numbers)[0].tolist()] if name == "source" else None


def is_kd(path: Path) -> bool:
    """Return whether a path is a distillation set, finished or not, or a split of one."""
    if not path.is_dir():
        return False
    return bool(shard_prefixes(path)) or any(shard_prefixes(folder) for folder in path.iterdir() if folder.is_dir())


def open_kd_dataset(directory: Path, splits: Sequence[str] | None) -> StoredDataset:
    """Open the root of a finished distillation dataset, or of an export to megatron, which is about its source."""
    root = find_kd_root(directory)
    chosen = chosen_splits(root.splits, splits, NO_SHARDS)
    source = root.manifest.get("source")
    return StoredDataset(
        directory=directory,
        about=_about(root.manifest) if source is None else dict(source["about"]),
        of_build=root.manifest.get("fingerprint"),
        splits={name: KDDocuments(root.splits[name]) for name in chosen},
    )


def _about(manifest: Any) -> dict[str, Any]:
    """Return what a build would say of the same: how these datasets are made is fixed but for `config`."""
    renderer = hashlib.sha256(canonical_json(manifest["renderer"])).hexdigest()
    split = hashlib.sha256(canonical_json(manifest["split"])).hexdigest()
    return {
        **{name: manifest[name] for name in _SAID},
        "tokenizer": {
            "name": "o200k",
            "given_as": "o200k",
            "fingerprint": O200K_FINGERPRINT,
            "vocab_size": manifest["tokenizer"]["vocab_size"],
            "eos_id": EOD,
            "pad_id": EOD,
        },
        "template": {"name": "harmony", "fingerprint": renderer},
        "policy": {"name": "synth_kd", "fingerprint": split},
        "inputs": [],
        "recipe": {
            "tokenizer": "o200k",
            "template": "harmony",
            "policy": "synth_kd",
            "add_control_tokens": False,
            "config": manifest["config"],
            "input": manifest["input"],
        },
    }


def check_added(folder: Path, names: Iterable[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Files of a root that its receipt does not name: those that are wrong and why, sidecars, and the index cache.

    Sidecars that were added later must fit to their tokens.
    """
    wrong: dict[str, str] = {}
    sidecars, cache = set(), []
    for name in names:
        match = _FILE.fullmatch(name)
        if _CACHE.fullmatch(name):
            cache.append(name)
        elif match is None or match[2] in COLUMNS:
            wrong[name] = ""
        else:
            sidecars.add((match[1], match[2]))
    for stem, sidecar in sorted(sidecars):
        try:
            KDShard.open(folder / f"{stem}_{TOKENS}", [sidecar])
        except FormatError as error:
            wrong[f"{stem}_{sidecar}"] = str(error)
    return wrong, [f"{stem}_{sidecar}" for stem, sidecar in sorted(sidecars)], cache
