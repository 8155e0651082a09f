"""The manifest of an episode split with thousands of shards, read without the records of their files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from chatmill.errors import FormatError
from chatmill.store.episode_manifest import (
    EpisodeManifest,
    FileRecords,
    ShardRecord,
    manifest_from_json,
    plain_file_name,
)


class _Shard(msgspec.Struct):
    name: str
    episodes: int
    tokens: int
    files: msgspec.Raw
    sources: tuple[str, ...] | None = None


class _Manifest(msgspec.Struct):
    format: str
    version: int
    split: str
    columns: dict[str, dict[str, str]]
    sources: list[str]
    shards: list[_Shard]


def large_manifest(raw: bytes, where: str) -> EpisodeManifest | None:
    """What `manifest_from_json` gives; None where something is wrong, which that one says."""
    try:
        form = msgspec.json.decode(raw, type=_Manifest)
    except msgspec.DecodeError:
        return None
    head = {name: getattr(form, name) for name in ("format", "version", "split", "columns", "sources")}
    shards = tuple(
        ShardRecord(
            name=plain_file_name(shard.name, where) if shard.name else "",
            episodes=shard.episodes,
            tokens=shard.tokens,
            files=FileRecords(partial(_files, shard.files, where), where),
            sources=shard.sources,
        )
        for shard in form.shards
    )
    return replace(manifest_from_json({**head, "shards": []}, where), shards=shards)


def _files(text: msgspec.Raw, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise FormatError(f"{where}: the records of the files of a shard are damaged ({error})") from None
