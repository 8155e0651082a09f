"""A distillation set in a bucket: the samples of one in a folder, its tokens fetched by us or streamed by Megatron."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatmill.core.checksums import FileRecord, Hash
from chatmill.errors import ConfigError, FormatError
from chatmill.files.stores import RemoteError
from chatmill.store.kd import synth_kd_blend, synth_kd_blends
from tests.files.stores_for_tests import put_folder, s3_server
from tests.kd_manifest import write_kd_manifest
from tests.megatron import kd_sets
from tests.megatron.kd_sets import TRAIN, dataset, plain

pytestmark = pytest.mark.slow


def write_root(root: Path) -> Path:
    """Write shards and a manifest that lists their files."""
    kd_sets.write_root(root, {"train": TRAIN})
    return listed(root)


def listed(root: Path) -> Path:
    shards: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((root / "train").iterdir()):
        record = FileRecord.of_file(path, hash=Hash.SHA256).to_json()
        shards.setdefault(path.name[:8], []).append({"path": f"train/{path.name}", **record})
    counts = {"rows": 0, "tokens": 0, "trained_tokens": 0, "span_tokens": {"0": 0, "1": 0, "2": 0}}
    made = [{"name": name, "rows": 0, "tokens": 0, "files": files} for name, files in shards.items()]
    write_kd_manifest(root, splits={"train": {**counts, "shards": made}, "valid": {**counts, "shards": []}})
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("kd") / "kd")


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with s3_server() as bucket:
        put_folder(root, f"{bucket}/kd")
        yield f"{bucket}/kd"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "0")
    return tmp_path / "cache"


def streaming(tmp_path: Path) -> dict[str, Any]:
    return {
        "object_storage_cache_path": str(tmp_path / "idx"),
        "mmap_bin_files": False,
        "path_to_cache": str(tmp_path / "indices"),
    }


def different_bytes(paths: Iterator[Path]) -> int:
    """Count equal files once, as the cache has them."""
    return sum(len(data) for data in {path.read_bytes() for path in paths})


def fetched(own_cache: Path) -> int:
    return sum(path.stat().st_size for path in (own_cache / "files").rglob("*") if path.is_file())


@pytest.mark.parametrize("streams", [False, True])
def test_samples_are_those_of_a_folder(root: Path, url: str, tmp_path: Path, own_cache: Path, streams: bool) -> None:
    local, far = synth_kd_blend(root), synth_kd_blend(url)
    assert far.prefixes[0] == f"{url}/train/shard_00_tokens"
    assert far.weights == local.weights
    assert synth_kd_blends(url)[0] == far
    assert fetched(own_cache) == different_bytes(root.rglob("*.idx"))
    options = streaming(tmp_path) if streams else {"path_to_cache": str(tmp_path / "indices")}
    for one, other in zip(local.prefixes, far.prefixes, strict=True):
        expected = plain(dataset(one))
        opened = dataset(other, **options)
        assert plain(opened) == expected
        assert plain(pickle.loads(pickle.dumps(opened))) == expected
    tokens = different_bytes(root.rglob("*_tokens.bin")) if streams else 0
    assert fetched(own_cache) == different_bytes(root.rglob("shard_*.???")) - tokens


def test_what_megatron_cannot_stream_is_said(url: str, tmp_path: Path) -> None:
    prefix = synth_kd_blend(url).prefixes[0]
    with pytest.raises(ConfigError, match="mmap_bin_files=False"):
        dataset(prefix, **{**streaming(tmp_path), "mmap_bin_files": True})
    with pytest.raises(ConfigError, match="need a path_to_cache"):
        dataset(prefix, **{**streaming(tmp_path), "path_to_cache": None})
    with pytest.raises(ConfigError, match="ends in _tokens"):
        dataset(prefix.removesuffix("_tokens"), **streaming(tmp_path))
    with pytest.raises(RemoteError, match=r"nowhere: cannot open the dataset: it has no manifest.json"):
        dataset(f"{url}/nowhere/train/shard_00_tokens")
    with pytest.raises(FormatError, match="teacher_logprob"):
        dataset(prefix, "teacher_logprob", **streaming(tmp_path))


def test_sidecars_of_another_shard_are_refused_before_tokens_are_streamed(root: Path, url: str, tmp_path: Path) -> None:
    broken = write_root(tmp_path / "broken")
    kd_sets.swapped(broken / "train")
    listed(broken)
    put_folder(broken, f"{url}-broken")
    with pytest.raises(FormatError, match=r"shard_00_tokens\.bin: .*tokens or sidecars are shifted, swapped"):
        dataset(f"{url}-broken/train/shard_00_tokens", **streaming(tmp_path))
