"""Everything that Chatmill keeps on a machine is below one folder, which variables move."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.core.cache_folders import chatmill_cache, user_cache
from chatmill.tokenizer.hub_cache import hub_folder

VARIABLES = ("XDG_CACHE_HOME", "CHATMILL_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_without_variables_caches_are_in_the_home_folder(home: Path) -> None:
    assert user_cache() == home / ".cache"
    assert chatmill_cache() == home / ".cache" / "chatmill"
    assert hub_folder() == home / ".cache" / "huggingface" / "hub"


def test_a_tilde_in_a_variable_is_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert chatmill_cache() == home / "caches" / "chatmill"
    assert hub_folder() == home / "caches" / "huggingface" / "hub"
    monkeypatch.setenv("CHATMILL_CACHE", "~/mill")
    assert chatmill_cache() == home / "mill"
    assert hub_folder() == home / "caches" / "huggingface" / "hub"
