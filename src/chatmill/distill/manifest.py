"""The manifest of a distillation dataset: what went in, how it was rendered and split, and every file with its hash."""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chatmill import __version__
from chatmill.compiler.manifest import git_sha
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.core.harmony_ids import EOD, VOCAB_SIZE
from chatmill.core.ledger import Ledger
from chatmill.distill.audit import QUARANTINE
from chatmill.distill.input_shards import GLOB, KDInput
from chatmill.errors import ConfigError, MissingExtraError
from chatmill.store.kd_shard import SPAN_NAMES
from chatmill.store.receipts import KD_SCHEMA, sealed
from chatmill.systems.synth_kd import FLAGS, SPLIT_RULE, KDSplit
from chatmill.tokenizer.assets import O200K_SHA256

SCHEMA = KD_SCHEMA
LIBRARY = "openai-harmony"


@dataclass(frozen=True, slots=True, kw_only=True)
class KDConfig:
    """The options that change bytes; nothing else is part of the config hash."""

    valid_fraction: float = 0.001
    max_rows: int | None = None
    max_rows_per_shard: int | None = None
    max_tokens: int | None = None
    max_tokens_per_shard: int | None = None

    def __post_init__(self) -> None:
        for cap in ("max_rows", "max_rows_per_shard", "max_tokens", "max_tokens_per_shard"):
            value = getattr(self, cap)
            if value is not None and value < 1:
                raise ConfigError(f"{cap} is {value}; give 1 or more, or leave it out")

    def as_json(self) -> dict[str, Any]:
        """What the manifest holds as `config`, with the fixed choices of this version; later options where set."""
        later = {name: getattr(self, name) for name in ("max_tokens", "max_tokens_per_shard")}
        return {
            "schema_version": SCHEMA,
            "valid_fraction": self.valid_fraction,
            "max_rows": self.max_rows,
            "max_rows_per_shard": self.max_rows_per_shard,
            "tokenizer_sha256": O200K_SHA256,
            "eod_id": EOD,
            "render": dict(FLAGS),
            **{name: value for name, value in later.items() if value},
        }

    @property
    def sha256(self) -> str:
        """Of the canonical JSON."""
        return hashlib.sha256(canonical_json(self.as_json())).hexdigest()


def library_version() -> str:
    """Return the version of the official renderer."""
    try:
        return importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError(LIBRARY, "harmony", "synth-kd") from None


def kd_fingerprint(config: KDConfig, source: KDInput) -> str:
    """sha256 over everything that decides the bytes; where the input lies does not."""
    content = {
        "config_hash": config.sha256,
        "package": __version__,
        "renderer": library_version(),
        "input_manifest": source.manifest_sha256,
        "shards": [[s.name, s.rows, s.taken, s.bytes, s.fingerprint] for s in source.shards],
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def make_manifest(
    config: KDConfig,
    source: KDInput,
    vocabulary: str,
    shards: Sequence[Mapping[KDSplit, Mapping[str, Any]]],
    ledger: Mapping[str, Any],
    quarantine: FileRecord | None,
) -> dict[str, Any]:
    """Return the manifest; `shards` is what was exported of each, `quarantine` the record of that file."""
    reasons = dict(sorted(Ledger.from_json(ledger).reasons("quarantined").items()))
    content = {
        "schema_version": SCHEMA,
        "created_unix_s": int(time.time()),
        "git_sha": git_sha(),
        "package": "chatmill",
        "package_version": __version__,
        "fingerprint": kd_fingerprint(config, source),
        "config": config.as_json(),
        "config_hash": config.sha256,
        "tokenizer": {
            "name": "o200k_harmony",
            "path": vocabulary,
            "sha256": O200K_SHA256,
            "vocab_size": VOCAB_SIZE,
            "eod_id": EOD,
        },
        "input": {
            "path": source.folder,
            "manifest_path": source.manifest,
            "manifest_sha256": source.manifest_sha256,
            "glob": GLOB,
            "shards": [{"path": s.path, "bytes": s.bytes, "rows": s.rows, "rows_used": s.taken} for s in source.shards],
        },
        "renderer": {"library": LIBRARY, "version": library_version(), "flags": dict(FLAGS)},
        "split": {"rule": SPLIT_RULE, "valid_fraction": config.valid_fraction},
        "alignment": "lossmask and span are label-aligned: values[1:] + [0] of each document",
        "span_names": list(SPAN_NAMES),
        "splits": {split.value: _split([shard[split] for shard in shards]) for split in KDSplit},
        "failed": {
            "rows": sum(reasons.values()),
            "reasons": reasons,
            "file": None if quarantine is None else {"path": QUARANTINE, **quarantine.to_json()},
        },
        "ledger": ledger,
    }
    return sealed(content)


def _split(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    spans = [sum(shard["span_tokens"][span] for shard in shards) for span in range(3)]
    return {
        "rows": sum(shard["rows"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "trained_tokens": spans[1] + spans[2],
        "span_tokens": {str(span): count for span, count in enumerate(spans)},
        "shards": [{name: shard[name] for name in ("name", "rows", "tokens", "files")} for shard in shards],
    }
