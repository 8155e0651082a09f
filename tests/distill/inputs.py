"""Inputs for the distillation build: the real rows, and small folders of rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from chatmill.compiler import cuts
from chatmill.distill.run import SynthKDResult, build_synth_kd

REAL = Path(__file__).parents[1] / "data" / "synth_harmony"
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("messages_json", "metadata_json", "synth_id", "language", "exercise")]
)


def real_rows() -> list[dict[str, Any]]:
    """All 500 real rows."""
    rows = [row for path in sorted(REAL.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 500
    return rows


def text(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": content}], **fields}


def chat(user: str = "What is 2 + 2?", analysis: str = "Easy.", final: str = "4") -> list[dict[str, Any]]:
    return [
        text("user", user),
        text("assistant", analysis, channel="analysis"),
        text("assistant", final, channel="final"),
    ]


def row(synth_id: str | None, messages: Sequence[Any] | str | None) -> dict[str, Any]:
    """A row; `messages` may be the JSON text itself."""
    content = json.dumps({"messages": messages}) if isinstance(messages, list) else messages
    return {"messages_json": content, "metadata_json": "{}", "synth_id": synth_id, "language": "en", "exercise": "qa"}


def write_input(folder: Path, shards: Sequence[Sequence[dict[str, Any]]], *, group: int = 16, **manifest: Any) -> Path:
    """A folder with a manifest and one Parquet file a shard, in row groups of `group` rows."""
    folder.mkdir(parents=True)
    for number, rows in enumerate(shards):
        table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
        pq.write_table(table, folder / f"synth_harmony_shard_{number:02d}.parquet", row_group_size=group)
    (folder / "manifest.json").write_text(json.dumps({"schema_version": "synth_harmony_v1", **manifest}))
    return folder


def in_chunks_of(rows: int, *arguments: Any, **options: Any) -> SynthKDResult:
    """Build with chunks of at most so many rows."""
    with mock.patch.object(cuts, "ROW_LIMIT", rows):
        return build_synth_kd(*arguments, **options)


def listed_files(root: Path) -> set[str]:
    """The files that the manifest names."""
    manifest = json.loads((root / "manifest.json").read_bytes())
    files = {f["path"] for s in manifest["splits"].values() for shard in s["shards"] for f in shard["files"]}
    return files | ({manifest["failed"]["file"]["path"]} if manifest["failed"]["file"] else set())


def leftovers(root: Path) -> list[str]:
    """What lies in a finished dataset and does not belong there."""
    there = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() or path.name[0] == "."}
    return sorted(there - listed_files(root) - {"manifest.json"})


def small(folder: Path, count: int = 10, shards: int = 1) -> Path:
    """Made-up rows, `count` a shard."""
    rows = [[row(f"id-{shard}-{n}", chat(f"question {n}")) for n in range(count)] for shard in range(shards)]
    return write_input(folder, rows)


def manifest_of(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "manifest.json").read_bytes()))
