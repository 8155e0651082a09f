"""The manifest of a distillation dataset that a test has written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.store.receipts import receipt_bytes, sealed

ZEROS = "0" * 64


def write_kd_manifest(root: Path, **changes: Any) -> None:
    """A whole manifest that lists no files, as if nothing had been built."""
    empty = {"rows": 0, "tokens": 0, "trained_tokens": 0, "span_tokens": {"0": 0, "1": 0, "2": 0}, "shards": []}
    content = {
        "schema_version": "synth_kd_v1",
        "created_unix_s": 0,
        "git_sha": None,
        "package_version": "0",
        "fingerprint": ZEROS,
        "config": {"valid_fraction": 0.0},
        "config_hash": ZEROS,
        "tokenizer": {"name": "o200k_harmony", "path": "x", "sha256": ZEROS, "vocab_size": 201088, "eod_id": 199999},
        "input": {"path": "in", "manifest_path": "in", "manifest_sha256": ZEROS, "glob": "*", "shards": []},
        "renderer": {"library": "openai-harmony", "version": "0", "flags": {}},
        "split": {"rule": "", "valid_fraction": 0.0},
        "splits": {"train": empty, "valid": empty},
        "failed": {"rows": 0, "reasons": {}, "file": None},
        "ledger": {"tokens": {}, "records": {}, "notes": {}, "padding": 0},
    }
    (root / "manifest.json").write_bytes(receipt_bytes(sealed({**content, **changes})))
