"""Under faults of the store no wrong byte is read or written, nothing hangs, and whoever gives up says it once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.files import stores
from chatmill.files.stores import RemoteError
from chatmill.prove.verify import verify
from tests.compiler.builds import CHATML, chats, write_jsonl
from tests.files.small_store import counts, small_store


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(stores, "LONGEST_WAIT", 0.05)


def run_under_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, shares: float, least: int) -> int:
    """Build and read again and again until there were enough faults; give how often somebody gave up."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", chats(30, seed))
    recipe: dict[str, Any] = {"sources": [{"path": "in.jsonl"}], **CHATML, "shard_bytes": 6000}
    run_build(recipe, "local", workers=0)
    gave_up = 0
    with small_store(seed=seed, share=shares) as bucket:
        for attempt in range(400):
            url = f"{bucket}/v{attempt}"
            for _ in range(8):
                try:
                    run_build(recipe, url, workers=0, take_over=True)
                    break
                except RemoteError:
                    gave_up += 1
            else:
                pytest.fail("eight times in a row")
            monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / f"cache{attempt}"))
            try:
                wrong = verify(url).differences
            except RemoteError:
                gave_up += 1
            else:
                assert not wrong
            if sum(counts()["faults"].values()) >= least:
                break
        assert sum(counts()["faults"].values()) >= least
        monkeypatch.setenv("CHATMILL_STORE_RETRIES", "30")
        assert_same_patiently(url, tmp_path / "local")
    return gave_up


def assert_same_patiently(url: str, folder: Path) -> None:
    manifest = json.loads(stores.read_object(f"{url}/manifest.json"))
    for name, record in json.loads((folder / "manifest.json").read_bytes())["files"].items():
        assert manifest["files"][name] == record
        assert stores.read_object(f"{url}/{name}") == (folder / name).read_bytes()


def test_a_build_and_a_reader_stand_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_under_faults(tmp_path, monkeypatch, 1, shares=0.1, least=10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without a receipt")
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "3")
    run_under_faults(tmp_path, monkeypatch, seed, shares=0.15, least=100)


def test_a_store_that_is_silent_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_STORE_TIMEOUT", "0.3")
    monkeypatch.setenv("CHATMILL_STORE_RETRIES", "1")
    with small_store(delay=30) as bucket:
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"manifest.json: cannot read: .*\(tried 2 times\)"):
            stores.read_object(f"{bucket}/built/manifest.json")
        assert time.monotonic() - began < 20
