"""Builds and readers in Google's store and Azure's: the same bytes, exclusive creation, one error each.

Azure's emulator comes from npm (`make test-azure` installs it); Google's store is a small server of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from urllib.request import urlopen

import fsspec
import pytest

from chatmill.compiler.run import Outcome, run_build
from chatmill.errors import ConfigError
from chatmill.files import stores
from chatmill.files.stores import RemoteError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.prove.verify import verify
from tests.cli.run import here
from tests.compiler.builds import chats, write_jsonl
from tests.files.stores_for_tests import ROOT, server_process
from tests.files.test_builds import RECIPE, assert_same

AZURITE = ROOT / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and key that all emulators have."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "1")


@contextlib.contextmanager
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import gcsfs

    with server_process("tests.files.gs_server") as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield "gs://team"
        gcsfs.GCSFileSystem.clear_instance_cache()


@contextlib.contextmanager
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import adlfs

    assert AZURITE.exists(), f"{AZURITE} is missing: run `make test-azure`"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [str(AZURITE), "--blobPort", str(port), "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    with subprocess.Popen([*command, "--skipApiVersionCheck"], stdout=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < until
                time.sleep(0.1)
            endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
            said = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said)
            adlfs.AzureBlobFileSystem.clear_instance_cache()
            fsspec.filesystem("az").mkdir("team")
            yield "az://team"
            adlfs.AzureBlobFileSystem.clear_instance_cache()
        finally:
            server.kill()


def assert_builds_and_reads(bucket: str, home: Path) -> None:
    """Build, verify, read and diff at a URL and in a folder; refuse another builder and what is not there."""
    write_jsonl(home / "in.jsonl", [*chats(30), {"messages": "none"}])
    run_build(RECIPE, home / "built", workers=0, base=home)
    url = f"{bucket}/chats/v1"

    def second() -> None:
        with pytest.raises(ConfigError, match="another build is at work there"):
            run_build(RECIPE, url, workers=0, base=home)

    assert run_build(RECIPE, url, workers=0, base=home, on_start=second).outcome is Outcome.BUILT
    assert_same(url, home / "built")
    assert run_build(RECIPE, url, workers=0, base=home).outcome is Outcome.ALREADY_BUILT
    assert not verify(url).differences
    for command in (["stats"], ["inspect", "-n", "1"]):
        said = [here(command[0], place, *command[1:]).stdout.replace(place, "") for place in (str(home / "built"), url)]
        assert said[0] == said[1]
    assert here("diff", str(home / "built"), url).returncode == 0
    config = {"batch_size": 2, "block_size": 64, "pad_token_id": 0, "order": "windows", "window": 3}
    local, far = (GPTEpisodeDataLoader(config, dataset_dir=place) for place in (home / "built", url))
    assert [local.get_batch()[0].tolist() for _ in range(5)] == [far.get_batch()[0].tolist() for _ in range(5)]
    large = home / "large.bin"
    large.write_bytes(bytes(range(256)) * (6 << 12))
    with mock.patch.object(stores, "read_range", None):
        from chatmill.files.builds import RemoteBuild

        RemoteBuild(url=bucket).put_files([(large, "large.bin")])
    assert stores.read_range(f"{bucket}/large.bin", 5 << 20, (5 << 20) + 300) == large.read_bytes()[5 << 20 :][:300]
    with pytest.raises(RemoteError, match=r"none: cannot open the dataset"):
        verify(f"{bucket}/none")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_google_is_asked_for_exclusive_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with google(monkeypatch) as bucket:
        assert_builds_and_reads(bucket, tmp_path)
        with urlopen(f"{os.environ['STORAGE_EMULATOR_HOST']}/-/asked") as answer:
            asked = Counter(json.load(answer))
    chunks = len((tmp_path / "built" / "chunks.jsonl").read_bytes().splitlines())
    assert asked["POST upload exclusive"] >= chunks + 2, "receipts, manifest and lock"
    assert not [name for name in asked if "exclusive" in name and not name.startswith("POST upload")]


@pytest.mark.azure
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with azure(monkeypatch) as bucket:
        assert_builds_and_reads(bucket, tmp_path)
        with pytest.raises(RemoteError, match="there is no such bucket"):
            verify("az://nosuch/chats")
        with pytest.raises(RemoteError, match="there is no such bucket"):
            run_build(RECIPE, "az://nosuch/chats", workers=0, base=tmp_path)
    for path in tmp_path.rglob("*.json"):
        assert KEY not in path.read_text()
